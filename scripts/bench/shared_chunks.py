"""The bytes that ten save points of a training loop cost together: ``python scripts/bench/shared_chunks.py [GIB]``.

A tenth of the memory, in chunks, changes from one save point to the next: on the GPU if there is one, else the
kernel's own.  Then the pause of a save, the seconds until it is on the disk, and going back to the first one.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from cuda_subject import why_no_gpu
from harness import notebook
from limits import MISSED

from jupyter_gpu_ckpt.image import layout, shared_chunks
from jupyter_gpu_ckpt.image.device_memory import CHUNK

POINTS = 10
#: The most that all may cost, as a multiple of the first.
MOST = 2.0
#: The part of an image that the first save point has, and that changes with no other.
LIBRARIES = "copies of libraries"
ON_GPU = f"""
import torch
chunks = [torch.randint(-1 << 62, 1 << 62, ({CHUNK // 8},), device="cuda") for _ in range({{count}})]
def change(n): chunks[n] += 1; torch.cuda.synchronize()
def sums(): return [int(each.sum()) for each in chunks[::7]]
"""
ON_HOST = f"""
import ctypes, mmap, zlib
held = mmap.mmap(-1, {{count}} * {CHUNK} + {CHUNK}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
begin = -ctypes.addressof(ctypes.c_char.from_buffer(held)) % {CHUNK}
random = open("/dev/urandom", "rb", buffering=0)  # into its place: a copy would stay in the heap, where it is free
def change(n): assert random.readinto(memoryview(held)[begin + n * {CHUNK} :][:{CHUNK}]) == {CHUNK}
def sums(): return [zlib.crc32(held[begin + n * {CHUNK} : begin + (n + 1) * {CHUNK}]) for n in range(0, {{count}}, 7)]
for n in range({{count}}): change(n)
"""


def on_disk(root: Path) -> Counter[str]:
    """Return the bytes of a directory's blocks, each file once, by the part of an image that it is in."""
    files = {path.lstat().st_ino: path for path in root.glob("**/*")}
    parts: Counter[str] = Counter()
    for path in files.values():
        if path.match(f"*/{layout.CRIU}/{layout.DEVICE}/*"):
            part = "device memory"
        elif path.match(f"*/{layout.KEPT}/{layout.LIBRARIES}/*"):
            part = LIBRARIES
        else:
            part = "processes"
        parts[part] += path.lstat().st_blocks * 512
    return parts


async def measured(root: Path, gib: float) -> float:
    """Make the save points, print what they cost, and return the multiple."""
    count = round(gib * (1 << 30) / CHUNK)
    changed = round(count / 10)
    async with notebook(root, root / "run") as kernel:
        await kernel.run((ON_HOST if why_no_gpu() else ON_GPU).format(count=count))
        sums, costs, pauses, saves, points = await kernel.run("print(sums())"), [], [], [], []
        for number in range(POINTS):
            kernel.steps.events.clear()
            began = time.perf_counter()
            points.append(await kernel.provisioner.save(f"point {number}"))
            saves.append(time.perf_counter() - began)
            at = {(event.step, event.kind): event.at for event in kernel.steps.events}
            pauses.append(at["release", "completed"] - at["drain", "started"])
            costs.append(on_disk(root / "images"))
            await kernel.run(f"for n in range({number * changed}, {(number + 1) * changed}): change(n % {count})")
        alone = [shared_chunks.bytes_alone(each) for each in points]
        for each in points[1:]:
            kernel.lifecycle.engine.store.remove(each)
        began = time.perf_counter()
        await kernel.provisioner.back("point 0")
        back = time.perf_counter() - began
        assert await kernel.run("print(sums())") == sums
    place = "in the kernel" if why_no_gpu() else "on the GPU"
    print(f"{POINTS} save points, {count} chunks of 16 MiB {place}, of which {changed} change from one to the next:")
    first, all_of_them = costs[0].total(), costs[-1].total()
    print(f"  the first {first / 1e6:.0f} MB, all {all_of_them / 1e6:.0f} MB: {all_of_them / first:.2f} times")
    for part, size in costs[-1].most_common():
        print(f"    {part}: {costs[0][part] / 1e6:.0f} MB, {size / 1e6:.0f} MB")
    without = [each.total() - each[LIBRARIES] for each in (costs[0], costs[-1])]
    print(f"  without {LIBRARIES}: {without[1] / without[0]:.2f} times")
    print(f"  alone each has {min(alone) / 1e6:.0f} to {max(alone) / 1e6:.0f} MB")
    print(f"  pause {statistics.median(pauses):.2f} s, on the disk after {statistics.median(saves):.2f} s (medians)")
    print(f"  going back to the first, when the others are deleted: {back:.2f} s")
    return max(all_of_them / first, without[1] / without[0])


def main() -> int:
    root = Path(tempfile.mkdtemp(prefix="gpu-ckpt-bench-"))
    try:
        times = asyncio.run(measured(root, float(sys.argv[1]) if sys.argv[1:] else 2.0))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    if times > MOST:
        print(f"MISSED: no more than {MOST:g} times the bytes of one were wanted")
        return MISSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
