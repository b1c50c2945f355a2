"""A polite signal to everybody is not meant for the kernel.

Whoever ends a server by its group of processes - Slurm when a job is cancelled or its time is up, systemd when a unit
stops - sends SIGTERM to each of them at once.  The server then wants to save its kernels, and a kernel that has already
obeyed the same signal is lost.  So a kernel leaves it to its server: that one asks it to shut down by a message, and
ends it by SIGKILL if need be.

A handler and not SIG_IGN: what the kernel starts by ``exec`` gets the default back by itself, and what it forks here.
A program that sets a handler of its own is not interfered with.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

_thread = threading.local()


def spare() -> None:
    """Do nothing at SIGTERM, in this process alone.  Called on the main thread before any user code."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave_it)
        os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_give_back)


def _leave_it(number: int, frame: Any) -> None:
    """The server's business."""


def _hold() -> None:
    # A child that is ended as soon as it is there must not meet our handler: the signal waits until that is gone.
    _thread.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _thread.before)


def _give_back() -> None:
    if signal.getsignal(signal.SIGTERM) is _leave_it and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _release()
