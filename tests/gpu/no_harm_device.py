"""Small programs that use a real GPU as programs do that the library must not disturb; they print all that they see.

Run as ``python no_harm_device.py PROGRAM ...``, with and without the library; the output must be the same.  What a
driver's double has, too, is in `cuda/native/no_harm.py`.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "cuda" / "native"))
from conformance import MIB, Pointer, Size
from no_harm import SERVED, SMALL, Watcher

#: Adds 1 to each number from the address on; and writes to where no memory is.
PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry add_one(.param .u64 memory)
{
    .reg .u64 %at, %offset;
    .reg .u32 %number;
    ld.param.u64 %at, [memory];
    mov.u32 %number, %tid.x;
    mul.wide.u32 %offset, %number, 4;
    add.u64 %at, %at, %offset;
    ld.global.u32 %number, [%at];
    add.u32 %number, %number, 1;
    st.global.u32 [%at], %number;
    ret;
}
"""
COUNT = 32
#: CU_LAUNCH_ATTRIBUTE_COOPERATIVE, CU_RESOURCE_TYPE_LINEAR, CU_AD_FORMAT_FLOAT, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
COOPERATIVE, LINEAR, FLOAT, DMA_BUF = 2, 2, 0x20, 1
#: CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
PINNED, ON_DEVICE, RELEASE_THRESHOLD = 1, 1, 4


class LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class ArrayDescriptor(ctypes.Structure):
    _fields_ = (("width", Size), ("height", Size), ("format", ctypes.c_int), ("channels", ctypes.c_uint))


class Device(Watcher):
    """A program with a kernel of its own."""

    def __init__(self) -> None:
        super().__init__("dlsym")

    def kernel(self) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        assert self.cu["cuModuleLoadData"](ctypes.byref(module), PTX) == 0
        assert self.cu["cuModuleGetFunction"](ctypes.byref(function), module, b"add_one") == 0
        return function

    def arguments(self, address: int) -> tuple[object, object]:
        """Return a launch's parameters, and what must live as long as they do."""
        value = Pointer(address)
        return (ctypes.c_void_p * 1)(ctypes.addressof(value)), value

    def zero(self, address: int) -> int:
        return self.cu["cuMemsetD32_v2"](Pointer(address), ctypes.c_uint(0), Size(COUNT))

    def device_attribute(self, attribute: int) -> tuple[int, int]:
        value = ctypes.c_int()
        return self.cu["cuDeviceGetAttribute"](ctypes.byref(value), attribute, 0), value.value

    def numbers(self, address: int) -> object:
        found = (ctypes.c_uint * COUNT)()
        result = self.cu["cuMemcpyDtoH_v2"](found, Pointer(address), Size(4 * COUNT))
        return result, sorted(set(found))

    def memory_of_both_sizes(self) -> Iterator[tuple[str, int]]:
        for name, size in (("small", SMALL), ("served", SERVED)):
            self.say(name, self.alloc(name, size), self.zero(self.memory[name]))
            yield name, self.memory[name]
            self.say(name, self.free(name))


def copies(program: Device) -> None:
    host = ctypes.create_string_buffer(bytes(range(256)) * 16)
    back = ctypes.create_string_buffer(4096)
    program.alloc("other", SERVED)
    other = program.memory["other"]
    for name, at in program.memory_of_both_sizes():
        for place in (at, at + 512):
            program.say(name, program.cu["cuMemcpyHtoD_v2"](Pointer(place), host, Size(4000)))
            program.say(name, program.cu["cuMemcpyDtoD_v2"](Pointer(other), Pointer(place), Size(4000)))
            program.say(name, program.cu["cuMemcpyDtoH_v2"](back, Pointer(other), Size(4000)), back.raw[:64])
            program.say(name, program.cu["cuMemcpy"](Pointer(place), Pointer(other), Size(4000)))
        for width, value in ((8, 7), (16, 300), (32, 70000)):
            count = Size(100)
            program.say(program.cu[f"cuMemsetD{width}_v2"](Pointer(at), ctypes.c_uint(value), count))
            program.say(program.cu[f"cuMemsetD2D{width}_v2"](Pointer(at), Size(512), value, Size(10), Size(5)))
            program.say(program.cu["cuMemcpyDtoH_v2"](back, Pointer(at), Size(400)), back.raw[:40])
    program.say("nowhere", program.cu["cuMemcpyHtoD_v2"](Pointer(0), host, Size(16)))
    program.say("nothing", program.cu["cuMemcpyHtoD_v2"](Pointer(other), host, Size(0)))
    program.say(program.free("other"), program.cu["cuMemcpyDtoH_v2"](back, Pointer(0), Size(16)))


