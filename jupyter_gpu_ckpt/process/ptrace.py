"""A stopped thread of another process, traced by ``ptrace(2)``: its registers, signal mask, system calls in its name.

Names and numbers are the kernel's own (``include/uapi/linux/{ptrace,elf}.h``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.procfs import MemoryMapping

PTRACE_POKEUSER, PTRACE_CONT, PTRACE_DETACH, PTRACE_SYSCALL = 6, 7, 17, 24
PTRACE_GETREGSET, PTRACE_SETREGSET, PTRACE_SEIZE, PTRACE_INTERRUPT = 0x4204, 0x4205, 0x4206, 0x4207
PTRACE_GETEVENTMSG = 0x4201
PTRACE_GETSIGMASK, PTRACE_SETSIGMASK = 0x420A, 0x420B
PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG = 0x4211
PTRACE_O_TRACESYSGOOD, PTRACE_O_EXITKILL, PTRACE_EVENT_STOP = 1, 1 << 20, 128
#: FORK, VFORK and CLONE: each child is traced from its beginning, as its parent is.
PTRACE_O_TRACEFORKS, PTRACE_EVENT_FORKS = 0x2 | 0x4 | 0x8, (1, 2, 3)

NT_PRSTATUS, NT_PRFPREG = 1, 2
NT_X86_XSTATE, NT_X86_SHSTK, NT_ARM_HW_BREAK = 0x202, 0x204, 0x402

WALL = 0x40000000
#: The stop signal of a tracee that stops for `PTRACE_SYSCALL`; no real signal has this number.
SYSCALL_STOP = signal.SIGTRAP | 0x80
#: All signals blocked but SIGTRAP: a process that meets a trap while that is blocked dies.
ALL_BUT_SIGTRAP = (1 << 64) - 1 & ~(1 << signal.SIGTRAP - 1)
#: Seconds that a thread has to reach a stop.
STOP_TIMEOUT = 5.0
_REGSET_BYTES = 1 << 14
#: sizeof(Elf64_Ehdr)
_ELF_HEADER = 64
#: Times that a stop is looked for without a pause: most come within 20 us, on another processor.
_SPINS = 50


class Machine(NamedTuple):
    """The words of a system call in NT_PRSTATUS (an array of 64-bit words), and kinds of system calls."""

    instruction: bytes
    pc: int
    sp: int
    number: int
    result: int
    arguments: tuple[int, ...]
    #: The word of the system call's number: -1 there, or Linux takes a changed ``pc`` for a call to be restarted.
    in_call: int | None
    #: ``offsetof(struct user, u_debugreg[7])``: the register that arms a thread's hardware breakpoints.
    debug_control: int | None
    regsets: tuple[int, ...]
    #: System calls that wait for another thread or process, and hold no lock meanwhile.
    waits: frozenset[int]
    #: System calls about the process's memory: a thread in one may hold the lock of an allocator.
    memory: frozenset[int]


_MACHINES = {
    "x86_64": Machine(
        instruction=b"\x0f\x05",
        pc=16,
        sp=19,
        number=10,
        result=10,
        arguments=(14, 13, 12, 7, 9, 8),
        in_call=15,
        debug_control=848 + 7 * 8,
        regsets=(NT_PRSTATUS, NT_X86_XSTATE, NT_X86_SHSTK),
        # read, poll, select, pause, nanosleep, accept, recvfrom, recvmsg, wait4, semop, rt_sigtimedwait, rt_sigsuspend,
        # futex, restart_syscall, semtimedop, clock_nanosleep, epoll_wait, waitid, pselect6, ppoll, epoll_pwait,
        # accept4, recvmmsg, io_uring_enter, epoll_pwait2, futex_waitv
        waits=frozenset((0, 7, 23, 34, 35, 43, 45, 47, 61, 65, 128, 130, 202, 219, 220, 230, 232, 247, 270, 271, 281))
        | frozenset((288, 299, 426, 441, 449)),
        memory=frozenset((9, 10, 11, 12, 25, 28)),  # mmap, mprotect, munmap, brk, mremap, madvise
    ),
    "aarch64": Machine(
        instruction=b"\x01\x00\x00\xd4",
        pc=32,
        sp=31,
        number=8,
        result=0,
        arguments=(0, 1, 2, 3, 4, 5),
        in_call=None,
        debug_control=None,
        regsets=(NT_PRSTATUS, NT_PRFPREG, NT_ARM_HW_BREAK),
        # epoll_pwait, read, pselect6, ppoll, waitid, futex, nanosleep, clock_nanosleep, restart_syscall, rt_sigsuspend,
        # rt_sigtimedwait, semtimedop, semop, accept, recvfrom, recvmsg, accept4, recvmmsg, wait4, io_uring_enter,
        # epoll_pwait2, futex_waitv
        waits=frozenset((22, 63, 72, 73, 95, 98, 101, 115, 128, 133, 137, 192, 193, 202, 207, 212, 242, 243, 260, 426))
        | frozenset((441, 449)),
        memory=frozenset((214, 215, 216, 222, 226, 233)),  # brk, munmap, mremap, mmap, mprotect, madvise
    ),
}
#: Whether this host's machine is known; a capsule's init refuses all others.
IS_KNOWN = os.uname().machine in _MACHINES
#: This host's.
MACHINE = _MACHINES.get(os.uname().machine, _MACHINES["x86_64"])

#: Threads that `Tracee.release` could not detach, because they did not stop: traced until they do (`release_late`).
_unreleased: set[int] = set()

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> None:
    """Make a request of ptrace(2).  Raises `OSError`."""
    if _libc.ptrace(request, tid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace({request:#x}): {os.strerror(number)}")


def seize(tid: int, options: int = 0) -> None:
    """Begin to trace a thread.  Raises `OSError`.

    The end of the init of a pid namespace ends all other processes there, but only after it has let its tracees run:
    they are killed before that.
    """
    if os.getpid() == 1:
        options |= PTRACE_O_EXITKILL
    ptrace(PTRACE_SEIZE, tid, 0, options | PTRACE_O_TRACESYSGOOD)


def release_late(tid: int, status: int) -> bool:
    """Detach a thread that has stopped, or ended, later than `Tracee.release` waited.  Return whether it is such a one.

    ``status`` is waitpid(2)'s.  A signal that the thread stopped for is delivered, but for SIGTRAP: see `Tracee.call`.
    """
    if tid not in _unreleased:
        return False
    _unreleased.discard(tid)
    if os.WIFSTOPPED(status):
        number = status >> 8  # a ptrace event has more bits, a stop at a system call too
        arrives = number in signal.valid_signals() and number != signal.SIGTRAP
        with contextlib.suppress(ProcessLookupError):  # killed meanwhile
            ptrace(PTRACE_DETACH, tid, 0, number if arrives else 0)
    return True


def _await_stop(tid: int) -> None:
    """Wait until a thread is in the group stop that it is on its way to, as CRIU leaves restored processes.

    A tracer that was there first would get the SIGSTOP itself, and there would be no stop when it is gone.
    """
    deadline = time.monotonic() + STOP_TIMEOUT
    while (state := _state(tid)) not in "TtZX":
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, f"thread {tid} is not stopped (state {state})")
        time.sleep(0.0001)


def _state(tid: int) -> str:
    try:
        return procfs.stat(tid).state
    except procfs.GONE:
        return "X"


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Tracee(contextlib.AbstractContextManager["Tracee"]):
    """A thread in a group stop (state ``T``), traced until `release`; then it is in that stop again.

    ``running``: a thread that runs; it is stopped here, and runs on after `release`.  Raises `OSError` where the thread
    is gone, traced by another process or, without ``running``, not stopped within `STOP_TIMEOUT` seconds.
    """

    def __init__(self, tid: int, *, running: bool = False) -> None:
        self.tid = tid
        if not running:
            _await_stop(tid)
        seize(tid)
        try:
            if running:
                self._interrupt()
            else:
                self._wait()
        except BaseException:
            self.release()
            raise

    @classmethod
    def attached(cls, tid: int) -> Tracee:
        """A thread that is traced and stopped already."""
        tracee = cls.__new__(cls)
        tracee.tid = tid
        return tracee

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Detach; drop a signal that it stopped for.  A thread that does not stop is left to `release_late`."""
        try:
            ptrace(PTRACE_DETACH, self.tid)
        except ProcessLookupError:
            try:  # it is gone; or it runs, and only a stopped thread can be detached
                ptrace(PTRACE_INTERRUPT, self.tid)
                self._wait()
                ptrace(PTRACE_DETACH, self.tid)
            except TimeoutError:
                _unreleased.add(self.tid)
            except OSError:
                pass

    def _interrupt(self) -> None:
        """Stop the thread; signals that arrive before are delivered."""
        ptrace(PTRACE_INTERRUPT, self.tid)
        while (status := self._wait_status()) >> 8 != PTRACE_EVENT_STOP:
            ptrace(PTRACE_CONT, self.tid, 0, status & 0xFF)

    def pass_signals(self) -> None:
        """Let Linux do what is due when the stopped thread continues (kernel/signal.c: get_signal).

        It stops again before it gets a signal or runs an instruction.  Raises `OSError`.
        """
        ptrace(PTRACE_INTERRUPT, self.tid)
        ptrace(PTRACE_CONT, self.tid)
        self._wait()

    def _wait(self) -> int:
        """Wait for the next stop.  Return its signal; the thread's end is left for the loop that reaps."""
        return self._wait_status() & 0xFF

    def _wait_status(self) -> int:
        """Wait for the next stop.  Return its signal, with the number of a ptrace event in the bits above it."""
        deadline = time.monotonic() + STOP_TIMEOUT
        options = os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT | WALL
        tries = 0
        while (found := os.waitid(os.P_PID, self.tid, options)) is None:
            tries += 1
            if tries <= _SPINS:
                os.sched_yield()
                continue
            if time.monotonic() > deadline:
                raise TimeoutError(f"thread {self.tid} does not stop")
            time.sleep(0.0001)
        if found.si_code not in (os.CLD_TRAPPED, os.CLD_STOPPED):
            raise ProcessLookupError(f"thread {self.tid} ended")
        os.waitid(os.P_PID, self.tid, os.WSTOPPED | os.WNOHANG | WALL)
        return int(found.si_status)

    # -- registers

    def regset(self, kind: int) -> bytes | None:
        """Return a register set as bytes; None where the thread has none of that kind."""
        buffer = ctypes.create_string_buffer(_REGSET_BYTES)
        vector = _Iovec(ctypes.addressof(buffer), _REGSET_BYTES)
        try:
            ptrace(PTRACE_GETREGSET, self.tid, kind, ctypes.addressof(vector))
        except ProcessLookupError:
            raise
        except OSError:
            return None
        return buffer.raw[: vector.length]

    def set_regset(self, kind: int, data: bytes) -> None:
        """Write what `regset` has returned."""
        buffer = ctypes.create_string_buffer(data, len(data))
        vector = _Iovec(ctypes.addressof(buffer), len(data))
        ptrace(PTRACE_SETREGSET, self.tid, kind, ctypes.addressof(vector))

    def words(self) -> list[int]:
        """The general registers, as `Machine` numbers them."""
        data = self.regset(NT_PRSTATUS)
        if data is None:
            raise ProcessLookupError(f"thread {self.tid} has no registers")
        return list(struct.unpack(f"={len(data) // 8}Q", data))

    def disarm(self) -> None:
        """Remove hardware breakpoints.  (Where `Machine.regsets` has them, they were put back.)"""
        if MACHINE.debug_control is not None:
            ptrace(PTRACE_POKEUSER, self.tid, MACHINE.debug_control, 0)

    @property
    def mask(self) -> int:
        """The blocked signals, bit 0 being signal 1."""
        value = ctypes.c_uint64()
        ptrace(PTRACE_GETSIGMASK, self.tid, 8, ctypes.addressof(value))
        return value.value

    @mask.setter
    def mask(self, mask: int) -> None:
        value = ctypes.c_uint64(mask)
        ptrace(PTRACE_SETSIGMASK, self.tid, 8, ctypes.addressof(value))

    # -- a system call in its name

    def dispatches_calls(self) -> bool:
        """Return whether the thread gets its system calls as signals (PR_SET_SYSCALL_USER_DISPATCH); False if unknown.

        Linux shows it since 6.4.
        """
        config = (ctypes.c_uint64 * 4)()
        with contextlib.suppress(OSError):
            request = PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG
            ptrace(request, self.tid, ctypes.sizeof(config), ctypes.addressof(config))
        return config[0] == 1

    def call(self, at: int, number: int, *arguments: int) -> int:
        """Make a system call by the instruction at address ``at``.  Return its result, negative for an error.

        Registers and mask are afterwards as before.  A pending SIGTRAP or stop signal is delivered first and dropped:
        the one is a trap of a tracer that is gone, the other has had its effect.
        """
        before, mask = self.words(), self.mask
        words = [*before]
        words[MACHINE.pc], words[MACHINE.number] = at, number
        if MACHINE.in_call is not None:
            words[MACHINE.in_call] = (1 << 64) - 1
        for index, value in zip(MACHINE.arguments, arguments, strict=False):
            words[index] = value
        self.mask = ALL_BUT_SIGTRAP
        try:
            self.set_words(words)
            self._to_syscall_stop()  # at its entry
            self._to_syscall_stop()  # at its exit
            (result,) = struct.unpack("=q", struct.pack("=Q", self.words()[MACHINE.result]))
        finally:
            self.set_words(before)
            self.mask = mask
        return int(result)

    def set_words(self, words: Sequence[int]) -> None:
        """Write the general registers, as `words` returns them."""
        self.set_regset(NT_PRSTATUS, struct.pack(f"={len(words)}Q", *words))

    def _to_syscall_stop(self) -> None:
        for _ in range(16):
            ptrace(PTRACE_SYSCALL, self.tid)
            if self._wait() == SYSCALL_STOP:
                return
        raise OSError(f"thread {self.tid} reaches no system call")


class ProcessMemory(contextlib.AbstractContextManager["ProcessMemory"]):
    """``/proc/PID/mem`` of a process: writes ignore the mapping's protection, as a debugger's do."""

    def __init__(self, pid: int) -> None:
        self._fd = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, address: int, size: int) -> bytes:
        """Read up to ``size`` bytes: fewer where the mapping ends."""
        return os.pread(self._fd, size, address)

    def write(self, address: int, data: bytes) -> None:
        """Write ``data`` at ``address``."""
        os.pwrite(self._fd, data, address)


def system_call_gate(memory: ProcessMemory, mappings: Iterable[MemoryMapping]) -> int:
    """Find the address of a system call instruction in the vdso, where no code has to be written."""
    for mapping in mappings:
        if mapping.name == "[vdso]":
            # Not in its header: a CRIU that was killed leaves code of its own there, if the vdso is the first code.
            found = memory.read(mapping.start, mapping.end - mapping.start).find(MACHINE.instruction, _ELF_HEADER)
            if found >= 0:
                return mapping.start + found
    raise OSError(errno.ENOENT, "there is no system call instruction in the vdso")
