"""The process that calls the CUDA driver and NVML.

`client.Helper` runs it as ``python -m jupyter_gpu_ckpt.cuda.helper``.  It is a process of its own because only the end
of its process ends a hung driver call, and because a Jupyter server must not have ``/dev/nvidia*`` open; it is
long-lived because ``cuInit`` takes seconds on a big node.

Wire format, one JSON object a line.  Request: ``{"id", "op", "args"}``.  Reply: ``{"id", "value"}`` or
``{"id", "error": {"kind": "refused", "number", "name"}}`` (the driver's own number), ``{"kind": "unavailable",
"reason", "message"}`` or ``{"kind": "bug", "message"}``.  Requests run in parallel, since the checkpoint of 100 GB
takes 40 s and a query of free memory must not wait for it; the client sends those for one process one at a time.

The process ends on the end of its standard input, after the running calls (at most `DRAIN_S` later): a call cut off in
the middle would leave a kernel half suspended.

It calls ``cuda.bindings.driver``, not ``cuda.core.checkpoint``, which reduces every error of the driver to the text of
one exception class; above this file an error is a number.  The bindings release the GIL in every call since 12.9.1 and
13.0.0 (their release notes); with older ones one checkpoint would block every other request, hence `check_binding`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from .. import procfs

# 1000 * major + 10 * minor; the checkpoint functions came with 12.8.
NEEDED_DRIVER = 12080
NEEDED_SYMBOLS = (
    *(f"cuCheckpointProcess{verb}" for verb in ("Checkpoint", "GetState", "Lock", "Restore", "Unlock")),
    *("CUcheckpointGpuPair", "CUcheckpointLockArgs", "CUcheckpointRestoreArgs", "CUuuid"),
)
WORKERS = 64
DRAIN_S = 60.0


class DriverRefused(Exception):
    """The driver or NVML returned an error number."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__(number, name)
        self.number, self.name = number, name


class Unavailable(Exception):
    """This host cannot checkpoint CUDA processes; ``reason`` is one of those that `driver.Cuda.available` documents."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason, self.message = reason, message


# -- the CUDA driver --------------------------------------------------------------------------------------------------


class CudaDriver:
    """The driver's checkpoint functions, by process id; errors are `DriverRefused` with the driver's number."""

    def __init__(self) -> None:
        self._api: Any = None
        self._opening = threading.Lock()

    def open(self) -> None:
        """Load and initialise the driver, once, by one thread: bindings before 12.9.8 race in their initialisation."""
        with self._opening:
            if self._api is None:
                self._api = _load_driver()

    def state(self, pid: int) -> int:
        """Return the ``CUprocessState`` as a number."""
        return int(self._call("cuCheckpointProcessGetState", pid)[0])

    def lock(self, pid: int, timeout_ms: int) -> None:
        args = self._api.CUcheckpointLockArgs()
        args.timeoutMs = timeout_ms
        self._call("cuCheckpointProcessLock", pid, args)

    def checkpoint(self, pid: int) -> None:
        self._call("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int, pairs: Sequence[tuple[str, str]]) -> None:
        """Restore with ``pairs`` of (old, new) GPU UUIDs in NVML's spelling; none: every GPU is mapped to itself."""
        args, keep_alive = None, list[Any]()
        if pairs:
            args = self._api.CUcheckpointRestoreArgs()
            structures = [self._api.CUcheckpointGpuPair() for _ in pairs]
            for structure, (old, new) in zip(structures, pairs, strict=True):
                structure.oldUuid, structure.newUuid = self._uuid(old, keep_alive), self._uuid(new, keep_alive)
            args.gpuPairs, args.gpuPairsCount = structures, len(structures)
        self._call("cuCheckpointProcessRestore", pid, args)

    def unlock(self, pid: int) -> None:
        self._call("cuCheckpointProcessUnlock", pid, None)

    def _uuid(self, text: str, keep_alive: list[Any]) -> Any:
        raw = ctypes.create_string_buffer(bytes.fromhex(text.removeprefix("GPU-").replace("-", "")), 16)
        keep_alive.append(raw)
        return self._api.CUuuid(ctypes.addressof(raw))

    def _call(self, name: str, *args: Any) -> tuple[Any, ...]:
        try:
            return _checked(getattr(self._api, name)(*args))
        except RuntimeError as error:
            # The bindings look a function up at its first call; `open` has loaded libcuda itself.
            raise Unavailable("driver-too-old", f"The NVIDIA driver has no {name}.") from error


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    if int(result[0]) != 0:
        raise DriverRefused(int(result[0]), str(result[0].name))
    return result[1:]