def memory_of_the_host(program: Device) -> None:
    at, device, flags = ctypes.c_void_p(), Pointer(), ctypes.c_uint()
    for size in (0, SMALL, 8 * MIB):
        program.say(size, program.cu["cuMemAllocHost_v2"](ctypes.byref(at), Size(size)))
        if size:
            program.say(program.cu["cuMemHostGetDevicePointer_v2"](ctypes.byref(device), at, 0))
            program.say(device.value == at.value, program.cu["cuMemHostGetFlags"](ctypes.byref(flags), at), flags.value)
            program.memory["host"] = at.value or 0
            program.everything("host", program.memory["host"] + 100)
            program.say(program.cu["cuMemFree"](Pointer(program.memory.pop("host"))), program.cu["cuMemFreeHost"](at))
        for wanted in range(9):
            result = program.cu["cuMemHostAlloc"](ctypes.byref(at), Size(size), wanted)
            program.say(size, wanted, result)
            if result == 0:
                program.say(program.cu["cuMemHostGetFlags"](ctypes.byref(flags), at), flags.value)
                program.say(program.cu["cuMemFreeHost"](at))
    program.say(program.cu["cuMemFreeHost"](None), program.cu["cuMemFreeHost"](ctypes.c_void_p(4096)))


def registered_memory(program: Device) -> None:
    raw = ctypes.create_string_buffer(4 * MIB + 4096)
    at = ctypes.c_void_p(-(-ctypes.addressof(raw) // 4096) * 4096)
    device, register, end = Pointer(), program.cu["cuMemHostRegister_v2"], program.cu["cuMemHostUnregister"]
    for flags in (0, 1, 2, 3, 4, 64):
        first = register(at, Size(4 * MIB), flags)
        program.say(flags, first, register(at, Size(4 * MIB), flags))
        program.say(program.cu["cuMemHostGetDevicePointer_v2"](ctypes.byref(device), at, 0), end(at), end(at))
    program.say(register(None, Size(4096), 0), register(at, Size(0), 0), end(None))
    program.alloc("it", SERVED)
    program.say(register(ctypes.c_void_p(program.memory["it"]), Size(4096), 0), program.free("it"))


def arrays_and_textures(program: Device) -> None:
    array, texture = ctypes.c_void_p(), ctypes.c_ulonglong()
    host, back = ctypes.create_string_buffer(bytes(range(256)) * 16), ctypes.create_string_buffer(4096)
    wanted = ArrayDescriptor(1024, 0, FLOAT, 1)
    program.say(program.cu["cuArrayCreate_v2"](ctypes.byref(array), ctypes.byref(wanted)))
    for name, at in program.memory_of_both_sizes():
        program.say(name, program.cu["cuMemcpyHtoA_v2"](array, Size(0), host, Size(4096)))
        program.say(name, program.cu["cuMemcpyAtoD_v2"](Pointer(at), array, Size(0), Size(4096)))
        program.say(name, program.cu["cuMemcpyDtoA_v2"](array, Size(0), Pointer(at), Size(4096)))
        program.say(name, program.cu["cuMemcpyAtoH_v2"](back, array, Size(0), Size(4096)), back.raw == host.raw[:4096])
        for offset in (0, 1, 512):
            linear = struct.pack("<i4xQiIQ104xI4x", LINEAR, at + offset, FLOAT, 1, 1024, 0)
            result = program.cu["cuTexObjectCreate"](ctypes.byref(texture), linear, bytes(104), None)
            program.say(name, offset, result)
            if result == 0:
                program.say(program.cu["cuTexObjectDestroy"](texture))
    program.say(program.cu["cuArrayDestroy"](array))
    for width in (0, 1 << 40):
        wanted = ArrayDescriptor(width, 0, FLOAT, 1)
        program.say(width, program.cu["cuArrayCreate_v2"](ctypes.byref(array), ctypes.byref(wanted)))


def launches(program: Device) -> None:
    kernel, own, dims = program.kernel(), program.stream(), (1, 1, 1, COUNT, 1, 1, 0)
    for name, at in program.memory_of_both_sizes():
        values, _ = program.arguments(at)
        for stream in (None, ctypes.c_void_p(1), ctypes.c_void_p(2), own):
            for ending in ("", "_ptsz"):
                result = program.cu[f"cuLaunchKernel{ending}"](kernel, *dims, stream, values, None)
                program.say(name, ending, result, program.cu["cuStreamSynchronize"](stream))
            result = program.cu["cuLaunchCooperativeKernel"](kernel, *dims, stream, values)
            program.say(name, "cooperative", result, program.cu["cuStreamSynchronize"](stream), program.numbers(at))
            for attribute, value in ((None, 0), (COOPERATIVE, 1), (COOPERATIVE, 0), (999, 1)):
                text = ctypes.create_string_buffer(struct.pack("<i4xi60x", attribute or 0, value), 72)
                config = LaunchConfig(
                    (1, 1, 1), (COUNT, 1, 1), 0, stream, ctypes.addressof(text), int(attribute is not None)
                )
                result = program.cu["cuLaunchKernelEx"](ctypes.byref(config), kernel, values, None)
                program.say(name, attribute, value, result, program.cu["cuCtxSynchronize"](), program.numbers(at))
        program.say("too many", program.cu["cuLaunchKernel"](kernel, 1, 1, 1, 5000, 1, 1, 0, own, values, None))
        program.say("none", program.cu["cuLaunchKernel"](kernel, 0, 1, 1, 1, 1, 1, 0, own, values, None))
        program.say("nothing", program.cu["cuLaunchKernel"](None, 1, 1, 1, 1, 1, 1, 0, own, values, None))
    program.say(program.cu["cuStreamDestroy"](own))


def graphs(program: Device) -> None:
    kernel, stream, dims = program.kernel(), program.stream(), (1, 1, 1, COUNT, 1, 1, 0)
    for name, at in program.memory_of_both_sizes():
        graph, runnable, made = ctypes.c_void_p(), ctypes.c_void_p(), Pointer()
        program.say(program.cu["cuStreamBeginCapture"](stream, 1))
        values, _ = program.arguments(at)
        program.say(name, program.cu["cuLaunchKernel"](kernel, *dims, stream, values, None))
        program.say(name, program.cu["cuMemAllocAsync"](ctypes.byref(made), Size(SERVED), stream))
        others, _ = program.arguments(made.value)
        program.say(name, program.cu["cuLaunchKernel"](kernel, *dims, stream, others, None))
        program.say(name, program.cu["cuMemFreeAsync"](Pointer(made.value), stream))
        program.say(program.cu["cuStreamEndCapture"](stream, ctypes.byref(graph)), bool(graph.value))
        program.say(program.cu["cuGraphInstantiateWithFlags"](ctypes.byref(runnable), graph, ctypes.c_ulonglong(0)))
        for _ in range(3):
            program.say(program.cu["cuGraphLaunch"](runnable, stream), program.cu["cuStreamSynchronize"](stream))
            program.say(program.numbers(at))
        program.say(program.cu["cuGraphExecDestroy"](runnable), program.cu["cuGraphDestroy"](graph))
    program.say(program.cu["cuStreamDestroy"](stream))


def memory_of_pools(program: Device) -> None:
    stream, at, pool = program.stream(), Pointer(), ctypes.c_void_p()
    program.say(program.cu["cuDeviceGetDefaultMemPool"](ctypes.byref(pool), 0))
    for size in (0, SMALL, SERVED, 1 << 60):
        for on in (stream, None):
            result = program.cu["cuMemAllocAsync"](ctypes.byref(at), Size(size), on)
            program.say(size, result)
            if result == 0 and at.value:
                program.memory["pooled"] = at.value
                program.say(program.cu["cuCtxSynchronize"](), program.zero(at.value), program.numbers(at.value))
                for each in (1, 2, 8, 9, 10, 14, 17):
                    program.say(each, program.attribute(each, at.value))
                program.say(program.cu["cuMemFreeAsync"](Pointer(program.memory.pop("pooled")), on))
    program.say(program.cu["cuMemPoolTrimTo"](pool, Size(0)), program.cu["cuStreamSynchronize"](stream))
    program.say(program.cu["cuMemAllocAsync"](ctypes.byref(at), Size(SERVED), stream))
    program.say("freed at once", program.cu["cuMemFree"](Pointer(at.value)), program.cu["cuStreamDestroy"](stream))


def pools_of_a_program(program: Device) -> None:
    """Memory of pools that a program makes itself, once with a threshold over which it is given back."""
    stream = program.stream()
    for threshold in (0, 64 * MIB):
        pool, at = ctypes.c_void_p(), Pointer()
        wanted = struct.pack("<iiiiQQH54x", PINNED, 0, ON_DEVICE, 0, 0, 0, 0)
        program.say(threshold, program.cu["cuMemPoolCreate"](ctypes.byref(pool), wanted))
        limit = ctypes.c_ulonglong(threshold)
        program.say(program.cu["cuMemPoolSetAttribute"](pool, RELEASE_THRESHOLD, ctypes.byref(limit)))
        for size in (SMALL, SERVED, 1 << 60):
            for _ in range(2):
                result = program.cu["cuMemAllocFromPoolAsync"](ctypes.byref(at), Size(size), pool, stream)
                program.say(size, result)
                if result == 0:
                    program.say(program.cu["cuStreamSynchronize"](stream), program.zero(at.value))
                    program.say(program.numbers(at.value), [program.attribute(each, at.value) for each in (2, 9, 17)])
                    program.say(program.cu["cuMemFreeAsync"](at, stream), program.cu["cuStreamSynchronize"](stream))
        program.say(program.cu["cuMemPoolTrimTo"](pool, Size(0)), program.cu["cuMemPoolDestroy"](pool))
    program.say(program.cu["cuStreamDestroy"](stream))


def dma_buffers(program: Device) -> None:
    """Export memory for GPUDirect, as a descriptor; the sizes must be those of the host's pages."""
    program.say([program.device_attribute(each) for each in (102, 103, 110, 115, 116, 117, 118, 119, 124)])
    for name, size in (("round", 8 * MIB), ("served", SERVED), ("small", SMALL)):
        program.alloc(name, size)
        for offset, length in ((0, 2 * MIB), (0, 8 * MIB), (4096, 4096), (100, 4096), (0, 100), (0, 0), (0, 1 << 40)):
            for kind, flags in ((DMA_BUF, 0), (DMA_BUF, 1 << 40), (0, 0), (99, 0)):
                descriptor = ctypes.c_int(-1)
                address = Pointer(program.memory[name] + offset)
                result = program.cu["cuMemGetHandleForAddressRange"](
                    ctypes.byref(descriptor), address, Size(length), kind, ctypes.c_ulonglong(flags)
                )
                if (size % (2 * MIB) == 0 and offset + length <= size) or kind != DMA_BUF:
                    program.say(name, offset, length, kind, flags, result)
                if result == 0:
                    os.close(descriptor.value)
        on = ctypes.c_uint(1)
        program.say("sync", program.cu["cuPointerSetAttribute"](ctypes.byref(on), 6, Pointer(program.memory[name])))
        program.say(name, program.attribute(6, program.memory[name]), program.attribute(15, program.memory[name]))
        program.say(name, program.free(name))


def peers(program: Device) -> None:
    """Copy between contexts, of one GPU or of two."""
    count, can, other = ctypes.c_int(), ctypes.c_int(), Pointer()
    program.say(program.cu["cuDeviceGetCount"](ctypes.byref(count)), count.value)
    second = 1 if count.value > 1 else 0
    program.say(program.cu["cuDeviceCanAccessPeer"](ctypes.byref(can), 0, second), can.value)
    program.alloc("first's", SERVED)
    program.say(program.zero(program.memory["first's"]))
    if second:
        program.say(program.cu["cuDevicePrimaryCtxRetain"](ctypes.byref(other), second))
        program.say(program.cu["cuCtxSetCurrent"](other))
    else:
        program.say(program.create_context(other))
    program.alloc("second's", SERVED)
    at, from_ = Pointer(program.memory["second's"]), Pointer(program.memory["first's"])
    program.say(program.cu["cuMemcpyPeer"](at, other, from_, program.context, Size(MIB)), program.numbers(at.value))
    program.say([program.cu["cuCtxEnablePeerAccess"](program.context, 0) for _ in range(2)])
    program.say(program.cu["cuMemcpyDtoD_v2"](at, from_, Size(MIB)), program.numbers(at.value))
    program.say(program.cu["cuCtxDisablePeerAccess"](program.context), program.free("second's"))
    ended = program.cu["cuDevicePrimaryCtxRelease"](second) if second else program.cu["cuCtxDestroy"](other)
    program.say(ended, program.cu["cuCtxSetCurrent"](program.context), program.free("first's"))


def tables_and_attributes(program: Device) -> None:
    table = ctypes.c_void_p()
    program.say([program.cu["cuGetExportTable"](ctypes.byref(table), text) for text in (bytes(16), b"\7" * 16)])
    for attribute in range(1, 150):
        program.say(attribute, program.device_attribute(attribute))
    version, limit = ctypes.c_int(), Size()
    program.say(program.cu["cuDriverGetVersion"](ctypes.byref(version)), version.value)
    program.say([(program.cu["cuCtxGetLimit"](ctypes.byref(limit), each), limit.value) for each in range(8)])


def events_of_each_kind(program: Device) -> None:
    first, last, passed = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float()
    stream = program.stream()
    for flags in (0, 1, 2, 3, 4, 99):
        made = program.cu["cuEventCreate"](ctypes.byref(first), flags)
        program.say(flags, made)
        if made == 0:
            program.say(program.cu["cuEventCreate"](ctypes.byref(last), flags))
            for on in (stream, None):
                program.alloc("it", SERVED)
                program.say(program.cu["cuEventRecord"](first, on))
                program.say(program.cu["cuMemFreeAsync"](Pointer(program.memory.pop("it")), on))
                program.say(program.cu["cuEventRecord"](last, on), program.cu["cuStreamWaitEvent"](stream, last, 0))
                program.say(program.cu["cuEventSynchronize"](last), program.cu["cuEventQuery"](first))
                program.say(program.cu["cuEventElapsedTime"](ctypes.byref(passed), first, last))
            program.say([program.cu["cuEventDestroy"](each) for each in (first, last)])
    program.say(program.cu["cuStreamDestroy"](stream))


def nvml(program: Device) -> None:
    """Use NVML in the same process."""
    library, device, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), ctypes.c_uint()
    name, memory = ctypes.create_string_buffer(96), (ctypes.c_ulonglong * 3)()
    program.alloc("it", SERVED)
    program.say(library.nvmlInit_v2(), library.nvmlDeviceGetCount_v2(ctypes.byref(count)), count.value)
    program.say(library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)))
    program.say(library.nvmlDeviceGetName(device, name, 96), name.value)
    program.say(library.nvmlDeviceGetMemoryInfo(device, memory), memory[0], program.free("it"))
    program.say(library.nvmlShutdown(), library.nvmlShutdown())


