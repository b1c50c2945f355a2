"""Pages of several processes, once in the image: what CRIU would read is compared with what it wrote."""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import struct
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.criu import images, shared_pages
from jupyter_gpu_ckpt.criu.shared_pages import FILE, SharedPages
from jupyter_gpu_ckpt.errors import ImageFormat

PAGE = mmap.PAGESIZE
BASE = 0x7F0000000000
PAGEMAP, MM = 0x56084025, 0x57492820
IN_PARENT, LAZY, PRESENT = 1, 2, 4
ANONYMOUS, OF_FILE, REGULAR, STACK = 1 << 9, 1 << 6, 1, 2
HUGE = 0x40000


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def message(*fields: tuple[int, int | bytes]) -> bytes:
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def write(path: Path, magic: int, *records: bytes) -> None:
    parts = b"".join(struct.pack("<I", len(one)) + one for one in records)
    path.write_bytes(struct.pack("<II", 0x54564319, magic) + parts)


def entry(start: int, pages: int, flags: int = PRESENT | LAZY) -> bytes:
    return message((1, start), (2, 0), (4, flags), (5, pages))


Pages = dict[int, bytes]
Area = tuple[int, int, int, int]


class Dump:
    """A directory as CRIU writes it, process after process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.number = 0
        self.written: dict[int, Pages] = {}
        self.parents: dict[str, str] = {}

    def add(
        self,
        pid: int,
        pages: Pages,
        areas: list[Area] | None = None,
        flags: int = PRESENT | LAZY,
        prot: int = 3,
        program: int = 1,
    ) -> None:
        """Add a process with ``pages`` by address; ``areas``: start, end, flags and status of its mappings."""
        self.number += 1
        self.written[pid] = pages
        runs: list[list[int]] = []
        for address in sorted(pages):
            if runs and runs[-1][0] + runs[-1][1] * PAGE == address and runs[-1][1] < 100:
                runs[-1][1] += 1
            else:
                runs.append([address, 1])
        entries = [entry(start, count, flags) for start, count in runs]
        write(self.directory / f"pagemap-{pid}.img", PAGEMAP, message((1, self.number)), *entries)
        content = b"".join(pages[address] for address in sorted(pages))
        (self.directory / f"pages-{self.number}.img").write_bytes(content)
        areas = areas or [(BASE, BASE + (1 << 40), 0x22, REGULAR | ANONYMOUS)]
        vmas = [
            message((1, low), (2, high), (4, 1), (5, prot), (6, how), (7, status)) for low, high, how, status in areas
        ]
        write(self.directory / f"mm-{pid}.img", MM, message((1, 5), (12, program), *((14, vma) for vma in vmas)))

    def add_shared_memory(self) -> None:
        self.number += 1
        write(self.directory / "pagemap-shmem-77.img", PAGEMAP, message((1, self.number)), entry(0, 1))
        (self.directory / f"pages-{self.number}.img").write_bytes(b"m" * PAGE)

    def size(self) -> int:
        return sum(path.stat().st_size for path in self.directory.glob("pages-*.img"))

    def content(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.directory.iterdir()}

    def whole(self) -> int:
        return sum(len(pages) for pages in self.written.values()) * PAGE


@pytest.fixture
def dump(tmp_path):
    directory = tmp_path / "criu"
    directory.mkdir()
    return Dump(directory)


@pytest.fixture
def view(dump, tmp_path):
    """Makes the view for a restore."""

    def make() -> Path:
        found = images.view(dump.directory, tmp_path / "view", ())
        shared_pages.add_parents(dump.directory, found, shared_pages.references(dump.directory))
        return found

    return make


def read(directory: Path, pid: int) -> Pages:
    """The pages of a process, as CRIU's pagemap.c reads them: those in the parent image at the same address there."""
    head, *entries = images.records(directory / f"pagemap-{pid}.img", PAGEMAP)
    number = images.number_of(images.fields_of(head), 1)
    content, at = (directory / f"pages-{number}.img").read_bytes(), 0
    parent = read(directory / "parent", pid) if (directory / "parent" / f"pagemap-{pid}.img").exists() else {}
    found: Pages = {}
    before = 0
    for fields in map(images.fields_of, entries):
        start, flags, pages = (images.number_of(fields, wanted) for wanted in (1, 4, 5))
        assert start >= before, "not in the order of addresses"
        assert flags in (IN_PARENT, PRESENT, PRESENT | LAZY)
        for address in range(start, before := start + pages * PAGE, PAGE):
            if flags == IN_PARENT:
                found[address] = parent[address]
            else:
                found[address] = content[at : at + PAGE]
                at += PAGE
    assert at == len(content)
    return found


