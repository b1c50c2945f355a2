"""The mappings of a dump's processes; and what the image must say of them so that a restore shares memory again.

On a restore CRIU forks each process and lets it keep a mapping of its parent process that is in both images: then pages
with the same bytes are shared again.  `aligned` makes up for two ways in which CRIU 4.2 misses such mappings.

- It walks through the mappings of both processes in the order of their addresses, and where the child has one that the
  parent has not, it passes over the next one that both have (``prepare_cow_vmas_for`` in its mem.c): one library that
  only a worker has loaded, and gigabytes may not be shared.  There the parent's image gets a *mark*: an entry without
  length of no kind, which CRIU restores nothing for, and at which the walk stops in time.
- It compares mappings as a whole, start and end.  Linux joins neighbours, and the heap grows: what the kernel allocates
  after it has forked a worker often is one mapping with what both have.  Such mappings are *split* in the images where
  they begin to differ.  Linux joins the parts again as they are restored, where CRIU maps them side by side before
  (`Aligned.whole`); but not in a child, where its parent has given up a part since.  There mremap(2) cannot enlarge
  all of it at once; realloc(3) then copies.

In CRIU's source: images/mm.proto, images/vma.proto, mem.c, cr-restore.c, pie/restorer.c (release 4.2).
"""

from __future__ import annotations

import bisect
import itertools
import logging
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import ImageFormat
from . import tasks
from .images import MM_MAGIC, VARINTS, Field, encode, fields_of, number_of, records, rewrite, varint

_log = logging.getLogger(__name__)

# messages mm_entry and vma_entry, all fields of which are varints: start, end, shmid, prot, flags, status
_MM_PROGRAM, _MM_VMAS = 12, 14
_START, _END = 1, 2
_VMA_KEYS = tuple(bytes([number << 3]) for number in (_START, _END, 4, 5, 6, 7))
#: Kinds of memory that CRIU restores from parent images: private, anonymous or a file's; the stack and heap are marked.
_PRIVATE_FILE, _PRIVATE_ANONYMOUS = 1 << 6, 1 << 9
_PRIVATE = _PRIVATE_FILE | _PRIVATE_ANONYMOUS
_ORDINARY = _PRIVATE | 1 << 0 | 1 << 1 | 1 << 5
#: Entries behind the mappings: guard pages within them.
_GUARD = 1 << 16
_MAP_ANONYMOUS, _MAP_GROWSDOWN, _MAP_HUGETLB, _MAP_NORESERVE = 0x20, 0x100, 0x40000, 0x4000

#: Bytes of the largest mapping in a process with a reference that may be a mere reservation of addresses: not writable,
#: or not backed.  For a moment CRIU maps all private memory of such a process a second time, and writable
#: (``premap_private_vma``), which Linux refuses for more than there is host memory.  What a process has inherited from
#: its parent process is mapped like that anyhow.
_RESERVED = 2 << 30
#: Raised for an image that is not understood.
_UNKNOWN = (ImageFormat, OSError, KeyError, ValueError, IndexError)


class Vma(NamedTuple):
    """A mapping of a process; ``file``: the number of the file that is mapped; ``entry``: all that the image says."""

    start: int
    end: int
    file: int = 0
    protection: int = 0
    flags: int = 0
    status: int = 0
    entry: bytes = b""

    @property
    def replaceable(self) -> bool:
        """Return whether CRIU can restore its pages from a parent image."""
        return bool(self.status & _PRIVATE) and not (self.status & ~_ORDINARY or self.flags & _MAP_HUGETLB)

    @property
    def reserves(self) -> bool:
        """Return whether it may reserve more addresses than there is host memory."""
        writable = self.protection & mmap.PROT_WRITE and not self.flags & _MAP_NORESERVE
        return not writable and self.end - self.start > _RESERVED

    @property
    def grows_down(self) -> bool:
        """Return whether it is a stack that Linux enlarges."""
        return bool(self.flags & _MAP_GROWSDOWN)

    def inherits(self, other: Vma) -> bool:
        """Return whether it is inherited from that mapping of the parent process, as ``check_cow_vmas`` has it."""
        same = _MAP_ANONYMOUS | _MAP_GROWSDOWN
        return (
            (self.start, self.end, self.flags & same) == (other.start, other.end, other.flags & same)
            and self.replaceable
            and other.replaceable
            and (bool(self.flags & _MAP_ANONYMOUS) or self.file == other.file)
        )


def read(directory: Path, pid: str) -> tuple[int | None, list[Vma]]:
    """Return the number of the file of a process's program, and its mappings.

    Raises `ImageFormat`, and `KeyError`, `ValueError` or `IndexError` for what is not understood.
    """
    fields = _fields(directory, pid)
    return number_of(fields, _MM_PROGRAM), _parsed(fields, {})


def _fields(directory: Path, pid: str) -> list[Field]:
    (record,) = records(_file(directory, pid), MM_MAGIC)
    return fields_of(record)


