"""An image of another kernel, made from an image: the state of a branch before it has run.

It has the same files, copied (`files.clone`) or shared by links, and another kernel's id and session.  So from there on
a branch is any kernel that sleeps in its image: a restore of it may fail, or be killed, and is tried again.  What the
two kernels must not share is separated when the branch is restored (`criu.exclusive`, and the agent's `identity`).

The source is not changed: its lease is acquired for as long as the copies take, so that nobody removes it meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..criu import images as image_files
from ..errors import ImageArchived
from ..files.disk import mapped_errors
from . import kept_files, layout, lease, links, verify
from .draft import Draft
from .image import Image
from .save_point import SavePoint
from .store import Store

#: Seconds to wait for others that copy or restore the source.
_TIMEOUT = 120.0
#: Bytes that copies of files may take in an image that had none.
_MOST_KEPT = 256 << 20


@dataclass(frozen=True)
class NewKernel:
    """The kernel that an image is made for.

    ``write_session``: writes its session into the directory of the image.  ``reseed``: whether the user's generators of
    random numbers are to differ from the source's.  ``is_template``: whether it is a new notebook's, with an
    environment and a working directory of its own, and not one that continues from where the source was.
    """

    kernel_id: str
    kernel_name: str
    write_session: Callable[[Path], None]
    reseed: bool = False
    is_template: bool = False

    def origin(self, source: Image) -> dict[str, Any]:
        """Return the manifest's facts about where the image comes from."""
        kernel_id = source.manifest.kernel_id
        return {"image": source.id, "kernel_id": kernel_id, "reseed": self.reseed, "is_template": self.is_template}


@contextlib.contextmanager
def turn_to_restore(store: Store, image: Image) -> Iterator[None]:
    """Wait until neither the same image nor a branch of it is restored, where CRIU makes or removes files by names.

    The files that the restore in the body needs are there then, also if one before has removed them.  Raises
    `StoreUnwritable` after `_TIMEOUT` seconds.
    """
    source, made = str(image.manifest.branched_from.get("image", "")), links.made(image.manifest)
    if not (made or image_files.ghost_names(image.criu_directory)):
        yield
        return
    path = layout.mark(store.root / (source or image.id), layout.TURN)
    lock = FileLock(path, timeout=_TIMEOUT, mode=0o600, thread_local=False)
    with mapped_errors(store.root):
        lock.acquire()
    if not source:
        try:
            yield
        finally:
            lock.release()
        return
    sleeps = any(Path(name).exists() for name in made)  # the source's kernel, in the source
    try:
        links.put_back(image.manifest)
        yield
    finally:
        # Of a save point they lie aside: its kernel's next dump makes links of the same names.
        (links.put_back if sleeps else links.keep)(image.manifest)
        lock.release()


def copy(store: Store, source: Image, kernel: NewKernel, keep_as: SavePoint | None = None) -> Image:
    """Make and return an image of ``kernel`` from ``source``.  After failure nothing is left of it.

    ``keep_as``: the image is to stay when a kernel has started from it, as often as it likes: so its files of pages are
    whole, and it has copies of the files in use: those of the source, or if it is no save point, new ones (an encrypted
    image gets none).

    Raises `StoreShared`, `ImageArchived`, `ImageForged`, `ImageDamaged`, `ImageNotFound`, `ImageBusy`, `NoSpace`,
    `QuotaExceeded`, `StoreUnwritable`, `KeyUnusable`.
    """
    store.require_private()
    if source.archived:
        hint = "Wake its kernel once, or pull the image: its content is fetched then."
        raise ImageArchived("The content of the image is in the cold tier.", hint=hint, image=source.id)
    # As for a removal: also where the kernel of the image lives, for it is only read.
    with lease.acquire(source.path, remove=True, timeout=_TIMEOUT):
        manifest = verify.require_sealed(source.path, store.keys)
        verify.require_tree(source.path, manifest)
        links.secure(manifest)
        draft = store.begin(kernel.kernel_id, manifest.bytes, copies=True)
        try:
            draft.copy(source, whole=keep_as is not None)
            point = {**keep_as.as_dict(), "files": _kept(store, source, draft)} if keep_as is not None else None
            links.share(manifest, draft.id)
            kernel.write_session(draft.path)
            return draft.publish(
                replace(
                    manifest,
                    kernel_id=kernel.kernel_id,
                    kernel_name=kernel.kernel_name,
                    created=time.time(),
                    generation=store.generations.next_generation(kernel.kernel_id, 0),
                    # Others have them, and the branch gets others; shared memory is the source's to remove.
                    report={**manifest.report, "tracked": []},
                    fingerprint={**manifest.fingerprint, "ports": [], "sockets": []},
                    branched_from=kernel.origin(source),
                    save_point=point,
                )
            )
        except BaseException:
            draft.discard()
            raise


def _kept(store: Store, source: Image, draft: Draft) -> dict[str, Any]:
    """Return the kept files of a copy, by path, as JSON objects; copies those of a source that has none.

    Raises `StoreUnwritable`, `NoSpace`.
    """
    if source.manifest.save_point is not None or source.manifest.encryption:
        return dict((source.manifest.save_point or {}).get("files") or {})
    directory = draft.criu_directory / layout.KEPT
    with mapped_errors(store.root):
        found = kept_files.keep(source.manifest.fingerprint.get("files", {}), [], directory, _MOST_KEPT, store.free())
        return kept_files.hashed(found, directory)
