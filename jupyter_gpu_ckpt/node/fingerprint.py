"""The fingerprint of the node an image was made on: properties that another node must share.

A fingerprint is plain JSON, part of the manifest.  `fingerprint` takes it at the checkpoint, `inspect_node` collects
the same facts on the node the image is to be restored on, and `match` compares the two.

Sizes are bytes. Keys: ``architecture``, ``kernel`` (the release of Linux), ``cpu`` (features), ``criu`` and ``glibc``
(versions), ``machine``, ``files`` and ``packages`` and ``mounts`` (see `facts`), ``ports``, ``sockets`` (unix sockets
in the file system), ``open_files`` (the limit that CRIU must have, `descriptors.needed_limit`), ``cuda`` (the version
the driver knows; empty: the kernel never used CUDA, and GPUs are not compared), ``driver``, ``gpus``, ``device_bytes``
(by UUID), ``memory`` and ``disk``.

A file is identified by its identity (`facts.identity`), noted after the dump, which itself may have changed it by a
link; by its hash, as far as `Hashes` has it; by size and build-id.
"""

from __future__ import annotations

import functools
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..process.descriptors import limit_of_criu
from . import databases
from . import facts as node
from .facts import Facts
from .hashes import Hashes

_SECOND = 1_000_000_000
#: Nanoseconds within which two changes may get the same time: twice the longest tick of Linux's clock for files (before
#: 6.13), and that of FAT, the coarsest of file systems that stamp by seconds.
_TICK, _COARSE_TICK = 20_000_000, 2 * _SECOND


def fingerprint(
    *,
    files: Iterable[Facts],
    ports: Iterable[Facts],
    criu: str,
    sockets: Iterable[Facts] = (),
    hashes: Hashes | None = None,
    gpus: Sequence[Facts] = (),
    cuda: bool = False,
    device_bytes: Mapping[str, int] | None = None,
    memory: int = 0,
    open_files: int = 0,
    continues: bool = False,
) -> dict[str, Any]:
    """Take the fingerprint of this node at a checkpoint, when the dump has been written.

    ``files`` and ``ports`` are those of the dump: ``path``, ``size``, ``mode``, ``open``, ``writes``,
    ``through_mapping``, ``code``, ``made``, ``locked`` and ``posix_locks`` of each file; ``family``, ``type``,
    ``address`` and ``number`` of each port.  ``criu``: the version that made it.  ``sockets``: files of unix sockets,
    ``path``, ``inode``, ``mtime`` (ns), and ``directory``: mode, owner and group of the one that it is in.
    ``hashes``: None: no hash is noted.  ``gpus``: all of the node in the driver's order, ``uuid``, ``name``,
    ``total``, ``driver`` and ``cuda``.  ``cuda``, ``device_bytes``: whether the kernel used CUDA, and its device memory
    by UUID.  ``memory``: host memory that the restored kernel takes.  ``open_files``: the limit that CRIU must have.
    ``continues``: whether the processes run on, and may change their files.
    """
    points = node.mounts()
    mount_of_directory = functools.cache(lambda directory: node.mount_of(directory or "/", points))

    def mount_of(path: str) -> str:
        return path if path in points else mount_of_directory(path.rpartition("/")[0])

    noted = _noted_files(files, lambda path: points.get(mount_of(path), ""), continues)
    if hashes is not None:
        for path, hash in hashes.of_kernel(unhashed(noted)).items():
            noted[path]["blake3"] = hash
    used = {mount_of(path) for path in noted} - {"/"}
    return {
        **_self(criu),
        "files": noted,
        "packages": node.packages(noted),
        "mounts": {point: points[point] for point in sorted(used)},
        "ports": [dict(port) for port in ports],
        "sockets": [dict(socket) for socket in sockets],
        "driver": str(gpus[0]["driver"]) if cuda and gpus else "",
        "cuda": str(gpus[0].get("cuda") or "unknown") if cuda and gpus else "",
        "gpus": [{key: gpu[key] for key in ("uuid", "name", "total")} for gpu in gpus] if cuda else [],
        "device_bytes": dict(device_bytes or {}),
        "memory": memory,
        "disk": memory,
        "open_files": open_files,
    }


