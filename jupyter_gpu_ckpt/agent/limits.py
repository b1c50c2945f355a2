"""Limits of the kernel: errors that say that one is reached, and whether there is enough left to begin something.

Some libraries end their process where they get no memory, thread or descriptor (libzmq: ``alloc_assert``), or take the
error for another one (IPython: a damaged history database).  What calls them asks `require_headroom` first.
"""

from __future__ import annotations

import errno
import mmap
import os

#: Bytes that a few calls of libzmq and SQLite and the stack of a thread take at the most, several times over.
MEMORY = 32 << 20


def shortage(error: BaseException) -> str:
    """Return what the kernel has too little of, in words, if ``error`` says so; else ``""``."""
    number = getattr(error, "errno", None)  # of `OSError` and `ZMQError`
    if isinstance(error, MemoryError) or number in (errno.ENOMEM, errno.ENOBUFS):
        return "memory"
    if number in (errno.EMFILE, errno.ENFILE):
        return "file descriptors"
    if number == errno.EAGAIN or (isinstance(error, RuntimeError) and "start new thread" in str(error)):
        return "threads or processes"
    return ""


def require_headroom(descriptors: int) -> None:
    """Raise `OSError` unless so many descriptors, and `MEMORY`, can be had."""
    mmap.mmap(-1, MEMORY, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    opened: list[int] = []
    try:
        for _ in range(descriptors):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for each in opened:
            os.close(each)
