"""Notebooks that share one GPU in turns, beside the simulation: ``python scripts/bench/turns.py [--seed N] [FILE]``.

On a GPU where there is one, beside a process that takes no part and leaves memory for one notebook; else with the real
library on the driver's double, whose moves are copies in host memory.  Cells and pauses are those of docs/scale.md,
``--scale`` times shorter, and so are the turns and the times between the servers' looks; sizes are chosen so that a
move is, too.  Each cell computes for its own time, in which it has the GPU, and compares some of its memory; at the end
all of it is compared.

The run is written to FILE, which ``python scripts/scale --replay FILE`` feeds to the simulation with the moves as they
were measured; both are printed.  The exit status is 3 if the mean wait for a cell's first turn, or the share of the
time that moves took, differ by more than a fifth, and 1 if a cell failed, was lost or ran twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "cuda" / "native"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scale"))

import pytest
from cuda_subject import CudaSubject, why_no_gpu
from harness import Notebook, notebook
from limits import MISSED
from notebook_activity import endless
from programs import build, build_doubles
from sharing_kernels import MIB, SharedHost
from sharing_study import replay

from jupyter_gpu_ckpt.cuda import gpu_locks
from jupyter_gpu_ckpt.kernel import engine
from jupyter_gpu_ckpt.sharing import exchange
from jupyter_gpu_ckpt.sharing.policy import Rules
from jupyter_gpu_ckpt.trace import StepEvent

NOTEBOOKS, MINUTES, SCALE = 4, 10.0, 20.0
#: Shares of what was measured by which waits and moves of the simulation may differ.
TOLERANCE = 0.2
GIB = 1 << 30
#: Bytes of a notebook on a GPU, and of what the other process leaves for all of them: a context takes little.
SIZE, LEFT = 2 * GIB, 4 * GIB
#: Bytes of a notebook on the double.
DOUBLE = 60 * MIB
GPU = "GPU-00000000-0000-0000-0000-00000000000a"
#: As `CELL` of the double, with PyTorch.
TORCH = """
import time, torch
x = torch.full(({bytes} // 8,), {value}, device="cuda", dtype=torch.int64)
torch.cuda.synchronize()
def compute(seconds):
    used = 0
    while used < seconds:
        began = time.monotonic()
        x.add_(1).sub_(1)
        torch.cuda.synchronize()
        took = time.monotonic() - began
        used += took if took < 0.05 else 0
def touch():
    torch.cuda.synchronize()
def glance():
    return bool((x[::1 << 20] == {value}).all())
def intact():
    part = 1 << 24
    return all(bool((x[at:at + part] == {value}).all()) for at in range(0, len(x), part))
"""
#: What `CELL` of the double lacks of it.
MORE = """
def touch():
    assert driver.cuCtxSynchronize() == 0
def glance():
    copy = ctypes.create_string_buffer(4096)
    assert runtime.cudaMemcpy(copy, address, ctypes.c_size_t(4096), 4) == 0
    return copy.raw == bytes([{value}]) * 4096
"""
#: What each cell runs: it notes when it first calls CUDA, when that has returned, and its own end.
RUN = """
def run(number, seconds):
    ran.append(number)
    touched = time.time()
    touch()
    started = time.time()
    compute(seconds)
    ended = time.time()
    print(touched, started, ended, glance(), len(ran))
ran = []
"""
HOG = "held = torch.empty({bytes}, dtype=torch.uint8, device='cuda').fill_(7); result = len(held)"


class Swaps:
    """A sink that notes the moves of one kernel whose memory is off the GPU, as the servers themselves measure them.

    From the grant to the moment at which the kernel's turn counts, and from the begin of a suspend to its end.
    """

    def __init__(self, kernel: Notebook) -> None:
        self._sharing = kernel.provisioner.sharing
        self._known = {swap.ended for swap in self._sharing.participant.swaps}
        self._seconds: list[float] = []

    def __call__(self, event: StepEvent | None = None) -> None:
        """Note the moves that ended since the last event: a record has those of some minutes."""
        for swap in self._sharing.participant.swaps:
            if swap.ended not in self._known:
                self._known.add(swap.ended)
                self._seconds.append(swap.seconds)

    @property
    def arriving(self) -> list[float]:
        return self._seconds[::2]

    @property
    def leaving(self) -> list[float]:
        return self._seconds[1::2]


@contextlib.asynccontextmanager
async def on_a_gpu(directory: Path, base: Path) -> AsyncIterator[tuple[list[Notebook], dict[str, int]]]:
    """Notebooks whose memory is off the GPU, on which another process has all but `LEFT`."""
    async with contextlib.AsyncExitStack() as stack:
        kernels = []
        for number in range(NOTEBOOKS):
            own = directory / str(number)
            own.mkdir()
            traits = {"gpu_sharing": "turns", "image_dir": str(directory / "images")}
            kernel = await stack.enter_async_context(notebook(own, base / str(number), **traits))
            await kernel.run(TORCH.format(bytes=SIZE, value=number + 1), timeout=120)
            await asyncio.to_thread(kernel.lifecycle.yield_gpu)
            kernels.append(kernel)
        gpu, *_ = kernels[0].lifecycle.engine.gpus.list()
        hog = stack.enter_context(CudaSubject())
        hog.run(HOG.format(bytes=gpu.free - LEFT), 120)
        yield kernels, {gpu.uuid: kernels[0].lifecycle.engine.gpus.free(gpu.uuid)}


@contextlib.asynccontextmanager
async def on_the_double(directory: Path, base: Path) -> AsyncIterator[tuple[list[Notebook], dict[str, int]]]:
    """Notebooks whose memory is off a GPU of the driver's double, which has memory for one of them."""
    doubles = build_doubles()
    gpus = {GPU: DOUBLE + DOUBLE // 2}
    async with contextlib.AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        host = SharedHost(directory, base, build(doubles), doubles, patch, gpus)
        kernels = []
        for number in range(NOTEBOOKS):
            kernel = await stack.enter_async_context(host.notebook(f"k{number}"))
            await host.allocate(kernel, DOUBLE // MIB, number + 1, GPU)
            await kernel.run(MORE.format(value=number + 1))
            await asyncio.to_thread(kernel.lifecycle.yield_gpu)
            kernels.append(kernel)
        yield kernels, gpus


async def live(
    kernel: Notebook, number: int, seed: int, scale: float, until: float, began: float
) -> list[dict[str, float]]:
    """Run the cells of one notebook, none of which is sent after ``until``; return them as `replay` has them."""
    cells: list[dict[str, float]] = []
    for cell in endless(random.Random(f"{seed}/{number}")):
        gap, seconds = cell.gap / scale, cell.seconds / scale
        if time.time() + gap > until:
            return cells
        await asyncio.sleep(gap)
        said = await kernel.run(f"run({len(cells)}, {seconds})", timeout=3600)
        *times, glance, ran = said.splitlines()[-1].split()
        if (glance, ran) != ("True", str(len(cells) + 1)):
            raise SystemExit(f"notebook {number}, cell {len(cells)}: {said}")
        touched, started, ended = (float(at) - began for at in times)
        cells.append({"touched": touched, "started": started, "ended": ended, "seconds": seconds})
    raise AssertionError("endless")


async def measure(directory: Path, base: Path, minutes: float, scale: float, seed: int) -> dict[str, Any]:
    """Return the run, as `replay` reads it.  ``base``: of the kernels' runtime directories, with a short path."""
    real = Rules()
    turns = ("first_turn", "turn", "cut")
    rules = dataclasses.replace(real, **{name: getattr(real, name) / scale for name in turns})
    ground = on_the_double if why_no_gpu() else on_a_gpu
    async with contextlib.AsyncExitStack() as stack:
        for module, constant in ((exchange, "POLL_S"), (exchange, "READ_S"), (gpu_locks, "POLL_S")):
            stack.enter_context(mock.patch.object(module, constant, getattr(module, constant) / scale))
        kernels, gpus = await stack.enter_async_context(ground(directory, base))
        engine.shared_exchange(kernels[0].lifecycle.engine.gpus).rules = rules
        moves = []
        for kernel in kernels:
            await kernel.run(RUN)
            moves.append(Swaps(kernel))
            kernel.provisioner.sinks.append(moves[-1])
        began = time.time()
        until = began + 60 * minutes
        lives = [live(kernel, number, seed, scale, until, began) for number, kernel in enumerate(kernels)]
        cells = await asyncio.gather(*lives)
        seconds = time.time() - began
        facts = [kernel.provisioner.sharing.participant for kernel in kernels]
        for each in moves:
            each()
        for number, kernel in enumerate(kernels):
            if await kernel.run("print(intact())", timeout=600) != "True":
                raise SystemExit(f"notebook {number} has lost memory")
    notebooks = [
        {
            "kernel": fact.kernel,
            "user": fact.user,
            "gpus": list(gpus),
            "needs": list(fact.needs),
            "leave_seconds": moved.leaving,
            "arrive_seconds": moved.arriving,
            "cells": ran,
        }
        for fact, moved, ran in zip(facts, moves, cells, strict=True)
    ]
    return {
        "gpus": gpus,
        "seconds": seconds,
        "overlap": True,
        "rules": {name: getattr(rules, name) for name in turns},
        "kernels": notebooks,
    }


def main() -> int:
    """Run, and compare."""
    parser = argparse.ArgumentParser(prog="scripts/bench/turns.py", description="Notebooks that share a GPU in turns.")
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="where the run is written")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="until the last cell is sent")
    parser.add_argument("--scale", type=float, default=SCALE, help="by how much times are shorter than true ones")
    parser.add_argument("--seed", type=int, default=1, help="of cells and pauses")
    options = parser.parse_args()
    print(f"On the driver's double: {why}" if (why := why_no_gpu()) else "On a GPU")
    with tempfile.TemporaryDirectory(prefix="gc-", ignore_cleanup_errors=True) as directory:
        measured = asyncio.run(
            measure(Path(directory), Path(directory) / "r", options.minutes, options.scale, options.seed)
        )
        file = options.file or Path(directory) / "run.json"
        file.write_text(json.dumps(measured))
        found = replay(file)
    cells = sum(len(each["cells"]) for each in measured["kernels"])
    moved = sum(len(each["leave_seconds"]) + len(each["arrive_seconds"]) for each in measured["kernels"])
    print(f"{cells} cells in {measured['seconds']:.0f} s, {moved} moves; none failed, was lost or ran twice")
    print(f"{'':28}{'measured':>12}{'simulated':>12}")
    missed = False
    for name, value in found["measured"].items():
        simulated = found["simulated"][name]
        compared = name in ("wait, mean", "swaps, share of the time")
        beyond = compared and abs(simulated - value) > TOLERANCE * value
        missed = missed or beyond
        print(f"{name:28}{value:12.3f}{simulated:12.3f}{'  MISSED' if beyond else ''}")
    return MISSED if missed else 0


if __name__ == "__main__":
    sys.exit(main())
