"""The smallest kernel there is, and what Linux says of a process."""

from __future__ import annotations

import os
from pathlib import Path

from jupyter_gpu_ckpt.capsule.capsule import Capsule

ENV = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}


def sleeper(capsule: Capsule) -> Capsule:
    capsule.spawn(["sleep", "1000"], ENV, "/")
    return capsule


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)
