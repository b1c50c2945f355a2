"""Report this process's GPU memory, and free the caches of GPU libraries.

Nothing here imports a GPU library, initialises CUDA or creates a context: each would add hundreds of megabytes to a
kernel that does not use a GPU.  The driver is queried through the library that is already loaded (CUDA driver API:
``cuDeviceGetCount`` fails with NOT_INITIALIZED before ``cuInit``; ``cuDevicePrimaryCtxGetState`` creates no context).
"""

from __future__ import annotations

import ctypes
import os
import sys
import uuid
from typing import Any

#: Modules of kernels that use, or may use, a GPU.
_LIBRARIES = ("torch", "cupy", "jax", "tensorflow", "numba.cuda", "pycuda", "rmm", "cudf", "cuda.core", "cuda.bindings")


def report() -> dict[str, Any]:
    """Return the loaded GPU libraries, whether CUDA is initialised, and the devices with a context (sizes in bytes)."""
    driver = _driver()
    return {
        "modules": [name for name in _LIBRARIES if name in sys.modules],
        "initialized": initialized(),
        "devices": [_device(driver, index) for index in _active_devices(driver)],
    }


def initialized() -> bool:
    """Return whether CUDA is initialised in this process: without that it has no device memory."""
    return _driver() is not None or _torch() is not None


def trim() -> int:
    """Wait for submitted work and free the caches of PyTorch and CuPy; return the bytes freed.

    Memory in use stays.  Raises the libraries' errors, for instance a sticky CUDA error.
    """
    return _trim_torch() + _trim_cupy()


def nvml_initialized() -> bool:
    """Return whether pynvml is initialised: it has device files open that cannot be saved."""
    pynvml = sys.modules.get("pynvml")
    return bool(getattr(pynvml, "_nvmlLib_refcount", 0))


def _torch() -> Any:
    """Return ``torch.cuda`` if PyTorch is loaded and has initialised CUDA in this process, else None."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


def _trim_torch() -> int:
    if (cuda := _torch()) is None:
        return 0
    # Only devices this process has memory on: `synchronize` would create a context on the others.
    used = [index for index in range(cuda.device_count()) if cuda.memory_reserved(index)]
    before = sum(cuda.memory_reserved(index) for index in used)
    for index in used:
        cuda.synchronize(index)
    if used:
        cuda.empty_cache()
    return int(before - sum(cuda.memory_reserved(index) for index in used))


def _trim_cupy() -> int:
    cupy = sys.modules.get("cupy")
    if cupy is None or not hasattr(cupy, "get_default_memory_pool") or not (active := _active_devices(_driver())):
        return 0
    freed = 0
    pool = cupy.get_default_memory_pool()
    for index in active:  # a pool acts on the current device only
        with cupy.cuda.Device(index):
            before = pool.total_bytes()
            pool.free_all_blocks()
            freed += before - pool.total_bytes()
    cupy.get_default_pinned_memory_pool().free_all_blocks()
    return int(freed)


def _driver() -> Any:
    """Return the CUDA driver library if it is loaded and initialised in this process, else None."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return None
    return driver if driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0 else None


def _active_devices(driver: Any) -> list[int]:
    """Return the ordinals (after CUDA_VISIBLE_DEVICES) of devices with a primary context of this process."""
    if driver is None:
        return []
    count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [
        index
        for index in range(count.value)
        if driver.cuDevicePrimaryCtxGetState(index, ctypes.byref(flags), ctypes.byref(active)) == 0 and active.value
    ]


def _device(driver: Any, index: int) -> dict[str, Any]:
    name, identity = ctypes.create_string_buffer(256), (ctypes.c_ubyte * 16)()
    driver.cuDeviceGetName(name, 256, index)
    driver.cuDeviceGetUuid(ctypes.byref(identity), index)
    allocated = reserved = 0
    if (cuda := _torch()) is not None:
        allocated, reserved = int(cuda.memory_allocated(index)), int(cuda.memory_reserved(index))
    cupy = sys.modules.get("cupy")
    if cupy is not None and hasattr(cupy, "get_default_memory_pool"):
        with cupy.cuda.Device(index):
            pool = cupy.get_default_memory_pool()
            allocated, reserved = allocated + int(pool.used_bytes()), reserved + int(pool.total_bytes())
    return {
        "index": index,
        "name": name.value.decode("utf-8", "replace"),
        "uuid": f"GPU-{uuid.UUID(bytes=bytes(identity))}",
        "allocated": allocated,
        "reserved": reserved,
    }
