"""The cold tier: the content of an image nobody needed for long lies elsewhere, its manifest and seal stay.

Such an image is listed, adopted and woken like any other; a wake first brings its content back and proves it.

Sending takes long, and a wake does not wait for it: it needs nothing but to read an image, which never changes, so it
is done without the image's lease.  Whoever takes the lease meanwhile has won.  What was sent then stays for as long as
the image does, which no other host can pull; nobody holds a lease while the other side is asked for anything.

A mark beside the image says that something of it may lie there, from before the first byte until nothing does.  It
outlives the image: what a sender that was killed had sent, and what was archived of an image that was removed, goes in
some later round (`sweep`).  Limits: the content of an image that was pushed away while it was being sent stays there,
for it may be its new owner's by now; and so does what was sent to a URL that is not the cold tier's any more.
"""

from __future__ import annotations

import contextlib
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


def archive(image: Image, store: Store, remote: Remote, progress: Progress | None = None) -> int:
    """Send the content of an image away; the bytes freed here.

    A crash in the middle leaves all of it in one of the two places at least; what was sent is not sent again.  There it
    is one that no other host can pull.  Raises `ImageBusy` when its kernel lives or comes back meanwhile,
    `ImageNotFound`, what `Store.check` raises, and as `Remote.push`.
    """
    lease.require_unclaimed(image.path)
    store.check(image)
    with mapped_errors(store.root):
        token = image.mark_sent()
    try:
        remote.send(image, progress, token)
        remote.complete(image, token)
        aside = _set_aside(image, store)
    except BaseException as error:
        if isinstance(error, ImageBusy | ImageNotFound) or _is_gone(image.path):
            if _is_gone(image.path):  # else it may sleep on, and what was sent is of use
                with contextlib.suppress(GpuCkptError):  # the mark stays
                    _clear(image.id, store, remote)
            raise ImageBusy("The image's kernel came back meanwhile.", image=image.id) from error
        raise
    shutil.rmtree(aside, ignore_errors=True)
    return sum(entry.bytes for name, entry in image.manifest.files.items() if name.startswith(f"{layout.CRIU}/"))


def _set_aside(image: Image, store: Store) -> Path:
    """From now on the content is elsewhere: a moment's work, for which the lease is held.  Where it lies still here."""
    aside = store.root / f"{layout.DRAFT}{image.id}-content"  # what a crash leaves of it is swept
    with image.lease(), mapped_errors(store.root):
        if image.archived:  # by a server of another host, which sent the same
            raise ImageArchived("The content of the image is in the cold tier.", image=image.id)
        image.mark_archived(True)
        image.criu_directory.rename(aside)
        image.criu_directory.mkdir(mode=0o700)
        image.criu_directory.chmod(0o700)  # whatever the umask
    return aside


def fetch_content(image: Image, store: Store, remote: Remote, progress: Progress | None = None) -> None:
    """The reverse; the caller holds the image's lease.

    After failure it is archived as before; the next try goes on from where a fetch broke off.  Raises `ImageArchived`
    when the image is not there any more, and as `Remote.pull`.
    """
    try:
        with remote.fetched(image.id, store, progress=progress) as staged:
            image.criu_directory.mkdir(mode=0o700, exist_ok=True)  # a crash may have come just before it was made
            for name in image.manifest.files:
                if name.startswith(f"{layout.CRIU}/"):
                    place = image.path / name
                    place.parent.mkdir(mode=0o700, exist_ok=True)
                    (staged / name).replace(place)
            for directory in (
                *(path for path in image.criu_directory.iterdir() if path.is_dir()),
                image.criu_directory,
            ):
                flush(directory)
    except ImageNotFound as error:
        raise ImageArchived("The image's content is not where it was archived.", image=image.id) from error
    image.mark_archived(False)
    with contextlib.suppress(GpuCkptError, OSError):  # it is only a copy from here on, and its mark stays
        remote.remove(image.id)
        image.unmark_sent()


def sweep(store: Store, remote: Remote) -> Iterator[tuple[str, GpuCkptError | None]]:
    """Remove what lies there of images that are gone: each id that is done with, or why it has to wait.

    For one process of a store at a time, which sends nothing meanwhile.
    """
    for id in remnants(store):
        try:
            _clear(id, store, remote)
        except GpuCkptError as error:
            yield id, error
        else:
            yield id, None


def remnants(store: Store) -> list[str]:
    """The images that are gone, and of which something may lie there."""
    marks = sorted(mark.name for mark in store.root.glob(f".*{layout.SENT}"))
    return [id for id in (name[1:].removesuffix(layout.SENT) for name in marks) if _is_gone(store.root / id)]


def _is_gone(path: Path) -> bool:
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:  # a file server that is away
        pass
    return False


def _clear(id: str, store: Store, remote: Remote) -> None:
    """The image is gone: remove what was sent of it, and then the mark."""
    mark = layout.mark(store.root / id, layout.SENT)
    try:
        # Read when the image is known to be gone: where the directory itself has gone away there is no mark either.
        token = str(mark.readlink())
    except OSError:
        return
    remote.discard(id, token)
    mark.unlink(missing_ok=True)


def archive_old(store: Store, remote: Remote, after: float) -> Iterator[tuple[Image, int | GpuCkptError]]:
    """Archive every image that is `due`, one after the other: each with the bytes freed, or why it has to wait."""
    for image in due(store, after):
        try:
            yield image, archive(image, store, remote)
        except GpuCkptError as error:
            yield image, error


def due(store: Store, after: float) -> list[Image]:
    """The images that were made more than ``after`` seconds ago, and are still here."""
    return [image for image in store.images() if not image.archived and time.time() - image.manifest.created > after]
