"""Images that are removed when there are too many, and those that never are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from images import FACTS

from jupyter_gpu_ckpt.image.manifest import FileEntry
from jupyter_gpu_ckpt.image.retention import Limits, choose
from jupyter_gpu_ckpt.image.store import Image


def image(name: str, kernel: str, created: float, size: int = 10) -> Image:
    files = {"criu/pages-1.img": FileEntry(size, "0" * 64)}
    return Image(Path("/images", name), replace(FACTS, id=name, kernel_id=kernel, created=created, files=files))


IMAGES = [image("a1", "a", 1), image("b1", "b", 2), image("a2", "a", 3), image("a3", "a", 4), image("b2", "b", 5, 100)]


@pytest.mark.parametrize(
    ("limits", "protected", "going"),
    [
        (Limits(), "", ""),
        (Limits(keep_last=1), "", "a1 b1 a2"),
        (Limits(keep_last=2), "", "a1"),
        (Limits(keep_last=0), "", "a1 b1 a2 a3 b2"),
        (Limits(keep_last=0), "a3 b2", "a1 b1 a2"),
        (Limits(max_age=6), "", "a1 b1 a2"),
        (Limits(max_age=6), "b1", "a1 a2"),
        (Limits(max_bytes=140), "", ""),
        (Limits(max_bytes=139), "", "a1"),
        (Limits(max_bytes=120), "a1", "b1 a2"),
        (Limits(max_bytes=0), "b2", "a1 b1 a2 a3"),
        (Limits(keep_last=1, max_bytes=100), "", "a1 b1 a2 a3"),
        (Limits(max_age=100, keep_last=9, max_bytes=10**6), "", ""),
    ],
)
def test_what_goes(limits, protected, going):
    chosen = choose(IMAGES, limits, 10.0, lambda one: one.id in protected.split())
    assert [one.id for one in chosen] == going.split()
