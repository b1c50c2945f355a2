"""Estimates of how large an image will be and how long a checkpoint and a restore will take.

The rates of a host are those of its last checkpoints and restores (`RATES` listens to every trace); until there are
any, those of docs/measurements.md.  An estimate is for people who decide whether to wait; deadlines are computed from
`LifecycleSettings`, which assumes far slower hosts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..trace import StepEvent

#: Steps of fewer bytes show their fixed cost, not the rate.
_LEAST = 64 << 20
#: Bytes per second until there are measured ones: H200, PCIe 5, local NVMe (docs/measurements.md).
_FIRST_RATES = {
    "cuda_suspend": 2.6e9,
    "dump": 2.6e9,
    "publish": 2.8e9,
    "keep": 2.8e9,
    "criu_restore": 1.8e9,
    "cuda_resume": 6.5e9,
}

#: Seconds whatever the size: gate, agent and CRIU; and the driver's, of a process that has a context.
_PROCESS, _CONTEXT = 0.1, 0.35


@dataclass(frozen=True)
class Estimate:
    """Bytes of the image, and seconds from the request.

    ``gpu_free``: until the GPU is free; ``saved``: until all is on disk; ``back``: from a wake until the cell runs.
    """

    image_bytes: int
    gpu_free: float
    saved: float
    back: float


class Rates:
    """Bytes per second by step, measured by traces, of which this is a sink."""

    def __init__(self) -> None:
        self._measured: dict[str, float] = {}

    def __call__(self, event: StepEvent) -> None:
        if event.kind == "completed" and event.seconds and (event.bytes or 0) >= _LEAST:
            self._measured[event.step] = (event.bytes or 0) / event.seconds

    def seconds(self, steps: Iterable[str], bytes: int) -> float:
        """Return how long ``steps`` take together for ``bytes`` each."""
        return sum(bytes / self._measured.get(step, _FIRST_RATES[step]) for step in steps)

    def estimate(self, process_bytes: int, device_bytes: int) -> Estimate:
        """Return the estimate for a kernel with so much resident host memory and device memory."""
        driver, image = _CONTEXT if device_bytes else 0.0, process_bytes + device_bytes
        gpu_free = driver + self.seconds(["cuda_suspend"], device_bytes)
        saved = gpu_free + _PROCESS + self.seconds(["dump", "publish"], image)
        back = driver + _PROCESS + self.seconds(["criu_restore"], image) + self.seconds(["cuda_resume"], device_bytes)
        return Estimate(image, gpu_free, saved, back)


#: The rates of this process.
RATES = Rates()