def _load_driver() -> Any:
    try:
        bindings = importlib.import_module("cuda.bindings")
        api = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise Unavailable("binding-missing", "The Python package cuda-bindings is not installed.") from error
    check_binding(str(bindings.__version__), dir(api))
    try:
        (version,) = _checked(api.cuDriverGetVersion())
    except RuntimeError as error:
        raise Unavailable("driver-missing", "This host has no NVIDIA driver (no libcuda).") from error
    if version < NEEDED_DRIVER:
        found = f"{version // 1000}.{version % 1000 // 10}"
        raise Unavailable("driver-too-old", f"The NVIDIA driver supports CUDA {found}; checkpoints need 12.8.")
    try:
        # `restore` needs this, or persistence mode (CUDA Driver API, cuCheckpointProcessRestore).
        _checked(api.cuInit(0))
    except DriverRefused as refusal:
        raise Unavailable("driver-refuses", f"The NVIDIA driver cannot be initialised: {refusal.name}.") from refusal
    return api


def check_binding(version: str, symbols: Iterable[str]) -> None:
    """Raise `Unavailable` unless this version of ``cuda-bindings`` has what is needed.

    The symbols are checked, too, because some 12.9 releases lacked ``CUcheckpointRestoreArgs`` (notes of 12.9.8).
    """
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    floor = (12, 9, 1) if numbers < (13,) else (13, 0, 2)
    if numbers < floor:
        needed = ".".join(map(str, floor))
        raise Unavailable("binding-too-old", f"cuda-bindings {version} is too old; {needed} is needed.")
    if missing := sorted(set(NEEDED_SYMBOLS) - set(symbols)):
        raise Unavailable("symbol-missing", f"cuda-bindings {version} lacks {', '.join(missing)}.")


# -- NVML -------------------------------------------------------------------------------------------------------------


class Nvml:
    """The calls of NVML that `gpus.Gpus` needs; error numbers are ``NVML_ERROR_*``."""

    def __init__(self) -> None:
        self._api: Any = None
        self._opening = threading.Lock()

    def open(self) -> bool:
        """Load and initialise NVML; return False when this host has no NVIDIA driver yet."""
        with self._opening:
            if self._api is not None:
                return True
            try:
                api = importlib.import_module("pynvml")
            except ImportError as error:
                if not Path("/proc/driver/nvidia").exists():
                    return False
                raise Unavailable("nvml-missing", "The Python package nvidia-ml-py is not installed.") from error
            try:
                api.nvmlInit()
            except api.NVMLError as error:
                if error.value in (api.NVML_ERROR_LIBRARY_NOT_FOUND, api.NVML_ERROR_DRIVER_NOT_LOADED):
                    return False
                raise
            self._api = api
            return True

    def gpus(self) -> list[dict[str, Any]]:
        if not self.open():
            return []
        api = self._api
        driver, known = api.nvmlSystemGetDriverVersion(), api.nvmlSystemGetCudaDriverVersion()
        cuda = f"{known // 1000}.{known % 1000 // 10}"
        found = []
        for index in range(api.nvmlDeviceGetCount()):
            handle = api.nvmlDeviceGetHandleByIndex(index)
            memory = api.nvmlDeviceGetMemoryInfo(handle)
            gpu = {"index": index, "uuid": api.nvmlDeviceGetUUID(handle), "name": api.nvmlDeviceGetName(handle)}
            gpu |= {"total": memory.total, "free": memory.free, "used": memory.used, "driver": driver, "cuda": cuda}
            found.append(gpu | {"mig": self._mig(handle), "mps": self._mps(handle)})
        return found

    def free(self, uuid: str) -> int:
        handle = self._handle(uuid)  # first, here and below: it loads NVML
        return int(self._api.nvmlDeviceGetMemoryInfo(handle).free)

    def processes(self, uuid: str) -> list[tuple[int, int | None]]:
        handle, api = self._handle(uuid), self._api
        running = api.nvmlDeviceGetComputeRunningProcesses(handle) + api.nvmlDeviceGetGraphicsRunningProcesses(handle)
        return [(process.pid, process.usedGpuMemory) for process in running]

    def utilisation(self, uuid: str) -> int:
        handle = self._handle(uuid)
        return int(self._api.nvmlDeviceGetUtilizationRates(handle).gpu)

    def process_utilisation(self, uuid: str, since_us: int) -> list[tuple[int, int]] | None:
        handle, api = self._handle(uuid), self._api
        try:
            samples = api.nvmlDeviceGetProcessUtilization(handle, since_us)
        except api.NVMLError as error:
            if error.value == api.NVML_ERROR_NOT_FOUND:
                return []  # no process computed since then
            if error.value in (api.NVML_ERROR_NOT_SUPPORTED, api.NVML_ERROR_NO_PERMISSION):
                return None
            raise
        # NVML does not define the entries that it did not fill.
        return [(sample.pid, sample.smUtil) for sample in samples if sample.timeStamp > since_us]

    def _handle(self, uuid: str) -> Any:
        if not self.open():
            raise Unavailable("driver-missing", "This host has no NVIDIA driver.")
        return self._api.nvmlDeviceGetHandleByUUID(uuid)

    def _mig(self, handle: Any) -> bool:
        api = self._api
        try:
            current, _pending = api.nvmlDeviceGetMigMode(handle)
        except api.NVMLError as error:
            if error.value == api.NVML_ERROR_NOT_SUPPORTED:
                return False
            raise
        return bool(current == api.NVML_DEVICE_MIG_ENABLE)

    def _mps(self, handle: Any) -> bool | None:
        """Return whether an MPS server or client uses the GPU now; an idle MPS daemon cannot be detected."""
        api = self._api
        try:
            if api.nvmlDeviceGetMPSComputeRunningProcesses(handle):
                return True
            pids = [process.pid for process in api.nvmlDeviceGetComputeRunningProcesses(handle)]
        except api.NVMLError as error:
            if error.value in (api.NVML_ERROR_NOT_SUPPORTED, api.NVML_ERROR_FUNCTION_NOT_FOUND):
                return None
            raise
        for pid in pids:
            with suppress(OSError):  # it has ended
                if procfs.stat(pid).name.startswith("nvidia-cuda-mps"):
                    return True
        return False


