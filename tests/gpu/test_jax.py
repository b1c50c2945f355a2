"""JAX kernels are restored: a thread of JAX waits in the CUDA driver, and must not run before the driver is done."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import textwrap
from pathlib import Path

import pytest
from harness import alive, notebook
from waiting import until

from jupyter_gpu_ckpt.errors import UnsupportedCuda

pytestmark = pytest.mark.gpu

#: Checkpoints of each way to have memory; 20 were asked for once (docs/measurements.md).
ROUNDS = int(os.environ.get("GPU_CHECK_ROUNDS", "3"))
#: Bytes that JAX takes at its start, where it does.
MEMORY = 4 << 30
#: Of one kernel; then a fresh one, for what decides is where its threads are.
OF_ONE = int(os.environ.get("GPU_CHECK_ROUNDS_OF_ONE", "4"))
SETUP = """
import jax, jax.numpy as jnp
from jax import random
key = random.PRNGKey(7)
devices = jax.devices()
arrays = [
    jax.device_put(random.normal(random.fold_in(key, number), (1024, 1024)), devices[number % len(devices)])
    for number in range(8)
]
step = jax.jit(lambda x: jnp.tanh(x @ x.T / 1024))
results = [step(array).block_until_ready() for array in arrays]
"""
DIGEST = """
import hashlib, numpy
print(hashlib.sha256(b"".join(numpy.asarray(each).tobytes() for each in [*arrays, *results])).hexdigest())
"""
COMPUTES = """
again = [step(array).block_until_ready() for array in arrays]
print(all(bool((one == other).all()) for one, other in zip(again, results)))
"""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fast_path", ["auto", "off"])
@pytest.mark.parametrize("preallocated", [True, False], ids=["preallocated", "as-needed"])
async def test_jax_comes_back(tmp_path, runtime_base, monkeypatch, gpus, preallocated, fast_path, record):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("GPU_CHECK_DEVICE", "0"))
    await comes_back(tmp_path, runtime_base, monkeypatch, gpus, preallocated, fast_path, record)


@pytest.mark.two_gpus
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fast_path", ["auto", "off"])
async def test_jax_on_two_gpus_comes_back(tmp_path, runtime_base, monkeypatch, gpus, fast_path, record):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    await comes_back(tmp_path, runtime_base, monkeypatch, gpus, False, fast_path, record)


@pytest.mark.two_gpus
@pytest.mark.timeout(1200)
async def test_jax_s_preallocated_memory_on_two_gpus_comes_back(tmp_path, runtime_base, monkeypatch, gpus, record):
    """Moved by the library; what is left to the driver it does restore."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    await comes_back(tmp_path, runtime_base, monkeypatch, gpus, True, "auto", record)


