"""An image of another kernel, made from an image: the state of a branch before it has run.

It has the same files, copied (`files.clone`), and another kernel's id and session.  So from there on a branch is any
kernel that sleeps in its image: a restore of it may fail, or be killed, and is tried again.  What the two kernels must
not share is separated when the branch is restored (`criu.exclusive`, and the agent's `identity`).

The source is not changed: its lease is acquired for as long as the copies take, so that nobody removes it meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ImageArchived
from ..node.facts import file_facts
from . import kept_files, lease, links, verify
from .image import Image
from .save_point import SavePoint
from .store import Store

#: What a link to a file leaves as it is.
_UNCHANGED = ("device", "inode", "size", "mtime", "mode")

#: Seconds to wait for others that copy or restore the source.
_TIMEOUT = 120.0


@dataclass(frozen=True)
class NewKernel:
    """The kernel that an image is made for.

    ``write_session``: writes its session into the directory of the image.  ``reseed``: whether the user's generators of
    random numbers are to differ from the source's.  ``is_template``: whether it is a new notebook's, with an
    environment and a working directory of its own, and not one that goes on from where the source was.
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


def _files(source: Image) -> dict[str, Any]:
    """Return the files of the source's fingerprint; those that save points have linked, with the time of the last link.

    A link changes a file's time of its last change of any kind, and nothing else.
    """
    files = dict(source.manifest.fingerprint.get("files", {}))
    for path, kept in kept_files.of_image(source).items():
        was, now = files.get(path), file_facts(path) if kept.link else None
        if was is not None and now is not None and all(was.get(name) == now[name] for name in _UNCHANGED):
            files[path] = {**was, "ctime": now["ctime"]}
    return files


def tidy(source: Image) -> None:
    """Put the links of a save point aside again that `copy` has made for a restore, once that has ended."""
    if source.is_save_point:
        links.keep(source.manifest)


def copy(store: Store, source: Image, kernel: NewKernel, keep_as: SavePoint | None = None) -> Image:
    """Make and return an image of ``kernel`` from ``source``.  After failure nothing is left of it.

    ``keep_as``: the image is to stay when a kernel has started from it.

    Raises `ImageArchived`, `ImageForged`, `ImageDamaged`, `ImageNotFound`, `ImageBusy`, `NoSpace`, `QuotaExceeded`,
    `StoreUnwritable`, `KeyUnusable`.
    """
    if source.archived:
        hint = "Wake its kernel once, or pull the image: its content is fetched then."
        raise ImageArchived("The content of the image is in the cold tier.", hint=hint, image=source.id)
    # As for a removal: also where the kernel of the image lives, for it is only read.
    with lease.acquire(source.path, remove=True, timeout=_TIMEOUT):
        manifest = verify.require_sealed(source.path, store.keys)
        verify.require_tree(source.path, manifest)
        links.secure(manifest)
        links.put_back(manifest)
        draft = store.begin(kernel.kernel_id, manifest.bytes)
        try:
            draft.copy(source)
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
                    fingerprint={**manifest.fingerprint, "files": _files(source), "ports": [], "sockets": []},
                    branched_from=kernel.origin(source),
                    save_point=keep_as.as_dict() if keep_as is not None else None,
                )
            )
        except BaseException:
            draft.discard()
            raise
