"""A CUDA driver in memory: the real facades on top of it, the driver's measured behaviour below.

`FakeDriver` replaces the helper process and returns the driver's own numbers, so that `FakeCuda` and `FakeGpus` are the
real `cuda.Cuda` and `gpus.Gpus` except for what they read from /proc.  The contract suite in
``tests/cuda/test_cuda_contract.py`` compares it with the real driver, also in two calls that destroy a process: a
restore into too little memory, and one with a mapping that omits a GPU.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..cuda import cuda as real
from ..cuda.checkpoint_api import DriverRefused
from ..cuda.cuda import Cuda
from ..cuda.gpus import Gpus
from ..cuda.helper_client import Caller
from ..errors import CudaError, DriverTooOld, HelperGone

RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)
OPERATING_SYSTEM = 304
NVML_NOT_FOUND = 6

_NAMES = {
    real.INVALID_VALUE: "CUDA_ERROR_INVALID_VALUE",
    real.OUT_OF_MEMORY: "CUDA_ERROR_OUT_OF_MEMORY",
    real.NOT_INITIALIZED: "CUDA_ERROR_NOT_INITIALIZED",
    OPERATING_SYSTEM: "CUDA_ERROR_OPERATING_SYSTEM",
    real.ILLEGAL_STATE: "CUDA_ERROR_ILLEGAL_STATE",
    real.NOT_READY: "CUDA_ERROR_NOT_READY",
    real.NOT_SUPPORTED: "CUDA_ERROR_NOT_SUPPORTED",
    real.UNKNOWN: "CUDA_ERROR_UNKNOWN",
}


@dataclass
class FakeProcess:
    """One process.  ``memory``: bytes by GPU (empty and ``cuda`` false: it has not used CUDA).  ``moved``: how many of
    them, if they are of one GPU, the process has moved to host memory itself, by its library.

    ``mps``: it uses its GPUs by the multi-process service.  ``profiled``: a profiler was used in it.  ``nccl``: it
    communicates by NCCL.  ``device_files``: what it has open of a GPU without CUDA state, ``inherited`` or of its own;
    ``parent``: from whom, if not from any that has them.
    ``closed``: how often the driver has closed its device files, which a process that inherits them does not notice.

    ``beginning``: it has loaded the driver and opened device files, and has no CUDA state yet.

    ``busy``: GPU work that does not end, so that a lock times out.  ``unsupported``: memory of a kind the driver cannot
    save, which the driver says only once (``refused_before``).  ``ruined``: its restore failed, after which the driver
    cannot restore it.  ``computing``: the percentage of its GPUs that it uses.  ``queries``: a thread of it asks again
    and again whether a stream has done its work, which does not wait at the driver's lock: suspended, it ends by that.
    """

    memory: dict[str, int] = field(default_factory=dict)
    moved: int = 0
    cuda: bool = True
    beginning: bool = False
    nvml: bool = False
    busy: bool = False
    unsupported: bool = False
    mps: bool = False
    profiled: bool = False
    nccl: bool = False
    device_files: set[str] = field(default_factory=set)
    inherited: bool = False
    parent: FakeProcess | None = None
    closed: int = 0
    ruined: bool = False
    refused_before: bool = False
    computing: int = 0
    queries: bool = False
    state: int = RUNNING

    @property
    def on_gpu(self) -> bool:
        return self.cuda and not self.beginning and self.state in (RUNNING, LOCKED)

    @property
    def there(self) -> dict[str, int]:
        """The bytes by GPU that are the driver's now, or that it restores."""
        return {uuid: bytes - self.moved for uuid, bytes in self.memory.items()}


