"""Costs of moving a kernel off a GPU and back, as they were measured.

Device memory moves at the rate of the library's fast path (docs/recorded-runs.csv: the newest runs of 16 and 48 GiB on
an H200); the rest of a move is from docs/measurements.md ("Device memory at the rate of the bus": the image of 16 GiB;
"H200, 8 GiB of tensors").  Each cost has a part that does not depend on the bytes and a part that does.
"""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

import records

GIB = 1 << 30
CARD = "H200"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "measurements.md"
#: The two sizes, in GiB, between which the fast path's rate is taken, and the device memory of the measured image.
SMALL, LARGE = 16, 48
IMAGE = SMALL * GIB


@dataclass(frozen=True)
class Costs:
    """Floors are seconds, rates are bytes per second: of device memory, or of the image."""

    suspend_floor: float
    suspend_rate: float
    dump_floor: float
    dump_rate: float
    restore_floor: float
    restore_rate: float
    resume_floor: float
    resume_rate: float
    #: Bytes that an image has besides the device memory.
    besides: int

    def suspend(self, device: int) -> float:
        """Seconds until the GPU is free."""
        return self.suspend_floor + device / self.suspend_rate

    def dump(self, image: int) -> float:
        """Seconds from then until the image is on disk and the process has ended."""
        return self.dump_floor + image / self.dump_rate

    def restore(self, image: int) -> float:
        """Seconds from the request until the process is there again, suspended."""
        return self.restore_floor + image / self.restore_rate

    def resume(self, device: int) -> float:
        """Seconds until the device memory of a suspended process is on the GPU again."""
        return self.resume_floor + device / self.resume_rate


@functools.cache
def measured() -> Costs:
    """Return the costs.  Raises `LookupError` where a figure is not found."""
    fast, rest = section("Device memory at the rate of the bus"), section("H200, 8 GiB of tensors")
    free, back = ({gib: moved(gib)[way] for gib in (SMALL, LARGE)} for way in (0, 1))
    free_rate, back_rate = ((LARGE - SMALL) * GIB / (seconds[LARGE] - seconds[SMALL]) for seconds in (free, back))
    image = figure(fast, "checkpoint, from the request", "GB", 2) * 1e9
    ending, matching = figure(rest, "end of the process", "s"), figure(rest, "match, reserve", "s")
    dumping = figure(fast, "checkpoint, from the request", "s", 2) - free[SMALL] - ending
    restoring = figure(fast, "cold wake", "s", 2) - back[SMALL] - matching
    return Costs(
        suspend_floor=free[SMALL] - IMAGE / free_rate,
        suspend_rate=free_rate,
        dump_floor=ending,
        dump_rate=image / dumping,
        restore_floor=matching,
        restore_rate=image / restoring,
        resume_floor=back[SMALL] - IMAGE / back_rate,
        resume_rate=back_rate,
        besides=round(image) - IMAGE,
    )


def moved(gib: int) -> tuple[float, float]:
    """Return the seconds off the GPU and back of so much device memory, in the newest run that is recorded."""
    # Of one bench: rates are differences between sizes, and other benches have run on other machines of that kind.
    wanted = {"bench": "fastpath", "machine": CARD, "memory": "PyTorch", "moved_by": "library", "gib": str(gib)}
    found = records.newest(records.recorded(), **wanted)
    if not found:
        raise LookupError(f"docs/recorded-runs.csv has no run with {gib} GiB on an {CARD}")
    return float(found[0].free), float(found[0].back)


def section(title: str) -> str:
    """The text below a heading of the page."""
    return PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def figure(text: str, phase: str, unit: str, column: int = 3) -> float:
    """Return the first number with ``unit`` in a column of the row that begins with ``phase``."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > column and f"{cells[1]} ".startswith(phase):
            found = re.search(rf"([\d.]+) {unit}\b", cells[column])
            if found is not None:
                return float(found.group(1))
    raise LookupError(f"docs/measurements.md has no row {phase!r} with {unit}")
