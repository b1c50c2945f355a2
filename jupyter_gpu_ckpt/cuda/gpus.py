"""The GPUs of this node as NVML reports them, and reservations of their memory.

UUIDs are written as NVML and ``nvidia-smi`` write them (``GPU-`` and 36 characters); memory is in bytes everywhere.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadRequest, CudaError, GpuFull
from ..units import size
from . import gpu_locks
from .checkpoint_api import DriverRefused
from .helper_client import Caller, Facade

NVML_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Gpu:
    """One GPU at one moment.

    ``mig``: multi-instance mode is on.  ``mps``: a process of the multi-process service uses it (``None``: unknown; an
    MPS daemon without clients is not detected).  ``driver``: version of the NVIDIA driver; ``cuda``: the CUDA version
    that it supports (empty: unknown).
    """

    index: int
    uuid: str
    name: str
    total: int
    free: int
    used: int
    mig: bool
    mps: bool | None
    driver: str
    cuda: str = ""


def default_lock_directory() -> Path:
    """Return the directory that all users' servers share: as the environment says, or in the temporary directory."""
    named = os.environ.get("JUPYTER_GPU_CKPT_LOCKS")
    return Path(named) if named else Path(tempfile.gettempdir()) / "jupyter-gpu-ckpt-locks"


class Gpus(Facade):
    """NVML's view of this node.  Thread-safe; every call has a deadline of `NVML_TIMEOUT_S`.

    ``helper``: the helper process, shared with a `cuda.Cuda`; by default an own one, ended by `close`.  ``lock_dir``:
    directory of the locks of `reservation`, by default `default_lock_directory`; the same one for all servers that
    restore kernels to this node's GPUs.

    All methods raise `CudaError` (NVML refused; its number is in the details), `CudaUnavailable` (no bindings although
    there is a driver), `CudaTimeout` or `HelperGone`.
    """

    def __init__(self, helper: Caller | None = None, *, lock_dir: Path | None = None) -> None:
        super().__init__(helper)
        self.lock_directory = lock_dir or default_lock_directory()
        #: Bytes of a GPU that appear free, and that kernels which share it are about to fill (`sharing.records`).
        self.claimed: Callable[[str], int] = lambda uuid: 0

    def list(self) -> list[Gpu]:
        """Return all GPUs in NVML's order, whatever ``CUDA_VISIBLE_DEVICES`` says; none without an NVIDIA driver."""
        return [Gpu(**gpu) for gpu in self._call("nvml.gpus")]

    def free(self, uuid: str) -> int:
        """Return the free bytes of one GPU."""
        return int(self._call("nvml.free", uuid=uuid))

    def processes(self, uuid: str) -> dict[int, int | None]:
        """Return used bytes by process id, for each process with a context on the GPU; ``None`` where unknown.

        The process ids are the host's: in a container with a PID namespace they differ, or are missing.  A suspended
        process is not listed: it is not on the GPU.
        """
        return _by_process(self._call("nvml.processes", uuid=uuid))

    def used_by(self, *pids: int) -> dict[str, int]:
        """Return the bytes by GPU that processes use now and need again after a suspend; ids as in `processes`."""
        found: dict[str, int] = {}
        for uuid, listed in self._call("nvml.users"):
            used = _by_process(listed)
            for pid in pids:
                if (count := used.get(pid, 0)) is None:
                    # Counted as nothing, the process would be restored without a reservation, which destroys it.
                    message = "NVML does not report how much GPU memory the process uses."
                    raise CudaError(message, pid=pid, uuids=[uuid])
                if count:
                    found[uuid] = found.get(uuid, 0) + count
        return found

    def mps_clients(self, uuid: str) -> set[int]:
        """Return the processes that use the GPU by the multi-process service (MPS); process ids as in `processes`."""
        return set(self._call("nvml.mps_clients", uuid=uuid))

    def utilisation(self, uuid: str) -> int:
        """Return the percentage of the last sampling period (up to a second) in which the GPU computed."""
        return int(self._call("nvml.utilisation", uuid=uuid))

    def process_utilisation(self, uuid: str, since: float) -> dict[int, int] | None:
        """Return the highest SM utilisation in percent by process id, of NVML's samples taken after ``since``.

        ``since`` is in seconds of `time.time`; NVML keeps samples for some seconds only.  A process that is not named
        computed less than one percent.  ``None`` where NVML has no samples (MIG, virtual GPUs, missing rights): then
        use `utilisation`.  Process ids as in `processes`.
        """
        if (samples := self._call("nvml.process_utilisation", uuid=uuid, since_us=int(since * 1e6))) is None:
            return None
        found: dict[int, int] = {}
        for pid, percent in samples:
            found[pid] = max(percent, found.get(pid, 0))
        return found

    @contextmanager
    def reservation(self, needs: Mapping[str, int], timeout_s: float) -> Iterator[None]:
        """Lock the GPUs in ``needs`` (bytes by UUID) during the body, with that much memory free on each.

        The body is `cuda.Cuda.restore`: a restore into too little memory destroys the process, and so would two
        restores that both found the same memory free.  Programs that do not use the locks can still allocate the memory
        in between; therefore the image is kept until the process runs.

        Raises `GpuFull` before the body if too little is free (``needed``, ``free`` in the details) or another restore
        has a lock for ``timeout_s`` (``locked``), `HostError` if the lock directory cannot be used.
        """
        for uuid, needed in needs.items():
            if isinstance(needed, bool) or not isinstance(needed, int):
                raise TypeError("needs must be bytes by GPU UUID")
            if needed < 0:
                raise ValueError(f"{uuid}: a need of {needed} bytes")
        with gpu_locks.locked(self.lock_directory, needs, timeout_s):
            for uuid, needed in sorted(needs.items()):
                free = max(0, self.free(uuid) - self.claimed(uuid))
                if free < needed:
                    message = f"The kernel needs {size(needed, 2)} on the GPU; {size(free, 2)} are free."
                    raise GpuFull(message, left="nothing was changed", uuid=uuid, needed=needed, free=free)
            yield

    def _call(self, op: str, **args: Any) -> Any:
        try:
            return self._helper.call(op, timeout_s=NVML_TIMEOUT_S, **args)
        except DriverRefused as refusal:
            message = f"NVML refused {op}: {refusal.name}."
            raise CudaError(message, nvml_error=refusal.number, nvml_name=refusal.name, **args) from refusal


