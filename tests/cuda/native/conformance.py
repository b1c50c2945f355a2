"""Programs that use the CUDA driver in every way that there is to find it, and print what they got.

Run as ``python conformance.py PROGRAM WAY``, with and without the library, on a real driver or a double.  Addresses are
printed as whether they are those of memory of this program; sizes, error codes and contents as they are.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable

MIB = 1 << 20
#: CU_POINTER_ATTRIBUTE_...: context, memory type, device pointer, is managed, ordinal, range's start and size.
ATTRIBUTES = (1, 2, 3, 8, 9, 11, 12)
SIZES = (1, 512, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 7 * MIB + 77, 64 * MIB)
VERSION = 12000
LEGACY, PER_THREAD = 1, 2
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
ENDINGS = {
    "cuMemAlloc": "_v2",
    "cuMemAllocPitch": "_v2",
    "cuMemFree": "_v2",
    "cuMemGetAddressRange": "_v2",
    "cuMemGetInfo": "_v2",
    "cuStreamBeginCapture": "_v2",
    "cuCtxCreate": "_v2",
    "cuCtxDestroy": "_v2",
    "cuDevicePrimaryCtxRelease": "_v2",
    "cuDevicePrimaryCtxReset": "_v2",
    "cuCtxPopCurrent": "_v2",
    "cuCtxPushCurrent": "_v2",
}

Pointer = ctypes.c_ulonglong
Size = ctypes.c_size_t


class Driver:
    """The driver's functions by their base names, found in one way."""

    def __init__(self, way: str) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._find = {
            "dlsym": self._by_dlsym,
            "cuGetProcAddress": self._by_address,
            "cuGetProcAddress_v2": self._by_address_v2,
            "cuGetProcAddress of itself": self._by_address_of_itself,
        }[way]
        self._functions: dict[str, Callable[..., int]] = {}

    def __getitem__(self, name: str) -> Callable[..., int]:
        if name not in self._functions:
            self._functions[name] = self._find(name)
        return self._functions[name]

    def _by_dlsym(self, name: str) -> Callable[..., int]:
        return self._library[name + ENDINGS.get(name, "")]

    def _found(self, result: int, function: ctypes.c_void_p, name: str) -> Callable[..., int]:
        if result != 0 or not function.value:
            return self._by_dlsym(name)
        return ctypes.CFUNCTYPE(ctypes.c_int)(function.value)

    def _by_address(self, name: str) -> Callable[..., int]:
        function = ctypes.c_void_p()
        result = self._library.cuGetProcAddress(
            name.encode(), ctypes.byref(function), VERSION, ctypes.c_ulonglong(LEGACY)
        )
        return self._found(result, function, name)

    def _by_address_v2(self, name: str) -> Callable[..., int]:
        function, status = ctypes.c_void_p(), ctypes.c_int()
        result = self._library.cuGetProcAddress_v2(
            name.encode(), ctypes.byref(function), VERSION, ctypes.c_ulonglong(PER_THREAD), ctypes.byref(status)
        )
        return self._found(result, function, name)

    def _by_address_of_itself(self, name: str) -> Callable[..., int]:
        """Look up cuGetProcAddress first, by itself, as the CUDA runtime does."""
        look_up = self._by_address_v2("cuGetProcAddress")
        function, status = ctypes.c_void_p(), ctypes.c_int()
        result = look_up(
            name.encode(), ctypes.byref(function), VERSION, ctypes.c_ulonglong(LEGACY), ctypes.byref(status)
        )
        return self._found(result, function, name)


