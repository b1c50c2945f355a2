"""Whether an image fits this node: the facts of both, for `node.match`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

from ..cuda.gpus import Gpus, gpu_mapping
from ..errors import CudaError
from ..image.manifest import Manifest
from ..image.store import Store
from ..node.fingerprint import inspect_node
from ..node.match import Mismatch, match
from .preflight import available_memory


class EngineProtocol(Protocol):
    """What is needed of a node (`context.Engine`)."""

    criu_version: str
    gpus: Gpus
    store: Store


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
    gpus = [dataclasses.asdict(gpu) for gpu in node.gpus.list()] if manifest.cuda else []
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
    if manifest.cuda:
        with contextlib.suppress(CudaError):  # fewer GPUs than there were, which is one of the mismatches
            gpu_map = gpu_mapping(manifest.node_gpus, [gpu["uuid"] for gpu in gpus], gpu_map)
    return match(wanted, here, accept_changed_files=accept_changed_files, gpu_map=gpu_map if manifest.cuda else None)
