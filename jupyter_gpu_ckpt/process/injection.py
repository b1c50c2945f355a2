"""System calls made in the name of a stopped process: state that only it can read, settings that only it can make.

One of its threads makes the call (`ptrace.Tracee.call`).  Memory that a call reads or writes lies on the thread's own
stack meanwhile, whose content is put back.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import signal
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import syscalls
from jupyter_gpu_ckpt.process.ptrace import MACHINE, ProcessMemory, Tracee, system_call_gate
from jupyter_gpu_ckpt.process.syscalls import NUMBERS

PR_SET_DUMPABLE = 4
PR_MCE_KILL, PR_MCE_KILL_GET, PR_MCE_KILL_SET = 33, 34, 1
PR_SET_SPECULATION_CTRL = 53
PR_SET_MDWE, PR_GET_MDWE = 65, 66
PR_SET_MEMORY_MERGE, PR_GET_MEMORY_MERGE = 67, 68
ARCH_GET_CPUID, ARCH_SET_CPUID, ARCH_GET_XCOMP_PERM, ARCH_REQ_XCOMP_PERM = 0x1011, 0x1012, 0x1022, 0x1023
#: The state component of AMX's tiles, the only one that needs a permission.
_XTILEDATA = 18
KEYCTL_GET_KEYRING_ID, KEYCTL_READ = 0, 11
_THREAD_KEYRING, _PROCESS_KEYRING, _SESSION_KEYRING, _USER_KEYRING, _USER_SESSION_KEYRING = -1, -2, -3, -4, -5
_KCMP_VM = 1
_SIGINFO_BYTES = 128
_MCL_FUTURE = 2
_EPOLL_CTL_ADD, _EPOLL_CTL_MOD = 1, 3
#: Events that `Injection.collect` takes at a time.
_EVENTS = 64
#: ``struct epoll_event``: packed on x86 only.
_EPOLL_EVENT = struct.Struct("=IQ" if os.uname().machine == "x86_64" else "=I4xQ")
_LANDLOCK_CREATE_RULESET_VERSION = 1


class Injection(NamedTuple):
    """The first thread of a stopped process, traced until the end of `into`."""

    pid: int
    leader: Tracee
    memory: ProcessMemory
    #: Address of a system call instruction.
    gate: int

    @classmethod
    @contextlib.contextmanager
    def into(cls, pid: int, leader: Tracee | None = None) -> Iterator[Injection]:
        """Trace the first thread (``leader``, if traced already) of a process in a group stop.  Raises `OSError`."""
        with ProcessMemory(pid) as memory, contextlib.ExitStack() as stack:
            gate = system_call_gate(memory, procfs.maps(pid, named="[vdso]"))
            yield cls(pid, leader or stack.enter_context(Tracee(pid)), memory, gate)

    @contextlib.contextmanager
    def thread(self, tid: int) -> Iterator[Tracee]:
        """Trace the thread ``tid`` (0: the first, which is traced already)."""
        if tid in (0, self.pid):
            yield self.leader
        else:
            with Tracee(tid) as tracee:
                yield tracee

    def call(self, name: str, *arguments: int, tid: int = 0) -> int:
        """Make a system call in the process, by the thread ``tid`` (0: the first).  Negative results are errors."""
        number, words = NUMBERS[name], [argument & (1 << 64) - 1 for argument in arguments]
        words += [0] * (6 - len(words))
        with self.thread(tid) as tracee:
            return tracee.call(self.gate, number, *words)

    @contextlib.contextmanager
    def on_stack(self, data: bytes, tid: int = 0) -> Iterator[int]:
        """Write ``data`` to the thread's stack for as long as the body lasts.  Yields its address."""
        with self.thread(tid) as tracee:
            address = tracee.words()[MACHINE.sp] & ~15
        kept = self.memory.read(address, len(data))
        self.memory.write(address, data)
        try:
            yield address
        finally:
            self.memory.write(address, kept)

    def register(self, epoll: int, fd: int, events: int, data: int) -> int:
        """Let an epoll instance watch a descriptor.  The result is that of `call`."""
        with self.on_stack(_EPOLL_EVENT.pack(events, data)) as address:
            return self.call("epoll_ctl", epoll, _EPOLL_CTL_ADD, fd, address)

    def change(self, epoll: int, fd: int, events: int, data: int) -> int:
        """Let an epoll instance watch a descriptor, which it watches already, for other events.  As `call`."""
        with self.on_stack(_EPOLL_EVENT.pack(events, data)) as address:
            return self.call("epoll_ctl", epoll, _EPOLL_CTL_MOD, fd, address)

    def collect(self, epoll: int) -> int:
        """Take events of an epoll instance, which are dropped.  As `call`."""
        with self.on_stack(bytes(_EPOLL_EVENT.size * _EVENTS)) as address:
            return self.call("epoll_pwait", epoll, address, _EVENTS, 0, 0, 0)

    # -- state

    def settings(self) -> dict[str, int]:
        """Settings of the process that CRIU forgets, by name; those that are as in a new process are left out."""
        found = {
            "mdwe": max(self.call("prctl", PR_GET_MDWE), 0),
            "memory_merge": self.call("prctl", PR_GET_MEMORY_MERGE) > 0,
            "lock_future": self._locks_future(),
            "no_cpuid": "arch_prctl" in NUMBERS and self.call("arch_prctl", ARCH_GET_CPUID) == 0,
            "tiles": "arch_prctl" in NUMBERS and self._has_tiles(),
        }
        found = {name: int(value) for name, value in found.items() if value}
        if (policy := self.call("prctl", PR_MCE_KILL_GET)) in (0, 1):
            found["mce_kill"] = policy
        return found

    def _locks_future(self) -> bool:
        """Return whether new memory is locked (``mlockall(MCL_FUTURE)``), which only a new mapping shows."""
        before = self._locked()
        address = self.call("mmap", 0, mmap.PAGESIZE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
        if address < 0:
            return address == -errno.EAGAIN  # it would be, and is more than the limit allows
        locked = self._locked() > before
        self.call("munmap", address, mmap.PAGESIZE)
        return locked

    def _locked(self) -> int:
        return int(procfs.status(self.pid).get("VmLck", "0").split()[0])

    def _has_tiles(self) -> bool:
        """Return whether the process was permitted to use AMX."""
        with self.on_stack(bytes(8)) as address:
            if self.call("arch_prctl", ARCH_GET_XCOMP_PERM, address) != 0:
                return False
            (permitted,) = struct.unpack("=Q", self.memory.read(address, 8))
        return bool(permitted >> _XTILEDATA & 1)

    def unproven(self, user: int) -> Iterator[str]:
        """State that does not come back, as noun phrases.  ``user``: the process's user id."""
        if self.call("keyctl", KEYCTL_GET_KEYRING_ID, _THREAD_KEYRING) > 0:
            yield "a keyring of a thread"
        if self.call("keyctl", KEYCTL_GET_KEYRING_ID, _PROCESS_KEYRING) > 0:
            yield "a keyring of its own"
        # Errors are compared as well: of a Linux without keyrings, or of the keyring of a login that has ended.
        mine = _keyctl(KEYCTL_GET_KEYRING_ID, _SESSION_KEYRING)
        theirs = self.call("keyctl", KEYCTL_GET_KEYRING_ID, _SESSION_KEYRING)
        # A process that has joined none has its user's, and may have changed its user.
        changed = user != os.getuid()
        users = self.call("keyctl", KEYCTL_GET_KEYRING_ID, _USER_SESSION_KEYRING)
        if theirs != mine and not (changed and theirs == users):
            yield "a session keyring of its own"
        # A user's keyring belongs to a user namespace, and an ordinary user's capsule has one of its own.
        if os.geteuid() != 0 and _keyctl(KEYCTL_READ, _USER_KEYRING) > 0:
            yield "keys in the user's keyring"
        if "modify_ldt" in NUMBERS:
            with self.on_stack(bytes(8)) as address:
                if self.call("modify_ldt", 0, address, 8) > 0:
                    yield "segments of its own (modify_ldt)"

    def end_of(self, child: int) -> int | None:
        """Return the ``wait(2)`` status of an ended child that nobody has waited for; None without such a child."""
        with self.on_stack(bytes(_SIGINFO_BYTES)) as address:
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if self.call("waitid", os.P_PID, child, address, options) != 0:
                return None
            code, pid, status = struct.unpack("=8xi4xi4xi", self.memory.read(address, 28))
        if pid != child:
            return None
        return int(status << 8 if code == os.CLD_EXITED else status | (0x80 if code == os.CLD_DUMPED else 0))

    def confined(self, tids: Sequence[int], user: int, group: int) -> bool:
        """Return whether a thread, all of that user and group, is in a Landlock domain that the caller is not in.

        A thread in a domain may not inspect a process outside of it: kcmp(2) with such a process, of the same user
        and without capabilities, gives EPERM.  The thread with itself may; where it may not, a filter forbids the call.
        """
        try:
            if syscalls.call("landlock_create_ruleset", 0, 0, _LANDLOCK_CREATE_RULESET_VERSION) <= 0:
                return False
        except OSError:  # not built in, or not switched on; or forbidden to the caller, and so to all that it starts
            return False
        # The caller itself is such a process where it has no more rights than they: root's.
        if os.geteuid() == 0:
            tids = [tid for tid in tids if self._may_not_see(tid, os.getpid())]
        if not tids:
            return False
        with _bystander(user, group) as other:
            return any(self._may_not_see(tid, other) and not self._may_not_see(tid, self.pid) for tid in tids)

    def _may_not_see(self, tid: int, other: int) -> bool:
        with contextlib.suppress(ProcessLookupError):  # it ended
            return self.call("kcmp", tid, other, _KCMP_VM, tid=tid) == -errno.EPERM
        return False

    # -- settings

    def apply(self, settings: dict[str, int]) -> list[str]:
        """Make the settings that `settings` has returned.  Return the names of those that failed."""
        calls: dict[str, tuple[Any, ...]] = {
            "mce_kill": ("prctl", PR_MCE_KILL, PR_MCE_KILL_SET, settings.get("mce_kill", 0)),
            "lock_future": ("mlockall", _MCL_FUTURE),
            "memory_merge": ("prctl", PR_SET_MEMORY_MERGE, 1),
            "no_cpuid": ("arch_prctl", ARCH_SET_CPUID, 0),
            "tiles": ("arch_prctl", ARCH_REQ_XCOMP_PERM, _XTILEDATA),
            "mdwe": ("prctl", PR_SET_MDWE, settings.get("mdwe", 0)),
        }
        return [name for name, call in calls.items() if name in settings and self.call(*call) < 0]


@contextlib.contextmanager
def _bystander(user: int, group: int) -> Iterator[int]:
    """A process of that user, in no domain that the caller is not in, which all of the user's may inspect."""
    ready, report = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
    except OSError:
        os.close(ready)
        os.close(report)
        raise
    if pid == 0:
        try:
            if (user, group) != (os.getuid(), os.getgid()):
                os.setresgid(group, group, group)
                os.setresuid(user, user, user)
            syscalls.drop_capabilities()
            syscalls.prctl(PR_SET_DUMPABLE, 1)
            os.write(report, b"1")
            signal.pause()
        finally:
            os._exit(1)
    try:
        os.close(report)
        with open(ready, "rb") as file:
            if not file.read(1):
                raise OSError(errno.ECHILD, "a process to compare with could not be made")
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _keyctl(*arguments: int) -> int:
    """Return the result of this process's own call; negative results are errors."""
    try:
        return syscalls.call("keyctl", *arguments)
    except OSError as error:
        return -(error.errno or 0)
