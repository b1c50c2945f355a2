"""Stop all threads of a process but a few, by ptrace: while device memory is copied, CRIU works, or CUDA is suspended.

A thread is frozen where it can hold no lock that others need: in a system call that waits, or in code that is neither
the C library's nor the CUDA driver's (a thread stopped inside ``malloc`` would keep its lock).  A thread that is
elsewhere runs on for a moment before the next try.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import functools
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import syscalls
from jupyter_gpu_ckpt.process.ptrace import MACHINE, WALL, Tracee
from jupyter_gpu_ckpt.process.syscalls import NUMBERS

#: Names of threads of the CUDA driver, which serves others in them, and of the library that copies device memory.
#: The one that suspends and resumes has a number in hexadecimal, as ``cuda00001400006``.  Only a name distinguishes
#: the driver's threads, of which others do call back.  Any program can use such a name: see
#: `FrozenThreads._is_programs_own`.
_KEPT_RUNNING = re.compile(r"(cuda-EvtHandlr|cuda[0-9a-f]{11}|gpu-ckpt-(fast|copy))$")
#: Those of the library among them; and what precedes the numbers of its threads in its memory (`own_threads.c`).
_OF_LIBRARY, _OWN_THREADS = re.compile(r"gpu-ckpt-"), b"gpu-ckpt thread\0"
_NUMBERS = struct.Struct("=320i")
#: These, and libzmq's own threads, in a context with a prefix or without: they connect and accept, and never call CUDA.
_NO_CALLER = re.compile(rf"{_KEPT_RUNNING.pattern}|(.*/)?ZMQbg(/|$)")
#: Another such name may be the driver's, of a release that we do not know, or of a thread that should be frozen.
_AMBIGUOUS = re.compile(r"cuda(-|[0-9a-f]{4})")
#: Libraries whose locks all threads need: a thread that waits for one may hold another lock meanwhile.
_COMMON = "libc|ld|libjemalloc|libtcmalloc|libmimalloc|libasan|libtsan"
_COMMON_LIBRARIES = re.compile(rf"/({_COMMON})([-_.][^/]*)?$")
#: glibc's arenas but for the first begin at a multiple of this, with their lock in the first bytes (malloc/arena.c).
_MALLOC_ARENA, _MALLOC_ARENA_HEAD = 64 << 20, 64
#: futex(2): FUTEX_WAIT and FUTEX_WAIT_BITSET, without the flags for private ones and the clock.
_FUTEX_COMMAND, _FUTEX_WAITS = 0x7F, (0, 9)
#: glibc waits for a mutex by the first; condition variables and semaphores, of Python's locks, wait by the other.
_FUTEX_MUTEX = 0
#: File names of code in which a thread may hold a lock that the driver, or a thread that is made meanwhile, needs.
#: Whole names: a thread may stay in libcrypto, libcublas or libmkl for as long as it computes.
_SHARED_CODE = re.compile(
    r"(^\[vdso\]"  # where the driver looks at the clock while it waits for the GPU
    r"|/(libc|libdl|libpthread|libgcc_s|ld|libcuda[^/]*|libcupti|libnvperf_[a-z]+|libnvidia"
    r"|libjemalloc|libtcmalloc|libmimalloc|libasan|libtsan"
    r"|[^/]*_fastpath)([-_.][^/]*)?)$"
)
#: Code that makes system calls for others, whose names are on the stack; and the CUDA driver.
_C_LIBRARY = re.compile(r"(^\[vdso\]|/(libc|libpthread|ld)([-_.][^/]*)?)$")
_DRIVER = re.compile(r"/libcuda[.][^/]*$")
#: The library that copies device memory, of any release.
_LIBRARY = re.compile(r"/[^/]*_fastpath([-_.][^/]*)?$")
#: The interpreter, in a program of its own or in a library: threads of a Python program begin in there.
_PYTHON = re.compile(r"/(lib)?python[0-9][^/]*$")
#: A thread that is stopped in there may have the lock of a queue that libzmq's own threads put something into.
_LIBZMQ = re.compile(r"/libzmq([-_.][^/]*)?$")
#: Lines of proc_pid_maps(5) of mappings that matter beside code: the memory of some libraries.  It begins with what few
#: lines have: a kernel with CUDA has thousands.
_USED = re.compile(rf"/(?:{_COMMON}|[^/]*_fastpath)(?:[-_.][^/]*)?$")
#: Bytes of a waiting thread's stack that are searched: the C library's own frames are much smaller.
_STACK_BYTES = 4096
#: Bytes of glibc's thread descriptor behind the head of its robust list that are searched.  The function is at 856 with
#: glibc 2.36, and the descriptor, the end of the stack, ends at 1568: what comes next is another's memory.
_DESCRIPTOR_BYTES = 1280
#: Seconds for the threads of the driver to wait again; they have nothing to do once the driver's lock is held.
_DRIVER_SETTLES = 0.1


class FrozenThreads:
    """The threads of one process that are stopped by ptrace, until `release`.  Belongs to the thread that made it.

    The methods that freeze raise `TimeoutError` when a thread cannot be frozen by ``deadline`` (of ``time.monotonic``),
    and `OSError` where the process is gone, another process traces a thread of it, or a thread's name could be the CUDA
    driver's.  *After failure* the threads that were frozen before stay frozen, and all others run on.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._frozen: dict[int, Tracee] = {}
        #: Whether they were frozen by `freeze_callers`.
        self._callers = False

    @property
    def leader(self) -> Tracee | None:
        """The main thread, if it is frozen."""
        return self._frozen.get(self._pid)

    def freeze_all(self, deadline: float, *, insist: bool = False) -> None:
        """Freeze all threads but the CUDA driver's and its library's, each where it holds no lock.

        ``insist``: the caller has no alternative.  A thread with an ambiguous name is frozen, too, and in the second
        half of the time any system call is accepted that does not concern memory: a thread that writes to a full pipe
        stays there.
        """
        strict_until = (time.monotonic() + deadline) / 2
        self._repeat(
            deadline,
            lambda tid, shared: self._is_safe(tid, shared, lenient=insist and time.monotonic() > strict_until),
            insist,
        )

    def freeze_stopped(self, deadline: float) -> None:
        """Freeze threads in a group stop, wherever they are.  The stop may end then (SIGCONT), and they do not run."""
        self._repeat(deadline, lambda *_: True, insist=True)

    def freeze_callers(self, deadline: float) -> None:
        """Freeze all threads that could call the CUDA driver, each where it holds no lock.

        The driver's own and its library's run on, and libzmq's: the sockets of a suspended kernel accept connections,
        and close them.  Some calls (cuStreamQuery) do not wait at the driver's lock, but read memory that is not there
        while the driver has suspended the process: they would end it.  As `freeze_all` with ``insist`` otherwise.
        """
        strict_until = (time.monotonic() + deadline) / 2

        def may_freeze(tid: int, shared: _Shared) -> bool:
            lenient = time.monotonic() > strict_until
            return self._is_safe(tid, shared, lenient=lenient) and not self._runs_in(tid, shared.libzmq)

        self._repeat(deadline, may_freeze, insist=True, kept=_NO_CALLER)
        self._callers = True

    def freeze_again(self, deadline: float) -> None:
        """Freeze the threads of a process in a group stop, before that ends, which must not run while it is suspended.

        These are the callers of the driver if they were frozen (`freeze_callers`) when the stop began, else the threads
        that wait in the driver (`freeze_waiting_in_driver`).
        """
        if self._callers:
            self._repeat(deadline, lambda *_: True, insist=True, kept=_NO_CALLER)
        else:
            self.freeze_waiting_in_driver()

    def freeze_waiting_in_driver(self) -> None:
        """Freeze the threads that wait in a system call which the CUDA driver's own code made.

        While the driver's state is suspended, pages that such a thread reads when its wait ends are not there: a
        signal or a tracer must not end the wait.  Threads that only wait at the driver's lock are safe either way.
        A thread that the driver created and that works at the moment gets `_DRIVER_SETTLES` seconds to wait again.
        """
        code = _Shared.of(self._pid)
        settled_by = time.monotonic() + _DRIVER_SETTLES
        with self._released_on_failure():
            while not self._freeze_in_driver(code) and time.monotonic() < settled_by:
                time.sleep(0.001)

    def _freeze_in_driver(self, code: _Shared) -> bool:
        """Freeze the threads that wait in the driver now.  Return whether none that the driver created is left."""
        settled = True
        for tid in procfs.threads(self._pid):
            with contextlib.suppress(*procfs.GONE):  # it ended
                if tid in self._frozen or self._keeps_running(tid, _KEPT_RUNNING, code, insist=True):
                    continue
                drivers = self._began_in(tid, code.driver)
                may_freeze = functools.partial(self._in_driver, shared=code, drivers=drivers)
                if may_freeze(tid):
                    self._freeze_one(tid, may_freeze)
                settled = settled and (tid in self._frozen or not drivers)
        return settled

    def release(self) -> None:
        """Let all frozen threads run."""
        self._release(set(self._frozen))

    def _release(self, tids: set[int]) -> None:
        for tid in tids:
            self._frozen.pop(tid).release()
            self._reap(tid)

    def _repeat(
        self,
        deadline: float,
        may_freeze: Callable[[int, _Shared], bool],
        insist: bool,
        kept: re.Pattern[str] = _KEPT_RUNNING,
    ) -> None:
        with self._released_on_failure():
            while not self._freeze(may_freeze, insist, kept):
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "a thread of the process is never where it can be frozen")
                time.sleep(0.0005)

    @contextlib.contextmanager
    def _released_on_failure(self) -> Iterator[None]:
        """Release the threads that the body has frozen if it fails."""
        before = set(self._frozen)
        try:
            yield
        except BaseException:
            self._release(set(self._frozen) - before)
            raise

    def _freeze(self, may_freeze: Callable[[int, _Shared], bool], insist: bool, kept: re.Pattern[str]) -> bool:
        """Freeze the threads that can be frozen now, but those of ``kept`` names.  Return whether these are all."""
        shared = _Shared.of(self._pid)
        for tid in procfs.threads(self._pid):
            with contextlib.suppress(*procfs.GONE):  # it ended
                if tid not in self._frozen and not self._keeps_running(tid, kept, shared, insist=insist):
                    self._freeze_one(tid, lambda tid: may_freeze(tid, shared))
        # Twice: a thread that ended while the first list was made may have left one that is not in it.
        return all(self._is_at_rest(tid, kept, shared) for _ in range(2) for tid in procfs.threads(self._pid))

    def _keeps_running(self, tid: int, kept: re.Pattern[str], shared: _Shared, *, insist: bool) -> bool:
        name = procfs.stat(self._pid, tid).name
        is_kept = kept.match(name) is not None
        may_be_drivers = not is_kept and not insist and _AMBIGUOUS.match(name) is not None
        if not (is_kept or may_be_drivers) or self._is_programs_own(tid, name, shared):
            return False
        if may_be_drivers:
            raise OSError(errno.ENOTSUP, "a thread may be the CUDA driver's, and may not")
        return True

    def _is_programs_own(self, tid: int, name: str, shared: _Shared) -> bool:
        """Return whether the program began the thread, whatever it is called: its first thread, or one of Python's.

        The library says which threads are its own.  Of the driver's and libzmq's only names are known, so of others,
        and with another C library than glibc, the name alone decides.
        """
        if tid == self._pid:
            return True
        if _OF_LIBRARY.match(name):
            return not self._is_librarys(tid, shared)
        return self._began_in(tid, shared.python) and not self._began_in(tid, shared.driver)

    def _is_librarys(self, tid: int, shared: _Shared) -> bool:
        """Return whether the library for device memory began the thread: it publishes the process's numbers of these.

        Before it names such a thread: so one that has begun since ``shared`` was read is found as well.
        """
        own = int(procfs.status(self._pid, tid)["NSpid"].split()[-1])
        try:
            numbers = procfs.published(self._pid, shared.library, _OWN_THREADS, _NUMBERS.size)
        except OSError:  # then it cannot be frozen, either
            return False
        return numbers is not None and own in _NUMBERS.unpack(numbers)

    def _freeze_one(self, tid: int, may_freeze: Callable[[int], bool]) -> None:
        try:
            tracee = Tracee(tid, running=True)
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
        """Wait for a thread that ended while we traced it: until then its process cannot end.

        Not for our own child: its end is for the loop that reaps children.
        """
        with contextlib.suppress(OSError):
            if tid != self._pid or procfs.stat(self._pid).parent != os.getpid():
                os.waitid(os.P_PID, tid, os.WEXITED | os.WNOHANG | WALL)

    def _is_at_rest(self, tid: int, kept: re.Pattern[str], shared: _Shared) -> bool:
        if tid in self._frozen:
            return True
        try:
            seen = procfs.stat(self._pid, tid)
        except procfs.GONE:  # it ended, and the threads that it made meanwhile are not listed
            return False
        if tid == self._pid and seen.has_ended:  # the first thread stays as a zombie while there are others
            return True
        return kept.match(seen.name) is not None and not self._is_programs_own(tid, seen.name, shared)

    def _is_safe(self, tid: int, shared: _Shared, *, lenient: bool) -> bool:
        call = _SystemCall.of(self._pid, tid)
        if call is None:  # it runs, or was killed
            return False
        if call.number < 0:
            return call.pc not in shared.code
        if call.number == NUMBERS["futex"]:
            address, command = call.arguments[0], call.arguments[1] & _FUTEX_COMMAND
            if command not in _FUTEX_WAITS:
                return False  # it wakes another, and may hold a second lock meanwhile
            waits_for_common_lock = address % _MALLOC_ARENA < _MALLOC_ARENA_HEAD or address in shared.data
            if command == _FUTEX_MUTEX and waits_for_common_lock:
                return False  # it waits for malloc's lock, or the linker's, whose holder runs meanwhile
        elif lenient and call.number not in MACHINE.memory:
            return True
        reads_file = call.number == NUMBERS["read"] and self._is_file(call.arguments[0])
        return call.number in MACHINE.waits and not reads_file

    def _runs_in(self, tid: int, code: _AddressRanges) -> bool:
        """Return whether the thread was stopped between two instructions of this code, not in a system call."""
        call = _SystemCall.of(self._pid, tid)
        return call is not None and call.number < 0 and call.pc in code

    def _in_driver(self, tid: int, shared: _Shared, *, drivers: bool) -> bool:
        """Return whether the thread waits in a system call of the driver's code, made directly or by the C library.

        The first code address on the stack that is not the C library's is the return address of the function that
        called the C library, or a function that one of the two had in a register: so one of the ``drivers``, which the
        driver created, counts whatever the stack says.
        """
        call = _SystemCall.of(self._pid, tid)
        if call is None or call.number not in MACHINE.waits:
            return False
        if drivers:
            return True
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

    def _began_in(self, tid: int, code: _AddressRanges) -> bool:
        """Return whether the function that the thread began with is in ``code``.

        glibc keeps it in the thread's descriptor, behind the head of the list of robust futexes, which Linux tells
        (get_robust_list(2)).  False with another C library.
        """
        if not code:
            return False
        head, length = ctypes.c_uint64(), ctypes.c_uint64()
        try:
            syscalls.call("get_robust_list", tid, ctypes.addressof(head), ctypes.addressof(length))
            with open(f"/proc/{self._pid}/mem", "rb", buffering=0) as memory:
                descriptor = os.pread(memory.fileno(), _DESCRIPTOR_BYTES, head.value & ~7)
        except OSError:
            return False
        return code.have_any(struct.unpack(f"={len(descriptor) // 8}Q", descriptor[: len(descriptor) & ~7]))

    def _is_file(self, descriptor: int) -> bool:
        """Return whether a descriptor is a file: a thread that reads a file may hold a lock, as the linker does."""
        try:
            return stat.S_ISREG(os.stat(f"/proc/{self._pid}/fd/{descriptor}").st_mode)
        except OSError:
            return False


