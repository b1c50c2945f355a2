"""Device memory is swapped out and in at the same addresses with the same bytes: the library with a fake driver."""

from __future__ import annotations

import random

import pytest
from subject import MIB, Control, Subject, running

OUT_OF_MEMORY = 2
COUNTED = ("used", "reservations", "handles", "mappings", "allocations", "streams", "events", "registered")
NOTHING = dict.fromkeys(COUNTED, 0)


def swap_out_and_in(subject: Subject, control: Control) -> None:
    """Swap out and in; the device memory is free in between."""
    control.must("copy_out", "free")
    out = subject.outstanding()
    assert (out["mappings"], out["handles"]) == (0, 0)
    control.must("swap_in")


@pytest.mark.parametrize("direct", [False, True], ids=["runtime in a local scope", "linked directly"])
@pytest.mark.parametrize("api", ["cuda", "cu"])
def test_bytes_and_addresses_stay(programs, doubles, direct, api):
    with running(programs, doubles, direct=direct) as subject:
        sizes = [2 * MIB, 2 * MIB + 1, 3 * MIB, 5 * MIB - 511, 4 * MIB + 4096, 17 * MIB + 3]
        numbers = [subject.alloc(1, size, api, "full") for size in sizes]
        addresses = [subject.ask("address", number) for number in numbers]
        with subject.control() as control:
            there = control.ask("status")
            assert (there["cuda"], there["allocations"], there["swapped_out"]) == (0, len(sizes), 0)
            assert there["bytes"] == sum(-(-size // (2 * MIB)) * 2 * MIB for size in sizes)
            for _ in range(3):
                left = control.ask("copy_out")
                assert (left["cuda"], left["swapped_out"]) == (0, 0)
                assert control.ask("free")["swapped_out"] == there["bytes"]
                assert subject.outstanding()["used"] == 0
                assert control.ask("swap_in")["swapped_out"] == 0
                subject.intact(len(sizes))
        assert [subject.ask("address", number) for number in numbers] == addresses
        for number in numbers:
            subject.free(number)
        assert subject.left() == NOTHING


def test_swapped_out_memory_cannot_be_accessed(programs, doubles):
    """The double takes memory away: a program that touches it is ended, as by an illegal address of a GPU."""
    with pytest.raises(AssertionError, match="the program ended"), running(programs, doubles) as subject:
        subject.alloc(1, 2 * MIB)
        with subject.control() as control:
            control.must("copy_out", "free")
        subject.ask("check")


def test_small_memory_stays_with_the_driver(subject):
    subject.alloc(1, 2 * MIB - 1, density="full")
    with subject.control() as control:
        assert control.ask("status")["allocations"] == 0
    subject.alloc(10_000, 1500)
    subject.alloc(1, 2 * MIB, density="full")
    out = subject.outstanding()
    assert (out["allocations"], out["mappings"]) == (10_001, 1)
    with subject.control() as control:
        control.must("copy_out", "free")
        assert subject.outstanding()["allocations"] == 10_001
        control.must("swap_in")
    subject.intact(10_002)


def test_work_under_way_is_waited_for(subject):
    """By the thread that frees, and by the copy to the host."""
    one, other = subject.alloc(2, 2 * MIB), 1
    assert subject.ask("launch", one) == "0"
    with subject.control() as control:
        swap_out_and_in(subject, control)
    assert subject.ask("last", one) == "2"
    assert subject.ask("launch", other) == "0"
    subject.free(other)


def test_memory_freed_in_order_stays_until_the_stream_has_come_that_far(subject):
    one, _ = subject.alloc(2, 2 * MIB), subject.alloc(1, 2 * MIB)
    assert subject.ask("launch", one) == "0"
    assert subject.ask("free-in-order", one) == "0"
    with subject.control() as control:
        assert subject.outstanding()["mappings"] == 3, "nobody waits"
        swap_out_and_in(subject, control)  # waits for the work
    subject.free(subject.alloc(1, 2 * MIB))
    assert subject.outstanding()["mappings"] == 2
    subject.intact(2)


def test_slow_copies_are_waited_for(subject):
    subject.alloc(2, 6 * MIB, density="full")
    assert subject.ask("delay", 5000) == "ok"
    with subject.control() as control:
        swap_out_and_in(subject, control)
    subject.intact(2)


def test_blocks_of_two_contexts(subject):
    """One freed while another's context is current, too."""
    subject.alloc(2, 2 * MIB, "cuda", "full")
    assert subject.ask("context") == "0"
    subject.alloc(2, 2 * MIB, "cu", "full")
    with subject.control() as control:
        swap_out_and_in(subject, control)
        subject.free(0)
        assert subject.ask("pop") == "0"
        subject.free(2)
        subject.alloc(1, 2 * MIB, "cuda", "full")
        swap_out_and_in(subject, control)
    subject.intact(3)


def test_several_devices_at_the_same_time(programs, doubles):
    """Three, one of which has two contexts; the double wants each to be allowed to use what any has."""
    with running(programs, doubles, environment={"DOUBLE_DEVICES": "3"}) as subject:
        subject.alloc(5, 6 * MIB, "cuda", "full")
        for count, device in enumerate((1, 2, 1), 1):
            assert subject.ask("context", device) == "0"
            subject.alloc(5, 6 * MIB, "cuda" if device == 1 else "cu", "full")
            assert subject.outstanding()["mappings"] == 5 * (count + 1)
        assert subject.ask("delay", 5000) == "ok"
        with subject.control() as control:
            for _ in range(2):
                swap_out_and_in(subject, control)
                subject.intact(20)
            assert subject.ask("at-once") == "3"
            subject.free(7)
            subject.free(17)
            swap_out_and_in(subject, control)
        subject.intact(18)


def test_nothing_to_move(subject):
    number = subject.alloc(1, 2 * MIB)
    subject.free(number)
    with subject.control() as control:
        for verb in ("copy_out", "free", "swap_in", "swap_in", "free"):
            answer = control.ask(verb)
            assert (answer["cuda"], answer["allocations"], answer["swapped_out"]) == (0, 0, 0)


def test_steps_requested_twice(subject):
    subject.alloc(3, 2 * MIB, density="full")
    with subject.control() as control:
        control.must("swap_in", "free", "copy_out", "copy_out", "free", "free", "copy_out", "swap_in", "swap_in")
    subject.intact(3)
    assert subject.outstanding()["used"] == 3 * 2 * MIB


def against_a_dict(subject: Subject, steps: int, seed: int) -> None:
    choose = random.Random(seed)
    live: dict[int, int] = {}
    with subject.control() as control:
        for step in range(steps):
            # Grows to many, shrinks to few, and so on: the table grows, and loses from the middle.
            if choose.random() < (0.8 if step // 1000 % 2 == 0 else 0.25) or not live:
                size = choose.choice((2, 2, 2, 4)) * MIB
                live[subject.alloc(1, size, choose.choice(("cuda", "cu")))] = size
            else:
                number = choose.choice(list(live))
                subject.free(number)
                del live[number]
            if step % 250 == 0:
                found = control.ask("status")
                assert (found["allocations"], found["bytes"]) == (len(live), sum(live.values()))
        assert len(live) == int(subject.ask("check"))
        for number in live:
            subject.free(number)
        assert control.ask("status")["allocations"] == 0
    assert subject.left() == NOTHING


def test_the_table_against_a_dict(subject):
    subject.free(subject.alloc(1, 2 * MIB))
    against_a_dict(subject, 6000, seed=1)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(2, 12))
def test_the_table_against_a_dict_for_long(subject, seed):
    subject.free(subject.alloc(1, 2 * MIB))
    against_a_dict(subject, 15_000, seed)


def test_many_blocks_through_the_tables_growth(subject):
    """More than half of the table's first size; all are found again after it has grown."""
    count = 5000
    subject.alloc(count, 2 * MIB)
    with subject.control() as control:
        assert control.ask("status")["allocations"] == count
    subject.intact(count)
    for number in range(count):
        subject.free(number)
    assert subject.left() == NOTHING


def many_rounds(subject: Subject, blocks: int, rounds: int) -> None:
    subject.alloc(blocks, 2 * MIB)
    with subject.control() as control:
        for _ in range(rounds):
            swap_out_and_in(subject, control)
            subject.intact(blocks)


def test_three_hundred_blocks(subject):
    many_rounds(subject, 300, rounds=2)


@pytest.mark.torture
def test_five_thousand_blocks(subject):
    """Ten GiB of the host's memory."""
    many_rounds(subject, 5000, rounds=3)


def test_too_little_memory_at_an_allocation(programs, doubles):
    """The error is the original's, and memory that is left is served."""
    answers = []
    for preload in (None, []):
        with running(programs, doubles, preload=preload) as subject:
            subject.alloc(1, 4 * MIB)
            assert subject.ask("total", 9 * MIB) == "ok"
            answers.append([subject.ask("alloc", 1, 6 * MIB, api, "sparse") for api in ("cuda", "cu")])
            answers[-1].append(subject.ask("memory"))
            subject.alloc(1, 4 * MIB)
            answers[-1].append(subject.ask("memory"))
    assert answers[0] == answers[1]
    assert answers[0][0] == f"error {OUT_OF_MEMORY}"


def test_too_little_gpu_memory_at_a_swap_in(subject):
    subject.alloc(5, 4 * MIB, density="full")
    with subject.control() as control:
        control.must("copy_out", "free")
        for total in (0, 10 * MIB, 19 * MIB):
            assert subject.ask("total", total) == "ok"
            answer = control.ask("swap_in")
            assert (answer["cuda"], answer["swapped_out"]) == (OUT_OF_MEMORY, 20 * MIB)
            assert subject.outstanding()["used"] == 0, "the memory that it does not need"
        assert subject.ask("total", 20 * MIB) == "ok"
        control.must("swap_in")
    subject.intact(5)