class Program:
    """A program with a context, and what it prints."""

    def __init__(self, way: str) -> None:
        self.cu = Driver(way)
        self.memory: dict[str, int] = {}
        assert self.cu["cuInit"](0) == 0
        self.context = Pointer()
        assert self.cu["cuDevicePrimaryCtxRetain"](ctypes.byref(self.context), 0) == 0
        assert self.cu["cuCtxSetCurrent"](self.context) == 0

    def say(self, *facts: object) -> None:
        print(*facts, flush=True)

    def alloc(self, name: str, size: int) -> int:
        address = Pointer()
        result = self.cu["cuMemAlloc"](ctypes.byref(address), Size(size))
        if result == 0:
            self.memory[name] = address.value
        return result

    def free(self, name: str) -> int:
        return self.cu["cuMemFree"](Pointer(self.memory.pop(name)))

    def where(self, address: int) -> str:
        return next((f"{name} + {address - at}" for name, at in self.memory.items() if address == at), hex(address))

    def describe(self, name: str, offset: int = 0) -> list[object]:
        """Return all facts that the driver has about an address."""
        address = Pointer(self.memory[name] + offset)
        base, size, facts = Pointer(), Size(), []
        result = self.cu["cuMemGetAddressRange"](ctypes.byref(base), ctypes.byref(size), address)
        facts.append((result, result or (self.where(base.value), size.value)))
        for attribute in ATTRIBUTES:
            value = ctypes.c_ulonglong()
            result = self.cu["cuPointerGetAttribute"](ctypes.byref(value), attribute, address)
            facts.append((attribute, result, self._value(attribute, value.value, offset)))
        count = len(ATTRIBUTES)
        values = [ctypes.c_ulonglong() for _ in ATTRIBUTES]
        result = self.cu["cuPointerGetAttributes"](
            ctypes.c_uint(count),
            (ctypes.c_int * count)(*ATTRIBUTES),
            (ctypes.c_void_p * count)(*(ctypes.addressof(value) for value in values)),
            address,
        )
        facts.append(result)
        for attribute, value in zip(ATTRIBUTES, values, strict=True):
            facts.append((attribute, self._value(attribute, value.value, offset)))
        handle = ctypes.c_ulonglong()
        facts.append(self.cu["cuMemRetainAllocationHandle"](ctypes.byref(handle), address))
        return facts

    def _value(self, attribute: int, value: int, offset: int) -> object:
        if attribute == 1:
            return "the context" if value == self.context.value else value
        return self.where(value - offset if attribute == 3 else value) if attribute in (3, 11) else value

    def create_context(self, context: ctypes.c_ulonglong) -> int:
        return self.cu["cuCtxCreate"](ctypes.byref(context), 0, 0)

    def free_bytes(self) -> int:
        free, total = Size(), Size()
        assert self.cu["cuMemGetInfo"](ctypes.byref(free), ctypes.byref(total)) == 0
        return free.value

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        assert self.cu["cuStreamCreate"](ctypes.byref(stream), 1) == 0
        return stream


