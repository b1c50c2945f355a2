"""Mappings that processes share: what CRIU lets a process inherit of the dump as it is, and as a restore has it."""

from __future__ import annotations

import random

import pytest
from test_shared_pages import ANONYMOUS, MM, OF_FILE, REGULAR, Dump, message, varint, write

from jupyter_gpu_ckpt.criu import images, shared_pages, vmas
from jupyter_gpu_ckpt.criu.vmas import Vma

PSTREE = 0x50273030
BASE = 0x200000000000
MB = 1 << 20
GUARD, HEAP = 1 << 16, 1 << 5


def area(start: int, end: int, flags: int = 0x22, status: int = REGULAR | ANONYMOUS) -> tuple[int, int, int, int]:
    """A mapping from and to so many MB above `BASE`."""
    return BASE + start * MB, BASE + end * MB, flags, status


class TreeDump:
    """The dump of a tree of processes; their parents by pid."""

    def __init__(self, tmp_path) -> None:
        self.directory = tmp_path / "criu"
        self.directory.mkdir()
        self.dump = Dump(self.directory)
        self.parents: dict[int, int] = {}

    def add(self, pid: int, parent: int, *areas: tuple[int, int, int, int], prot: int = 3, program: int = 1) -> None:
        self.dump.add(pid, {}, list(areas), prot=prot, program=program)
        self.parents[pid] = parent
        records = (message((1, pid), (2, above), (3, pid), (4, pid), (5, 1)) for pid, above in self.parents.items())
        write(self.directory / "pstree.img", PSTREE, *records)

    def restored(self, tmp_path) -> vmas.Aligned:
        """Make the view that CRIU would read."""
        found = vmas.aligned(self.directory)
        view = images.view(self.directory, tmp_path / "view", ())
        vmas.replace(view, found.records)
        self.directory = view
        return found

    def of(self, pid: int) -> list[Vma]:
        return vmas.read(self.directory, str(pid))[1]

    def shared(self, pid: int) -> list[tuple[int, int]]:
        """Return the memory that CRIU lets a process inherit, in MB above `BASE`."""
        found = criu_walk(self.of(pid), self.of(self.parents[pid]))
        return [((one.start - BASE) // MB, (one.end - BASE) // MB) for one in found]


def criu_walk(own: list[Vma], pvmas: list[Vma]) -> list[Vma]:
    """``prepare_cow_vmas_for``, line by line."""
    found, child, parent = [], iter(own), iter(pvmas)
    vma, pvma = next(child, None), next(parent, None)
    while vma is not None and pvma is not None:
        if vma.start == pvma.start and vma.end == pvma.end and (vma.flags ^ pvma.flags) & 0x120 == 0:
            private = all(one.status & (ANONYMOUS | OF_FILE) and not one.flags & 0x40000 for one in (vma, pvma))
            if private and (vma.flags & 0x20 or vma.file == pvma.file):
                found.append(vma)
        while vma.start <= pvma.start:
            vma = next(child, None)
            if vma is None or vma.status == GUARD:
                return found
        while pvma.start < vma.start:
            pvma = next(parent, None)
            if pvma is None or pvma.status == GUARD:
                return found
    return found


@pytest.fixture
def tree(tmp_path):
    return TreeDump(tmp_path)


def test_a_mapping_behind_one_that_only_the_child_has(tree, tmp_path):
    tree.add(10, 1, area(0, 1), area(30, 90))
    tree.add(11, 10, area(0, 1), area(20, 21), area(30, 90))
    tree.add(12, 10, area(0, 1), area(30, 90))
    assert tree.shared(11) == [(0, 1)], "CRIU passes over it"
    found = tree.restored(tmp_path)
    assert set(found.records) == {"10"}
    assert found.whole == set()
    assert tree.shared(11) == tree.shared(12) == [(0, 1), (30, 90)]
    (mark,) = (one for one in tree.of(10) if one.start == one.end)
    assert (mark.start, mark.status, mark.protection) == (BASE + 20 * MB, 0, 0)


def test_what_grandchildren_have_of_their_own(tree, tmp_path):
    tree.add(10, 1, area(0, 1), area(30, 90))
    tree.add(11, 10, area(0, 1), area(30, 90))
    tree.add(12, 11, area(0, 1), area(10, 11), area(20, 21), area(30, 90))
    tree.restored(tmp_path)
    assert tree.shared(11) == tree.shared(12) == [(0, 1), (30, 90)]


def test_mappings_that_have_grown_since_the_fork(tree, tmp_path):
    """Up and down, in the parent or in the child; and the heap."""
    heap = (0x22, REGULAR | ANONYMOUS | HEAP)
    tree.add(10, 1, area(0, 9, *heap), area(20, 45), area(55, 80), area(120, 140), area(220, 240))
    tree.add(11, 10, area(0, 5, *heap), area(20, 40), area(60, 80), area(120, 145), area(215, 240))
    tree.add(12, 10, area(0, 7, *heap), area(20, 45), area(55, 80), area(120, 140), area(220, 240))
    assert tree.shared(11) == []
    before = {pid: [(one.start, one.end, one.status) for one in tree.of(pid)] for pid in (10, 11, 12)}
    found = tree.restored(tmp_path)
    assert tree.shared(11) == [(0, 5), (20, 40), (60, 80), (120, 140), (220, 240)]
    assert sum(end - start for start, end in tree.shared(12)) == 7 + 25 + 25 + 20 + 20
    assert found.whole == {"10", "11", "12"}
    for pid, was in before.items():
        assert joined(tree.of(pid)) == was, "the same memory, in parts"


def joined(found: list[Vma]) -> list[tuple[int, int, int]]:
    whole: list[tuple[int, int, int]] = []
    for one in found:
        if whole and whole[-1][1] == one.start and whole[-1][2] == one.status:
            whole[-1] = (whole[-1][0], one.end, one.status)
        elif one.start < one.end:
            whole.append((one.start, one.end, one.status))
    return whole


@pytest.mark.parametrize("seed", range(40))
def test_what_both_have_is_shared_wherever_it_is(tree, tmp_path, seed):
    """Random trees; each process has what its parent has, without some of it, and some more."""
    dice = random.Random(seed)

    def own(pages: set[int]) -> set[int]:
        return {page for page in pages if dice.random() < 0.9} | {dice.randrange(60) for _ in range(dice.randrange(9))}

    pages = {10: own(set(range(0, 60, 2)) | set(range(20, 30)))}
    for pid in range(11, 16):
        parent = dice.choice(list(pages))
        pages[pid] = own(pages[parent])
        tree.parents[pid] = parent
    parents = {10: 1, **tree.parents}
    for pid, parent in parents.items():
        starts = [page for page in sorted(pages[pid]) if page - 1 not in pages[pid]]
        ends = [page + 1 for page in sorted(pages[pid]) if page + 1 not in pages[pid]]
        tree.add(pid, parent, *(area(start, end) for start, end in zip(starts, ends, strict=True)))
    before = {pid: joined(tree.of(pid)) for pid in pages}
    predicted = {pid: found[1] for pid, found in vmas.inherited(tree.directory).items()}
    tree.restored(tmp_path)
    for pid, parent in parents.items():
        assert joined(tree.of(pid)) == before[pid]
        if pid != 10:
            assert {page for start, end in tree.shared(pid) for page in range(start, end)} == pages[pid] & pages[parent]
            assert [((start - BASE) // MB, (end - BASE) // MB) for start, end in predicted[str(pid)]] == tree.shared(
                pid
            )


@pytest.mark.parametrize(
    "areas",
    [
        pytest.param([area(30, 90, 0x122)], id="stack"),
        pytest.param([area(30, 90, 0x40022)], id="huge"),
        pytest.param([area(30, 90, 0x21, REGULAR | 1 << 10)], id="shared"),
        pytest.param([area(30, 90, 0x2, REGULAR | OF_FILE)], id="file"),
    ],
)
def test_other_memory_stays_in_one_part(tree, areas):
    tree.add(10, 1, *areas)
    tree.add(11, 10, *(area(30, 40, flags, status) for _, _, flags, status in areas))
    assert vmas.aligned(tree.directory) == vmas.Aligned({}, frozenset())


def test_reserved_addresses_are_not_mapped_because_of_this(tree, tmp_path):
    """CRIU would map them writable, and Linux refuse that."""
    tree.add(10, 1, area(0, 1), area(30, 90), area(1000, 9000), prot=0)
    tree.add(11, 10, area(0, 1), area(20, 21), area(30, 80), area(900, 901), area(1000, 9000), prot=0)
    assert tree.shared(11) == [(0, 1)]
    tree.restored(tmp_path)
    assert tree.shared(11) == [(0, 1)]


def test_reserved_addresses_that_are_inherited_still_are(tree, tmp_path):
    tree.add(10, 1, area(0, 1), area(30, 80), area(1000, 9000, 0x4022))
    tree.add(11, 10, area(0, 1), area(30, 90), area(1000, 9000, 0x4022))
    assert tree.shared(11) == [(0, 1), (1000, 9000)]
    tree.restored(tmp_path)
    assert tree.shared(11) == [(0, 1), (30, 80), (1000, 9000)]


def test_processes_of_different_programs_share_nothing(tree):
    tree.add(10, 1, area(0, 1), area(30, 90))
    tree.add(11, 10, area(0, 1), area(20, 21), area(30, 80), program=2)
    assert vmas.aligned(tree.directory) == vmas.Aligned({}, frozenset())
    assert vmas.inherited(tree.directory) == {}


def test_guard_pages_stay_behind_the_mappings(tree, tmp_path):
    guard = area(35, 36, 0, GUARD)
    tree.add(10, 1, area(0, 1), area(30, 90), guard)
    tree.add(11, 10, area(0, 1), area(20, 21), area(30, 80), guard)
    tree.restored(tmp_path)
    assert tree.shared(11) == [(0, 1), (30, 80)]
    for pid in (10, 11):
        assert [one.status == GUARD for one in tree.of(pid)][-2:] == [False, True]


@pytest.mark.parametrize("damage", ["mm-11.img", "pstree.img"])
def test_what_is_not_understood_stays(tree, damage):
    tree.add(10, 1, area(0, 1), area(30, 90))
    tree.add(11, 10, area(0, 1), area(20, 21), area(30, 90))
    path = tree.directory / damage
    path.write_bytes(path.read_bytes()[:-1])
    assert vmas.aligned(tree.directory) == vmas.Aligned({}, frozenset())
    path.unlink()
    assert vmas.aligned(tree.directory) == vmas.Aligned({}, frozenset())


def test_other_fields_of_an_image_stay(tree, tmp_path):
    tree.add(10, 1, area(0, 1), area(30, 90))
    tree.add(11, 10, area(0, 1), area(20, 21), area(30, 80))
    path = tree.directory / "mm-10.img"
    (record,) = images.records(path, MM)
    write(path, MM, record + message((20, 7)) + varint(15 << 3) + varint(1))
    tree.restored(tmp_path)
    (record,) = images.records(tree.directory / "mm-10.img", MM)
    fields = images.fields_of(record)
    assert [fields[0], *fields[-2:]] == [(1, 0, 5), (20, 0, 7), (15, 0, 1)]


def test_a_process_that_is_restored_as_a_whole_has_a_parent_image_that_nothing_is_in(tree, tmp_path):
    tree.add(10, 1, area(0, 9))
    view = images.view(tree.directory, tmp_path / "view", ())
    shared_pages.add_parents(tree.directory, view, {}, ["10"])
    assert (view / "parent" / "pagemap-10.img").resolve() == tree.directory / "pagemap-10.img"
    assert (view / "parent" / "pages-1.img").exists()
    assert not (view / "parent" / "parent").exists()
