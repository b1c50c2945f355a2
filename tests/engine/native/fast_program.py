"""A program that holds device memory of the double, and can be asked about it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from waiting import until

from jupyter_gpu_ckpt.engine import fastpath

MIB = 1 << 20
#: Bytes of its allocations.
SIZES = (2 * MIB, 5 * MIB + 77, 64 * MIB)

#: Does what a file tells it, and says so in another; one thread computes all the time, one takes memory.
_SOURCE = """
import ctypes, os, sys, threading, time
here = os.path.dirname(sys.argv[0])
runtime = ctypes.CDLL("libcudart.so.13")
everywhere = ctypes.CDLL(None)
runtime.cudaFree(None)
sizes, turns, held = eval(sys.argv[1]), [0], []
def compute():
    while True: turns[0] += 1; x = [bytearray(3000) for _ in range(50)]
threading.Thread(target=compute, daemon=True).start()
for size in sizes:
    address = ctypes.c_void_p()
    assert everywhere.cudaMalloc(ctypes.byref(address), ctypes.c_size_t(size)) == 0
    ctypes.memset(address, len(held) + 1, size)
    held.append((address, size))
def intact():
    return all(ctypes.string_at(at, size) == bytes([n + 1]) * size for n, (at, size) in enumerate(held))
def fail(name, nth, result):
    ctypes.CDLL("libcuda.so.1").double_fail(name.encode(), ctypes.c_long(nth), False, result)
def slow(microseconds):
    ctypes.CDLL("libcuda.so.1").double_set_delay(microseconds)
open(here + "/ready", "w").close()
while True:
    time.sleep(0.002)
    if os.path.exists(here + "/ask"):
        asked = open(here + "/ask").read(); os.unlink(here + "/ask")
        open(here + "/draft", "w").write(repr(eval(asked))); os.rename(here + "/draft", here + "/said")
"""


class Program:
    """The program, to be run in a capsule whose directory is ``directory``."""

    def __init__(self, directory: Path, library: Path, doubles: Path) -> None:
        self.directory = directory
        (directory / "program.py").write_text(_SOURCE)
        self.argv = [sys.executable, str(directory / "program.py"), repr(SIZES)]
        self.env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(doubles),
            "LD_PRELOAD": str(library),
            fastpath.VARIABLE: str(directory / fastpath.SOCKET),
        }

    def holds_its_memory(self) -> None:
        until((self.directory / "ready").exists, "the program holds its memory")

    def ask(self, expression: str) -> object:
        (self.directory / "draft-ask").write_text(expression)
        (self.directory / "draft-ask").rename(self.directory / "ask")
        until((self.directory / "said").exists, expression)
        said = (self.directory / "said").read_text()
        (self.directory / "said").unlink()
        return eval(said)

    def goes_on(self) -> None:
        """All that it holds is as it was, and its threads run."""
        assert self.ask("intact()") is True
        turns = self.ask("turns[0]")
        until(lambda: self.ask("turns[0]") > turns, "the other thread goes on")
