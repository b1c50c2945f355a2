"""All threads of a process at rest but for a few, for as long as somebody needs them not to run.

A thread is parked where it can hold nothing that others need: in a system call that waits, or in code that is neither
the C library's nor the CUDA driver's (a thread stopped inside ``malloc`` would keep its lock).  One that is elsewhere
is let run on for a moment and looked at again.

Standard library only, as `ptrace`: a capsule's init imports this module.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import re
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process.ptrace import WALL, Machine, Tracee

#: Threads of the CUDA driver, which does what others ask of it in them, and of the library that moves device memory.
#: The one that suspends and resumes is called by a number in hexadecimal, as ``cuda00001400006``.
_KEPT_RUNNING = re.compile(r"(cuda-EvtHandlr|cuda[0-9a-f]{11}|gpu-ckpt-(fast|copy))$")
#: Another one of such a name is the driver's, of a release that we do not know, or somebody's who should be parked.
_AMBIGUOUS = re.compile(r"cuda(-|[0-9a-f]{4})")
#: Libraries whose locks everybody needs, whoever waits for one: a thread may hold another lock meanwhile.
_COMMON_LIBRARIES = re.compile(r"/(libc|ld|libjemalloc|libtcmalloc|libmimalloc|libasan|libtsan)([-_.][^/]*)?$")
#: glibc's arenas but for the first begin at a multiple of this, with their lock in the first bytes (malloc/arena.c).
_ARENA, _ARENA_HEAD = 64 << 20, 64
#: futex(2): FUTEX_WAIT and FUTEX_WAIT_BITSET, without the flags for private ones and the clock.
_FUTEX_COMMAND, _FUTEX_WAITS = 0x7F, (0, 9)
#: The one by which glibc waits for a mutex; condition variables and semaphores, of Python's locks, wait by the other.
_FUTEX_MUTEX = 0
#: Code in which a thread may hold a lock that the driver, or a thread that is made meanwhile, needs: by file name.
#: Not by how it begins alone: a thread may stay in libcrypto, libcublas or libmkl for as long as it computes.
_SHARED_CODE = re.compile(
    r"(^\[vdso\]"  # where the driver looks at the clock while it waits for the GPU
    r"|/(libc|libdl|libpthread|libgcc_s|ld|libcuda[^/]*|libnvidia|libjemalloc|libtcmalloc|libmimalloc|libasan|libtsan"
    r"|[^/]*_fastpath)([-_.][^/]*)?)$"
)
#: Through which system calls are made, by whom the stack tells; and the CUDA driver.
_C_LIBRARY = re.compile(r"(^\[vdso\]|/(libc|libpthread|ld)([-_.][^/]*)?)$")
_DRIVER = re.compile(r"/libcuda[.][^/]*$")
#: Of the stack of a thread that waits: the C library's own frames are much smaller.
_STACK_BYTES = 4096


class FrozenThreads:
    """The threads of one process that are held by ptrace; `leave` lets them go on.  Only its own thread may use it.

    Each way to park raises `TimeoutError` when a thread cannot be parked by ``deadline`` (of ``time.monotonic``), and
    `OSError` where the process is gone, another traces a thread of it, or one has a name that could be the CUDA
    driver's.  *After failure* the threads that were parked before are parked, and all others go on.
    """

    def __init__(self, machine: Machine, pid: int) -> None:
        self._machine = machine
        self._pid = pid
        self._frozen: dict[int, Tracee] = {}

    def __len__(self) -> int:
        return len(self._frozen)

    @property
    def leader(self) -> Tracee | None:
        """The main thread, if it is parked."""
        return self._frozen.get(self._pid)

    def freeze_all(self, deadline: float, *, insist: bool = False) -> None:
        """Park all threads but the CUDA driver's and its library's, each in a place where it holds nothing.

        ``insist``: there is no other way than to park them all.  One of a doubtful name is somebody's, and in the
        second half of the time any system call will do that has nothing to do with memory: a thread that writes to a
        full pipe stays there.
        """
        strict_until = (time.monotonic() + deadline) / 2
        self._repeat(
            deadline,
            lambda tid, shared: self._is_safe(tid, shared, lenient=insist and time.monotonic() > strict_until),
            insist,
        )

    def freeze_stopped(self, deadline: float) -> None:
        """The same with threads that stand in a group stop, wherever they stand: whoever stopped them chose the place.

        The stop may end then (SIGCONT), and those who are parked do not notice.
        """
        self._repeat(deadline, lambda *_: True, insist=True)

    def freeze_waiting_in_driver(self) -> None:
        """Park the threads that wait in a system call which the CUDA driver's own code made.

        While the driver's state is suspended, pages that such a thread reads when its wait ends are not there: a
        signal or a tracer must not end the wait.  Threads that only wait at the driver's lock are safe either way.
        """
        code = _Shared.of(self._pid)
        before = set(self._frozen)
        try:
            for tid in procfs.threads(self._pid):
                with contextlib.suppress(*procfs.GONE):  # it ended
                    if (
                        tid not in self._frozen
                        and not self._keeps_running(tid, insist=True)
                        and self._in_driver(tid, code)
                    ):
                        self._freeze_one(tid, lambda tid: self._in_driver(tid, code))
        except BaseException:
            self._release(set(self._frozen) - before)
            raise

    def release(self) -> None:
        """Let all go on."""
        self._release(set(self._frozen))

    def _release(self, tids: set[int]) -> None:
        for tid in tids:
            self._frozen.pop(tid).release()
            self._reap(tid)

    def _repeat(self, deadline: float, may_freeze: Callable[[int, _Shared], bool], insist: bool) -> None:
        before = set(self._frozen)
        try:
            while not self._freeze(may_freeze, insist):
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "a thread of the process is never where it can be parked")
                time.sleep(0.0005)
        except BaseException:
            self._release(set(self._frozen) - before)
            raise

    def _freeze(self, may_freeze: Callable[[int, _Shared], bool], insist: bool) -> bool:
        """Park whom we can; whether that is everybody."""
        shared = _Shared.of(self._pid)
        for tid in procfs.threads(self._pid):
            with contextlib.suppress(*procfs.GONE):  # it ended
                if tid not in self._frozen and not self._keeps_running(tid, insist):
                    self._freeze_one(tid, lambda tid: may_freeze(tid, shared))
        # Twice: a thread that ended while the first list was made may have left one that is not in it.
        return all(self._is_at_rest(tid) for _ in range(2) for tid in procfs.threads(self._pid))

    def _keeps_running(self, tid: int, insist: bool) -> bool:
        name = procfs.stat(self._pid, tid).name
        if _KEPT_RUNNING.match(name):
            return True
        if not insist and _AMBIGUOUS.match(name):
            raise OSError(errno.ENOTSUP, "a thread may be the CUDA driver's, and may not")
        return False

    def _freeze_one(self, tid: int, may_freeze: Callable[[int], bool]) -> None:
        try:
            tracee = Tracee(self._machine, tid, running=True)
        except ProcessLookupError:
            self._reap(tid)
            raise
        except PermissionError:
            if procfs.stat(self._pid, tid).has_ended:
                return
            raise
        try:
            if may_freeze(tid):
                self._frozen[tid] = tracee
        finally:
            if tid not in self._frozen:
                tracee.release()
                self._reap(tid)

    def _reap(self, tid: int) -> None:
        """A thread that ended as our tracee: until we have seen that, it holds up the end of its process.

        Not where we are the parent: then the end of the process is for whoever waits for its child.
        """
        with contextlib.suppress(OSError):
            if tid != self._pid or procfs.stat(self._pid).parent != os.getpid():
                os.waitid(os.P_PID, tid, os.WEXITED | os.WNOHANG | WALL)

    def _is_at_rest(self, tid: int) -> bool:
        try:
            seen = procfs.stat(self._pid, tid)
        except procfs.GONE:  # it ended, and what it made meanwhile is in no list of ours
            return False
        # The first thread stays as a zombie while there are others.
        return (
            tid in self._frozen or _KEPT_RUNNING.match(seen.name) is not None or (tid == self._pid and seen.has_ended)
        )

    def _is_safe(self, tid: int, shared: _Shared, *, lenient: bool) -> bool:
        call = _SystemCall.of(self._pid, tid)
        if call is None:  # killed where it stood
            return False
        if call.number < 0:
            return call.pc not in shared.code
        if call.number == self._machine.futex:
            address, command = call.arguments[0], call.arguments[1] & _FUTEX_COMMAND
            if command not in _FUTEX_WAITS:
                return False  # it wakes another, and may hold a second lock meanwhile
            waits_for_common_lock = address % _ARENA < _ARENA_HEAD or address in shared.data
            if command == _FUTEX_MUTEX and waits_for_common_lock:
                return False  # it waits for malloc's lock, or the linker's, whose holder goes on meanwhile
        elif lenient and call.number not in self._machine.memory:
            return True
        reads_file = call.number == self._machine.read and self._is_file(call.arguments[0])
        return call.number in self._machine.waits and not reads_file

    def _in_driver(self, tid: int, shared: _Shared) -> bool:
        """Whether the thread waits in a system call that the driver's code made, itself or through the C library.

        The first code address on the stack that is not the C library's is the return address of the function that
        called the C library.
        """
        call = _SystemCall.of(self._pid, tid)
        if call is None or call.number not in self._machine.waits:
            return False
        if call.pc not in shared.c_library:
            return call.pc in shared.driver
        with open(f"/proc/{self._pid}/mem", "rb", buffering=0) as memory:
            try:
                stack = os.pread(memory.fileno(), _STACK_BYTES, call.sp & ~7)
            except OSError:
                return False
        for (word,) in struct.iter_unpack("=Q", stack[: len(stack) & ~7]):
            if word in shared.executable and word not in shared.c_library:
                return word in shared.driver
        return False

    def _is_file(self, descriptor: int) -> bool:
        """Whoever reads a file waits for nobody, and may hold a lock: the linker while it loads a library."""
        try:
            return stat.S_ISREG(os.stat(f"/proc/{self._pid}/fd/{descriptor}").st_mode)
        except OSError:
            return False


@dataclass(frozen=True)
class _SystemCall:
    """The system call that a thread is in: its number (-1: none), arguments, and where the thread stands."""

    number: int
    arguments: tuple[int, ...]
    sp: int
    pc: int

    @classmethod
    def of(cls, pid: int, tid: int) -> _SystemCall | None:
        """By proc_pid_syscall(5); None of a thread that runs."""
        with open(f"/proc/{pid}/task/{tid}/syscall") as file:
            words = file.read().split()
        if words[0] == "running":
            return None
        *arguments, sp, pc = (int(word, 16) for word in words[1:])
        return cls(int(words[0]), tuple(arguments), sp, pc)


class _AddressRanges:
    """Ranges of addresses, added in ascending order, none over another."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> None:
        self._begins.append(begin)
        self._ends.append(end)

    def __contains__(self, address: int) -> bool:
        place = bisect.bisect_right(self._begins, address) - 1
        return place >= 0 and address < self._ends[place]


@dataclass(frozen=True)
class _Shared:
    """Where code is in which a thread may hold a lock that others need, and where such locks lie."""

    code: _AddressRanges = field(default_factory=_AddressRanges)
    data: _AddressRanges = field(default_factory=_AddressRanges)
    #: All code, and of it the C library's and the CUDA driver's.
    executable: _AddressRanges = field(default_factory=_AddressRanges)
    c_library: _AddressRanges = field(default_factory=_AddressRanges)
    driver: _AddressRanges = field(default_factory=_AddressRanges)

    @classmethod
    def of(cls, pid: int) -> _Shared:
        """Of a process, by proc_pid_maps(5)."""
        found = cls()
        for begin, end, permissions, path in procfs.maps(pid):
            if "x" in permissions:
                found.executable.add(begin, end)
                if _SHARED_CODE.search(path):
                    found.code.add(begin, end)
                if _C_LIBRARY.search(path):
                    found.c_library.add(begin, end)
                if _DRIVER.search(path):
                    found.driver.add(begin, end)
            if _COMMON_LIBRARIES.search(path):
                found.data.add(begin, end)
        return found
