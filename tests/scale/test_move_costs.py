"""What a move costs is what docs/measurements.md says."""

from __future__ import annotations

import pytest
from move_costs import GIB, TENSORS, figure, measured, section

TABLE = section("H200, 8 GiB of tensors")


def test_eight_gib_cost_what_was_measured():
    """Sums that the table has, too, measured as a whole: the medians of parts do not add up exactly."""
    costs = measured()
    image = TENSORS + costs.besides
    assert costs.suspend(TENSORS) + costs.dump(image) == pytest.approx(figure(TABLE, "**leaving", "s"), rel=0.04)
    assert costs.restore(image) + costs.resume(TENSORS) == pytest.approx(figure(TABLE, "**wake", "s"), rel=0.04)


def test_the_figures_are_within_reason():
    """A column that was taken for another would not be."""
    costs = measured()
    assert 1e9 < costs.dump_rate < costs.restore_rate < costs.resume_rate < 60e9
    assert 1e9 < costs.suspend_rate < 60e9
    assert 0 < costs.besides < 2 * GIB
    assert all(0 < floor < 1 for floor in (costs.suspend_floor, costs.dump_floor, costs.restore_floor))
    assert 0 < costs.resume_floor < costs.suspend_floor


def test_a_row_that_is_gone_is_an_error():
    with pytest.raises(LookupError, match="teleport"):
        figure(TABLE, "teleport", "s")
