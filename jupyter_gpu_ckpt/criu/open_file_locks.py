"""Locks in a dump that belong to an open file (flock, open file description): CRIU sets them, and waits for them.

POSIX locks are not in a dump (`tasks.remove_posix_locks`); they are set afterwards (`process.file_locks`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path

from ..process.file_locks import FLOCK, PATIENCE
from . import images
from .images import fields_of, number_of, records

_RANGE = (images.LOCK_START, images.LOCK_LENGTH)


def taken(directory: Path) -> str:
    """Return the path of a file that another process has locked, so that a restore would wait for it; or "".

    Others get a moment to release theirs.  Raises `ImageFormat`.
    """
    path, ids = directory / images.LOCKS, images.DescriptorIds()
    deadline = time.monotonic() + PATIENCE
    for lock in map(fields_of, records(path, images.FILE_LOCKS_MAGIC) if path.exists() else ()):
        kind, flags = (number_of(lock, each) or 0 for each in (images.LOCK_TYPE, images.LOCK_FLAGS))
        if kind not in (fcntl.F_RDLCK, fcntl.F_WRLCK) or not flags & (images.FL_FLOCK | images.FL_OFD):
            continue
        name = images.name_of_file(directory, images.locked_file(directory, lock, ids))
        while not _can_lock(name, kind, flags, [number_of(lock, at) or 0 for at in _RANGE]):
            if time.monotonic() > deadline:
                return name
            time.sleep(0.01)
    return ""


def _can_lock(path: str, kind: int, flags: int, place: list[int]) -> bool:
    """Return whether a lock can be set; it is released at once.  What cannot be tried here CRIU tries."""
    exclusive, described = kind == fcntl.F_WRLCK, bool(flags & images.FL_OFD)
    with contextlib.suppress(OSError), open(path, "r+b" if exclusive and described else "rb", buffering=0) as file:
        try:
            if described:
                fcntl.fcntl(file, fcntl.F_OFD_SETLK, FLOCK.pack(kind, os.SEEK_SET, *place, 0))
            else:
                fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True
