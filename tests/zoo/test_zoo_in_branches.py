"""Kinds of process state in a branch: each is there as it was, or its difference was named before.

A branch begins from a save point, beside the kernel, which must not notice it.  In `make test` a sample, in
`make torture` all of them; root and an ordinary user.
"""

from __future__ import annotations

import pytest
from keeper import Outcome
from keeping import EVERYBODY, sample, users, why_not
from kinds import Kind, all_kinds

KINDS = all_kinds()
QUICK = sample(KINDS)
#: What a branch shows otherwise, as docs/branches.md says of all branches.
DOCUMENTED = {
    "files.deleted_other_name": "the number of a file's names, one of which belongs to the image",
    "children.sigchld_of_stops": "a SIGCHLD without an ended child, as after a wake",
    "notebooks.history": "the number of the session in IPython's history",
    "notebooks.connection": "the kernel's connection",
}
#: What the kernel itself shows otherwise while there is a branch, as that page says.
DOCUMENTED_BESIDE = {"files.deleted_other_name": DOCUMENTED["files.deleted_other_name"]}
#: What breaks as the branch connects to a name of old, which is the kernel's, and words by which that was named.
REACHES_THE_KERNEL = {"sockets.unix_listener": "another name"}
#: What a branch shows otherwise beside other ports and names of sockets, with the words by which it is named before.
NAMED = {
    "files.flock": "an exclusive lock on",
    "files.posix_lock": "an exclusive lock on",
    "files.posix_lock_of_mapped": "an exclusive lock on",
}
#: What is one for both kernels, and the words by which that is named before.
FOR_BOTH = {
    "children.dataloader_spawned": "a pool of processes that uses it hangs or breaks in each",
    "children.forkserver": "a pool of processes that uses it hangs or breaks in each",
    "children.spawned": "a pool of processes that uses it hangs or breaks in each",
    "children.waiting_spawned": "a pool of processes that uses it hangs or breaks in each",
    "descriptors.fifo_open": "what was in it is there twice",
}
CASES = [
    pytest.param(who, key, marks=() if key in QUICK else pytest.mark.torture, id=f"{who}-{key}")
    for who in ("root", "user")
    for key in KINDS
]


@pytest.fixture(scope="module")
def branching(criu_binary):
    """All users by name, who begin branches."""
    with users(criu_binary, "brancher.py") as made:
        yield made


def why_not_in_a_branch(kind: Kind, who: str, outcome: Outcome) -> str:
    """Why an outcome is none that a branch may have; empty where it is."""
    if outcome.what in ("kept", "renamed"):
        return ""
    if outcome.what == "refused" and outcome.code == "BRANCH_UNSAFE":
        return ""
    if kind.key in {"changed": DOCUMENTED, "disturbed": DOCUMENTED_BESIDE}.get(outcome.what, {}):
        return ""
    words = {"changed": NAMED, "disturbed": REACHES_THE_KERNEL, "named": FOR_BOTH}.get(outcome.what, {}).get(kind.key)
    if words and any(words in each for each in outcome.named):
        return ""
    return f"named before: {outcome.named}; {reason}" if (reason := why_not(kind, who, outcome)) else ""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("who", "key"), CASES)
def test_a_kind_is_as_it_was_in_a_branch_or_its_difference_was_named(branching, wanted, who, key):
    if missing := KINDS[key].lacking():
        pytest.skip(f"not installed: {', '.join(missing)}")
    if who not in EVERYBODY:
        pytest.skip("an ordinary user cannot be root")
    user = branching[who]
    if key not in user.outcomes:
        user.keep(next(group for group in wanted[who] if key in group))
    outcome = user.outcomes[key]
    if outcome.what == "impossible":
        return
    assert not why_not_in_a_branch(KINDS[key], who, outcome), why_not_in_a_branch(KINDS[key], who, outcome)


@pytest.mark.parametrize("who", EVERYBODY)
def test_nothing_was_left_behind(branching, who):
    """After the tests above: no shared memory, no temporary file, no process."""
    assert branching[who].leftovers == []
