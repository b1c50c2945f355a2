"""Ignore SIGTERM in the kernel, until it was asked to shut down.

Slurm (a job is cancelled or its time is up) and systemd (a unit stops) send SIGTERM to every process of a server at
once.  The server then saves its kernels; a kernel that had obeyed the same signal would be lost.  After a shutdown
message the signal is jupyter_client's, for a kernel that takes long to end: ipykernel waits seconds for children that
ignore it, such as the resource tracker of multiprocessing.

A handler and not SIG_IGN: programs that the kernel starts by ``exec`` get the default back, and so do forked children
here.  A program that sets a handler of its own is left alone.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

_thread = threading.local()
#: Returns whether the kernel was asked to shut down; None before there is a kernel.
_is_ending: Callable[[], bool] | None = None


def ignore_sigterm() -> None:
    """Ignore SIGTERM in this process alone.  Called on the main thread before any user code."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _ignore)
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_restore_default)


def obey_sigterm_if(is_ending: Callable[[], bool]) -> None:
    """Have SIGTERM end the process as if it had no handler when ``is_ending`` returns true."""
    global _is_ending  # a signal handler has no object of its own
    _is_ending = is_ending


def _ignore(number: int, frame: Any) -> None:
    if _is_ending is not None and _is_ending():
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _block() -> None:
    # A SIGTERM to a child just forked must meet the default action: it is blocked until our handler is gone there.
    _thread.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _thread.before)


def _restore_default() -> None:
    if signal.getsignal(signal.SIGTERM) is _ignore and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock()
