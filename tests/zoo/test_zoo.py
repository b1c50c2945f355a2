"""Every kind of process state is kept, or refused by name: nothing is lost and nothing silently changed.

In `make test` a sample, in `make torture` all of them; root and an ordinary user, two cycles each.
"""

from __future__ import annotations

import pytest
from keeper import GONE_BACK
from keeping import EVERYBODY, sample, why_not
from kinds import all_kinds
from table import DOCUMENT, remark, rows

KINDS = all_kinds()
QUICK = sample(KINDS)
#: What a kernel shows otherwise once it has gone back, as docs/usage.md says of all that have.
AFTER_GOING_BACK = {"notebooks.history": "the number of the session in IPython's history"}
CASES = [
    pytest.param(who, key, marks=() if key in QUICK else pytest.mark.torture, id=f"{who}-{key}")
    for who in ("root", "user")
    for key in KINDS
]


def test_there_are_hundreds_of_kinds_and_each_has_a_name_of_its_own():
    assert len(KINDS) >= 200
    assert len({kind.name for kind in KINDS.values()}) == len(KINDS)
    assert not [kind.name for kind in KINDS.values() if "|" in kind.name]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("who", "key"), CASES)
def test_a_kind_is_kept_or_refused_by_name(zoo, wanted, who, key):
    if missing := KINDS[key].lacking():
        pytest.skip(f"not installed: {', '.join(missing)}")
    if who not in EVERYBODY:
        pytest.skip("an ordinary user cannot be root")
    user = zoo[who]
    if key not in user.outcomes:
        user.keep(next(group for group in wanted[who] if key in group))
    outcome = user.outcomes[key]
    if outcome.what == "impossible":
        return  # this system, or this user, cannot have it: nothing can be lost
    if key in AFTER_GOING_BACK and outcome.what == "changed" and outcome.text.startswith(GONE_BACK):
        return
    assert not why_not(KINDS[key], who, outcome), why_not(KINDS[key], who, outcome)


@pytest.mark.parametrize("who", EVERYBODY)
def test_nothing_was_left_behind(zoo, who):
    """After the tests above: no shared memory, no temporary file, no process."""
    assert zoo[who].leftovers == []


def test_the_table_has_exactly_the_declared_kinds():
    """`python -m pytest tests/zoo --zoo-table` writes it."""
    found = rows(DOCUMENT.read_text())
    assert [(name, advice) for name, _, _, advice in found] == [(kind.name, remark(kind)) for kind in KINDS.values()]
