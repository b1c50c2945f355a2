"""A program with device memory of the fake driver that answers requests; alone, or in a capsule."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from waiting import until

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.cuda.fastpath import FastPath
from jupyter_gpu_ckpt.testing.fake_cuda import RUNNING, FakeCuda, FakeDriver

MIB = 1 << 20
A = "GPU-00000000-0000-0000-0000-00000000000a"
#: Bytes of its allocations.
SIZES = (2 * MIB, 5 * MIB + 77, 64 * MIB)

#: Does what a file tells it, and says so in another; one thread computes for a fifth of the time, one takes memory.
_SOURCE = """
import ctypes, os, sys, threading, time
here = os.path.dirname(sys.argv[0])
runtime = ctypes.CDLL("libcudart.so.13")
runtime.cudaFree(None)
sizes, turns, held = eval(sys.argv[1]), [0], []
def compute():
    while True:
        began = time.monotonic()
        while time.monotonic() - began < 0.001: turns[0] += 1; x = [bytearray(3000) for _ in range(50)]
        time.sleep(0.004)  # the other processors are for other tests
threading.Thread(target=compute, daemon=True).start()
for size in sizes:
    address = ctypes.c_void_p()
    assert runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    ctypes.memset(address, len(held) + 1, size)
    held.append((address, size))
def intact():
    return all(ctypes.string_at(at, size) == bytes([n + 1]) * size for n, (at, size) in enumerate(held))
def fail(name, nth, result):
    ctypes.CDLL("libcuda.so.1").double_fail(name.encode(), ctypes.c_long(nth), False, result)
managed = ctypes.c_void_p()
def manage(size):
    return ctypes.CDLL("libcuda.so.1").cuMemAllocManaged(ctypes.byref(managed), ctypes.c_size_t(size), 1)
def unmanage():
    return ctypes.CDLL("libcuda.so.1").cuMemFree_v2(managed)
def slow(microseconds):
    ctypes.CDLL("libcuda.so.1").double_set_delay(microseconds)
def begin_thread(name):
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)
    libc.pthread_setname_np(thread, name.encode())
open(here + "/ready", "w").close()
while True:
    time.sleep(0.002)
    if os.path.exists(here + "/ask"):
        asked = open(here + "/ask").read(); os.unlink(here + "/ask")
        open(here + "/draft", "w").write(repr(eval(asked))); os.rename(here + "/draft", here + "/said")
"""


class Program:
    """The program, to be run in a capsule whose directory is ``directory``; without a library if that is None.

    ``files``: the directory of the files by which it is asked, by default the same.
    """

    def __init__(
        self,
        directory: Path,
        library: Path | None,
        doubles: Path,
        sizes: tuple[int, ...] = SIZES,
        files: Path | None = None,
    ) -> None:
        self.directory = files or directory
        (self.directory / "program.py").write_text(_SOURCE)
        self.argv = [sys.executable, str(self.directory / "program.py"), repr(sizes)]
        self.env = {**os.environ, "LD_LIBRARY_PATH": str(doubles)}
        if library is not None:
            path = str(directory / fastpath.SOCKET)
            self.env |= {"LD_PRELOAD": str(library), fastpath.VARIABLE: path, fastpath.CHILDREN_VARIABLE: path}

    def holds_its_memory(self) -> None:
        until((self.directory / "ready").exists, "the program holds its memory")

    def ask(self, expression: str) -> object:
        (self.directory / "draft-ask").write_text(expression)
        (self.directory / "draft-ask").rename(self.directory / "ask")
        until((self.directory / "said").exists, expression)
        said = (self.directory / "said").read_text()
        (self.directory / "said").unlink()
        return eval(said)

    def continues(self) -> None:
        """All that it holds is as it was, and its threads run."""
        assert self.ask("intact()") is True
        turns = self.ask("turns[0]")
        until(lambda: self.ask("turns[0]") > turns, "the other thread continues")


class Kernel:
    """The program in a capsule."""

    def __init__(self, directory: Path, library: Path, doubles: Path) -> None:
        self.directory = directory
        self._program = Program(directory, library, doubles)
        self.capsule = Capsule.create(directory)
        self.capsule.spawn(self._program.argv, self._program.env, "/")
        self._program.holds_its_memory()
        self.ask = self._program.ask
        self.driver = FakeDriver({A: 100 * MIB})
        self.driver.start({A: 71 * MIB}, pid=self.capsule.host_pid)
        self.cuda = FakeCuda(self.driver)
        self.path = FastPath(self.capsule, self.cuda)

    @property
    def state(self) -> int:
        return self.driver.processes[self.capsule.host_pid].state

    @property
    def pid(self) -> int:
        return self.capsule.host_pid

    def runs_on(self) -> None:
        """Unlocked, no thread is stopped or waits at the launch gate, all memory is on the device."""
        assert self.state == RUNNING
        assert self.path.amounts().swapped_out == 0
        assert not self.path.launch_gate_is_closed()
        self._program.continues()

    def lock(self) -> None:
        self.cuda.lock(self.pid, 5)

    def swap_out(self, timeout_s: float = 60) -> int:
        return self.path.swap_out(lock_s=5, timeout_s=timeout_s)

    def swap_in(self) -> None:
        self.path.swap_in(lock_s=5, timeout_s=60)


def frozen(kernel: Kernel) -> bool:
    """Return whether all threads but the library's and the driver's own are stopped (proc_pid_stat(5): ``t``)."""
    states = {}
    for task in Path(f"/proc/{kernel.pid}/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        if not name.startswith(("gpu-ckpt", "cuda-EvtHandlr", "cuda0000000d00e")):
            states[task.name] = rest.split()[0]
    return set(states.values()) == {"t"}
