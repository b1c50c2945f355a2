"""Small programs that use memory as programs do that this library must not disturb; they print all that they see.

Run as ``python no_harm.py WAY PROGRAM ...``, with and without the library, on a real driver or a double; the output
must be the same.  Numbers that are others in every process (addresses, identities) are printed by what they belong to.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator

import conformance
from conformance import ENDINGS, MIB, Pointer, Program, Size

PER_THREAD_STREAM = 2
#: CU_POINTER_ATTRIBUTE_...: those of CUDA 13 begin with 1, what is after them is unknown to every driver.
ALL_ATTRIBUTES = range(28)
CONTEXT, DEVICE_POINTER, HOST_POINTER, P2P_TOKENS, SYNC_MEMOPS, BUFFER_ID = 1, 3, 4, 5, 6, 7
LEGACY_IPC, RANGE_START, HANDLE_TYPES, POOL, MAPPING_START, BLOCK_ID = 10, 11, 14, 17, 19, 20
#: IS_HW_DECOMPRESS_CAPABLE: of served memory 0, which docs/performance.md names.
DECOMPRESSED = 21
#: Their values are addresses; and numbers that the driver gives out.
ADDRESSES, IDENTITIES = (DEVICE_POINTER, HOST_POINTER, RANGE_START, MAPPING_START), (BUFFER_ID, BLOCK_ID)
#: What a program sees where the driver has written nothing.
UNTOUCHED = b"\xa5"
OUT_OF_MEMORY = 2
SERVED, SMALL = 7 * MIB + 77, 5000
WAY_TO_DRIVER = "dlsym"


class Watcher(Program):
    """A program that asks for everything that the driver knows of an address."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self._identities: dict[int, dict[int, int]] = {}

    def has(self, name: str) -> bool:
        try:
            return bool(self.cu[name])
        except AttributeError:
            return False

    def shown(self, attribute: int, raw: bytes) -> object:
        """Return what the driver has written, as it is the same in every process; with the number of its bytes."""
        written = raw.rstrip(UNTOUCHED)
        value = int.from_bytes(written, "little")
        if attribute == CONTEXT:
            return (len(written), "the context" if value == self.context.value else value)
        if attribute in ADDRESSES:
            return (len(written), self.near(value))
        if attribute in IDENTITIES:
            known = self._identities.setdefault(attribute, {})
            return (len(written), known.setdefault(value, len(known)))
        if attribute == P2P_TOKENS:  # which are others in each process
            return len(written) > 0
        if attribute == DECOMPRESSED:
            return len(written)
        return (len(written), bool(value) if attribute == POOL else value)

    def near(self, address: int) -> str:
        """Name an address by the memory that it is in, or behind."""
        before = {at: name for name, at in self.memory.items() if 0 <= address - at < 1 << 32}
        return f"{before[max(before)]} + {address - max(before)}" if before else hex(address)

    def attribute(self, attribute: int, address: int) -> tuple[int, object]:
        raw = ctypes.create_string_buffer(UNTOUCHED * 64, 64)
        result = self.cu["cuPointerGetAttribute"](raw, attribute, Pointer(address))
        return result, self.shown(attribute, raw.raw)

    def attributes(self, attributes: list[int], address: int) -> tuple[int, list[object]]:
        raws = [ctypes.create_string_buffer(UNTOUCHED * 64, 64) for _ in attributes]
        result = self.cu["cuPointerGetAttributes"](
            ctypes.c_uint(len(attributes)),
            (ctypes.c_int * max(len(attributes), 1))(*attributes),
            (ctypes.c_void_p * max(len(attributes), 1))(*(ctypes.addressof(raw) for raw in raws)),
            Pointer(address),
        )
        return result, [self.shown(each, raw.raw) for each, raw in zip(attributes, raws, strict=True)]

    def range(self, address: int) -> tuple[int, object]:
        base, size = Pointer(), Size()
        result = self.cu["cuMemGetAddressRange"](ctypes.byref(base), ctypes.byref(size), Pointer(address))
        return result, (self.near(base.value), size.value) if result == 0 else None

    def everything(self, title: str, address: int) -> None:
        self.say(title, "range", self.range(address))
        for each in ALL_ATTRIBUTES:
            self.say(title, each, self.attribute(each, address))
        self.say(title, "handle", self.cu["cuMemRetainAllocationHandle"](ctypes.byref(Pointer()), Pointer(address)))

    def of_each_kind(self) -> Iterator[tuple[str, int]]:
        """Memory of each way to get it, by name and bytes; freed afterwards."""
        for name, size in (("small", SMALL), ("served", SERVED), ("round", 8 * MIB)):
            assert self.alloc(name, size) == 0
            yield name, size
            self.say(name, "freed", self.free(name))
        address, pitch = Pointer(), Size()
        rows = (ctypes.byref(address), ctypes.byref(pitch), Size(5000), Size(2000), 8)
        assert self.cu["cuMemAllocPitch"](*rows) == 0
        self.memory["rows"] = address.value
        yield "rows", pitch.value * 2000
        self.say("rows", "freed", self.free("rows"))


