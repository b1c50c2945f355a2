"""Device memory in an image: the chunks of the arena (`engine/fastpath`), files both here and there, moved uncached.

CRIU does not see this memory.  A chunk of nothing but zeros has no file in an image.  Hashes are made of what is in
memory, on the way out and on the way back, so that nothing is read twice.  The arena is the descriptor of a directory,
whose files come and go with the kernel's wish; they are read and written, never mapped: who reads a mapping of a file
that was cut short is killed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol, TypeVar

from blake3 import blake3

from ..errors import ImageDamaged
from ..files import direct_io
from ..files.atomic import flush
from . import layout
from .manifest import FileEntry, Manifest

T = TypeVar("T")

#: Bytes of a chunk but the last; `arena.h` has the same.
CHUNK = 16 << 20
#: Chunks under way at a time: what fills a disk's queue.
_DEPTH = 8
#: While nobody waits for it: what leaves most of the machine to others.
_DEPTH_AHEAD = 2


#: Provides the chunk of this name and content at this path from a cache; False if the cache does not have it.
Take = Callable[[str, FileEntry, Path], bool]


def none_there(name: str, content: FileEntry, place: Path) -> bool:
    """A `Take` whose cache is empty."""
    return False


class Codec(Protocol):
    """How chunks are stored in the files of an image.  Its methods are called from several threads at a time."""

    def store(self, source: Path, chunk: memoryview, path: Path) -> FileEntry:
        """Make the file ``path`` of a chunk, which is the file ``source`` of the arena; its entry.  Raises `OSError`.

        ``chunk``: a `direct.buffer` with the content.
        """

    def load(self, path: Path, entry: FileEntry, chunk: memoryview) -> bool:
        """Fill ``chunk`` from the file ``path``; False if the file is not what ``entry`` says.  Raises `OSError`."""


class InTheClear:
    """Store chunks as they are: taken from a cache, linked where the arena is on the same disk, or written."""

    def __init__(self, take: Take = none_there) -> None:
        self._take = take

    def store(self, source: Path, chunk: memoryview, path: Path) -> FileEntry:
        """As `Codec.store`."""
        entry = FileEntry(len(chunk), blake3(chunk).hexdigest())
        if not self._take(path.name, entry, path):
            try:  # the very file, where both are on one disk; nobody writes to it again (`arena.c`)
                os.link(source, path)
            except OSError:
                direct_io.write(path, chunk, len(chunk), size=len(chunk))
        return entry

    def load(self, path: Path, entry: FileEntry, chunk: memoryview) -> bool:
        """As `Codec.load`."""
        whole = len(direct_io.read(path, chunk, len(chunk))) == len(chunk)
        return whole and entry == FileEntry(len(chunk), blake3(chunk).hexdigest())


def write(arena: int, directory: Path, codec: Codec, go_on: Callable[[], object]) -> dict[str, FileEntry]:
    """Write the chunks of the arena to files in ``directory``, which is made; they are flushed with their draft.

    Returns their entries by name.  ``go_on``: called before each chunk; what it raises ends it.  Raises `OSError`; what
    was written then is left.
    """
    directory.mkdir(mode=0o700)
    place = path(arena)

    def one(name: str, chunk: memoryview) -> tuple[str, FileEntry] | None:
        go_on()
        if len(direct_io.read(place / name, chunk, len(chunk))) != len(chunk):
            raise OSError(f"A file of device memory is shorter than it was: {name}.")
        if direct_io.is_zero(chunk):
            return None
        return name, codec.store(place / name, chunk, directory / name)

    written = dict(filter(None, _each(size(arena), one, _DEPTH)))
    if not written:  # an image has no empty directories
        directory.rmdir()
    return written


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
            whole = len(direct_io.read(place / name, chunk, len(chunk))) == len(chunk)
        except FileNotFoundError:
            whole = False
        if not whole:
            return None
        entry = None if direct_io.is_zero(chunk) else FileEntry(len(chunk), blake3(chunk).hexdigest())
        if there.get(name) != entry:
            there.pop(name, None)
            (directory / name).unlink(missing_ok=True)
            if entry is not None:
                direct_io.write(directory / name, chunk, len(chunk), size=len(chunk))
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
    codec:
        Reads and proves them.
    """

    def __init__(self, arena: int, size: int, directory: Path, chunks: Mapping[str, FileEntry], codec: Codec) -> None:
        self._given_up = threading.Event()
        self._arena, self._directory, self._chunks, self._codec = path(arena), directory, chunks, codec
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
        if not self._codec.load(self._directory / name, entry, chunk):
            raise ImageDamaged("The image is damaged: device memory.", files=[layout.device_file(name)])
        direct_io.write(self._arena / name, chunk, len(chunk), size=len(chunk))

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
    place = layout.device_file("")
    return {name.removeprefix(place): one for name, one in manifest.files.items() if name.startswith(place)}


def _each(size: int, work: Callable[[str, memoryview], T], depth: int) -> list[T]:
    """What ``work`` returns for each chunk of so many bytes, given its name and a buffer; ``depth`` at a time.

    After an error no further one is begun.
    """
    starts = range(0, size, CHUNK)
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(min(depth, len(starts))):
        buffers.put(direct_io.buffer(CHUNK))

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
