"""Why the CUDA driver does not suspend a process, where that can be known: it only says that it does not."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import (
    DriverTooOld,
    ManagedMemory,
    MultiInstanceGpu,
    MultiProcessService,
    ProfilerUsed,
    UnsupportedCuda,
)
from .cuda import Cuda
from .gpus import Gpus

#: Why the driver suspends no process like this one; the library may swap out what it serves.
Refusal = UnsupportedCuda | DriverTooOld


def known(pid: int, cuda: Cuda, gpus: Gpus, used: Collection[str], managed: int) -> list[Refusal]:
    """Return why the driver will refuse a process that has memory on the ``used`` GPUs (UUIDs).

    ``managed``: the number of its allocations of managed memory, as far as that is known.

    Queries the driver's version and NVML; the process is not disturbed.  Raises as `Cuda.available`, `Gpus.list`.
    """
    found: list[Refusal] = []
    try:
        cuda.available()
    except DriverTooOld as too_old:
        found.append(too_old)
    present = [gpu for gpu in gpus.list() if gpu.uuid in used]
    if any(gpu.mig for gpu in present):
        found.append(MultiInstanceGpu("The kernel's GPU is divided (MIG), and the driver does not suspend its users."))
    if any(gpu.mps and pid in gpus.mps_clients(gpu.uuid) for gpu in present):
        message = "The kernel uses its GPU by the multi-process service (MPS), which the driver does not suspend."
        found.append(MultiProcessService(message))
    if managed:
        message = f"The kernel has managed memory ({managed} allocations), which the driver does not suspend."
        found.append(ManagedMemory(message))
    return found


def explained(
    refusal: Refusal,
    pid: int,
    cuda: Cuda,
    gpus: Gpus,
    used: Collection[str],
    managed: int,
    *,
    at_lock: bool = False,
) -> Refusal:
    """Return the refusal by its reason, or itself where the reason is not known.

    ``at_lock``: the driver refused the lock.  Of a process on a whole GPU without MPS it does so after a profiler was
    used, for as long as the process lives; memory that it cannot save it refuses at the checkpoint.
    """
    reasons = known(pid, cuda, gpus, used, managed)
    if not reasons and at_lock and cuda.has_profiler(pid):
        message = "The CUDA driver does not lock the kernel, as after each use of a profiler (CUPTI), which is loaded."
        reasons = [ProfilerUsed(message)]
    if not reasons:
        return refusal
    reason = reasons[0]
    reason.left, reason.details = refusal.left, {**refusal.details, "refusal": refusal.message}
    return reason
