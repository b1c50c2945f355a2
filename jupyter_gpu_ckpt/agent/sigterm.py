"""Ignore SIGTERM in the kernel.

Slurm (a job is cancelled or its time is up) and systemd (a unit stops) send SIGTERM to every process of a server at
once.  The server then saves its kernels; a kernel that had obeyed the same signal would be lost.  The server itself
ends a kernel by a shutdown message and by SIGKILL.

A handler and not SIG_IGN: programs that the kernel starts by ``exec`` get the default back, and so do forked children
here.  A program that sets a handler of its own is left alone.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

_thread = threading.local()


def ignore_sigterm() -> None:
    """Ignore SIGTERM in this process alone.  Called on the main thread before any user code."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _ignore)
        os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_restore_default)


def _ignore(number: int, frame: Any) -> None:
    pass


def _block() -> None:
    # A SIGTERM to a child just forked must meet the default action: it is blocked until our handler is gone there.
    _thread.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _thread.before)


def _restore_default() -> None:
    if signal.getsignal(signal.SIGTERM) is _ignore and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock()
