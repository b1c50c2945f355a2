"""The cold tier: the content of an image that was not needed for long lies elsewhere, its manifest and seal stay here.

Such an image is listed, attached and woken as any other; a wake first fetches its content and verifies it.

Content is sent without the image's lease, so that no wake waits for it: an image never changes.  A wake that acquires
the lease meanwhile wins; what was sent stays for as long as the image does, and no other host can pull it.  No request
to the other side is made under the lease.

A mark beside the image says that parts of it may lie there, from before the first byte until none does.  It outlives
the image: what a killed sender has sent, and the content of archived images that were removed, goes in a later `sweep`.
Limits: the content of an image that was pushed away while it was being sent stays there, for its new owner may have it;
and so does what was sent to a URL that is not the cold tier's any more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import GpuCkptError, ImageArchived, ImageBusy, ImageNotFound
from ..files.atomic import flush
from ..files.disk import mapped_errors
from ..image import layout, lease
from ..image.image import Image
from ..image.store import Store
from .remote import Progress, Remote


def archive(image: Image, store: Store, remote: Remote) -> int:
    """Send the content of an image to the cold tier and remove it here; return the bytes freed.

    After a crash all of it is in one of the two places at least; what was sent is not sent again.  Raises `ImageBusy`
    when its kernel lives or wakes meanwhile, `ImageNotFound`, and as `Store.check` and `Remote.push`.
    """
    lease.require_unclaimed(image.path)
    store.check(image)
    with mapped_errors(store.root):
        token = image.mark_sent()
    try:
        remote.send(image, token=token)
        remote.complete(image, token)
        content = _detach_content(image, store)
    except BaseException as error:
        if isinstance(error, ImageBusy | ImageNotFound) or _is_removed(image.path):
            if _is_removed(image.path):  # else it may sleep on, and what was sent is of use
                with contextlib.suppress(GpuCkptError):  # the mark stays
                    _discard(image.id, store, remote)
            raise ImageBusy("The image's kernel came back meanwhile.", image=image.id) from error
        raise
    shutil.rmtree(content, ignore_errors=True)
    return sum(entry.bytes for name, entry in image.manifest.files.items() if name.startswith(f"{layout.CRIU}/"))


def _detach_content(image: Image, store: Store) -> Path:
    """Mark the image as archived and rename its content, under its lease; return the new path, to be deleted."""
    detached = store.root / f"{layout.DRAFT}{image.id}-content"  # a sweep removes it after a crash
    with image.lease(), mapped_errors(store.root):
        if image.archived:  # by a server of another host, which sent the same
            raise ImageArchived("The content of the image is in the cold tier.", image=image.id)
        image.mark_archived(True)
        image.criu_directory.rename(detached)
        image.criu_directory.mkdir(mode=0o700)
        image.criu_directory.chmod(0o700)  # whatever the umask
    return detached


def fetch_content(image: Image, store: Store, remote: Remote, progress: Progress | None = None) -> None:
    """Fetch the content of an archived image whose lease the caller has.

    After failure it is archived as before; the next try continues where a fetch broke off.  Raises `ImageArchived` when
    the content is not there any more, and as `Remote.pull`.
    """
    try:
        with remote.fetched(image.id, store, progress=progress) as fetched:
            image.criu_directory.mkdir(mode=0o700, exist_ok=True)  # a crash may have come just before it was made
            for name in image.manifest.files:
                if name.startswith(f"{layout.CRIU}/"):
                    path = image.path / name
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    (fetched / name).replace(path)
            for directory, _, _ in os.walk(image.criu_directory, topdown=False):
                flush(Path(directory))
    except ImageNotFound as error:
        raise ImageArchived("The image's content is not where it was archived.", image=image.id) from error
    image.mark_archived(False)
    with contextlib.suppress(GpuCkptError, OSError):  # it is only a copy from here on, and its mark stays
        remote.remove(image.id)
        image.unmark_sent()


def sweep(store: Store, remote: Remote) -> Iterator[tuple[str, GpuCkptError | None]]:
    """Discard what lies there of removed images; yield ids and errors.  For one process, which sends nothing then."""
    for id in removed(store):
        try:
            _discard(id, store, remote)
        except GpuCkptError as error:
            yield id, error
        else:
            yield id, None


def removed(store: Store) -> list[str]:
    """Return the removed images of which parts may lie there."""
    ids = sorted(mark.name[1:].removesuffix(layout.SENT) for mark in store.root.glob(f".*{layout.SENT}"))
    return [id for id in ids if _is_removed(store.root / id)]


def _is_removed(path: Path) -> bool:
    try:
        path.lstat()
    except OSError as error:  # of another kind: the file server does not answer
        return isinstance(error, FileNotFoundError)
    return False


def _discard(id: str, store: Store, remote: Remote) -> None:
    """Discard what was sent of a removed image, and then the mark."""
    mark = layout.mark(store.root / id, layout.SENT)
    with contextlib.suppress(OSError):  # where the whole directory has gone, there is no mark either
        remote.discard(id, str(mark.readlink()))
        mark.unlink(missing_ok=True)


def archive_old(store: Store, remote: Remote, after: float) -> Iterator[tuple[Image, int | GpuCkptError]]:
    """Archive every image that is `due`; yield each with the bytes freed, or the error that made it fail."""
    for image in due(store, after):
        try:
            yield image, archive(image, store, remote)
        except GpuCkptError as error:
            yield image, error


def due(store: Store, after: float) -> list[Image]:
    """Return the images made more than ``after`` seconds ago whose content is here.

    Not those of templates: no wake would fetch them.
    """
    return [
        image
        for image in store.images()
        if not (image.archived or image.is_templates) and time.time() - image.manifest.created > after
    ]