class FakeDriver:
    """GPUs and the processes on them; called as a `helper_client.Helper`.

    Parameters
    ----------
    gpus:
        Total bytes by UUID, in NVML's order.

    ``calls`` lists the operations and their processes; ``crash_in`` names operations during which the helper ends
    (each once, before anything is done); ``refuse`` gives the number with which an operation is refused, until removed.
    ``too_old``: it has no functions that suspend processes.
    ``mig``: GPUs in multi-instance mode, whose processes are refused.
    ``hides_processes``: NVML does not say which processes compute, as with MIG.
    """

    def __init__(self, gpus: Mapping[str, int]) -> None:
        self.gpus = dict(gpus)
        self.processes: dict[int, FakeProcess] = {}
        self.calls: list[tuple[str, int | None]] = []
        self.crash_in: set[str] = set()
        self.refuse: dict[str, int] = {}
        self.hides_processes = False
        self.too_old = False
        self.mig: set[str] = set()
        self._pids = itertools.count(1000)
        self._guard = threading.Lock()

    # -- processes --

    def start(
        self, memory: Mapping[str, int] | None = None, *, pid: int | None = None, computing: int = 0, **traits: Any
    ) -> int:
        """Start a process with this much memory on these GPUs (none: one without CUDA); return its id."""
        process = FakeProcess(dict(memory or {}), cuda=memory is not None, computing=computing, **traits)
        return self.add(process, pid)

    def remove(self, pid: int) -> FakeProcess:
        """Remove the process, as a dump or its end does."""
        return self.processes.pop(pid)

    def add(self, process: FakeProcess, pid: int | None = None) -> int:
        """Add a process, as a restore from an image does; return its id."""
        pid = next(self._pids) if pid is None else pid
        self.processes[pid] = process
        return pid

    def free(self, uuid: str) -> int:
        """Free bytes on one GPU."""
        return max(0, self.gpus[uuid] - sum(p.there.get(uuid, 0) for p in self.processes.values() if p.on_gpu))

    # -- as helper_client.Helper --

    def call(self, op: str, *, lane: int | None = None, timeout_s: float, **args: Any) -> Any:
        """Run an operation as the helper process does, under one lock, so that threads see whole operations."""
        with self._guard:
            self.calls.append((op, lane))
            if self.too_old and op.startswith("cuda."):
                message = "The NVIDIA driver supports CUDA 12.4; checkpoints need 12.8."
                raise DriverTooOld(message, reason="driver-too-old")
            if op in self.crash_in:
                self.crash_in.remove(op)
                raise HelperGone(f"The CUDA helper ended during {op}.", op=op, pid=lane)
            if op in self.refuse:
                raise _refused(self.refuse[op])
            return self._operations()[op](**args)

    def _operations(self) -> dict[str, Callable[..., Any]]:
        return {
            "cuda.open": self._cuda_open,
            "cuda.state": self._cuda_state,
            "cuda.lock": self._cuda_lock,
            "cuda.checkpoint": self._cuda_checkpoint,
            "cuda.restore": self._cuda_restore,
            "cuda.unlock": self._cuda_unlock,
            "nvml.open": self._nvml_open,
            "nvml.gpus": self._nvml_gpus,
            "nvml.free": self._nvml_free,
            "nvml.processes": self._nvml_processes,
            "nvml.users": self._nvml_users,
            "nvml.mps_clients": self._nvml_mps_clients,
            "nvml.utilisation": self._nvml_utilisation,
            "nvml.process_utilisation": self._nvml_process_utilisation,
        }

    def another(self) -> FakeDriver:
        return self

    def close(self) -> None:
        """Do nothing: there is no process to end."""

    # -- the driver --

    def _cuda_open(self) -> None:
        pass

    def _cuda_state(self, pid: int) -> int:
        return self._process(pid).state

    def _cuda_lock(self, pid: int, timeout_ms: int) -> None:
        process = self._in_state(pid, RUNNING)
        if process.mps or process.profiled or self.mig & set(process.memory):
            raise _refused(real.NOT_SUPPORTED)
        if process.busy:
            raise _refused(real.NOT_READY)
        process.state = LOCKED

    def _cuda_checkpoint(self, pid: int) -> None:
        process = self._in_state(pid, LOCKED)
        if process.unsupported:
            again, process.refused_before = process.refused_before, True
            raise _refused(real.UNKNOWN if again else real.NOT_SUPPORTED)
        process.state = CHECKPOINTED
        process.closed += 1
        if process.queries:
            self.remove(pid)

    def _cuda_restore(self, pid: int, pairs: list[tuple[str, str]]) -> None:
        process = self._process(pid)
        if process.ruined:
            raise _refused(OPERATING_SYSTEM)
        process = self._in_state(pid, CHECKPOINTED)
        mapping = dict(pairs) or {uuid: uuid for uuid in process.memory}
        covers_all = not pairs or len(mapping) >= len(self.gpus)
        if not covers_all or not set(mapping.values()) <= set(self.gpus) or not set(process.memory) <= set(mapping):
            process.ruined = True
            raise _refused(real.INVALID_VALUE)
        moved = {mapping[uuid]: count for uuid, count in process.memory.items()}
        if any(self.free(mapping[uuid]) < count for uuid, count in process.there.items()):
            process.ruined = True
            raise _refused(real.OUT_OF_MEMORY)
        process.memory, process.state = moved, LOCKED

    def _cuda_unlock(self, pid: int) -> None:
        self._in_state(pid, LOCKED).state = RUNNING

    def _process(self, pid: int) -> FakeProcess:
        process = self.processes[pid]
        if not process.cuda or process.beginning:
            raise _refused(real.NOT_INITIALIZED)
        return process

    def _in_state(self, pid: int, state: int) -> FakeProcess:
        process = self._process(pid)
        if process.state != state:
            raise _refused(real.ILLEGAL_STATE)
        return process

    # -- NVML --

    def _nvml_open(self) -> bool:
        return True

    def _nvml_gpus(self) -> list[dict[str, Any]]:
        def gpu(index: int, uuid: str, total: int) -> dict[str, Any]:
            free = self.free(uuid)
            found = {"index": index, "uuid": uuid, "name": "Fake GPU", "total": total, "free": free}
            mig, mps = uuid in self.mig, bool(self._nvml_mps_clients(uuid))
            return found | {"used": total - free, "mig": mig, "mps": mps, "driver": "580.0"}

        return [gpu(index, uuid, total) for index, (uuid, total) in enumerate(self.gpus.items())]

    def _nvml_free(self, uuid: str) -> int:
        self._known(uuid)
        return self.free(uuid)

    def _nvml_processes(self, uuid: str) -> list[tuple[int, int | None]]:
        self._known(uuid)
        return [(pid, p.there[uuid]) for pid, p in self.processes.items() if p.on_gpu and uuid in p.memory]

    def _nvml_users(self) -> list[tuple[str, list[tuple[int, int | None]]]]:
        return [(uuid, self._nvml_processes(uuid)) for uuid in self.gpus]

    def _nvml_mps_clients(self, uuid: str) -> list[int]:
        self._known(uuid)
        return [pid for pid, p in self.processes.items() if p.mps and p.on_gpu and uuid in p.memory]

    def _nvml_utilisation(self, uuid: str) -> int:
        return min(100, sum(percent for _, percent in self._computing(uuid)))

    def _nvml_process_utilisation(self, uuid: str, since_us: int) -> list[tuple[int, int]] | None:
        return None if self.hides_processes else self._computing(uuid)

    def _computing(self, uuid: str) -> list[tuple[int, int]]:
        self._known(uuid)
        on_it = [(pid, p) for pid, p in self.processes.items() if p.on_gpu and uuid in p.memory]
        return [(pid, p.computing) for pid, p in on_it if p.computing]

    def _known(self, uuid: str) -> None:
        if uuid not in self.gpus:
            raise DriverRefused(NVML_NOT_FOUND, "NVMLError_NotFound")


