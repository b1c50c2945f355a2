"""The thread of a kernel's verbs."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from jupyter_gpu_ckpt.errors import LimitReached
from jupyter_gpu_ckpt.kernel.worker import Worker


def test_a_call_for_which_no_thread_can_be_started_is_never_run(monkeypatch):
    worker, ran = Worker("test"), []

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(LimitReached, match="no more threads"):
            worker.submit(lambda: ran.append("then"))
    worker.submit(lambda: ran.append("now")).result(60)
    worker.end()
    assert ran == ["now"]


_ENDS = """
import atexit
from jupyter_gpu_ckpt.errors import StateError
from jupyter_gpu_ckpt.kernel.worker import Worker

used, new = Worker("used"), Worker("new")
used.submit(int).result(60)

@atexit.register
def submit():
    for worker in (used, new):
        try:
            worker.submit(lambda: print("ran"))
        except StateError as error:
            print(error.message)
"""


def test_nothing_is_run_where_the_interpreter_ends():
    """`jupyter run` ends so while its kernel still requests what its last cell has asked for."""
    done = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["The program that owns this kernel is ending."] * 2


def test_a_worker_runs_calls_after_its_end():
    worker = Worker("test")
    worker.end()
    assert worker.submit(lambda: 1).result(60) == 1
    worker.end()
    assert worker.submit(lambda: 2).result(60) == 2
    worker.end()
