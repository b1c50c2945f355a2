"""An image in pieces, as it lies elsewhere: `PIECE` bytes each, numbered by file and place, zeros left out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import ImageFormat
from ..image.manifest import Manifest

#: Bytes of one piece: large enough for the rate of an object store, small enough to be sent again.
PIECE = 16 << 20
_ZEROS = bytes(PIECE)


def zeros(length: int) -> bytes:
    """So many, of at most a piece."""
    return _ZEROS[:length]


class Piece:
    """A piece of a file of an image; ``length`` in bytes."""

    def __init__(self, file: str, number: int, count: int, offset: int, length: int) -> None:
        self.file, self.offset, self.length = file, offset, length
        self.name = f"{number:04d}-{count:06d}"

    def read(self, root: Path) -> bytes:
        """Its bytes, of the image at ``root``.  Raises `ImageFormat` when there are fewer, `OSError`."""
        fd = os.open(root / self.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), self.length, self.offset)
        if len(data) != self.length:
            raise ImageFormat("The image is shorter than its manifest says.", file=self.file)
        return data


def pieces(manifest: Manifest) -> Iterator[Piece]:
    """All pieces of an image, in the order of its files' names."""
    for number, (name, entry) in enumerate(sorted(manifest.files.items())):
        for count, offset in enumerate(range(0, entry.bytes, PIECE)):
            yield Piece(name, number, count, offset, min(PIECE, entry.bytes - offset))


class Journal:
    """The pieces that lie in their place already, for a pull that broke off and is asked for again.

    It may say too much after a crash of the machine; the proof at the end notices.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._done = set(path.read_text().split()) if path.exists() else set()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __contains__(self, name: str) -> bool:
        return name in self._done

    def add(self, name: str) -> None:
        """This piece lies in its place."""
        os.write(self._fd, f"{name}\n".encode())  # whole, whichever thread calls

    def close(self) -> None:
        """Nothing more is added."""
        os.close(self._fd)


def prepare(staged: Path, name: str, size: int) -> Path:
    """The file a pull writes into: its whole length from the start, one big hole at first."""
    path = staged / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, size)
    os.close(fd)
    return path
