"""Host memory keeps a copy of what is on the device again: only pages that differ are copied at the next swap."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import page_digest
import pytest
from kept_copy import DIRTY, ENOUGH, ENOUGH_OF_ALL, OUT, SHORT, extents, swap, write_files
from subject import MIB, Control, Subject, running
from waiting import until

IN = "cuMemcpyHtoDAsync_v2"
FOUND_BY = ("cuModuleLoadData", "cuModuleGetFunction", "cuMemHostGetDevicePointer_v2", "cuLaunchKernel")
FAULT = 999
PAGE = 2 * MIB


def test_the_double_answers_as_the_kernel_must(programs, doubles):
    """`tests/gpu/test_device_kept.py` runs the same on a GPU."""
    command = [sys.executable, page_digest.__file__, str(programs.library), "3", "7"]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(doubles)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def subject(sliced, doubles):
    with running(sliced, doubles, environment=DIRTY) as subject:
        extents(subject).mkdir(parents=True)
        yield subject


@pytest.fixture
def control(subject) -> Iterator[Control]:
    subject.alloc(1, PAGE)  # from the first on the library listens
    subject.free(0)
    with subject.control() as control:
        control.must(f"keep {ENOUGH}")
        yield control


@pytest.mark.parametrize("api", ["cuda", "map", "async"])
def test_only_pages_that_differ_are_copied(subject, control, api):
    one = subject.alloc(1, 10 * MIB, api, "full")
    other = subject.alloc(1, 22 * MIB, api, "full")
    assert swap(subject, control) == 16
    assert control.ask("status")["kept"] == 32 * MIB
    assert swap(subject, control) == 0
    subject.ask("poke", one, 9 * MIB, 1, 0)
    subject.ask("poke", other, 4 * MIB - 1, 2, 0)  # in two pages
    assert swap(subject, control) == 3
    subject.ask("poke", one, 4 * MIB, 4 * MIB, 0)  # pages of zeros take no memory
    assert swap(subject, control) == 0
    assert control.ask("status")["kept"] == 28 * MIB
    subject.ask("poke", one, 8 * MIB - 1, 1, 7)
    assert swap(subject, control) == 1


def test_memory_that_is_freed_and_memory_that_is_new(subject, control):
    """New memory gets the place of what was freed, and never its content; holes hold zeros."""
    numbers = [subject.alloc(1, 4 * MIB, "cuda", "full") for _ in range(4)]
    assert swap(subject, control) == 8
    subject.free(numbers[1])
    assert swap(subject, control) == 0
    assert control.ask("status")["kept"] == 12 * MIB, "and takes no memory"
    subject.alloc(2, 2 * MIB, "map", "full")
    assert swap(subject, control) == 2
    assert control.ask("status")["kept"] == 16 * MIB
    subject.alloc(1, 9 * MIB, "cuda", "full")
    assert swap(subject, control) == 5
    for number in (numbers[0], numbers[2], numbers[3]):
        subject.free(number)
    assert swap(subject, control) == 0


def test_memory_that_fills_extents_shares_none_with_other_memory(subject, control):
    """So a save point has no more chunks of its own than its device memory has that changed."""
    files, values = extents(subject), itertools.count(1)

    def changed(*numbers: int) -> int:
        for number in numbers:
            subject.ask("poke", number, 0, 16 * MIB, next(values))
        before = {path.name: path.read_bytes() for path in files.iterdir()}
        swap(subject, control)
        return sum(before.get(path.name) != path.read_bytes() for path in files.iterdir())

    few = [subject.alloc(1, size * MIB, "cuda", "full") for size in (2, 16, 6, 32, 2, 16)]
    mapped = [subject.alloc(2, size * MIB, "map", "full") for size in (2, 16)]
    swap(subject, control)
    assert changed(few[1]) == 1
    assert changed(few[3], few[5], mapped[1]) == 3
    subject.free(few[1])
    subject.alloc(1, 2 * MIB, "cuda", "full")  # in the place of the other
    later = subject.alloc(1, 16 * MIB, "cuda", "full")
    swap(subject, control)
    assert changed(later) == 1


def change(subject: Subject, source: random.Random, sizes: dict[int, int]) -> None:
    """Write, free or allocate something."""
    kind = source.choice(["write", "write", "zeros", "free", "alloc"])
    if kind == "alloc" or not sizes:
        size = source.randrange(2 * MIB, 20 * MIB)
        density = source.choice(["full", "sparse", "zeros"])
        sizes[subject.alloc(1, size, source.choice(["cuda", "map", "released", "async"]), density)] = size
        return
    number = source.choice(sorted(sizes))
    at = source.randrange(sizes[number])
    if kind == "free":
        subject.free(number)
        del sizes[number]
    else:
        count = source.choice([1, 5000, 6 * MIB])
        subject.ask("poke", number, at, count, 0 if kind == "zeros" else source.randrange(256))


def changes(subject: Subject, control: Control, seed: int, rounds: int) -> None:
    source, sizes = random.Random(seed), dict[int, int]()
    for _ in range(rounds):
        for _ in range(source.randrange(4)):
            change(subject, source, sizes)
        if len(sizes) > 8:
            for number in source.sample(sorted(sizes), 4):
                subject.free(number)
                del sizes[number]
        if sizes:
            swap(subject, control)


def test_any_changes(subject, control):
    changes(subject, control, seed=11, rounds=12)


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_many_changes(subject, control):
    changes(subject, control, seed=12, rounds=1000)


def test_a_copy_whose_memory_was_never_freed(subject, control):
    """An owner that ends after it has copied leaves the copy; and the program continues."""
    number = subject.alloc(1, 8 * MIB, "cuda", "full")
    control.must("copy_out")
    subject.ask("poke", number, 0, 1, 3)
    assert swap(subject, control) == 1


def test_what_is_kept_is_bounded_and_given_up_on_request(subject, control):
    subject.alloc(1, 8 * MIB, "cuda", "full")
    control.must(f"keep {8 * MIB - 1}")
    for _ in range(2):
        assert swap(subject, control) == 4
        assert control.ask("status")["kept"] == 0
        assert not [*extents(subject).iterdir()]
    control.must(f"keep {8 * MIB}")
    assert swap(subject, control) == 4
    assert swap(subject, control) == 0
    control.must("keep 0")
    assert (control.ask("status")["kept"], [*extents(subject).iterdir()]) == (0, [])
    assert swap(subject, control) == 4
    for wrong in ("keep", "keep -1", "keep 1x", "keep  1"):
        assert control.ask(wrong)["cuda"] == 1


def test_without_allocations_nothing_is_kept(subject, control):
    number = subject.alloc(1, 4 * MIB, "cuda", "full")
    swap(subject, control)
    subject.free(number)
    until(lambda: not [*extents(subject).iterdir()], "the copy is given up")


@pytest.mark.parametrize("reason", SHORT)
def test_it_is_given_up_when_memory_is_short(in_its_directory, doubles, reason, request):
    request.addfinalizer(lambda: [(in_its_directory.directory / name[1:]).unlink() for name in written])
    written = {**ENOUGH_OF_ALL, **SHORT[reason]}
    write_files(in_its_directory, ENOUGH_OF_ALL)
    with running(in_its_directory, doubles) as subject:
        extents(subject).mkdir(parents=True)
        subject.alloc(1, 8 * MIB, "cuda", "full")
        with subject.control() as control:
            control.must(f"keep {ENOUGH}")
            swap(subject, control)
            assert swap(subject, control) == 0
        write_files(in_its_directory, SHORT[reason])
        until(lambda: not [*extents(subject).iterdir()], "the copy is given up")
        with subject.control() as control:
            assert control.ask("status")["kept"] == 0
            assert swap(subject, control) == 4


def damage(how: str, directory: Path) -> None:
    file = directory / "000000.img"
    if how == "removed":
        file.unlink()
    elif how == "shorter":
        os.truncate(file, PAGE)
    elif how == "linked":
        os.link(file, directory.parent / "an-image")
    else:
        directory.rename(directory.with_name("others"))
        directory.mkdir()


@pytest.mark.parametrize("how", ["removed", "shorter", "linked", "all removed"])
def test_files_that_are_not_as_they_were_are_not_used(subject, control, how):
    """Nor changed where an image has them by another name."""
    number = subject.alloc(1, 20 * MIB, "cuda", "full")
    swap(subject, control)
    damage(how, extents(subject))
    image = extents(subject).parent / "an-image"
    content = image.read_bytes() if image.exists() else b""
    subject.ask("poke", number, 0, 3 * MIB, 9)
    assert swap(subject, control) == 10
    assert (image.read_bytes() if image.exists() else b"") == content


def test_what_went_to_a_disk_is_not_kept(programs, doubles, tmp_path):
    with running(programs, doubles) as subject:
        extents(subject).parent.mkdir()
        extents(subject).symlink_to(tmp_path)
        subject.alloc(1, 4 * MIB, "cuda", "full")
        with subject.control() as control:
            control.must(f"keep {ENOUGH}")
            for _ in range(2):
                assert swap(subject, control) == 2
                assert (control.ask("status")["kept"], [*tmp_path.iterdir()]) == (0, [])


@pytest.mark.parametrize("function", FOUND_BY)
def test_without_digests_all_is_copied(subject, control, function):
    subject.alloc(1, 8 * MIB, "cuda", "full")
    swap(subject, control)
    subject.fail(function, 1, FAULT, lasting=True)
    control.must("copy_out", "free")
    copied = subject.calls()[OUT]
    control.must("swap_in")
    if copied == 0:
        assert function.startswith("cuModule"), "it was loaded before"
    else:
        assert copied == 4
        assert swap(subject, control) == 4, "a page that was copied without a digest is not known"
    assert swap(subject, control) == 0


CHANGED = 401


@pytest.mark.parametrize("api", ["cuda", "map", "async"])
def test_what_comes_back_is_proved_by_digests(subject, control, api):
    """A byte that somebody has changed in host memory is found before anything runs, and everything stays there."""
    for size, density in ((10 * MIB, "full"), (22 * MIB, "sparse"), (4 * MIB, "zeros")):
        subject.alloc(1, size, api, density)
    before = subject.ask("sum")
    control.must("copy_out", "free")
    out = control.ask("status")
    assert (out["known"], out["swapped_out"]) == (1, 36 * MIB)
    content = (extents(subject) / "000000.img").read_bytes()
    written = [at for at in range(0, len(content), PAGE) if any(content[at : at + PAGE])]  # zeros are not read
    for at in (written[0], written[-1] + PAGE - 1):
        with open(extents(subject) / "000000.img", "r+b") as file:
            [byte] = os.pread(file.fileno(), 1, at)
            os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
            assert control.ask("swap_in_checked")["cuda"] == CHANGED
            assert control.ask("status")["swapped_out"] == 36 * MIB
            os.pwrite(file.fileno(), bytes([byte]), at)
    control.must("swap_in_checked")
    assert (subject.ask("sum"), control.ask("status")["swapped_out"]) == (before, 0)
    assert swap(subject, control) == 0, "the copy is as good as it was"


@pytest.mark.parametrize("function", [None, *FOUND_BY[2:]])
def test_what_has_no_digest_is_not_proved(subject, control, function):
    """Or has one that cannot be computed again; it can be brought back without proof."""
    if function is None:
        control.must("keep 0")
    subject.alloc(1, 8 * MIB, "cuda", "full")
    before = subject.ask("sum")
    control.must("copy_out", "free")
    assert control.ask("status")["known"] == (function is not None)
    if function is not None:
        subject.fail(function, 1, FAULT, lasting=True)
    assert control.ask("swap_in_checked")["cuda"] != 0
    subject.fail()
    assert control.ask("status")["swapped_out"] == 8 * MIB
    control.must("swap_in")
    assert subject.ask("sum") == before


def test_a_page_without_a_digest_among_others_makes_all_unknown(subject, control):
    """The kernel for digests could not be launched for some of them."""
    subject.alloc(1, 8 * MIB, "cuda", "full")
    subject.fail("cuLaunchKernel", 1, FAULT, lasting=True)
    control.must("copy_out", "free")
    assert control.ask("status")["known"] == 0
    subject.fail()
    control.must("swap_in")


def test_a_copy_that_fails_leaves_nothing_that_is_believed(subject, control):
    """Pages whose digests were noted, and that were not written then."""
    number = subject.alloc(1, 8 * MIB, "cuda", "full")
    swap(subject, control)
    subject.ask("poke", number, 0, 8 * MIB, 5)
    subject.fail(OUT, 1, FAULT)
    assert control.ask("copy_out")["cuda"] == FAULT
    subject.fail()
    assert swap(subject, control) == 4


def test_it_goes_to_an_image_and_comes_back(fast_kernel):
    """A kernel that is suspended, checkpointed and woken by turns, with changes in between."""
    kernel = fast_kernel(host_copy_bytes=ENOUGH)
    contents = "[sorted(set(ctypes.string_at(at, size))) for at, size in held]"
    copies = "ctypes.CDLL('libcuda.so.1').double_calls(b'cuMemcpyDtoHAsync_v2')"
    steps = ["suspend", "resume"], ["suspend", "resume"], ["checkpoint", "wake"], ["suspend", "wake"]
    for turn, (away, back) in enumerate(steps):
        kernel.program.ask(f"ctypes.memset(held[2][0].value + {turn << 22}, {100 + turn}, 5)")
        before, made = kernel.program.ask(contents), kernel.program.ask(copies)
        getattr(kernel.lifecycle, away)()
        getattr(kernel.lifecycle, back)()
        assert kernel.program.ask(contents) == before
        if turn:
            assert kernel.program.ask(copies) - made == 1
            assert kernel.path().amounts().kept == kernel.blocks
