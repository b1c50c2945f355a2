"""Save points of a kernel without device memory: ``python scripts/bench/save_points.py``.

The pause of a save: the seconds for which a cell that is sent at its begin waits, and those for which the kernel's
threads stand still.  Going back: from the request, through the save of the present state, to the first output of a
cell that is sent at once.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from harness import notebook
from kernel import first_output
from limits import MISSED

from jupyter_gpu_ckpt.gate.gate import GateState

ROUNDS = 12
#: Limits in seconds, of the medians.
PAUSE, BACK = 0.3, 0.4
#: A thread that notes for how long it has not run.
WATCH = """
import threading, time
longest = 0.0
def watch():
    global longest
    before = time.monotonic()
    while True:
        time.sleep(0.001)
        now = time.monotonic()
        longest, before = max(longest, now - before), now
threading.Thread(target=watch, daemon=True).start()
"""
#: The steps of a save between which and which the kernel is not served.
_FIRST, _LAST = "drain", "release"


async def rounds(root: Path) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    figures: dict[str, list[float]] = {"pause": [], "stop": [], "save": [], "back": [], "image MB": []}
    steps: dict[str, list[float]] = {}
    async with notebook(root, root / "run") as kernel:
        await kernel.run(WATCH)
        for number in range(ROUNDS):
            await kernel.run("longest = 0.0")
            kernel.steps.events.clear()
            began = time.perf_counter()
            point = await kernel.provisioner.save(f"point {number}")
            figures["save"].append(time.perf_counter() - began)
            at = {(event.step, event.kind): event.at for event in kernel.steps.events}
            figures["pause"].append(at[_LAST, "completed"] - at[_FIRST, "started"])
            figures["stop"].append(float(await kernel.run("print(longest)")))
            figures["image MB"].append(point.manifest.bytes / 1e6)
            for step, seconds in kernel.steps.seconds().items():
                steps.setdefault(step, []).append(seconds)
            began = time.perf_counter()
            went = asyncio.ensure_future(kernel.provisioner.back(f"point {number}"))
            while kernel.provisioner.gate.state is GateState.OPEN:  # a cell that is sent now would run before
                await asyncio.sleep(0.001)
            waited = time.perf_counter() - began
            figures["back"].append(waited + await first_output(kernel, "print(longest)"))
            before = await went
            for image in (point, before):
                kernel.lifecycle.engine.store.remove(image)
    return figures, steps


def main() -> int:
    root = Path(tempfile.mkdtemp(prefix="gpu-ckpt-bench-"))
    try:
        figures, steps = asyncio.run(rounds(root))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    middle = {name: statistics.median(values) for name, values in figures.items()}
    print(f"A kernel of {middle['image MB']:.0f} MB, median (largest) of {ROUNDS}:")
    for name in ("pause", "stop", "save", "back"):
        print(f"  {name:6} {middle[name]:.3f} s ({max(figures[name]):.3f} s)")
    print("  a save:", ", ".join(f"{step} {statistics.median(each):.3f}" for step, each in steps.items()))
    missed = middle["pause"] > PAUSE or middle["back"] > BACK
    if missed:
        print(f"MISSED: a pause of {PAUSE} s and {BACK} s until the first output after going back were wanted")
    return MISSED if missed else 0


if __name__ == "__main__":
    sys.exit(main())
