"""A kernel that is alone on its GPU, with ``gpu_sharing`` and without: ``python scripts/bench/sharing.py``.

The GPU is a fake (`testing.fake_cuda`): what the driver's own functions take is not measured.  The limits are those of
a default that nobody notices: the median round trip of a cell at most 1.1 times as long, and 1 % of a core more for an
idle kernel.  The exit status is 3 if one is missed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from harness import Notebook, notebook
from limits import MISSED

from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.kernel import engine
from jupyter_gpu_ckpt.testing.fake_cuda import FakeCuda, FakeDriver, FakeGpus

MODES = ("off", "room", "turns")
GPU = "GPU-00000000-0000-0000-0000-00000000000a"
CELLS, WAKES, IDLE_S = 400, 20, 20.0


@asynccontextmanager
async def serving(root: Path, modes: tuple[str, ...]) -> AsyncIterator[list[Notebook]]:
    """Kernels with memory, each on a GPU of its own and in a directory of its own, with these values of the trait."""
    async with AsyncExitStack() as stack:
        kernels = []
        for mode in modes:
            directory, driver = root / mode, FakeDriver({GPU: 80 << 30})
            directory.mkdir(parents=True)
            fakes = {"cuda": FakeCuda(driver), "gpus": FakeGpus(driver, directory / "locks")}
            images = directory / "images"
            engine._engines[images] = dataclasses.replace(engine.shared_engine(images), **fakes)
            traits = {"gpu_sharing": mode, "image_dir": str(images), "fast_path": "off"}
            place = notebook(directory, root.parent / f"r{mode}", **traits)
            kernel = await stack.enter_async_context(place)
            driver.start({GPU: 1 << 30}, pid=kernel.lifecycle.capsule.host_pid)
            kernels.append(kernel)
        yield kernels


async def round_trip(kernel) -> float:
    """Seconds from sending an execute to its reply and its idle."""
    began = time.perf_counter()
    await kernel.client.execute_interactive("1 + 1", timeout=60, output_hook=lambda _: None, allow_stdin=False)
    return time.perf_counter() - began


async def wake(kernel) -> float:
    """Seconds of a cell whose kernel is suspended."""
    await kernel.provisioner.suspend()
    return await round_trip(kernel)


async def main() -> int:
    """Run and print; 0 if the limits are met."""
    root = Path(tempfile.mkdtemp(prefix="bs-"))
    fastpath.has_driver = lambda: True  # as where there is a GPU
    trips, wakes, idle = ({mode: [] for mode in MODES} for _ in range(3))
    try:
        for mode in MODES:  # one after the other: what is used while a kernel is idle is of the whole process
            async with serving(root / "idle", (mode,)) as (kernel,):
                await round_trip(kernel)
                await asyncio.sleep(2)
                began = time.process_time()
                await asyncio.sleep(IDLE_S)
                idle[mode] = (time.process_time() - began) / IDLE_S
        async with serving(root / "cells", MODES) as kernels:  # in turns: other work of the machine is of all alike
            for _ in range(CELLS):
                for mode, kernel in zip(MODES, kernels, strict=True):
                    trips[mode].append(await round_trip(kernel))
            for _ in range(WAKES):
                for mode, kernel in zip(MODES, kernels, strict=True):
                    await kernel.provisioner.suspend()
                    wakes[mode].append(await round_trip(kernel))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"a kernel alone on its GPU, {CELLS} cells and {WAKES} wakes, {os.cpu_count()} cores")
    median = {mode: statistics.median(times[20:]) for mode, times in trips.items()}
    for mode in MODES:
        cell, back = median[mode] * 1e3, statistics.median(wakes[mode]) * 1e3
        print(f"  {mode:5}  round trip {cell:6.2f} ms; wake {back:6.1f} ms; idle {idle[mode]:6.2%} of a core")
    met = median["room"] <= 1.1 * median["off"] and idle["room"] - idle["off"] <= 0.01
    print(f"  limits: {'met' if met else 'MISSED'}")
    return 0 if met else MISSED


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
