"""What compression of device memory gives, by its content: ``python scripts/bench/compression.py [GIB] [DIRECTORY]``.

Chunks in memory to files on the disk, flushed, and back, past the page cache: compressed where that pays, not at all,
and wherever it makes them smaller, whatever it costs.  Rounds alternate.  Needs numpy, and no GPU.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from jupyter_gpu_ckpt.image import compression, device
from jupyter_gpu_ckpt.image.disk import flush

ROUNDS = 5
WAYS = ("asked", "never", "always")
N = device.CHUNK
_rng = np.random.default_rng(0)
#: One chunk of each.
CONTENTS: dict[str, Callable[[], np.ndarray]] = {
    "normal floats, 32 bits": lambda: _rng.standard_normal(N // 4, np.float32),
    "the same after ReLU": lambda: np.maximum(_rng.standard_normal(N // 4, np.float32), 0),
    "a tenth of them, else 0": lambda: _rng.standard_normal(N // 4, np.float32) * (_rng.random(N // 4) < 0.1),
    "integers of 64 bits below 50,000": lambda: _rng.integers(0, 50_000, N // 8),
    "one value": lambda: np.full(N // 4, 3, np.float32),
}


def out(arena: int, directory: Path, *, compressed: bool) -> tuple[float, dict]:
    """Seconds until all of it is durable, and the entries."""
    began = time.perf_counter()
    entries = device.write(arena, directory, device.none_there, lambda: None, compressed=compressed)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(flush, [*directory.iterdir(), directory]))
    return time.perf_counter() - began, entries


def back(size: int, directory: Path, entries: dict, memory: Path) -> float:
    """Seconds until all of it is in memory again."""
    place = Path(tempfile.mkdtemp(dir=memory))
    arena = os.open(place, os.O_DIRECTORY)
    began = time.perf_counter()
    device.Filling(arena, size, directory, entries, prove=True).require()
    took = time.perf_counter() - began
    os.close(arena)
    shutil.rmtree(place)
    return took


def medians(rounds: list[tuple[float, ...]]) -> str:
    """In columns."""
    return " ".join(f"{statistics.median(each):5.2f}" for each in zip(*rounds, strict=True))


def main(gib: float, place: Path) -> int:
    """A line for each content."""
    count, directory = int(gib * (1 << 30)) // N, place / "device"
    print(f"{gib} GiB, {len(os.sched_getaffinity(0))} CPUs, medians of {ROUNDS}: GB, seconds out, seconds back")
    for name, make in CONTENTS.items():
        found: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
        with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
            (Path(memory) / "arena").mkdir()
            chunk = np.ascontiguousarray(make()).tobytes()
            for number in range(count):
                (Path(memory) / "arena" / f"{number:06d}.img").write_bytes(chunk)
            arena = os.open(Path(memory) / "arena", os.O_DIRECTORY)
            for _ in range(ROUNDS):
                for way in WAYS:
                    real = compression.pays
                    if way == "always":
                        compression.pays = lambda sample, **_: sample.ratio <= compression.MOST
                    leaving, entries = out(arena, directory, compressed=way != "never")
                    compression.pays = real
                    stored = sum(entry.bytes for entry in entries.values()) / 1e9
                    found[way].append((stored, leaving, back(count * N, directory, entries, Path(memory))))
                    shutil.rmtree(directory)
            os.close(arena)
        print(f"{name:34}", *(f"{way} {medians(found[way])} " for way in WAYS), f"disk {compression.disk.rate:.2e}")
    return 0


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else ".") as directory:
        sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0, Path(directory)))
