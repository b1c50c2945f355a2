"""Print lines, tables and progress for people: in colour on a terminal, as plain text elsewhere.

Nothing that is printed here can write to the terminal by itself: every text goes through `printable`, and none is
interpreted as markup.  `rich` is imported on terminals only; programs that read a pipe do not wait for it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from ..terminal_text import printable

if TYPE_CHECKING:
    from rich.console import Console

#: A text, or a text and its style in `rich`'s words.
Part = str | tuple[str, str]


@dataclass(frozen=True)
class Column:
    """The heading of a column, and whether its cells are numbers, which are aligned to the right."""

    title: str
    number: bool = False


class Terminal:
    """One output stream, as people read it.  ``width`` is that of the terminal; None for a file or a pipe."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._console = _console(self._stream) if self._stream.isatty() else None

    @property
    def width(self) -> int | None:
        return self._console.width if self._console is not None else None

    def line(self, *parts: Part) -> None:
        """Print one line, however long: it is not wrapped, so that it can be copied."""
        if self._console is None:
            print("".join(_text(part) for part in parts), file=self._stream)
            return
        from rich.text import Text

        styled = ((_text(part), part[1] if isinstance(part, tuple) else "") for part in parts)
        self._console.print(Text.assemble(*styled), soft_wrap=True)

    def table(self, columns: Sequence[Column], rows: Sequence[Sequence[Part]], *, otherwise: str = "") -> None:
        """Print rows below their headings; without any, the line ``otherwise``.  On a terminal that is too narrow each
        row becomes a block of lines, one for each column: names are never cut or broken.
        """
        if not rows:
            self.line(otherwise)
            return
        titled = [[(column.title, "bold") for column in columns], *rows]
        widths = _widths(titled)
        if self.width is not None and sum(widths) + 2 * (len(widths) - 1) > self.width:
            longest = max(len(column.title) for column in columns)
            for number, row in enumerate(rows):
                if number:
                    self.line()
                for column, cell in zip(columns, row, strict=True):
                    self.line((f"{column.title:{longest}}  ", "bold"), cell)
        else:
            self.rows(titled, [column.number for column in columns])

    def rows(self, rows: Sequence[Sequence[Part]], numbers: Sequence[bool] = ()) -> None:
        """Print rows with aligned columns, to the right where ``numbers`` is true; lines are not wrapped."""
        widths = _widths(rows)
        for row in rows:
            self.line(*_row(row, numbers or [False] * len(row), widths))


def _widths(rows: Sequence[Sequence[Part]]) -> list[int]:
    return [max(_cells(_text(cell)) for cell in column) for column in zip(*rows, strict=True)]


def _row(row: Sequence[Part], numbers: Sequence[bool], widths: Sequence[int]) -> Iterator[Part]:
    """Yield the cells of a row with the spaces between them; none at its end."""
    last = max((index for index, cell in enumerate(row) if _text(cell)), default=0)
    for index, (cell, number, width) in enumerate(zip(row, numbers, widths, strict=True)):
        if index > last:
            return
        space = " " * (width - _cells(_text(cell)))
        yield "  " * (index > 0) + space * number
        yield cell
        if not number and index < last:
            yield space


@contextlib.contextmanager
def progress(total: int, label: str, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show on a terminal how much of ``total`` bytes is done; yield the callback that adds bytes, from any thread."""
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        yield lambda count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    description = TextColumn("{task.description}", markup=False)
    with Progress(description, *columns, console=_console(sys.stderr), transient=True) as bar:
        task = bar.add_task(printable(label), total=total)
        yield lambda count: bar.advance(task, count)


def _console(stream: TextIO) -> Console:
    """Make a console for a terminal; without any escape sequence where NO_COLOR is set or the terminal is dumb."""
    from rich.console import Console

    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "dumb") in ("dumb", "unknown")
    return Console(
        file=stream, color_system=None if plain else "auto", markup=False, highlight=False, emoji=False, soft_wrap=True
    )


def _text(part: Part) -> str:
    return printable(part if isinstance(part, str) else part[0])


def _cells(text: str) -> int:
    """Return the cells that a text takes on a terminal; two for each wide character."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
