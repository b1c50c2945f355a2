"""What a move costs is what was measured: docs/measurements.md, "H200, 8 GiB of tensors"."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from move_costs import GIB, Costs

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "measurements.md").read_text()
SECTION = PAGE.partition("## H200, 8 GiB of tensors")[2].partition("\n## ")[0]


def ours(phase: str) -> float:
    """Seconds, from the column of this project."""
    row = next(line for line in SECTION.splitlines() if line.startswith("| ") and phase in line)
    found = re.search(r"([\d.]+) s", row.split("|")[3])
    assert found is not None, row
    return float(found.group(1))


@pytest.mark.parametrize(
    ("measured", "modelled"),
    [
        (lambda: ours("preflight, drain") + ours("the GPU is free"), lambda costs: costs.suspend(8 * GIB)),
        (
            lambda: ours("CRIU dump") + ours("on disk") + ours("end of the process"),
            lambda costs: costs.dump(8 * GIB + costs.besides),
        ),
        (
            lambda: ours("wake, together"),
            lambda costs: costs.restore(8 * GIB + costs.besides) + costs.resume(8 * GIB),
        ),
    ],
    ids=["the GPU is free", "on disk", "back"],
)
def test_eight_gib_cost_what_was_measured(measured, modelled):
    assert modelled(Costs()) == pytest.approx(measured(), rel=0.03)


def test_a_kernel_without_device_memory_is_back_as_soon_as_was_measured():
    assert Costs().resume(0) == pytest.approx(0.091)
    assert "0.091 s" in PAGE
