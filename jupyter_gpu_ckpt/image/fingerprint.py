"""The fingerprint of the node an image was made on: what another node must have in common with it.

A fingerprint is plain JSON, part of the manifest.  `fingerprint` takes it at the checkpoint, `look` answers the same
questions on the node the image is to be restored on, and `match` compares the two.

Sizes are bytes.  Keys: ``architecture``, ``kernel`` (the release of Linux), ``cpu`` (features), ``criu`` and ``glibc``
(versions), ``files`` and ``packages`` and ``mounts`` (see `node`), ``ports``, ``cuda`` (the version the driver knows;
empty: the kernel never used CUDA, and nothing about GPUs is asked), ``driver``, ``gpus``, ``device_bytes`` (by UUID),
``memory`` and ``disk``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import node

Facts = Mapping[str, Any]


def fingerprint(
    *,
    files: Iterable[Facts],
    ports: Iterable[Facts],
    criu: str,
    gpus: Sequence[Facts] = (),
    cuda: bool = False,
    device_bytes: Mapping[str, int] | None = None,
    memory: int = 0,
) -> dict[str, Any]:
    """Taken at a checkpoint, when the dump has been written.

    Parameters
    ----------
    files, ports:
        What the dump says the kernel holds: ``path``, ``size``, ``mode`` and ``open``; ``family``, ``type``,
        ``address`` and ``number``.
    criu:
        The version of CRIU that made the dump.
    gpus:
        All GPUs of the node in the driver's order: ``uuid``, ``name``, ``total``, ``driver`` and ``cuda``.
    cuda, device_bytes:
        Whether the kernel used CUDA, and how much memory it held by UUID.
    memory:
        How much host memory the restored kernel takes.
    """
    held = _held(files)
    points = node.mounts()
    used = {node.mount_of(path, points) for path in held} - {"/"}
    return {
        **_self(criu),
        "files": held,
        "packages": node.packages(held),
        "mounts": {point: points[point] for point in sorted(used)},
        "ports": [dict(port) for port in ports],
        "driver": str(gpus[0]["driver"]) if cuda and gpus else "",
        "cuda": str(gpus[0].get("cuda") or "unknown") if cuda and gpus else "",
        "gpus": [{key: gpu[key] for key in ("uuid", "name", "total")} for gpu in gpus] if cuda else [],
        "device_bytes": dict(device_bytes or {}),
        "memory": memory,
        "disk": memory,
    }


def look(wanted: Facts, *, criu: str, gpus: Sequence[Facts], memory: int, disk: int) -> dict[str, Any]:
    """What this node answers to the questions of a fingerprint.

    ``gpus`` with ``free`` bytes as well; ``memory`` and ``disk`` are what is free.
    """
    points = node.mounts()
    return {
        **_self(criu),
        "files": {path: node.file_facts(path) for path in wanted.get("files", {})},
        "packages": {directory: node.installed(directory) for directory in wanted.get("packages", {})},
        "mounts": {point: points.get(point, "") for point in wanted.get("mounts", {})},
        "ports": [
            {**port, "problem": node.unbindable(port["address"], port["number"], port["family"], port["type"])}
            for port in wanted.get("ports", [])
        ],
        "driver": str(gpus[0]["driver"]) if gpus else "",
        "cuda": str(gpus[0].get("cuda") or "unknown") if gpus else "",
        "gpus": [{key: gpu[key] for key in ("uuid", "name", "total", "free")} for gpu in gpus],
        "memory": memory,
        "disk": disk,
    }


def _self(criu: str) -> dict[str, Any]:
    architecture, kernel = node.uname()
    return {"architecture": architecture, "kernel": kernel, "cpu": node.cpu(), "criu": criu, "glibc": node.glibc()}


def _held(files: Iterable[Facts]) -> dict[str, dict[str, Any]]:
    """By path: ``size``, ``mode``, ``build_id``, how the kernel holds it, and whether a restore insists on the size."""
    held: dict[str, dict[str, Any]] = {}
    for file in files:
        facts = node.file_facts(file["path"]) or {"size": 0, "mode": file["mode"], "build_id": ""}
        entry = held.setdefault(file["path"], {**facts, "open": False, "mapped": False, "checked": False})
        entry["open" if file["open"] else "mapped"] = True
        if file["size"] is not None:  # the dump's own words, where it has any, are what the restore goes by
            entry |= {"size": file["size"], "checked": True}
        if file["mode"] is not None:
            entry["mode"] = file["mode"]
    return held
