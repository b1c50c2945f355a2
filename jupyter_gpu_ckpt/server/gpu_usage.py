"""Who holds the GPUs' memory: looked at now and then, kept for an hour, told as an event when it has changed.

Front ends show it without asking: one look here serves every browser tab.
"""

from __future__ import annotations

import asyncio
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
from .monitor import Changed, Failed, Stepped, Watcher, device_bytes
from .periodic_task import Background

#: Seconds of history, and the change in bytes that is worth an event.
HISTORY = 3600.0
NEWS = 1 << 20

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Usage:
    """The GPUs at one moment (seconds since the epoch), and bytes by GPU UUID and kernel id."""

    at: float
    gpus: tuple[Gpu, ...]
    kernels: Mapping[str, Mapping[str, int]]

    def differs(self, other: Usage) -> bool:
        """Whether anybody who looks would see it."""
        before = {gpu.uuid: gpu.used for gpu in other.gpus}
        moved = any(abs(gpu.used - before.get(gpu.uuid, 0)) >= NEWS for gpu in self.gpus)
        return moved or len(self.gpus) != len(before) or self.kernels != other.kernels


class GpuUsage(LoggingConfigurable):
    """Looks every `interval`, and whenever a kernel has left or come back.  A listener of `watch.Watcher`."""

    interval = Float(5.0, min=0.5, help="Seconds between two looks at who holds the GPUs' memory.").tag(config=True)

    def __init__(
        self,
        provisioners: Callable[[], dict[str, GpuCkptProvisioner]],
        watcher: Watcher,
        image_dir: Path,
        tell: Tell,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._provisioners = provisioners
        self._watcher = watcher
        self._image_dir = image_dir
        self._tell = tell
        self._looking = Background("gpu-ckpt-usage", self._run)
        self._sooner = asyncio.Event()
        self._last: Usage | None = None
        self._looked = -inf
        self._failing = False
        self._history: dict[str, deque[tuple[float, int]]] = {}

    def start(self) -> None:
        """Begin.  Called from the extension, on its event loop."""
        self._looking.start()

    async def stop(self) -> None:
        """End.  Called from the extension."""
        await self._looking.stop()

    async def look(self) -> Usage:
        """Look now."""
        return self._take(await asyncio.to_thread(_look, self._provisioners(), self._image_dir))

    async def document(self) -> dict[str, Any]:
        """What ``GET gpus`` replies: as of the last look, or of one made now where that is older than `interval`.

        A driver that does not answer just now leaves what was seen before.
        """
        last = self._last
        if last is None or time.monotonic() - self._looked > self.interval:
            try:
                last = await self.look()
            except GpuCkptError:
                last = last or Usage(time.time(), (), {})  # the doctor says why
        return {
            "gpus": [
                {
                    **asdict(gpu),
                    "kernels": dict(last.kernels.get(gpu.uuid, {})),
                    "history": [list(point) for point in self._history.get(gpu.uuid, ())],
                }
                for gpu in last.gpus
            ],
            "gpu_seconds_given_back": self._watcher.gpu_seconds(time.time()),
        }

    async def _run(self) -> None:
        await self._sooner.wait()  # without kernels nobody is made to wait for a driver
        while True:
            self._sooner.clear()
            try:
                if not (await self.look()).gpus and not self._history:
                    return  # the driver lists no GPU, and none will come while this server runs
                self._failing = False
            except Exception as error:
                self._tell_fault(error)
            # A timer and not `wait_for`, which before Python 3.12 can lose the cancellation that `stop` asks for.
            timer = asyncio.get_running_loop().call_later(self.interval, self._sooner.set)
            try:
                await self._sooner.wait()
            finally:
                timer.cancel()

    def _tell_fault(self, error: Exception) -> None:
        """Once for each stretch of looks that fail.  What a driver has against it is no traceback's worth."""
        if not self._failing:
            self._failing = True
            trace = None if isinstance(error, GpuCkptError) else error
            what = "Who holds the GPUs' memory could not be found out; it is tried every %g s: %s"
            self.log.warning(what, self.interval, error, exc_info=trace)

    def _take(self, usage: Usage) -> Usage:
        before, self._last = self._last, usage
        self._looked = time.monotonic()
        for gpu in usage.gpus:
            points = self._history.setdefault(gpu.uuid, deque())
            while points and points[0][0] < usage.at - HISTORY:
                points.popleft()
            if len(points) >= 2 and points[-1][1] == points[-2][1] == gpu.used:
                points.pop()  # a level stretch is its two ends
            points.append((usage.at, gpu.used))
        if usage.gpus and (before is None or usage.differs(before)):
            self._tell(
                {
                    "at": usage.at,
                    "gpus": [
                        {"uuid": gpu.uuid, "used": gpu.used, "kernels": dict(usage.kernels.get(gpu.uuid, {}))}
                        for gpu in usage.gpus
                    ],
                    "gpu_seconds_given_back": self._watcher.gpu_seconds(usage.at),
                }
            )
        return usage

    # -- as a listener

    def changed(self, change: Changed) -> None:
        """A kernel has another state: what it holds is another, too."""
        self._sooner.set()

    def stepped(self, step: Stepped) -> None:
        """Device memory has left a GPU, or is back."""
        if step.event.kind == "completed" and step.event.step in ("cuda_suspend", "cuda_resume"):
            self._sooner.set()

    def failed(self, failure: Failed) -> None:
        """Its transition was told."""


def _look(provisioners: Mapping[str, GpuCkptProvisioner], image_dir: Path) -> Usage:
    """Asks NVML and the driver: for a thread."""
    at = time.time()
    gpus = tuple(shared_engine(image_dir).gpus.list())
    kernels: dict[str, dict[str, int]] = {}
    for kernel_id, provisioner in provisioners.items() if gpus else ():
        lifecycle = provisioner.lifecycle
        try:
            held = device_bytes(lifecycle) if lifecycle is not None else {}
        except GpuCkptError:
            continue  # it ends just now, or NVML does not tell
        for uuid, count in held.items():
            kernels.setdefault(uuid, {})[kernel_id] = count
    return Usage(at, gpus, kernels)
