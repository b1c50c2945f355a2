"""Copies of files that share their blocks where the file system can do that (FICLONE: XFS, Btrfs, bcachefs)."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

_FICLONE = 0x40049409  # <linux/fs.h>
#: Bytes that are copied at once, where blocks cannot be shared.
_AT_ONCE = 64 << 20


def clone(source: Path, target: Path) -> None:
    """Make ``target`` a copy of a regular file, readable by its owner alone; holes stay holes.  Raises `OSError`.

    After failure ``target`` may be there, incomplete.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(source, flags), "rb", buffering=0) as original, open(_created(target), "wb", buffering=0) as copy:
        try:
            fcntl.ioctl(copy.fileno(), _FICLONE, original.fileno())
        except OSError:  # another file system, or one that cannot
            _copy(original.fileno(), copy.fileno())


def _created(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _copy(source: int, target: int) -> None:
    size, at = os.fstat(source).st_size, 0
    os.ftruncate(target, size)
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole is left
                return
            raise
        end = os.lseek(source, at, os.SEEK_HOLE)
        while at < end:
            count = os.sendfile(target, source, at, min(_AT_ONCE, end - at)) if _seek(target, at) else 0
            if count == 0:
                raise OSError(errno.EIO, "the file became shorter while it was copied")
            at += count


def _seek(descriptor: int, at: int) -> bool:
    return os.lseek(descriptor, at, os.SEEK_SET) == at
