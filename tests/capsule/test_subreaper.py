"""The tracing of a CRIU by which the root process becomes a subreaper: the order in which its stops are seen."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import pytest

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule.subreaper import Subreaper, _forked

#: As CRIU: a helper that it does not wait for (that for control groups is one), and then the root.
CRIU = """
import os, time
for _ in range(2):
    if not os.fork():
        time.sleep(1000)
time.sleep(1000)
"""


@pytest.fixture
def criu():
    """A process that is about to become `CRIU`, and how to let it."""
    ready, go = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(go)
        os.read(ready, 1)
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", CRIU])
    os.close(ready)
    yield pid, lambda: os.close(go)
    for each in (pid, *procfs.children(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
    os.waitpid(pid, 0)


def until_fork(tracing: Subreaper, criu: int) -> int:
    """Let the tracing handle CRIU's stops until it has forked; the stop for that is not handled yet."""
    while True:
        _, status = os.waitpid(criu, 0)
        assert os.WIFSTOPPED(status)
        if status >> 16 in (1, 2, 3):
            return status
        assert tracing.stopped(criu, status)


@pytest.mark.parametrize("late", [True, False], ids=["helper seen last", "helper seen first"])
def test_a_helper_of_criu_is_let_go_whenever_its_stop_is_seen(criu, late):
    pid, begin = criu
    tracing = Subreaper(0, [])
    tracing.trace(pid)
    begin()
    status = until_fork(tracing, pid)
    helper = _forked(pid)

    def see_helper() -> None:
        _, its = os.waitpid(helper, 0)
        assert tracing.stopped(helper, its), "the stop is one of the tracing's; the init ends what has others"
        assert procfs.status(helper)["TracerPid"] == "0"

    if not late:
        see_helper()
    assert tracing.stopped(pid, status)
    status = until_fork(tracing, pid)
    root = tracing._root = _forked(pid)
    assert tracing.stopped(pid, status)
    _, its = os.waitpid(root, 0)
    assert tracing.stopped(root, its)
    if late:
        see_helper()
    assert [procfs.status(each)["TracerPid"] for each in (pid, root, helper)] == ["0"] * 3
    assert not tracing.stopped(helper if late else root, its), "each is let go once"