def dropped(dump: Dump) -> SharedPages:
    pages = SharedPages(dump.directory, dump.parents)
    pages.advance(lambda: None)
    pages.finish(lambda: None)
    return pages


def memory(count: int, seed: int = 0, base: int = BASE) -> Pages:
    source = random.Random(seed)
    return {base + number * PAGE: source.randbytes(8) * (PAGE // 8) for number in range(count)}


def changed(pages: Pages, chosen, seed: int = 1) -> Pages:
    return pages | {address: page for address, page in memory(len(pages), seed).items() if address in {*chosen}}


def test_forked_processes_have_in_the_image_what_is_their_own(dump, view):
    first = memory(1000)
    others = {pid: changed(first, list(first)[pid * 7 : pid * 7 + 10], pid) for pid in range(11, 15)}
    dump.add(10, first)
    for pid, pages in others.items():
        dump.add(pid, pages)
    pages = dropped(dump)
    assert dump.size() == (1000 + 4 * 10) * PAGE
    assert pages.dropped == dump.whole() - dump.size()
    assert shared_pages.references(dump.directory) == {str(pid): "10" for pid in others}
    directory = view()
    for pid, wanted in dump.written.items():
        assert read(directory, pid) == wanted
    assert (dump.directory / "pages-2.img").stat().st_mode & 0o777 == 0o600
    assert not list(dump.directory.glob("*.part"))


def test_a_process_that_is_alone_stays_as_it_is(dump):
    dump.add(10, memory(1000))
    before = dump.content()
    assert dropped(dump).dropped == 0
    assert dump.content() == before
    assert shared_pages.references(dump.directory) == {}


def test_processes_without_common_pages_stay_as_they_are(dump):
    dump.add(10, memory(1000))
    dump.add(11, memory(1000, seed=1))
    dump.add(12, memory(1000, base=BASE + (1 << 30)))
    before = dump.content()
    assert dropped(dump).dropped == 0
    assert dump.content() == before


def test_what_the_first_process_has_changed_since_its_forks_is_there_once(dump, view):
    old = memory(1000)
    dump.add(10, changed(old, list(old)[:500], 99))
    for pid in range(11, 19):
        dump.add(pid, changed(old, list(old)[600 + pid : 603 + pid], pid))
    dropped(dump)
    assert dump.size() <= (1000 + 500 + 8 * 6) * PAGE, "each has its own three pages, and those of the first worker"
    directory = view()
    for pid, wanted in dump.written.items():
        assert read(directory, pid) == wanted


def test_forks_of_forks_share_with_their_own_parents(dump, view):
    root = memory(300)
    dump.add(10, root)
    dump.add(11, {BASE + (1 << 30): b"s" * PAGE})  # a program of its own, between them
    branches = [root | memory(400, seed=pid, base=BASE + (1 << 24) * pid) for pid in (20, 30)]
    for branch, pid in zip(branches, (20, 30), strict=True):
        dump.add(pid, branch)
        for child in range(1, 4):
            dump.add(pid + child, branch | memory(5, seed=child, base=BASE + (1 << 34)))
    dump.add(40, root)
    dump.add_shared_memory()
    dropped(dump)
    assert dump.size() <= (300 + 1 + 2 * 400 + 6 * 5 + 1) * PAGE
    found = shared_pages.references(dump.directory)
    assert [found[pid] for pid in ("20", "21", "30", "31")] == ["10", "20", "10", "30"]
    directory = view()
    for pid, wanted in dump.written.items():
        assert read(directory, pid) == wanted


def test_a_row_of_forks_of_forks_does_not_become_a_row_of_references(dump, view):
    """CRIU opens the files of a whole row for each process that it restores."""
    pages: Pages = {}
    for pid in range(10, 30):
        pages = pages | memory(100, seed=pid, base=BASE + (1 << 24) * pid)
        dump.add(pid, pages)
    dropped(dump)
    found, depths = shared_pages.references(dump.directory), {"10": 0}
    for pid in map(str, range(11, 30)):
        depths[pid] = depths[found[pid]] + 1
    assert max(depths.values()) == 8
    assert dump.size() < dump.whole() / 2, "what the first eight have, none has twice"
    directory = view()
    for pid, wanted in dump.written.items():
        assert read(directory, pid) == wanted


@pytest.mark.parametrize("seed", range(20))
def test_any_tree_is_read_as_it_was_written(dump, view, seed):
    source = random.Random(seed)
    tree = [memory(source.randrange(100, 600))]
    for pid in range(100, 100 + source.randrange(2, 12)):
        pages = dict(source.choice(tree))
        for _ in range(source.randrange(0, 6)):  # changes, ends and makes some
            start, count = source.choice(list(pages)), source.randrange(1, 90)
            for address in range(start, start + count * PAGE, PAGE):
                if source.random() < 0.2:
                    pages.pop(address, None)
                else:
                    pages[address] = source.randbytes(4) * (PAGE // 4)
            pages = pages or memory(1)
        tree.append(pages)
        dump.add(pid, pages)
    dropped(dump)
    directory = view()
    for pid, wanted in dump.written.items():
        assert read(directory, pid) == wanted
    assert dump.size() <= dump.whole()


def test_memory_that_criu_does_not_restore_from_a_parent_stays(dump, view):
    """Huge pages, shadow stacks, the vDSO: `premap_priv_vmas` in its mem.c passes them over."""
    kinds = [(0x22, REGULAR | ANONYMOUS), (0x22, REGULAR | STACK | ANONYMOUS), (0x2, REGULAR | OF_FILE)]
    other = [(HUGE | 0x22, REGULAR | ANONYMOUS), (0x22, REGULAR | 1 << 15 | ANONYMOUS), (0x2, REGULAR | 1 << 3)]
    other += [(0x22, REGULAR | 1 << 13 | ANONYMOUS), (0x22, REGULAR | ANONYMOUS | 1 << 27)]
    width = 100 * PAGE
    areas = [(BASE + n * width, BASE + (n + 1) * width, *kind) for n, kind in enumerate(kinds + other)]
    pages = memory(100 * len(areas))
    dump.add(10, pages, areas)
    dump.add(11, pages, areas)
    dropped(dump)
    assert (dump.directory / "pages-2.img").stat().st_size == 100 * len(other) * PAGE
    assert read(view(), 11) == pages


@pytest.mark.parametrize(
    ("size", "prot", "flags", "is_dropped"),
    [(2 << 30, 0, 0x22, True), (3 << 30, 0, 0x22, False), (3 << 30, 3, 0x22, True), (3 << 30, 3, 0x4022, False)],
)
def test_a_process_that_reserves_many_addresses_has_no_reference_and_can_be_one(
    dump, view, size, prot, flags, is_dropped
):
    first = memory(500)
    areas = [(BASE, BASE + 500 * PAGE, 0x22, REGULAR | ANONYMOUS)]
    areas += [(1 << 46, (1 << 46) + size, flags, REGULAR | ANONYMOUS)]
    dump.add(10, {BASE + (1 << 30): b"p" * PAGE})
    dump.add(11, first, areas, prot=prot)
    dump.add(12, first, areas, prot=prot)
    dump.add(13, first)
    dropped(dump)
    assert ("12" in shared_pages.references(dump.directory)) is is_dropped
    assert "13" in shared_pages.references(dump.directory)
    assert read(view(), 13) == first


@pytest.mark.parametrize("differs", ["nothing", "parent", "program", "end", "flags"])
def test_what_a_process_reserves_as_its_parent_does_is_no_reason(dump, view, differs):
    first = memory(500)
    own = [(BASE, BASE + 500 * PAGE, 0x22, REGULAR | ANONYMOUS)]
    inherited = (1 << 46, (1 << 46) + (3 << 30), 0x22, REGULAR | ANONYMOUS)
    changes = {"end": (1 << 46, (1 << 46) + (4 << 30), 0x22), "flags": (1 << 46, (1 << 46) + (3 << 30), 0x122)}
    dump.add(10, first, [*own, inherited], prot=0)
    reserved = (*changes.get(differs, inherited[:3]), inherited[3])
    dump.add(11, first, [*own, reserved], prot=0, program=2 if differs == "program" else 1)
    if differs != "parent":
        dump.parents = {"11": "10"}
    dropped(dump)
    assert ("11" in shared_pages.references(dump.directory)) is (differs == "nothing")
    assert read(view(), 11) == first


def test_each_is_rewritten_once_criu_has_begun_the_next(dump):
    first = memory(500)
    pages = SharedPages(dump.directory, dump.parents)
    pages.advance(lambda: None)
    dump.add(10, first)
    dump.add(11, first)
    pages.advance(lambda: None)
    assert pages.dropped == 0, "CRIU may be writing it"
    (dump.directory / "pages-3.img").touch()
    (dump.directory / "pagemap-12.img").touch()
    pages.advance(lambda: None)
    assert pages.dropped == 500 * PAGE
    dump.add(12, first)
    pages.finish(lambda: None)
    assert pages.dropped == 1000 * PAGE
    assert json.loads((dump.directory / FILE).read_text()) == {"11": "10", "12": "10"}


@pytest.mark.parametrize("how", ["flags", "size", "order", "mm", "pagemap"])
def test_what_is_not_understood_stays_as_criu_wrote_it(dump, view, how):
    first = memory(500)
    dump.add(10, first)
    dump.add(11, first, flags=PRESENT | 8 if how == "flags" else PRESENT)
    if how == "size":
        with open(dump.directory / "pages-2.img", "ab") as file:
            file.write(b"x")
    if how == "order":
        entries = [entry(BASE + 250 * PAGE, 250), entry(BASE, 250)]
        write(dump.directory / "pagemap-11.img", PAGEMAP, message((1, 2)), *entries)
    if how == "mm":
        (dump.directory / "mm-11.img").write_bytes(b"something else")
    if how == "pagemap":
        path = dump.directory / "pagemap-11.img"
        path.write_bytes(path.read_bytes()[:-1])
    dump.add(12, first)
    before = dump.content()
    assert dropped(dump).dropped == 500 * PAGE
    after = dump.content()
    assert {name: after[name] for name in ("pagemap-11.img", "pages-2.img")} == {
        name: before[name] for name in ("pagemap-11.img", "pages-2.img")
    }
    assert read(view(), 12) == first
    assert not list(dump.directory.glob("*.part"))


@pytest.mark.parametrize("call", ["sendfile", "preadv", "open"])
def test_a_process_whose_pages_cannot_be_written_anew_keeps_them(dump, monkeypatch, call):
    first = memory(500)
    dump.add(10, first)
    dump.add(11, changed(first, list(first)[:10]))
    before = dump.content()

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert dropped(dump).dropped == 0
    assert dump.content() == before


def test_an_error_between_the_two_files_makes_the_dump_useless(dump, monkeypatch):
    first = memory(500)
    dump.add(10, first)
    dump.add(11, first)
    replace = Path.replace

    def fail(self, target):
        if self.name == "pages-2.part":
            raise OSError(errno.EIO, "Input/output error")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="Input/output"):
        dropped(dump)


def test_it_can_be_cancelled_and_leaves_nothing(dump):
    first = memory(2000)
    dump.add(10, first)
    dump.add(11, first)
    calls = []

    def check():
        calls.append(1)
        if len(calls) == 3:
            raise CancelledError

    with pytest.raises(CancelledError):
        SharedPages(dump.directory, dump.parents).finish(check)
    assert not list(dump.directory.glob("*.part"))


@pytest.mark.parametrize(
    "text", ["", "[]", '{"1": []}', '{"../x": "1"}', '{"1": "../../x"}', '{"1": null}', "\x00", '{"1": true}']
)
def test_a_damaged_list_of_references(dump, text):
    (dump.directory / FILE).write_text(text)
    with pytest.raises(ImageFormat):
        shared_pages.references(dump.directory)


def test_references_in_a_circle_end(dump, view):
    first = memory(500)
    dump.add(10, first)
    dump.add(11, first)
    (dump.directory / FILE).write_text('{"10": "11", "11": "10"}')
    assert len(list(view().rglob("parent"))) == 2
