"""Files that another user of this machine must be able to read to run the code under test."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from jupyter_gpu_ckpt.criu.install import CriuBinary

REPOSITORY = Path(__file__).resolve().parents[2]


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


def readable_criu(criu: CriuBinary, place: Path) -> str:
    """A CRIU that everybody may run: a copy in ``place`` of one that is unpacked, perhaps in the home of root."""
    if len(criu.argv) == 1:
        return criu.argv[0]
    tree = Path(criu.argv[-1]).parents[2]
    shutil.copytree(tree, place / "criu", symlinks=True)
    for directory, _, files in os.walk(place / "criu"):
        os.chmod(directory, 0o755)
        for name in files:
            path = Path(directory, name)
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o555)
    return str(place / "criu")
