"""Device memory in an image: the chunks of the arena (`engine/fastpath`), files both here and there, moved uncached.

CRIU does not see this memory.  A chunk of nothing but zeros has no file in an image; that of one that is compressed has
the same name, and the size and hash of its content in its entry (`FileEntry.raw`): by those it is known again, and
nothing is compressed to find out.  Hashes are made of what is in memory, on the way out and on the way back, so that
nothing is read twice.  The arena is the descriptor of a directory, whose files come and go with the kernel's wish; they
are read and written, never mapped: who reads a mapping of a file that was cut short is killed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from blake3 import blake3

from ..errors import ImageDamaged
from ..files.atomic import flush
from . import compression, direct
from .manifest import FileEntry, Manifest

T = TypeVar("T")

#: Bytes of a chunk but the last; `arena.h` has the same.
CHUNK = 16 << 20
#: Chunks under way at a time: what fills a disk's queue.
_DEPTH = 8
#: While nobody waits for it: what leaves most of the machine to others.
_DEPTH_AHEAD = 2
#: In CRIU's directory of an image.
DIRECTORY = "device"
_CRIU = "criu"


#: Asked with a chunk's name, content and place: makes it the file there, if it has one of it, and says what that is.
Take = Callable[[str, FileEntry, Path], FileEntry | None]


def none_there(name: str, content: FileEntry, place: Path) -> FileEntry | None:
    """A `Take` that has nothing."""
    return None


def write(
    arena: int, directory: Path, take: Take, go_on: Callable[[], object], *, compressed: bool = True
) -> dict[str, FileEntry]:
    """Write the chunks of the arena to files in ``directory``, which is made; they are flushed with their draft.

    Returns their hashes by name.  What ``take`` has is not written.  ``go_on``: called before each chunk; what it
    raises ends it.  ``compressed``: where that pays.  Raises `OSError`; what was written then is left.
    """
    directory.mkdir(mode=0o700)
    place = path(arena)

    def one(name: str, chunk: memoryview) -> tuple[str, FileEntry] | None:
        go_on()
        if len(direct.read(place / name, chunk, len(chunk))) != len(chunk):
            raise OSError(f"A file of device memory is shorter than it was: {name}.")
        if direct.is_zero(chunk):
            return None
        content, to = FileEntry(len(chunk), blake3(chunk).hexdigest()), directory / name
        entry = take(name, content, to)
        if entry is None:
            try:  # the very file, where both are on one disk; nobody writes to it again (`arena.c`)
                os.link(place / name, to)
                entry = content
            except OSError:
                entry = _store(to, chunk, content, _DEPTH, compressed=compressed)
        return name, entry

    written = dict(filter(None, _each(size(arena), one, _DEPTH)))
    if not written:  # an image has no empty directories
        directory.rmdir()
    return written


def _store(to: Path, chunk: memoryview, content: FileEntry, depth: int, *, compressed: bool = True) -> FileEntry:
    """Write a chunk, one of ``depth`` at a time, as that file; its entry."""
    # As a checkpoint and a wake would have it, also ahead of them: it is their time that is to be saved.
    frame = compression.compress(chunk, _DEPTH) if compressed else None
    data, length = frame or (chunk, len(chunk))
    begun = time.monotonic()
    direct.write(to, data, length, size=length)
    compression.disk.wrote(length, time.monotonic() - begun, depth)
    return content if frame is None else FileEntry(length, blake3(data[:length]).hexdigest(), raw=content)


def write_ahead(arena: int, directory: Path, there: dict[str, FileEntry], enough: threading.Event) -> bool:
    """Make ``directory`` hold the chunks of the arena, and ``there`` say which of them it does; until ``enough``.

    What is said of a chunk is true at any time, and its content on the disk, also of an arena that changes or is cut
    short meanwhile.  Returns whether it came to the end.  Raises `OSError`; what was done until then is as good.
    """

    place = path(arena)

    def one(name: str, chunk: memoryview) -> str | None:
        # Who ends waits for all that was begun on executors' threads.
        if enough.is_set() or not threading.main_thread().is_alive():
            return None
        try:
            whole = len(direct.read(place / name, chunk, len(chunk))) == len(chunk)
        except FileNotFoundError:
            whole = False
        if not whole:
            return None
        content = None if direct.is_zero(chunk) else FileEntry(len(chunk), blake3(chunk).hexdigest())
        known = there.get(name)
        if (known and known.content) != content:
            there.pop(name, None)
            (directory / name).unlink(missing_ok=True)
            if content is not None:
                entry = _store(directory / name, chunk, content, _DEPTH_AHEAD)
                flush(directory / name)
                there[name] = entry
        return name

    names = _each(size(arena), one, _DEPTH_AHEAD)
    if None in names:
        return False
    for name in there.keys() - set(names):  # there was more of it
        del there[name]
        (directory / name).unlink(missing_ok=True)
    return True


class Filling:
    """The arena being filled from an image, on threads of its own.

    Parameters
    ----------
    arena:
        The descriptor of an empty directory; it is filled with ``size`` bytes.
    directory:
        Where the chunks are.
    chunks:
        As the manifest has them; any other is nothing but zeros.
    prove:
        Whether they are as the manifest says; of what was decrypted it says other bytes, it is proved, and it is not
        compressed.
    """

    def __init__(self, arena: int, size: int, directory: Path, chunks: Mapping[str, FileEntry], *, prove: bool) -> None:
        self._given_up = threading.Event()
        self._arena, self._directory, self._chunks, self._prove = path(arena), directory, chunks, prove
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpu-ckpt-device")
        self._filled = self._thread.submit(_each, size, self._one, _DEPTH)
        self._thread.shutdown(wait=False)

    def _one(self, name: str, chunk: memoryview) -> None:
        if self._given_up.is_set():
            raise CancelledError
        entry = self._chunks.get(name)
        if entry is None:
            with open(self._arena / name, "xb") as file:
                file.truncate(len(chunk))
            return
        if not self._read(self._directory / name, chunk, entry):
            raise ImageDamaged("The image is damaged: device memory.", files=[f"{_CRIU}/{DIRECTORY}/{name}"])
        direct.write(self._arena / name, chunk, len(chunk), size=len(chunk))

    def _read(self, file: Path, chunk: memoryview, entry: FileEntry) -> bool:
        """Whether the chunk is now what its file was made of; nothing is decompressed that is not proved."""
        if not self._prove:
            return len(direct.read(file, chunk, len(chunk))) == len(chunk)
        if entry.content.bytes != len(chunk) or entry.bytes > len(chunk):
            return False
        into = chunk if entry.raw is None else compression.room(len(chunk))
        data = direct.read(file, into, entry.bytes)
        if len(data) != entry.bytes or blake3(data).hexdigest() != entry.blake3:
            return False
        # By the hash of the content it will be known again.
        return entry.raw is None or (
            compression.decompress(data, chunk) and blake3(chunk).hexdigest() == entry.raw.blake3
        )

    def require(self) -> bool:
        """Wait until everything is there; False if it was stopped.  Raises `ImageDamaged`, `OSError`."""
        try:
            self._filled.result()
        except CancelledError:
            return False
        return True

    def stop(self) -> None:
        """Nobody wants it any more: `require` returns soon.  From any thread."""
        self._given_up.set()

    def give_up(self) -> None:
        """`stop`, and nothing is read when this returns."""
        self.stop()
        self._thread.shutdown(wait=True)


def path(arena: int) -> Path:
    """Of an arena, while the descriptor is open."""
    return Path(f"/proc/self/fd/{arena}")


def size(arena: int) -> int:
    """Bytes of an arena."""
    with os.scandir(arena) as files:
        return sum(file.stat().st_size for file in files if not file.name.startswith("."))


def entries(manifest: Manifest) -> dict[str, FileEntry]:
    """Of the chunks in an image, by their names as `write` gives them."""
    place = f"{_CRIU}/{DIRECTORY}/"
    return {name.removeprefix(place): one for name, one in manifest.files.items() if name.startswith(place)}


def _each(size: int, work: Callable[[str, memoryview], T], depth: int) -> list[T]:
    """What ``work`` returns for each chunk of so many bytes, given its name and a buffer; ``depth`` at a time.

    After an error no further one is begun.
    """
    starts = range(0, size, CHUNK)
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(min(depth, len(starts))):
        buffers.put(direct.buffer(CHUNK))

    def one(at: int) -> T:
        buffer = buffers.get()
        try:
            return work(f"{at // CHUNK:06d}.img", buffer[: min(CHUNK, size - at)])
        finally:
            buffers.put(buffer)

    with ThreadPoolExecutor(depth) as pool:
        try:
            return list(pool.map(one, starts))
        finally:
            pool.shutdown(cancel_futures=True)
