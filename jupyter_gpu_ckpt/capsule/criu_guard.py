"""Keep a kernel alive when CRIU is killed while it dumps it.  Runs in a capsule's init, the parent of both.

For a dump CRIU traces every thread and runs code of its own in them.  When it is killed, Linux detaches the threads
where they are: in that code, or at a trap, of which the process then dies (``kernel/signal.c: ptrace_stop`` keeps the
SIGTRAP that its tracer cannot take back any more).  Three measures before the dump make all of that repairable:

1. *The processes are stopped by SIGSTOP.*  A thread whose tracer dies goes back into that stop (``kernel/ptrace.c:
   __ptrace_unlink``) before it runs one more instruction, so CRIU's code has no more effect.
2. *SIGTRAP has a handler*, at an address where nothing is.  It never runs, because the stop comes first; but a signal
   with a handler does not kill.  It travels into the image, so that every restore takes it away too (`unguard`).
3. *Registers, signal masks and the memory that CRIU overwrites* are saved here, and put back if CRIU fails.

One thread may have continued by itself: the parasite in the main thread sees that CRIU is gone and returns to the
program, which runs until Linux removes the tracer.  Such a thread is recognized by its program counter, and left alone.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import ExitStack
from typing import NamedTuple

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import file_locks, syscall_restart, syscalls
from jupyter_gpu_ckpt.process.file_locks import Lock
from jupyter_gpu_ckpt.process.freezer import FrozenThreads
from jupyter_gpu_ckpt.process.injection import Injection
from jupyter_gpu_ckpt.process.ptrace import ALL_BUT_SIGTRAP, MACHINE, NT_PRSTATUS, STOP_TIMEOUT, Tracee
from jupyter_gpu_ckpt.process.syscalls import NUMBERS
from jupyter_gpu_ckpt.process.unsavable import Unsavable
from jupyter_gpu_ckpt.procfs import MemoryMapping

#: Handlers that stand for "was the default" and "was ignored".  No code can lie in the first page.
GUARD = {int(signal.SIG_DFL): 0x10, int(signal.SIG_IGN): 0x20}
_SA_RESTORER = 0x04000000
#: handler, flags, restorer, mask: the kernel's ``struct sigaction``.
_SIGACTION = struct.Struct("=4Q")
#: Bytes of the first executable mapping that CRIU may overwrite (compel's syscall and the name of its memfd: 16).
_ENTRY_BYTES = 64
#: compel's name for the file that its code lies in.
_PARASITE = "/memfd:CRIUMFD"
_TRAP = 1 << signal.SIGTRAP - 1
#: Seconds for a process that continues after a stop to get a processor.
_NOTICE_TIMEOUT = 0.1
_CONT, _CHLD = 1 << signal.SIGCONT - 1, 1 << signal.SIGCHLD - 1
#: Stop signals that a process can take from its queue: not SIGSTOP.
_STOPS = sum(1 << each - 1 for each in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU))
_STOP_NOTICES = (os.CLD_STOPPED, os.CLD_CONTINUED, os.CLD_TRAPPED)
_SIGINFO_BYTES = 128
#: Seconds in which a released process is back in its stop, which takes a moment unless the machine is overloaded.
_RETURN_TIMEOUT = 1.0
#: How often a signal may come anew between the look for one and the end of a stop: a timer ticks.
_TIMER_TICKS = 5
_UNBLOCKABLE = 1 << signal.SIGKILL - 1 | 1 << signal.SIGSTOP - 1


class _Thread(NamedTuple):
    """A thread's state before the dump."""

    regsets: dict[int, bytes]
    mask: int


class _SavedProcess(NamedTuple):
    """A process's state before the dump."""

    pid: int
    mappings: list[MemoryMapping]
    descriptors: set[int]
    entry: int
    entry_bytes: bytes
    #: SIGTRAP's: the guard, or one of the program's own.
    handler: int
    threads: dict[int, _Thread]
    locks: list[Lock]


class DoesNotStop(Unsavable, TimeoutError):
    """A process does not stop; ``strerror`` names it, and the reason if that is known."""

    field = "does_not_stop"


class DispatchesCalls(Unsavable):
    """A thread gets its system calls as signals, which CRIU does not save; ``strerror`` names its process."""

    field = "dispatches_calls"


