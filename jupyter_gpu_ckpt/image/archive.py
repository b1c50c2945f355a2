"""The cold tier: the content of an image nobody needed for long lies elsewhere, its manifest and seal stay.

Such an image is listed, adopted and woken like any other; a wake first brings its content back and proves it.

Sending takes long, and a wake does not wait for it: it needs nothing but to read an image, which never changes, so it
is done without the image's lease.  Whoever takes the lease meanwhile has won, and what was sent is given up.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from ..errors import GpuCkptError, ImageArchived, ImageBusy, ImageNotFound
from . import draft, leases
from .disk import flush, mapped
from .image import CRIU_DIRECTORY, Image
from .remote import Progress, Remote
from .store import Store

#: Seconds to wait for the end of a wake, to know what is to become of what was sent.
PATIENCE = 600.0


def archive(image: Image, store: Store, remote: Remote, progress: Progress | None = None) -> int:
    """Send the content of an image away; the bytes freed here.

    A crash in the middle leaves all of it in one of the two places at least; what was sent is not sent again.  There it
    is one that no other host can pull.  Raises `ImageBusy` when its kernel lives or comes back meanwhile,
    `ImageNotFound`, what `Store.check` raises, and as `Remote.push`.
    """
    leases.require_unclaimed(image.path)
    store.check(image)
    try:
        remote.send(image, progress)
        remote.complete(image, claimed=True)
        aside = _set_aside(image, store)
    except BaseException as error:
        if isinstance(error, ImageBusy | ImageNotFound) or not image.path.is_dir():
            with contextlib.suppress(GpuCkptError):
                _give_up(image, remote)
            raise ImageBusy("The image's kernel came back meanwhile.", image=image.id) from error
        raise
    shutil.rmtree(aside, ignore_errors=True)
    return sum(entry.bytes for name, entry in image.manifest.files.items() if name.startswith(f"{CRIU_DIRECTORY}/"))


def _set_aside(image: Image, store: Store) -> Path:
    """From now on the content is elsewhere: a moment's work, for which the lease is held.  Where it lies still here."""
    aside = store.root / f"{draft.PREFIX}{image.id}-content"  # what a crash leaves of it is swept
    with image.lease(), mapped(store.root):
        if image.archived:  # by a server of another host, which sent the same
            raise ImageArchived("The content of the image is in the cold tier.", image=image.id)
        image.mark_archived(True)
        image.criu_directory.rename(aside)
        image.criu_directory.mkdir(mode=0o700)
        image.criu_directory.chmod(0o700)  # whatever the umask
    return aside


def _give_up(image: Image, remote: Remote) -> None:
    """Remove what was sent, if nobody relies on it; else, and if a wake takes too long, it stays.

    Only who has the lease can know: whoever has it now may be bringing this very content back.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(leases.hold(image.path, remove=True, patience=PATIENCE))
        except ImageNotFound:
            pass
        else:
            if image.archived:
                return
        if remote.claimed(image.id) or not remote.has(image.id):  # else somebody has pushed it there
            remote.remove(image.id)


def bring_back(image: Image, store: Store, remote: Remote, progress: Progress | None = None) -> None:
    """The reverse; the caller holds the image's lease.

    After failure it is archived as before; the next try goes on from where a fetch broke off.  Raises `ImageArchived`
    when the image is not there any more, and as `Remote.pull`.
    """
    try:
        with remote.fetched(image.id, store, progress=progress) as staged:
            image.criu_directory.mkdir(mode=0o700, exist_ok=True)  # a crash may have come just before it was made
            for name in image.manifest.files:
                if name.startswith(f"{CRIU_DIRECTORY}/"):
                    (staged / name).replace(image.path / name)
            flush(image.criu_directory)
    except ImageNotFound as error:
        raise ImageArchived("The image's content is not where it was archived.", image=image.id) from error
    image.mark_archived(False)
    with contextlib.suppress(GpuCkptError):  # it is only a copy from here on
        remote.remove(image.id)


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
