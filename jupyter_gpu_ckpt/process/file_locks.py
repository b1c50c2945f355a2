"""POSIX locks (``fcntl(2)``, F_SETLK) of stopped processes: noted, and set again where they are lost.

A process loses its POSIX locks on a file when it closes any descriptor of that file.  CRIU closes those by which it
has mapped the file, after it has set the locks; injected calls may close one, too.  SQLite (with a write-ahead log) and
LMDB lock files that they map.  So CRIU's image has no POSIX locks (`tasks.remove_posix_locks`), and they are set when
nothing is closed any more.

Other locks (flock, open file description locks, leases) belong to an open file, and do not end like that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process.injection import Injection

#: A lock in the fdinfo of the descriptor by which it was set (``fs/locks.c: lock_get_status``).
_LOCK = re.compile(r"^lock:\t\d+: POSIX +\S+ +(READ|WRITE) +(\d+) \S+ (\d+) (\d+|EOF)$", re.M)
_TYPES = {"READ": fcntl.F_RDLCK, "WRITE": fcntl.F_WRLCK}
#: ``struct flock``
FLOCK = struct.Struct("=hh4xqqi4x")
_TAKEN = (errno.EAGAIN, errno.EACCES)
#: Seconds for others to release the locks of a process.
PATIENCE = 2.0


class Lock(NamedTuple):
    """A lock: descriptor, ``l_type``, ``l_start`` and ``l_len`` (0: to the end of the file, however it grows)."""

    descriptor: int
    type: int
    start: int
    length: int


def held(pid: int) -> list[Lock]:
    """Return the POSIX locks of a process.

    Not from ``/proc/locks``: while others lock files, some are left out of it.
    """
    found = []
    for number in procfs.descriptors(pid):
        with contextlib.suppress(*procfs.GONE):
            for kind, owner, start, end in _LOCK.findall(procfs.read(f"/proc/{pid}/fdinfo/{number}")):
                if int(owner) == pid:
                    length = 0 if end == "EOF" else int(end) - int(start) + 1
                    found.append(Lock(number, _TYPES[kind], int(start), length))
    return found


def set_again(pid: int, locks: Sequence[Lock]) -> list[str]:
    """Set the locks that a stopped process does not have any more.  Return which it cannot have, and why, in words."""
    present = set(held(pid)) if locks else set()
    lost = [lock for lock in locks if lock not in present]
    if not lost:
        return []
    with Injection.into(pid) as inside:
        return list(_set(inside, lost))


def reapply(notes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Set the noted locks (``locks`` of each process) of restored processes.  Return as `set_again`.

    To be called when nothing is closed any more in the name of these processes.
    """
    failed: list[str] = []
    for pid, of_process in notes.items():
        try:
            found = set_again(int(pid), [Lock(*lock) for lock in of_process.get("locks", ())])
        except OSError as error:
            found = [f"locks of process {pid} ({error})"]
        if not procfs.is_ending(int(pid)):  # one that was killed meanwhile lacks nothing
            failed += found
    return failed


def _set(inside: Injection, locks: Iterable[Lock]) -> Iterator[str]:
    deadline = time.monotonic() + PATIENCE
    for lock in locks:
        with inside.on_stack(FLOCK.pack(lock.type, os.SEEK_SET, lock.start, lock.length, 0)) as address:
            # The process that has it now may keep it; but databases lock for moments only.
            while (done := inside.call("fcntl", lock.descriptor, fcntl.F_SETLK, address)) < 0 and -done in _TAKEN:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.01)
        if done < 0:
            why = "another process has locked it" if -done in _TAKEN else os.strerror(-done)
            with contextlib.suppress(*procfs.GONE):
                path = os.readlink(f"/proc/{inside.pid}/fd/{lock.descriptor}")
                yield f"{path} (process {inside.pid}, from byte {lock.start}): {why}"
