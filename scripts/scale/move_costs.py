"""What it costs to take a kernel off a GPU and to bring it back, by bytes: as docs/measurements.md says.

Read from the column "ours" of its table "H200, 8 GiB of tensors", and for a kernel without device memory from "A kernel
without device memory".  A cost is a part that does not depend on bytes and a part that does.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
PAGE = Path(__file__).resolve().parents[2] / "docs" / "measurements.md"
#: Device memory of the kernel in the table.
TENSORS = 8 * GIB


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
    """What the page says.  Raises `LookupError` where it does not say it any more."""
    gpu, cpu = section("H200, 8 GiB of tensors"), section("A kernel without device memory")
    image = figure(gpu, "image", "GiB") * GIB
    return Costs(
        suspend_floor=figure(gpu, "preflight, drain, quiesce", "s"),
        suspend_rate=TENSORS / figure(gpu, "CUDA lock and checkpoint", "s"),
        dump_floor=figure(gpu, "end of the process", "s"),
        dump_rate=image / (figure(gpu, "CRIU dump", "s") + figure(gpu, "on disk", "s")),
        restore_floor=figure(gpu, "match, reserve, connect, thaw, release", "s"),
        restore_rate=image / figure(gpu, "CRIU restore", "s"),
        resume_floor=figure(cpu, "wake, from the execute", "s", column=2) - figure(cpu, "of which CRIU", "s", column=2),
        resume_rate=TENSORS / figure(gpu, "CUDA restore and unlock", "s"),
        besides=round(image) - TENSORS,
    )


def section(title: str) -> str:
    """The text below a heading of the page."""
    return PAGE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def figure(text: str, phase: str, unit: str, column: int = 3) -> float:
    """The number in the row of a table that begins with ``phase``."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > column and cells[1].startswith(phase):
            found = re.match(rf"\**([\d.]+) {unit}\b", cells[column])
            if found is not None:
                return float(found.group(1))
    raise LookupError(f"docs/measurements.md does not tell of {phase!r} any more")
