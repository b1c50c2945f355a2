"""Chunks that save points share: what is equal has one file, with a name (a hard link) in each image that has it.

So there is no chain of parents: any save point can be deleted, and the file goes with the last one.  Device memory is
in chunks in any image; `split` divides the processes' large files of pages, by addresses: as the memory of a process
grows and shrinks, chunks of unchanged memory stay equal.  CRIU reads whole files, which a restore makes of the chunks
(`whole`).  Nobody writes to a file of an image.  What is encrypted is never equal, and shares nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from blake3 import blake3
from filelock import FileLock

from ..criu import pagemaps
from ..files import clone, direct_io
from ..files.disk import mapped_errors
from . import layout, verify
from .image import Image
from .manifest import FileEntry

#: Bytes of addresses in a chunk of a process's pages, fewer than of device memory: an array that changes takes others
#: along in the chunks of its two ends.
WINDOW = 4 << 20
#: Bytes of the smallest file of pages that is divided: the image of a small kernel has a few large files.
SMALLEST = 64 << 20
_THREADS = 4


class KnownChunks:
    """The chunks of save points, for images that are being written on the same disk."""

    def __init__(self, images: Iterable[Image] = ()) -> None:
        self._paths: dict[FileEntry, Path] = {}
        for image in images:
            if image.is_save_point and not image.archived and image.manifest.encryption is None:
                files = image.manifest.files.items()
                self._paths |= {entry: image.path / name for name, entry in files if layout.is_chunk(name)}

    def link(self, name: str, content: FileEntry, target: Path) -> bool:
        """Make ``target`` a link to the chunk with this content; False where there is none.  From any thread.

        ``name`` does not matter: chunks are the same wherever they were in memory.
        """
        path = self._paths.get(content)
        with contextlib.suppress(OSError):  # deleted meanwhile
            return path is not None and path.lstat().st_size == content.bytes and link(path, target)
        return False


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
    for pages, lengths in pagemaps.windows(directory, WINDOW).items():
        if pages.stat().st_size < SMALLEST:
            continue
        chunks = pages.with_suffix("")
        chunks.mkdir(mode=0o700)

        def write(number: int, offset: int, length: int, pages: Path = pages, chunks: Path = chunks) -> FileEntry:
            chunk = direct_io.read(pages, direct_io.buffer(length), length, offset)
            if len(chunk) != length:
                raise OSError(f"{pages.name} is shorter than it was.")
            entry = FileEntry(length, blake3(chunk).hexdigest())
            path = chunks / _name(number)
            if not known.link(path.name, entry, path):
                _write(path, chunk)
            return entry

        offsets = [sum(lengths[:number]) for number in range(len(lengths))]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="image-read") as pool:
            written = list(pool.map(write, range(len(lengths)), offsets, lengths))
        entries |= {f"{layout.CRIU}/{chunks.name}/{_name(number)}": entry for number, entry in enumerate(written)}
        pages.unlink()
    return entries


def _name(number: int) -> str:
    return f"{number:06d}.img"


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
    Raises `NoSpace`, `StoreUnwritable`.
    """
    divided = [path for path in directory.glob(layout.PAGES.removesuffix(".img")) if path.is_dir()]
    if not divided:
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


def _join(chunks: Path, pages: Path) -> None:
    paths = sorted(chunks.iterdir())
    sizes = [path.stat().st_size for path in paths]
    offsets = [sum(sizes[:number]) for number in range(len(sizes))]
    with open(pages, "xb") as file, ThreadPoolExecutor(_THREADS, thread_name_prefix="image-read") as pool:
        file.truncate(sum(sizes))
        list(pool.map(lambda path, offset: clone.copy_into(path, file.fileno(), offset), paths, offsets))


def divided_bytes(image: Image) -> int:
    """Return the bytes that the image directory needs for a restore of the image, at most, while it lasts."""
    files = image.manifest.files.items()
    return sum(entry.bytes for name, entry in files if layout.is_chunk(name) and not layout.is_device_file(name))


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
    """Return the chunks that have several names: size, names in this image, and all names, by device and inode."""
    found: dict[tuple[int, int], tuple[int, int, int]] = {}
    for name, entry in image.manifest.files.items():
        if layout.is_chunk(name):
            with contextlib.suppress(OSError):  # it is in the cold tier, or was deleted meanwhile
                facts = (image.path / name).lstat()
                if facts.st_nlink > 1:
                    file = facts.st_dev, facts.st_ino
                    names = found[file][1] + 1 if file in found else 1
                    found[file] = entry.bytes, names, facts.st_nlink
    return found