def after_an_illegal_access(program: Device) -> None:
    """Print each call's error in a context whose kernel has failed."""
    kernel, own = program.kernel(), program.stream()
    for name in ("small", "served"):
        program.alloc(name, SMALL if name == "small" else SERVED)
    values, _ = program.arguments(64)
    program.say(program.cu["cuLaunchKernel"](kernel, 1, 1, 1, COUNT, 1, 1, 0, own, values, None))
    program.say(program.cu["cuCtxSynchronize"](), program.cu["cuStreamQuery"](own))
    program.say("alloc", program.alloc("another small", SMALL), program.alloc("another", SERVED))
    program.say("free", program.free("small"), program.free("served"))
    program.say("again", program.cu["cuCtxSynchronize"]())


def beyond_an_allocation(program: Device) -> None:
    """Read and write behind the end of an allocation, which a tool has to find; the driver may not."""
    kernel = program.kernel()
    program.say(program.alloc("served", SERVED))
    values, _ = program.arguments(program.memory["served"] + SERVED // 4 * 4 - 4)
    program.say(program.cu["cuLaunchKernel"](kernel, 1, 1, 1, COUNT, 1, 1, 0, None, values, None))
    program.cu["cuCtxSynchronize"]()


PROGRAMS: dict[str, Callable[[Device], None]] = {
    function.__name__.replace("_", " "): function
    for function in (
        copies,
        memory_of_the_host,
        registered_memory,
        arrays_and_textures,
        launches,
        graphs,
        memory_of_pools,
        pools_of_a_program,
        dma_buffers,
        peers,
        tables_and_attributes,
        events_of_each_kind,
        nvml,
        after_an_illegal_access,
    )
}

#: Not the same with the library and without it, but for a tool that looks for mistakes.
MISTAKES: dict[str, Callable[[Device], None]] = {"beyond an allocation": beyond_an_allocation}

if __name__ == "__main__":
    for chosen in sys.argv[1:]:
        print(f"-- {chosen}", flush=True)
        (PROGRAMS | MISTAKES)[chosen](Device())
