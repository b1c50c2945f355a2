"""Chunks that save points share: what is equal has one file, with a name (a hard link) in each image that has it.

So there is no chain of parents: any save point can be deleted, and the file goes with the last one.  Device memory is
in chunks in any image; `split` divides the processes' large files of pages, by addresses: as the memory of a process
grows and shrinks, chunks of unchanged memory stay equal.

An interpreter changes a few pages of nearly every chunk (reference counts).  So a chunk of which no more than half has
changed is a link to that of an earlier save point, beside a file of the pages that are others now (`Stored`).  The
earlier one is whole memory in any case, and has a name in each image that needs it.

CRIU reads whole files, which a restore makes of the chunks (`whole`).  Nobody writes to a file of an image.  What is
encrypted is never equal, and shares nothing.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import mmap
import os
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3
from filelock import FileLock

from ..criu import pagemaps
from ..criu.pagemaps import Window
from ..errors import ImageDamaged
from ..files import clone, direct_io
from ..files.disk import mapped_errors
from . import device_memory, layout, verify
from .image import Image
from .manifest import FileEntry

#: Bytes of addresses in a chunk of a process's pages, fewer than of device memory: an array that changes takes others
#: along in the chunks of its two ends.
WINDOW = 4 << 20
#: Bytes of the smallest file of pages that is divided: the image of a small kernel has a few large files.
SMALLEST = 64 << 20
_THREADS = 4
_PAGE = mmap.PAGESIZE
#: What the name of a file of pages ends with in place of ``.img``: of the index of its chunks.
_INDEX = ".json"


#: A part of a window: whether it is among the changed pages, its offset there or in the chunk, and its bytes.
Part = tuple[bool, int, int]


@dataclass(frozen=True)
class Stored:
    """A window of memory in chunks: its ``number`` (`pagemaps.Window`), and the ``runs`` of addresses in its chunk.

    ``parts``: how the window is made of the chunk and of pages that have changed since; None: it is the chunk.
    """

    number: int
    runs: tuple[tuple[int, int], ...]
    parts: tuple[Part, ...] | None = None

    @property
    def bytes(self) -> int:
        """The bytes of the window's memory."""
        lengths = (each[-1] for each in (self.runs if self.parts is None else self.parts))
        return sum(lengths)


@dataclass(frozen=True)
class Index:
    """The chunks of a file of pages, in their order: how they are joined, and where in memory they were."""

    pagemap: str
    windows: list[Stored]

    def to_json(self) -> str:
        """Return the content of the file beside the chunks' directory."""
        return json.dumps({"pagemap": self.pagemap, "windows": [vars(each) for each in self.windows]})

    @classmethod
    def read(cls, path: Path) -> Index:
        """Read the index of an image.  Raises `OSError`, `ImageDamaged`."""
        try:
            found = json.loads(path.read_bytes())
            return cls(str(found["pagemap"]), [_stored(each) for each in found["windows"]])
        except (ValueError, KeyError, TypeError) as error:
            message = f"The image is damaged: {path.name} is not what it was."
            raise ImageDamaged(message, image=path.parent.parent.name, files=[path.name]) from error


def _stored(facts: dict[str, Any]) -> Stored:
    parts = facts["parts"]
    return Stored(
        int(facts["number"]),
        tuple((int(address), int(length)) for address, length in facts["runs"]),
        parts and tuple((bool(which), int(offset), int(length)) for which, offset, length in parts),
    )


@dataclass(frozen=True)
class KnownWindow:
    """A chunk of a save point that has the memory of a window, as it was then: file, entry, and runs of addresses."""

    path: Path
    entry: FileEntry
    runs: tuple[tuple[int, int], ...]


