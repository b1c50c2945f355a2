"""Sweeps: many cases of one kind (marker ``sweep``).  `make test` runs a part of each, `make torture` all of them.

The part is drawn by the commit, so that commits run different cases and a commit always the same.
``GPU_CKPT_SWEEP_SEED`` in the environment, which a run prints, draws it again elsewhere.

``sweep(part, of="file")``: all tests of a file, or those that have it, are the cases of one sweep.

A run that repeats tests for another user has ``GPU_CKPT_SWEEP_PART`` in its environment: then that part is run of the
tests that are chosen in each file, a sweep's among them.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

SEED, PART_OF_FILES = "GPU_CKPT_SWEEP_SEED", "GPU_CKPT_SWEEP_PART"
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
    sweeps = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("sweep"):
            name = item.originalname if marker.kwargs.get("of") != "file" else ""
            sweeps[item.path.name, name, (marker.args or (PART,))[0]].append(item)
    for (file, name, part), cases in sweeps.items():
        for item in _rest(cases, part, f"{file} {name}"):
            item.add_marker(pytest.mark.torture)


def rest_of_files(items: Iterable[pytest.Function]) -> list[pytest.Function]:
    """Return the chosen tests that a run which repeats a part of them for another user leaves out."""
    part, files = float(os.environ.get(PART_OF_FILES, 1)), defaultdict(list)
    for item in items:
        files[item.path.name].append(item)
    return [item for file, chosen in files.items() for item in _rest(chosen, part, file)]


def _rest(cases: Sequence[pytest.Function], part: float, name: str) -> list[pytest.Function]:
    """Return the cases that are not in the part, at least one, that is drawn for this commit."""
    return random.Random(f"{os.environ[SEED]} {name}").sample(cases, len(cases) - math.ceil(len(cases) * part))
