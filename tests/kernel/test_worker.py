"""The thread of a kernel's verbs."""

from __future__ import annotations

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
