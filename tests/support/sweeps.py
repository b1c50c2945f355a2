"""Sweeps: many cases of one kind (marker ``sweep``).  `make test` runs a part of each, `make torture` all of them.

The part is drawn by the commit, so that commits run different cases and a commit always the same.
``GPU_CKPT_SWEEP_SEED`` in the environment, which a run prints, draws it again elsewhere.

A run that repeats tests for another user has ``GPU_CKPT_SWEEP_CASES`` in its environment: then the cases of each test
that is no sweep are one, too, of which that part is run, and no test is left out as a whole.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

SEED, CASES = "GPU_CKPT_SWEEP_SEED", "GPU_CKPT_SWEEP_CASES"
#: The part of a sweep whose marker names none.
PART = 1 / 3


def set_seed() -> None:
    """Note the commit in the environment, for all processes of this run, unless it has a seed."""
    if not os.environ.get(SEED):
        command = ["git", "rev-parse", "--short=12", "HEAD"]
        try:
            head = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True).stdout
        except FileNotFoundError:  # no git
            head = ""
        os.environ[SEED] = head.strip() or "0"


def mark_rest(items: Iterable[pytest.Function]) -> None:
    """Mark as ``torture`` the cases that `make test` leaves out."""
    sweeps, part_of_all = defaultdict(list), float(os.environ.get(CASES, 1))
    for item in items:
        if marker := item.get_closest_marker("sweep"):
            sweeps[item.path.name, item.originalname, (marker.args or (PART,))[0]].append(item)
        elif part_of_all < 1 and not item.get_closest_marker("torture"):
            sweeps[item.path.name, item.nodeid.partition("[")[0], part_of_all].append(item)
    for (file, name, part), cases in sweeps.items():
        rest = len(cases) - math.ceil(len(cases) * part)
        for item in random.Random(f"{os.environ[SEED]} {file} {name}").sample(cases, rest):
            item.add_marker(pytest.mark.torture)
