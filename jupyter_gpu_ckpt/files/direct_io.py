"""Pieces read and written past the page cache (open(2), ``O_DIRECT``), in buffers that are used again.

Copying an image moves more than fits into memory, once: caching it pushes out what is needed, and taking fresh pages
for every piece costs more than the copying.  And what is read back after it was written comes from the disk, or the
server, and not from our memory.  A file system that cannot do it (``EINVAL``) is read and written as usual.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from pathlib import Path

#: What addresses, offsets and lengths are multiples of: enough for every disk and file system there is.
_GRAIN = 4096
#: One write as usual of many mebibytes was measured at a tenth of the rate of this (ext4, Linux 6.18).
_STEP = 1 << 20
_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def buffer(size: int) -> memoryview:
    """Memory for pieces of up to ``size`` bytes, of huge pages where it can be: a disk is told of it in fewer words."""
    memory = mmap.mmap(-1, _padded(size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)  # open(2): memory for O_DIRECT must not be shared with a child by fork(2)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def read(path: Path, into: memoryview, length: int, offset: int = 0, *, cached: bool = False) -> memoryview:
    """``length`` bytes of a file from ``offset`` on, a multiple of the grain; fewer if it ends before.

    ``into``: a `buffer`, of which a part is returned.  ``cached``: as usual, for a file that may be in memory already.
    Raises `OSError`.
    """
    if cached:
        return _read(path, into, length, offset, 0)
    try:
        return _read(path, into, length, offset, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return _read(path, into, length, offset, 0)


def write(path: Path, data: memoryview, length: int, *, offset: int = 0, size: int) -> None:
    """The first ``length`` bytes of a `buffer` into a file of ``size`` bytes, which is made if it is not there.

    ``offset``: a multiple of the grain.  Raises `OSError`.
    """
    try:
        _write(path, data, length, offset, size, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        _write(path, data, length, offset, size, 0)


def same(one: memoryview, other: memoryview) -> bool:
    """Whether two buffers, or parts of such, hold the same; at the rate of the memory."""
    return len(one) == len(other) and (not len(one) or _libc.memcmp(_address(one), _address(other), len(one)) == 0)


def is_zero(data: memoryview) -> bool:
    """Whether a buffer holds nothing but zeros: each byte is the one before it, and the first one is."""
    return not len(data) or (data[0] == 0 and same(data[1:], data[:-1]))


def _address(data: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


def _read(path: Path, into: memoryview, length: int, offset: int, how: int) -> memoryview:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | how)
    try:
        done = 0
        while done < length:
            count = os.preadv(fd, [into[done : _padded(length)]], offset + done)
            done += count
            if not count or done % _GRAIN:  # the end of the file
                break
        return into[: min(done, length)]
    finally:
        os.close(fd)


def _write(path: Path, data: memoryview, length: int, offset: int, size: int, how: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | how, 0o600)
    try:
        # Only what comes last may be padded.
        done, end = 0, _padded(length) if how and offset + length == size else length
        while done < end:
            done += os.pwritev(fd, [data[done : end if how else min(end, done + _STEP)]], offset + done)
        if offset + end > size:  # what was padded
            os.ftruncate(fd, size)
    finally:
        os.close(fd)


def _padded(length: int) -> int:
    return -(-length // _GRAIN) * _GRAIN
