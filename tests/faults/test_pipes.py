"""Simultaneous checkpoints of one user's kernels need more pipes than allowed, and none is refused.

Nor is one that a signal interrupts: both are tried again.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import fcntl
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gate_double import GateDouble
from waiting import until

from jupyter_gpu_ckpt.errors import CriuError, DumpInterrupted, GpuCkptError, PipesExhausted
from jupyter_gpu_ckpt.kernel.engine import shared_engine
from jupyter_gpu_ckpt.lifecycle.context import Home
from jupyter_gpu_ckpt.lifecycle.lifecycle import Lifecycle
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.lifecycle.settings import LifecycleSettings
from jupyter_gpu_ckpt.trace import Trace

PROGRAM = """
import os, sys, time
pipes = [os.pipe() for _ in range(4)]
for _, end in pipes:
    os.write(end, bytes(5000))
open(sys.argv[1], "w").close()
time.sleep(1000)
"""

#: What a pipe has as a rule, in bytes (pipe(7)).
USUAL = 65536


@contextlib.contextmanager
def kernels(directory: Path, count: int, **settings) -> Iterator[list[Lifecycle]]:
    """Small processes with pipes of their own, and the lifecycles that move them."""
    base = Path(tempfile.mkdtemp(prefix="gc-"))
    engine = dataclasses.replace(shared_engine(directory / "images"))
    made = []
    try:
        for number in range(count):
            (base / str(number)).mkdir(mode=0o700)
            home = Home(f"k{number}", "python3", base / str(number), has_agent=False)
            made.append(
                Lifecycle(home, engine, GateDouble(), settings=LifecycleSettings(**settings), trace=Trace(f"k{number}"))
            )
            made[-1].launch([sys.executable, "-I", "-S", "-c", PROGRAM, str(base / f"{number}.ready")], {}, "/")
        until(lambda: len(list(base.glob("*.ready"))) == count, "all run")
        yield made
    finally:
        for one in made:
            one.terminate()
        shutil.rmtree(base)


class Counted:
    """CRIU, and how many dumps there were at once; the first ``fails`` of them raise ``error``: they meet the limit."""

    def __init__(self, real, fails: int = 0, error: GpuCkptError | None = None) -> None:
        self.real, self.fails = real, fails
        self.error = error or PipesExhausted("The user's processes have too many pipes.")
        self.now = self.most = 0
        self._lock = threading.Lock()

    def dump(self, *args, **options):
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
            failing, self.fails = self.fails > 0, self.fails - 1
        try:
            if failing:
                raise copy.copy(self.error)
            return self.real.dump(*args, **options)
        finally:
            with self._lock:
                self.now -= 1


def test_no_more_dumps_at_once_than_there_are_pipes_for(criu_binary, tmp_path, monkeypatch):
    with kernels(tmp_path, 12) as all_of_them:
        monkeypatch.setattr("jupyter_gpu_ckpt.lifecycle.dump._TURNS", threading.BoundedSemaphore(2))
        counted = Counted(all_of_them[0].engine.criu)
        for one in all_of_them:
            one.engine.criu = counted
        with ThreadPoolExecutor(12) as threads:
            list(threads.map(Lifecycle.checkpoint, all_of_them))
        assert {one.state for one in all_of_them} == {State.CHECKPOINTED}
        assert counted.most == 2


def test_a_dump_that_meets_the_limit_is_tried_again_and_the_log_says_why(criu_binary, tmp_path, caplog):
    with kernels(tmp_path, 1) as (one,):
        one.engine.criu = Counted(one.engine.criu, fails=2)
        one.checkpoint()
        assert one.state is State.CHECKPOINTED
        assert caplog.text.count("fs.pipe-user-pages-soft") == 2


def test_one_that_never_gets_its_pipes_says_so_and_runs_on(criu_binary, tmp_path):
    with kernels(tmp_path, 1, pipes=0.5) as (one,):
        one.engine.criu = Counted(one.engine.criu, fails=1000)
        with pytest.raises(PipesExhausted) as caught:
            one.checkpoint()
        assert caught.value.left == "the kernel runs on"
        assert "fs.pipe-user-pages-soft" in caught.value.hint
        assert one.state is State.RUNNING


@pytest.mark.parametrize("fails", [4, 5])
def test_a_dump_that_a_signal_interrupts_is_tried_again(criu_binary, tmp_path, fails):
    """Signals of timers do not interrupt it (`test_busy_dump`), those of other programs may."""
    interrupted = DumpInterrupted("A signal interrupted the dump in process 8192.")
    with kernels(tmp_path, 1) as (one,):
        one.engine.criu = Counted(one.engine.criu, fails, interrupted)
        if fails == 4:
            one.checkpoint()
            assert one.state is State.CHECKPOINTED
            return
        with pytest.raises(DumpInterrupted, match="in process 8192") as caught:
            one.checkpoint()
        assert caught.value.left == "the kernel runs on"
        assert "timer" in caught.value.hint
        assert one.state is State.RUNNING


@pytest.mark.parametrize("passes", [True, False])
def test_a_dump_that_may_succeed_the_next_time_is_tried_again(criu_binary, tmp_path, passes):
    missing = CriuError("CRIU could not dump the kernel: unix: Unix socket 7 not found.", passes=passes)
    with kernels(tmp_path, 1) as (one,):
        one.engine.criu = Counted(one.engine.criu, 1, missing)
        if passes:
            one.checkpoint()
            assert one.state is State.CHECKPOINTED
            return
        with pytest.raises(CriuError, match="socket 7 not found") as caught:
            one.checkpoint()
        assert (one.state, caught.value.left) == (State.RUNNING, "the kernel runs on")


def test_its_end_does_not_wait_for_pipes(criu_binary, tmp_path):
    with kernels(tmp_path, 1, pipes=1000.0) as (one,):
        one.engine.criu = Counted(one.engine.criu, fails=10**6)
        with ThreadPoolExecutor(1) as thread:
            leaving = thread.submit(one.checkpoint)
            until(lambda: one.engine.criu.fails < 10**6 - 3)
            one.terminate()
            assert leaving.exception(20) is not None
        assert one.state is State.DEAD


def test_pipes_that_other_programs_have_open_are_waited_for(criu_binary, tmp_path, caplog):
    """The system's own limit, met by CRIU."""
    if os.geteuid() == 0:
        pytest.skip("root may have any number of pipes: `tests/test_rootless.py` runs this as somebody else")
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("takes every pipe that this user may have, and other tests run beside it: run this file by itself")
    with kernels(tmp_path, 1) as (one,), contextlib.ExitStack() as held, ThreadPoolExecutor(1) as thread:
        hold_all_pipes(held)
        leaving = thread.submit(one.checkpoint)
        until(lambda: "fs.pipe-user-pages-soft" in caplog.text)
        held.close()
        leaving.result(60)
        assert one.state is State.CHECKPOINTED


def hold_all_pipes(held: contextlib.ExitStack) -> None:
    """Until a new one is as small as Linux gives it to who has too many."""
    limit = int(Path("/proc/sys/fs/pipe-max-size").read_text())
    size = limit
    while size >= USUAL:
        ends = os.pipe()
        for end in ends:
            held.callback(os.close, end)
        with contextlib.suppress(PermissionError):
            fcntl.fcntl(ends[0], fcntl.F_SETPIPE_SZ, limit)
        size = fcntl.fcntl(ends[0], fcntl.F_GETPIPE_SZ)


@pytest.mark.torture
def test_fifty_kernels_at_once(criu_binary, tmp_path):
    """For an ordinary user a quarter of them were refused."""
    with kernels(tmp_path, 50) as all_of_them:
        for _ in range(4):
            with ThreadPoolExecutor(50) as threads:
                list(threads.map(Lifecycle.checkpoint, all_of_them))
                list(threads.map(Lifecycle.wake, all_of_them))
            assert {one.state for one in all_of_them} == {State.RUNNING}
