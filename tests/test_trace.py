"""The one stream of steps."""

from __future__ import annotations

import contextlib
import time

import pytest
from recorder import Recorder

from jupyter_gpu_ckpt.errors import NoSpace
from jupyter_gpu_ckpt.trace import StepEvent, Trace


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def trace(recorder):
    return Trace("kernel", [recorder])


def kinds(recorder: Recorder) -> list[tuple[str, str]]:
    return [(event.kind, event.step) for event in recorder.events]


def test_a_step_starts_and_completes_with_its_seconds_and_bytes(trace, recorder):
    with trace.step("dump") as step:
        step.bytes = 7
    started, completed = recorder.events
    assert (started.kind, started.seconds, started.bytes) == ("started", None, None)
    assert (completed.kind, completed.bytes, completed.code) == ("completed", 7, None)
    assert completed.seconds is not None
    assert completed.seconds >= 0
    assert {event.kernel_id for event in recorder.events} == {"kernel"}
    assert started.at <= completed.at


def test_parts_of_a_step_are_measured_also_those_that_fail(trace, recorder):
    with contextlib.suppress(NoSpace), trace.step("dump") as step:
        for _ in range(2):
            with step.part("write"):
                time.sleep(0.01)
        with step.part("flush"):
            raise NoSpace("full")
    started, failed = recorder.events
    assert started.parts == {}
    assert [*failed.parts] == ["write", "flush"]
    assert 0.02 <= failed.parts["write"] <= sum(failed.parts.values()) <= failed.seconds


@pytest.mark.parametrize(("error", "code"), [(NoSpace("full"), "NO_SPACE"), (KeyError("x"), "KeyError")])
def test_a_failing_step_records_the_code_and_raises_the_error(trace, recorder, error, code):
    with pytest.raises(type(error)) as caught, trace.step("dump"):
        raise error
    assert caught.value is error
    assert kinds(recorder) == [("started", "dump"), ("failed", "dump")]
    assert recorder.events[-1].code == code


def test_an_interrupt_is_traced_too(trace, recorder):
    with pytest.raises(KeyboardInterrupt), trace.step("dump"):
        raise KeyboardInterrupt
    assert recorder.events[-1].code == "KeyboardInterrupt"


@pytest.mark.parametrize("kind", ["started", "completed"])
def test_a_fault_makes_the_step_fail(recorder, kind):
    done = []

    def fault(event: StepEvent) -> None:
        if event.kind == kind:
            raise NoSpace("injected")

    trace = Trace("kernel", [recorder], [fault])
    with pytest.raises(NoSpace), trace.step("dump"):
        done.append(1)
    assert bool(done) is (kind == "completed"), "a fault at `started` comes before the work"
    assert recorder.events[-1].kind == "failed"
    assert recorder.events[-1].code == "NO_SPACE"


@pytest.mark.parametrize("fails", [False, True])
def test_a_sink_that_raises_stops_neither_the_step_nor_the_other_sinks(recorder, caplog, fails):
    def full(_: StepEvent) -> None:
        raise OSError(28, "No space left on device")

    trace = Trace("kernel", [full, recorder])
    with pytest.raises(NoSpace) if fails else contextlib.nullcontext(), trace.step("dump"):
        if fails:
            raise NoSpace("its own")
    assert kinds(recorder) == [("started", "dump"), ("failed" if fails else "completed", "dump")]
    assert [record.message for record in caplog.records] == ["A listener failed: OSError"] * 2


def test_steps_nest_and_every_sink_gets_them_in_order(trace, recorder):
    other = Recorder()
    trace.sinks.append(other)
    with trace.step("outer"), trace.step("inner"):
        pass
    assert kinds(recorder) == [
        ("started", "outer"),
        ("started", "inner"),
        ("completed", "inner"),
        ("completed", "outer"),
    ]
    assert kinds(other) == kinds(recorder)


def test_a_sink_may_be_removed_during_its_call(trace, recorder):
    def once(_: StepEvent) -> None:
        trace.sinks.remove(once)

    trace.sinks.insert(0, once)
    with trace.step("dump"):
        pass
    assert kinds(recorder) == [("started", "dump"), ("completed", "dump")]


def test_a_step_that_ran_twice_counts_both_times(trace, recorder):
    for _ in range(2):
        with trace.step("dump"):
            pass
    with pytest.raises(KeyError), trace.step("publish"):
        raise KeyError
    assert list(recorder.seconds()) == ["dump"]
    assert recorder.seconds()["dump"] == sum(event.seconds for event in recorder.completed())


def test_an_event_has_no_field_for_secrets():
    """No path, token or user content: events are logged."""
    fields = {"kind", "step", "kernel_id", "at", "seconds", "bytes", "code", "parts"}
    assert set(StepEvent.__dataclass_fields__) == fields