def unhashed(files: Mapping[str, Facts]) -> Iterator[tuple[str, Facts, bool]]:
    """Yield the files of a fingerprint whose content counts and has no hash: path, facts, whether the kernel writes."""
    for path, file in files.items():
        if file["checked"] and "inode" in file and not file.get("blake3"):
            yield path, file, bool(file.get("writes"))


def inspect_node(
    wanted: Facts,
    *,
    criu: str,
    gpus: Sequence[Facts],
    memory: int,
    disk: int,
    hashes: Hashes | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Collect the facts of this node that are to be compared with the fingerprint ``wanted``.

    ``gpus`` have ``free`` bytes as well; ``memory`` and ``disk`` are the free bytes.  A file is read only if its
    identity differs, and until ``cancelled`` returns True; a file that was not read has no hash.
    """
    points = node.mounts()
    return {
        **_self(criu),
        "files": {path: _present(path, was, hashes, cancelled) for path, was in wanted.get("files", {}).items()},
        "packages": {directory: node.installed(directory) for directory in wanted.get("packages", {})},
        "mounts": {point: points.get(point, "") for point in wanted.get("mounts", {})},
        "ports": [
            {**port, "problem": node.unbindable(port["address"], port["number"], port["family"], port["type"])}
            for port in wanted.get("ports", [])
        ],
        "sockets": [
            {**socket, "problem": node.occupant(socket["path"], socket["inode"], socket["mtime"])}
            for socket in wanted.get("sockets", [])
        ],
        "driver": str(gpus[0]["driver"]) if gpus else "",
        "cuda": str(gpus[0].get("cuda") or "unknown") if gpus else "",
        "gpus": [{key: gpu[key] for key in ("uuid", "name", "total", "free")} for gpu in gpus],
        "memory": memory,
        "disk": disk,
        "open_files": limit_of_criu(),
    }


def _self(criu: str) -> dict[str, Any]:
    return {
        "architecture": os.uname().machine,
        "kernel": os.uname().release,
        "cpu": node.cpu(),
        "criu": criu,
        "glibc": node.glibc(),
        "machine": node.machine(),
    }


def _noted_files(
    files: Iterable[Facts], file_system_of: Callable[[str], str], continues: bool
) -> dict[str, dict[str, Any]]:
    """By path: ``size``, ``mode``, ``build_id``, identity, and ``checked``: whether a restore insists on the size.

    Its uses are ``open``, ``mapped``, ``writes``, ``code`` (as program code) and ``locked``; ``made``: by the dump, for
    a restore to remove.  Of a file that is written through a mapping ``noted``, a time in ns: its content may change
    and its identity not, so that a hash made before does not count.  For databases of SQLite see `databases`.
    ``unstamped``: the processes run on, and a later change may leave no trace in its identity.
    """
    files = list(files)
    mapped = _mapped_data(files, all=continues)
    untracked = {path for path in mapped if not _written_back(path, file_system_of(path)) and continues}
    noted: dict[str, dict[str, Any]] = {}
    locks: dict[str, set[tuple[int, ...]]] = {}
    for file in files:
        path = file["path"]
        if (entry := noted.get(path)) is None:
            entry = noted[path] = _noted_file(path, file, file_system_of(path))
        entry["open" if file["open"] else "mapped"] = True
        for use in ("writes", "code", "made", "locked"):
            entry[use] = entry[use] or bool(file.get(use))
        if file.get("through_mapping"):
            entry["noted"] = time.time_ns()
        locks.setdefault(path, set()).update(tuple(lock) for lock in file.get("posix_locks", ()))
        entry["checked"] = entry["checked"] or entry["made"]
        if file["size"] is not None:  # CRIU compares with the size in the dump
            entry |= {"size": file["size"], "checked": True}
        if file["mode"] is not None:
            entry["mode"] = file["mode"]
    if continues:
        for path, entry in noted.items():
            data = stat.S_ISREG(entry["mode"] or 0) and "ctime" in entry and not entry["code"]
            if data and (path in untracked or _is_just_changed(entry)):
                entry["unstamped"] = True
    databases.note(noted, locks)
    return noted


def _mapped_data(files: Iterable[Facts], *, all: bool) -> set[str]:
    """Return the files that a mapping can change, or ``all`` that are mapped: a process outside may change their pages.

    Without program code.
    """
    code = {file["path"] for file in files if file.get("code")}
    return {file["path"] for file in files if file.get("through_mapping") or (all and not file["open"])} - code


def _written_back(path: str, kind: str) -> bool:
    """Write the dirty pages of a mapped file to the disk.  Return whether a store from now on changes its times.

    Linux changes the times at the first store to a page, and again at the first one after the page was written.
    Called before the identity is noted.
    """
    try:
        with node.open_regular(path) as file:
            os.fdatasync(file.fileno())
    except OSError:
        return False
    return node.stamps_stores(kind)


def _is_just_changed(entry: Facts) -> bool:
    """Return whether a file was changed so shortly ago that the next change may get the same time."""
    changed = max(entry["mtime"], entry["ctime"])
    return bool(abs(time.time_ns() - changed) < (_COARSE_TICK if changed % _SECOND == 0 else _TICK))


def _noted_file(path: str, file: Facts, kind: str) -> dict[str, Any]:
    facts = node.file_facts(path) or {"size": 0, "mode": file["mode"]}
    entry = {**facts, "build_id": "", "open": False, "mapped": False, "checked": False}
    entry |= {"writes": False, "code": False, "made": False, "locked": False}
    directory = stat.S_ISDIR(facts["mode"] or 0)
    if not (node.keeps_inodes(kind) if directory else node.keeps_content(kind)):
        for name in ("device", "inode", "mtime", "ctime"):
            entry.pop(name, None)
    if stat.S_ISREG(facts["mode"] or 0):
        entry["build_id"] = node.build_id(path)
    return entry


def _present(path: str, was: Facts, hashes: Hashes | None, cancelled: Callable[[], bool]) -> dict[str, Any] | None:
    """Return the facts of the file at ``path``; ``same`` if they are those of ``was``, else its build-id and hash.

    ``recorded``: its hash at the checkpoint, which may have been made later.  ``log_lost``: as
    `databases.is_log_lost`.
    """
    now = node.file_facts(path)
    if now is None:
        return None
    if databases.is_log_lost(path, was):
        now["log_lost"] = True
    if node.same_file(was, now):
        return {**now, "same": True}
    now |= {"same": False, "build_id": "", "blake3": "", "recorded": "", "usable": _is_usable(path, was)}
    now["denied"] = not now["usable"] and not _is_own(path)
    if was.get("unstamped"):
        now["noted"] = time.time_ns()  # a hash that was made before does not count
    if databases.is_one(was):
        now |= databases.present(path)
    if stat.S_ISREG(now["mode"]):
        now["build_id"] = node.build_id(path) if was["build_id"] else ""
        if hashes is not None and now["size"] == was["size"] and "inode" in was:
            now["recorded"] = was.get("blake3") or hashes.known(was)
            now["blake3"] = hashes.of(path, now, cancelled) if now["recorded"] else ""
    return now


def _is_own(path: str) -> bool:
    """Return whether a file is the user's: then a restore can open it whatever its mode."""
    try:
        return os.stat(path).st_uid == os.geteuid()
    except OSError:
        return False


def _is_usable(path: str, was: Facts) -> bool:
    """Return whether the user may open the file again as the kernel had it open."""
    if stat.S_ISDIR(was["mode"] or 0):
        return os.access(path, os.R_OK | os.X_OK, effective_ids=True)
    return os.access(path, os.R_OK | (os.W_OK if was.get("writes") else 0), effective_ids=True)
