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
import stat
import time
from collections.abc import Sequence

from .ptrace import Machine, Tracee

#: Threads of the CUDA driver, which does what others ask of it in them, and of the library that moves device memory.
SPARED = ("cuda", "gpu-ckpt")
#: Code in which a thread may hold a lock that the driver, or a thread that is made meanwhile, needs: by file name.
#: Not by how it begins alone: a thread may stay in libcrypto, libcublas or libmkl for as long as it computes.
_SHARED_CODE = re.compile(
    r"/(libc|libdl|libpthread|libgcc_s|ld|libcuda[^/]*|libnvidia|libjemalloc|libtcmalloc|libmimalloc|libasan|libtsan"
    r"|[^/]*_fastpath)([-_.][^/]*)?$"
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
        """Park whom we can; whether that is everybody."""
        shared = _shared_code(self._pid)
        for tid in self._threads():
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):  # it ended
                if tid in self._parked or _name(self._pid, tid).startswith(SPARED):
                    continue
                tracee = Tracee(self._machine, tid, running=True)
                if self._is_safe(tid, shared):
                    self._parked[tid] = tracee
                else:
                    tracee.release()
        # Twice: a thread that ended while the first list was made may have left one that is not in it.
        return all(self._is_at_rest(tid) for _ in range(2) for tid in self._threads())

    def _is_at_rest(self, tid: int) -> bool:
        try:
            return tid in self._parked or _name(self._pid, tid).startswith(SPARED)
        except (ProcessLookupError, FileNotFoundError):  # it ended, and what it made meanwhile is in no list of ours
            return False

    def _threads(self) -> list[int]:
        return [int(name) for name in os.listdir(f"/proc/{self._pid}/task")]

    def _is_safe(self, tid: int, shared: Sequence[range]) -> bool:
        # proc_pid_syscall(5): number and arguments, or -1; then stack pointer and program counter.
        with open(f"/proc/{self._pid}/task/{tid}/syscall") as file:
            words = file.read().split()
        if words[0] == "running":  # killed where it stood
            return False
        number, pc = int(words[0]), int(words[-1], 16)
        if number < 0:
            return not any(pc in code for code in shared)
        return number in self._machine.waits and not (
            number == self._machine.read and self._is_file(int(words[1], 16))
        )

    def _is_file(self, descriptor: int) -> bool:
        """Whoever reads a file waits for nobody, and may hold a lock: the linker while it loads a library."""
        try:
            return stat.S_ISREG(os.stat(f"/proc/{self._pid}/fd/{descriptor}").st_mode)
        except OSError:
            return False


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