def _does_not_stop(pid: int) -> DoesNotStop:
    why = "does not stop"
    for child in procfs.children(pid):
        # A parent waits in vfork(2), and in posix_spawn(3), while its child uses its memory.
        if "kcmp" not in syscalls.forbidden() and syscalls.call("kcmp", pid, child, syscalls.KCMP_VM, 0, 0) == 0:
            why = f"waits for its child, process {child}, to start its program (vfork)"
    return DoesNotStop(errno.ETIMEDOUT, f"{procfs.described(pid)} {why}")


def stop(pid: int, deadline: float, frozen: FrozenThreads | None = None) -> bool:
    """Stop ``pid`` and all its threads.  Return False if they were stopped before.

    Threads in ``frozen`` are released into the stop: they run not one more instruction of the program.  Raises
    `DoesNotStop`; all run on then.
    """
    if _all_stopped(pid):
        return False
    os.kill(pid, signal.SIGSTOP)
    if frozen is not None:
        frozen.release()
    while not _all_stopped(pid):
        if time.monotonic() > deadline:
            error = _does_not_stop(pid)
            leader = None
            with contextlib.suppress(OSError):
                leader = _freeze_again(frozen)
            resume(pid, leader)
            raise error
        time.sleep(0.0005)
    return True


def _freeze_again(frozen: FrozenThreads | None) -> Tracee | None:
    """Freeze the threads of a process, whose stop is about to end, that must not run.  Return its leader, if frozen."""
    if frozen is None:
        return None
    frozen.freeze_again(time.monotonic() + STOP_TIMEOUT)
    return frozen.leader


def _return_to_stop(pid: int, deadline: float) -> None:
    """Wait until a process that a tracer has released is back in the stop that it was in.  Raises `TimeoutError`.

    Linux leads it back by itself.  Another SIGSTOP would stay pending: CRIU drops as many signals as there are
    SIGSTOPs, and where a timer's signal was among them, a SIGSTOP is left, at which its dump fails.
    """
    patience = min(deadline, time.monotonic() + _RETURN_TIMEOUT)
    while not _all_stopped(pid) and time.monotonic() < patience:
        time.sleep(0.0005)
    stop(pid, deadline)  # somebody else has let it run


def _all_stopped(pid: int) -> bool:
    return all(_state(pid, tid) in "TZX" for tid in procfs.threads(pid))


def _state(pid: int, tid: int) -> str:
    try:
        return procfs.stat(pid, tid).state
    except procfs.GONE:
        return "X"


def _lives(pid: int) -> bool:
    return _state(pid, pid) not in "ZX"


@contextlib.contextmanager
def _unless_ended(pid: int, vital: Container[int]) -> Iterator[None]:
    """Pass over a failure of the body at a process that was killed meanwhile, if it is not one of the ``vital``."""
    try:
        yield
    except OSError:
        if pid in vital or _lives(pid):
            raise


def resume(pid: int, leader: Tracee | None = None) -> None:
    """End the stop of a process, which does not notice it.  ``leader``: as for `Injection.into`.

    Its own handler of SIGCONT is not called, and it gets no SIGCHLD that its children stopped: `_drop_stop_notice`.
    What else came while it was stopped, a timer's signal for example, the main thread gets, as if it had run.
    """
    if _signals(pid, pid, "ShdPnd") & _CHLD:
        with contextlib.suppress(OSError), Injection.into(pid, leader) as injection:
            _drop_stop_notice(injection)
    for _ in range(_TIMER_TICKS):
        if not (waiting := _for_main_thread(pid)):
            break
        with contextlib.suppress(OSError), Injection.into(pid, leader) as injection:
            _pass_to_main_thread(injection, waiting)
    before = _times_run(pid)
    with ExitStack() as stack:
        if _signals(pid, pid, "SigCgt") & _CONT:
            with contextlib.suppress(OSError):  # then it is called
                stack.enter_context(_uncaught(stack.enter_context(Injection.into(pid, leader))))
        os.kill(pid, signal.SIGCONT)
    # The first thread that continues notifies the parent (CLD_CONTINUED), which drops that before its own turn.
    if leader is not None:
        with contextlib.suppress(OSError):
            leader.pass_signals()
        return
    deadline = time.monotonic() + _NOTICE_TIMEOUT
    while _lives(pid) and _state(*[procfs.stat(pid).parent] * 2) in "Tt" and time.monotonic() < deadline:
        if _times_run(pid) != before:
            break
        time.sleep(0.0002)


