"""The launch gate on a real GPU: every framework's calls pass it, and threads of a suspended kernel wait there."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import notebook
from harness import until as until_async
from test_conformance import HERE, run

from jupyter_gpu_ckpt.cuda import fastpath

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def request(control: socket.socket, verb: str) -> dict[str, int]:
    control.sendall(f"{verb}\n".encode())
    reply = b""
    while not reply.endswith(b"\n"):
        reply += control.recv(4096)
    return json.loads(reply)


def closed_again_and_again(process: subprocess.Popen[str], path: Path) -> int:
    """Close the gate until a call has touched it, as long as the process runs; return how often one has."""
    touched = 0
    while process.poll() is None:
        time.sleep(0.02)
        if not path.exists():  # it listens from the first call on
            continue
        with socket.socket(socket.AF_UNIX) as control:
            control.settimeout(60)
            try:
                control.connect(str(path))
                request(control, "close 5000")
                given_up = time.monotonic() + 0.5
                while not (touches := request(control, "status")["touches"]) and time.monotonic() < given_up:
                    time.sleep(0.002)
                touched += touches > 0
                request(control, "open")
            except OSError:  # it has ended
                break
    return touched


@pytest.mark.parametrize("framework", ["torch", "cupy", "numba", "triton", "jax"])
def test_the_calls_of_each_framework_pass_the_gate_and_have_the_same_results(runtime_base, framework, record):
    needed = "numba.cuda" if framework == "numba" else framework
    if importlib.util.find_spec(needed.partition(".")[0]) is None or importlib.util.find_spec(needed) is None:
        pytest.skip(f"{framework} is not installed on this machine")
    plain = run(runtime_base, False, HERE / "framework_ways.py", framework, runtime_base / "fast")
    assert plain.returncode == 0, plain.stderr
    library = fastpath.preload()
    assert library.path is not None, library.why
    socket_path = runtime_base / "fast"
    variables = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONWARNINGS": "ignore"}
    variables |= {"LD_PRELOAD": str(library.path), fastpath.VARIABLE: str(socket_path)}
    command = [sys.executable, str(HERE / "framework_ways.py"), framework, str(socket_path)]
    with (
        open(runtime_base / "output", "w+") as output,
        open(runtime_base / "errors", "w+") as errors,
        subprocess.Popen(command, env=variables, stdout=output, stderr=errors, text=True) as process,
    ):
        try:
            touched = closed_again_and_again(process, socket_path)
            assert process.wait(60) == 0, (runtime_base / "errors").read_text()
        finally:
            process.kill()
    record(touched=touched)
    ours, theirs = json.loads((runtime_base / "output").read_text()), json.loads(plain.stdout)
    assert ours["digests"] == theirs["digests"]
    assert touched >= 1  # Numba's and Triton's programs meet it once while it is closed


#: A thread that launches all the time; each launch adds one to all elements.
LAUNCHES = """
import threading, torch
x, launches, stop = torch.zeros(1 << 23, device='cuda'), [0], threading.Event()
def launch():
    while not stop.is_set():
        x.add_(1); torch.cuda.current_stream().synchronize(); launches[0] += 1
thread = threading.Thread(target=launch); thread.start()
"""
RESULT = "stop.set(); thread.join(); print(launches[0] > {before}, bool((x == launches[0]).all()))"


@pytest.mark.parametrize("verb", ["suspend", "checkpoint"])
async def test_a_thread_that_launches_waits_at_the_gate_and_continues(tmp_path, runtime_base, verb, record):
    pytest.importorskip("torch", reason="PyTorch is not installed on this machine")
    async with notebook(tmp_path, runtime_base, fast_path="auto") as kernel:
        await kernel.run(LAUNCHES, 120)
        path = fastpath.FastPath(kernel.lifecycle.capsule, kernel.lifecycle.engine.cuda)
        for _ in range(2):
            before = int(await kernel.run("print(launches[0])"))
            await kernel.provisioner.suspend()
            await until_async(lambda path=path: path.touches() >= 1)
            if verb == "checkpoint":
                await kernel.provisioner.checkpoint()
            assert int(await kernel.run("print(launches[0])", 60)) >= before
            await kernel.settled("running")
            path = fastpath.FastPath(kernel.lifecycle.capsule, kernel.lifecycle.engine.cuda)
        record(launches=int(await kernel.run("print(launches[0])")))
        assert await kernel.run(RESULT.format(before=before), 60) == "True True"


#: Threads that make one call each all the time, of all kinds: those that end a suspended process where no gate keeps
#: them away, that wait at the driver's lock, that fail, and that read what the driver has in host memory.
CALLS = """
import collections, ctypes, threading, time
cu, context, counts, errors = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), collections.Counter(), []
def made(name, type, *arguments):
    value = type()
    assert cu[name](ctypes.byref(value), *arguments) == 0, name
    return value
