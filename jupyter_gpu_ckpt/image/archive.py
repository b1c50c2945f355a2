"""The cold tier: the content of an image nobody needed for long lies elsewhere, its manifest and seal stay.

Such an image is listed, adopted and woken like any other; a wake first brings its content back and proves it.
"""

from __future__ import annotations

import contextlib
import time

from ..errors import GpuCkptError, ImageArchived, ImageNotFound
from .disk import flush
from .image import CRIU_DIRECTORY, Image
from .remote import Progress, Remote
from .store import Store


def archive(image: Image, store: Store, remote: Remote, progress: Progress | None = None) -> int:
    """Send the content of an image away; the bytes freed here.

    A crash in the middle leaves all of it in one of the two places at least.  Raises `ImageBusy` when a restore is
    using it, what `Store.check` raises, and as `Remote.push`.
    """
    with image.lease():
        store.check(image)
        remote.send(image, progress, prove=True)
        image.mark_archived(True)
        freed = 0
        for name, entry in image.manifest.files.items():
            if name.startswith(f"{CRIU_DIRECTORY}/"):
                (image.path / name).unlink(missing_ok=True)
                freed += entry.bytes
    return freed


def bring_back(image: Image, store: Store, remote: Remote, progress: Progress | None = None) -> None:
    """The reverse; the caller holds the image's lease.

    After failure it is archived as before; the next try goes on from where a fetch broke off.  Raises `ImageArchived`
    when the image is not there any more, and as `Remote.pull`.
    """
    try:
        with remote.fetched(image.id, store, progress=progress) as staged:
            for name in image.manifest.files:
                if name.startswith(f"{CRIU_DIRECTORY}/"):
                    (staged / name).replace(image.path / name)
            flush(image.criu_directory)
    except ImageNotFound as error:
        raise ImageArchived("The image's content is not where it was archived.", image=image.id) from error
    image.mark_archived(False)
    with contextlib.suppress(GpuCkptError):  # it is only a copy from here on
        remote.remove(image.id)


def archive_old(store: Store, remote: Remote, after: float) -> dict[str, int]:
    """Archive every image that was made more than ``after`` seconds ago; bytes freed by id.

    One that cannot be archived now is left as it is, for the next time.
    """
    freed = {}
    for image in store.images():
        if not image.archived and time.time() - image.manifest.created > after:
            with contextlib.suppress(GpuCkptError):
                freed[image.id] = archive(image, store, remote)
    return freed
