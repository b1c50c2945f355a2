"""The recorded runs, docs/recorded-runs.csv, from which the documentation's tables of rates are made.

``python scripts/bench/records.py --commit COMMIT REPORT ...`` adds those of reports that benches have written below
``$OUT`` (``fastpath-bench.json``, ``device-memory-bench.json``, ``kernel-bench.json``); then run scripts/make-docs.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from device_programs import PROGRAMS

FILE = Path(__file__).resolve().parents[2] / "docs" / "recorded-runs.csv"
#: Seconds that a kernel with so many GiB of PyTorch's tensors may take off the GPU and back, by bench fastpath.
LIMITS = {16: (0.8, 0.65), 48: (1.8, 1.3)}
#: Whose memory the kinds of kernels of bench fastpath have, and what moves it; other kinds are no plain moves.
KINDS = {
    "library": ("PyTorch", "library"),
    "warm": ("PyTorch", "library, context kept"),
    "driver": ("PyTorch", "driver"),
    "expandable": ("PyTorch, expandable_segments", "library"),
    "async": ("PyTorch, cudaMallocAsync", "library"),
    "async-driver": ("PyTorch, cudaMallocAsync", "driver"),
    "jax": ("JAX, memory as needed", "library"),
}


class Run(NamedTuple):
    """Medians of a run, in seconds as they were recorded: until the memory is free, until the kernel runs again.

    Of a kernel without device memory (``gib`` is empty): to the disk, and to the first output.
    """

    date: str
    commit: str
    machine: str
    driver: str
    bench: str
    memory: str
    moved_by: str
    gib: str
    free: str
    back: str

    @property
    def missed(self) -> tuple[bool, bool]:
        """True where the run took longer than its limit, off the GPU and back."""
        free, back = LIMITS.get(int(self.gib or 0), (None, None))
        if free is None or back is None or self.bench != "fastpath" or self.moved_by == "driver":
            return False, False
        return float(self.free) > free, float(self.back) > back


def recorded(file: Path = FILE) -> list[Run]:
    """Return the recorded runs, the oldest first; those of one day in the order of the file."""
    with file.open(newline="") as lines:
        _, *rows = csv.reader(lines)
    return sorted((Run(*row) for row in rows), key=lambda run: run.date)


def newest(runs: Iterable[Run], **wanted: str) -> list[Run]:
    """Return the newest run on each machine among those with these values, the newest machine's first."""
    by_machine: dict[str, Run] = {}
    for run in sorted(runs, key=lambda run: run.date):
        if all(getattr(run, name) == value for name, value in wanted.items()):
            by_machine.pop(run.machine, None)
            by_machine[run.machine] = run
    return list(by_machine.values())[::-1]


def runs_of(name: str, report: dict[str, Any], commit: str) -> Iterator[Run]:
    """Yield the runs of a report, by the name of its file.  Raises `LookupError` if no bench has that name."""
    date = report["time"].partition("T")[0]
    if name == "kernel-bench.json":
        free, back = (f"{statistics.median(report[verb]):.3f}" for verb in ("checkpoint", "wake"))
        yield Run(date, commit, f"{report['cores']} cores", "", "kernel", "", "", "", free, back)
        return
    machine = re.sub(r"^NVIDIA | \d+GB.*$", "", report["gpu"])
    begin = (date, commit, machine, report["driver"])
    if name == "fastpath-bench.json":
        for key, found in report["sizes"].items():
            gib, _, kind = key.partition(" ")
            if kind in KINDS:
                free, back = (f"{statistics.median(found[way]):.3f}" for way in ("free", "back"))
                yield Run(*begin, "fastpath", *KINDS[kind], gib, free, back)
    elif name == "device-memory-bench.json":
        for row in (name for name in PROGRAMS if name in report["rows"]):
            medians = {figure["what"]: f"{figure['median']:.3f}" for figure in report["rows"][row]}
            (gib,) = {what.partition(" ")[0] for what in medians}
            title = f"{gib} GiB, {PROGRAMS[row].title}"
            free, back = medians[f"{title}: all off"], medians[f"{title}: back"]
            yield Run(*begin, "device_memory", PROGRAMS[row].title, "library", gib, free, back)
    else:
        raise LookupError(f"no bench writes a {name} that has rates")


def add(reports: Iterable[Path], commit: str, file: Path = FILE) -> list[Run]:
    """Write the runs of reports behind those that are recorded.  Return them; those already there are left out."""
    before = recorded(file)
    found = [run for report in reports for run in runs_of(report.name, json.loads(report.read_text()), commit)]
    new = [run for run in found if run not in before]
    with file.open("a", newline="") as lines:
        csv.writer(lines, lineterminator="\n").writerows(new)
    return new


def main() -> None:
    """Add what is named, and print it."""
    parser = argparse.ArgumentParser(description="Add the runs of benches to docs/recorded-runs.csv.")
    parser.add_argument("--commit", required=True, help="the commit that was measured")
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="what a bench has written below $OUT")
    options = parser.parse_args()
    for run in add(options.reports, options.commit):
        print(*run)


if __name__ == "__main__":
    main()