def _times_run(pid: int) -> int:
    """Return how often threads of a process have got a processor (Documentation/scheduler/sched-stats.rst)."""
    found = 0
    for tid in procfs.threads(pid):
        with contextlib.suppress(OSError):
            found += int(procfs.read(f"/proc/{pid}/task/{tid}/schedstat").split()[2])
    return found


def _drop_stop_notice(injection: Injection) -> None:
    """Drop a pending SIGCHLD that says that a child has stopped or continued, which it did for a dump or a restore.

    A program that reads such a notice may stop itself, as script(1) does.  It stays if the child is still stopped, or
    if one has ended: Linux keeps one SIGCHLD for all.
    """
    pid = injection.pid
    empty = struct.pack("=Q", _CHLD) + bytes(_SIGINFO_BYTES + 16)  # the signals to wait for, and for no time
    with injection.on_stack(empty) as address:
        info, timeout = address + 8, address + 8 + _SIGINFO_BYTES
        if injection.call("rt_sigtimedwait", address, info, timeout, 8) != signal.SIGCHLD:
            return
        code, child = struct.unpack("=8xi4xi", injection.memory.read(info, 20))
        ended = any(_state(each, each) == "Z" for each in procfs.children(pid))
        if code not in _STOP_NOTICES or ended or _state(child, child) == "T":
            injection.call("rt_sigqueueinfo", pid, signal.SIGCHLD, info)


def _for_main_thread(pid: int) -> int:
    """Return the signals that wait for any thread of a process, have a handler, and are not blocked by the first."""
    waiting = _signals(pid, pid, "ShdPnd") & _signals(pid, pid, "SigCgt")
    return waiting & ~_signals(pid, pid, "SigBlk") & ~_CONT


def _interrupting(pid: int, tid: int) -> int:
    """Return the signals because of which a handler may run in a thread of a stopped process once it runs again.

    What comes while it is stopped, as a timer's does at any moment, its first thread gets (`resume`).
    """
    waiting = _signals(pid, tid, "SigPnd", "ShdPnd") & _signals(pid, tid, "SigCgt")
    of_first = 0 if tid == pid else _for_main_thread(pid) & ~_signals(pid, tid, "SigPnd")
    return waiting & ~of_first


def _pass_to_main_thread(injection: Injection, waiting: int) -> None:
    """Have the first thread get signals that wait for any thread.

    Linux gives a running process's signal to its first thread (kernel/signal.c: complete_signal), but one that came
    while all are stopped to the thread that runs first, whose system call it interrupts: sem_wait(3) returns -1.
    """
    pid, taken = injection.pid, list[bytes]()
    empty = struct.pack("=Q", waiting) + bytes(_SIGINFO_BYTES + 16)
    with injection.on_stack(empty) as address:
        info, timeout = address + 8, address + 8 + _SIGINFO_BYTES
        while injection.call("rt_sigtimedwait", address, info, timeout, 8) > 0:
            taken.append(injection.memory.read(info, _SIGINFO_BYTES))
        for each in taken:
            injection.memory.write(info, each)
            injection.call("rt_tgsigqueueinfo", pid, pid, struct.unpack_from("=i", each)[0], info)


@contextlib.contextmanager
def _uncaught(injection: Injection) -> Iterator[None]:
    """Let SIGCONT be neither caught nor blocked for as long as the body lasts."""
    default = _SIGACTION.pack(int(signal.SIG_DFL), 0, 0, 0)
    action = _action(injection, signal.SIGCONT, default)
    mask = injection.leader.mask
    injection.leader.mask = mask & ~_CONT
    try:
        yield
    finally:
        injection.leader.mask = mask
        # A traced thread keeps even a signal that is ignored, for its tracer (kernel/signal.c: sig_ignored); setting
        # the default action drops those that are pending (do_sigaction).
        _action(injection, signal.SIGCONT, default)
        _action(injection, signal.SIGCONT, action)


def _signals(pid: int, tid: int, *fields: str) -> int:
    """Return the signals in these fields of proc_pid_status(5), bit 0 being signal 1."""
    found, status = 0, procfs.status(pid, tid)
    for name in fields:
        found |= int(status.get(name, "0"), 16)
    return found


