"""The calls of the driver's checkpoint functions, ``cuCheckpointProcess*``, made in the helper process.

They go through ``cuda.bindings.driver``, not ``cuda.core.checkpoint``, which reduces every error of the driver to the
text of one exception class; here an error is a number, for which `cuda.Cuda` chooses an error class.  The bindings
release the GIL in every call since 12.9.1 and 13.0.0 (their release notes); with older ones one checkpoint would block
every other request, hence `check_binding`.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Any

# 1000 * major + 10 * minor; the checkpoint functions came with 12.8.
NEEDED_DRIVER = 12080
NEEDED_SYMBOLS = (
    *(f"cuCheckpointProcess{verb}" for verb in ("Checkpoint", "GetState", "Lock", "Restore", "Unlock")),
    *("CUcheckpointGpuPair", "CUcheckpointLockArgs", "CUcheckpointRestoreArgs", "CUuuid"),
)


class DriverRefused(Exception):
    """The driver or NVML returned an error number."""

    def __init__(self, number: int, name: str) -> None:
        super().__init__(number, name)
        self.number, self.name = number, name


class Unavailable(Exception):
    """This host cannot checkpoint CUDA processes; ``reason`` is one of those that `cuda.Cuda.available` documents."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason, self.message = reason, message


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
