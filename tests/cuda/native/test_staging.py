"""A large memory that holds little is freed first; what it holds crosses the bus from other memory of the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from kept_copy import DIRTY, ENOUGH, OUT, extents
from programs import STAGED, build
from subject import MIB, Control, Subject, running
from waiting import until

FAULT = 999
PART = 4 * MIB
SIZE = 16 * PART
#: Of the parts of the memory those that hold something, and where in them.
HELD = {1: 5, 2: PART - 1, 9: 2 * MIB, 15: 0}
ON_DEVICE = "cuMemcpyDtoDAsync_v2"


@pytest.fixture(params=["cuda", "map"])
def large(request, staged, doubles):
    """A program with a large memory, most of which are zeros."""
    with running(staged, doubles, environment=DIRTY) as subject:
        number = subject.alloc(1, SIZE, request.param, "zeros")
        for part, at in HELD.items():
            assert subject.ask("poke", number, part * PART + at, 1, 1 + part) == "ok"
        yield subject


@contextlib.contextmanager
def freed_early(subject: Subject, control: Control, verb: bytes = b"move_out") -> Iterator[None]:
    """Run the body when the memory has been freed, and one of its parts at least is not copied yet."""
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
            assert large.outstanding()["mappings"] == 4, "what it holds is in other memory"
        assert control.answer()["swapped_out"] == SIZE
        assert (large.calls()[ON_DEVICE], large.calls()[OUT]) == (4, 4)
        assert large.outstanding()["used"] == 0
        control.must("swap_in")
        assert large.ask("sum") == before


def test_what_has_not_changed_is_not_staged(large):
    extents(large).mkdir(parents=True)
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
        assert large.ask("total", SIZE + PART + MIB) == "ok"  # three quarters of what is free are less than a piece
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


def test_a_memory_that_is_full_waits_for_its_copies(doubles):
    """Of it not all could be staged."""
    define = [each for each in STAGED if "ZEROS=0" not in each]
    with running(build(doubles, define=tuple(define)), doubles) as subject:
        subject.alloc(1, SIZE, density="full")
        with subject.control() as control:
            subject.fail()
            control.must("move_out", "swap_in")
            assert subject.calls()[OUT] == SIZE // PART
            assert ON_DEVICE not in subject.calls()
            for part in range(0, 16, 16 // 4):
                assert subject.ask("poke", 0, part * PART, 3 * PART, 0) == "ok"
            before = subject.ask("sum")
            subject.fail()
            control.must("move_out", "swap_in")
            assert subject.calls()[ON_DEVICE] == 4
            assert subject.ask("sum") == before


def test_the_other_memory_is_freed_while_more_is_copied(large):
    before = large.ask("sum")
    with large.control() as control:
        assert large.ask("stop", OUT, 3) == "ok"  # one of the last
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
        assert large.outstanding()["mappings"] == 4
        control.must("swap_in")
        assert large.ask("sum") == before
        assert large.outstanding()["used"] == SIZE
        control.must("move_out", "swap_in")
        assert large.ask("sum") == before
