"""CRIU's pagemaps: which memory of a process, at which addresses, is in a file of pages, and in which order.

In CRIU's source: images/pagemap.proto, pagemap.c, include/image.h (release 4.2).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ImageFormat
from .images import fields_of, number_of, records

PAGEMAP_MAGIC = 0x56084025
# messages pagemap_head and pagemap_entry, and flags of the latter
HEAD_NUMBER = 1
ADDRESS, FLAGS, PAGES = 1, 4, 5
IN_PARENT, LAZY, PRESENT = 1, 2, 4

_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Window:
    """The memory in a window of addresses, whose ``number`` is counted from address 0: runs of (address, bytes)."""

    number: int
    runs: tuple[tuple[int, int], ...]

    @property
    def bytes(self) -> int:
        """The bytes of all runs together."""
        return sum(length for _, length in self.runs)


@dataclass(frozen=True)
class Pages:
    """A file of pages: the name of its pagemap, which names the process, and its windows, in the order of the file."""

    pagemap: str
    windows: tuple[Window, ...]


def windows(directory: Path, size: int) -> dict[Path, Pages]:
    """Return the files of pages of a dump, in windows of ``size`` bytes of addresses.

    A change of memory changes the bytes of its window; those of others stay as they are, wherever they are in the file.
    A file that is not understood is left out.
    """
    found: dict[Path, Pages] = {}
    for pagemap in directory.glob("pagemap-*.img"):
        try:
            head, *entries = records(pagemap, PAGEMAP_MAGIC)
            pages = directory / f"pages-{number_of(fields_of(head), HEAD_NUMBER)}.img"
            divided = _windows(entries, size)
            if pages not in found and pages.stat().st_size == sum(each.bytes for each in divided):
                found[pages] = Pages(pagemap.name, divided)
        except (ImageFormat, OSError, ValueError):
            continue
    return found


def _windows(entries: Iterable[bytes], size: int) -> tuple[Window, ...]:
    found: list[tuple[int, list[tuple[int, int]]]] = []
    for entry in entries:
        fields = fields_of(entry)
        at, pages, flags = (number_of(fields, wanted) for wanted in (ADDRESS, PAGES, FLAGS))
        if at is None or pages is None or flags is None:
            raise ImageFormat("an entry of the pagemap is of an unknown kind.")
        end = at + pages * _PAGE if flags & PRESENT else at
        while at < end:
            number = at // size
            stop = min(end, (number + 1) * size)
            if not found or found[-1][0] != number:
                found.append((number, []))
            runs = found[-1][1]
            if runs and sum(runs[-1]) == at:
                runs[-1] = runs[-1][0], stop - runs[-1][0]
            else:
                runs.append((at, stop - at))
            at = stop
    return tuple(Window(number, tuple(runs)) for number, runs in found)