def _by_process(listed: Iterable[tuple[int, int | None]]) -> dict[int, int | None]:
    """Return used bytes by process id; ``None`` where unknown."""
    found: dict[int, int | None] = {}
    for pid, used in listed:
        before = found.get(pid)
        # A process with a compute and a graphics context is listed twice, each time with all it uses.
        found[pid] = used if before is None else max(before, used or 0)
    return found


def gpu_mapping(
    saved: Sequence[str], node: Sequence[str], wanted: Mapping[str, str] | None = None
) -> dict[str, str] | None:
    """Return the mapping for `cuda.Cuda.restore`, or ``None`` when every GPU is mapped to itself.

    ``saved``: UUIDs of all GPUs that the driver had at the checkpoint (`Gpus.list`, not ``CUDA_VISIBLE_DEVICES``);
    ``node``: those of the node now.  ``wanted``: required pairs; other GPUs are mapped to themselves where possible,
    the rest in order.

    Every saved GPU is mapped, no two to the same: the driver refuses a partial mapping with INVALID_VALUE, and leaves
    the process unusable (measured, driver 580; the rule is in the documentation of cuda.core's ``Process.restore``).

    Raises `ValueError` where ``wanted`` names a GPU that is not in ``saved`` or ``node``, or maps two to one, or a list
    has duplicates; `CudaError` if the node has fewer GPUs than the image knows.
    """
    wanted = dict(wanted or {})
    for uuids in (saved, node, list(wanted.values())):
        if len(set(uuids)) != len(uuids):
            raise ValueError("a GPU is named twice")
    if not set(wanted) <= set(saved) or not set(wanted.values()) <= set(node):
        raise ValueError("wanted names an unknown GPU")
    if len(saved) > len(node):
        message = f"The image knows {len(saved)} GPUs; this node has {len(node)}."
        hint = "Restore it on a node with as many GPUs."
        raise CudaError(message, hint=hint, left="the image is kept", saved=len(saved), node=len(node))
    taken = set(wanted.values())
    mapping = {uuid: uuid for uuid in saved if uuid not in wanted and uuid in node and uuid not in taken} | wanted
    unused = iter([uuid for uuid in node if uuid not in mapping.values()])
    complete = {uuid: mapping[uuid] if uuid in mapping else next(unused) for uuid in saved}
    return None if all(old == new for old, new in complete.items()) else complete


def pair_of_one(number: int, used: Mapping[str, int], node: Sequence[Gpu]) -> dict[str, str]:
    """Return the pair for `gpu_mapping` by which a kernel is restored on the node's GPU of this number (`Gpu.index`).

    ``used``: its bytes by UUID.  Raises `BadRequest` where it does not use exactly one GPU, or there is none of that
    number.
    """
    before = [uuid for uuid, bytes in used.items() if bytes]
    if len(before) != 1:
        message = f"A number chooses the GPU of a kernel that uses one; this uses {len(before) or 'none'}."
        raise BadRequest(message, hint="By REST and in programs, gpu_map chooses each of several.")
    here = {gpu.index: gpu.uuid for gpu in node}
    if number not in here:
        present = ", ".join(f"GPU {each}" for each in sorted(here))
        raise BadRequest(f"There is no GPU {number} here; there are {present}.")
    return {before[0]: here[number]}
