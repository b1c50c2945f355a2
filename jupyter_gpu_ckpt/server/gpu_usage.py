"""GPU memory by kernel: measured once for all browser tabs, kept for an hour, emitted as an event when it changes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from traitlets import Float
from traitlets.config import LoggingConfigurable

from ..cuda.gpus import Gpu
from ..errors import GpuCkptError
from ..kernel.engine import shared_engine
from ..kernel.provisioner import GpuCkptProvisioner
from ..lifecycle import host_memory
from .monitor import Changed, KernelMonitor, Listener, Stepped
from .periodic_task import PeriodicTask, wait

#: Seconds of history.
HISTORY = 3600.0
#: Change in bytes that is worth an event.
MIN_CHANGE = 1 << 20


@dataclass(frozen=True)
class Usage:
    """The GPUs at one moment (seconds since the epoch), and bytes by GPU UUID and kernel id.

    ``copied``: bytes of device memory that are on a GPU and of which host memory has a copy.
    """

    at: float
    gpus: tuple[Gpu, ...]
    kernels: Mapping[str, Mapping[str, int]]
    copied: int = 0

    def differs(self, other: Usage) -> bool:
        """Return whether the difference is worth an event."""
        before = {gpu.uuid: gpu.used for gpu in other.gpus}
        moved = any(abs(gpu.used - before.get(gpu.uuid, 0)) >= MIN_CHANGE for gpu in self.gpus)
        return moved or len(self.gpus) != len(before) or self.kernels != other.kernels


class GpuUsage(Listener, LoggingConfigurable):
    """Measures every `interval`, and after each suspend or resume.  A listener of `monitor.KernelMonitor`."""

    interval = Float(5.0, min=0.5, help="Seconds between two measurements of GPU memory by kernel.").tag(config=True)

    def __init__(
        self,
        provisioners: Callable[[], dict[str, GpuCkptProvisioner]],
        monitor: KernelMonitor,
        image_dir: Path,
        emit: Callable[[dict[str, Any]], None],
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._provisioners, self._monitor, self._image_dir, self._emit = provisioners, monitor, image_dir, emit
        self._task = PeriodicTask("gpu-ckpt-usage", self._run)
        self._sooner = asyncio.Event()
        self._last: Usage | None = None
        self._measured = -inf
        self._failing = False
        self._history: dict[str, deque[tuple[float, int]]] = {}

    def start(self) -> None:
        """Called from the extension, on its event loop."""
        self._task.start()

    async def stop(self) -> None:
        """Called from the extension."""
        await self._task.stop()

    def copied(self) -> int:
        """Return the bytes of device memory on GPUs of which host memory had a copy at the last measurement."""
        return self._last.copied if self._last is not None else 0

    async def measure(self) -> Usage:
        """Measure now."""
        return self._record(await asyncio.to_thread(_measure, self._provisioners(), self._image_dir))

    async def document(self) -> dict[str, Any]:
        """Return the reply to ``GET gpus``: no older than `interval`, or the last if the driver does not answer."""
        last = self._last
        if last is None or time.monotonic() - self._measured > self.interval:
            try:
                last = await self.measure()
            except GpuCkptError:
                last = last or Usage(time.time(), (), {})  # the doctor says why
        sharing = {name: each.sharing for name, each in self._provisioners().items() if each.sharing is not None}
        own = {each.participant.kernel: name for name, each in sharing.items()}
        shared = next(iter(sharing.values()), None)
        gpus = [
            {
                **asdict(gpu),
                "kernels": dict(last.kernels.get(gpu.uuid, {})),
                "history": [list(point) for point in self._history.get(gpu.uuid, ())],
                **({"sharing": shared.queue(gpu.uuid, own)} if shared is not None else {}),
            }
            for gpu in last.gpus
        ]
        return {"gpus": gpus, "gpu_seconds_freed": self._monitor.gpu_seconds(time.time())}

    async def _run(self) -> None:
        await self._sooner.wait()  # without kernels no driver is loaded
        while True:
            self._sooner.clear()
            try:
                if not (await self.measure()).gpus and not self._history:
                    return  # the driver lists no GPU, and none appears while this server runs
                self._failing = False
            except Exception as error:
                if not self._failing:  # the first of consecutive failures; an error of the driver needs no traceback
                    self._failing = True
                    trace = None if isinstance(error, GpuCkptError) else error
                    text = "GPU memory by kernel could not be measured; it is tried again every %g s: %s"
                    self.log.warning(text, self.interval, error, exc_info=trace)
            await wait(self._sooner, self.interval)

    def _record(self, usage: Usage) -> Usage:
        before, self._last = self._last, usage
        self._measured = time.monotonic()
        for gpu in usage.gpus:
            points = self._history.setdefault(gpu.uuid, deque())
            while points and points[0][0] < usage.at - HISTORY:
                points.popleft()
            if len(points) >= 2 and points[-1][1] == points[-2][1] == gpu.used:
                points.pop()  # of equal values only the first and the last are kept
            points.append((usage.at, gpu.used))
        if usage.gpus and (before is None or usage.differs(before)):
            gpus = [
                {"uuid": gpu.uuid, "used": gpu.used, "kernels": dict(usage.kernels.get(gpu.uuid, {}))}
                for gpu in usage.gpus
            ]
            self._emit({"at": usage.at, "gpus": gpus, "gpu_seconds_freed": self._monitor.gpu_seconds(usage.at)})
        return usage

    def changed(self, change: Changed) -> None:
        self._sooner.set()

    def stepped(self, step: Stepped) -> None:
        if step.event.kind == "completed" and step.event.step in ("cuda_suspend", "cuda_resume"):
            self._sooner.set()


def _measure(provisioners: Mapping[str, GpuCkptProvisioner], image_dir: Path) -> Usage:
    """Query NVML and the driver.  Runs on a thread."""
    at = time.time()
    gpus = tuple(shared_engine(image_dir).gpus.list())
    kernels: dict[str, dict[str, int]] = {}
    copied = 0
    for kernel_id, provisioner in provisioners.items() if gpus else ():
        if (lifecycle := provisioner.lifecycle) is not None:
            with contextlib.suppress(GpuCkptError):  # it is just ending, or NVML does not answer
                for uuid, count in host_memory.device_bytes(lifecycle.kernel).items():
                    kernels.setdefault(uuid, {})[kernel_id] = count
                copied += host_memory.copied(lifecycle.kernel)
    return Usage(at, gpus, kernels, copied)
