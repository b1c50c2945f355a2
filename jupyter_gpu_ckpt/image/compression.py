"""Chunks of device memory as frames of zstd (RFC 8878), where that takes less time than writing them as they are.

Most tensors are floats, of which level 1 leaves 92 % (normally distributed, 32 bits) or 78 % (bfloat16); of integers,
masks and what is sparse or padded it leaves a quarter to a half, at 0.3 to 0.7 GB/s a thread.  So each chunk is asked:
by a sample of it, and by the rate that the disk has shown.  It is the CPU time of a thread that is measured, which a
machine full of others' work does not change; a limit on CPU time (cgroups) is not seen.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import zstandard

from . import direct

#: Of its content a frame takes at most: less gain is not worth the time of the wake that has to undo it.
MOST = 0.75
_LEVEL = 1
#: 1.5 % of a chunk of 16 MiB.  Each piece is a frame by itself: what is the same in two of them, a window of a frame of
#: the whole does not see.  Shorter ones show half the rate where there is one value only.
_PIECE = 64 << 10
_PIECES = 4
#: The compressor's output comes in parts of so many bytes.
_PART = 1 << 20
#: How far back a frame may refer: what all decoders should allow (RFC 8878, 3.1.1.1.2).  Level 1 does 512 KiB.
_WINDOW = 8 << 20


@dataclass(frozen=True)
class Sample:
    """Of a chunk: which part of its bytes is left, and how many a second one thread compresses."""

    ratio: float
    rate: float


class Disk:
    """The rate at which threads write to the disk together, in bytes per second, as this process has seen it.

    Each write counts as one of so many at a time.  A disk that has been relieved by compression answers the rest
    faster, which then pays less: what is compressed levels off where neither the disk nor the CPU waits for the other.
    """

    #: Until anything was seen: a fast disk, for which little is compressed.
    FIRST = 2e9
    #: After so many bytes more, what was seen counts half.
    _HALF = 256 << 20
    #: Less says how long the disk takes to answer, and nothing of its rate.
    _TELLING = 1 << 20

    def __init__(self) -> None:
        self._bytes, self._seconds = float(self._HALF), self._HALF / self.FIRST
        self._lock = threading.Lock()

    @property
    def rate(self) -> float:
        """The present figure.  From any thread."""
        with self._lock:
            return self._bytes / self._seconds

    def wrote(self, bytes: int, seconds: float, threads: int) -> None:
        """A write was seen, of one of so many ``threads`` that write.  From any thread."""
        if bytes >= self._TELLING:
            with self._lock:
                keep = 0.5 ** (bytes / self._HALF)
                self._bytes = self._bytes * keep + bytes
                self._seconds = self._seconds * keep + seconds / threads


#: That of the image directory, which is one for all kernels of a server.
disk = Disk()


class _Mine(threading.local):
    """What each thread uses again, and gives back when it ends."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.room = memoryview(b"")


_mine = _Mine()


def room(size: int) -> memoryview:
    """A `direct.buffer` of ``size`` bytes or more, until this thread asks again."""
    if len(_mine.room) < size:
        _mine.room = direct.buffer(size)
    return _mine.room


def sample(chunk: memoryview) -> Sample:
    """Compress pieces from all over the chunk, which has at least one byte."""
    count = min(_PIECES, max(1, len(chunk) // _PIECE))
    pieces = [chunk[at : at + _PIECE] for at in range(0, len(chunk), -(-len(chunk) // count))]
    begun = time.thread_time()
    left = sum(len(_mine.compressor.compress(piece)) for piece in pieces)
    seconds = max(time.thread_time() - begun, 1e-9)
    taken = sum(map(len, pieces))
    return Sample(left / taken, taken / seconds)


def pays(sample: Sample, *, threads: int, disk: float) -> bool:
    """Whether the disk, at ``disk`` bytes per second, is saved more time than ``threads`` at a time need for it."""
    return sample.ratio <= MOST and (1 - sample.ratio) / disk > 1 / (sample.rate * threads)


def compress(chunk: memoryview, threads: int) -> tuple[memoryview, int] | None:
    """If that pays: a buffer with a frame of the chunk, the thread's `room`, and the frame's bytes.

    ``threads``: that do this at a time, if there are as many CPUs.
    """
    if not pays(sample(chunk), threads=min(threads, len(os.sched_getaffinity(0))), disk=disk.rate):
        return None
    most, done = int(len(chunk) * MOST), 0
    into = room(most)
    for part in _parts(chunk):
        if done + len(part) > most:  # the sample was of another kind
            return None
        into[done : done + len(part)] = part
        done += len(part)
    return into, done


def _parts(chunk: memoryview) -> Iterator[bytes]:
    chunker = _mine.compressor.chunker(size=len(chunk), chunk_size=_PART)
    yield from chunker.compress(chunk)
    yield from chunker.finish()  # type: ignore[no-untyped-call]


def decompress(frame: memoryview, into: memoryview) -> bool:
    """Fill ``into``; whether the frame is one, of exactly as many bytes.  It takes no more memory than `_WINDOW`."""
    done = 0
    try:
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(frame) as reader:
            while done < len(into) and (count := reader.readinto(into[done:])):
                done += count
            return done == len(into) and not reader.read(1)
    except zstandard.ZstdError:
        return False
