"""The library under gcc's sanitizers, in a program whose threads allocate all the time and are really stopped.

Under ThreadSanitizer the threads rest at a place of their own: it has threads that must not be frozen, and it wants to
see why nobody runs.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
from programs import STAGED, Programs, build, why_no_sanitizer
from subject import MIB, PATIENCE, Control, Subject, running
from test_fast_faults import EXCHANGE, PROVED, VERBS, calls_of, earlier, retry
from waiting import until

from jupyter_gpu_ckpt.process.freezer import FrozenThreads

pytestmark = pytest.mark.slow  # builds and runs with sanitizers

#: A half of all memory is copied on the device first, in a move.
HALF_STAGED = (*(each for each in STAGED if "SHARE" not in each), "STAGED_SHARE=2")
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1",  # a leak is sought by ptrace: ours
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=0:report_signal_unsafe=0",
}


def sanitized(tmp_path_factory, doubles, name: str, library: str, *more: str) -> Programs:
    reason = why_no_sanitizer(name, library, tmp_path_factory.mktemp(name))
    if reason:
        pytest.skip(reason)
    return build(doubles, name, *more, define=HALF_STAGED)


@pytest.fixture(scope="module")
def with_asan(tmp_path_factory, doubles):
    return sanitized(tmp_path_factory, doubles, "address", "libasan.so", "undefined")


@pytest.fixture(scope="module")
def with_tsan(tmp_path_factory, doubles):
    return sanitized(tmp_path_factory, doubles, "thread", "libtsan.so")


@contextlib.contextmanager
def frozen(subject: Subject) -> Iterator[None]:
    frozen = FrozenThreads(subject.pid)
    frozen.freeze_all(time.monotonic() + 60)
    try:
        yield
    finally:
        frozen.release()


@contextlib.contextmanager
def resting(subject: Subject) -> Iterator[None]:
    assert subject.ask("rest") == "ok"
    try:
        yield
    finally:
        assert subject.ask("go") == "ok"


def hammer(subject: Subject, threads: int, rounds: int, still) -> None:
    """Rounds while threads of the subject allocate, write, check and free; a copy is kept after some."""
    (subject.path.parent / "host-memory" / "gpu-ckpt-extents").mkdir(parents=True)
    kept = [subject.alloc(1, size * MIB, density="sparse") for size in (2, 3, 8)]
    kept.append(subject.alloc(1, 6 * MIB, density="zeros"))
    assert subject.ask("churn", threads) == "ok"
    with subject.control() as control:
        for turn in range(rounds):
            before = int(subject.ask("rounds"))
            until(lambda: int(subject.ask("rounds")) > before + threads, "the threads run")  # noqa: B023
            assert control.ask("status")["allocations"] >= len(kept)  # at any time
            control.must(f"keep {1 << 30 if turn % 5 else 0}")
            if turn % 5:
                control.ask("mirror")  # which the threads end at once, if it begins
                time.sleep(0.002 * (turn % 4))
                control.must(f"keep {1 << 30}")  # before they are stopped
            with still(subject):
                if turn % 3 == 2:
                    gives_up(control)
                else:
                    control.must(*(EXCHANGE if turn % 2 else PROVED if turn % 5 else VERBS))
        control.must("status")
    assert subject.ask("end") == "0", "no thread found anything wrong"
    subject.intact(len(kept))
    for number in kept:
        subject.free(number)
    assert subject.ask("synchronize") == subject.ask("trim") == "0"
    assert {kind: count for kind, count in subject.left().items() if count} == {}


def hammer_gate(subject: Subject, threads: int, rounds: int, *, swaps: bool) -> None:
    """Close and open the launch gate while threads allocate, wait for the GPU, and free; now and then swap, too."""
    subject.alloc(1, 2 * MIB, density="sparse")
    assert subject.ask("churn", threads) == "ok"
    with subject.control() as control:
        for turn in range(rounds):
            before = int(subject.ask("rounds"))
            until(lambda: int(subject.ask("rounds")) > before + threads, "the threads run")  # noqa: B023
            if turn % 3 == 2:
                control.must(*["close 0", "close 1000", "open"] * 20)
                continue
            control.must("close 0")
            until(lambda: control.ask("status")["touches"] == threads, "all threads wait at the gate")
            done = int(subject.ask("rounds"))
            time.sleep(0.01)
            assert int(subject.ask("rounds")) == done
            if swaps:
                with frozen(subject):
                    control.must(*VERBS)  # opens it
            else:
                control.must("open")
    assert subject.ask("end") == "0"
    subject.intact(1)


def gives_up(control: Control) -> None:
    """The blocks stay where they are; the copy goes with the next one."""
    control.must("copy_out")
    assert control.ask("garbage")["cuda"] == 1


def test_threads_are_frozen(programs, doubles):
    one_arena = {"MALLOC_ARENA_MAX": "1"}  # a thread frozen in malloc would stop all that follows
    with running(programs, doubles, environment=one_arena) as subject:
        hammer(subject, 3, 25, frozen)


def test_threads_are_stopped_under_asan(with_asan, doubles):
    with running(with_asan, doubles, environment=OPTIONS) as subject:
        hammer(subject, 3, 12, frozen)


def test_threads_rest_under_tsan(with_tsan, doubles):
    with running(with_tsan, doubles, environment=OPTIONS) as subject:
        hammer(subject, 3, 6, resting)


def test_two_devices_at_the_same_time_under_tsan(with_tsan, doubles):
    """Each is examined, opened, copied and closed by threads of its own; both note what host memory has."""
    with running(with_tsan, doubles, environment={**OPTIONS, "DOUBLE_DEVICES": "2"}) as subject:
        (subject.path.parent / "host-memory" / "gpu-ckpt-extents").mkdir(parents=True)
        for device in range(2):
            assert device == 0 or subject.ask("context", device) == "0"
            subject.alloc(2, 64 * MIB, density="zeros")
            subject.alloc(2, 6 * MIB, density="full")
        with subject.control() as control:
            control.must(f"keep {1 << 30}")
            for verbs in (VERBS, EXCHANGE, PROVED):
                control.must(*verbs)
                subject.intact(8)


def test_the_launch_gate(programs, doubles):
    with running(programs, doubles, environment={"MALLOC_ARENA_MAX": "1"}) as subject:
        hammer_gate(subject, 4, 30, swaps=True)


def test_the_launch_gate_under_asan(with_asan, doubles):
    with running(with_asan, doubles, environment=OPTIONS) as subject:
        hammer_gate(subject, 3, 9, swaps=True)


def test_the_launch_gate_under_tsan(with_tsan, doubles):
    with running(with_tsan, doubles, environment=OPTIONS) as subject:
        hammer_gate(subject, 3, 9, swaps=False)


def test_children_under_asan(with_asan, doubles):
    with running(with_asan, doubles, environment=OPTIONS) as subject:
        subject.alloc(1, 2 * MIB)
        assert subject.ask("churn", 3) == "ok"
        assert subject.ask("forks", 20) == "20 refused, 0 hung"
        assert subject.ask("end") == "0"


def test_children_under_tsan(with_tsan, doubles):
    with running(with_tsan, doubles, environment=OPTIONS) as subject:
        subject.alloc(1, 2 * MIB)
        assert subject.ask("churn", 3) == "ok"
        assert subject.ask("forks", 20) == "20 refused, 0 hung"
        assert subject.ask("end") == "0"


@pytest.mark.torture
def test_threads_are_stopped_for_long(programs, with_asan, doubles):
    for built, rounds in ((programs, 1000), (with_asan, 300)):
        with running(built, doubles, environment=OPTIONS) as subject:
            hammer(subject, 6, rounds, frozen)


@pytest.mark.torture
def test_threads_rest_under_tsan_for_long(with_tsan, doubles):
    with running(with_tsan, doubles, environment=OPTIONS) as subject:
        hammer(subject, 6, 300, resting)


@pytest.mark.parametrize("verb", [*VERBS, *EXCHANGE])
def test_faults_under_asan(with_asan, doubles, verb):
    with running(with_asan, doubles, environment=OPTIONS) as subject:
        for size, density in ((2 * MIB, "zeros"), (2 * MIB + 5, "sparse")):
            subject.alloc(1, size, density=density)
        with subject.control() as control:
            for nth in range(1, 1 + sum(calls_of(subject, control, verb).values())):
                control.must(*earlier(verb))
                subject.fail("*", nth, lasting=nth % 2 == 0)
                control.ask(verb)
                retry(subject, control)


@contextlib.contextmanager
def ended_after(seconds: float, subject: Subject) -> Iterator[None]:
    """A subject that hangs is ended, and the test that waits for its answer fails."""
    timer = threading.Timer(seconds, subject.process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def test_a_race_is_seen(with_tsan, doubles):
    """Were nobody at rest, ThreadSanitizer would say so, or the double, or the program would end or hang.

    So these tests can fail.  Which of them it is, and who meets it first (an answer that is wrong, cut, or never
    comes), is chance: that is what a race is.
    """
    with (
        pytest.raises((AssertionError, OSError, ValueError, subprocess.SubprocessError)),
        running(with_tsan, doubles, environment=OPTIONS) as subject,
        ended_after(PATIENCE, subject),
    ):
        hammer(subject, 3, 20, lambda _: contextlib.nullcontext())