class FakeCuda(Cuda):
    """`cuda.Cuda` over a `FakeDriver`; ``helper``: its caller, if the driver is not called directly."""

    def __init__(self, driver: FakeDriver, helper: Caller | None = None) -> None:
        super().__init__(helper or driver)
        self.driver = driver

    def device_files(self, pid: int) -> list[str]:
        self._read(pid, "status")
        process = self.driver.processes[pid]
        opened = process.nvml or process.beginning or process.on_gpu
        files = {"/dev/nvidiactl", "/dev/nvidia0"} if opened else process.device_files
        return sorted(files | ({"/dev/nvidia-uvm"} if process.on_gpu else set()))

    def has_inherited_all(self, pid: int, owners: Iterable[int]) -> bool:
        self._read(pid, "status")
        process, owners = self.driver.processes[pid], [*owners]

        def has_same(owner: FakeProcess) -> bool:
            if process.parent not in (None, owner, owner.parent):
                return False
            also_inherited = owner.inherited and owner.device_files >= process.device_files
            return owner.closed == process.closed and (owner.on_gpu or also_inherited)

        living = [self.driver.processes[owner] for owner in owners if owner in self.driver.processes]
        return pid in owners or (process.inherited and any(map(has_same, living)))

    def communicates_by_nccl(self, pid: int) -> bool:
        self._read(pid, "status")
        return self.driver.processes[pid].nccl

    def _started(self, pid: int) -> int:
        return id(self._process(pid))

    def _process(self, pid: int) -> FakeProcess:
        process = self.driver.processes.get(pid)
        if process is None:
            raise CudaError(f"There is no process {pid}.", pid=pid)
        return process

    def _read(self, pid: int, name: str) -> str:
        real.check_pid(pid)
        process = self._process(pid)
        libraries = {"/usr/lib/libcuda.so.1": process.cuda, "/usr/lib/libcupti.so.13": process.profiled}
        libraries |= {"/usr/lib/libnccl.so.2": process.nccl}
        return "".join(f"{path}\n" for path, loaded in libraries.items() if loaded and name == "maps")


class FakeGpus(Gpus):
    """`gpus.Gpus` over a `FakeDriver`; the locks are real files in ``lock_dir``."""

    def __init__(self, driver: FakeDriver, lock_dir: Path | None = None, helper: Caller | None = None) -> None:
        super().__init__(helper or driver, lock_dir=lock_dir)
        self.driver = driver


def _refused(number: int) -> DriverRefused:
    return DriverRefused(number, _NAMES.get(number, f"CUDA_ERROR_{number}"))
