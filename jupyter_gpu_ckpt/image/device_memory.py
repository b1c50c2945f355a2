"""Device memory in an image: one file a chunk, copied from and to the extents of host memory (`cuda/fastpath`).

CRIU does not see this memory.  A chunk of zeros only has no file in an image.  Chunks are hashed in memory on the way
out and on the way back, so nothing is read twice, and they bypass the page cache.  ``extents`` is the descriptor of a
directory whose files the kernel's library makes and removes; they have the names and sizes of chunks.  They are read
and written, never mapped: a mapping of a file that was cut short kills its reader.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from blake3 import blake3

from ..errors import ImageDamaged
from ..files import direct_io
from ..files.atomic import flush
from ..process import syscalls
from . import layout, spill
from .background_task import BackgroundTask
from .manifest import FileEntry, Manifest

T = TypeVar("T")

#: Bytes of every chunk but the last one; the native library's header has the same number.
CHUNK = 16 << 20
#: Chunks under way at a time: enough to fill a disk's queue; and while nobody waits, few enough to spare the machine.
_DEPTH, _DEPTH_AHEAD = 8, 2
#: The same of a read, which a wake waits for, on a machine with more processors: one copies 1 to 2 GB/s from memory.
_MOST_READERS = 12
#: Bytes of a chunk that are read, hashed and written at once: while they are in the processors' caches.
_PIECE = 4 << 20
#: ``statfs(2)`` of file systems in memory: tmpfs and ramfs.
_IN_MEMORY = frozenset({0x01021994, 0x858458F6})


#: Moves the chunk of this name and content from a cache to this path; returns False if the cache does not have it.
ClaimChunk = Callable[[str, FileEntry, Path], bool]


class Codec:
    """The form in which chunks are stored: as they are.  Methods are called from several threads at a time.

    ``when_full``: called where the disk is full; it returns to try again, or raises.
    """

    def __init__(self, claim: ClaimChunk | None = None, when_full: Callable[[], object] | None = None) -> None:
        self._claim, self._when_full = claim, when_full

    def store(self, source: Path, chunk: memoryview, path: Path) -> FileEntry:
        """Write ``chunk``, a `direct_io.buffer` with the content of the extent ``source``, to ``path``.

        It is moved from a cache, linked where the extent is on the same disk, or written.  Returns its entry for the
        manifest.  Raises `OSError`.
        """
        entry = FileEntry(len(chunk), blake3(chunk).hexdigest())
        if (self._claim is None or not self._claim(path.name, entry, path)) and not _link(source, path):
            self._write(path, chunk)
        return entry

    def _write(self, path: Path, chunk: memoryview) -> None:
        while True:
            try:
                return _write(path, chunk)
            except OSError as error:
                if self._when_full is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                path.unlink(missing_ok=True)
            self._when_full()

    def load(self, path: Path, entry: FileEntry, chunk: memoryview, target: Path) -> bool:
        """Write the chunk in the file ``path`` to the new file ``target``; return False if it does not match ``entry``.

        It is linked, and only read, where both are on the same disk.  ``chunk``: a `direct_io.buffer` of its length, to
        be used for that.  Raises `OSError`.
        """
        return _is(path, entry, chunk, None if _link(path, target) else target)


def _write(path: Path, chunk: memoryview) -> None:
    """Write a new file, and read it once where that is in memory.

    With the first read Linux notes every page as one in use, under one lock for all threads: 16 GiB are read by 12 of
    them in 0.69 s, from then on in 0.29 s (Linux 6.18, H200 machine, 2026-11-28).  A kernel waits for the next read.
    """
    direct_io.write(path, chunk, len(chunk), size=len(chunk))
    if is_in_memory(path):
        direct_io.read(path, chunk, len(chunk))


def is_in_memory(path: Path) -> bool:
    """Return whether a file or directory is on a file system in memory.  Raises `OSError`."""
    return syscalls.file_system(str(path)) in _IN_MEMORY


def _is(path: Path, entry: FileEntry, chunk: memoryview, copy: Path | None = None) -> bool:
    """Return whether a file is the chunk of ``entry``, and copy it.  ``chunk``: as in `Codec.load`."""
    hash, size = blake3(), len(chunk)
    for offset in range(0, size, _PIECE):
        length = min(_PIECE, size - offset)
        if len(piece := direct_io.read(path, chunk[:length], length, offset)) != length:
            return False
        hash.update(piece)
        if copy is not None:
            direct_io.write(copy, piece, length, offset=offset, size=size)
    return entry == FileEntry(size, hash.hexdigest())


def _link(source: Path, path: Path) -> bool:
    """Make ``path`` the same file as ``source``, if they are on one disk: the library writes to none with two names."""
    try:
        os.link(source, path)
    except OSError:
        return False
    return True


def write(
    extents: int,
    directory: Path,
    codec: Codec,
    check_cancelled: Callable[[], object],
    *,
    removes: bool = False,
    continues: int = 0,
) -> dict[str, FileEntry]:
    """Write the chunks of ``extents`` to a new ``directory``; its caller flushes them.

    Returns their entries by name.  Calls ``check_cancelled`` before each chunk.  ``removes``: each file of ``extents``
    once it is written.  ``continues``: the bytes of all, of which a process that was killed may have written some and
    removed their files.  Raises what ``check_cancelled`` raises, and `OSError`; what was written until then is left.
    """
    directory.mkdir(mode=0o700, exist_ok=continues > 0)
    source = path(extents)

    def write_chunk(name: str, chunk: memoryview) -> tuple[str, FileEntry] | None:
        check_cancelled()
        if continues and not (source / name).exists():
            return _written(directory / name, chunk)
        if continues:
            (directory / name).unlink(missing_ok=True)
        if len(direct_io.read(source / name, chunk, len(chunk))) != len(chunk):
            raise OSError(f"A file of device memory is shorter than it was: {name}.")
        entry = None if direct_io.is_zero(chunk) else codec.store(source / name, chunk, directory / name)
        if removes:
            (source / name).unlink()
        return None if entry is None else (name, entry)

    written = dict(filter(None, _each(continues or size(extents), write_chunk, _DEPTH)))
    if not written:  # an image has no empty directories
        directory.rmdir()
    return written


def _written(path: Path, chunk: memoryview) -> tuple[str, FileEntry] | None:
    """Return the name and entry of a chunk that is written; None for zeros, which have no file."""
    if not path.exists():
        return None
    content = direct_io.read(path, chunk, len(chunk))
    return path.name, FileEntry(len(content), blake3(content).hexdigest())


def write_ahead(extents: int, directory: Path, cached: dict[str, FileEntry], stopped: threading.Event) -> bool:
    """Update ``directory`` to hold the chunks of ``extents``, and ``cached`` to list them, until ``stopped`` is set.

    An entry of ``cached`` is true at any time, and its content on the disk, even if the extents change or are cut short
    meanwhile.  Returns whether all chunks are there.  Raises `OSError`; the chunks written until then stay.
    """
    source = path(extents)

    def update(name: str, chunk: memoryview) -> str | None:
        # The end of the interpreter waits for the threads of executors.
        if stopped.is_set() or not threading.main_thread().is_alive():
            return None
        try:
            complete = len(direct_io.read(source / name, chunk, len(chunk))) == len(chunk)
        except FileNotFoundError:
            complete = False
        if not complete:
            return None
        entry = None if direct_io.is_zero(chunk) else FileEntry(len(chunk), blake3(chunk).hexdigest())
        if cached.get(name) != entry:
            cached.pop(name, None)
            (directory / name).unlink(missing_ok=True)
            if entry is not None:
                _write(directory / name, chunk)
                flush(directory / name)
                cached[name] = entry
        return name

    names = _each(size(extents), update, _DEPTH_AHEAD)
    if None in names:
        return False
    for name in cached.keys() - set(names):  # of a larger image before
        del cached[name]
        (directory / name).unlink(missing_ok=True)
    return True


@dataclass
class DeviceRead:
    """Device memory that is being read from an image.  ``directory``: a new one beside the images, if it is there.

    ``prove``: reads it after the task, where that has only linked it; None where it was read, or the GPU has proved it.
    Raises `ImageDamaged`, `OSError`.
    """

    task: BackgroundTask
    directory: Path | None
    prove: Callable[[], None] | None = None

    def discard(self) -> None:
        """Read no more, and remove what was read to the disk.  Never raises."""
        self.task.cancel(wait_for_end=True)
        if self.directory is not None:
            spill.end(self.directory)


def begin_read(
    extents: int, size: int, directory: Path, chunks: Mapping[str, FileEntry], codec: Codec, *, only_links: bool = False
) -> BackgroundTask:
    """Begin to read ``chunks`` into the empty directory ``extents``, which the caller closes.

    Chunks that are not listed are zeros.  ``only_links``: those that can be linked are not read.  Raises `OSError` when
    no descriptor is left, `RuntimeError` when no thread can be started.
    """
    own = os.dup(extents)
    target = path(own)

    def read_all(check_cancelled: Callable[[], None]) -> None:
        def read(name: str, chunk: memoryview) -> None:
            check_cancelled()
            if (entry := chunks.get(name)) is None:
                with open(target / name, "xb") as file:
                    file.truncate(len(chunk))
                return
            if only_links and _link(directory / name, target / name):
                return
            if not codec.load(directory / name, entry, chunk, target / name):
                raise _damaged(name)

        try:
            _each(size, read, 1 if only_links else readers())
        finally:
            os.close(own)

    try:
        return BackgroundTask("gpu-ckpt-device", read_all)
    except BaseException:
        os.close(own)
        raise


def prove(directory: Path, size: int, chunks: Mapping[str, FileEntry]) -> None:
    """Read the files that were linked to a directory.  Raises `ImageDamaged` where one is not the chunk; `OSError`."""

    def require(name: str, chunk: memoryview) -> None:
        if (entry := chunks.get(name)) is not None and not _is(directory / name, entry, chunk):
            raise _damaged(name)

    _each(size, require, readers())


def _damaged(name: str) -> ImageDamaged:
    return ImageDamaged("The image is damaged: device memory.", files=[layout.device_file(name)])


def readers() -> int:
    """Return how many threads read or copy what is in memory, while a kernel waits."""
    return max(_DEPTH, min(_MOST_READERS, len(os.sched_getaffinity(0))))


def path(extents: int) -> Path:
    """Return the path of the directory while its descriptor is open."""
    return Path(f"/proc/self/fd/{extents}")


def size(extents: int) -> int:
    """Return the bytes of all extents."""
    with os.scandir(extents) as files:
        return sum(file.stat().st_size for file in files if not file.name.startswith("."))


def entries(manifest: Manifest) -> dict[str, FileEntry]:
    """Return the manifest's entries of chunks, by the names that `write` returns."""
    prefix = layout.device_file("")
    return {name.removeprefix(prefix): entry for name, entry in manifest.files.items() if name.startswith(prefix)}


def _each(size: int, work: Callable[[str, memoryview], T], depth: int) -> list[T]:
    """Return ``work`` of the name and a buffer of each chunk, ``depth`` at a time; after an error no chunk is begun."""
    starts = range(0, size, CHUNK)
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(min(depth, len(starts))):
        buffers.put(direct_io.buffer(CHUNK))

    def run(start: int) -> T:
        buffer = buffers.get()
        try:
            return work(f"{start // CHUNK:06d}.img", buffer[: min(CHUNK, size - start)])
        finally:
            buffers.put(buffer)

    with ThreadPoolExecutor(depth) as pool:
        try:
            return list(pool.map(run, starts))
        finally:
            pool.shutdown(cancel_futures=True)
