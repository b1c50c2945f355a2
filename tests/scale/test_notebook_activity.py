"""The synthetic people behave as was published, and the same way every time."""

from __future__ import annotations

import statistics

import pytest
from notebook_activity import DAY, Habits, people


@pytest.fixture(scope="module")
def crowd():
    return people(3000, 2, seed=7)


@pytest.fixture(scope="module")
def cells(crowd):
    return [cell for person in crowd for session in person.sessions for cell in session.cells]


@pytest.fixture(scope="module")
def gaps(crowd):
    return [cell.gap for person in crowd for session in person.sessions for cell in session.cells[1:]]


def test_half_of_the_cells_run_less_than_two_minutes(cells):
    assert sum(cell.seconds < 120 for cell in cells) / len(cells) == pytest.approx(0.5, abs=0.01)


def test_the_median_gap_is_five_minutes(gaps):
    assert statistics.median(gaps) == pytest.approx(300, rel=0.03)


def test_a_reserved_gpu_is_idle_more_than_four_fifths_of_the_time(cells, gaps):
    """From the first cell of a sitting to its last; a reservation that continues into the night is idle for longer."""
    busy = sum(cell.seconds for cell in cells)
    assert 0.80 < sum(gaps) / (sum(gaps) + busy) < 0.84


def test_the_means_are_those_of_the_distributions(cells, gaps):
    habits = Habits()
    assert statistics.fmean(cell.seconds for cell in cells) == pytest.approx(habits.cell_mean, rel=0.03)
    assert statistics.fmean(gaps) == pytest.approx(habits.gap_mean, rel=0.03)


def test_who_comes_when(crowd):
    days = [session.start // DAY % 7 for person in crowd for session in person.sessions]
    assert days.count(2) / 3000 / 2 == pytest.approx(Habits().weekday, abs=0.03)
    assert days.count(6) / 3000 / 2 == pytest.approx(Habits().weekend, abs=0.03)
    for person in crowd:
        starts = [session.start for session in person.sessions]
        assert starts == sorted(starts)
        assert all(0 <= start < 14 * DAY for start in starts)


def test_memory_is_as_requested(crowd):
    devices = [person.device for person in crowd]
    assert statistics.median(devices) == pytest.approx(Habits().memory_median, rel=0.06)
    assert max(devices) <= Habits().memory_most


def test_the_same_seed_gives_the_same_people_whichever_others_are_there():
    few, many = people(5, 1, seed=3), people(50, 1, seed=3)
    assert few == many[:5]
    assert people(5, 1, seed=4) != few