def sizes(program: Program) -> None:
    for size in (0, *SIZES, 1 << 60, (1 << 64) - 1):
        name = f"memory of {size}"
        program.say(size, program.alloc(name, size))
        if name in program.memory:
            for offset in {0, size // 2, size - 1}:
                program.say(name, offset, program.describe(name, offset))
    program.say("without a place", program.cu["cuMemAlloc"](None, Size(4 * MIB)))
    for name in list(program.memory):
        program.say("free", name, program.free(name))


def frees(program: Program) -> None:
    program.say("null", program.cu["cuMemFree"](Pointer(0)))
    for size in (1000, 8 * MIB):
        program.alloc("it", size)
        address = program.memory["it"]
        program.say("inside", program.cu["cuMemFree"](Pointer(address + 512)))
        program.say(program.free("it"))
        program.say("twice", program.cu["cuMemFree"](Pointer(address)))
    program.say("of nobody", program.cu["cuMemFree"](Pointer(12345)))


def pitches(program: Program) -> None:
    for width, height, element in (
        (1, 1, 4),
        (513, 9000, 4),
        (4096, 4096, 8),
        (8191, 1024, 16),
        (100, 100, 3),
        (0, 5, 4),
    ):
        address, pitch = Pointer(), Size()
        result = program.cu["cuMemAllocPitch"](
            ctypes.byref(address), ctypes.byref(pitch), Size(width), Size(height), element
        )
        program.say(width, height, element, result, pitch.value)
        if result == 0:
            program.memory["rows"] = address.value
            program.say(program.describe("rows"), program.free("rows"))


def frees_in_order(program: Program) -> None:
    """cuMemFreeAsync of memory of cuMemAlloc."""
    stream = program.stream()
    for size in (1000, 8 * MIB):
        for handle in (stream, None):
            program.alloc("it", size)
            address = program.memory.pop("it")
            program.say(program.cu["cuMemFreeAsync"](Pointer(address), handle))
            program.say(program.cu["cuCtxSynchronize"]())  # before it, a second free crashes the driver
            program.say("twice", program.cu["cuMemFree"](Pointer(address)))
    for turn in range(50):
        program.alloc("it", 64 * MIB)
        program.say(turn, program.cu["cuMemFreeAsync"](Pointer(program.memory.pop("it")), stream))


def captures(program: Program) -> None:
    """Allocating and freeing while a stream is captured, in each mode of the capture and of the thread."""
    for capture in (GLOBAL, THREAD_LOCAL, RELAXED):
        for mode in (GLOBAL, THREAD_LOCAL, RELAXED):
            for where in ("this thread", "another"):
                program.alloc("before", 8 * MIB)
                stream, graph = program.stream(), ctypes.c_void_p()
                program.say(capture, mode, where, program.cu["cuStreamBeginCapture"](stream, capture))

                def work(mode=mode):
                    value = ctypes.c_int(mode)
                    program.cu["cuThreadExchangeStreamCaptureMode"](ctypes.byref(value))
                    program.cu["cuCtxSetCurrent"](program.context)
                    program.say("alloc", program.alloc("during", 8 * MIB))
                    program.say("free", program.cu["cuMemFree"](Pointer(program.memory["before"])))
                    program.cu["cuThreadExchangeStreamCaptureMode"](ctypes.byref(value))

                if where == "another":
                    thread = threading.Thread(target=work)
                    thread.start()
                    thread.join()
                else:
                    work()
                result = program.cu["cuStreamEndCapture"](stream, ctypes.byref(graph))
                program.say("end", result, bool(graph.value))
                program.say("ended", program.cu["cuStreamEndCapture"](stream, ctypes.byref(graph)) != 0)
                for name in ("before", "during"):
                    if name in program.memory:
                        program.say(name, program.free(name))


def without_a_context(program: Program) -> None:
    program.alloc("it", 8 * MIB)
    popped = Pointer()
    program.say(program.cu["cuCtxPopCurrent"](ctypes.byref(popped)))
    program.say(program.alloc("other", 8 * MIB))
    program.say(program.describe("it")[0])
    program.say(program.cu["cuCtxPushCurrent"](popped))
    program.say(program.free("it"))


def contexts_that_end(program: Program) -> None:
    """Their memory ends with them, and another context's does not."""
    program.alloc("of the first", 8 * MIB)
    for end in ("Destroy", "Reset", "Release"):
        context = Pointer(program.context.value)
        if end == "Destroy":
            program.say(program.create_context(context))
        program.alloc("its", 64 * MIB)
        before = program.free_bytes()
        address = program.memory["its"]
        if end == "Destroy":
            program.say(program.cu["cuCtxDestroy"](context))
        else:
            program.say(program.cu[f"cuDevicePrimaryCtx{end}"](0))
            context = Pointer()
            program.say(program.cu["cuDevicePrimaryCtxRetain"](ctypes.byref(context), 0))
            program.say("the same handle", context.value == program.context.value)
        program.say(program.cu["cuCtxSetCurrent"](program.context))
        program.say(end, "given back", program.free_bytes() - before >= 64 * MIB)
        program.say("freed again", program.cu["cuMemFree"](Pointer(address)))
        if end != "Destroy":
            program.alloc("of the first", 8 * MIB)
    program.say(program.free("of the first"))


def children(program: Program) -> None:
    """A forked child cannot use CUDA; it gets the error that the driver gives."""
    program.alloc("it", 8 * MIB)
    child = os.fork()
    if child == 0:
        program.say("in the child", program.alloc("its", 8 * MIB), program.free("it"))
        os._exit(0)
    os.waitpid(child, 0)
    program.say(program.free("it"))


def unknown_names(program: Program) -> None:
    program.alloc("it", 8 * MIB)
    library, function, status = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_int()
    for name in (b"cuMemAlloc", b"cuNever", b"", b"cuMemFree", b"cuMemFreeAsync", b"cudaMalloc"):
        for version in (0, 3010, 11000, 12000, 99000):
            for flags in (0, LEGACY, PER_THREAD):
                arguments = (name, ctypes.byref(function), version, ctypes.c_ulonglong(flags))
                results = [library.cuGetProcAddress_v2(*arguments, ctypes.byref(status)), status.value]
                results += [bool(function.value), library.cuGetProcAddress(*arguments), bool(function.value)]
                program.say(name, version, flags, results)
    for name in ("cuNever", "cudaMalloc", "cuMemAllo", "curl_easy_init", "c", "", "cu"):
        program.say(name, hasattr(library, name), hasattr(ctypes.CDLL(None), name))


PROGRAMS = {
    "sizes": sizes,
    "frees": frees,
    "pitches": pitches,
    "frees in order": frees_in_order,
    "captures": captures,
    "without a context": without_a_context,
    "contexts that end": contexts_that_end,
    "children": children,
    "unknown names": unknown_names,
}
WAYS = ("dlsym", "cuGetProcAddress", "cuGetProcAddress_v2", "cuGetProcAddress of itself")


if __name__ == "__main__":
    for chosen in sys.argv[2:]:
        print(f"-- {chosen}")
        PROGRAMS[chosen](Program(sys.argv[1]))