class KnownChunks:
    """The chunks of save points, for images that are being written on the same disk.

    ``points``: returns the save points; called when a chunk is looked for.
    """

    def __init__(self, points: Callable[[], Iterable[Image]] = tuple) -> None:
        self._find = points

    @functools.cached_property  # not at once: a kernel waits for the begin of an image
    def _points(self) -> list[Image]:
        return list(self._find())

    @functools.cached_property
    def _paths(self) -> dict[FileEntry, Path]:
        named = ((image, name, entry) for image in self._points for name, entry in image.manifest.files.items())
        return {entry: image.path / name for image, name, entry in named if layout.is_chunk(name)}

    def stored(self, pagemap: str) -> dict[int, KnownWindow]:
        """Return the chunks of windows of a process, the newest of each, by their numbers.

        Processes that go back to a save point, or branch from it, keep the name of their pagemap, and their addresses.
        """
        found: dict[int, KnownWindow] = {}
        for image in sorted(self._points, key=lambda image: image.manifest.created):
            for path in image.criu_directory.glob(layout.PAGES.removesuffix(".img") + _INDEX):
                with contextlib.suppress(OSError, ImageDamaged):  # deleted meanwhile; a restore finds the damage
                    if (index := Index.read(path)).pagemap == pagemap:
                        found |= _known_windows(image, path.stem, index)
        return found

    def link(self, name: str, content: FileEntry, target: Path) -> bool:
        """Make ``target`` a link to the chunk with this content; False where there is none.  From any thread.

        ``name`` does not matter: chunks are the same wherever they were in memory.
        """
        path = self._paths.get(content)
        with contextlib.suppress(OSError):  # deleted meanwhile
            return path is not None and path.lstat().st_size == content.bytes and link(path, target)
        return False


def _known_windows(image: Image, pages: str, index: Index) -> dict[int, KnownWindow]:
    found = {}
    for position, stored in enumerate(index.windows):
        name = f"{layout.CRIU}/{pages}/{_name(position)}"
        entry, length = image.manifest.files.get(name), sum(length for _, length in stored.runs)
        if entry is not None and entry.bytes == length:
            found[stored.number] = KnownWindow(image.path / name, entry, stored.runs)
    return found


def link(path: Path, target: Path) -> bool:
    """Make ``target`` a link to the chunk ``path``; False where that cannot be: it may have all links that it can."""
    with contextlib.suppress(OSError):
        facts = path.lstat()
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
            os.link(path, target, follow_symlinks=False)
            return True
    return False


def split(directory: Path, known: KnownChunks) -> dict[str, FileEntry]:
    """Divide the large files of pages in ``directory`` into chunks; return their entries by name in a manifest.

    Raises `OSError`.  The caller flushes the chunks.
    """
    entries: dict[str, FileEntry] = {}
    for path, pages in pagemaps.windows(directory, WINDOW).items():
        if path.stat().st_size < SMALLEST:
            continue
        chunks = path.with_suffix("")
        chunks.mkdir(mode=0o700)
        write = functools.partial(_write_window, path, chunks, known, known.stored(pages.pagemap))
        offsets = itertools.accumulate((window.bytes for window in pages.windows), initial=0)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="image-read") as pool:
            written = list(pool.map(write, itertools.count(), pages.windows, offsets))
        for _, files in written:
            entries |= {f"{layout.CRIU}/{chunks.name}/{name}": entry for name, entry in files.items()}
        index = Index(pages.pagemap, [stored for stored, _ in written])
        path.with_suffix(_INDEX).write_text(index.to_json())
        path.unlink()
    return entries


def _write_window(
    pages: Path,
    chunks: Path,
    known: KnownChunks,
    before: Mapping[int, KnownWindow],
    position: int,
    window: Window,
    offset: int,
) -> tuple[Stored, dict[str, FileEntry]]:
    """Write a window of memory as a chunk, or link to one; return how it is stored, and its files by name."""
    content = direct_io.read(pages, direct_io.buffer(window.bytes), window.bytes, offset)
    if len(content) != window.bytes:
        raise OSError(f"{pages.name} is shorter than it was.")
    name, entry = _name(position), FileEntry(len(content), blake3(content).hexdigest())
    whole = Stored(window.number, window.runs)
    if known.link(name, entry, chunks / name):
        return whole, {name: entry}
    if (base := before.get(window.number)) is not None and (compared := _changes(content, window, base)) is not None:
        changed, parts = compared
        if link(base.path, chunks / name):
            stored, files = Stored(window.number, base.runs, parts), {name: base.entry}
            if changed:
                other = _changed_name(position)
                files[other] = FileEntry(len(changed), blake3(changed).hexdigest())
                if not known.link(other, files[other], chunks / other):
                    (chunks / other).write_bytes(changed)
            return stored, files
    _write(chunks / name, content)
    return whole, {name: entry}


