"""Pages that processes of a dump share since a fork: once in the image, though CRIU writes them for each process.

CRIU's incremental images have what this needs: an entry of a process's pagemap may say that its pages are in the
*parent* image (``PE_PARENT``), at the same addresses.  That is meant for an earlier dump of the same process; here it
is another process of the same dump, its *reference*, which has the same bytes there.  `FILE` names the references, and
a restore gets a view of the image with a directory ``parent``, in which each process has the pagemap of its reference
(`add_parents`).  A reference can have one itself: then ``parent`` has a ``parent``.

CRIU writes one process after the other.  While it writes the next one, `SharedPages` rewrites those it has finished:
what is written twice is soon removed again, mostly before the disk has it.  Bytes are compared, not the numbers of page
frames, which only root can see.  Whatever is not understood stays as CRIU wrote it.

On a restore CRIU forks each process with the memory of its parent process and writes the pages that differ
(``restore_priv_vma_content`` in its mem.c), so that pages are shared again wherever in the image they are: those of
mappings that both have (`vmas`).

In CRIU's source: images/pagemap.proto, pagemap.c, mem.c, include/image.h (release 4.2).
"""

from __future__ import annotations

import bisect
import contextlib
import json
import logging
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from ..errors import ImageFormat
from ..files.atomic import write_atomically
from .images import Field, encode, fields_of, number_of, records, rewrite
from .pagemaps import ADDRESS, FLAGS, HEAD_NUMBER, IN_PARENT, LAZY, PAGEMAP_MAGIC, PAGES, PRESENT
from .vmas import inherited, read

_log = logging.getLogger(__name__)

#: The file beside CRIU's own, if pages were dropped: the reference's pid by pid.
FILE = "shared-pages.json"
#: The directory that CRIU takes for the parent image.
_PARENT = "parent"

_PAGE = mmap.PAGESIZE
#: Bytes that are compared at a time.
_BLOCK = 1 << 20
#: Pages of a process that are compared, to choose it as a reference or not.
_SAMPLES = 128
#: Of the processes with the same reference the last ones are candidates, and the first one.
_RECENT = 4
#: Bytes that a reference must save: a restore opens the pagemaps of all references.
_WORTH = 256 << 10
#: References in a row, from a process to its reference, to that one's and so on.  Forks of forks of forks could make a
#: row as long as there are processes, and CRIU keeps the files of a whole row open for each process that it restores.
_DEEPEST = 8


class _Range(NamedTuple):
    """Pages of a process from address ``start`` to ``end``; their bytes are at ``offset`` in pages file ``file``."""

    start: int
    end: int
    file: int = 0
    offset: int = 0

    def part(self, start: int, end: int) -> _Range:
        return _Range(start, end, self.file, self.offset + start - self.start)


class _Ranges:
    """Ranges of one process, in the order of their addresses."""

    def __init__(self, ranges: list[_Range]) -> None:
        self.all = ranges
        self._ends = [one.end for one in ranges]

    def within(self, start: int, end: int) -> Iterator[_Range]:
        """Yield what of the ranges lies between two addresses."""
        for at in range(bisect.bisect_right(self._ends, start), len(self.all)):
            one = self.all[at]
            if one.start >= end:
                return
            yield one.part(max(start, one.start), min(end, one.end))


