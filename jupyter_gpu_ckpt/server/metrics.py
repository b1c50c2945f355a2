"""Prometheus metrics, served by jupyter_server's own ``/metrics``; gauges are read from the monitor at each scrape."""

from __future__ import annotations

import contextlib
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable

from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..lifecycle.plans import State
from .monitor import VERBS, Changed, Failed, KernelMonitor, Listener, Stepped

STEP_SECONDS = Histogram(
    "gpu_ckpt_step_seconds",
    "Seconds that a completed step of a suspend, resume, checkpoint or restore took",
    ["step"],
    buckets=(0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
DONE = Counter("gpu_ckpt_verbs_total", "Verbs that reached their goal", ["verb"])
FAILURES = Counter("gpu_ckpt_failures_total", "Verbs that failed, by the error's code", ["verb", "code"])
FREED = Counter(
    "gpu_ckpt_device_bytes_freed_total", "Bytes of device memory taken off the GPUs since the server's start"
)


class Metrics(Listener, Collector):
    """A listener of `monitor.KernelMonitor`, and a collector of gauges; registered until `close`.

    ``copied``: `GpuUsage.copied`.
    """

    def __init__(self, monitor: KernelMonitor, copied: Callable[[], int]) -> None:
        self.monitor = monitor
        self._copied = copied
        REGISTRY.register(self)

    def close(self) -> None:
        """Remove this server's gauges from the registry, if that was not done before."""
        with contextlib.suppress(KeyError):
            REGISTRY.unregister(self)

    def collect(self) -> Iterable[Metric]:
        """Called from ``/metrics``."""
        monitored = list(self.monitor.kernels.values())
        states = Tally(kernel.state for kernel in monitored)
        kernels = GaugeMetricFamily("gpu_ckpt_kernels", "Kernels that can be checkpointed, by state", labels=["state"])
        for state in State:
            kernels.add_metric([state.value], states[state])
        yield kernels
        swapped_out = [kernel.swapped_out.device for kernel in monitored if kernel.swapped_out is not None]
        yield GaugeMetricFamily(
            "gpu_ckpt_device_bytes_swapped_out",
            "Bytes of kernels' device memory that are in host memory or images now",
            value=sum(sum(device.values()) for device in swapped_out),
        )
        yield GaugeMetricFamily(
            "gpu_ckpt_device_bytes_copied",
            "Bytes of kernels' device memory on GPUs of which host memory has a copy",
            value=self._copied(),
        )
        sharing = [kernel.provisioner.sharing for kernel in monitored]
        yield GaugeMetricFamily(
            "gpu_ckpt_kernels_waiting_for_gpu",
            "Kernels of this server that wait for a GPU which they share",
            value=sum(each is not None and each.waiting() is not None for each in sharing),
        )
        yield CounterMetricFamily(
            "gpu_ckpt_gpu_seconds_freed",
            "Seconds, counted for each GPU, that kernels with device memory were off their GPUs",
            value=self.monitor.gpu_seconds(time.time()),
        )

    def changed(self, change: Changed) -> None:
        if change.previous in VERBS and change.state not in (State.DEAD, *VERBS) and change.code is None:
            DONE.labels(VERBS[change.previous]).inc()

    def stepped(self, step: Stepped) -> None:
        event = step.event
        if event.kind == "completed":
            STEP_SECONDS.labels(event.step).observe(event.seconds or 0.0)
            if event.step == "cuda_suspend" and event.bytes:
                FREED.inc(event.bytes)

    def failed(self, failure: Failed) -> None:
        FAILURES.labels(failure.verb, failure.code).inc()