def _changes(content: memoryview, window: Window, base: KnownWindow) -> tuple[bytes, tuple[Part, ...]] | None:
    """Return the pages of a window that a chunk of other save points does not have, and how both make the window.

    Returns None where these are more than half of the window, or the chunk is not what it was.
    """
    try:
        had = base.path.read_bytes()
    except OSError:  # deleted meanwhile
        return None
    if FileEntry(len(had), blake3(had).hexdigest()) != base.entry:
        return None
    offsets = dict(zip(_addresses(base.runs), range(0, len(had), _PAGE), strict=True))
    changed, parts = bytearray(), _Parts()
    for at, address in enumerate(_addresses(window.runs)):
        page = bytes(content[at * _PAGE : (at + 1) * _PAGE])
        offset = offsets.get(address)
        if offset is not None and page == had[offset : offset + _PAGE]:
            parts.add(False, offset)
        else:
            parts.add(True, len(changed))
            changed += page
        if len(changed) > len(content) // 2:
            return None
    return bytes(changed), tuple(parts.found)


class _Parts:
    """Parts of a window, one page after the other; those that follow each other in a file are one."""

    def __init__(self) -> None:
        self.found: list[Part] = []

    def add(self, is_changed: bool, offset: int) -> None:
        if self.found:
            last, begin, length = self.found[-1]
            if last == is_changed and begin + length == offset:
                self.found[-1] = last, begin, length + _PAGE
                return
        self.found.append((is_changed, offset, _PAGE))


