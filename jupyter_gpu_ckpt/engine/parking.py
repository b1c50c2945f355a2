"""All threads of a process at rest but for a few, for as long as somebody needs them not to run.

A thread is parked where it can hold nothing that others need: in a system call that waits, or in code that is neither
the C library's nor the CUDA driver's (a thread stopped inside ``malloc`` would keep its lock).  One that is elsewhere
is let run on for a moment and looked at again.

Standard library only, as `ptrace`: a capsule's init imports it with nothing else of the package.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Sequence

from .ptrace import Machine, Tracee

#: Threads of the CUDA driver, which does what others ask of it in them, and of the library that moves device memory.
SPARED = ("cuda", "gpu-ckpt")
#: Code in which a thread may hold a lock that the driver, or a thread that is made meanwhile, needs: by file name.
_SHARED_CODE = re.compile(
    r"/(libc|libm|ld-linux|ld|libpthread|libdl|libgcc_s|libcuda|libnvidia|libcudart|libjemalloc|libtcmalloc|libmimalloc"
    r"|[^/]*_fastpath)[^/]*$"
)


class Parking:
    """The threads of process ``pid``, parked when this is made; `leave` lets them go on.

    Raises `TimeoutError` when one cannot be parked by ``deadline`` (of ``time.monotonic``); then all go on.
    """

    def __init__(self, machine: Machine, pid: int, deadline: float) -> None:
        self._machine = machine
        self._pid = pid
        self._parked: dict[int, Tracee] = {}
        try:
            while not self._park():
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "a thread of the process is never where it can be parked")
                time.sleep(0.0005)
        except BaseException:
            self.leave()
            raise

    def __len__(self) -> int:
        return len(self._parked)

    def leave(self) -> None:
        """Let all go on."""
        while self._parked:
            _, tracee = self._parked.popitem()
            tracee.release()

    def _park(self) -> bool:
        """Park whom we can; whether that is everybody, of a list made after the last one was parked."""
        shared = _shared_code(self._pid)
        new = [tid for tid in self._threads() if tid not in self._parked]
        everybody = not new
        for tid in new:
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ended
                if _name(self._pid, tid).startswith(SPARED):
                    continue
                everybody = False
                tracee = Tracee(self._machine, tid, running=True)
                if self._is_safe(tid, shared):
                    self._parked[tid] = tracee
                else:
                    tracee.release()
        return everybody or all(
            tid in self._parked or _name(self._pid, tid).startswith(SPARED) for tid in self._threads()
        )

    def _threads(self) -> list[int]:
        return [int(name) for name in os.listdir(f"/proc/{self._pid}/task")]

    def _is_safe(self, tid: int, shared: Sequence[range]) -> bool:
        # proc_pid_syscall(5): number and arguments, or -1; then stack pointer and program counter.
        with open(f"/proc/{self._pid}/task/{tid}/syscall") as file:
            words = file.read().split()
        number, pc = int(words[0]), int(words[-1], 16)
        return number in self._machine.waits if number >= 0 else not any(pc in code for code in shared)


def _name(pid: int, tid: int) -> str:
    with open(f"/proc/{pid}/task/{tid}/comm") as file:
        return file.read()


def _shared_code(pid: int) -> list[range]:
    found = []
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            where, rights, *_, path = line.rstrip("\n").split(None, 5) if line.count(" ") > 5 else [*line.split(), ""]
            if "x" in rights and _SHARED_CODE.search(path):
                begin, end = where.split("-")
                found.append(range(int(begin, 16), int(end, 16)))
    return found
