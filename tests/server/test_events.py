"""The story of a kernel on the event bus and in the log."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from harness import DAEMON, until
from jupyter_events import EventLogger
from live import server
from live import until as until_true
from tornado.ioloop import IOLoop

from jupyter_gpu_ckpt.lifecycle.plans import PLANS, Move, State, Step
from jupyter_gpu_ckpt.lifecycle.rates import Rates
from jupyter_gpu_ckpt.server import monitor as monitor_module
from jupyter_gpu_ckpt.server.events import FAILURE, PROTECTION, SCHEMAS, STATE, STEP, Events
from jupyter_gpu_ckpt.server.monitor import VERBS, KernelMonitor, Progress, Sizes, Stepped
from jupyter_gpu_ckpt.trace import StepEvent

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "rest.md"
GIB = 1 << 30


@pytest.fixture(scope="module")
def live(tmp_path_factory, module_runtime_base, criu_binary):
    """A server that looks at a running step more often."""
    config = "from jupyter_gpu_ckpt.server import monitor\nmonitor.POLL_INTERVAL = 0.02"
    with server(tmp_path_factory.mktemp("events"), module_runtime_base, config=config) as running:
        yield running


@pytest.fixture(autouse=True)
def first_rates(monkeypatch):
    """Not what the tests before this one measured."""
    monkeypatch.setattr(monitor_module, "RATES", Rates())


def gather(next_event, *, until_state: str, limit: int = 10_000) -> list[dict]:
    """Events up to the one in which the kernel came into a state."""
    events = []
    for _ in range(limit):
        events.append(next_event())
        if events[-1]["schema_id"] == STATE and events[-1]["state"] == until_state:
            return events
    raise AssertionError(f"{until_state} did not come")


def test_a_protection_is_an_event_for_each_way_to_set_it(live, kernel_id):
    def protection(next_event) -> dict:
        while (event := next_event())["schema_id"] != PROTECTION:
            pass
        assert event["kernel_id"] == kernel_id
        return event

    with live.events() as next_event:
        live.run(kernel_id, "%gpu_checkpoint --protect 2h")
        assert protection(next_event)["protected_until"] == pytest.approx(time.time() + 7200, abs=60)
        live.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/protect", json={"seconds": 0})
        assert protection(next_event)["protected_until"] is None


def test_each_step_of_a_checkpoint_is_an_event(live, kernel_id):
    with live.events() as next_event:
        live.do(kernel_id, "checkpoint")
        events = gather(next_event, until_state="checkpointed")
    states = [event["state"] for event in events if event["schema_id"] == STATE]
    assert states == ["dumping", "checkpointed"]
    assert events[-1]["image"] and events[-1]["previous"] == "dumping"
    steps = [event for event in events if event["schema_id"] == STEP]
    plan = PLANS[State.RUNNING, Move.CHECKPOINT]
    assert [step["step"] for step in steps if step["status"] == "completed"] == [step.value for step in plan.steps]
    assert {step["verb"] for step in steps} == {"checkpoint"}
    fractions = [step["fraction"] for step in steps]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    (dump,) = (step for step in steps if step["step"] == "dump" and step["status"] == "completed")
    assert dump["bytes"] > 1 << 20 and dump["seconds"] > 0
    assert dump["expected_bytes"] > dump["bytes"] / 4, "the estimate is of the right kind"


def test_a_long_dump_has_events_while_it_lasts(live, kernel_id):
    live.run(kernel_id, "import os; block = os.urandom(200 << 20)")
    with live.events() as next_event:
        live.do(kernel_id, "checkpoint")
        events = gather(next_event, until_state="checkpointed")
    steps = [event for event in events if event["schema_id"] == STEP]
    moments = [step for step in steps if step["status"] == "running"]
    assert moments, "copying so much takes longer than a look"
    assert {step["verb"] for step in moments} == {"checkpoint"}
    fractions = [step["fraction"] for step in steps]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0 > moments[-1]["fraction"] > 0


async def test_the_bytes_that_a_dump_has_written_are_reported(kernel):
    written = []

    def look(event: StepEvent) -> None:
        if event.step in ("preflight", "dump", "publish") and event.kind == "completed":
            written.append(kernel.lifecycle.kernel.written())

    kernel.provisioner.sinks.append(look)
    image = await kernel.provisioner.checkpoint()
    assert written == [0, pytest.approx(image.manifest.bytes, rel=0.01), 0]


def test_a_wake_by_a_client_has_events_too(live, kernel_id):
    live.do(kernel_id, "checkpoint")
    with live.events() as next_event:
        live.run(kernel_id, "pass")
        events = gather(next_event, until_state="running")
    assert [event["state"] for event in events if event["schema_id"] == STATE] == ["restoring", "running"]
    assert {event["verb"] for event in events if event["schema_id"] == STEP} == {"restore"}


def test_a_wake_that_fails_names_the_image_in_its_hint(live, kernel_id, tmp_path):
    data = tmp_path / "data"
    data.write_text("before")
    live.run(kernel_id, f"file = open({str(data)!r})")
    live.do(kernel_id, "checkpoint")
    image = live.get(f"gpu-ckpt/kernels/{kernel_id}")["image"]
    data.write_text("changed")
    with live.events() as next_event:
        assert live.do(kernel_id, "restore")["error"]["code"] == "FILE_CHANGED"
        gather(next_event, until_state="checkpointed")
        failure = next_event()
    for hint in (failure["hint"], live.get(f"gpu-ckpt/kernels/{kernel_id}")["failure"]["hint"]):
        assert f"`jupyter gpu-ckpt match {image}" in hint
    assert str(data) not in str(failure)
    live.do(kernel_id, "restore", {"accept_changed_files": True})


def test_a_failure_names_code_and_hint_and_what_is_left(live, kernel_id):
    live.run(kernel_id, DAEMON)
    with live.events() as next_event:
        live.do(kernel_id, "checkpoint")
        events = gather(next_event, until_state="running")
        failure = next_event()
    assert failure["schema_id"] == FAILURE
    assert failure["code"] == "CHILD_PROCESSES" and failure["step"] == "preflight" and failure["verb"] == "checkpoint"
    assert "End these child processes" in failure["hint"] and failure["left"] == "the kernel runs on"
    (broken,) = (event for event in events if event.get("status") == "failed")
    assert broken["code"] == "CHILD_PROCESSES"


def test_a_restart_is_noticed(live, kernel_id):
    live.do(kernel_id, "checkpoint")
    with live.events() as next_event:
        assert live.ask("POST", f"api/kernels/{kernel_id}/restart").ok
        states = [event for event in gather(next_event, until_state="running") if event["schema_id"] == STATE]
    assert states[-1]["image"] is None


def test_a_kernel_that_died_and_was_restarted_by_the_server_is_noticed_at_once(live, kernel_id):
    with live.events() as next_event, live.client(kernel_id) as client:
        client.execute("import os; os._exit(3)")
        events = gather(next_event, until_state="running")
    assert [(event["previous"], event["state"]) for event in events] == [("running", "dead"), ("dead", "running")]
    model = live.get(f"api/kernels/{kernel_id}")
    assert model["gpu_ckpt"] == {"state": "running", "checkpointable": True}
    until_true(lambda: live.get(f"api/kernels/{kernel_id}")["execution_state"] == "idle")
    assert live.run(kernel_id, "print(1)") == "1"
    assert live.do(kernel_id, "checkpoint")["status"] == "done"


def test_each_transition_is_one_line_of_the_log(live, kernel_id):
    live.do(kernel_id, "checkpoint")
    live.run(kernel_id, "secret = 'x'")
    live.do(kernel_id, "checkpoint")
    lines = [line for line in live.log.splitlines() if "gpu_ckpt transition" in line and kernel_id in line]
    facts = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines]
    moves = [(fact["from"], fact["to"]) for fact in facts]
    assert moves == [
        ("-", "running"),
        ("running", "dumping"),
        ("dumping", "checkpointed"),
        ("checkpointed", "restoring"),
        ("restoring", "running"),
        ("running", "dumping"),
        ("dumping", "checkpointed"),
    ]
    assert {len(fact) for fact in facts} == {7}
    assert not any(str(live.home) in line for line in lines)


# -- without a server


@pytest.mark.parametrize("file", sorted(SCHEMAS.glob("*.yaml")), ids=lambda path: path.stem)
def test_schemas_and_reference_name_the_same_fields(file):
    schema = yaml.safe_load(file.read_text())
    (row,) = (line for line in REFERENCE.read_text().splitlines() if line.startswith(f"| `{file.stem}/v1`"))
    assert set(re.findall(r"`(\w+)`", row.split("|")[3])) == set(schema["properties"]) == set(schema["required"])
    assert all("description" in field for field in schema["properties"].values())


def test_schemas_know_every_state_and_verb():
    state = yaml.safe_load((SCHEMAS / "kernel_state.yaml").read_text())["properties"]
    assert state["state"]["enum"] == [state.value for state in State]
    assert state["previous"]["enum"] == [*(state.value for state in State), None]
    failure = yaml.safe_load((SCHEMAS / "kernel_failure.yaml").read_text())["properties"]
    assert set(failure["verb"]["enum"]) == set(VERBS.values())


def test_schemas_may_be_registered_twice():
    bus = EventLogger()
    Events(bus)
    Events(bus)
    assert {STATE, STEP, FAILURE} <= set(bus.schemas.schema_ids)


def test_a_listener_that_fails_does_not_silence_the_others(caplog):
    received = []

    class Broken:
        def changed(self, change):
            raise RuntimeError("broken")

    class Sound:
        def changed(self, change):
            received.append(change)

    monitor = KernelMonitor(None, logging.getLogger("watch"))
    monitor.listeners += [Broken(), Sound()]
    monitor.notify(lambda listener: listener.changed("news"))
    assert received == ["news"]
    assert "broken" in caplog.text


def test_the_fraction_is_of_expected_time_and_counts_only_the_plan():
    plan = PLANS[State.CHECKPOINTED, Move.RESTORE]
    progress = Progress(plan, Sizes(device={"GPU-a": 8 * GIB}, image=10 * GIB))
    assert progress.fraction == 0.0
    progress.done(Step.MATCH)
    small = progress.fraction
    progress.done(Step.CONTINUE)  # an undo step
    progress.under_way(Step.CONTINUE, 100.0)
    assert progress.fraction == small < 0.01
    progress.done(Step.RESERVE)
    progress.done(Step.CRIU_RESTORE)
    assert 0.4 < progress.fraction < 0.95
    for step in plan.steps:
        progress.done(step)
    assert progress.fraction == 1.0


def test_inside_a_step_the_fraction_moves_by_bytes_or_seconds_and_never_claims_the_end():
    plan = PLANS[State.RUNNING, Move.CHECKPOINT]
    by_bytes, by_seconds = (Progress(plan, Sizes(host=10 * GIB)) for _ in range(2))
    expected = by_bytes.seconds[Step.DUMP]
    share = expected / sum(by_bytes.seconds.values())
    for part in (0.1, 0.5, 0.9):
        by_bytes.under_way(Step.DUMP, 0.0, int(part * 10 * GIB))
        by_seconds.under_way(Step.DUMP, part * expected)
        assert by_bytes.fraction == pytest.approx(part * share) == pytest.approx(by_seconds.fraction)
    seen = [by_seconds.fraction]
    for late in (1.0, 2.0, 100.0, 1.0):  # later than expected, and a clock that was set back
        by_seconds.under_way(Step.DUMP, late * expected)
        seen.append(by_seconds.fraction)
    assert seen == sorted(seen)
    assert seen[0] < seen[1] < seen[-1] < share
    by_seconds.done(Step.DUMP)
    assert by_seconds.fraction == pytest.approx(share)


async def test_a_running_step_has_events_until_it_ends_and_is_not_measured_afterwards(monkeypatch):
    monkeypatch.setattr(monitor_module, "POLL_INTERVAL", 0.01)
    received: list[Stepped] = []
    monitor = KernelMonitor(IOLoop.current(), logging.getLogger("watch"))
    monitor.listeners.append(SimpleNamespace(stepped=received.append, changed=lambda _: None, failed=lambda _: None))
    watched = monitor.add("k", SimpleNamespace(lifecycle=None, sinks=[], on_state=[], on_protected=[]))
    watched._process_state(State.CHECKPOINTED, 0.0, Sizes(), None, None)
    watched._process_state(State.RESTORING, 0.0, Sizes(image=GIB), None, None)
    start = StepEvent("started", "criu_restore", "k", time.time())
    watched._process_step(start)
    await until(lambda: len(received) > 3)
    assert {(step.event.kind, step.event.step, step.verb) for step in received[1:]} == {
        ("running", "criu_restore", "restore")
    }
    fractions = [step.fraction for step in received]
    assert fractions == sorted(set(fractions)) and fractions[-1] < 1
    assert watched.progress.fraction >= fractions[-1], "what REST says"
    watched._process_step(StepEvent("failed", "criu_restore", "k", time.time(), 1.0, code="CRIU_FAILED"))
    watched._process_step(StepEvent("started", "unlease", "k", time.time()))  # an undo
    await until(lambda: not monitor._polling)
    assert [step.event.kind for step in received[-2:]] == ["failed", "started"]


def test_expected_bytes_follow_what_a_step_moves():
    sizes = Sizes(host=1 * GIB, device={"GPU-a": 2 * GIB, "GPU-b": 1 * GIB}, image=4 * GIB)
    moved = {step: sizes.moved_by(step) // GIB for step in Step if sizes.moved_by(step)}
    assert moved == {
        Step.CUDA_SUSPEND: 3,
        Step.CUDA_RESUME: 3,
        Step.DUMP: 4,
        Step.PUBLISH: 4,
        Step.KEEP: 4,
        Step.CRIU_RESTORE: 4,
    }
