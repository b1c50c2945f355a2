"""Time the driver takes to allocate and to free: ``python scripts/bench/driver_calls.py``, needs a GPU.

``cuMemAlloc`` and ``cuMemFree``, beside the calls by which the fast path serves them (`cuda/native/allocations.c`):
memory of the kinds that can be asked for, since a kind may cost more (exported for CUDA IPC, reached by RDMA).  Prints
medians, in microseconds, for some sizes; there is no limit.  Not a part of ``make bench``: it measures the driver.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable

SIZES_MIB = (2, 20, 96, 768)
ROUNDS = 200
#: `CUmemAllocationProp`, 32 bytes: type, handle types, location (type, id), a pointer, flags of 8 bytes.
PINNED = DEVICE = DESCRIPTOR = 1
READ_WRITE = 3
KINDS = {
    "plain": (0, 0),
    "for IPC": (DESCRIPTOR, 0),
    "for RDMA": (0, 1),
    "for IPC and RDMA": (DESCRIPTOR, 1),
}


class Properties(ctypes.Structure):
    """``CUmemAllocationProp`` of cuda.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("device", ctypes.c_int),
        ("handle_data", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class Access(ctypes.Structure):
    """``CUmemAccessDesc`` of cuda.h."""

    _fields_ = (("location_type", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


Took = dict[str, list[float]]


class Driver:
    """The driver's functions, with a context on the first GPU.  Raises `OSError` without a driver or a GPU."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        if result := getattr(self._library, name)(*arguments):
            raise OSError(f"{name}: error {result}")

    def timed(self, took: Took, name: str, *arguments: object) -> None:
        began = time.perf_counter()
        self.call(name, *arguments)
        took.setdefault(name, []).append((time.perf_counter() - began) * 1e6)


def by_cu_mem_alloc(driver: Driver, size: int, took: Took) -> None:
    address = ctypes.c_uint64()
    driver.timed(took, "cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    driver.timed(took, "cuMemFree_v2", address)


def by_virtual_memory(handle_types: int, rdma: int) -> Callable[[Driver, int, Took], None]:
    """Return the calls of a served allocation of that kind, and of its end."""
    kind = Properties(PINNED, handle_types, DEVICE, 0, rdma=rdma)
    access = Access(DEVICE, 0, READ_WRITE)

    def work(driver: Driver, size: int, took: Took) -> None:
        address, handle, bytes_ = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t(size)
        zero = ctypes.c_uint64(0)
        driver.timed(took, "cuMemAddressReserve", ctypes.byref(address), bytes_, zero, zero, zero)
        driver.timed(took, "cuMemCreate", ctypes.byref(handle), bytes_, ctypes.byref(kind), zero)
        driver.timed(took, "cuMemMap", address, bytes_, zero, handle, zero)
        driver.timed(took, "cuMemSetAccess", address, bytes_, ctypes.byref(access), ctypes.c_size_t(1))
        driver.timed(took, "cuMemUnmap", address, bytes_)
        driver.timed(took, "cuMemRelease", handle)
        driver.timed(took, "cuMemAddressFree", address, bytes_)

    return work


def main() -> int:
    try:
        driver = Driver()
    except OSError as error:
        print(f"there is no GPU here: {error}")
        return 0
    ways = {"cuMemAlloc": by_cu_mem_alloc}
    ways |= {f"virtual memory, {name}": by_virtual_memory(*kind) for name, kind in KINDS.items()}
    for mebibytes in SIZES_MIB:
        found: dict[str, Took] = {name: {} for name in ways}
        for _ in range(ROUNDS):  # in turns, so that all meet what else the machine does
            for name, way in ways.items():
                way(driver, mebibytes << 20, found[name])
        for name, took in found.items():
            each = {call: statistics.median(values) for call, values in took.items()}
            steps = "  ".join(f"{call} {median:.1f}" for call, median in each.items())
            print(f"{mebibytes:3} MiB  {name:34} {sum(each.values()):8.1f} us  ({steps})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
