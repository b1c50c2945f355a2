"""Copies of files, which share their blocks with the original where the file system can (a reflink)."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

#: <linux/fs.h>
_FICLONE = 0x40049409
#: Bytes that are copied at a time.
_BLOCK = 8 << 20


def copy(source: Path, target: Path, most: int) -> int | None:
    """Copy a regular file to the new file ``target``; return the bytes that this has cost: 0 for a reflink.

    Returns None, and makes no file, where that would cost more than ``most`` bytes.  Raises `OSError`; then there is no
    file either.
    """
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0), open(target, "xb", buffering=0) as file:
        try:
            os.fchmod(file.fileno(), 0o600)
            try:
                fcntl.ioctl(file.fileno(), _FICLONE, fd)
                return 0
            except OSError:  # another file system, or one without reflinks
                size = os.fstat(fd).st_size
            if size <= most:
                return _copied(fd, file.fileno())
        except BaseException:
            target.unlink()
            raise
    target.unlink()
    return None


def _copied(source: int, target: int) -> int:
    done = 0
    with contextlib.suppress(OSError):  # between file systems of different kinds, and from /proc
        while count := os.copy_file_range(source, target, _BLOCK):
            done += count
    while block := os.pread(source, _BLOCK, done):
        written = 0
        while written < len(block):
            written += os.pwrite(target, block[written:], done + written)
        done += len(block)
    return done