class _SystemCall(NamedTuple):
    """The system call that a thread is in: its number (-1: none), arguments, stack pointer and program counter."""

    number: int
    arguments: tuple[int, ...]
    sp: int
    pc: int

    @classmethod
    def of(cls, pid: int, tid: int) -> _SystemCall | None:
        """Read proc_pid_syscall(5); None of a thread that runs."""
        with open(f"/proc/{pid}/task/{tid}/syscall") as file:
            words = file.read().split()
        if words[0] == "running":
            return None
        *arguments, sp, pc = (int(word, 16) for word in words[1:])
        return cls(int(words[0]), tuple(arguments), sp, pc)


class _AddressRanges:
    """The addresses of mappings, which are in ascending order."""

    def __init__(self, mappings: Iterable[procfs.MemoryMapping]) -> None:
        ranges = [(mapping.start, mapping.end) for mapping in mappings]
        self._starts, self._ends = [start for start, _ in ranges], [end for _, end in ranges]

    def __len__(self) -> int:
        return len(self._starts)

    def __contains__(self, address: int) -> bool:
        index = bisect.bisect_right(self._starts, address) - 1
        return index >= 0 and address < self._ends[index]

    def have_any(self, addresses: Iterable[int]) -> bool:
        """Return whether any of the addresses is one of these; there are some."""
        first, end = self._starts[0], self._ends[-1]  # most of many are not even between those
        return any(address in self for address in [each for each in addresses if first <= each < end])


