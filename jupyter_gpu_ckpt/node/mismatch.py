"""A difference between this node and the one an image was made on."""

from __future__ import annotations

from dataclasses import dataclass

from ..terminal_text import printable


@dataclass(frozen=True)
class Mismatch:
    """A difference.  ``field``: a stable word; ``hard``: the image cannot be restored here; ``path``: of a file."""

    field: str
    what: str
    wanted: str
    found: str
    advice: str
    hard: bool
    path: str = ""

    def __str__(self) -> str:
        return printable(f"{self.what}: wanted {self.wanted}, found {self.found}. {self.advice}")
