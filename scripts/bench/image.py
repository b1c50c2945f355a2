"""The cost of sealing and verifying images: ``python scripts/bench/image.py [GIB] [DIRECTORY]``.

Hashes and the seal, as a part of the time that writing the image to the disk takes; and `verify` of a cold image,
beside the fastest plain read of the same files.  Rounds alternate, and their order turns around, so that other work on
the machine meets all of them.
"""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from limits import MISSED

from jupyter_gpu_ckpt.files.atomic import flush
from jupyter_gpu_ckpt.image import verify as integrity
from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.store import Image, Store
from jupyter_gpu_ckpt.image.verify import BLOCK, DEPTH

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from images import FACTS

ROUNDS = 8
COST, RATE = 0.10, 0.80


def write(path: Path, size: int, block: bytes) -> None:
    """Write one file through the page cache, as CRIU does."""
    with path.open("wb", buffering=0) as file:
        for _ in range(size // len(block)):
            file.write(block)


def forget(path: Path) -> None:
    """The next read of it comes from the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def seconds(work, *arguments) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began


def plain_publish(directory: Path, size: int, block: bytes) -> float:
    """Written and flushed, neither hashed nor sealed: what a dump costs without trust."""
    path = directory / "plain"
    took = seconds(lambda: (write(path, size, block), flush(path), flush(directory)))
    path.unlink()
    return took


def publish(store: Store, size: int, block: bytes) -> tuple[float, Image]:
    """The same with all that a published image has."""
    draft = store.begin("bench")
    began = time.perf_counter()
    write(draft.criu_directory / "pages-1.img", size, block)
    image = draft.publish(FACTS)
    return time.perf_counter() - began, image


def read(path: Path, size: int) -> None:
    """Several readers, large blocks, past the page cache: what the disk gives."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def work(offset: int) -> None:
        with mmap.mmap(-1, BLOCK) as buffer:
            os.preadv(fd, [buffer], offset)

    with ThreadPoolExecutor(DEPTH) as pool:
        list(pool.map(work, range(0, size, BLOCK)))
    os.close(fd)


def dd(path: Path) -> None:
    """The plain tool, through the page cache."""
    subprocess.run(["dd", f"if={path}", "of=/dev/null", "bs=8M"], check=True, capture_output=True)


def verify(image: Image, keys: Keyring) -> None:
    """Verify an image as a restore does before CRIU sees it."""
    integrity.verify(image.path, keys)


def main() -> int:
    """Run and print."""
    size = int(float(sys.argv[1] if len(sys.argv) > 1 else 1.0) * 2**30) // BLOCK * BLOCK
    place = Path(tempfile.mkdtemp(prefix="bi-", dir=sys.argv[2] if len(sys.argv) > 2 else None))
    store = Store(place / "images", Keyring(place / "keys"))
    block = os.urandom(BLOCK)
    figures: dict[str, list[float]] = {"plain": [], "published": [], "read": [], "dd": [], "verified": []}
    try:
        for number in range(ROUNDS):
            if number % 2:
                figures["plain"].append(plain_publish(place, size, block))
            took, image = publish(store, size, block)
            figures["published"].append(took)
            if not number % 2:
                figures["plain"].append(plain_publish(place, size, block))
            pages = image.criu_directory / "pages-1.img"
            works = [("read", read, (pages, size)), ("dd", dd, (pages,)), ("verified", verify, (image, store.keys))]
            for name, work, arguments in works[:: -1 if number % 2 else 1]:
                forget(pages)
                figures[name].append(seconds(work, *arguments))
            store.remove(image)
    finally:
        subprocess.run(["rm", "-rf", str(place)], check=True)
    # Limits are judged by the fastest rounds: the others tell of other work on the disk.
    fastest = {name: min(values) for name, values in figures.items()}
    print(f"an image of {size / 2**30:.2f} GiB, {os.cpu_count()} cores, {ROUNDS} rounds")
    print("MB/s: fastest (median)")
    for name, values in figures.items():
        print(f"  {name:10} {size / fastest[name] / 1e6:8.0f} ({size / statistics.median(values) / 1e6:.0f})")
    cost = fastest["published"] / fastest["plain"] - 1
    rate = min(fastest["read"], fastest["dd"]) / fastest["verified"]
    print(f"  hashes and seal cost {cost:+.1%} of writing; the limit is {COST:.0%}")
    print(f"  verify reads at {rate:.0%} of the faster plain read; the limit is {RATE:.0%}")
    return 0 if cost <= COST and rate >= RATE else MISSED


if __name__ == "__main__":
    raise SystemExit(main())
