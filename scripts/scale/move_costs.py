"""What it costs to take a kernel off a GPU and to bring it back, by bytes: the figures of docs/measurements.md.

All from its section "H200, 8 GiB of tensors" (column "ours"), but for a kernel without device memory, whose figures are
from "A kernel without device memory".  A cost is a part that does not depend on bytes and a part that does.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True)
class Costs:
    """Rates are bytes per second; floors are seconds."""

    #: "preflight, drain, quiesce: 0.075 s"; "CUDA lock and checkpoint: 2.63 GB/s".
    suspend_floor: float = 0.075
    suspend_rate: float = 2.63e9
    #: "CRIU dump: 2.770 s" and "on disk: 3.006 s" for an image of 8.97 GiB; "end of the process: 0.214 s".
    dump_rate: float = 8.97 * GIB / (2.770 + 3.006)
    dump_floor: float = 0.214
    #: "CRIU restore: 3.788 s" for that image; "match, reserve, connect, thaw, release: 0.016 s".
    restore_rate: float = 8.97 * GIB / 3.788
    restore_floor: float = 0.016
    #: "CUDA restore and unlock: 6.51 GB/s".
    resume_rate: float = 6.51e9
    #: "image: 8.97 GiB" for 8 GiB of tensors: what a torch process has besides, in host memory and in its image.
    besides: int = round(0.97 * GIB)
    #: "wake, from the execute to its first output: 0.091 s", of a kernel without device memory.
    least_wake: float = 0.091

    def suspend(self, device: int) -> float:
        """Seconds until the GPU is free."""
        return self.suspend_floor + device / self.suspend_rate

    def dump(self, image: int) -> float:
        """Seconds from then until the image is on disk and the process has ended."""
        return self.dump_floor + image / self.dump_rate

    def restore(self, image: int) -> float:
        """Seconds from the request until the process is there again, suspended."""
        return self.restore_floor + image / self.restore_rate

    def resume(self, device: int) -> float:
        """Seconds until the device memory of a suspended process is on the GPU again."""
        return self.least_wake + device / self.resume_rate
