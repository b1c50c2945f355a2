"""Costs of moves are those that were measured."""

from __future__ import annotations

import pytest
from move_costs import GIB, IMAGE, figure, measured, moved, section

TABLE = section("Device memory at the rate of the bus")


def test_moves_cost_what_was_measured():
    costs = measured()
    image = IMAGE + costs.besides
    free, back = moved(16)
    assert costs.suspend(IMAGE) == pytest.approx(free)
    assert costs.resume(IMAGE) == pytest.approx(back)
    assert costs.suspend(48 * GIB) == pytest.approx(moved(48)[0])
    assert costs.resume(48 * GIB) == pytest.approx(moved(48)[1])
    checkpoint, wake = figure(TABLE, "checkpoint, from", "s", 2), figure(TABLE, "cold wake", "s", 2)
    assert costs.suspend(IMAGE) + costs.dump(image) == pytest.approx(checkpoint)
    assert costs.restore(image) + costs.resume(IMAGE) == pytest.approx(wake)


def test_a_size_that_was_not_used_for_the_costs_agrees():
    costs = measured()
    assert costs.suspend(4 * GIB) == pytest.approx(moved(4)[0], rel=0.1)
    assert costs.resume(4 * GIB) == pytest.approx(moved(4)[1], rel=0.1)


def test_the_figures_are_within_reason():
    """A column that was taken for another would not be."""
    costs = measured()
    assert 1e9 < costs.restore_rate < costs.dump_rate < 10e9 < costs.suspend_rate < 60e9
    assert 10e9 < costs.resume_rate < 60e9
    assert 0 < costs.besides < 2 * GIB
    floors = (costs.suspend_floor, costs.dump_floor, costs.restore_floor, costs.resume_floor)
    assert all(0 < floor < 1 for floor in floors)


def test_a_missing_row_is_an_error():
    with pytest.raises(LookupError, match="teleport"):
        figure(TABLE, "teleport", "s")
    with pytest.raises(LookupError, match="3 GiB"):
        moved(3)
