"""A tree of forked workers: ``python scripts/bench/tree.py [WORKERS] [MB]``.

A kernel with a pool of workers (default: 8 of 200 MB each), which share their memory with it since their fork, is
checkpointed and comes back, its image forgotten by the page cache before.  The size of the image, beside the tree's
unique bytes (PSS); the most that its pages took on the disk meanwhile; and the rate of the checkpoint, from the request
to the end of the processes, beside the rate at which the disk takes a file of as many bytes in the same round: of the
tree's bytes (the resident memory of each process, which is what CRIU writes), and of the image's.

Every second round is without what drops shared pages from an image, for comparison: those are the first figures.

The limits are judged by the medians of the others: the image at most 1.1 times the unique bytes, the tree at 80 % of
the disk's rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from fastpath import forget
from harness import notebook
from limits import MISSED

from jupyter_gpu_ckpt.criu.shared_pages import SharedPages

ROUNDS = 5
SIZE, RATE = 1.1, 0.8
WORKERS, MEGABYTES = 8, 200
MADE = """
import multiprocessing, os
held = os.urandom({megabytes} * 1_000_000)
context = multiprocessing.get_context("fork")
def check(_): return hash(held)
pool = context.Pool({workers})
assert set(pool.map(check, range({workers}), 1)) == {{hash(held)}}
"""
STEPS = ("dump", "publish", "end_process", "criu_restore")


def memory(pids: list[int], kind: str) -> int:
    """Bytes of host memory of the processes: ``Rss``, or ``Pss``, in which each shared page counts once in all."""
    found = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        found += next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) << 10
    return found


@contextlib.contextmanager
def most_written(directory: Path):
    """The most bytes that files of pages below a directory had on the disk in the body: a list of one number."""
    most, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.005):
            with contextlib.suppress(OSError):  # a draft is renamed or removed
                most[0] = max(most[0], sum(path.stat().st_blocks * 512 for path in directory.rglob("pages-*")))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def disk_rate(directory: Path, bytes: int) -> float:
    """Bytes per second of writing and flushing a file."""
    block, path = os.urandom(16 << 20), directory / "rate"
    began = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(max(1, bytes // len(block))):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    written = path.stat().st_size
    path.unlink()
    return written / seconds


@contextlib.contextmanager
def each_page_of_each_process():
    """Have CRIU's files stay as they are in the body."""
    with mock.patch.multiple(SharedPages, advance=lambda *_: None, finish=lambda *_: None):
        yield


async def measure(place: Path, base: Path, workers: int, megabytes: int) -> tuple[dict[str, list[float]], ...]:
    """Figures of each round, by name: without dropped pages, and with them."""
    both: tuple[dict[str, list[float]], ...] = {}, {}
    async with notebook(place, base) as kernel:
        await kernel.run(MADE.format(workers=workers, megabytes=megabytes), timeout=300)
        for number in range(2 * ROUNDS):
            processes = kernel.lifecycle.capsule.processes()
            tree, unique = memory(processes, "Rss"), memory(processes, "Pss")
            kernel.steps.events.clear()
            began = time.perf_counter()
            drops = number % 2
            with most_written(place) as most, contextlib.nullcontext() if drops else each_page_of_each_process():
                image = await kernel.provisioner.checkpoint()
                seconds = time.perf_counter() - began
            bytes = image.manifest.bytes
            rate = disk_rate(place, tree)
            forget(image.path)
            if await kernel.run(f"print(set(pool.map(check, range({workers}), 1)) == {{hash(held)}})") != "True":
                raise AssertionError("the memory differs")
            await kernel.settled("running")
            figures = {"tree MB": tree / 1e6, "unique MB": unique / 1e6, "image MB": bytes / 1e6}
            figures |= {"at most MB": most[0] / 1e6, "image / unique": bytes / unique}
            figures |= {"checkpoint s": seconds, "disk MB/s": rate / 1e6}
            figures |= {"tree / disk": tree / seconds / rate, "image / disk": bytes / seconds / rate}
            figures |= {f"{step} s": kernel.steps.seconds()[step] for step in STEPS}
            for name, value in figures.items():
                both[drops].setdefault(name, []).append(value)
    return both


def main(workers: int = WORKERS, megabytes: int = MEGABYTES) -> int:
    """Run and print; the exit status."""
    base, place = Path(tempfile.mkdtemp(prefix="gr-")), Path(tempfile.mkdtemp(prefix="gb-"))
    try:
        without, figures = asyncio.run(measure(place, base, workers, megabytes))
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(base, ignore_errors=True)
    print(f"{workers} workers of {megabytes} MB, uid {os.geteuid()}, {ROUNDS} rounds each: medians (lowest to highest)")
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, values in figures.items():
        first = f"{statistics.median(without[name]):9.3f} ({min(without[name]):.3f} to {max(without[name]):.3f})"
        print(f"  {name:15} {first:34} {medians[name]:9.3f} ({min(values):.3f} to {max(values):.3f})")
    limits = {"image / unique": (SIZE, "at most"), "tree / disk": (RATE, "at least")}
    missed = medians["image / unique"] > SIZE or medians["tree / disk"] < RATE
    words = ", ".join(f"{name} {how} {limit}" for name, (limit, how) in limits.items())
    print(f"  limits: {words}{'   MISSED' if missed else ''}")
    return MISSED if missed else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
