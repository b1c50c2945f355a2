"""The kernel of `cuda/native/zero_parts.c`, run alone on a GPU or on the double of its driver: ``python zero_scan.py``.

Prints what is wrong with its answers; nothing if they are right.  ``LIBRARY``, an argument, is a build of the library,
which contains the kernel's text.
"""

from __future__ import annotations

import ctypes
import random
import sys
from pathlib import Path
from typing import Any

KERNEL = b"gpu_ckpt_zero_parts"
#: Bytes that one turn of all threads of a block reads.
TURN = 16 << 10
PART = 4 << 20
THREADS = 256
PORTABLE_AND_MAPPED = 3
UNTOUCHED = 77

Address = ctypes.c_ulonglong
Size = ctypes.c_size_t


class Part(ctypes.Structure):
    _fields_ = (("address", Address), ("bytes", Size))


def text(library: Path, kernel: bytes) -> bytes:
    """Return the kernel's text, as the library has it."""
    content = library.read_bytes()
    found = content.rindex(b".version ", 0, content.index(b".visible .entry " + kernel + b"("))
    return content[found : content.index(b"\0", found)]


class Device:
    """A context on the first GPU, with a kernel."""

    def __init__(self, library: Path, kernel: bytes = KERNEL) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        context, module = ctypes.c_void_p(), ctypes.c_void_p()
        self.kernel = ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        self.call("cuModuleLoadData", ctypes.byref(module), text(library, kernel))
        self.call("cuModuleGetFunction", ctypes.byref(self.kernel), module, kernel)
        self.stream = ctypes.c_void_p()
        self.call("cuStreamCreate", ctypes.byref(self.stream), 1)

    def call(self, function: str, *arguments: object) -> None:
        result = getattr(self._driver, function)(*arguments)
        if result != 0:
            raise OSError(f"{function}: {result}")

    def allocate(self, content: bytes) -> int:
        address = Address()
        self.call("cuMemAlloc_v2", ctypes.byref(address), Size(len(content)))
        self.write(address.value, content)
        return address.value

    def write(self, address: int, content: bytes) -> None:
        self.call("cuMemcpyHtoD_v2", Address(address), content, Size(len(content)))

    def scan(self, parts: list[tuple[int, int]], more_blocks: int = 0) -> list[int]:
        """Return the kernel's answers for ranges of memory; 0: only zeros."""
        bytes_needed = (len(parts) + more_blocks) * (ctypes.sizeof(Part) + 4) + 4096
        memory = ctypes.create_string_buffer(bytes_needed + 4096)
        start = (ctypes.addressof(memory) + 4095) // 4096 * 4096
        listed = (Part * len(parts)).from_address(start)
        answers = (ctypes.c_uint * (len(parts) + more_blocks)).from_address(start + len(parts) * ctypes.sizeof(Part))
        for at, part in enumerate(parts):
            listed[at] = Part(*part)
        answers[:] = [UNTOUCHED] * len(answers)
        self.launch(len(parts) + more_blocks, start, bytes_needed, (listed, answers), ctypes.c_uint(len(parts)))
        return list(answers)

    def launch(self, blocks: int, start: int, size: int, arrays: tuple[ctypes.Array[Any], ...], *others: Any) -> None:
        """Run the kernel with arguments: arrays in memory at ``start``, which gets registered, and others."""
        self.call("cuMemHostRegister_v2", ctypes.c_void_p(start), Size(size), PORTABLE_AND_MAPPED)
        there = [Address() for _ in arrays]
        for address, of in zip(there, arrays, strict=True):
            self.call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), ctypes.c_void_p(ctypes.addressof(of)), 0)
        arguments = [*there, *others]
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        grid = (blocks, 1, 1, THREADS, 1, 1, 0)
        self.call("cuLaunchKernel", self.kernel, *grid, self.stream, pointers, None)
        self.call("cuStreamSynchronize", self.stream)
        self.call("cuMemHostUnregister", ctypes.c_void_p(start))


def faults(device: Device, seed: int, rounds: int) -> list[str]:
    """Return what is wrong: one byte anywhere is seen, and none that is not in the part."""
    random_ = random.Random(seed)
    zeros, wrong = bytes(3 * PART), list[str]()

    def expect(what: str, found: list[int], wanted: list[int]) -> None:
        if found != wanted:
            wrong.append(f"{what}: {found} instead of {wanted}")

    memory = device.allocate(zeros)
    middle = (memory + PART, PART)
    expect("zeros", device.scan([(memory, PART), middle, (memory + 2 * PART, PART)]), [0, 0, 0])
    expect("more blocks than parts", device.scan([middle], more_blocks=3), [0, UNTOUCHED, UNTOUCHED, UNTOUCHED])
    edges = [0, 1, 15, 16, 4095, 4096, TURN - 1, TURN, PART // 2 - 1, PART // 2, PART - TURN, PART - 16, PART - 1]
    for at in [*edges, *(random_.randrange(PART) for _ in range(rounds))]:
        value = 1 << random_.randrange(8)
        device.write(memory + PART + at, bytes([value]))
        parts = [(memory, PART), middle, (memory + 2 * PART, PART), (memory + PART, PART // 2), (memory, TURN)]
        expect(f"{value} at {at}", device.scan(parts), [0, 1, 0, int(at < PART // 2), 0])
        device.write(memory + PART + at, b"\0")
    many = [(memory + TURN * (at % (3 * PART // TURN)), TURN) for at in range(5000)]
    device.write(memory + 2 * TURN, b"\x80")
    expect("many parts", device.scan(many), [int(at - memory == 2 * TURN) for at, _ in many])
    return wrong


if __name__ == "__main__":
    for line in faults(Device(Path(sys.argv[1])), seed=7, rounds=int(sys.argv[2])):
        print(line)