def _tree(
    root: int, deadline: float, frozen: Mapping[int, FrozenThreads] | None = None, kernel: int = 0
) -> Iterator[tuple[int, bool]]:
    """Stop ``root`` and its descendants, parents first; yield each, and whether it ran.  ``frozen``: by process.

    A descendant that ends meanwhile is left out, but not ``kernel``; its children become those of ``root``, if that is
    a root process, and descendants of it no more, if it is the kernel.
    """
    pending, seen = [root], set[int]()
    while pending:
        pid = pending.pop()
        if pid not in seen and (pid == kernel or _state(pid, pid) != "Z"):
            try:
                ran = stop(pid, deadline, (frozen or {}).get(pid))
            except ProcessLookupError:
                if pid in (root, kernel):
                    raise
            else:
                yield pid, ran
                pending += procfs.children(pid)
        seen.add(pid)
        if not pending:
            pending = [child for child in procfs.children(root) if child not in seen]


def _action(injection: Injection, number: int, new: bytes = b"") -> bytes:
    """Set a signal's `_SIGACTION`, if there is a ``new`` one.  Return the one it had."""
    with injection.on_stack(bytes(_SIGACTION.size) + new) as address:
        if result := injection.call("rt_sigaction", number, address + _SIGACTION.size if new else 0, address, 8):
            raise OSError(-result, f"rt_sigaction: {os.strerror(-result)}")
        return injection.memory.read(address, _SIGACTION.size)


def _sigtrap(injection: Injection, handler: int | None = None) -> int:
    """Set SIGTRAP's handler, if one is given.  Return the handler it had."""
    # All signals wait while it would run, so that no other handler is entered after it.
    new = b"" if handler is None else _SIGACTION.pack(handler, _SA_RESTORER, handler, (1 << 64) - 1)
    return int(_SIGACTION.unpack(_action(injection, signal.SIGTRAP, new))[0])


def _inspect(pid: int) -> _SavedProcess:
    """Save the state of a stopped process, and set SIGTRAP's guard.  Raises `DispatchesCalls`, `OSError`."""
    locks = file_locks.held(pid)
    mappings = procfs.maps(pid)
    entry = next((each.start for each in mappings if each.permissions[2] == "x"), 0)
    threads = {}
    with Injection.into(pid) as injection:
        for tid in procfs.threads(pid):
            with injection.thread(tid) as tracee:
                if tracee.dispatches_calls():  # it would get those that are injected as well
                    raise DispatchesCalls(errno.ENOTSUP, procfs.described(pid))
                syscall_restart.begin_again(tracee, signals=_interrupting(pid, tid))
                regsets = {kind: data for kind in MACHINE.regsets if (data := tracee.regset(kind)) is not None}
                threads[tid] = _Thread(regsets, tracee.mask)
                if tid == pid and (handler := _sigtrap(injection)) in GUARD:
                    handler = GUARD[handler]
                    _sigtrap(injection, handler)
        entry_bytes = injection.memory.read(entry, _ENTRY_BYTES)
        return _SavedProcess(pid, mappings, set(procfs.descriptors(pid)), entry, entry_bytes, handler, threads, locks)


def _drop_guard(injection: Injection) -> None:
    handler = _sigtrap(injection)
    for was, guard in GUARD.items():
        if handler == guard:
            _sigtrap(injection, was)


def _unguard(pid: int) -> None:
    stop(pid, time.monotonic() + STOP_TIMEOUT)
    with Injection.into(pid) as injection:
        if not injection.leader.dispatches_calls():  # it has no guard
            _drop_guard(injection)


def unguard(
    root: int,
    frozen: Callable[[int], FrozenThreads | None] = lambda _: None,
    stay_stopped: Container[int] = (),
    *,
    kernel: int = 0,
) -> None:
    """Remove SIGTRAP's guard from restored processes, and let them run, all threads frozen of those in ``frozen``.

    ``root``, ``kernel``: as for `CriuGuard`.  Those in ``stay_stopped`` were stopped before their dump, and stay it.
    """
    vital = {root, kernel}
    leaders = dict[int, Tracee | None]()
    pids = []
    for pid, _ in _tree(root, time.monotonic() + STOP_TIMEOUT):
        pids.append(pid)
        with _unless_ended(pid, vital):
            _unguard(pid)
    for pid in pids:
        with _unless_ended(pid, vital):
            if (threads := frozen(pid)) is not None:
                threads.freeze_stopped(time.monotonic() + STOP_TIMEOUT)
                leaders[pid] = threads.leader
    for pid in reversed([pid for pid in pids if pid not in stay_stopped]):  # no parent sees that its children stopped
        with _unless_ended(pid, vital):
            resume(pid, leaders.get(pid))


