"""Cost of checkpointed kernels for a server: ``python scripts/bench/server.py [COUNT]``.

Starts a real ``jupyter server`` with the extension and, one after the other, COUNT kernels (200), checkpointing each
before the next is started.  Limits of the design, for 200: the server's resident memory grows by at most 200 MB, and a
``GET api/kernels`` takes at most 50 ms.  The exit status is 3 if one is missed.
"""

from __future__ import annotations

import re
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from limits import MISSED
from live import Server, server

LISTINGS = 50


def resident(pid: int) -> int:
    """Resident bytes of a process."""
    match = re.search(r"^VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match.group(1)) * 1024


def processor(pid: int) -> float:
    """Seconds of processor time a process has used; the unit of proc(5) is 1/100 s."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / 100


def checkpointed(running: Server) -> None:
    """Start a kernel and checkpoint it."""
    job = running.do(running.start_kernel(), "checkpoint")
    assert job["status"] == "done", job


def listings(running: Server) -> list[float]:
    """Seconds of each of some listings."""
    times = []
    for _ in range(LISTINGS):
        began = time.perf_counter()
        running.get("api/kernels")
        times.append(time.perf_counter() - began)
    return times


def main() -> int:
    """Run and print; 0 if both limits are met."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    root = Path(tempfile.mkdtemp(prefix="bs-"))
    try:
        (root / "home").mkdir()
        with server(root / "home", root / "run") as running:
            pid = running.process.pid
            checkpointed(running)  # the first pays for what all share
            before, empty = resident(pid), listings(running)
            began = time.perf_counter()
            for _ in range(count):
                checkpointed(running)
            took = time.perf_counter() - began
            grown, full = resident(pid) - before, listings(running)
            models = running.get("api/kernels")
            assert len(models) == count + 1
            assert {model["gpu_ckpt"]["state"] for model in models} == {"checkpointed"}
            used, rested = processor(pid), time.perf_counter()
            time.sleep(10)
            idle = (processor(pid) - used) / (time.perf_counter() - rested)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    slow = statistics.median(full)
    small, quick = grown <= count * 1e6, slow <= 0.05
    print(f"{count} kernels started and checkpointed in {took:.0f} s")
    print(f"  server's memory grew by {grown / 1e6:.0f} MB, limit {count} MB{'' if small else '   MISSED'}")
    print(
        f"  GET api/kernels: median {slow * 1e3:.1f} ms, longest {max(full) * 1e3:.1f} ms "
        f"(with one kernel: {statistics.median(empty) * 1e3:.1f} ms), limit 50 ms{'' if quick else '   MISSED'}"
    )
    print(f"  processor time of the server while all sleep: {idle * 100:.1f} % of a core")
    return 0 if small and quick else MISSED


if __name__ == "__main__":
    raise SystemExit(main())
