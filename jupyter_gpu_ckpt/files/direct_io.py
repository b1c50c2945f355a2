"""Reads and writes past the page cache (open(2), ``O_DIRECT``), in buffers that are used again.

An image may be larger than memory and is copied once: caching it evicts pages that are needed, and fresh pages for
every block cost more than the copy.  And data that is read back comes from the disk or the server, not from our memory.
A file system that refuses it (``EINVAL``) is read and written through the cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path

#: The alignment of addresses, offsets and lengths: enough for every disk and file system.
_ALIGNMENT = 4096
#: Bytes of one cached write: one of many mebibytes was measured at a tenth of this rate (ext4, Linux 6.18).
_STEP = 1 << 20
_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def buffer(size: int) -> memoryview:
    """Allocate an aligned buffer of ``size`` bytes, in huge pages where possible: they shorten a disk's requests."""
    memory = mmap.mmap(-1, _padded(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)  # open(2): memory for O_DIRECT must not be shared with a child by fork(2)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def read(path: Path, into: memoryview, length: int, offset: int = 0) -> memoryview:
    """Read ``length`` bytes, or up to the end, from the aligned ``offset`` into a `buffer`; return a view of it."""
    try:
        return _read(path, into, length, offset, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _read(path, into, length, offset, 0)


def write(path: Path, data: memoryview, length: int, *, offset: int = 0, size: int) -> None:
    """Write ``length`` bytes of a `buffer` at the aligned ``offset`` of a file that is to have ``size`` bytes."""
    try:
        _write(path, data, length, offset, size, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _write(path, data, length, offset, size, 0)


def is_zero(data: memoryview) -> bool:
    """Return whether a buffer is all zeros: its first byte is, and every byte equals the one before it."""
    if not len(data) or data[0] != 0:
        return not len(data)
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    return bool(_libc.memcmp(address + 1, address, len(data) - 1) == 0)


def _read(path: Path, into: memoryview, length: int, offset: int, flag: int) -> memoryview:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flag)
    try:
        done = 0
        while done < length:
            count = os.preadv(fd, [into[done : _padded(length)]], offset + done)
            done += count
            if not count or done % _ALIGNMENT:  # the end of the file
                break
        return into[: min(done, length)]
    finally:
        os.close(fd)


def _write(path: Path, data: memoryview, length: int, offset: int, size: int, flag: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | flag, 0o600)
    try:
        # Only the end of the file may be padded.
        done, end = 0, _padded(length) if flag and offset + length == size else length
        while done < end:
            done += os.pwritev(fd, [data[done : end if flag else min(end, done + _STEP)]], offset + done)
        if offset + end > size:  # padding
            os.ftruncate(fd, size)
    finally:
        os.close(fd)


def _padded(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT
