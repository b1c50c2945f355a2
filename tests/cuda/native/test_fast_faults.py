"""Every call of the driver fails once, and all from one on: nothing is lost, and the next attempt succeeds."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import Programs
from subject import MIB, Control, Subject, running

pytestmark = pytest.mark.slow  # a swap for each call that can fail

FAULT = 999
SIZES = (2 * MIB, 2 * MIB + 5)
TOTAL = (2 + 4) * MIB
VERBS = ("copy_out", "free", "swap_in")
#: Those of an exchange, for others who wait and beside others who leave.
EXCHANGE = ("move_out", "swap_in 0")
#: Those of a copy that is proved when it comes back: only where one is kept.
PROVED = ("copy_out", "free", "swap_in_checked")


def verbs(verb: str) -> tuple[str, ...]:
    """Return the verbs of a whole round that has this one."""
    return EXCHANGE if verb in EXCHANGE else PROVED if verb in PROVED[2:] else VERBS


def earlier(verb: str) -> tuple[str, ...]:
    """Return those before it."""
    return verbs(verb)[: verbs(verb).index(verb)]


def calls_of(subject: Subject, control: Control, verb: str) -> dict[str, int]:
    """Return the count of calls of each function by ``verb`` when nothing fails."""
    subject.fail()
    control.must(*earlier(verb))
    subject.fail()
    control.must(verb)
    made = subject.calls()
    control.must(*verbs(verb)[len(earlier(verb)) + 1 :])
    return {function: count for function, count in made.items() if count}


def one_place(subject: Subject, away: int) -> None:
    """All blocks are on the device, or all are away."""
    out = subject.outstanding()
    assert (out["used"], out["mappings"]) == ((0, 0) if away else (TOTAL, len(SIZES)))
    assert away in (0, TOTAL)
    assert out["reservations"] == len(SIZES)


def retry(subject: Subject, control: Control) -> None:
    """Retry without failures: back on the device, and a whole round."""
    subject.fail()
    control.must("swap_in")
    subject.intact(len(SIZES))
    control.must(*VERBS)
    subject.intact(len(SIZES))


@pytest.fixture(
    params=[(1, "cuda"), (2, "cuda"), (1, "map"), (2, "map"), (1, "released"), (1, "async"), (1, "zeros"), (1, "kept")],
    ids=["one device", "two devices", "mapped", "mapped, two devices", "handles released", "in order", "zeros", "kept"],
)
def filled(request, sliced, doubles):
    """A subject with a block of each of the `SIZES`, on as many devices, allocated in one way."""
    yield from with_blocks(sliced, doubles, *request.param)


@pytest.fixture(
    params=[(1, "cuda"), (2, "map"), (1, "files"), (1, "kept")],
    ids=["one device", "mapped, two devices", "to files", "kept"],
)
def filled_and_staged(request, staged, doubles):
    """The same with blocks that are freed before their copies in host memory are complete."""
    yield from with_blocks(staged, doubles, *request.param)


def with_blocks(programs: Programs, doubles: Path, devices: int, api: str) -> Iterator[Subject]:
    """Run a subject with a block of each of the `SIZES`, on as many devices, allocated in one way."""
    environment = {"DOUBLE_DEVICES": str(devices), **({"DOUBLE_DIRTY": "1"} if api == "zeros" else {})}
    with running(programs, doubles, environment=environment) as subject:
        for number, size in enumerate(SIZES):
            device = number % devices
            assert device == 0 or subject.ask("context", device) == "0"
            density = "zeros" if api == "zeros" and number != 0 else "full"
            subject.alloc(1, size, api if api not in ("zeros", "files", "kept") else "cuda", density)
            assert device == 0 or subject.ask("pop") == "0"
        if api in ("files", "kept"):
            (subject.path.parent / "host-memory" / "gpu-ckpt-extents").mkdir(parents=True)
        if api == "kept":  # of the first round; then there are only digests to compute
            with subject.control() as control:
                control.must(f"keep {TOTAL}")
        yield subject


@pytest.mark.sweep
@pytest.mark.parametrize("verb", [*VERBS, *EXCHANGE])
def test_each_call_fails_once(filled, verb):
    each_call_fails_once(filled, verb)


@pytest.mark.sweep
def test_each_call_of_a_swap_that_stages_fails_once(filled_and_staged):
    each_call_fails_once(filled_and_staged, "move_out")


@pytest.mark.sweep
@pytest.mark.parametrize("filled", [(1, "kept"), (2, "kept")], indirect=True)
def test_each_call_of_a_proof_fails_once(filled):
    each_call_fails_once(filled, PROVED[2])


def each_call_fails_once(subject: Subject, verb: str) -> None:
    failed_to_go = 0
    with subject.control() as control:
        for function, count in calls_of(subject, control, verb).items():
            for nth in range(1, count + 1):
                control.must(*earlier(verb))
                subject.fail(function, nth, FAULT)
                answer = control.ask(verb)
                subject.fail()
                one_place(subject, answer["swapped_out"])
                if not answer["swapped_out"]:  # the program's own calls continue
                    subject.free(subject.alloc(1, 2 * MIB, "map"))
                retry(subject, control)
                failed_to_go += function == "cuEventDestroy_v2"
    out = subject.outstanding()
    assert (out["registered"], out["handles"]) == (0, len(SIZES))
    assert (out["streams"], out["events"]) == (0, failed_to_go), "but for those that the driver refused to destroy"


@pytest.mark.sweep
@pytest.mark.parametrize("verb", [*VERBS, *EXCHANGE])
def test_every_call_fails_from_one_on(filled, verb):
    """Also what would make it good: then it is not on one side, but all bytes are safe, and a return brings them."""
    every_call_fails_from_one_on(filled, verb)


@pytest.mark.sweep
def test_every_call_of_a_swap_that_stages_fails_from_one_on(filled_and_staged):
    every_call_fails_from_one_on(filled_and_staged, "move_out")


def every_call_fails_from_one_on(subject: Subject, verb: str) -> None:
    with subject.control() as control:
        total = sum(calls_of(subject, control, verb).values())
        for nth in range(1, total + 1):
            control.must(*earlier(verb))
            subject.fail("*", nth, FAULT, lasting=True)
            answer = control.ask(verb)
            assert answer["cuda"] in (0, FAULT)
            if answer["cuda"] == 0:  # it failed where nothing hangs on it
                assert answer["swapped_out"] == (TOTAL if verb in ("free", "move_out") else 0)
            elif nth % 2:
                subject.fail()
                control.must("free")  # what was begun is ended; without a copy there is nothing to free
            retry(subject, control)


def test_a_failed_allocation_is_the_drivers(subject):
    """The program gets memory at any failure on the way, and nothing is left of the attempt."""
    subject.free(subject.alloc(1, 2 * MIB))
    subject.fail()
    subject.free(subject.alloc(1, 8 * MIB))
    made = subject.calls()
    for function in ("cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"):
        assert made[function] == 1
        subject.fail(function, 1, FAULT)
        number = subject.alloc(1, 4 * MIB, "cu", "full")
        out = subject.left()
        assert (out["allocations"], out["mappings"], out["reservations"], out["handles"]) == (1, 0, 0, 0), function
        subject.free(number)
    assert subject.outstanding()["reservations"] == 3, "one of each size is kept"


@pytest.mark.parametrize("function", ["cuMemUnmap", "cuCtxSynchronize", "cuCtxPushCurrent_v2"])
def test_memory_that_could_not_be_freed_is_freed_later(subject, function):
    number = subject.alloc(1, 2 * MIB, "cu", "full")
    subject.fail(function, 1, FAULT)
    assert subject.ask("free", number) == str(FAULT)
    with subject.control() as control:
        assert control.ask("status")["allocations"] == 1
        control.must(*VERBS)
    subject.intact(1)
    subject.free(number)
    out = subject.outstanding()
    assert (out["used"], out["reservations"]) == (0, 1), "its addresses are kept"


def used(subject: Subject, number: int) -> int:
    """Return what counts against a limit of the program: descriptors below the highest, or bytes of address space."""
    if number == resource.RLIMIT_NOFILE:
        return max(map(int, os.listdir(f"/proc/{subject.pid}/fd"))) + 1
    pages = int(Path(f"/proc/{subject.pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


@pytest.mark.sweep
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("number", "free"),
    [(resource.RLIMIT_NOFILE, free) for free in range(4)]
    + [(resource.RLIMIT_AS, free * MIB) for free in (0, 1, 2, 4, 8, 12, 16, 24, 32, 64)],
)
def test_a_program_that_has_reached_a_limit_loses_nothing(filled, verb, number, free):
    """Without descriptors, memory, or the stacks of threads."""
    subject = filled
    with subject.control() as control:
        control.must("status", *earlier(verb))
        before = resource.prlimit(subject.pid, number)
        resource.prlimit(subject.pid, number, (used(subject, number) + free, before[1]))
        answer = control.ask(verb)
        resource.prlimit(subject.pid, number, before)
        one_place(subject, answer["swapped_out"])
        retry(subject, control)