assert cu.cuInit(0) == 0
context = made("cuDevicePrimaryCtxRetain", ctypes.c_void_p, 0)
assert cu.cuCtxSetCurrent(context) == 0
stream, other = (made("cuStreamCreate", ctypes.c_void_p, 1) for _ in range(2))
first, last, again = (made("cuEventCreate", ctypes.c_void_p, 0) for _ in range(3))
memory = made("cuMemAlloc_v2", ctypes.c_ulonglong, ctypes.c_size_t(8 << 20))
assert [cu.cuEventRecord(each, stream) for each in (first, last)] == [0, 0] and cu.cuCtxSynchronize() == 0
def place(type=ctypes.c_ulonglong): return ctypes.byref(type())
def create():
    event = ctypes.c_void_p()
    return cu.cuEventCreate(ctypes.byref(event), 2) or cu.cuEventDestroy_v2(event)
def allocate(size=5000):
    address = ctypes.c_ulonglong()
    return cu.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) or cu.cuMemFree_v2(address)
calls = dict(
    stream_query=lambda: cu.cuStreamQuery(stream), own_query=lambda: cu.cuStreamQuery_ptsz(None),
    stream_wait=lambda: cu.cuStreamSynchronize(stream), own_wait=lambda: cu.cuStreamSynchronize_ptsz(None),
    event_query=lambda: cu.cuEventQuery(first), event_wait=lambda: cu.cuEventSynchronize(last),
    elapsed=lambda: cu.cuEventElapsedTime(place(ctypes.c_float), first, last), wait=lambda: cu.cuCtxSynchronize(),
    record=lambda: cu.cuEventRecord(again, other), order=lambda: cu.cuStreamWaitEvent(other, last, 0),
    fill=lambda: cu.cuMemsetD8Async(memory, ctypes.c_ubyte(7), ctypes.c_size_t(4096), other),
    copy=lambda: cu.cuMemcpyDtoH_v2(ctypes.create_string_buffer(4096), memory, ctypes.c_size_t(4096)),
    free_memory=lambda: cu.cuMemGetInfo_v2(place(), place()), captured=lambda: cu.cuStreamIsCapturing(stream, place()),
    pointer=lambda: cu.cuPointerGetAttribute(place(), 2, memory), create=create, allocate=allocate,
    serve=lambda: allocate(4 << 20),
)
def repeat(name, call):
    assert cu.cuCtxSetCurrent(context) == 0
    while not stop.is_set():
        if result := call(): errors.append((name, result))
        counts[name] += 1
        time.sleep(0.01)
stop = threading.Event()
threads = [threading.Thread(target=repeat, args=each) for each in calls.items()]
for each in threads: each.start()
"""
MORE = """
before = dict(counts); deadline = time.monotonic() + 30
while any(counts[each] <= before.get(each, 0) for each in calls) and time.monotonic() < deadline: time.sleep(0.01)
print(sorted(each for each in calls if counts[each] <= before.get(each, 0)), errors[:9])
"""


@pytest.mark.parametrize("verb", ["suspend", "checkpoint"])
async def test_no_call_of_a_thread_ends_a_suspended_kernel_or_fails(tmp_path, runtime_base, verb):
    async with notebook(tmp_path, runtime_base, fast_path="auto") as kernel:
        await kernel.run(CALLS, 120)
        assert await kernel.run(MORE) == "[] []"
        for _ in range(2):
            await kernel.provisioner.suspend()
            await asyncio.sleep(1)  # a hundred calls of each thread that does not wait
            if verb == "checkpoint":
                await kernel.provisioner.checkpoint()
            assert await kernel.run(MORE, 120) == "[] []"
            await kernel.settled("running")
        await kernel.run("stop.set(); [each.join() for each in threads]")
