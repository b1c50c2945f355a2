"""Small images for the tests of what may happen to one."""

from __future__ import annotations

import os
from dataclasses import replace

from jupyter_gpu_ckpt.image.manifest import Manifest
from jupyter_gpu_ckpt.image.store import Image, Store

FACTS = Manifest(
    id="",
    kernel_id="0123456789ab",
    created=1.0,
    kernel_name="python3",
    uid=os.geteuid(),
    hostname="here",
    pid=8192,
    pipes=[1, 2],
    monotonic=1,
    boottime=2,
    runtime_dir="/nowhere/kernel",
    criu_version="4.2.1",
    device_bytes={"GPU-1": 3},
    steps={"dump": 0.1},
    report={"threads": 3},
    generation=1,
)
FILES = {"pages-1.img": b"pages" * 1000, "core-1.img": b"core", "inventory.img": b"", "session.json": b"{}"}


def publish(store: Store, files: dict[str, bytes] | None = None, **facts) -> Image:
    """An image of a kernel that has ended."""
    draft = store.begin(facts.get("kernel_id", FACTS.kernel_id))
    for name, content in (FILES if files is None else files).items():
        place = draft.path if name == "session.json" else draft.criu_directory
        (place / name).write_bytes(content)
        (place / name).chmod(0o644)
    return draft.publish(replace(FACTS, **facts))
