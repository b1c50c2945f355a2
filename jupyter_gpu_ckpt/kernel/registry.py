"""The kernels of this user on this host: one directory each, below the runtime base, with a record of what it is.

The owner (a server, a console) holds a lock on its kernels' directories for as long as it lives, so that nobody has to guess
from process ids whether a kernel still has an owner.  `reap` removes what dead owners left.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..engine.capsule import Capsule
from ..errors import CapsuleError

RECORD = "kernel.json"
_LOCK = "owner.lock"


class Registration:
    """This process's claim on one kernel's directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = FileLock(directory / _LOCK, timeout=0, mode=0o600, thread_local=False)
        self._lock.acquire()

    def write(self, **facts: Any) -> None:
        """Replace the record, whole or not at all."""
        draft = self.directory / f".{RECORD}"
        draft.touch(0o600)
        draft.write_text(json.dumps({**facts, "owner": os.getpid(), "directory": str(self.directory)}))
        draft.rename(self.directory / RECORD)

    def end(self) -> None:
        """Give the directory up and remove it."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self._lock.release()


def kernels(base: Path) -> list[dict[str, Any]]:
    """The records of all kernels below ``base``, each with ``owned``: whether its owner lives."""
    found = []
    for directory in _directories(base):
        with contextlib.suppress(OSError, ValueError):
            record = json.loads((directory / RECORD).read_text())
            record["owned"] = _is_owned(directory)
            found.append(record)
    return found


def reap(base: Path) -> list[Path]:
    """Remove the directories whose owner is gone and whose capsule (if any) has ended; returns them.

    A capsule that was told to outlive its owner is left alone: somebody may adopt it.
    """
    removed = []
    for directory in _directories(base):
        if _is_owned(directory):
            continue
        try:
            Capsule.attach(directory).abandon()
        except CapsuleError:
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory)
    return removed


def _directories(base: Path) -> list[Path]:
    return sorted(path.parent for path in base.glob(f"*/{_LOCK}"))


def _is_owned(directory: Path) -> bool:
    try:
        with FileLock(directory / _LOCK, timeout=0, mode=0o600):
            return False
    except Timeout:
        return True
    except OSError:
        return False
