"""The calls of NVML that `gpus.Gpus` needs, made in the helper process."""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from .. import procfs
from .checkpoint_api import Unavailable


class Nvml:
    """NVML, loaded by the first call; its errors are ``pynvml.NVMLError``, with numbers ``NVML_ERROR_*``."""

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
        return self._running(self._handle(uuid))

    def _running(self, handle: Any) -> list[tuple[int, int | None]]:
        api = self._api
        running = api.nvmlDeviceGetComputeRunningProcesses(handle) + api.nvmlDeviceGetGraphicsRunningProcesses(handle)
        if any(_is_mps_server(process.pid) for process in running):  # whose clients NVML lists for themselves
            running = [*running, *self._mps_clients(handle)]
        return [(process.pid, process.usedGpuMemory) for process in running]

    def users(self) -> list[tuple[str, list[tuple[int, int | None]]]]:
        """Return `processes` of each GPU, by UUID."""
        if not self.open():
            return []
        handles = map(self._api.nvmlDeviceGetHandleByIndex, range(self._api.nvmlDeviceGetCount()))
        return [(self._api.nvmlDeviceGetUUID(handle), self._running(handle)) for handle in handles]

    def mps_clients(self, uuid: str) -> list[int]:
        """Return the processes that use the GPU by the multi-process service; none where NVML cannot say."""
        return [process.pid for process in self._mps_clients(self._handle(uuid))]

    def _mps_clients(self, handle: Any) -> list[Any]:
        api = self._api
        try:
            return list(api.nvmlDeviceGetMPSComputeRunningProcesses(handle))
        except api.NVMLError as error:
            if error.value in (api.NVML_ERROR_NOT_SUPPORTED, api.NVML_ERROR_FUNCTION_NOT_FOUND):
                return []
            raise

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
        return any(map(_is_mps_server, pids))


def _is_mps_server(pid: int) -> bool:
    with suppress(OSError):  # it has ended
        return procfs.stat(pid).name.startswith("nvidia-cuda-mps")
    return False
