"""The pieces of one image in a directory that hosts share: `remote` without fsspec in the way of the bytes."""

from __future__ import annotations

import threading
from pathlib import Path

from ..errors import ImageFormat
from . import direct, pieces
from .disk import flush
from .pieces import Piece


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
        mine, other = self._buffers()
        data = direct.read(root / piece.file, mine, piece.length, piece.offset)
        if len(data) != piece.length:
            raise ImageFormat("The image is shorter than its manifest says.", file=piece.file)
        if direct.is_zero(data):
            (self.path / piece.name).unlink(missing_ok=True)  # a pull would take it for the content
            return 0
        if there == piece.length and self._has(piece, data, other):
            return 0
        self._write(piece, mine)
        return piece.length if self._has(piece, data, other) else None

    def fetch(self, piece: Piece, into: memoryview) -> memoryview:
        """A piece in a buffer, as far as there is one."""
        return direct.read(self.path / piece.name, into, piece.length)

    def _write(self, piece: Piece, data: memoryview) -> None:
        draft = self.path / f"{piece.name}.part"
        draft.unlink(missing_ok=True)
        direct.write(draft, data, piece.length, size=piece.length)
        self._publish(draft, piece.name)

    def _publish(self, draft: Path, name: str) -> None:
        flush(draft)
        draft.rename(self.path / name)

    def _has(self, piece: Piece, data: memoryview, other: memoryview) -> bool:
        return direct.same(self.fetch(piece, other), data)

    def _buffers(self) -> tuple[memoryview, memoryview]:
        if not hasattr(self._own, "buffers"):
            self._own.buffers = direct.buffer(pieces.PIECE), direct.buffer(pieces.PIECE)
        found: tuple[memoryview, memoryview] = self._own.buffers
        return found
