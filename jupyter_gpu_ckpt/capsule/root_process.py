"""The root of a kernel's tree of processes: a small program of ours, the kernel's parent.  Used by a capsule's init.

A process whose parent ends gets another one: the nearest ancestor that is a subreaper (prctl(2),
PR_SET_CHILD_SUBREAPER), else the init of its pid namespace.  CRIU saves one tree of processes.  The tree begins with
such a subreaper, so that it has all that a kernel has started, under any parent: not with the kernel, whose
``os.wait()`` would find processes that it has not started, and not with the capsule's init, which runs CRIU.

The program is `native/root.c`.  Without it (no C compiler when the package was installed, a home in which programs
cannot be run, a user who has killed it) the kernel is a child of the init, and the root of what CRIU saves; what has
left its tree is refused by name.
"""

from __future__ import annotations

import os
import signal

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import syscalls

#: The name of the process.
NAME = "gpu-ckpt-root"
#: Signals that are not blocked: Linux ends a process for a trap that it blocks, and keeps a blocked SIGCHLD for later.
_UNBLOCKED = {signal.SIGCHLD, signal.SIGTRAP}


def fork_below(program: str, report: int) -> None:
    """Fork the process that is to be the kernel, and return in it; the caller becomes its root process.

    Called in a fresh child of the init.  ``program``: a path of the program; ``report``: a descriptor for the kernel's
    pid.  Where the program cannot be run the caller ends, and the kernel is the init's child.
    """
    os.setsid()
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    kernel = os.fork()
    if kernel == 0:
        return
    try:
        os.write(report, str(kernel).encode())
        for descriptor in (0, 1, 2):
            os.close(descriptor)  # all others are close-on-exec
        signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals() - _UNBLOCKED)
        os.execve(program, [NAME, str(kernel)], {})  # noqa: S606 - an argument list, never a shell line
    finally:
        os._exit(127)


def root_of(kernel: int) -> int:
    """Return the process with which the tree of ``kernel`` begins: its parent, if that is not the caller, else itself.

    Raises as `procfs.stat` for a kernel that has been reaped.
    """
    parent = procfs.stat(kernel).parent
    return kernel if parent in (0, os.getpid()) else parent
