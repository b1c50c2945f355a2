"""Dump and restore of a kernel's own memory by CRIU: ``python scripts/bench/criu.py [GIB]``.

A kernel that holds so many GiB of random bytes (default: 4) is checkpointed and comes back, its image forgotten by the
page cache before, with what might be faster: images in memory instead of on the disk (what staging there could win),
and memory of huge pages.  Medians of `ROUNDS`; how long each step of the product took that moves the bytes.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from fastpath import forget
from harness import notebook

ROUNDS = 3
GIB = 4
FILL = """
import mmap, os
block, memory = os.urandom(64 << 20), mmap.mmap(-1, {gib} << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
if {huge}: memory.madvise(mmap.MADV_HUGEPAGE)
for at in range(0, len(memory), len(block)): memory[at : at + len(block)] = block
"""
STEPS = ("dump", "publish", "criu_restore")


async def measure(place: Path, base: Path, gib: int, huge: bool) -> dict[str, list[float]]:
    """Seconds of each step, round by round."""
    found: dict[str, list[float]] = {step: [] for step in STEPS}
    async with notebook(place, base) as kernel:
        await kernel.run(FILL.format(gib=gib, huge=huge), timeout=300)
        for _ in range(ROUNDS):
            kernel.steps.events.clear()
            image = await kernel.provisioner.checkpoint()
            forget(image.path)
            if await kernel.run("print(memory[-(64 << 20):] == block)", timeout=300) != "True":
                raise AssertionError("the memory differs")
            await kernel.settled("running")
            for step in STEPS:
                found[step].append(kernel.steps.seconds()[step])
    return found


def main(gib: int) -> None:
    """Run and print."""
    base = Path(tempfile.mkdtemp(prefix="gr-"))
    for name, parent, huge in (("disk", None, False), ("huge pages", None, True), ("memory", "/dev/shm", False)):
        place = Path(tempfile.mkdtemp(prefix="gb-", dir=parent))
        try:
            figures = asyncio.run(measure(place, base, gib, huge))
        finally:
            shutil.rmtree(place, ignore_errors=True)
        medians = {step: statistics.median(seconds) for step, seconds in figures.items()}
        line = "  ".join(f"{step} {took:.2f} s ({gib * 2**30 / took / 1e9:.2f} GB/s)" for step, took in medians.items())
        print(f"{gib} GiB, {name:10} {line}", flush=True)
    shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else GIB)
