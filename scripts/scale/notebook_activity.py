"""Synthetic notebook activity: working hours of users, duration of cells, pauses between them.

Fitted to three figures published of production notebook clusters for interactive training (such as those of
Carver et al., NotebookOS, ASPLOS 2026, arXiv:2503.20591): half of the cells run less than 2 minutes, the median gap
between them is 5 minutes, and reserved GPUs are idle more than 80 % of the time.  All else here is an assumption, named
in `Habits`.  Every user has a random stream of their own: the same seed gives the same activity, whatever is done with
it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from move_costs import GIB

HOUR, DAY, WEEK = 3600.0, 86400.0, 7 * 86400.0


@dataclass(frozen=True)
class Habits:
    """Seconds and bytes.  Medians and sigmas are of lognormal distributions."""

    #: Published: the median.  The sigma makes the mean 5 minutes.
    cell_median: float = 120.0
    cell_sigma: float = 1.35
    #: Published: the median of all gaps, `GAP_MEDIAN`.  They are of two kinds, so that GPUs are idle as published:
    #: somebody thinks, or does something else for an hour.
    think_median: float = 218.0
    think_sigma: float = 1.0
    break_share: float = 0.2
    break_median: float = 3600.0
    break_sigma: float = 0.9
    #: Assumed: a third of the users works on a weekday, a tenth at the weekend; from about ten, some cells.
    weekday: float = 0.35
    weekend: float = 0.10
    start_mean: float = 10.5 * HOUR
    start_sigma: float = 2.0 * HOUR
    cells_median: float = 10.0
    cells_sigma: float = 0.5
    #: Assumed: how often somebody who leaves shuts the kernel down.
    shuts_down: float = 0.2
    #: Assumed: device memory of a notebook, and how long somebody waits for a GPU before going away.
    memory_median: float = 16.0 * GIB
    memory_sigma: float = 0.9
    memory_most: float = 130.0 * GIB
    patience: float = 0.5 * HOUR

    @property
    def cell_mean(self) -> float:
        """Seconds."""
        return _mean(self.cell_median, self.cell_sigma)

    @property
    def gap_mean(self) -> float:
        """Seconds."""
        think, pause = _mean(self.think_median, self.think_sigma), _mean(self.break_median, self.break_sigma)
        return (1 - self.break_share) * think + self.break_share * pause


@dataclass(frozen=True)
class Cell:
    """Its author waits ``gap`` seconds after the cell before it, then it computes for ``seconds`` on a GPU."""

    gap: float
    seconds: float


@dataclass(frozen=True)
class Session:
    """One sitting, from ``start`` (seconds from a Monday's midnight).  ``shuts_down``: the kernel ends with it."""

    start: float
    cells: tuple[Cell, ...]
    shuts_down: bool


@dataclass(frozen=True)
class Person:
    """One user with one notebook, whose ``device`` bytes are on the GPU from its first cell on."""

    number: int
    device: int
    sessions: tuple[Session, ...] = field(repr=False)


def people(count: int, weeks: int, seed: int, habits: Habits | None = None) -> list[Person]:
    """``count`` users over some weeks."""
    chosen = habits or Habits()
    return [_person(number, weeks, random.Random(f"{seed}/{number}"), chosen) for number in range(count)]


def _person(number: int, weeks: int, rng: random.Random, habits: Habits) -> Person:
    device = min(habits.memory_most, rng.lognormvariate(math.log(habits.memory_median), habits.memory_sigma))
    sessions = []
    for day in range(7 * weeks):
        if rng.random() < (habits.weekday if day % 7 < 5 else habits.weekend):
            sessions.append(_session(day * DAY, rng, habits))
    return Person(number, int(device), tuple(sessions))


def _session(midnight: float, rng: random.Random, habits: Habits) -> Session:
    start = midnight + min(max(0.0, rng.gauss(habits.start_mean, habits.start_sigma)), DAY - 1)
    count = max(1, round(rng.lognormvariate(math.log(habits.cells_median), habits.cells_sigma)))
    gaps = [0.0, *(_gap(rng, habits) for _ in range(count - 1))]
    return Session(start, tuple(Cell(gap, _cell(rng, habits)) for gap in gaps), rng.random() < habits.shuts_down)


def endless(rng: random.Random, habits: Habits | None = None) -> Iterator[Cell]:
    """Cells of somebody who never goes home."""
    chosen = habits or Habits()
    while True:
        yield Cell(_gap(rng, chosen), _cell(rng, chosen))


def _cell(rng: random.Random, habits: Habits) -> float:
    return rng.lognormvariate(math.log(habits.cell_median), habits.cell_sigma)


def _gap(rng: random.Random, habits: Habits) -> float:
    if rng.random() < habits.break_share:
        return rng.lognormvariate(math.log(habits.break_median), habits.break_sigma)
    return rng.lognormvariate(math.log(habits.think_median), habits.think_sigma)


def _mean(median: float, sigma: float) -> float:
    return median * math.exp(sigma**2 / 2)
