"""The metrics that Prometheus reads."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import DAEMON
from live import until
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.server.metrics import Metrics
from jupyter_gpu_ckpt.server.monitor import Changed, Failed, KernelMonitor, MonitoredKernel, Sizes, Stepped
from jupyter_gpu_ckpt.trace import StepEvent

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "admin" / "monitoring.md"


def samples(text: str) -> dict[tuple, float]:
    """Our samples by name and sorted labels."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("gpu_ckpt_")
    }


def test_a_server_exports_states_steps_and_failures(live, kernel_id):
    def now() -> dict[tuple, float]:
        return samples(live.ask("GET", "metrics").text)

    before = now()
    live.do(kernel_id, "checkpoint")
    asleep = now()
    state = "gpu_ckpt_kernels", ("state", "checkpointed")
    assert asleep[state] == before[state] + 1
    verb = "gpu_ckpt_verbs_total", ("verb", "checkpoint")
    assert asleep[verb] == before.get(verb, 0) + 1
    dumps = "gpu_ckpt_step_seconds_count", ("step", "dump")
    assert asleep[dumps] == before.get(dumps, 0) + 1
    live.run(kernel_id, DAEMON)
    until(lambda: now()[state] == before[state])
    live.do(kernel_id, "checkpoint")
    failures = "gpu_ckpt_failures_total", ("code", "CHILD_PROCESSES"), ("verb", "checkpoint")
    assert now()[failures] == before.get(failures, 0) + 1


# -- without a server: a kernel with device memory that never was


class Provisioner:
    """The part of a provisioner that a monitor needs."""

    lifecycle = None

    def __init__(self):
        self.sinks = []
        self.on_state = []
        self.on_protected = []
        self.sharing = None


@pytest.fixture
def monitor():
    made = KernelMonitor(None, logging.getLogger("watch"))
    metrics = Metrics(made, lambda: 300)
    made.listeners.append(metrics)
    yield made
    metrics.close()


def story(watched: MonitoredKernel, *parts) -> None:
    """States and completed steps at given times, as a kernel's worker would report them."""
    sizes = Sizes(host=1, device={"GPU-a": 600, "GPU-b": 400})
    for at, what in parts:
        if isinstance(what, State):
            watched._process_state(what, at, sizes, None, None)
        else:
            moved = 1000 if what.startswith("cuda_") else None
            watched._process_step(StepEvent("completed", what, "k", at, 0.5, moved))


def ours() -> dict[tuple, float]:
    return samples(generate_latest(REGISTRY).decode())


def test_gpu_seconds_are_counted_for_each_gpu_while_the_kernel_sleeps(monitor):
    watched = monitor.add("k", Provisioner())
    freed = ours()["gpu_ckpt_device_bytes_freed_total",]
    story(watched, (0.0, State.RUNNING), (10.0, State.SUSPENDING), (11.0, "cuda_suspend"), (12.0, State.SUSPENDED))
    figures = ours()
    assert figures["gpu_ckpt_kernels", ("state", "suspended")] == 1
    assert figures["gpu_ckpt_kernels_waiting_for_gpu",] == 0
    watched.provisioner.sharing = SimpleNamespace(waiting=lambda: {"place": 1})
    assert ours()["gpu_ckpt_kernels_waiting_for_gpu",] == 1
    assert figures["gpu_ckpt_device_bytes_swapped_out",] == 1000
    assert figures["gpu_ckpt_device_bytes_copied",] == 300
    assert figures["gpu_ckpt_device_bytes_freed_total",] == freed + 1000
    story(watched, (110.0, State.RESUMING), (111.0, "cuda_resume"), (112.0, State.RUNNING))
    figures = ours()
    assert figures["gpu_ckpt_device_bytes_swapped_out",] == 0
    assert figures["gpu_ckpt_gpu_seconds_freed_total",] == pytest.approx(2 * 100.0)


def test_a_kernel_that_is_shut_down_is_counted_no_more(monitor):
    watched = monitor.add("k", Provisioner())
    story(watched, (0.0, State.RUNNING))
    monitor.remove("k")
    assert ours()["gpu_ckpt_kernels", ("state", "running")] == 0
    assert watched.provisioner.sinks == []


def test_a_server_that_stopped_leaves_no_figures_behind():
    monitor = KernelMonitor(None, logging.getLogger("watch"))
    metrics = Metrics(monitor, lambda: 0)
    metrics.close()
    metrics.close()  # as by a second signal
    assert ("gpu_ckpt_device_bytes_swapped_out",) not in ours()


def test_the_reference_names_every_metric_and_no_other(monitor):
    metrics = monitor.listeners[0]
    metrics.changed(Changed("k", State.CHECKPOINTED, State.DUMPING, 0.0, 0.0, None, 0, None))
    metrics.failed(Failed("k", "checkpoint", "dump", "NO_SPACE", "", "", 0.0))
    metrics.stepped(Stepped(StepEvent("completed", "dump", "k", 0.0, 0.1), "checkpoint", 0.5, 0, 0.0))
    families = text_string_to_metric_families(generate_latest(REGISTRY).decode())
    names = {f"{f.name}_total" if f.type == "counter" else f.name for f in families if f.name.startswith("gpu_ckpt_")}
    named = set(re.findall(r"^\| `(gpu_ckpt_\w+)", REFERENCE.read_text(), re.MULTILINE))
    assert named == {name for name in names if not name.endswith("_created")}
