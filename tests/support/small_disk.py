"""A file system of a chosen size, which only root can mount."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted(place: Path) -> Iterator[Callable[[int], None]]:
    """Mount one of 1 GiB at the directory ``place``, for the body; yield a function that sets its size in bytes."""
    if os.geteuid() != 0:
        pytest.skip(reason="only root can mount a file system of a chosen size")
    place.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1g,mode=0700", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, timeout=60).returncode != 0:
        pytest.skip(reason="this machine does not let root mount a tmpfs")

    def resize(size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(place)], check=True, timeout=60)

    try:
        yield resize
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=60)