@pytest.mark.two_gpus
async def test_jax_s_preallocated_memory_on_two_gpus_is_refused_without_the_library(
    tmp_path, runtime_base, monkeypatch
):
    """The driver 580.159 does not restore it (CUDA_ERROR_INVALID_VALUE)."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.05")
    async with notebook(tmp_path, runtime_base, fast_path="off") as kernel:
        await kernel.run(SETUP)
        digest = await kernel.run(DIGEST)
        for verb in ("suspend", "checkpoint"):
            with pytest.raises(UnsupportedCuda, match="JAX"):
                await getattr(kernel.provisioner, verb)()
        assert await kernel.run(DIGEST) == digest


async def comes_back(tmp_path, runtime_base, monkeypatch, gpus, preallocated, fast_path, record):
    pytest.importorskip("jax", reason="JAX is not installed on this machine")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true" if preallocated else "false")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", str(MEMORY / gpus.list()[0].total))
    came_back = 0
    while came_back < ROUNDS:
        async with notebook(tmp_path, runtime_base, fast_path=fast_path) as kernel:
            await kernel.run(SETUP)
            digest = await kernel.run(DIGEST)
            for _ in range(min(OF_ONE, ROUNDS - came_back)):
                await kernel.provisioner.checkpoint()
                out = kernel.steps.seconds()
                assert await kernel.run(DIGEST) == digest
                assert await kernel.run(COMPUTES) == "True"
                came_back += 1
                print(f"came back {came_back} of {ROUNDS}", flush=True)
                record(came_back=came_back, of=ROUNDS, checkpoint=out, restore=kernel.steps.seconds())


#: Seconds of a suspend: several times what JAX lets pass from one question for its streams to the next.
STAYS = 10.0
#: A child of the kernel with arrays of its own, of which it tells the digest.
ANSWERS = SETUP + "import sys\nfor _ in sys.stdin:\n" + textwrap.indent(DIGEST, "    ")
WORKER = f"""
import subprocess, sys
command = [sys.executable, "-u", "-c", {ANSWERS!r}]
worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
def ask():
    print("?", file=worker.stdin, flush=True)
    return worker.stdout.readline().strip()
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("fast_path", ["off", "auto"])
async def test_suspended_kernels_and_their_workers_live_on(tmp_path, runtime_base, monkeypatch, fast_path, record):
    """A thread of JAX asks by cuStreamQuery every few seconds, which does not wait while the driver is locked."""
    pytest.importorskip("jax", reason="JAX is not installed on this machine")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    async with contextlib.AsyncExitStack() as stack:
        kernels = []
        for number in range(3):
            place = tmp_path / str(number)
            place.mkdir()
            kernels.append(await stack.enter_async_context(notebook(place, runtime_base, fast_path=fast_path)))
        digests = []
        for kernel in kernels:
            await kernel.run(SETUP)
            await kernel.run(WORKER)
            digests.append(await kernel.run(DIGEST))
            assert await kernel.run("print(ask())") == digests[-1]
        for round in range(1, 3):
            pids = [pid for kernel in kernels for pid in kernel.lifecycle.capsule.processes()]
            await asyncio.gather(*(kernel.provisioner.suspend() for kernel in kernels))
            await asyncio.sleep(STAYS)
            assert [kernel.state for kernel in kernels] == ["suspended"] * len(kernels)
            assert alive(pids) == pids
            record(lived_on=round, suspended=[kernel.steps.seconds() for kernel in kernels])
            for kernel, digest in zip(kernels, digests, strict=True):
                assert await kernel.run(DIGEST) == digest
                assert await kernel.run("print(ask())") == digest
                assert await kernel.run(COMPUTES) == "True"
                await kernel.settled("running")


SIGNALS = """
import ctypes, os, signal, threading
heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
signal.siginterrupt(signal.SIGUSR1, True)
print(os.getpid())
"""


async def test_a_suspended_kernel_is_sent_signals_stopped_and_traced(tmp_path, runtime_base, monkeypatch):
    """A thread that waits in the driver's code must not see its wait end while the driver's memory is away."""
    pytest.importorskip("jax", reason="JAX is not installed on this machine")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    async with notebook(tmp_path, runtime_base, fast_path="off") as kernel:
        await kernel.run(SETUP)
        await kernel.run(SIGNALS)
        digest = await kernel.run(DIGEST)
        pid = kernel.lifecycle.capsule.host_pid
        for _ in range(3):
            await kernel.provisioner.suspend()
            for _ in range(5):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    send_to_thread(pid, int(task.name), signal.SIGUSR1)
                os.kill(pid, signal.SIGSTOP)
                until(lambda: states(pid) <= {"T", "t"}, "it is stopped")
                os.kill(pid, signal.SIGCONT)
                until(lambda: "T" not in states(pid), "it continues")
            assert await kernel.run(DIGEST) == digest
            await kernel.settled("running")
        assert await kernel.run(COMPUTES) == "True"
        assert int(await kernel.run("print(len(heard))")) > 0


def send_to_thread(pid: int, tid: int, number: int) -> None:
    """tgkill(2), by its number on x86-64; a thread may have ended."""
    ctypes.CDLL(None).syscall(234, pid, tid, number)


def states(pid: int) -> set[str]:
    """The letters of proc(5) of all threads."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}
