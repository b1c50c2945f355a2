"""All rows by their keys."""

from __future__ import annotations

from . import computing, data, habits
from .row import Row


def rows() -> dict[str, Row]:
    """In the order of the page; those that need a GPU come last."""
    every = (*data.ROWS, *computing.ROWS, *habits.ROWS)
    return {row.key: row for row in sorted(every, key=lambda row: row.gpu)}