# -- what an address is


def each_attribute(program: Watcher) -> None:
    for name, _ in program.of_each_kind():
        program.everything(name, program.memory[name])


def attributes_within_memory(program: Watcher) -> None:
    for name, size in program.of_each_kind():
        for offset in (1, size // 2, size - 1):
            program.everything(f"{name} + {offset}", program.memory[name] + offset)


def attributes_of_freed_memory(program: Watcher) -> None:
    """Ask for results alone: other memory may be at the address by now."""
    for size in (8 * MIB, 64 * MIB):
        program.alloc("it", size)
        address = program.memory["it"]
        program.say(size, program.free("it"), program.cu["cuMemFree"](Pointer(address)))
        for each in ALL_ATTRIBUTES:
            program.say(size, each, program.attribute(each, address)[0])
        program.say(size, program.range(address)[0])


def attributes_of_no_memory(program: Watcher) -> None:
    host = ctypes.create_string_buffer(8 * MIB)
    for name, address in (
        ("null", 0),
        ("1", 1),
        ("12345", 12345),
        ("host", ctypes.addressof(host)),
        ("top", 2**64 - 1),
    ):
        for each in ALL_ATTRIBUTES:
            program.say(name, each, program.attribute(each, address)[0])
        program.say(name, program.range(address)[0], program.attributes([1, 2, 9, 11, 12], address)[0])


def attributes_all_at_once(program: Watcher) -> None:
    for name, size in program.of_each_kind():
        address = program.memory[name]
        some = [each for each in ALL_ATTRIBUTES if each not in (0, P2P_TOKENS)]
        known = [each for each in some if program.attribute(each, address)[0] == 0]
        for offset in (0, size - 1):
            program.say(name, offset, program.attributes(known, address + offset))
            program.say(name, offset, program.attributes(known[::-1], address + offset))
        for each in known:
            program.say(name, each, program.attributes([each], address))
            program.say(name, each, program.attributes([each, each], address))


def attributes_without_a_place(program: Watcher) -> None:
    for name, _ in program.of_each_kind():
        for each in (CONTEXT, RANGE_START, LEGACY_IPC, HANDLE_TYPES, 2):
            program.say(name, each, program.cu["cuPointerGetAttribute"](None, each, Pointer(program.memory[name])))


def parts_of_a_range(program: Watcher) -> None:
    look_up = program.cu["cuMemGetAddressRange"]
    for name, size in program.of_each_kind():
        address, base, bytes_ = program.memory[name], Pointer(), Size()
        program.say(look_up(ctypes.byref(base), None, Pointer(address + size // 2)), program.near(base.value))
        program.say(look_up(None, ctypes.byref(bytes_), Pointer(address + size // 2)), bytes_.value)
        program.say(look_up(None, None, Pointer(address)))


def memory_operations_that_synchronize(program: Watcher) -> None:
    """CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, as libraries set it that give memory to other devices."""
    for name, _ in program.of_each_kind():
        address = program.memory[name]
        for wanted in (1, 0, 1):
            value = ctypes.c_uint(wanted)
            program.say(name, program.cu["cuPointerSetAttribute"](ctypes.byref(value), SYNC_MEMOPS, Pointer(address)))
            program.say(name, program.attribute(SYNC_MEMOPS, address), program.attributes([SYNC_MEMOPS, 9], address))
    program.say("nobody's", program.cu["cuPointerSetAttribute"](ctypes.byref(value), SYNC_MEMOPS, Pointer(12345)))


def neighbours_are_distinguished(program: Watcher) -> None:
    """Each address is its own allocation's, and no other's."""
    for at in range(24):
        program.alloc(f"number {at}", (2 + at % 5) * MIB + at)
    for name in list(program.memory)[::3]:
        program.say(name, program.free(name))
    for name, address in list(program.memory.items()):
        program.say(name, [program.attribute(each, address + 2 * MIB - 1) for each in (RANGE_START, 12, CONTEXT)])
        program.say(name, program.range(address + MIB), program.free(name))


# -- allocating and freeing


def sizes_at_the_granularity(program: Watcher) -> None:
    for blocks in (1, 2, 3, 16):
        for more in (-1, 0, 1):
            name = f"{blocks} and {more}"
            program.say(name, program.alloc(name, blocks * 2 * MIB + more), program.range(program.memory[name]))
    for name in list(program.memory):
        program.say(name, program.free(name))


def sizes_that_are_too_large(program: Watcher) -> None:
    for power in range(44, 64):
        for more in (-1, 0, 1):
            size = (1 << power) + more
            program.say(size, program.alloc("it", size), "it" in program.memory)
    for size in (2**64 - 1, 2**64 - 2 * MIB, 2**64 - 2 * MIB - 1):
        program.say(size, program.alloc("it", size))
    program.say(program.alloc("it", 4 * MIB), program.free("it"))


def an_address_is_untouched_after_an_error(program: Watcher) -> None:
    for size in (0, 1 << 60, 2**64 - 1):
        address = Pointer(0x5A5A)
        program.say(size, program.cu["cuMemAlloc"](ctypes.byref(address), Size(size)), address.value == 0x5A5A)


def wrong_frees(program: Watcher) -> None:
    free = program.cu["cuMemFree"]
    host = ctypes.create_string_buffer(4 * MIB)
    program.say([free(Pointer(each)) for each in (0, 1, 512, 12345, 2**64 - 1, ctypes.addressof(host))])
    for name, size in program.of_each_kind():
        inside = (1, 256, size // 2, size - 1, *range(2 * MIB, size, 2 * MIB))
        program.say(name, [free(Pointer(program.memory[name] + each)) for each in inside])
        program.say(name, program.range(program.memory[name]))


def double_frees(program: Watcher) -> None:
    for size in (SMALL, 2 * MIB, SERVED, 64 * MIB):
        program.alloc("it", size)
        address = program.memory["it"]
        program.say(size, program.free("it"), [program.cu["cuMemFree"](Pointer(address)) for _ in range(3)])


def freed_by_another_thread(program: Watcher) -> None:
    for name in ("first", "second"):
        program.alloc(name, SERVED)

    def work() -> None:
        program.say("its context", program.cu["cuCtxSetCurrent"](program.context))
        program.say("freed", program.free("first"), program.alloc("third", SERVED))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    program.say(program.free("second"), program.free("third"))


def threads_that_allocate(program: Watcher) -> None:
    """Allocate on eight threads at once; print errors and addresses given out twice."""
    failed: list[int] = []
    addresses: list[list[int]] = [[] for _ in range(8)]

    def work(own: list[int]) -> None:
        failed.append(program.cu["cuCtxSetCurrent"](program.context))
        for at in range(40):
            address = Pointer()
            failed.append(program.cu["cuMemAlloc"](ctypes.byref(address), Size(2 * MIB + at)))
            own.append(address.value)
            if at % 2:
                failed.append(program.cu["cuMemFree"](Pointer(own.pop(0))))

    threads = [threading.Thread(target=work, args=(own,)) for own in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = [each for own in addresses for each in own]
    program.say(set(failed), len(left), len(set(left)))
    program.say({program.cu["cuMemFree"](Pointer(each)) for each in left})


def frees_in_any_order(program: Watcher) -> None:
    before, numbers = program.free_bytes(), random.Random(7)
    for at in range(300):
        if program.memory and numbers.random() < 0.5:
            program.say(at, program.free(numbers.choice(sorted(program.memory))))
        else:
            program.say(at, program.alloc(f"number {at}", numbers.choice((MIB // 2, 2 * MIB, 3 * MIB + 5, 16 * MIB))))
    for name in sorted(program.memory):
        program.say(name, program.free(name))
    program.say("all is free again", before - program.free_bytes() < 64 * MIB)


def free_memory(program: Watcher) -> None:
    """In multiples of the granularity, so that what is rounded up is not in it."""
    before = program.free_bytes()
    for at in range(4):
        program.alloc(f"number {at}", 256 * MIB)
        program.say(round((before - program.free_bytes()) / 256 / MIB))
    for at in range(4):
        program.free(f"number {at}")
        program.say(round((before - program.free_bytes()) / 256 / MIB))


def contents_stay(program: Watcher) -> None:
    """Write to memory, and read it when other memory has been allocated and freed."""
    copy_in, copy_out = program.cu["cuMemcpyHtoD"], program.cu["cuMemcpyDtoH"]
    for at, size in enumerate((SMALL, 2 * MIB, SERVED)):
        program.alloc(f"kept {at}", size)
        program.alloc("other", 4 * MIB)
        text = bytes((at + each) % 251 for each in range(1000))
        program.say(copy_in(Pointer(program.memory[f"kept {at}"] + size - 1000), text, Size(1000)))
        program.say(program.free("other"))
    for at, size in enumerate((SMALL, 2 * MIB, SERVED)):
        found = ctypes.create_string_buffer(1000)
        result = copy_out(found, Pointer(program.memory[f"kept {at}"] + size - 1000), Size(1000))
        program.say(result, found.raw == bytes((at + each) % 251 for each in range(1000)), program.free(f"kept {at}"))


def managed_memory(program: Watcher) -> None:
    for size in (0, SMALL, 8 * MIB, 1 << 60):
        for flags in (0, 1, 2, 3, 4):
            address = Pointer()
            result = program.cu["cuMemAllocManaged"](ctypes.byref(address), Size(size), flags)
            program.say(size, flags, result)
            if result == 0:
                program.memory["managed"] = address.value
                for each in (2, 8, 9, 11, 12):
                    program.say(each, program.attribute(each, address.value + size // 2))
                inside = program.cu["cuMemFree"](Pointer(address.value + 512))
                again = program.memory["managed"]
                program.say(inside, program.free("managed"), program.cu["cuMemFree"](Pointer(again)))


# -- contexts


def no_current_context(program: Watcher) -> None:
    program.alloc("it", SERVED)
    address, pitch = program.memory["it"], Size()
    program.say(program.cu["cuCtxSetCurrent"](Pointer(0)))
    place = ctypes.byref(Pointer())
    program.say("alloc", program.cu["cuMemAlloc"](place, Size(SERVED)), program.cu["cuMemAlloc"](place, Size(0)))
    program.say("rows", program.cu["cuMemAllocPitch"](place, ctypes.byref(pitch), Size(5000), Size(2000), 8))
    program.say("managed", program.cu["cuMemAllocManaged"](place, Size(SERVED), 1))
    program.say("range", program.range(address)[0])
    for each in (CONTEXT, 2, LEGACY_IPC, RANGE_START, 12):
        program.say(each, program.attribute(each, address))
    program.say("null", program.cu["cuMemFree"](Pointer(0)))
    program.say(program.cu["cuCtxSetCurrent"](program.context), program.free("it"))


def several_contexts(program: Watcher) -> None:
    """Memory is that of the context it was allocated in, whichever frees it or asks."""
    second, popped = Pointer(), Pointer()
    program.alloc("first's", SERVED)
    program.say(program.create_context(second))
    program.alloc("second's", SERVED)
    for name in ("first's", "second's"):
        owner = Pointer()
        program.say(program.cu["cuPointerGetAttribute"](ctypes.byref(owner), CONTEXT, Pointer(program.memory[name])))
        program.say(name, owner.value == program.context.value, owner.value == second.value)
    program.say(program.free("first's"), program.cu["cuCtxPopCurrent"](ctypes.byref(popped)))
    program.say(popped.value == second.value, program.free("second's"))
    program.say(program.cu["cuCtxDestroy"](second), program.alloc("last", SERVED), program.free("last"))


def contexts_that_are_gone(program: Watcher) -> None:
    gone = Pointer()
    program.say(program.create_context(gone), program.alloc("its", SERVED))
    address = program.memory.pop("its")
    program.say(program.cu["cuCtxDestroy"](gone), program.cu["cuCtxSetCurrent"](program.context))
    program.say("its memory", program.range(address)[0], program.cu["cuMemFree"](Pointer(address)))
    program.say([program.attribute(each, address)[0] for each in (CONTEXT, 2, LEGACY_IPC, RANGE_START, 12)])
    program.say(program.alloc("last", SERVED), program.free("last"))


def a_context_that_has_failed(program: Watcher) -> None:
    """Of a kernel's error, which only a double has without a kernel; the calls that return it say so."""
    other, address, pitch, stream = Pointer(), Pointer(), Size(), program.stream()
    program.say(program.create_context(other), program.alloc("small", SMALL), program.alloc("served", SERVED))
    ctypes.CDLL("libcuda.so.1").double_break(700)
    program.say("alloc", [program.alloc("another", size) for size in (SMALL, SERVED, 64 * MIB)])
    program.say(
        program.cu["cuMemAllocPitch"](ctypes.byref(address), ctypes.byref(pitch), Size(5000), Size(2000), 8),
        program.cu["cuMemAllocAsync"](ctypes.byref(address), Size(SERVED), None),
    )
    program.say("free", program.free("small"), program.free("served"), program.cu["cuCtxSynchronize"]())
    program.say(program.cu["cuCtxDestroy"](other), program.cu["cuCtxSetCurrent"](program.context))
    program.say("the first", program.alloc("it", SERVED), program.free("it"), program.cu["cuStreamQuery"](stream))
    program.say(program.cu["cuStreamDestroy"](stream))


def the_primary_context_s_state(program: Watcher) -> None:
    state, flags, active = program.cu["cuDevicePrimaryCtxGetState"], ctypes.c_uint(), ctypes.c_int()

    def said() -> tuple[int, int]:
        return state(0, ctypes.byref(flags), ctypes.byref(active)), active.value

    program.say(said(), program.cu["cuDevicePrimaryCtxReset"](0), said())
    program.say("released too often", [program.cu["cuDevicePrimaryCtxRelease"](0) for _ in range(2)], said())
    context = Pointer()
    program.say(program.cu["cuDevicePrimaryCtxRetain"](ctypes.byref(context), 0), said())
    program.say(program.cu["cuCtxSetCurrent"](context), program.alloc("it", SERVED), program.free("it"))
    program.say([program.cu[f"cuDevicePrimaryCtx{verb}"](99) for verb in ("Release", "Reset")])
    program.say([program.cu["cuDevicePrimaryCtxRetain"](ctypes.byref(context), 99), said()])


# -- streams, events and captures


def streams_of_each_kind(program: Watcher) -> None:
    own = program.stream()
    for stream in (own, ctypes.c_void_p(1), ctypes.c_void_p(2), None):
        for ending in ("", "_ptsz"):
            program.alloc("it", SERVED)
            address = program.memory.pop("it")
            free = program.cu[f"cuMemFreeAsync{ending}"] if WAY_TO_DRIVER == "dlsym" else program.cu["cuMemFreeAsync"]
            program.say(ending, free(Pointer(address), stream), program.cu["cuCtxSynchronize"]())
            program.say(program.cu["cuMemFree"](Pointer(address)))
        program.say(program.cu["cuStreamQuery"](stream))
    program.say(program.cu["cuStreamDestroy"](own))


def events(program: Watcher) -> None:
    stream, event = program.stream(), ctypes.c_void_p()
    program.say(program.cu["cuEventCreate"](ctypes.byref(event), 2), program.cu["cuEventRecord"](event, stream))
    program.say(program.cu["cuEventSynchronize"](event), program.cu["cuEventQuery"](event))
    program.alloc("it", SERVED)
    program.say(program.cu["cuMemFreeAsync"](Pointer(program.memory.pop("it")), stream))
    program.say(program.cu["cuEventRecord"](event, stream), program.cu["cuEventSynchronize"](event))
    program.say(program.cu["cuEventDestroy"](event), program.cu["cuStreamDestroy"](stream))


def captures_that_fail(program: Watcher) -> None:
    begin, end = program.cu["cuStreamBeginCapture"], program.cu["cuStreamEndCapture"]
    stream, graph = program.stream(), ctypes.c_void_p()
    program.say("never begun", end(stream, ctypes.byref(graph)))
    program.say("the legacy stream", begin(None, 0), begin(ctypes.c_void_p(1), 0))
    program.say("twice", begin(stream, 0), begin(stream, 0), end(stream, ctypes.byref(graph)), bool(graph.value))
    program.say(program.alloc("it", SERVED), program.free("it"), program.cu["cuStreamDestroy"](stream))


def frees_in_a_capture(program: Watcher) -> None:
    for name, size in (("small", SMALL), ("served", SERVED)):
        stream, graph = program.stream(), ctypes.c_void_p()
        program.alloc(name, size)
        address = program.memory[name]
        program.say(program.cu["cuStreamBeginCapture"](stream, 1))
        program.say(name, program.cu["cuMemFreeAsync"](Pointer(address), stream))
        program.say(program.cu["cuStreamEndCapture"](stream, ctypes.byref(graph)) == 0, bool(graph.value))
        program.say(name, program.range(address), program.free(name))


# -- lookups


def names_by_address(program: Watcher) -> None:
    """cuGetProcAddress of every function that is replaced, in all versions and with all flags."""
    library, function, status = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
    names = [*ENDINGS, "cuMemFreeAsync", "cuPointerGetAttribute", "cuIpcGetMemHandle", "cuGetProcAddress", "cuInit"]
    names += ["cuLaunchKernel", "cuStreamSynchronize", "cuMemcpyHtoD", "cuMemAlloc_v2", "cuMemFreeAsync_ptsz"]
    for name in names:
        for version in (0, 2000, 3020, 4000, 7000, 10000, 11000, 11030, 12000, 12050, 13000, 13099, 2**31 - 1, -1):
            for flags in (0, 1, 2, 3, 4, 1 << 40):
                status.value = -7
                arguments = (name.encode(), ctypes.byref(function), version, ctypes.c_ulonglong(flags))
                result = library.cuGetProcAddress_v2(*arguments, ctypes.byref(status))
                program.say(name, version, flags, result, status.value, bool(function.value))
                program.say(library.cuGetProcAddress_v2(*arguments, None), bool(function.value))
    # Left out: NULL as a name or as the place for the function, of both versions of cuGetProcAddress.  A real driver
    # reads the name without a look at it, and ends the process.


def names_by_library(program: Watcher) -> None:
    """Names of the driver's are found in its library and nowhere else, and errors say so."""
    driver, everything = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None)
    others = [ctypes.CDLL("libc.so.6"), ctypes.CDLL("libm.so.6")]
    for name in (
        "cuMemAlloc_v2",
        "cuMemFree_v2",
        "cuLaunchKernel",
        "cuMemcpyHtoD_v2",
        "cuInit",
        "cuNever",
        "cuMemAlloc",
    ):
        program.say(name, hasattr(driver, name), hasattr(everything, name), [hasattr(each, name) for each in others])
        for library in (everything, *others):
            try:
                library[name]
                program.say(name, "found")
            except AttributeError as error:  # which library is named may be another
                program.say(str(error).rpartition(": undefined")[1:])


# -- CUDA IPC


class Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)


def ipc_handles(program: Watcher) -> None:
    """Errors of handles in the process that has the memory; what is in a handle is the driver's own affair."""
    get, close = program.cu["cuIpcGetMemHandle"], program.cu["cuIpcCloseMemHandle"]
    library = ctypes.CDLL("libcuda.so.1")
    library.cuIpcOpenMemHandle_v2.argtypes = (ctypes.c_void_p, Handle, ctypes.c_uint)
    host = ctypes.create_string_buffer(4 * MIB)
    for address in (0, 1, 12345, 2**64 - 1, ctypes.addressof(host)):
        program.say("of nobody", get(ctypes.byref(Handle()), Pointer(address)), close(Pointer(address)))
    for name, size in (("served", SERVED), ("round", 8 * MIB)):
        handles = [Handle() for _ in range(3)]
        program.alloc(name, size)
        address = program.memory[name]
        program.say(name, get(ctypes.byref(handles[0]), Pointer(address)))
        program.say(name, get(ctypes.byref(handles[1]), Pointer(address)), get(None, Pointer(address)))
        program.say(name, "within it", get(ctypes.byref(handles[2]), Pointer(address + size // 2)))
        program.say(name, len({bytes(each) for each in handles}), program.attribute(LEGACY_IPC, address))
        program.say(name, "not opened", close(Pointer(address)))
        program.say(name, program.free(name), get(ctypes.byref(Handle()), Pointer(address)))
    opened = [library.cuIpcOpenMemHandle_v2(ctypes.byref(Pointer()), Handle(text), 1) for text in (b"", b"nonsense")]
    program.say("of nobody", opened)


# -- out of memory


def out_of_memory(program: Watcher) -> None:
    """Allocate to the last block, and again as much as is freed."""
    set_bytes = getattr(ctypes.CDLL("libcuda.so.1"), "double_set_bytes", None)
    if set_bytes is not None:  # a real GPU has as much as it has
        set_bytes(Size(64 * MIB))
    block = 8 * MIB if set_bytes is not None else max(2 * MIB, program.free_bytes() // 16 // (2 * MIB) * 2 * MIB)
    count = 0
    while (result := program.alloc(f"number {count}", block)) == 0:
        count += 1
    program.say("at its end", result, count >= (8 if set_bytes is not None else 14), "left", program.range(0)[0])
    program.say([program.alloc("too large", block) for _ in range(3)])
    for at in range(3):
        program.say(program.free(f"number {at}"), program.alloc(f"number {at}", block), program.alloc("other", block))
    program.say("a smaller one instead", program.free("number 0"), program.alloc("number 0", block // 2))
    program.say("and its other half", program.alloc("other half", block // 2))
    for name in sorted(program.memory):
        program.free(name)
    program.say("afterwards", program.alloc("it", block), program.free("it"))
    if set_bytes is not None:
        set_bytes(Size(1 << 40))


def out_of_memory_while_something_is_freed_later(program: Watcher) -> None:
    """Memory that a stream frees is there again, at the latest when the program has waited for the stream.

    Whether it is there before, an allocation that needs it does not say: the driver fails it, the library waits.
    """
    set_bytes = getattr(ctypes.CDLL("libcuda.so.1"), "double_set_bytes", None)
    if set_bytes is not None:
        set_bytes(Size(64 * MIB))
    block = 32 * MIB if set_bytes is not None else program.free_bytes() // 3 // (2 * MIB) * 2 * MIB
    stream = program.stream()
    for turn in range(6):
        if (result := program.alloc("it", block)) == OUT_OF_MEMORY:
            program.cu["cuStreamSynchronize"](stream)
            result = program.alloc("it", block)
        program.say(turn, result, program.cu["cuMemFreeAsync"](Pointer(program.memory.pop("it", 0)), stream))
    program.say(program.cu["cuStreamSynchronize"](stream), program.cu["cuStreamDestroy"](stream))
    if set_bytes is not None:
        set_bytes(Size(1 << 40))


# -- the process


def a_child_that_only_reads(program: Watcher) -> None:
    """A forked child has nothing of the driver's; it sees what the driver says to it."""
    program.alloc("it", SERVED)
    address = program.memory["it"]
    child = os.fork()
    if child == 0:
        program.say("in the child", program.alloc("its", SERVED), program.cu["cuMemFree"](Pointer(address)))
        os._exit(5)
    program.say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), program.range(address), program.free("it"))


def what_the_environment_has(program: Watcher) -> None:
    program.alloc("it", SERVED)
    variables = sorted(name for name in os.environ if "PRELOAD" in name or "GPU_CKPT" in name)
    program.say(variables, os.getenv("LD_PRELOAD"), program.free("it"))


PROGRAMS: dict[str, Callable[[Watcher], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        each_attribute,
        attributes_within_memory,
        attributes_of_freed_memory,
        attributes_of_no_memory,
        attributes_all_at_once,
        attributes_without_a_place,
        parts_of_a_range,
        memory_operations_that_synchronize,
        neighbours_are_distinguished,
        sizes_at_the_granularity,
        sizes_that_are_too_large,
        an_address_is_untouched_after_an_error,
        wrong_frees,
        double_frees,
        freed_by_another_thread,
        threads_that_allocate,
        frees_in_any_order,
        free_memory,
        contents_stay,
        managed_memory,
        no_current_context,
        several_contexts,
        contexts_that_are_gone,
        a_context_that_has_failed,
        the_primary_context_s_state,
        streams_of_each_kind,
        events,
        captures_that_fail,
        frees_in_a_capture,
        names_by_address,
        names_by_library,
        ipc_handles,
        out_of_memory,
        out_of_memory_while_something_is_freed_later,
        a_child_that_only_reads,
        what_the_environment_has,
    )
}
ENDINGS.update(dict.fromkeys(("cuMemcpyHtoD", "cuMemcpyDtoH", "cuStreamDestroy", "cuEventDestroy"), "_v2"))
assert conformance.ENDINGS is ENDINGS

if __name__ == "__main__":
    WAY_TO_DRIVER = sys.argv[1]
    for chosen in sys.argv[2:]:
        print(f"-- {chosen}", flush=True)
        PROGRAMS[chosen](Watcher(sys.argv[1]))