def _addresses(runs: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Yield the addresses of pages."""
    for address, length in runs:
        yield from range(address, address + length, _PAGE)


def _name(number: int) -> str:
    return f"{number:06d}.img"


def _changed_name(number: int) -> str:
    return f"{number:06d}-changed.img"


def _write(path: Path, chunk: memoryview) -> None:
    """Write a chunk, with holes in place of zeros."""
    if direct_io.is_zero(chunk):
        with open(path, "xb") as file:
            file.truncate(len(chunk))
        return
    direct_io.write(path, chunk, len(chunk), size=len(chunk))
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        verify.punch_zeros(fd, chunk, 0)
    finally:
        os.close(fd)


@contextlib.contextmanager
def whole(root: Path, directory: Path) -> Iterator[Path]:
    """Yield a view of CRIU's files with whole files of pages; ``directory`` itself where none of them is divided.

    They lie in the image directory ``root`` for the body, and share the chunks' blocks where the file system can.
    Raises `NoSpace`, `StoreUnwritable`, `ImageDamaged`.
    """
    if not (divided := _divided(directory)):
        yield directory
        return
    view = root / f"{layout.DRAFT}pages-{secrets.token_hex(6)}"
    lock = FileLock(root / f"{view.name}{layout.LOCK}", timeout=0, mode=0o600)
    try:
        with mapped_errors(root):
            lock.acquire()  # a sweep spares the view
            view.mkdir(mode=0o700)
            for path in directory.iterdir():
                if path not in divided:
                    (view / path.name).symlink_to(path)
            for path in divided:
                _join(path, view / f"{path.name}.img")
        yield view
    finally:
        shutil.rmtree(view, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def join(directory: Path, target: Path) -> set[str]:
    """Make whole files of pages in ``target`` of those in ``directory`` that are in chunks.

    Returns the names in a manifest that stand for them in ``directory``.  Raises `OSError`, `ImageDamaged`.
    """
    names: set[str] = set()
    for chunks in _divided(directory):
        target.mkdir(mode=0o700, exist_ok=True)
        _join(chunks, target / f"{chunks.name}.img")
        names |= {f"{layout.CRIU}/{chunks.name}/{path.name}" for path in chunks.iterdir()}
        names.add(f"{layout.CRIU}/{chunks.name}{_INDEX}")
    return names


def _divided(directory: Path) -> list[Path]:
    """Return the directories of chunks of files of pages."""
    return [path for path in directory.glob(layout.PAGES.removesuffix(".img")) if path.is_dir()]


def _join(chunks: Path, pages: Path) -> None:
    index = Index.read(chunks.with_suffix(_INDEX))
    *offsets, size = itertools.accumulate((stored.bytes for stored in index.windows), initial=0)

    def write(position: int, stored: Stored, offset: int) -> None:
        if stored.parts is None:
            if memory is None or not _read_into(chunks / _name(position), memory[offset : offset + stored.bytes]):
                clone.copy_into(chunks / _name(position), file.fileno(), offset)
            return
        had, changed = (chunks / name(position) for name in (_name, _changed_name))
        sources = had.read_bytes(), changed.read_bytes() if changed.exists() else b""
        made = b"".join(sources[which][begin : begin + length] for which, begin, length in stored.parts)
        if len(made) != stored.bytes:
            raise ImageDamaged(f"A chunk of {pages.name} is shorter than it was.", image=chunks.parent.parent.name)
        while made:
            written = os.pwrite(file.fileno(), made, offset)
            made, offset = made[written:], offset + written

    memory = None
    with (
        open(pages, "x+b") as file,
        contextlib.ExitStack() as resources,
        ThreadPoolExecutor(device_memory.readers(), thread_name_prefix="image-read") as pool,
    ):
        file.truncate(size)
        if size and device_memory.is_in_memory(pages):  # else blocks are shared, or the disk is what takes time
            mapped = resources.enter_context(mmap.mmap(file.fileno(), size))
            memory = resources.enter_context(memoryview(mapped))
        list(pool.map(write, itertools.count(), index.windows, offsets))


def _read_into(source: Path, memory: memoryview) -> bool:
    """Read a chunk into memory; return False if that has no space, or is a shorter one's.  Raises `OSError`."""
    with memory:
        try:
            if source.stat().st_size <= len(memory):
                clone.read_into(source, memory)
                return True
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
    return False


def divided_bytes(image: Image) -> int:
    """Return the bytes that the image directory needs for a restore of the image, at most, while it lasts."""
    files = image.manifest.files.items()
    return sum(entry.bytes for name, entry in files if layout.is_page_chunk(name))


class Together:
    """Bytes of several images, counting once what they share."""

    def __init__(self, images: Iterable[Image] = ()) -> None:
        self.bytes = 0
        self._names: Counter[tuple[int, int]] = Counter()
        for image in images:
            self.add(image)

    def add(self, image: Image) -> None:
        """Count an image."""
        self.bytes += image.manifest.bytes
        for file, (size, names, _) in _linked(image).items():
            self.bytes -= size * (names if self._names[file] else names - 1)
            self._names[file] += names

    def remove(self, image: Image) -> None:
        """Count an image no more."""
        self.bytes -= image.manifest.bytes
        for file, (size, names, _) in _linked(image).items():
            self._names[file] -= names
            self.bytes += size * (names if self._names[file] else names - 1)


def bytes_alone(image: Image) -> int:
    """Return the bytes that the deletion of an image would free: those that it shares with no other."""
    linked = _linked(image).values()
    kept = sum(size * (names if links > names else names - 1) for size, names, links in linked)
    return image.manifest.bytes - kept


def _linked(image: Image) -> Mapping[tuple[int, int], tuple[int, int, int]]:
    """Return the files that have several names: size, names in this image, and all names, by device and inode."""
    found: dict[tuple[int, int], tuple[int, int, int]] = {}
    for name, entry in image.manifest.files.items():
        if layout.is_linkable(name, of_branch=bool(image.manifest.branched_from)):
            with contextlib.suppress(OSError):  # it is in the cold tier, or was deleted meanwhile
                facts = (image.path / name).lstat()
                if facts.st_nlink > 1:
                    file = facts.st_dev, facts.st_ino
                    names = found[file][1] + 1 if file in found else 1
                    found[file] = entry.bytes, names, facts.st_nlink
    return found