# -- the loop ---------------------------------------------------------------------------------------------------------

Operation = Callable[..., Any]


def _outcome(operations: Mapping[str, Operation], request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"value": operations[request["op"]](**request["args"])}
    except DriverRefused as refusal:
        return {"error": {"kind": "refused", "number": refusal.number, "name": refusal.name}}
    except Unavailable as error:
        return {"error": {"kind": "unavailable", "reason": error.reason, "message": error.message}}
    except Exception as error:
        nvml = sys.modules.get("pynvml")
        if nvml is not None and isinstance(error, nvml.NVMLError):
            return {"error": {"kind": "refused", "number": int(error.value), "name": type(error).__name__}}
        return {"error": {"kind": "bug", "message": traceback.format_exc(limit=-3)}}


def serve(requests: Iterable[str], replies: TextIO, operations: Mapping[str, Operation]) -> bool:
    """Run requests in parallel until they end; return False when a call was still running `DRAIN_S` after that."""
    writing, pool, running = threading.Lock(), ThreadPoolExecutor(WORKERS), set[Future[None]]()

    def answer(request: dict[str, Any]) -> None:
        line = json.dumps({"id": request["id"], **_outcome(operations, request)}) + "\n"
        with writing, suppress(OSError):  # no reader any more: the end of standard input follows
            replies.write(line)
            replies.flush()

    for line in requests:
        future = pool.submit(answer, json.loads(line))
        running.add(future)
        future.add_done_callback(running.discard)
    return not wait(list(running), DRAIN_S).not_done


def real_operations() -> dict[str, Operation]:
    cuda, nvml = CudaDriver(), Nvml()
    return {
        "cuda.open": cuda.open,
        "cuda.state": cuda.state,
        "cuda.lock": cuda.lock,
        "cuda.checkpoint": cuda.checkpoint,
        "cuda.restore": cuda.restore,
        "cuda.unlock": cuda.unlock,
        "nvml.open": nvml.open,
        "nvml.gpus": nvml.gpus,
        "nvml.free": nvml.free,
        "nvml.processes": nvml.processes,
        "nvml.utilisation": nvml.utilisation,
        "nvml.process_utilisation": nvml.process_utilisation,
    }


def run(operations: Mapping[str, Operation]) -> None:
    """Serve standard input on standard output, then end the process."""
    # Both may be sent to all processes of the server's job; this one is ended by the end of its input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Libraries that print must not print into the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    drained = serve(sys.stdin, replies, operations)
    # Not sys.exit(): it would wait for the pool's threads, one of which may hang in the driver.
    os._exit(0 if drained else 1)


if __name__ == "__main__":
    run(real_operations())
