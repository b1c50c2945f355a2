"""A kernel without device memory: ``python scripts/bench/kernel.py``.

Checkpoint, from the request to "no process left"; wake, from a client's execute on a checkpointed kernel to the first
output; and what a checkpointed kernel costs its server in resident memory.  Writes ``kernel-bench.json`` below ``$OUT``
when that is set.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from harness import notebook

CYCLES = 20
KERNELS = 10


def resident() -> int:
    """Resident bytes of this process, the server."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^VmRSS:\s+(\d+)", status, re.MULTILINE).group(1)) * 1024


async def first_output(kernel, code: str) -> float:
    """Seconds from sending an execute to its first output."""
    began = time.perf_counter()
    identity = kernel.client.execute(code)
    while True:
        message = await kernel.client.get_iopub_msg(timeout=60)
        if message["msg_type"] == "stream" and message["parent_header"].get("msg_id") == identity:
            seconds = time.perf_counter() - began
            break
    while (await kernel.client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != identity:
        pass
    return seconds


async def cycles(root: Path) -> dict[str, list[float]]:
    figures: dict[str, list[float]] = {"checkpoint": [], "wake": [], "criu_restore": [], "image MB": []}
    (root / "cycles").mkdir()
    async with notebook(root / "cycles", root / "run") as kernel:
        await kernel.run("x = 1")
        for _ in range(CYCLES):
            began = time.perf_counter()
            image = await kernel.provisioner.checkpoint()
            figures["checkpoint"].append(time.perf_counter() - began)
            figures["image MB"].append(image.manifest.bytes / 1e6)
            kernel.steps.events.clear()
            figures["wake"].append(await first_output(kernel, "print(x)"))
            await kernel.settled("running")
            figures["criu_restore"].append(kernel.steps.seconds()["criu_restore"])
    return figures


async def sleepers(root: Path) -> float:
    """Bytes of the server's memory for each checkpointed kernel (its manager, gate and lifecycle; clients closed)."""
    async with AsyncExitStack() as stack:
        counts = []
        for number in range(KERNELS + 1):
            place = root / f"sleeper{number}"
            place.mkdir()
            opened = notebook(place, root / "run", image_dir=str(root / "images"))
            kernel = await stack.enter_async_context(opened)
            await kernel.provisioner.checkpoint()
            kernel.client.stop_channels()
            gc.collect()
            counts.append(resident())
        # The first kernel pays for what all of them share.
        return (counts[-1] - counts[0]) / KERNELS


def main() -> None:
    """Run and print."""
    root = Path(tempfile.mkdtemp(prefix="bk-"))
    try:
        figures = asyncio.run(cycles(root))
        each = asyncio.run(sleepers(root))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"a kernel without device memory, uid {os.geteuid()}, {CYCLES} cycles: median (lowest to highest)")
    for name, values in figures.items():
        print(f"  {name:14} {statistics.median(values):8.3f} ({min(values):.3f} to {max(values):.3f})")
    print(f"  a checkpointed kernel costs its server {each / 1024:.0f} KiB (mean over {KERNELS})")
    if os.environ.get("OUT"):
        report = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "cores": os.cpu_count(), **figures}
        Path(os.environ["OUT"], "kernel-bench.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
