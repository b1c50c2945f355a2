"""CRIU's image files about a kernel's processes: check that they are complete, and remove death signals.

A dump is trusted only as far as its files show it: every thread, descriptor and mapping that ``/proc`` showed while the
processes were stopped must be in them.  The format is that of `images`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .images import (
    FDINFO_FD,
    FILE_LOCKS_MAGIC,
    FL_POSIX,
    LOCK_FLAGS,
    LOCK_LENGTH,
    LOCK_PID,
    LOCK_START,
    LOCK_TYPE,
    MM_MAGIC,
    descriptors_of,
    encode,
    fields_of,
    files_of_kind,
    number_of,
    records,
    rewrite,
    varint,
)

_CORE_MAGIC = 0x55053847
_PSTREE_MAGIC = 0x50273030
# messages core_entry and thread_core_entry
_CORE_THREAD, _THREAD_DEATH_SIGNAL = 5, 8
# message pstree_entry
_PSTREE_PID, _PSTREE_PARENT, _PSTREE_SESSION = 1, 2, 4
# messages file_entry and unix_sk_entry
_ENTRY_UNIX, _UNIX_INODE, _UNIX_PEER = 16, 2, 8
# messages mm_entry and vma_entry; all fields of the latter are varints, the first two the addresses
_MM_MAPPINGS = 14
_MAPPING = re.compile(rb"\x08([\x80-\xff]*[\x00-\x7f])\x10([\x80-\xff]*[\x00-\x7f])")


def remove_death_signals(directory: Path) -> dict[int, int]:
    """Remove PR_SET_PDEATHSIG from a fresh dump.  Return the signals, by thread.

    CRIU restores it while the parent is its own process, whose end then sends the signal.  `reapply` sets it when CRIU
    has ended.  Raises `ImageFormat`, `OSError`.
    """
    found = {}
    for path in sorted(directory.glob("core-*.img")):
        (record,) = records(path, _CORE_MAGIC)
        fields = fields_of(record)
        for index, (number, kind, value) in enumerate(fields):
            if number == _CORE_THREAD and isinstance(value, bytes):
                thread = fields_of(value)
                if signal := number_of(thread, _THREAD_DEATH_SIGNAL):
                    found[int(path.stem.partition("-")[2])] = signal
                    kept = b"".join(encode(field) for field in thread if field[0] != _THREAD_DEATH_SIGNAL)
                    fields[index] = (number, kind, kept)
                    rewrite(path, _CORE_MAGIC, [b"".join(map(encode, fields))])
    return found


def remove_posix_locks(directory: Path, notes: Mapping[str, Mapping[str, Any]]) -> None:
    """Remove the POSIX locks that are noted (`file_locks.Lock`) from a fresh dump.  Raises `ImageFormat`, `OSError`.

    CRIU would set them, and close descriptors of the same files after that, which ends them; and it would wait for one
    that another process has.
    """
    path = directory / "filelocks.img"
    if not path.exists():
        return
    noted = {
        (int(pid), type, start, length)
        for pid, of_process in notes.items()
        for _, type, start, length in of_process.get("locks", ())
    }
    kept = []
    for record in records(path, FILE_LOCKS_MAGIC):
        fields = fields_of(record)
        lock = tuple(number_of(fields, number) for number in (LOCK_PID, LOCK_TYPE, LOCK_START, LOCK_LENGTH))
        if number_of(fields, LOCK_FLAGS) != FL_POSIX or lock not in noted:
            kept.append(record)
    rewrite(path, FILE_LOCKS_MAGIC, kept)


def missing(directory: Path, inventory: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what of `inventory.inspect` the dump of stopped processes lacks, as noun phrases."""
    lacking = []
    for pid, was in inventory.items():
        if not (directory / f"mm-{pid}.img").exists():
            lacking.append(f"process {pid}")
            continue
        for tid in was["threads"]:
            if not (directory / f"core-{tid}.img").exists():
                lacking.append(f"thread {tid} of process {pid}")
        saved = {number_of(each, FDINFO_FD) for each in descriptors_of(directory, pid)}
        lacking += [f"descriptor {fd} of process {pid}" for fd in was["descriptors"] if fd not in saved]
        uncovered = _uncovered(_mappings(directory, pid), was["mappings"])
        lacking += [f"memory at {start:#x} of process {pid}" for start in uncovered]
    return lacking


def adopted(directory: Path) -> tuple[int, list[int]]:
    """Return the root of a dump's processes, and its children in sessions that they do not inherit from it.

    Their parents have ended, and CRIU restores them by a helper (`capsule.subreaper`).  Raises `ImageFormat`.
    """
    path, root, session, found = directory / "pstree.img", 0, 0, list[int]()
    for record in records(path, _PSTREE_MAGIC) if path.exists() else ():  # the root is the first
        fields = fields_of(record)
        pid, parent, own = (number_of(fields, each) or 0 for each in (_PSTREE_PID, _PSTREE_PARENT, _PSTREE_SESSION))
        if not root:
            root, session = pid, own
        elif parent == root and own not in (pid, session):
            found.append(pid)
    return root, found


def parents(directory: Path) -> dict[str, str]:
    """Return the parents of a dump's processes, by pid; "0" is the root's.  Raises `ImageFormat`."""
    fields = map(fields_of, records(directory / "pstree.img", _PSTREE_MAGIC))
    return {str(number_of(each, _PSTREE_PID)): str(number_of(each, _PSTREE_PARENT) or 0) for each in fields}


def uninspected(directory: Path, inventory: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the pids of a dump's processes that `inventory.inspect` did not find alive afterwards."""
    saved = {path.stem.partition("-")[2] for path in directory.glob("mm-*.img")}
    return sorted(saved - inventory.keys())


def has_external_peer(directory: Path) -> bool:
    """Return whether a unix socket's peer is outside the kernel; CRIU refuses only connections that are accepted."""
    sockets = files_of_kind(directory, _ENTRY_UNIX)
    present = {number_of(fields, _UNIX_INODE) for fields in sockets}
    return any((peer := number_of(fields, _UNIX_PEER)) and peer not in present for fields in sockets)


def _mappings(directory: Path, pid: str) -> list[tuple[int, int]]:
    """Return the mappings of a process as CRIU saved them, by address."""
    saved = []
    for record in records(directory / f"mm-{pid}.img", MM_MAGIC):
        for number, _, value in fields_of(record):
            if number == _MM_MAPPINGS and isinstance(value, bytes) and (found := _MAPPING.match(value)):
                saved.append((varint(found[1])[0], varint(found[2])[0]))
    return sorted(saved)


def _uncovered(saved: Sequence[tuple[int, int]], mappings: Iterable[Sequence[int]]) -> Iterator[int]:
    """Yield the addresses of mappings that are not completely in ``saved``, which may have joined or split them."""
    at = 0
    for start, end in sorted((low, high) for low, high in mappings):
        reached = start
        while at < len(saved) and saved[at][1] <= start:
            at += 1
        following = at
        while following < len(saved) and saved[following][0] <= reached < end:
            reached = saved[following][1]
            following += 1
        if reached < end:
            yield start
