"""Device memory is examined slice by slice, for zeros and for what host memory has, while earlier slices are copied."""

from __future__ import annotations

import pytest
from kept_copy import ENOUGH, OUT, extents, swap
from subject import MIB, Control, Subject, running
from waiting import until

FAULT = 999
PART = 2 * MIB
LAUNCH, SYNCHRONIZE = "cuLaunchKernel", "cuStreamSynchronize"
#: Calls of a dry run with a kept copy: a launch of each kernel, and the wait for both.
DRY_LAUNCHES, DRY_WAITS = 2, 1


def keeping(subject: Subject) -> Control:
    """Connect to the library, which is to keep everything in host memory."""
    extents(subject).mkdir(parents=True)
    control = subject.control()
    control.must(f"keep {ENOUGH}")
    return control


def copied(subject: Subject) -> int:
    return subject.calls().get(OUT, 0)


def test_parts_are_copied_while_later_ones_are_examined(sliced, doubles):
    with running(sliced, doubles) as subject:
        subject.alloc(1, 8 * PART, density="full")
        with keeping(subject) as control:
            subject.fail()
            before = subject.ask("sum")
            assert subject.ask("stop", LAUNCH, DRY_LAUNCHES + 4) == "ok"  # that is of the third slice
            control.send(b"copy_out\n")
            until(lambda: copied(subject) == 3, "the parts of the first two slices are copied")
            assert subject.ask("waits") == "1"
            subject.ask("continue")
            assert control.answer()["cuda"] == 0
            assert copied(subject) == 8
            control.must("free", "swap_in")
            assert subject.ask("sum") == before


def test_a_context_does_not_wait_for_what_another_examines(programs, doubles):
    with running(programs, doubles, environment={"DOUBLE_DEVICES": "2"}) as subject:
        for device in range(2):
            assert device == 0 or subject.ask("context", device) == "0"
            subject.alloc(1, 2 * PART, density="full")
        assert subject.ask("pop") == "0"
        with keeping(subject) as control:
            subject.fail()
            before = subject.ask("sum")
            assert subject.ask("stop", LAUNCH, 2 * DRY_LAUNCHES) == "ok"  # the first of whichever context
            control.send(b"copy_out\n")
            until(lambda: subject.ask("waits") == "1" and copied(subject) == 2, "the other context's are copied")
            subject.ask("continue")
            assert control.answer()["cuda"] == 0
            assert copied(subject) == 4
            control.must("free", "swap_in")
            assert subject.ask("sum") == before
        subject.intact(2)


def test_zeros_known_pages_and_new_ones_of_several_slices_and_devices(sliced, doubles):
    environment = {"DOUBLE_DIRTY": "1", "DOUBLE_DEVICES": "2"}
    with running(sliced, doubles, environment=environment) as subject:
        numbers = []
        for device in range(2):
            assert device == 0 or subject.ask("context", device) == "0"
            for density in ("full", "zeros", "full", "full", "zeros"):
                numbers.append(subject.alloc(1, 3 * PART, density=density))
        assert subject.ask("pop") == "0"
        with keeping(subject) as control:
            assert swap(subject, control) == 2 * 9
            assert swap(subject, control) == 0
            subject.ask("poke", numbers[0], PART + 1, 1, 9)
            subject.ask("poke", numbers[1], 2 * PART - 1, 2, 9)  # of zeros: in two parts
            subject.ask("poke", numbers[8], 0, 2 * PART, 0)
            subject.ask("poke", numbers[9], 3 * PART - 1, 1, 9)
            assert swap(subject, control) == 1 + 2 + 1
            assert control.ask("status")["kept"] == (2 * 9 - 2 + 3) * PART
            assert swap(subject, control) == 0


@pytest.mark.parametrize("verb", ["copy_out", "move_out"])
@pytest.mark.parametrize("what", ["zeros", "digests"])
def test_an_error_in_the_second_slice_loses_nothing(sliced, doubles, verb, what):
    """The next swap copies all, also what was noted of the first slice."""
    waits = DRY_WAITS + 2 + ("zeros", "digests").index(what) + 1
    with running(sliced, doubles) as subject:
        numbers = [subject.alloc(1, PART, density="full") for _ in range(6)]
        with keeping(subject) as control:
            swap(subject, control)
            for number in numbers:
                subject.ask("poke", number, 0, PART, 5)
            before = subject.ask("sum")
            subject.fail(SYNCHRONIZE, waits, FAULT)
            answer = control.ask(verb)
            assert (answer["cuda"], answer["swapped_out"]) == (FAULT, 0)
            subject.fail()
            assert subject.ask("sum") == before
            assert swap(subject, control) == 6
            assert swap(subject, control) == 0
        assert subject.outstanding()["registered"] == 0


@pytest.mark.slow  # a swap for each call that can fail
@pytest.mark.sweep
def test_what_an_exchange_that_failed_has_noted_is_not_believed(sliced, doubles):
    """Also where it stays in part: that a page is in host memory was noted before it was to be copied."""
    with running(sliced, doubles) as subject:
        numbers = [subject.alloc(1, PART, density="full") for _ in range(4)]
        with keeping(subject) as control:
            swap(subject, control)
            subject.fail()
            control.must("move_out")
            calls, in_part = sum(subject.calls().values()), 0
            control.must("swap_in")
            for nth in range(1, calls + 1):
                for number in numbers:
                    subject.ask("poke", number, 0, PART, 1 + nth)
                before = subject.ask("sum")
                subject.fail("*", nth, FAULT, lasting=True)
                away = control.ask("move_out")["swapped_out"]
                in_part += 0 < away < 4 * PART
                subject.fail()
                control.must("swap_in")
                assert subject.ask("sum") == before
                swap(subject, control)
            assert in_part, "some memory was away, and the rest was not"
