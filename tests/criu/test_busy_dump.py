"""Dumps of processes that are never at rest: with a thread in no safe place, and with timers at a high rate."""

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
    until(lambda: beats.stat().st_size > before + 2, "it continues")


#: A child and its parent, each interrupted by three timers a thousand times a second.
TIMERS = """
import os, signal, sys, time
parent, count = os.getpid(), 0
os.fork()
def beat(*_):
    global count
    count += 1
    if os.getpid() == parent and count % 100 == 0:
        open(sys.argv[1], "a").write("x")
for number, name in enumerate(("ALRM", "VTALRM", "PROF")):
    signal.signal(getattr(signal, "SIG" + name), beat)
    signal.setitimer(number, 0.001, 0.001)
while True:
    pass
"""


def test_periodic_timers_do_not_disturb_a_dump(home, capsule, criu):
    beats = home / "beats"
    capsule.spawn([sys.executable, "-I", "-S", "-c", TIMERS, str(beats)], ENV, "/")
    until(beats.exists, "the timers go off")
    for number in range(10):
        directory = home / f"image-{number}"
        directory.mkdir(0o700)
        criu.dump(capsule, directory, timeout=30)
        capsule.resume_processes()
        before = beats.stat().st_size
        until(lambda before=before: beats.stat().st_size > before, "the timers continue")
