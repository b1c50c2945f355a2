"""``make bench``: run every benchmark that this machine supports, one after the other, also after a failure.

``python scripts/bench [--strict] [SCRIPT ...]``.  The exit status is 1 if a benchmark broke or did not end.  A figure
beyond its limit is said; it is an error (status 3, as that of the benchmark alone) with ``--strict`` only: where other
work runs it tells of that work.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from cuda_subject import why_no_gpu
from limits import MISSED

HERE = Path(__file__).resolve().parent
SCRIPTS = (
    "kernel.py",
    "save_points.py",
    "shared_chunks.py",
    "children.py",
    "criu.py",
    "tree.py",
    "image.py",
    "gate.py",
    "launch_gate.py",
    "policy.py",
    "sharing.py",
    "turns.py",
    "server.py",
    "remote.py",
    "gpu.py",
    "fastpath.py",
    "device_memory.py",
)
DEADLINE = 3600.0  # seconds for one of them


def outcome(script: str) -> tuple[str, int]:
    """Run one; what became of it in words, and the status it contributes."""
    if script in ("gpu.py", "fastpath.py", "device_memory.py") and (reason := why_no_gpu()):
        return f"left out: {reason}", 0
    print(f"\n== {script}", flush=True)
    try:
        status = subprocess.run([sys.executable, str(HERE / script)], timeout=DEADLINE).returncode
    except subprocess.TimeoutExpired:
        return f"did not end within {DEADLINE:g} s", 1
    if status == MISSED:
        return "ran, a limit was MISSED", MISSED
    return ("ran", 0) if status == 0 else (f"BROKE, status {status}", 1)


def main() -> int:
    """Run and sum up."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Run the benchmarks that this machine can run.")
    parser.add_argument("scripts", nargs="*", default=SCRIPTS, metavar="SCRIPT", help="by default all of them")
    parser.add_argument("--strict", action="store_true", help="a missed limit is an error")
    arguments = parser.parse_args()
    outcomes = {script: outcome(script) for script in arguments.scripts}
    print("\n== together")
    for script, (words, _) in outcomes.items():
        print(f"  {script:12} {words}")
    statuses = {status for _, status in outcomes.values()}
    if 1 in statuses:
        return 1
    return MISSED if arguments.strict and MISSED in statuses else 0


if __name__ == "__main__":
    raise SystemExit(main())
