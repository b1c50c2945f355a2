"""Checkpoints by the idle policy while another kernel runs cells: ``python scripts/bench/policy.py``.

Twenty idle kernels are due at the same moment, with the policy's defaults (two at a time); all the while a client of a
21st runs cells, one after the other.  The limit is that of the design: the median round trip of a cell is at most twice
that without anybody leaving.  The exit status is 3 if it is missed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from harness import notebook
from limits import MISSED

from jupyter_gpu_ckpt.server.idle.loop import IdlePolicy

KERNELS = 20
REST = 300  # round trips before, for comparison


async def round_trip(kernel) -> float:
    """Seconds from sending an execute to its reply and its idle."""
    began = time.perf_counter()
    await kernel.client.execute_interactive("1 + 1", timeout=60, output_hook=lambda _: None, allow_stdin=False)
    return time.perf_counter() - began


async def main() -> int:
    """Run and print; 0 if the limit is met."""
    root = Path(tempfile.mkdtemp(prefix="bp-"))
    try:
        async with AsyncExitStack() as stack:
            kernels = {}
            for name in range(KERNELS + 1):
                (root / str(name)).mkdir()
                place = notebook(root / str(name), root / "run", image_dir=str(root / "images"))
                kernels[str(name)] = await stack.enter_async_context(place)
            (_, worker), *idle = kernels.items()
            for _ in range(20):
                await round_trip(worker)
            alone = [await round_trip(worker) for _ in range(REST)]
            # The worker is in the policy's care too: only its work keeps it.
            policy = IdlePolicy(
                lambda: {name: kernel.provisioner for name, kernel in kernels.items()},
                suspend_after=0,
                checkpoint_after=1,
                without_device_memory=True,
                interval=0.2,
            )
            policy.start()
            besides = []
            while not any(kernel.state == "dumping" for _, kernel in idle):
                await round_trip(worker)
            began = time.perf_counter()
            while not all(kernel.state == "checkpointed" for _, kernel in idle):
                besides.append(await round_trip(worker))
            took = time.perf_counter() - began
            await policy.stop()
            assert worker.state == "running"
    finally:
        shutil.rmtree(root, ignore_errors=True)
    quiet, loud = statistics.median(alone), statistics.median(besides)
    print(f"{KERNELS} kernels checkpointed in {took:.2f} s, {policy.max_parallel} at a time, {os.cpu_count()} cores")
    for what, times in (("alone", alone), ("while they leave", besides)):
        high = statistics.quantiles(times, n=20)[-1]
        print(
            f"  round trip {what:17} median {statistics.median(times) * 1e3:6.2f} ms, 95 % {high * 1e3:6.2f} ms, "
            f"longest {max(times) * 1e3:6.2f} ms ({len(times)} cells)"
        )
    met = loud <= 2 * quiet
    print(f"  ratio of the medians {loud / quiet:.2f}, limit 2{'' if met else '   MISSED'}")
    return 0 if met else MISSED


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
