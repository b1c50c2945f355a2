"""Writes docs/compatibility.md from the records."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .row import Row

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "compatibility.md"
STEPS = ("suspend", "checkpoint", "wake", "moved")
Records = Mapping[str, Mapping[str, Mapping[str, Any]]]

HEAD = (
    "# What works with it\n\n"
    "For users: which frameworks and habits a kernel can have when it sleeps. Each row is two cells in "
    "`tests/zoo/compatibility`: the first uses the framework in a real kernel, the second uses it again and compares "
    "values. `make compatibility` (with a GPU: the part `compatibility` of `scripts/gpu-check`) runs the second cell "
    "after a suspend and resume, after a checkpoint and wake, and after the image was moved, and writes this "
    "page from what it found. Where values differ or a kernel does not come back, the command fails and writes no row."
    "\n\n*all*: suspended, checkpointed, woken and moved, with equal values. A code: the checkpoint is refused with "
    "it, and the kernel runs on with equal values; a suspend works. *Moved* means for root: another host (simulated by "
    "namespaces: own processes, network, name, clocks), after push and pull; for an ordinary user, and on a GPU: "
    "another server and another image directory, after push and pull. [Errors](errors.md) explains the codes, [the "
    "page on process state](reference/process-state.md) has the finer kinds. What was not run is left out.\n"
)


class NotForThePage(Exception):
    """A record shows a loss, or a refusal without a word on what to do instead."""


def _cell(row: Row, record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "not run"
    if bad := record.get("lost") or record.get("unmade"):
        raise NotForThePage(f"{row.key}: {bad}")
    if all(record[step] == "yes" for step in STEPS):
        return "all"
    if record["wake"] == "yes":
        return f"not on a host with other addresses (`{record['moved']}`)"
    code = record["suspend"] if record["suspend"] != "yes" else record["checkpoint"]
    if not row.instead:
        raise NotForThePage(f"{row.key} is refused with {code}, and has no word on what to do instead")
    return f"`{code}`" if record["suspend"] == "yes" else f"`{code}` (also a suspend)"


def _packages(record: Mapping[str, Any]) -> str:
    versions = record["versions"]
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or f"Python {record['python']}"


def page(rows: Mapping[str, Row], records: Records) -> str:
    """The whole page."""
    parts = [HEAD]
    refused: list[str] = []
    for kind, title in (("cpu", "On the CPU"), ("gpu", "On a GPU")):
        root, user = records[f"{kind}-root"], records[f"{kind}-user"]
        lines = []
        for key, row in rows.items():
            of = root.get(key) or user.get(key)
            if row.gpu is not (kind == "gpu") or of is None:
                continue
            cells = [_cell(row, root.get(key)), _cell(row, user.get(key))]
            tries = [one[key] for one in (root, user) if key in one]
            when = f"{max(one['date'] for one in tries)}, {', '.join(sorted({one['commit'] for one in tries}))}"
            lines.append(f"| {row.title} | {cells[0]} | {cells[1]} | {_packages(of)} | {when} |")
            if codes := [cell for cell in dict.fromkeys(cells) if "`" in cell]:
                refused.append(f"| {row.title} | {' / '.join(codes)} | {row.instead} |")
        if lines:
            hosts = sorted({one["host"] for found in (root, user) for one in found.values()})
            parts += [f"## {title}\n", f"{len(lines)} rows, on: {'; '.join(hosts)}.\n"]
            parts += ["| what | root | ordinary user | versions | date, commit |\n|---|---|---|---|---|", *lines, ""]
    parts += ["## What is refused, and what to do instead\n"]
    parts += ["| what | code | instead |\n|---|---|---|", *refused] if refused else ["Nothing."]
    return "\n".join([*parts, ""])
