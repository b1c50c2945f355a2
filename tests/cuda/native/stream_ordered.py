"""A program that allocates in the order of streams, by what it reads: an expression a line, answered by its value."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading

from virtual_memory import GRAIN, Address, Location, Size, context, cu, outstanding

Pool = ctypes.c_void_p
Stream = ctypes.c_void_p
#: CU_MEMPOOL_ATTR_...: the release threshold, and reserved and used bytes, now and at the most.
THRESHOLD, RESERVED, RESERVED_HIGH, USED, USED_HIGH = range(4, 9)
LEGACY, PER_THREAD = 1, 2


class Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("attributes", ctypes.c_void_p),
        ("most", Size),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    )


streams: dict[str, Stream] = {"null": Stream(0), "legacy": Stream(LEGACY), "thread": Stream(PER_THREAD)}
pools: dict[str, Pool] = {}
memory: dict[str, int] = {}
sizes: dict[str, int] = {}


def stream(name: str) -> int:
    streams[name] = Stream()
    return cu.cuStreamCreate(ctypes.byref(streams[name]), 1)


def end_stream(name: str) -> int:
    return cu.cuStreamDestroy_v2(streams[name])


def standard(device: int = 0) -> int:
    pools["standard"] = Pool()
    return cu.cuDeviceGetDefaultMemPool(ctypes.byref(pools["standard"]), device)


def pool(name: str, device: int = 0, *, exportable: bool = False) -> int:
    pools[name] = Pool()
    wanted = Properties(1, int(exportable), Location(1, device))
    return cu.cuMemPoolCreate(ctypes.byref(pools[name]), ctypes.byref(wanted))


def end_pool(name: str) -> int:
    return cu.cuMemPoolDestroy(pools[name])


def choose(name: str, device: int = 0) -> int:
    return cu.cuDeviceSetMemPool(device, pools[name])


def attribute(name: str, which: int) -> int:
    value = ctypes.c_ulonglong()
    assert cu.cuMemPoolGetAttribute(pools[name], which, ctypes.byref(value)) == 0
    return value.value


def amounts(name: str) -> list[float]:
    """Reserved and used bytes, now and at the most, in GRAINs."""
    return [attribute(name, which) / GRAIN for which in (RESERVED, RESERVED_HIGH, USED, USED_HIGH)]


def set_attribute(name: str, which: int, value: int) -> int:
    return cu.cuMemPoolSetAttribute(pools[name], which, ctypes.byref(ctypes.c_ulonglong(value)))


def trim(name: str, grains: int = 0) -> int:
    return cu.cuMemPoolTrimTo(pools[name], Size(grains * GRAIN))


def alloc(name: str, grains: float, where: str, which: str | None = None, *, per_thread: bool = False) -> int:
    address, size = Address(), int(grains * GRAIN)
    ending = "_ptsz" if per_thread else ""
    if which is None:
        result = cu[f"cuMemAllocAsync{ending}"](ctypes.byref(address), Size(size), streams[where])
    else:
        function = cu[f"cuMemAllocFromPoolAsync{ending}"]
        result = function(ctypes.byref(address), Size(size), pools[which], streams[where])
    memory[name], sizes[name] = address.value, size
    return result


def free(name: str, where: str | None = None, *, per_thread: bool = False) -> int:
    """Free in a stream's order, or without one, at once."""
    if where is None:
        return cu.cuMemFree_v2(Address(memory[name]))
    return cu["cuMemFreeAsync_ptsz" if per_thread else "cuMemFreeAsync"](Address(memory[name]), streams[where])


def plain(name: str, grains: float) -> int:
    """Allocate in no stream's order."""
    address, size = Address(), int(grains * GRAIN)
    result = cu.cuMemAlloc_v2(ctypes.byref(address), Size(size))
    memory[name], sizes[name] = address.value, size
    return result


def launch(where: str, name: str, byte: int, milliseconds: int = 0) -> int:
    """Let the GPU fill it with a byte, after some time."""
    function = cu.double_launch_on
    return function(streams[where], Address(memory[name]), Size(sizes[name]), byte, ctypes.c_uint(milliseconds * 1000))


def synchronize(where: str) -> int:
    return cu.cuStreamSynchronize(streams[where])


def wait() -> int:
    return cu.cuCtxSynchronize()


def holds(name: str) -> int | None:
    content = ctypes.string_at(memory[name], sizes[name])
    return content[0] if content == content[:1] * len(content) else None


def same(one: str, other: str) -> bool:
    return memory[one] == memory[other]


def describe(name: str, offset: int = 0) -> list[object]:
    base, size, address = Address(), Size(), Address(memory[name] + offset)
    facts: list[object] = [cu.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)]
    facts += [base.value - memory[name] if facts[0] == 0 else None, size.value]
    for which in (1, 2, 8, 9, 12, 17):
        value = ctypes.c_ulonglong()
        result = cu.cuPointerGetAttribute(ctypes.byref(value), which, address)
        known = [key for key, found in pools.items() if which == 17 and found.value == value.value]
        facts += [result, known or value.value]
    facts.append(cu.cuIpcGetMemHandle(ctypes.byref((ctypes.c_char * 64)()), address))
    return facts


def begin_capture(where: str) -> int:
    return cu.cuStreamBeginCapture_v2(streams[where], 0)


def end_capture(where: str) -> int:
    return cu.cuStreamEndCapture(streams[where], ctypes.byref(ctypes.c_void_p()))


def free_bytes() -> int:
    free, total = Size(), Size()
    assert cu.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value


def new_context(device: int = 0) -> int:
    fresh = ctypes.c_ulonglong()
    result = cu.cuCtxCreate_v2(ctypes.byref(fresh), 0, device)
    memory["context"] = fresh.value
    return result


def end_context() -> int:
    result = cu.cuCtxDestroy_v2(Address(memory["context"]))
    assert cu.cuCtxSetCurrent(context) == 0
    return result


def set_total(size: int) -> None:
    cu.double_set_bytes(Size(size))


done: list[object] = []
signal.signal(signal.SIGINT, lambda *_: None)
signal.siginterrupt(signal.SIGINT, True)


def begin(expression: str) -> None:
    """Evaluate it in a thread of its own, which adds the value to ``done``."""

    def run() -> None:
        assert cu.cuCtxSetCurrent(context) == 0
        done.append(eval(expression))

    threads.append(threading.Thread(target=run))
    threads[-1].start()


threads: list[threading.Thread] = []


def interrupt() -> None:
    signal.pthread_kill(threads[-1].ident, signal.SIGINT)


def waits_for_work() -> list[int]:
    """Count the driver's calls that look whether work is done, by their names."""
    names = (b"cuEventQuery", b"cuEventSynchronize", b"cuCtxSynchronize", b"cuStreamIsCapturing")
    return [cu.double_calls(name) for name in names]


def mapped() -> int:
    """Count of mappings on the device: what the library serves, used or not."""
    return outstanding()[3]


def events() -> int:
    """Count of the events that exist."""
    counts = (Size * 8)()
    cu.double_outstanding(counts)
    return counts[6]


if __name__ == "__main__":
    for line in sys.stdin:
        print(repr(eval(line)), flush=True)
