"""Files read block by block, ahead, by several threads: one reader does not fill a disk's queue.

Not `blake3.update_mmap`, which is as fast (2 GiB on two cores: 1.6 s instead of 2.1 s from memory, 3.6 s and 4.3 s from
the disk): a mapping of a file that is cut short, or that the disk cannot read, ends the whole process by SIGBUS, and
images are verified because their files may be damaged.  Nor can it be cancelled, or report progress.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from ..files import direct_io

BLOCK = 4 << 20
#: Blocks read at a time, and threads.
DEPTH = 8

#: Bytes of the smallest hole that is made.
HOLE = 64 << 10
_PUNCH_HOLE, _KEEP_SIZE = 2, 1  # <linux/falloc.h>
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def reader() -> ThreadPoolExecutor:
    """Return the threads that `blocks` reads with."""
    return ThreadPoolExecutor(DEPTH, thread_name_prefix="image-read")


def blocks(fd: int, size: int, pool: ThreadPoolExecutor) -> Iterator[memoryview]:
    """Yield the first ``size`` bytes of ``fd``, or fewer if it ends before; a block is valid until the next one.

    Raises `OSError`.
    """
    count = min(DEPTH, -(-size // BLOCK))
    buffers = [memoryview(mmap.mmap(-1, min(BLOCK, size))) for _ in range(count)]
    pending: deque[Future[memoryview]] = deque()
    try:
        for number, offset in enumerate(range(0, size, BLOCK)):
            buffer = buffers[number % count][: min(BLOCK, size - offset)]
            pending.append(pool.submit(_read, fd, buffer, offset))
            if len(pending) == count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:  # no thread may use a buffer or descriptor that is reused
            future.cancel() or future.exception()


def _read(fd: int, buffer: memoryview, offset: int) -> memoryview:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return buffer[:done]


def punch_zeros(fd: int, block: memoryview, offset: int) -> int:
    """Make holes of the zeros in ``block``, which was read at ``offset``; return the bytes freed.

    A hole reads as zeros.  A file system without holes keeps the zeros: 0.
    """
    freed, start = 0, -1
    for at in range(0, len(block) + 1, HOLE):
        length = min(HOLE, len(block) - at)
        if length == HOLE and direct_io.is_zero(block[at : at + HOLE]):
            start = at if start < 0 else start
        elif start >= 0:
            if _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset + start, at - start) != 0:
                return freed
            freed, start = freed + at - start, -1
    return freed
