"""A dump needs all threads in safe places: with a thread that never is, it is refused and the process continues."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sleepers import ENV
from waiting import until

from jupyter_gpu_ckpt.criu import criu as module
from jupyter_gpu_ckpt.errors import KernelBusy

#: In a system call that says nothing of what its caller holds, and is about memory: no way to freeze it.
SUBJECT = """
import mmap, os, sys, time
place = mmap.mmap(-1, 1 << 27)
while True:
    place.madvise(mmap.MADV_DONTNEED)
    for _ in range(5):
        place.madvise(23)  # MADV_POPULATE_WRITE: in the C library and in Linux all the time
    open(sys.argv[1], "a").write("x")
"""


def test_a_thread_that_is_never_in_a_safe_place(home, capsule, criu, monkeypatch):
    beats = home / "beats"
    capsule.spawn([sys.executable, "-I", "-S", "-c", SUBJECT, str(beats)], ENV, "/")
    until(beats.exists, "it runs")
    monkeypatch.setattr(module, "FREEZE_TIMEOUT", 0.0)
    with pytest.raises(KernelBusy, match="stopped safely") as caught:
        criu.dump(capsule, home / "image", timeout=30, freeze=True)
    assert caught.value.hint
    assert list(Path(home / "image").iterdir()) == []
    before = beats.stat().st_size
    until(lambda: beats.stat().st_size > before + 2, "it goes on")
