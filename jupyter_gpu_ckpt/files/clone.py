"""Copies of files, which share their blocks with the original where the file system can (a reflink)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a capsule's init imports this module, and every wake waits for that
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
                file.truncate(size)
                return _copied(fd, file.fileno())
        except BaseException:
            target.unlink()
            raise
    target.unlink()
    return None


def copy_into(source: Path, target: int, offset: int) -> None:
    """Copy a regular file to a part of the file ``target``, which has the size it is to have.  Raises `OSError`."""
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _copied(fd, target, offset)
    finally:
        os.close(fd)


def read_into(source: Path, memory: memoryview) -> None:
    """Read a regular file into the mapping of a new file, of its size, where holes stay holes.  Raises `OSError`.

    Several threads may do so in one mapping at a time, which wait for each other where they write to one file.  A disk
    that is full is EFAULT.
    """
    fd = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for begin, end in data_ranges(fd):
            while begin < end and (count := os.preadv(fd, [memory[begin:end]], begin)):
                begin += count
    finally:
        os.close(fd)


def _copied(source: int, target: int, offset: int = 0) -> int:
    """Copy the content of a file, whose holes stay holes; return the bytes copied.  Raises `OSError`."""
    return sum(_copy_range(source, target, begin, end, offset) for begin, end in data_ranges(source))


def data_ranges(source: int) -> Iterator[tuple[int, int]]:
    """Yield where data in a file begins and ends, without its holes, which read as zeros.  Moves its position."""
    size = os.fstat(source).st_size
    at = 0
    while at < size:
        begin, at = _data(source, at, size)
        yield begin, min(at, size)


def _data(source: int, at: int, size: int) -> tuple[int, int]:
    """Return where the next data in a file begins and ends; all of it where the file system knows no holes."""
    try:
        begin = os.lseek(source, at, os.SEEK_DATA)
        return begin, os.lseek(source, begin, os.SEEK_HOLE)
    except OSError as error:
        return (size, size) if error.errno == errno.ENXIO else (at, size)


def _copy_range(source: int, target: int, begin: int, end: int, offset: int) -> int:
    """Copy a range of a file to ``offset`` further in another one, sharing its blocks where that can be."""
    at = begin
    with contextlib.suppress(OSError):  # between file systems of different kinds
        while at < end and (count := os.copy_file_range(source, target, min(_BLOCK, end - at), at, offset + at)):
            at += count
    while at < end and (block := os.pread(source, min(_BLOCK, end - at), at)):
        written = 0
        while written < len(block):
            written += os.pwrite(target, block[written:], offset + at + written)
        at += len(block)
    return at - begin
