"""Device memory in an image: chunks of the arena (`engine/fastpath`), each a file, written and read uncached.

CRIU does not see this memory.  A chunk of nothing but zeros has no file.  Hashes are made of what is in memory, on the
way out and on the way back, so that nothing is read twice.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from blake3 import blake3

from ..errors import ImageDamaged
from . import direct
from .disk import flush
from .manifest import FileEntry, Manifest

T = TypeVar("T")

#: Bytes of a chunk but the last.
CHUNK = 16 << 20
#: Chunks under way at a time: what fills a disk's queue.
_DEPTH = 8
#: While nobody waits for it: what leaves most of the machine to others.
_DEPTH_AHEAD = 2
#: In CRIU's directory of an image.
DIRECTORY = "device"
_CRIU = "criu"


#: Asked with a chunk's name, hash and place: makes it the file there, if it has one of that content.
Take = Callable[[str, FileEntry, Path], bool]


def write(arena: int, directory: Path, take: Take = lambda *_: False) -> dict[str, FileEntry]:
    """Write the arena, a file descriptor, to files in ``directory``, which is made; they are on disk when this returns.

    Returns their hashes by name.  What ``take`` has is not written.  Raises `OSError`; what was written then is left.
    """
    directory.mkdir(mode=0o700)

    def one(number: int, chunk: memoryview) -> FileEntry | None:
        if direct.is_zero(chunk):
            return None
        path = directory / _name(number)
        entry = FileEntry(len(chunk), blake3(chunk).hexdigest())
        if not take(path.name, entry, path):
            direct.write(path, chunk, len(chunk), size=len(chunk))
            flush(path)
        return entry

    written = {_name(number): entry for number, entry in enumerate(_each(arena, one)) if entry is not None}
    if written:
        flush(directory)
    else:  # an image has no empty directories
        directory.rmdir()
    return written


def write_ahead(arena: int, directory: Path, there: dict[str, FileEntry], enough: threading.Event) -> bool:
    """Make ``directory`` hold the chunks of the arena, and ``there`` say which of them it does; until ``enough``.

    What is said of a chunk is true at any time, and its content on the disk, also of an arena that changes or is cut
    short meanwhile.  Returns whether it came to the end.  Raises `OSError`; what was done until then is as good.
    """
    size = os.fstat(arena).st_size
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(_DEPTH_AHEAD):
        buffers.put(direct.buffer(CHUNK))

    def one(at: int) -> bool:
        buffer = buffers.get()
        try:
            chunk = buffer[: min(CHUNK, size - at)]
            # Not mapped: who reads a mapping of what was cut short is killed.
            if enough.is_set() or os.preadv(arena, [chunk], at) != len(chunk):
                return False
            name = _name(at // CHUNK)
            entry = None if direct.is_zero(chunk) else FileEntry(len(chunk), blake3(chunk).hexdigest())
            if there.get(name) != entry:
                there.pop(name, None)
                (directory / name).unlink(missing_ok=True)
                if entry is not None:
                    direct.write(directory / name, chunk, len(chunk), size=len(chunk))
                    flush(directory / name)
                    there[name] = entry
            return True
        finally:
            buffers.put(buffer)

    starts = range(0, size, CHUNK)
    with ThreadPoolExecutor(_DEPTH_AHEAD) as pool:
        try:
            whole = all(list(pool.map(one, starts)))
        finally:
            pool.shutdown(cancel_futures=True)
    if whole:
        for name in there.keys() - {_name(number) for number in range(len(starts))}:  # there was more of it
            del there[name]
            (directory / name).unlink(missing_ok=True)
    return whole


class Filling:
    """The arena being filled from an image, on threads of its own.

    Parameters
    ----------
    arena:
        A descriptor of an empty file in memory; it has its size of ``size`` bytes when this is made.
    directory:
        Where the chunks are.
    chunks:
        As the manifest has them; any other is nothing but zeros.
    prove:
        Whether their hashes are to be compared; those of what was decrypted are of other bytes, and it is proved.
    """

    def __init__(self, arena: int, size: int, directory: Path, chunks: Mapping[str, FileEntry], *, prove: bool) -> None:
        os.ftruncate(arena, size)
        self._given_up = threading.Event()
        self._directory, self._chunks, self._prove = directory, chunks, prove
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpu-ckpt-device")
        self._filled = self._thread.submit(_each, arena, self._one)
        self._thread.shutdown(wait=False)

    def _one(self, number: int, chunk: memoryview) -> None:
        path = self._directory / _name(number)
        entry = self._chunks.get(path.name)
        if self._given_up.is_set() or entry is None:
            return
        data = direct.read(path, chunk, len(chunk))
        if len(data) != len(chunk) or (self._prove and blake3(chunk).hexdigest() != entry.blake3):
            raise ImageDamaged("The image is damaged: device memory.", files=[f"criu/{DIRECTORY}/{path.name}"])

    def require(self) -> None:
        """Wait until everything is there.  Raises `ImageDamaged`, `OSError`."""
        self._filled.result()

    def give_up(self) -> None:
        """Nobody needs it any more; nothing is read when this returns."""
        self._given_up.set()
        self._filled.exception()


def entries(manifest: Manifest) -> dict[str, FileEntry]:
    """Of the chunks in an image, by their names as `write` gives them."""
    place = f"{_CRIU}/{DIRECTORY}/"
    return {name.removeprefix(place): one for name, one in manifest.files.items() if name.startswith(place)}


def _name(number: int) -> str:
    return f"{number:06d}.img"


def _each(arena: int, work: Callable[[int, memoryview], T]) -> list[T]:
    """What ``work`` returns for each chunk of the arena; several at a time."""
    size = os.fstat(arena).st_size
    if not size:
        return []
    # Not closed here: a part of it may still be in the frame of an exception.
    whole = memoryview(mmap.mmap(arena, size))
    chunks = [whole[at : at + CHUNK] for at in range(0, size, CHUNK)]
    with ThreadPoolExecutor(_DEPTH) as pool:
        try:
            return list(pool.map(work, range(len(chunks)), chunks))
        finally:
            pool.shutdown(cancel_futures=True)
