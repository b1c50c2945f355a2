"""Whether an image fits this node: the facts of both, for `node.match`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ..criu import images
from ..cuda.gpus import Gpus, gpu_mapping
from ..errors import CudaError, UnsupportedFile
from ..image import layout
from ..image.manifest import Manifest
from ..image.store import Store
from ..node.fingerprint import fingerprint, inspect_node
from ..node.match import Mismatch, match
from .preflight import available_memory


class EngineProtocol(Protocol):
    """What is needed of a node (`context.Engine`)."""

    criu_version: str
    gpus: Gpus
    store: Store


def dump_fingerprint(
    directory: Path,
    node: EngineProtocol,
    *,
    cuda: bool,
    device_bytes: Mapping[str, int],
    swapped_bytes: int,
    sockets: Iterable[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the fingerprint of the dump in ``directory``, just made on this node.  Raises `ImageFormat`, `CudaError`.

    ``swapped_bytes``: device memory that a restore puts into the capsule's own memory.  ``sockets``: unix sockets that
    a restore creates again, by ``path``, ``inode`` and ``mtime``.
    """
    return fingerprint(
        files=map(vars, images.regular_files(directory)),
        ports=map(dataclasses.asdict, images.ports(directory)),
        sockets=sockets,
        criu=node.criu_version,
        hashes=node.store.hashes,
        gpus=_gpus(node) if cuda else [],
        cuda=cuda,
        device_bytes=device_bytes,
        memory=swapped_bytes + sum(path.stat().st_blocks * 512 for path in directory.glob(layout.PAGES)),
    )


def require_restorable(directory: Path) -> None:
    """Raise `UnsupportedFile` if the dump in ``directory`` has an open file that no restore could open."""
    if found := images.unrestorable(directory):
        more = f" and {len(found) - 1} more" if found[1:] else ""
        message = (
            f"The kernel holds {found[0]}{more}, which belongs to one of its threads or is its working directory: it "
            "could not be opened again."
        )
        raise UnsupportedFile(message, culprit=found[0], files=found)


def mismatches(
    manifest: Manifest,
    node: EngineProtocol,
    *,
    accept_changed_files: bool = False,
    gpu_map: Mapping[str, str] | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> list[Mismatch]:
    """Return what this node lacks of the node that made the image.  GPUs are inspected only if the image needs them.

    Files whose identity has changed are read, which may take long; after ``cancelled`` the result means nothing.
    Raises `CudaError`; `ValueError` for a ``gpu_map`` with an unknown GPU.
    """
    wanted, free = manifest.fingerprint, node.store.free()
    unencrypted = manifest.encryption is None and not node.store.vault.encrypts
    if unencrypted and free >= manifest.swapped_bytes:  # the disk takes what host memory is too small for
        wanted = {**wanted, "memory": max(0, wanted.get("memory", 0) - manifest.swapped_bytes)}
    gpus = _gpus(node) if manifest.cuda else []
    here = inspect_node(
        wanted,
        criu=node.criu_version,
        gpus=gpus,
        memory=available_memory(),
        disk=free,
        hashes=node.store.hashes,
        cancelled=cancelled,
    )
    node.store.hashes.begin()  # to save what had to be read
    mapping: Mapping[str, str] | None = None
    if manifest.cuda:
        try:
            mapping = gpu_mapping(manifest.node_gpus, [gpu["uuid"] for gpu in gpus], gpu_map)
        except CudaError:
            mapping = gpu_map  # fewer GPUs than there were, which is one of the mismatches
    return match(wanted, here, accept_changed_files=accept_changed_files, gpu_map=mapping)


def _gpus(node: EngineProtocol) -> list[dict[str, Any]]:
    return [dataclasses.asdict(gpu) for gpu in node.gpus.list()]
