"""A program that lets processes of multiprocessing, and one of another kind, map its device memory (CUDA IPC).

Run as ``python shared_memory.py LIBRARY... -- METHOD SOCKET``; the double's device memory can be read by ctypes.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import socket
import subprocess
import sys

MIB = 1 << 20
SIZE = 4 * MIB


class Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 64),)


def driver() -> ctypes.CDLL:
    cu = ctypes.CDLL("libcuda.so.1")
    cu.cuIpcOpenMemHandle_v2.argtypes = (ctypes.c_void_p, Handle, ctypes.c_uint)
    context = ctypes.c_ulonglong()
    assert cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == cu.cuCtxSetCurrent(context) == 0
    return cu


def open_twice(raw: bytes, answers: multiprocessing.Queue[object]) -> None:
    """Put a worker's findings into ``answers``, and write to the shared memory."""
    cu, handle = driver(), Handle.from_buffer_copy(raw)
    first, second = ctypes.c_ulonglong(), ctypes.c_ulonglong()
    results = [cu.cuIpcOpenMemHandle_v2(ctypes.byref(at), handle, 1) for at in (first, second)]
    content = ctypes.string_at(first.value, SIZE) == b"\5" * SIZE
    results += [cu.cuIpcCloseMemHandle(second), first.value == second.value, content]
    ctypes.memset(first.value, 6, SIZE)
    results += [cu.cuIpcCloseMemHandle(first), cu.cuIpcCloseMemHandle(first)]
    outside = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    answers.put([*results, "LD_PRELOAD" in outside or "GPU_CKPT_SHARED" in outside])


def give(handles: multiprocessing.Queue[bytes], done: multiprocessing.Queue[object]) -> None:
    """Put a handle of a worker's own memory into ``handles``, and keep the memory until ``done``."""
    cu, address, handle = driver(), ctypes.c_ulonglong(), Handle()
    assert cu.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(SIZE)) == 0
    ctypes.memset(address.value, 9, SIZE)
    assert cu.cuIpcGetMemHandle(ctypes.byref(handle), address) == 0
    handles.put(bytes(handle))
    done.get()


def opened(raw: bytes) -> tuple[int, bool]:
    """Open a handle; return the result, and whether the memory is a worker's of `give`."""
    cu, address = driver(), ctypes.c_ulonglong()
    result = cu.cuIpcOpenMemHandle_v2(ctypes.byref(address), Handle.from_buffer_copy(raw), 1)
    return result, result == 0 and ctypes.string_at(address.value, SIZE) == b"\x09" * SIZE


def open_given(raw: bytes, answers: multiprocessing.Queue[object]) -> None:
    answers.put(opened(raw))


def of_a_worker(context: multiprocessing.context.BaseContext) -> None:
    handles, done, answers = context.Queue(), context.Queue(), context.Queue()
    giver = context.Process(target=give, args=(handles, done))
    giver.start()
    raw = handles.get(timeout=60)
    print("of a worker, in the kernel", *opened(raw))
    other = context.Process(target=open_given, args=(raw, answers))
    other.start()
    print("of a worker, in another", *answers.get(timeout=60))
    done.put(None)
    giver.join()
    other.join()


def ask(path: str, verb: str) -> dict[str, int]:
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(path)
        control.sendall(f"{verb}\n".encode())
        return json.loads(control.recv(4096))


def main(method: str, path: str, of: str = "kernel") -> None:
    cu = driver()
    shared, other = ctypes.c_ulonglong(), ctypes.c_ulonglong()
    for address, value in ((shared, 5), (other, 7)):
        assert cu.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(SIZE)) == 0
        ctypes.memset(address.value, value, SIZE)
    handle = Handle()
    print("handle", cu.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_ulonglong(shared.value + 5)))
    again = ctypes.c_ulonglong()
    print("opened by its own process", cu.cuIpcOpenMemHandle_v2(ctypes.byref(again), handle, 1))
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    worker = context.Process(target=open_twice, args=(bytes(handle), answers))
    worker.start()
    print("worker", answers.get(timeout=60))
    worker.join()
    print("written by the worker", ctypes.string_at(shared.value, SIZE) == b"\6" * SIZE)
    print("allocations", ask(path, "status")["bytes"])
    print("exports that are refused", [ask(path, f"export {process} 1")["cuda"] for process in (1, 0)])
    print("freed", cu.cuMemFree_v2(shared), cu.cuMemFree_v2(other))
    handles = set()
    for _ in range(20):  # at the same address, perhaps, and never the same memory
        assert cu.cuMemAlloc_v2(ctypes.byref(shared), ctypes.c_size_t(SIZE)) == 0
        assert cu.cuIpcGetMemHandle(ctypes.byref(handle), shared) == 0
        handles.add(bytes(handle))
        assert cu.cuMemFree_v2(shared) == 0
    print("handles", len(handles))
    if of == "both":
        of_a_worker(context)


if __name__ == "__main__":
    main(*sys.argv[1:])
