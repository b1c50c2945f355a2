"""The pieces of one image in a directory that hosts share: `remote` without fsspec in the way of the bytes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from ..errors import ImageFormat
from ..files import direct_io
from ..files.atomic import flush, write_atomically
from .parts import PIECE, Piece

#: Bytes that are written at a time: what several threads fill a disk with, and what stays in the CPU's cache.
_CHUNK = 2 << 20


class SharedDirectory:
    """Pieces below ``path``.  From any thread; every method raises `OSError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._own = threading.local()

    def prepare(self) -> None:
        """Make it; others may not enter it."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.mkdir(exist_ok=True, mode=0o700)

    def put(self, name: str, data: bytes) -> None:
        """A small file, whole or not at all, and on disk when this returns."""
        write_atomically(self.path / name, data, durable=True)

    def flush(self) -> None:
        """All that lies there is on disk when this returns, and its name.

        Once for all pieces: a flush for each holds up what the disk does for the others (measured: a tenth of a push).
        """
        for path in self.path.iterdir():
            flush(path)
        flush(self.path)

    def send(self, piece: Piece, root: Path, there: int | None) -> int | None:
        """A piece of the image at ``root``; the bytes that had to be sent, None if they arrived changed.

        It is on disk for sure after `flush`.  ``there``: the size of what lies there under its name.  What is there
        already is always compared.
        """
        mine = self._read(piece, root)
        if direct_io.is_zero(mine):
            (self.path / piece.name).unlink(missing_ok=True)  # a pull would take it for the content
            return 0
        if there == piece.length and self._has(piece, mine):
            return 0
        self._write(piece, mine)
        return piece.length if self._on_disk_here() or self._has(piece, mine) else None

    def fetch(self, piece: Piece, into: memoryview) -> memoryview:
        """A piece in a buffer, as far as there is one."""
        return direct_io.read(self.path / piece.name, into, piece.length)

    def _on_disk_here(self) -> bool:
        """Whether a disk of this machine holds it: then a flush says what it says of the image itself, which is not
        read back either.  Everything else has a file system without a device (stat(2): major number 0), and network or
        a program in between."""
        return os.major(self.path.stat().st_dev) != 0

    def _read(self, piece: Piece, root: Path) -> memoryview:
        mine = direct_io.read(root / piece.file, self._buffers()[0], piece.length, piece.offset, cached=True)
        if len(mine) != piece.length:
            raise ImageFormat("The image is shorter than its manifest says.", file=piece.file)
        return mine

    def _write(self, piece: Piece, mine: memoryview) -> None:
        draft = self.path / f"{piece.name}.part"
        draft.unlink(missing_ok=True)
        for at in range(0, piece.length, _CHUNK):
            part = self._buffers()[0][at : at + _CHUNK]
            direct_io.write(draft, part, min(_CHUNK, piece.length - at), offset=at, size=piece.length)
        draft.rename(self.path / piece.name)

    def _has(self, piece: Piece, mine: memoryview) -> bool:
        other, there = self._buffers()[1], self.path / piece.name
        parts = ((at, mine[at : at + _CHUNK]) for at in range(0, piece.length, _CHUNK))
        return all(direct_io.same(direct_io.read(there, other, len(part), at), part) for at, part in parts)

    def _buffers(self) -> tuple[memoryview, memoryview]:
        if not hasattr(self._own, "buffers"):
            self._own.buffers = direct_io.buffer(PIECE), direct_io.buffer(_CHUNK)
        found: tuple[memoryview, memoryview] = self._own.buffers
        return found