def _file(directory: Path, pid: str) -> Path:
    return directory / f"mm-{pid}.img"


def _parsed(fields: list[Field], known: dict[bytes, Vma]) -> list[Vma]:
    """Return the mappings; ``known``: by entry, which relatives have in common."""
    found = []
    for number, _, value in fields:
        if number == _MM_VMAS and isinstance(value, bytes):
            if value not in known:
                words = VARINTS.findall(value)
                vma = dict(zip(words[::2], words[1::2], strict=False))
                start, end, file, protection, flags, status = (varint(vma[key])[0] for key in _VMA_KEYS)
                known[value] = Vma(start, end, file, protection, flags, status, value)
            found.append(known[value])
    return found


# -- what a restore shares --------------------------------------------------------------------------------------------

Mappings = dict[str, list[Vma]]


class Aligned(NamedTuple):
    """Records of CRIU for a restore, where they are not those of the dump.

    ``records``: of ``mm-PID.img``, by pid.  ``whole``: processes all of whose private memory CRIU must map before it
    forks their children, as it does where there is a parent image: only then Linux joins the parts of a split mapping.
    """

    records: dict[str, bytes]
    whole: frozenset[str]


#: For a restore by CRIU's own records.
AS_DUMPED = Aligned({}, frozenset())


class _RelatedVmas(NamedTuple):
    """The processes of a dump; ``parents``: of those that run their parent's program, by pid."""

    fields: dict[str, list[Field]]
    mappings: Mappings
    guards: Mappings
    parents: dict[str, str]


def _tree(directory: Path) -> _RelatedVmas:
    above = {pid: parent for pid, parent in tasks.parents(directory).items() if _file(directory, pid).exists()}
    fields = {pid: _fields(directory, pid) for pid in above}
    programs = {pid: number_of(each, _MM_PROGRAM) for pid, each in fields.items()}
    parents = {pid: parent for pid, parent in above.items() if parent in above and programs[pid] == programs[parent]}
    known: dict[bytes, Vma] = {}
    found = {pid: _parsed(fields[pid], known) for pid in above if pid in {*parents, *parents.values()}}
    return _RelatedVmas(
        fields,
        {pid: [one for one in each if one.status != _GUARD] for pid, each in found.items()},
        {pid: [one for one in each if one.status == _GUARD] for pid, each in found.items()},
        parents,
    )


def aligned(directory: Path) -> Aligned:
    """Return what a restore of the dump in ``directory`` needs so that its processes share what they can.

    Nothing where they have no relatives, or where something is not understood.
    """
    try:
        tree = _tree(directory)
        parts = split(tree.mappings, tree.parents)
        after = marked(parts, tree.parents, _reserved(tree.mappings, tree.parents))
        changed = [pid for pid, each in after.items() if each != tree.mappings[pid]]
        records = {pid: _record(tree.fields[pid], [*after[pid], *tree.guards[pid]]) for pid in changed}
    except _UNKNOWN as error:
        _log.info("The mappings stay as CRIU wrote them: %s", error)
        return AS_DUMPED
    return Aligned(records, frozenset(pid for pid in changed if len(parts[pid]) > len(tree.mappings[pid])))


def replace(view: Path, records: Mapping[str, bytes]) -> None:
    """Write the records that `aligned` has found to a view of the dump.  Raises `OSError`."""
    for pid, record in records.items():
        rewrite(_file(view, pid), MM_MAGIC, [record])


def inherited(directory: Path) -> dict[str, tuple[str, list[tuple[int, int]]]]:
    """Return by pid what a restore lets a process inherit: its parent's pid, and start and end of mappings, sorted."""
    try:
        tree = _tree(directory)
        parts = split(tree.mappings, tree.parents)
        after = marked(parts, tree.parents, _reserved(tree.mappings, tree.parents))
    except _UNKNOWN:
        return {}
    return {
        pid: (parent, [(one.start, one.end) for one in walk(after[pid], after[parent])])
        for pid, parent in tree.parents.items()
    }


def _record(fields: list[Field], mappings: Iterable[Vma]) -> bytes:
    """Encode a process's record with other mappings."""
    at = next(index for index, field in enumerate(fields) if field[0] == _MM_VMAS)
    others = [[field for field in part if field[0] != _MM_VMAS] for part in (fields[:at], fields[at:])]
    new: list[Field] = [(_MM_VMAS, 2, one.entry) for one in mappings]
    return b"".join(map(encode, [*others[0], *new, *others[1]]))


def walk(child: list[Vma], parent: list[Vma]) -> list[Vma]:
    """Return the mappings that CRIU lets a process inherit from its parent process (``prepare_cow_vmas_for``)."""
    found, at, above = [], 0, 0
    while child and parent:
        if child[at].inherits(parent[above]):
            found.append(child[at])
        while child[at].start <= parent[above].start:
            at += 1
            if at == len(child):
                return found
        while parent[above].start < child[at].start:
            above += 1
            if above == len(parent):
                return found
    return found