class SharedPages:
    """Drops pages that another process has, too, from a dump in ``directory`` while CRIU writes it.

    ``parents``: the pids of the parent processes, by pid, as the processes see them.

    For one thread: `advance` from time to time while CRIU runs, and `finish` when it has ended well.  Both call
    ``check`` every few milliseconds, and raise what it raises; and `OSError` if the dump is of no more use.
    """

    def __init__(self, directory: Path, parents: Mapping[str, str]) -> None:
        self._directory = directory
        self._parents = parents
        self._next = 1
        self._numbers: dict[str, int] = {}  # of the files of pages, by pid
        self._memory: dict[str, _Ranges] = {}
        self._references: dict[str, str] = {}
        self._children: dict[str | None, list[str]] = defaultdict(list)  # by reference
        self._own, self._other = bytearray(_BLOCK), bytearray(_BLOCK)
        #: Bytes dropped so far.
        self.dropped = 0
        #: Bytes of all processes that they share again after a restore, but for the first of each; after `finish`.
        self.shared = 0

    def advance(self, check: Callable[[], object]) -> None:
        """Rewrite each process whose pages are complete, as those of the next one are begun."""
        while self._pages(self._next + 1).exists():
            self._rewrite_next(check)

    def finish(self, check: Callable[[], object]) -> None:
        """Rewrite what is left, and write `FILE`."""
        while self._pages(self._next).exists():
            self._rewrite_next(check)
        if self._references:
            write_atomically(self._directory / FILE, json.dumps(self._references), durable=False)
        self.shared = self._shared_again()

    def _shared_again(self) -> int:
        """Return the bytes that processes inherit on a restore: at the same place in the image as their parent's."""
        found = 0
        for pid, (parent, areas) in inherited(self._directory).items():
            if pid not in self._memory or parent not in self._memory:
                continue
            above = self._memory[parent]
            for own in (one for area in areas for one in self._memory[pid].within(*area)):
                for other in above.within(own.start, own.end):
                    if own.part(other.start, other.end) == other:
                        found += other.end - other.start
        return found

    def _pages(self, number: int) -> Path:
        return self._directory / f"pages-{number}.img"

    def _rewrite_next(self, check: Callable[[], object]) -> None:
        number, self._next = self._next, self._next + 1
        pid = self._owner(number)
        if pid is None:  # shared memory, of which CRIU writes one copy
            return
        check()
        pages, pagemap = self._pages(number), self._pagemap(pid)
        drafts = pages.with_suffix(".part"), pagemap.with_suffix(".part")
        try:
            try:
                entries = self._entries(pid, number)
                memory = _Ranges([own for own, _ in entries])
                replaceable = _Ranges(self._replaceable(pid))
                reference = self._choose(memory) if replaceable.all else None
                if reference is not None:
                    memory = self._write_drafts(pid, entries, replaceable, reference, *drafts, check)
            except (ImageFormat, OSError, KeyError, ValueError) as error:
                _log.info("The pages of process %s stay as CRIU wrote them: %s", pid, error)
                return
            if reference is not None:
                self.dropped += pages.stat().st_size - drafts[0].stat().st_size
                drafts[1].replace(pagemap)
                drafts[0].replace(pages)
                self._references[pid] = reference
            self._memory[pid] = memory
            self._children[reference].append(pid)
        finally:
            for draft in drafts:
                draft.unlink(missing_ok=True)

    def _pagemap(self, pid: str) -> Path:
        return self._directory / f"pagemap-{pid}.img"

    def _owner(self, number: int) -> str | None:
        """Return the process whose pages are in a pages file; None if it is no process's."""
        for path in self._directory.glob("pagemap-*.img"):
            pid = path.stem.partition("-")[2]
            if pid.isdecimal() and pid not in self._numbers:
                with contextlib.suppress(ImageFormat, StopIteration):  # CRIU has only begun to write it
                    self._numbers[pid] = number_of(fields_of(next(records(path, PAGEMAP_MAGIC))), HEAD_NUMBER) or 0
        return next((pid for pid, own in self._numbers.items() if own == number), None)

    def _entries(self, pid: str, number: int) -> list[tuple[_Range, list[Field]]]:
        """Return the entries of a process's pagemap.  Raises `ImageFormat` if a page is not present."""
        found, offset, before = [], 0, 0
        _, *entries = records(self._pagemap(pid), PAGEMAP_MAGIC)
        for fields in map(fields_of, entries):
            start, pages, flags = (number_of(fields, wanted) for wanted in (ADDRESS, PAGES, FLAGS))
            if start is None or not pages or start < before or (flags or 0) & ~LAZY != PRESENT:
                raise ImageFormat("an entry of the pagemap is of an unknown kind.")
            before = start + pages * _PAGE
            found.append((_Range(start, before, number, offset), fields))
            offset += pages * _PAGE
        if self._pages(number).stat().st_size != offset:
            raise ImageFormat("the pages are not those of the pagemap.")
        return found

    # -- the choice of a reference

    def _choose(self, memory: _Ranges) -> str | None:
        """Return the process that has most of ``memory``; None if none has enough to be worth it.

        From one process down to those that have it as their reference, as long as one of them fits better: they differ
        from it in their own pages only, so these decide.  Processes next to each other are likely to be relatives.
        No further than `_DEEPEST`: what such a process has of its own is then in the image once more.
        """
        chosen: str | None = None
        with _Files(self._pages) as files:
            for _ in range(_DEEPEST):
                if not (children := self._children.get(chosen)):
                    break
                candidates = {*children[:1], *children[-_RECENT:]}
                gain, best = max((self._gain(files, memory, pid, chosen), pid) for pid in candidates)
                if gain < _WORTH:
                    break
                chosen = best
        return chosen

    def _gain(self, files: _Files, memory: _Ranges, pid: str, reference: str | None) -> int:
        """Return how many more bytes of ``memory`` are those of process ``pid`` than of its reference, by samples."""
        own = [one for one in self._memory[pid].all if one.file == self._numbers[pid]]
        size = sum(one.end - one.start for one in own)
        every = max(1, size // _PAGE // _SAMPLES)
        found = 0
        for sample in _pages_of(own, every):
            for mine in memory.within(sample.start, sample.end):
                page = bytes(files.read(mine, self._own))
                found += files.read(sample, self._other) == page
                if reference is not None:
                    for other in self._memory[reference].within(sample.start, sample.end):
                        found -= files.read(other, self._other) == page
        return found * every * _PAGE

    # -- the comparison

    def _write_drafts(
        self,
        pid: str,
        entries: list[tuple[_Range, list[Field]]],
        replaceable: _Ranges,
        reference: str,
        pages: Path,
        pagemap: Path,
        check: Callable[[], object],
    ) -> _Ranges:
        """Write the pages that the ``reference`` does not have, and the pagemap; return where all pages are then."""
        other = self._memory[reference]
        left: list[_Range] = []
        written = [next(records(self._pagemap(pid), PAGEMAP_MAGIC))]
        with _Files(self._pages) as files, open(pages, "xb", buffering=0) as target:
            os.fchmod(target.fileno(), 0o600)
            for own, fields in entries:
                at = own.start
                for start, end in (*self._shared(files, own, replaceable, other, check), (own.end, own.end)):
                    if at < start:
                        left.append(_Range(at, start, own.file, target.tell()))
                        files.copy(own.part(at, start), target.fileno())
                        written.append(_entry(fields, at, start))
                    if start < end:
                        left += other.within(start, end)
                        written.append(_entry(fields, start, end, IN_PARENT))
                    at = end
        rewrite(pagemap, PAGEMAP_MAGIC, written)
        return _Ranges(left)

    def _replaceable(self, pid: str) -> list[_Range]:
        """Return the memory of a process that CRIU can restore from a parent image; none if it is to have none."""
        program, mappings = read(self._directory, pid)
        if reserving := [one for one in mappings if one.reserves]:
            parent = self._parents.get(pid)
            parent_program, others = read(self._directory, parent) if parent is not None else (None, [])
            if program != parent_program or not all(any(one.inherits(other) for other in others) for one in reserving):
                return []
        return sorted(_Range(one.start, one.end) for one in mappings if one.replaceable)

    def _shared(
        self, files: _Files, own: _Range, replaceable: _Ranges, other: _Ranges, check: Callable[[], object]
    ) -> Iterator[tuple[int, int]]:
        """Yield the addresses from and to which ``own`` has the same bytes as ``other``, as few as possible."""
        begun = ended = own.start
        for area in replaceable.within(own.start, own.end):
            for there in other.within(area.start, area.end):
                for start, end in self._same(files, own.part(there.start, there.end), there, check):
                    if start != ended:
                        if begun < ended:
                            yield begun, ended
                        begun = start
                    ended = end
        if begun < ended:
            yield begun, ended

    def _same(
        self, files: _Files, one: _Range, other: _Range, check: Callable[[], object]
    ) -> Iterator[tuple[int, int]]:
        """Compare two ranges of the same addresses; yield where they are the same."""
        for start in range(one.start, one.end, _BLOCK):
            check()
            end = min(start + _BLOCK, one.end)
            mine, theirs = files.read(one.part(start, end), self._own), files.read(other.part(start, end), self._other)
            if mine == theirs:
                yield start, end
                continue
            for at in range(0, end - start, _PAGE):
                if mine[at : at + _PAGE] == theirs[at : at + _PAGE]:
                    yield start + at, start + at + _PAGE


class _Files:
    """Pages files that are open for the body; ``path`` returns their paths."""

    def __init__(self, path: Callable[[int], Path]) -> None:
        self._path = path
        self._fds: dict[int, int] = {}

    def __enter__(self) -> _Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for fd in self._fds.values():
            os.close(fd)

    def _fd(self, number: int) -> int:
        if number not in self._fds:
            self._fds[number] = os.open(self._path(number), os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[number]

    def read(self, pages: _Range, into: bytearray) -> bytes | bytearray:
        """Return the bytes of at most `_BLOCK` of pages, in ``into`` where they fill it.  Raises `OSError`."""
        size, fd, done = pages.end - pages.start, self._fd(pages.file), 0
        with memoryview(into) as buffer:
            while done < size:
                count = os.preadv(fd, [buffer[done:size]], pages.offset + done)
                if count == 0:
                    raise OSError("the pages are cut short")
                done += count
        return into if size == len(into) else into[:size]

    def copy(self, pages: _Range, target: int) -> None:
        """Append pages to the file ``target``.  Raises `OSError`."""
        at, end = pages.offset, pages.offset + pages.end - pages.start
        while at < end:
            count = os.sendfile(target, self._fd(pages.file), at, min(end - at, 1 << 30))
            if count == 0:
                raise OSError("the pages are cut short")
            at += count


def _pages_of(ranges: list[_Range], every: int) -> Iterator[_Range]:
    """Yield every so many-th page."""
    skipped = every // 2
    for one in ranges:
        for at in range(one.start + skipped * _PAGE, one.end, every * _PAGE):
            yield one.part(at, at + _PAGE)
        skipped = (skipped - (one.end - one.start) // _PAGE) % every


def _entry(fields: list[Field], start: int, end: int, flags: int | None = None) -> bytes:
    """Encode the entry ``fields`` of a pagemap for other addresses, and with other flags."""
    new = {ADDRESS: start, PAGES: (end - start) // _PAGE} | ({} if flags is None else {FLAGS: flags})
    return b"".join(encode((number, kind, new.get(number, value))) for number, kind, value in fields)


def references(directory: Path) -> dict[str, str]:
    """Return the reference's pid, by pid, of the processes of a dump that have one.  Raises `ImageFormat`."""
    try:
        found = json.loads((directory / FILE).read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ImageFormat(f"The image's {FILE} cannot be read.") from error
    if not isinstance(found, dict) or not all(str(pid).isdecimal() for pid in [*found, *found.values()]):
        raise ImageFormat(f"The image's {FILE} is damaged.")
    return {pid: str(reference) for pid, reference in found.items()}


def add_parents(directory: Path, view: Path, references: Mapping[str, str], whole: Iterable[str] = ()) -> None:
    """Add what CRIU takes for parent images to the ``view`` of the dump in ``directory``.  Raises `OSError`.

    Level by level: a process has there the pagemap of its reference, below that one's, and so on; and all pages.
    Processes that are restored as a ``whole`` (`vmas.Aligned`) and have no reference get one that nothing is in.
    """
    level, pagemaps = view, {pid: pid for pid in whole} | dict(references)
    for _ in pagemaps:  # no more levels than that: references of an image that is damaged could go in a circle
        level = level / _PARENT
        level.mkdir(mode=0o700)
        for path in directory.glob("pages-*.img"):
            (level / path.name).symlink_to(path)
        for pid, reference in pagemaps.items():
            (level / f"pagemap-{pid}.img").symlink_to(directory / f"pagemap-{reference}.img")
        pagemaps = {pid: references[reference] for pid, reference in pagemaps.items() if reference in references}
        if not pagemaps:
            return
