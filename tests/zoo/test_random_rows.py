"""Random combinations of the rows of docs/compatibility.md, random verbs, random kill -9, as in `test_random_cycles`.

After each suspend, checkpoint, wake or move the second cells of the rows show what they showed at first.
``ROWS_CYCLES`` is the number of cycles, 150 by default; each prints its seed, and ``ROWS_SEED`` begins with that one.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from compatibility import page, records
from compatibility.rows import rows
from keeping import EVERYBODY, User
from test_random_cycles import ANSWER, Owner, Wandering

CYCLES = int(os.environ.get("ROWS_CYCLES", "150"))
SEED = int(os.environ.get("ROWS_SEED", "20"))
#: What two rows may be refused for that were kept one by one: the one forks the other's connections.
REFUSALS = {"CHILD_PROCESSES", "KERNEL_BUSY", "LOOPBACK_TCP"}


def kept(who: str) -> list[str]:
    """The rows that this user keeps, as the page says, and whose packages are here."""
    found = records.read()[f"cpu-{who}"]
    good = (key for key, record in found.items() if all(record.get(step) == "yes" for step in page.STEPS))
    return sorted(key for key in good if not rows()[key].lacking())


class Combinations(Wandering):
    """One kernel after the other, each with a few rows."""

    few, most = 2, 5
    options = ("rows",)
    verbs: ClassVar = ["checkpoint", "restore", "suspend", "resume", "move"]
    refusals = REFUSALS
    begins: ClassVar = {"restore": "checkpointed", "resume": "suspended", "move": "checkpointed"}

    def __init__(self, user: User, name: str, kinds: list[str]) -> None:
        super().__init__(user, name, kinds)
        self._moves = 0

    def after(self, verb: str, victim: str, dice: random.Random) -> str:
        if verb != "move":
            return super().after(verb, victim, dice)
        self.owner.end()
        self._moves += 1
        target = self.user.own(self.directory.with_name(f"{self.directory.name.partition('-')[0]}-{self._moves}"))
        script = str(Path(__file__).with_name("wanderer.py"))
        argv = self.user.command(sys.executable, script, str(self.directory), str(self.base), "move", str(target))
        if victim == "owner":
            with subprocess.Popen(argv, env=self.user.environment, cwd="/") as mover:
                try:
                    mover.wait(dice.uniform(0, 2))
                except subprocess.TimeoutExpired:
                    mover.kill()
        subprocess.run(argv, env=self.user.environment, cwd="/", check=True, timeout=ANSWER)
        assert self.truths() == [0, 0], "nothing is left where it was"
        self.directory = target
        assert self.truths() == [0, 1]
        self.owner = Owner(self.user, self.directory, self.base, *self.options)
        assert self.owner.first is not None, self.errors()[-3000:]
        self.brought_to("running")
        self.shows()
        return f"move, {'killed and done again' if victim == 'owner' else 'nobody killed'}: the same as before"


@pytest.mark.parametrize("who", ["root", "user"])
@pytest.mark.parametrize(
    "cycles",
    [
        pytest.param(3, id="few"),
        pytest.param(CYCLES, id="many", marks=[pytest.mark.torture, pytest.mark.timeout(60 + 40 * CYCLES)]),
    ],
)
def test_any_rows_together_are_the_same_after_any_death(zoo, who, cycles):
    if who not in EVERYBODY:
        pytest.skip("an ordinary user cannot be root")
    Combinations(zoo[who], f"rows{cycles}", kept(who)).wander(SEED, cycles, "ROWS_SEED")
