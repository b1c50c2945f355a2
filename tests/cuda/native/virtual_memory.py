"""A program that maps device memory itself, by what it reads: an expression a line, answered by its value.

Run as ``python virtual_memory.py``; memory and address ranges have names.  The double's device memory can be read by
ctypes.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

MIB = 1 << 20
GRAIN = 2 * MIB
DEVICE, HOST = 1, 2
NONE, READ, WRITE = 0, 1, 3
DESCRIPTOR = 1
MULTICAST = 77  #: the handle of the double's multicast object

Handle = ctypes.c_ulonglong
Address = ctypes.c_ulonglong
Size = ctypes.c_size_t


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("metadata", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class ArrayMap(ctypes.Structure):
    _fields_ = (("before", ctypes.c_ubyte * 64), ("handle", Handle), ("after", ctypes.c_ubyte * 24))


cu = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_ulonglong()
assert cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == cu.cuCtxSetCurrent(context) == 0
stream = ctypes.c_void_p()
handles: dict[str, int] = {}
places: dict[str, int] = {}
results: list[int] = []  #: of calls in other threads
sizes: dict[str, int] = {}


def reserve(place: str, grains: int) -> int:
    address = Address()
    result = cu.cuMemAddressReserve(ctypes.byref(address), Size(grains * GRAIN), Size(GRAIN), Address(0), Address(0))
    places[place] = address.value
    return result


def free_address(place: str, grains: int) -> int:
    return cu.cuMemAddressFree(Address(places[place]), Size(grains * GRAIN))


def create(
    name: str, grains: int = 1, device: int = 0, *, location: int = DEVICE, exportable: bool = False, **rest
) -> int:
    handle = Handle()
    wanted = Properties(1, DESCRIPTOR if exportable else 0, Location(location, device), **rest)
    result = cu.cuMemCreate(ctypes.byref(handle), Size(grains * GRAIN), ctypes.byref(wanted), Address(0))
    handles[name], sizes[name] = handle.value, grains * GRAIN
    return result


def release(name: str) -> int:
    return cu.cuMemRelease(Handle(handles[name]))


def at(place: str, grain: int = 0) -> Address:
    return Address(places[place] + grain * GRAIN)


def map(place: str, name: str, grain: int = 0, *, offset: int = 0, grains: int | None = None) -> int:
    size = sizes[name] if grains is None else grains * GRAIN
    return cu.cuMemMap(at(place, grain), Size(size), Size(offset * GRAIN), Handle(handles[name]), Address(0))


def unmap(place: str, grain: int = 0, grains: int = 1) -> int:
    return cu.cuMemUnmap(at(place, grain), Size(grains * GRAIN))


def access(
    place: str, grain: int = 0, grains: int = 1, flags: int = WRITE, *devices: int, location: int = DEVICE
) -> int:
    wanted = [Access(Location(location, device), flags) for device in devices or (0,)]
    return cu.cuMemSetAccess(at(place, grain), Size(grains * GRAIN), (Access * len(wanted))(*wanted), Size(len(wanted)))


def access_of(place: str, grain: int = 0, device: int = 0) -> tuple[int, int]:
    flags = ctypes.c_ulonglong(99)
    return cu.cuMemGetAccess(ctypes.byref(flags), ctypes.byref(Location(DEVICE, device)), at(place, grain)), flags.value


def retain(name: str, place: str, grain: int = 0) -> tuple[int, list[str]]:
    """Retain by an address inside; the result, and the names whose handle is the same."""
    handle = Handle()
    result = cu.cuMemRetainAllocationHandle(ctypes.byref(handle), ctypes.c_void_p(at(place, grain).value + 4096))
    same = sorted(other for other, value in handles.items() if value == handle.value and other != name)
    handles[name] = handle.value
    return result, same


def properties(name: str) -> tuple[int, int, int, int]:
    found = Properties()
    result = cu.cuMemGetAllocationPropertiesFromHandle(ctypes.byref(found), Handle(handles[name]))
    return result, found.location.type, found.location.id, found.handle_types


def export(name: str) -> int:
    descriptor = ctypes.c_int(-1)
    result = cu.cuMemExportToShareableHandle(ctypes.byref(descriptor), Handle(handles[name]), DESCRIPTOR, Address(0))
    places["descriptor"] = descriptor.value
    return result


def import_(name: str, grains: int = 1) -> int:
    handle = Handle()
    descriptor = ctypes.c_void_p(places["descriptor"])
    result = cu.cuMemImportFromShareableHandle(ctypes.byref(handle), descriptor, DESCRIPTOR)
    handles[name], sizes[name] = handle.value, grains * GRAIN
    return result


def bind(name: str, *, multicast: int = MULTICAST) -> int:
    return cu.cuMulticastBindMem(Handle(multicast), Size(0), Handle(handles[name]), Size(0), Size(GRAIN), Address(0))


def bind_v2(name: str) -> int:
    return cu.cuMulticastBindMem_v2(
        Handle(MULTICAST), 0, Size(0), Handle(handles[name]), Size(0), Size(GRAIN), Address(0)
    )


def bind_address(place: str, grain: int = 0, *, multicast: int = MULTICAST) -> int:
    return cu.cuMulticastBindAddr(Handle(multicast), Size(0), at(place, grain), Size(GRAIN), Address(0))


def bind_address_v2(place: str, grain: int = 0) -> int:
    return cu.cuMulticastBindAddr_v2(Handle(MULTICAST), 0, Size(0), at(place, grain), Size(GRAIN), Address(0))


def map_arrays(*names: str) -> int:
    wanted = (ArrayMap * len(names))(*(ArrayMap(handle=handles[name]) for name in names))
    result = cu.cuMemMapArrayAsync(wanted, len(names), None)
    assert [each.handle for each in wanted] == [handles[name] for name in names], "the program's own list"
    return result


def address_handle(place: str, grain: int = 0) -> int:
    descriptor = ctypes.c_int(-1)
    result = cu.cuMemGetHandleForAddressRange(ctypes.byref(descriptor), at(place, grain), Size(GRAIN), 1, Address(0))
    if result == 0:
        os.close(descriptor.value)
    return result


def fill(place: str, grain: int, byte: int, grains: int = 1) -> None:
    ctypes.memset(at(place, grain).value, byte, grains * GRAIN)


def holds(place: str, grain: int = 0, grains: int = 1) -> int | None:
    """The byte that is everywhere in the range; None: there are several."""
    content = ctypes.string_at(at(place, grain).value, grains * GRAIN)
    return content[0] if content == content[:1] * len(content) else None


def describe(place: str, grain: int = 0) -> list[object]:
    base, size = Address(), Size()
    facts: list[object] = [cu.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), at(place, grain))]
    facts += [base.value - places[place] if facts[0] == 0 else None, size.value]
    for attribute in (1, 2, 8, 9, 12):
        value = ctypes.c_ulonglong()
        facts += [cu.cuPointerGetAttribute(ctypes.byref(value), attribute, at(place, grain)), value.value]
    return facts


def mapped(place: str, name: str, byte: int, grains: int = 1, **options) -> int:
    """Reserve, create, map, allow access and fill; the sum of the results."""
    failed = reserve(place, grains) + create(name, grains, **options) + map(place, name) + access(place, 0, grains)
    fill(place, 0, byte, grains)
    return failed


def alloc(place: str, grains: int) -> int:
    address = Address()
    result = cu.cuMemAlloc_v2(ctypes.byref(address), Size(grains * GRAIN))
    places[place] = address.value
    return result


def free(place: str) -> int:
    return cu.cuMemFree_v2(at(place))


def new_context(device: int) -> int:
    fresh = ctypes.c_ulonglong()
    result = cu.cuCtxCreate_v2(ctypes.byref(fresh), 0, device)
    places["context"] = fresh.value
    return result


def pop_context() -> int:
    popped = ctypes.c_ulonglong()
    return cu.cuCtxPopCurrent_v2(ctypes.byref(popped))


def destroy_context() -> int:
    return cu.cuCtxDestroy_v2(Address(places["context"]))


def begin_capture() -> int:
    assert cu.cuStreamCreate(ctypes.byref(stream), 1) == 0
    return cu.cuStreamBeginCapture_v2(stream, 0)


def end_capture() -> int:
    return cu.cuStreamEndCapture(stream, ctypes.byref(ctypes.c_void_p()))


def later(expression: str) -> None:
    """Evaluate it in another thread."""
    threading.Thread(target=lambda: results.append(eval(expression))).start()


def outstanding() -> tuple[int, ...]:
    """Bytes of the device that are used, and the count of reservations, handles and mappings."""
    counts = (Size * 8)()
    cu.double_outstanding(counts)
    return tuple(counts[:4])


def fail(function: str, nth: int, result: int = 999) -> None:
    cu.double_fail(function.encode(), ctypes.c_long(nth), False, result)


def stop(function: str) -> None:
    """Let the next call of a function wait, until `continue_call`."""
    cu.double_stop(function.encode())


def waits() -> bool:
    return bool(cu.double_waits() & 1)


def continue_call() -> None:
    cu.double_continue()


def set_total(size: int) -> None:
    cu.double_set_bytes(Size(size))


if __name__ == "__main__":
    for line in sys.stdin:
        print(repr(eval(line)), flush=True)
