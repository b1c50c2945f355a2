"""Cost of eight child processes in a suspend: ``python scripts/bench/children.py``.

A kernel with forked workers and one without take turns; where there is a GPU, both have memory on it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from cuda_subject import why_no_gpu
from harness import notebook
from limits import MISSED

ROUNDS = 20
CHILDREN = 8
LIMIT_S = 0.1
ON_GPU = "import torch; x = torch.ones(256 << 20, device='cuda'); torch.cuda.synchronize()"
POOL = f"import multiprocessing; pool = multiprocessing.get_context('fork').Pool({CHILDREN}); pool.map(abs, range(100))"


async def suspended(kernel) -> float:
    """Seconds of one suspend; the kernel runs afterwards."""
    began = time.perf_counter()
    await kernel.provisioner.suspend()
    seconds = time.perf_counter() - began
    await kernel.provisioner.resume()
    return seconds


async def measured(root: Path, on_gpu: bool) -> tuple[list[float], list[float]]:
    """Seconds without children and with them."""
    for name in ("none", "some"):
        (root / name).mkdir()
    async with notebook(root / "none", root / "run") as without, notebook(root / "some", root / "run") as beside:
        for kernel in (without, beside):
            if on_gpu:
                await kernel.run(ON_GPU, 120)
        await beside.run(POOL, 60)
        assert len(beside.lifecycle.capsule.other_processes()) >= CHILDREN
        pairs = [(await suspended(without), await suspended(beside)) for _ in range(ROUNDS + 1)]
    return [first for first, _ in pairs[1:]], [second for _, second in pairs[1:]]


def main() -> int:
    """Run and print."""
    root, reason = Path(tempfile.mkdtemp(prefix="bc-")), why_no_gpu()
    try:
        none, some = asyncio.run(measured(root, on_gpu=reason is None))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(
        f"suspend, {ROUNDS} rounds, uid {os.geteuid()}, {reason or 'with 1 GiB on a GPU'}: median (lowest to highest)"
    )
    for count, values in ((0, none), (CHILDREN, some)):
        print(f"  {count} children {statistics.median(values):8.3f} s ({min(values):.3f} to {max(values):.3f})")
    more = statistics.median(some) - statistics.median(none)
    print(f"  {more:+.3f} s with children, limit {LIMIT_S:+.3f} s{'' if more <= LIMIT_S else '   MISSED'}")
    return 0 if more <= LIMIT_S else MISSED


if __name__ == "__main__":
    raise SystemExit(main())
