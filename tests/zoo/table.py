"""The table of the zoo: what becomes of each kind of state, for root and for an ordinary user."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from keeper import Outcome
from keeping import why_not
from kinds import FAMILIES, Kind

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "process-state.md"

HEAD = (
    "# What becomes of a process's state\n\n"
    "For users: which state of a kernel's process survives a checkpoint. Each line is a small program in `tests/zoo` "
    "that creates the state in a real kernel, which is checkpointed and restored twice, and compares the system's view "
    "before and after. `python -m pytest tests/zoo --zoo-table` runs all of them, for root and for an ordinary user, "
    "and writes this page from the results.\n\n"
    "*kept*: the same after every wake. *refused*: the checkpoint is refused with the code and a message that names "
    "the state, and the kernel keeps running. *announced*: not kept, and `%gpu_checkpoint --status` says so "
    "beforehand. *documented*: not kept, cannot be repaired from outside, and [the "
    "documentation](../usage.md#what-comes-back-and-what-does-not) says so. "
    "*not possible*: the system does not offer it, or not to this user. A word in **bold** is a known loss that is "
    "not fixed yet.\n"
)

TITLES = {
    "descriptors": "Descriptors",
    "files": "Files",
    "sockets": "Sockets",
    "mappings": "Memory",
    "threads": "Threads",
    "signals": "Signals",
    "timers": "Timers and clocks",
    "attributes": "Process attributes",
    "identity": "Identity and namespaces",
    "terminals": "Terminals",
    "children": "Children",
    "runtime": "Python and its standard library",
    "notebooks": "IPython, ipykernel, widgets",
    "libraries": "Libraries",
}
ROW = re.compile(r"^\| (?!kind \|)([^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", re.MULTILINE)


def cell(kind: Kind, who: str, outcome: Outcome | None) -> str:
    """Return the table's entry of one kind for one user."""
    if outcome is None:
        return "not tried"
    said = {"impossible": "not possible", "refused": f"refused, `{outcome.code}`"}.get(outcome.what, outcome.what)
    if outcome.what == "impossible":
        return said
    if why_not(kind, who, outcome):
        return f"**{said}**"
    expected = kind.expected(who).what
    return expected if expected in ("announced", "documented") and outcome.what == "changed" else said


def remark(kind: Kind) -> str:
    """Return the remedy, or the loss."""
    return f"**Not fixed yet:** {kind.loss}" if kind.loss else kind.advice


def table(kinds: Mapping[str, Kind], found: Mapping[str, Mapping[str, Outcome]]) -> str:
    """The whole page."""
    parts = [HEAD]
    for family in FAMILIES:
        rows = [
            f"| {kind.name} | {cell(kind, 'root', found.get('root', {}).get(key))} "
            f"| {cell(kind, 'user', found.get('user', {}).get(key))} | {remark(kind)} |"
            for key, kind in kinds.items()
            if kind.family == family
        ]
        parts += [
            f"## {TITLES[family]}\n",
            "| kind | root | ordinary user | what to do |\n|---|---|---|---|",
            *rows,
            "",
        ]
    return "\n".join(parts)


def rows(text: str) -> list[tuple[str, str, str, str]]:
    """Kind, root, ordinary user, what to do, of each line of a page."""
    return [tuple(part.strip() for part in row) for row in ROW.findall(text)]  # type: ignore[misc]