def split(mappings: Mappings, parents: Mapping[str, str]) -> Mappings:
    """Split anonymous mappings where those of a process and of its parent process begin to differ."""
    found = {pid: list(each) for pid, each in mappings.items()}
    reserved = _reserved(mappings, parents)  # of a process with others CRIU must not map everything, see `_RESERVED`
    fixed = {pid for pid in found if any(one.reserves and one.start not in reserved[pid] for one in found[pid])}
    changed = True
    while changed:  # a cut in one process is one in its relatives
        changed = False
        for pid, parent in parents.items():
            if fixed & {pid, parent}:
                continue
            cuts = _cuts(found[pid], found[parent])
            for each in (pid, parent) if cuts else ():
                parts = [part for one in found[each] for part in _parts(one, cuts)]
                changed = changed or len(parts) > len(found[each])
                found[each] = parts
    return found


def _reserved(mappings: Mappings, parents: Mapping[str, str]) -> dict[str, set[int]]:
    """Return where each process reserves addresses which CRIU maps beforehand in any case: they are inherited."""
    found: dict[str, set[int]] = {pid: set() for pid in mappings}
    reserving = {pid for pid, each in mappings.items() if any(one.reserves for one in each)}
    for pid, parent in parents.items():
        if {pid, parent} <= reserving:
            starts = {one.start for one in walk(mappings[pid], mappings[parent]) if one.reserves}
            found[pid] |= starts
            found[parent] |= starts
    return found


def _cuts(one: list[Vma], other: list[Vma]) -> list[int]:
    """Return where mappings that overlap begin and end, sorted, if CRIU could share what both have."""
    found, at = set(), 0
    same = set(map(id, one)) & set(map(id, other))  # nearly all, and the same objects
    others = [each for each in other if id(each) not in same]
    ends = [each.end for each in others]
    for mine in (each for each in one if id(each) not in same):
        at = bisect.bisect_right(ends, mine.start, at)
        for theirs in itertools.islice(others, at, None):
            if theirs.start >= mine.end:
                break
            if _splits(mine) and _splits(theirs) and (mine.start, mine.end) != (theirs.start, theirs.end):
                found |= {mine.start, mine.end, theirs.start, theirs.end}
    return sorted(found)


def _splits(one: Vma) -> bool:
    """Return whether a mapping may be split: ordinary memory that is no mere reservation."""
    return (
        one.replaceable
        and bool(one.status & _PRIVATE_ANONYMOUS and one.flags & _MAP_ANONYMOUS)
        and not (one.reserves or one.grows_down)
    )


def _parts(one: Vma, cuts: list[int]) -> list[Vma]:
    within = cuts[bisect.bisect_right(cuts, one.start) : bisect.bisect_left(cuts, one.end)]
    if not within or not _splits(one):
        return [one]
    return [_moved(one, *each) for each in itertools.pairwise([one.start, *within, one.end])]


def _moved(one: Vma, start: int, end: int) -> Vma:
    new = {_START: start, _END: end}
    entry = b"".join(encode((number, kind, new.get(number, value))) for number, kind, value in fields_of(one.entry))
    return one._replace(start=start, end=end, entry=entry)


def marked(mappings: Mappings, parents: Mapping[str, str], reserved: Mapping[str, set[int]]) -> Mappings:
    """Add marks to parents' mappings, where CRIU would pass over a mapping that a process inherits.

    ``reserved``: where they have reserved addresses that are inherited without a mark; others are not to be.
    """
    found = {pid: list(each) for pid, each in mappings.items()}
    for pid in _children_first(parents):
        parent = found[parents[pid]]
        starts = {one.start: one for one in parent}
        for before, one in itertools.pairwise(found[pid]):
            other = starts.get(one.start)
            if before.start in starts or other is None or not one.inherits(other):
                continue
            if one.reserves and one.start not in reserved[pid]:
                continue
            at = bisect.bisect_left(parent, before.start, key=lambda each: each.start)
            if not parent[at].grows_down:  # CRIU looks at the mapping before a stack
                starts[before.start] = mark = _mark(one, before.start)
                parent.insert(at, mark)
    return found


def _mark(like: Vma, address: int) -> Vma:
    """Return an entry without length, and without a kind: no field has a value but the addresses."""
    new = {_START: address, _END: address}
    entry = b"".join(encode((number, kind, new.get(number, 0))) for number, kind, _ in fields_of(like.entry))
    return Vma(address, address, entry=entry)


def _children_first(parents: Mapping[str, str]) -> list[str]:
    """Return the processes, each before its parent."""

    def depth(pid: str) -> int:
        above = 0
        while pid in parents and above <= len(parents):
            pid, above = parents[pid], above + 1
        return above

    return sorted(parents, key=depth, reverse=True)
