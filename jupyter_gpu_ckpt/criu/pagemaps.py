"""CRIU's pagemaps: which memory of a process, at which addresses, is in a file of pages, and in which order.

In CRIU's source: images/pagemap.proto, pagemap.c, include/image.h (release 4.2).
"""

from __future__ import annotations

import mmap
from pathlib import Path

from ..errors import ImageFormat
from .images import fields_of, number_of, records

PAGEMAP_MAGIC = 0x56084025
# messages pagemap_head and pagemap_entry, and flags of the latter
HEAD_NUMBER = 1
ADDRESS, FLAGS, PAGES = 1, 4, 5
IN_PARENT, LAZY, PRESENT = 1, 2, 4

_PAGE = mmap.PAGESIZE


def windows(directory: Path, size: int) -> dict[Path, list[int]]:
    """Return by file of pages of a dump how many bytes of each window of ``size`` bytes of addresses it has, in order.

    A change of memory changes the bytes of its window; those of others stay as they are, wherever they are in the file.
    A file that is not understood is left out.
    """
    found: dict[Path, list[int]] = {}
    for pagemap in directory.glob("pagemap-*.img"):
        try:
            head, *entries = records(pagemap, PAGEMAP_MAGIC)
            pages = directory / f"pages-{number_of(fields_of(head), HEAD_NUMBER)}.img"
            lengths = _windows(entries, size)
            if pages not in found and pages.stat().st_size == sum(lengths):
                found[pages] = lengths
        except (ImageFormat, OSError, ValueError):
            continue
    return found


def _windows(entries: list[bytes], size: int) -> list[int]:
    lengths: list[int] = []
    window = None
    for entry in entries:
        fields = fields_of(entry)
        at, pages, flags = (number_of(fields, wanted) for wanted in (ADDRESS, PAGES, FLAGS))
        if at is None or pages is None or flags is None:
            raise ImageFormat("an entry of the pagemap is of an unknown kind.")
        end = at + pages * _PAGE if flags & PRESENT else at
        while at < end:
            if at // size != window:
                window = at // size
                lengths.append(0)
            stop = min(end, (at // size + 1) * size)
            lengths[-1] += stop - at
            at = stop
    return lengths
