"""Starts a program (CRIU) and kills it as it enters its Nth ``ptrace`` call: every moment of a dump, one by one.

``python killed_criu.py N PROGRAM ARGUMENT...`` ends as the program ended: with its status, or by SIGKILL.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PTRACE_TRACEME, PTRACE_SYSCALL, PTRACE_SETOPTIONS, PTRACE_GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E
PTRACE_O_TRACESYSGOOD = 1
PTRACE_SYSCALL_INFO_ENTRY = 1
SYS_PTRACE = {"x86_64": 101, "aarch64": 117}[os.uname().machine]

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def enters_ptrace(pid: int) -> bool:
    """Return whether ``pid``, at a syscall stop, is about to call ptrace."""
    info = (ctypes.c_uint64 * 12)()  # struct ptrace_syscall_info: op and arch, instruction and stack pointer, nr ...
    libc.ptrace(PTRACE_GET_SYSCALL_INFO, pid, ctypes.sizeof(info), ctypes.addressof(info))
    return info[0] & 0xFF == PTRACE_SYSCALL_INFO_ENTRY and info[3] == SYS_PTRACE


def main(number: int, argv: list[str]) -> int:
    pid = os.fork()
    if not pid:
        libc.ptrace(PTRACE_TRACEME, 0, 0, 0)
        os.execv(argv[0], argv)
    os.waitpid(pid, 0)  # it stops as it becomes the program
    libc.ptrace(PTRACE_SETOPTIONS, pid, 0, PTRACE_O_TRACESYSGOOD)
    calls = deliver = 0
    while True:
        libc.ptrace(PTRACE_SYSCALL, pid, 0, deliver)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            break
        at_syscall = os.WSTOPSIG(status) == signal.SIGTRAP | 0x80
        deliver = 0 if at_syscall else os.WSTOPSIG(status)
        if at_syscall and enters_ptrace(pid):
            calls += 1
            if calls == number:
                os.kill(pid, signal.SIGKILL)
    if os.WIFSIGNALED(status):
        os.kill(os.getpid(), os.WTERMSIG(status))
    return os.WEXITSTATUS(status)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
