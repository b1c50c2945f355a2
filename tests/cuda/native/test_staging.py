"""A large memory that holds little is freed first; what it holds crosses the bus from other memory of the device."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest
from kept_copy import DIRTY, ENOUGH, OUT, extents
from programs import STAGED, build
from subject import MIB, Control, Subject, running
from waiting import until

from jupyter_gpu_ckpt import procfs

FAULT = 999
PART = 2 * MIB
SIZE = 16 * PART
#: Of the parts of the memory those that hold something, and where in them.
HELD = {1: 5, 2: PART - 1, 9: 1 * MIB, 15: 0}
ON_DEVICE = "cuMemcpyDtoDAsync_v2"


@pytest.fixture(params=[("cuda", True), ("cuda", False), ("map", True)], ids=["files", "anonymous memory", "mapped"])
def large(request, staged, doubles):
    """Run a program with a large memory, most of which are zeros; it is swapped out to files, or not."""
    api, files = request.param
    with running(staged, doubles, environment=DIRTY) as subject:
        extents(subject).mkdir(parents=True) if files else None
        number = subject.alloc(1, SIZE, api, "zeros")
        for part, at in HELD.items():
            assert subject.ask("poke", number, part * PART + at, 1, 1 + part) == "ok"
        yield subject


def copies_by_one_thread(subject: Subject) -> None:
    """Have one thread copy, in the order of the parts, as on one processor: of two either may be stopped."""
    for thread in procfs.threads(subject.pid):
        os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})


@contextlib.contextmanager
def freed_early(subject: Subject, control: Control, verb: bytes = b"move_out") -> Iterator[None]:
    """Run the body when the memory has been freed, and one of its parts at least is not copied yet."""
    copies_by_one_thread(subject)
    assert subject.ask("stop", OUT, 1) == "ok"
    control.send(verb + b"\n")
    until(lambda: subject.outstanding()["used"] == len(HELD) * PART, "the memory is freed")
    until(lambda: subject.ask("waits") == "1", "a copy to host memory is under way")
    yield
    subject.ask("continue")


def test_it_is_freed_before_it_is_copied(large):
    before = large.ask("sum")
    with large.control() as control:
        large.fail()
        with freed_early(large, control):
            assert large.outstanding()["mappings"] == 2, "what it holds is in other memory, of two parts each"
        assert control.answer()["swapped_out"] == SIZE
        assert (large.calls()[ON_DEVICE], large.calls()[OUT]) == (3, 4), "two of them lie side by side"
        assert large.outstanding()["used"] == 0
        control.must("swap_in")
        assert large.ask("sum") == before


def test_what_has_not_changed_is_not_staged(large):
    extents(large).mkdir(parents=True, exist_ok=True)
    with large.control() as control:
        control.must(f"keep {ENOUGH}", "move_out", "swap_in")
        assert large.ask("poke", 0, 9 * PART, 1, 7) == "ok"
        before = large.ask("sum")
        large.fail()
        control.must("move_out")
        assert (large.calls()[ON_DEVICE], large.calls()[OUT]) == (1, 1)
        control.must("swap_in")
        assert large.ask("sum") == before


def test_a_copy_that_stays_on_the_device_first_is_not_staged(large):
    """The two steps of a save: what is freed may be held there."""
    with large.control() as control:
        large.fail()
        control.must("copy_out", "free", "swap_in")
        assert ON_DEVICE not in large.calls()


def test_where_little_is_free_it_waits_for_its_copies(large):
    before = large.ask("sum")
    with large.control() as control:
        assert large.ask("total", SIZE + 5 * PART) == "ok"  # three quarters of what is free are less than 4 parts
        large.fail()
        assert large.ask("stop", OUT, 3) == "ok"
        control.send(b"move_out\n")
        until(lambda: large.ask("waits") == "1", "the last copy is under way")
        assert large.outstanding()["mappings"] == 1
        assert ON_DEVICE not in large.calls()
        large.ask("continue")
        assert control.answer()["swapped_out"] == SIZE
        control.must("swap_in")
        assert large.ask("sum") == before


@pytest.fixture
def by_a_sample(doubles):
    """Run a program with a library that stages a third of memory of 32 MiB and more."""
    define = [each for each in STAGED if each.split("=")[0] not in ("STAGED_SHARE", "STAGED_LEAST", "STAGED_PIECE")]
    define += ["STAGED_LEAST=33554432", f"STAGED_PIECE={PART}"]
    with running(build(doubles, define=tuple(define)), doubles, environment=DIRTY) as subject:
        yield subject


@pytest.mark.parametrize(("full", "staged"), [(16, 0), (7, 0), (5, 5)])
def test_a_memory_of_which_not_all_can_be_staged_waits_for_its_copies(by_a_sample, full, staged):
    number = by_a_sample.alloc(1, SIZE, "cuda", "zeros")
    for part in range(full):
        assert by_a_sample.ask("poke", number, part * PART, PART, 1 + part) == "ok"
    before = by_a_sample.ask("sum")
    with by_a_sample.control() as control:
        by_a_sample.fail()
        control.must("move_out", "swap_in")
        calls = by_a_sample.calls()
        assert (calls[OUT], calls.get(ON_DEVICE, 0)) == (full, staged)
        assert by_a_sample.ask("sum") == before


@pytest.mark.parametrize(("large", "small", "staged"), [("full", "zeros", 0), ("zeros", "full", 1)])
def test_what_other_memory_holds_does_not_count(by_a_sample, large, small, staged):
    number = by_a_sample.alloc(1, SIZE, "cuda", large)
    assert by_a_sample.ask("poke", number, PART, 1, 1) == "ok"
    by_a_sample.alloc(SIZE // PART, PART, "cuda", small)
    before = by_a_sample.ask("sum")
    with by_a_sample.control() as control:
        by_a_sample.fail()
        control.must("move_out", "swap_in")
        assert by_a_sample.calls().get(ON_DEVICE, 0) == staged
        assert by_a_sample.ask("sum") == before


def test_the_other_memory_is_freed_while_more_is_copied(large):
    before = large.ask("sum")
    with large.control() as control:
        copies_by_one_thread(large)
        assert large.ask("stop", OUT, 3) == "ok"  # the last
        control.send(b"move_out\n")
        until(lambda: 0 < large.outstanding()["used"] < len(HELD) * PART, "some of it is freed")
        large.ask("continue")
        assert control.answer()["swapped_out"] == SIZE
        assert large.outstanding()["used"] == 0
        control.must("swap_in")
        assert large.ask("sum") == before


def test_what_could_not_be_copied_comes_back_from_there(large):
    """The parts that host memory has, too: all are the same."""
    before = large.ask("sum")
    with large.control() as control:
        with freed_early(large, control):
            large.fail("cuEventRecord", 1, FAULT)  # of the copy that is under way
        answer = control.answer()
        assert (answer["cuda"], answer["swapped_out"]) == (FAULT, 0)
        large.fail()
        assert large.ask("sum") == before
        assert large.outstanding()["used"] == SIZE
        control.must("move_out", "swap_in")
        assert large.ask("sum") == before


def test_it_stays_there_until_the_memory_can_be_had_again(large):
    before = large.ask("sum")
    with large.control() as control:
        with freed_early(large, control):
            large.fail("*", 1, FAULT, lasting=True)
        answer = control.answer()
        assert (answer["cuda"], answer["swapped_out"]) == (FAULT, SIZE)
        large.fail("cuMemCreate", 1, 2, lasting=True)
        for verb in ("swap_in", "swap_in", "move_out", "free"):
            answer = control.ask(verb)
            assert answer["swapped_out"] == SIZE
        large.fail()
        assert large.outstanding()["mappings"] == 2
        control.must("swap_in")
        assert large.ask("sum") == before
        assert large.outstanding()["used"] == SIZE
        control.must("move_out", "swap_in")
        assert large.ask("sum") == before
