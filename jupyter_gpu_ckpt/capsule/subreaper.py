"""Make the root process that CRIU restores a subreaper before it has a child (`root_process`).

CRIU restores a process in the session of another that is not its ancestor, or of one that has ended, as the child of a
helper in that session.  The helper ends, and Linux gives its child to the nearest subreaper: this should be the root,
whose child it was.  But CRIU makes the root a subreaper only later (``criu/pie/restorer.c``), and calls no hook
before.  So CRIU is traced until it forks the root, which makes the system call before it runs on.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process.ptrace import (
    PTRACE_CONT,
    PTRACE_DETACH,
    PTRACE_EVENT_FORKS,
    PTRACE_EVENT_STOP,
    PTRACE_GETEVENTMSG,
    PTRACE_O_TRACEFORKS,
    ProcessMemory,
    Tracee,
    ptrace,
    seize,
    system_call_gate,
)
from jupyter_gpu_ckpt.process.syscalls import NUMBERS, PR_SET_CHILD_SUBREAPER


class Subreaper:
    """The tracing of CRIU until it has forked the process ``root``, whose ``children`` are to be its own."""

    def __init__(self, root: int, children: Sequence[int]) -> None:
        self._root, self._children = root, children
        self._criu = 0
        #: Processes that CRIU has forked before the root, and does not wait for: their first stop may be seen late.
        self._helpers: set[int] = set()
        self._forks = self._is_made = False

    def trace(self, criu: int) -> None:
        """Begin to trace a process that is about to become CRIU, a child of the caller.  Raises `OSError`."""
        self._criu = criu
        seize(criu, PTRACE_O_TRACEFORKS)

    def stopped(self, pid: int, status: int) -> bool:
        """Handle a stop, that waitpid(2) has reported.  Return whether it was of this tracing.  Raises `OSError`."""
        event = status >> 16
        if pid == self._criu and not self._forks:
            if event in PTRACE_EVENT_FORKS:
                self._helpers.add(child := _forked(pid))
                self._forks = child == self._root
            arrives = 0 if event else os.WSTOPSIG(status)
            ptrace(PTRACE_DETACH if self._forks else PTRACE_CONT, pid, 0, arrives)
            return True
        if event != PTRACE_EVENT_STOP or (self._forks and self._is_made and pid not in self._helpers):
            return False
        self._helpers.discard(pid)
        if pid == self._root:
            self._make(pid)
            self._is_made = True
        ptrace(PTRACE_DETACH, pid)  # a process that CRIU has forked
        return True

    def strays(self) -> list[int]:
        """Return those of the children that have ended, or have another parent, after the restore."""
        return [pid for pid in self._children if pid not in procfs.children(self._root)]

    @staticmethod
    def _make(pid: int) -> None:
        with ProcessMemory(pid) as memory:
            gate = system_call_gate(memory, procfs.maps(pid, named="[vdso]"))
        if result := Tracee.attached(pid).call(gate, NUMBERS["prctl"], PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(-result, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(-result)}")


def _forked(pid: int) -> int:
    """Return the child of a process that has stopped because it forked."""
    child = ctypes.c_ulong()
    ptrace(PTRACE_GETEVENTMSG, pid, 0, ctypes.addressof(child))
    return child.value
