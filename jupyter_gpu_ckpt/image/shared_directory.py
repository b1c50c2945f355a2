"""The pieces of one image in a directory that hosts share: `remote` without fsspec in the way of the bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from ..errors import ImageFormat
from . import direct
from .disk import flush
from .pieces import Piece

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
        draft = self.path / f"{name}.part"
        draft.write_bytes(data)
        self._publish(draft, name)

    def send(self, piece: Piece, root: Path, there: int | None) -> int | None:
        """A piece of the image at ``root``, and read back; the bytes that had to be sent, None if they arrived changed.

        ``there``: the size of what lies there under its name.
        """
        if all(direct.is_zero(mine) for _, mine in self._chunks(piece, root)):
            (self.path / piece.name).unlink(missing_ok=True)  # a pull would take it for the content
            return 0
        if there == piece.length and self._has(piece, root):
            return 0
        self._write(piece, root)
        return piece.length if self._has(piece, root) else None

    def fetch(self, piece: Piece, into: memoryview) -> memoryview:
        """A piece in a buffer, as far as there is one."""
        return direct.read(self.path / piece.name, into, piece.length)

    def _chunks(self, piece: Piece, root: Path) -> Iterator[tuple[int, memoryview]]:
        """What is to be sent, in parts that are good until the next one: where in the piece, and the bytes."""
        for at in range(0, piece.length, _CHUNK):
            length = min(_CHUNK, piece.length - at)
            mine = direct.read(root / piece.file, self._buffers()[0], length, piece.offset + at, cached=True)
            if len(mine) != length:
                raise ImageFormat("The image is shorter than its manifest says.", file=piece.file)
            yield at, mine

    def _write(self, piece: Piece, root: Path) -> None:
        draft = self.path / f"{piece.name}.part"
        draft.unlink(missing_ok=True)
        for at, mine in self._chunks(piece, root):
            direct.write(draft, self._buffers()[0], len(mine), offset=at, size=piece.length)
        self._publish(draft, piece.name)

    def _publish(self, draft: Path, name: str) -> None:
        flush(draft)
        draft.rename(self.path / name)

    def _has(self, piece: Piece, root: Path) -> bool:
        other = self._buffers()[1]
        there = self.path / piece.name
        return all(
            direct.same(direct.read(there, other, len(mine), at), mine) for at, mine in self._chunks(piece, root)
        )

    def _buffers(self) -> tuple[memoryview, memoryview]:
        if not hasattr(self._own, "buffers"):
            self._own.buffers = direct.buffer(_CHUNK), direct.buffer(_CHUNK)
        found: tuple[memoryview, memoryview] = self._own.buffers
        return found