def _repair(process: _SavedProcess, ran: bool) -> None:
    """Put a process back into its state before the dump.  It is stopped before and after.  ``ran``: before that."""
    pid = process.pid
    stop(pid, time.monotonic() + STOP_TIMEOUT)
    with Injection.into(pid) as injection, ExitStack() as stack:
        tids = [tid for tid in procfs.threads(pid) if tid in process.threads]
        tracees = {tid: stack.enter_context(injection.thread(tid)) for tid in tids}
        if injection.memory.read(process.entry, _ENTRY_BYTES) != process.entry_bytes:
            injection.memory.write(process.entry, process.entry_bytes)
        known = {mapping.start for mapping in process.mappings}
        now = procfs.maps(pid)
        parasite = [each for each in now if each.name.startswith(_PARASITE) and each.start not in known]
        displaced = _is_displaced(process, injection.leader, parasite)
        for tid, tracee in tracees.items():
            before = process.threads[tid]
            if tid != pid or displaced:
                for kind, data in before.regsets.items():
                    tracee.set_regset(kind, data)
                tracee.mask = before.mask
                tracee.disarm()
            elif tracee.mask | _UNBLOCKABLE == ALL_BUT_SIGTRAP:
                tracee.mask = before.mask
            if _signals(pid, tid, "SigPnd") & _TRAP:
                tracee.call(injection.gate, NUMBERS["getpid"])  # a pending trap is delivered first, and dropped
        if displaced:
            for descriptor in set(procfs.descriptors(pid)) - process.descriptors:
                injection.call("close", descriptor)
            for mapping in _changed(process.mappings, now):
                injection.call("mprotect", mapping.start, mapping.end - mapping.start, _protection(mapping))
        for mapping in parasite:
            injection.call("munmap", mapping.start, mapping.end - mapping.start)
        _drop_guard(injection)
        if not ran:
            _drop_stop_signals(injection)


def _drop_stop_signals(injection: Injection) -> None:
    """Drop stop signals that wait for a process that somebody has stopped: SIGCONT would.

    CRIU sends it the one that stopped it before it detaches, and was killed in between.
    """
    empty = struct.pack("=Q", _STOPS) + bytes(_SIGINFO_BYTES + 16)
    with injection.on_stack(empty) as address:
        while injection.call("rt_sigtimedwait", address, address + 8, address + 8 + _SIGINFO_BYTES, 8) > 0:
            pass


def _is_displaced(process: _SavedProcess, leader: Tracee, parasite: list[MemoryMapping]) -> bool:
    """Return whether the main thread is where CRIU put it, or where it was; else it has continued by itself."""
    if leader.regset(NT_PRSTATUS) == process.threads[process.pid].regsets[NT_PRSTATUS]:
        return True
    at = leader.words()[MACHINE.pc]
    in_entry = process.entry <= at < process.entry + _ENTRY_BYTES
    return in_entry or at == process.handler or any(mapping.contains(at) for mapping in parasite)


def _changed(before: list[MemoryMapping], now: list[MemoryMapping]) -> Iterator[MemoryMapping]:
    """The mappings of ``before`` that have another protection ``now``."""
    for was in before:
        for mapping in now:
            if mapping.start < was.end and was.start < mapping.end and mapping.permissions[:3] != was.permissions[:3]:
                yield was
                break


def _protection(mapping: MemoryMapping) -> int:
    letters = zip("rwx", mapping.permissions, (mmap.PROT_READ, mmap.PROT_WRITE, mmap.PROT_EXEC), strict=False)
    return sum(bit for letter, found, bit in letters if letter == found)


