"""Closed directories shown to everybody, in a private mount namespace: a checkout may lie in root's home."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def needed() -> list[Path]:
    """The directories that the user must be able to read: the interpreter, its packages, this checkout."""
    return sorted({Path(os.path.realpath(place)) for place in (sys.prefix, sys.base_prefix, REPOSITORY)})


def closed_to_others(path: Path) -> Path | None:
    """The topmost directory above ``path`` that other users cannot enter."""
    return next((above for above in reversed(path.parents) if not above.stat().st_mode & 0o001), None)


def opened(paths: Iterable[Path], stage: Path) -> str:
    """Shell commands that show ``paths`` to everybody, and nothing else of what lies beside them.

    For a private mount namespace: the closed directory is covered by an empty open one, into which the needed
    directories alone are bound.  Nothing of the machine is changed.
    """
    closed: dict[Path, list[Path]] = {}
    for path in paths:
        if above := closed_to_others(path):
            closed.setdefault(above, []).append(path)
    lines = []
    for number, (above, inside) in enumerate(closed.items()):
        kept = [(path, stage / f"{number}-{index}") for index, path in enumerate(inside)]
        lines += [shlex.join(["mkdir", "-p", str(aside)]) for _, aside in kept]
        lines += [shlex.join(["mount", "--rbind", str(path), str(aside)]) for path, aside in kept]
        lines.append(shlex.join(["mount", "-t", "tmpfs", "-o", "mode=0755", "tmpfs", str(above)]))
        for path, aside in kept:
            lines.append(shlex.join(["mkdir", "-p", str(path)]))
            lines.append(shlex.join(["mount", "--rbind", str(aside), str(path)]))
    return "\n".join(lines)
