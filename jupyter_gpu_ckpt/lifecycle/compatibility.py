"""Facts of an image and of this node, for `node.match` to compare."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..cuda.gpus import Gpus, gpu_mapping
from ..errors import BadRequest, CudaError
from ..image.manifest import Manifest
from ..image.store import Store
from ..node.fingerprint import inspect_node, unhashed
from ..node.match import Mismatch, match
from .preflight import available_memory


def mismatches(
    manifest: Manifest,
    store: Store,
    gpus: Gpus,
    criu_version: str,
    *,
    accept_changed_files: bool = False,
    gpu_map: Mapping[str, str] | None = None,
    read: int = 0,
    cancelled: Callable[[], bool] = lambda: False,
) -> list[Mismatch]:
    """Return what this node lacks of the node that made the image.  GPUs are inspected only if the image needs them.

    ``read``: bytes of the image for which host memory is in use already.  Files whose identity has changed are read,
    which may take long; after ``cancelled`` the result means nothing.
    Raises `CudaError`; `BadRequest` for a ``gpu_map`` with an unknown GPU.
    """
    wanted, free = manifest.fingerprint, store.free()
    if (
        store.may_write_plain(manifest) and free >= manifest.swapped_bytes
    ):  # the disk takes what host memory is too small for
        wanted = {**wanted, "memory": max(0, wanted.get("memory", 0) - manifest.swapped_bytes)}
    present = [dataclasses.asdict(gpu) for gpu in gpus.list()] if manifest.cuda else []
    here = inspect_node(
        wanted,
        criu=criu_version,
        gpus=present,
        memory=available_memory() + read,
        disk=free,
        hashes=store.hashes,
        cancelled=cancelled,
    )
    store.hashes.begin()  # to save what had to be read
    if manifest.cuda:
        try:
            gpu_map = gpu_mapping(manifest.node_gpus, [gpu["uuid"] for gpu in present], gpu_map)
        except ValueError as error:
            raise BadRequest(f"The GPU mapping cannot be used: {error}.") from error
        except CudaError:
            pass  # fewer GPUs than there were, which is one of the mismatches
    gpu_map = gpu_map if manifest.cuda else None
    return match(wanted, here, image=manifest.id, accept_changed_files=accept_changed_files, gpu_map=gpu_map)


def file_mismatches(manifest: Manifest, store: Store, *, accept_changed_files: bool) -> list[Mismatch]:
    """Return the files that are not as they were, and nothing else that this node lacks.  See `mismatches`."""
    wanted: dict[str, Any] = {
        name: manifest.fingerprint[name] for name in ("files", "machine") if name in manifest.fingerprint
    }
    here = inspect_node(wanted, criu="", gpus=[], memory=0, disk=0, hashes=store.hashes)
    store.hashes.begin()
    return match(wanted, here, image=manifest.id, accept_changed_files=accept_changed_files)


def hash_meanwhile(manifest: Manifest, store: Store) -> None:
    """Hash files of a sleeping kernel that its image has no hash of, in the background, while they are unchanged.

    The server that made the image may have ended before it could.
    """
    with contextlib.suppress(KeyError, TypeError, AttributeError):  # the image is not verified yet
        store.hashes.queue(unhashed(manifest.fingerprint.get("files", {})))
    store.hashes.begin()