class CriuGuard:
    """Stops a tree of processes, from ``root``, for a dump, and repairs afterwards what CRIU left.

    ``kernel``: the process that must live as the root must; by default the root itself.
    ``deadline``: `time.monotonic` by which all threads must have stopped.  ``frozen``: frozen threads, by process, stop
    where they are; those that must not run while CUDA is suspended are frozen again before the process runs on.  Raises
    `OSError`, of which `TimeoutError` is one; everything runs on as before then.
    """

    def __init__(
        self, root: int, deadline: float, frozen: Mapping[int, FrozenThreads] | None = None, *, kernel: int = 0
    ) -> None:
        self._vital = {root, kernel}
        self._frozen = dict(frozen or {})
        #: All processes that are stopped.
        self.pids: list[int] = []
        #: Processes that ran before: those that somebody else had stopped stay stopped.
        self._ran: list[int] = []
        self._processes: list[_SavedProcess] = []
        try:
            for pid, ran in _tree(root, deadline, self._frozen, kernel):
                self.pids.append(pid)
                if ran:
                    self._ran.append(pid)
                with _unless_ended(pid, self._vital):
                    self._processes.append(_inspect(pid))
            self.settle(deadline)
        except BaseException as error:
            # Not only those in `_processes`: `_inspect` may have failed after it had set the guard.
            unknown = self._unguard_all()
            self.resume()
            if unknown:
                raise OSError(f"{error}; whether SIGTRAP is handled as before is not known: {unknown}") from error
            raise

    def settle(self, deadline: float) -> None:
        """Wait until all processes are back in the stop, which a tracer lets them reach a moment after their release.

        CRIU would take a process that is on its way there for one that runs.  To be called after each use of
        `Injection`.  Raises `OSError`.
        """
        for pid in self.pids:
            with _unless_ended(pid, self._vital):
                _return_to_stop(pid, deadline)

    def mapped_anew(self, pid: int) -> None:
        """Take a process's present mappings for those to be put back."""
        present = procfs.maps(pid)
        self._processes = [each._replace(mappings=present) if each.pid == pid else each for each in self._processes]

    def were_stopped(self) -> list[int]:
        """Return the processes that somebody else had stopped before."""
        return [pid for pid in self.pids if pid not in self._ran]

    def locks(self) -> dict[int, list[Lock]]:
        """Return the POSIX locks that the processes had when they were stopped, of those that had some."""
        return {process.pid: process.locks for process in self._processes if process.locks}

    def ended(self) -> list[int]:
        """Return the descendants of the kernel that have been killed since they were stopped."""
        return [pid for pid in self.pids if pid not in self._vital and not _lives(pid)]

    def _unguard_all(self) -> str:
        """Remove all guards.  Return why not, if not."""
        why: list[str] = []
        for pid in self.pids:
            try:
                _unguard(pid)
            except Exception as error:
                if _lives(pid):
                    why.append(f"process {pid}: {error}")
        return ", ".join(why)

    def finish(self, success: bool) -> None:
        """Leave the processes stopped after ``success``, else repair them and let them run; then raise `OSError`."""
        with ExitStack() as stack:
            if not success:
                stack.callback(self.resume)
            for process in self._processes:
                stack.callback(self._after, process, success)

    def _after(self, process: _SavedProcess, success: bool) -> None:
        try:
            if success:
                _unguard(process.pid)
                stop(process.pid, time.monotonic() + STOP_TIMEOUT)  # until it is back in the stop
            else:
                _repair(process, process.pid in self._ran)
        except Exception:
            if _lives(process.pid):
                raise

    def _put_locks_back(self) -> Iterator[str]:
        """Set the locks that processes lost when a descriptor was closed in their name.  Yield those that are lost."""
        for pid, locks in self.locks().items():
            try:
                yield from (f"lock on {why}" for why in file_locks.set_again(pid, locks))
            except OSError as error:
                if _lives(pid):
                    yield f"locks of process {pid}: {error}"

    def resume(self) -> None:
        """Let all processes run that ran before.  Raises `OSError` after that if something could not be undone."""
        failures = list(self._put_locks_back())
        for pid in reversed(self._ran):  # no parent sees that its children stopped
            try:
                resume(pid, _freeze_again(self._frozen.get(pid)))
            except procfs.GONE:  # it ended
                continue
            except Exception as error:
                failures.append(f"process {pid}: {type(error).__name__}: {error}")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        if failures:
            raise OSError(", ".join(failures))
