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
    "For engineers: which state of a kernel's process survives a checkpoint, kind by kind; "
    "[usage](../usage.md#what-comes-back-and-what-does-not) has the sum of it. Each line is a small program in "
    "`tests/zoo` that creates the state in a real kernel, which is checkpointed and restored twice, and compares the "
    "system's view before and after. `python -m pytest tests/zoo --zoo-table` runs all of them, for root and for an "
    "ordinary user, and writes this page from the results.\n\n"
    "*kept*: the same after every wake. *refused*: the checkpoint is refused with the code and a message that names "
    "the state, and the kernel keeps running. *announced*: not kept, and `%gpu_checkpoint --status` says so "
    "beforehand. *documented*: not kept, cannot be repaired from outside, and [the "
    "documentation](../usage.md#what-comes-back-and-what-does-not) says so. "
    "*not possible*: the system does not offer it, or not to this user. A word in **bold** is a known loss that is "
    "not fixed yet.\n\n"
    "Also different after a wake, and in no row:\n"
    "\n"
    "- Of a TCP connection among the kernel's processes, numbers that Linux chooses are those of a new one: "
    "the port of a client's end if another program has it, the size of segments where no `TCP_MAXSEG` was set "
    "before it was made, `SO_INCOMING_CPU`, what `TCP_INFO` counts. An IPv6 socket that Linux had given its "
    "port shows `IPV6_V6ONLY`. `TCP_FASTOPEN_CONNECT` is named when the kernel wakes.\n"
    "- Socket settings that Linux shows to nobody are not saved: `SO_INQ` of a unix socket, `IPV6_PKTINFO`, "
    "keys of `TCP_MD5SIG` and TCP-AO, programs by which sockets share a port (`SO_ATTACH_REUSEPORT_CBPF`), "
    "and a `TCP_MAXSEG` that was set after the connection was made, which has no effect on it.\n"
    "- On Linux before 6.5, which does not show it, an eventfd made with `EFD_SEMAPHORE` is a plain counter: "
    "a read takes the whole count. A watched file that is gone is reported as deleted.\n"
    "- A program outside that locked, changed and unlocked a file during the sleep is noticed by the changed "
    "file (`FILE_CHANGED`), but not in the fraction of a second between the comparison of the files and the "
    "locks.\n"
    "- If settings that protect others from the kernel, or the state of its own locks, cannot be restored, "
    "the wake fails and keeps the image.\n"
    "- A checkpoint is refused for children that have lost their parent if the kernel has no root process (a "
    "package built without a C compiler; a root process that was killed), and for children forked by a kernel "
    "that another server has suspended (`CHILD_PROCESSES`). `os.wait()` in the kernel sees its own children "
    "only.\n"
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
