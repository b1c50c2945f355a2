"""Results of each row, as JSON beside the page: one file for each kind of user and machine."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).resolve().parents[3] / "docs" / "reference" / "compatibility"
#: The files, in the order of the page's columns.
NAMES = ("cpu-root", "cpu-user", "gpu-root", "gpu-user")


def read(directory: Path = DIRECTORY) -> dict[str, dict[str, dict[str, Any]]]:
    """Every file's rows by their keys; a file that there is not yet has none."""
    return {name: _load(directory / f"{name}.json") for name in NAMES}


def add(name: str, key: str, record: dict[str, Any], directory: Path = DIRECTORY) -> None:
    """Note what became of a row in the file of that name, in place of what was there."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)  # several runs may share the rows
        rows = {**_load(path), key: record}
        path.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    finally:
        os.close(handle)


def _load(path: Path) -> dict[str, dict[str, Any]]:
    return dict(json.loads(path.read_text())) if path.exists() else {}