class _Shared(NamedTuple):
    """Addresses of code in which a thread may hold a lock that others need, and of such locks."""

    code: _AddressRanges
    data: _AddressRanges
    #: All code, and of it the C library's, the CUDA driver's, libzmq's and Python's.
    executable: _AddressRanges
    c_library: _AddressRanges
    driver: _AddressRanges
    libzmq: _AddressRanges
    python: _AddressRanges
    #: The writable memory of the library for device memory.
    library: list[procfs.MemoryMapping]

    @classmethod
    def of(cls, pid: int) -> _Shared:
        """Read those of a process from proc_pid_maps(5)."""
        mappings = procfs.maps(pid, program=True, matching=_USED)
        code = [mapping for mapping in mappings if "x" in mapping.permissions]

        def named(pattern: re.Pattern[str], among: list[procfs.MemoryMapping] = code) -> _AddressRanges:
            return _AddressRanges(mapping for mapping in among if pattern.search(mapping.name))

        return cls(
            code=named(_SHARED_CODE),
            data=named(_COMMON_LIBRARIES, mappings),
            executable=_AddressRanges(code),
            c_library=named(_C_LIBRARY),
            driver=named(_DRIVER),
            libzmq=named(_LIBZMQ),
            python=named(_PYTHON),
            library=[each for each in mappings if each.permissions.startswith("rw") and _LIBRARY.search(each.name)],
        )
