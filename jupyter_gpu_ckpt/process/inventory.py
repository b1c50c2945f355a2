"""The state of a process tree, and which of it is proven to survive a dump and a restore.

`inspect` reads it from ``/proc``, by ``pidfd_getfd(2)``, ``kcmp(2)`` and, where the processes are stopped, by system
calls in their own name (`injection`).  It finds three things:

*refusals*: state of a kind that is not on the lists of this module.  The lists have what is proven: each kind went
through a dump and a restore by root and by an ordinary user (``tests/process/test_process_state.py``).  A kind that is
not on them is refused by its name while the kernel still lives.

*notes*: state that CRIU forgets and that `reapply` puts back before the restored processes run.

*inventory*: threads, descriptors and mappings, all of which CRIU's image must have (`tasks.missing`); and limits.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import itertools
import os
import re
import select
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import (
    descriptors,
    file_facts,
    inherited_filters,
    shared_memory,
    sockets,
    syscalls,
    terminals,
    watched_files,
)
from jupyter_gpu_ckpt.process.injection import Injection
from jupyter_gpu_ckpt.process.reapply import EPOLL_ANY, EPOLL_PRIVATE, readable_policy, timer_time
from jupyter_gpu_ckpt.procfs import Mount
from jupyter_gpu_ckpt.units import size

Notes = dict[str, Any]

# -- what is proven

#: Character devices without a state, by number: null, zero, full, random, urandom.
_STATELESS_DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9)}
#: tty, ptmx and pts: `terminals` checks them, and `cuda.device_files` the device files of GPUs.
_TERMINALS = {(5, 0), (5, 2), *((major, minor) for major in range(136, 144) for minor in range(256))}
#: Refused files, by the name of their file system in ``/proc/PID/mountinfo``.
_FILE_SYSTEMS = {"mqueue": "a POSIX message queue", "hugetlbfs": "a file in huge pages (hugetlbfs)"}
#: ``statfs(2)`` of a memfd in huge pages, which is on no mount that ``mountinfo`` shows.
_HUGETLBFS_MAGIC = 0x958458F6
#: Kernel objects without a file, by the name that ``/proc/PID/fd`` shows.
_ANONYMOUS = frozenset({"[eventfd]", "[eventpoll]", "[signalfd]", "[timerfd]", "[pidfd]", "inotify"})
_ANONYMOUS_NAMES = {
    "[io_uring]": "an io_uring instance",
    "[userfaultfd]": "a userfaultfd",
    "[perf_event]": "a performance counter (perf_event_open)",
    "[fanotify]": "a fanotify group",
    "[landlock-ruleset]": "a Landlock ruleset",
    "[fscontext]": "a file system that is being mounted (fsopen)",
    "seccomp notify": "a seccomp listener",
    "bpf-map": "a BPF map",
    "bpf-prog": "a BPF program",
    "bpf_link": "a BPF link",
}
#: How to avoid some of them.
_ANONYMOUS_HINTS = {
    "[io_uring]": "End what uses it, or start it without: programs with libuv (Node.js, uvloop) with the environment "
    "variable UV_USE_IO_URING=0, the store of torch.distributed with USE_LIBUV=0. uvloop 0.23 (libuv 1.52) is "
    "never without: use asyncio's own loop (uvicorn: loop='asyncio').",
}
#: ``VmFlags`` of ``/proc/PID/smaps`` (``fs/proc/task_mmu.c``) that a restore brings back, or that do not matter.
#: ``dw``: before Linux 5.15, of a program's own file.  ``bt``: on aarch64, of every library that is built for it.
_FLAGS = "rd wr ex sh mr mw me ms gd lo sr rr dc ac nr dd sd mg hg nh wf dp gu lf sl dw bt"
_MAPPING_FLAGS = frozenset(_FLAGS.split())
#: The same of files on persistent memory (DAX), and only of files.
_DAX_FLAGS = {"mm", "sf"}
#: Rings of io_setup(2), which have a flag (``de``) that memory of devices has too.
_ASYNCHRONOUS_IO = "/[aio]"
_MAPPING_NAMES = {
    "ht": "memory in huge pages (MAP_HUGETLB)",
    "ss": "a shadow stack",
    **dict.fromkeys(("um", "uw", "ui"), "memory that a userfaultfd watches"),
    **dict.fromkeys(("io", "pf", "mm"), "memory of a device"),
}
#: Paths below /dev whose memory is no device's, or is checked by `cuda.device_files`.
_MAPPED_DEVICES = ("/dev/zero", "/dev/shm/", "/dev/nvidia")  # noqa: S108 - read, not written
#: How to avoid what no process of a kernel may have; its child processes are saved with it.
_OUTSIDE = "End the process that needs it, or start that outside of the kernel (in a terminal)."
#: Mappings that Linux makes for every process.
_OF_LINUX = ("[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]")
#: A mapping in ``/proc/PID/smaps``: beginning, end, name, and the lines about it; and one of these.
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .{4} \S+ \S+ \d+ *(.*)\n((?:[A-Z]\w+:.*\n)*)", re.M)
_PROTECTION_KEY = re.compile(r"^ProtectionKey: +([1-9]\d*)", re.M)
_NAMESPACES = {
    "cgroup": "cgroup",
    "ipc": "IPC",
    "mnt": "mount",
    "net": "network",
    "pid": "PID",
    "pid_for_children": "PID",
    "user": "user",
    "uts": "UTS",
}
#: Defences against speculation in ``/proc/PID/status``, and how ``prctl(2)`` switches them on (number, value).
_SPECULATION = {
    "Speculation_Store_Bypass": (0, {"thread mitigated": 4, "thread force mitigated": 8}),
    "SpeculationIndirectBranch": (1, {"conditional disabled": 4, "conditional force disabled": 8}),
}

#: File systems of the network, below which Linux mounts others of the same kind when a process enters them.
_MOUNTED_BY_LINUX = {"nfs", "nfs4", "cifs", "smb3", "afs", "ceph"}

#: Descriptors that CRIU's code has open at once in a process (``compel/src/lib/infect.c``, ``criu/mem.c``).
_CRIU_DESCRIPTORS = 3
_OPEN_FILES = re.compile(r"^Max open files +(\d+) ", re.M)
#: SIGTRAP (of a tracer), SIGCHLD and SIGSTOP (of a dump).
_HARMLESS_SIGNALS = 1 << 4 | 1 << 16 | 1 << 18
_O_DIRECT = 0o40000
#: Of a pidfd, ``O_EXCL`` in its flags.
_PIDFD_THREAD = os.O_EXCL
_DELETED = " (deleted)"
#: Bytes of a deleted file's name with which it may come back; and with which it does, whatever number CRIU gives it.
_LONGEST_NAME, _SAFE_NAME = 244, 235
#: The largest exit status that CRIU restores; in wait(2)'s status, WCOREFLAG, and a signal that CRIU does not raise.
_LARGEST_STATUS, _DUMPED, _LAST_SIGNAL = 0x7F, 0x80, 64
_CAP_SYS_ADMIN = 1 << 21
#: ``struct robust_list_head``: the first entry, the futex's offset in one, and one that is about to be locked.
_ROBUST_LIST = struct.Struct("=QqQ")
#: ROBUST_LIST_LIMIT of include/uapi/linux/futex.h.
_LONGEST_ROBUST_LIST = 2048
_DEFAULT_SLACK = 50_000
#: Of registrations that an event changes.
_EPOLL_TAKEN = (1 << 31) | select.EPOLLONESHOT  # EPOLLET
_SCHED_SLICED = (0, 3)  # SCHED_OTHER and SCHED_BATCH


class Found:
    """The result of `inspect`: see the head of this module.  All of it is plain JSON."""

    def __init__(self) -> None:
        self.refusals: list[dict[str, str]] = []
        self.notes: dict[str, Notes] = {}
        self.inventory: dict[str, dict[str, Any]] = {}
        #: Names of system calls that the host forbids to all: the state that they read is not checked.
        self.unasked: list[str] = []

    def refuse(self, what: str, kind: str = "state", hint: str = "") -> None:
        """Note a refusal: a noun phrase, its kind, and how to avoid it.

        ``kind``: ``file``, ``socket``, ``state``, or ``moment`` for state that passes by itself.
        """
        refusal = {"what": what, "kind": kind, "hint": hint}
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    def add(self, processes: dict[int, Found], kernel: int) -> None:
        """Add what was found of each process, by its pid; a refusal names its process if that is not the ``kernel``."""
        owners: dict[tuple[str, str, str], list[int]] = {}
        for pid, of_process in processes.items():
            for refusal in of_process.refusals:
                owners.setdefault((refusal["what"], refusal["kind"], refusal["hint"]), []).append(pid)
            self.notes |= of_process.notes
            self.inventory |= of_process.inventory
        for (what, kind, hint), pids in owners.items():
            first = pids[0]
            if kernel in pids or re.search(rf"\bprocess {first}\b", what):
                self.refuse(what, kind, hint)
            else:
                others = " and others" if pids[1:] else ""
                self.refuse(f"{what}, of {procfs.described(first)}{others}", kind, hint)


def own_mounts(now: list[Mount], before: list[Mount], outside: list[Mount]) -> list[Mount]:
    """The mounts of a capsule that processes in it have made.

    ``before``: mounts older than the kernel; ``outside``: mounts of the host.  Those below a file system of the network
    are made by Linux itself, and after a restore again.
    """
    known = {mount.number for mount in before}
    kinds = {mount.number: mount.filesystem for mount in now}
    of_host = {(mount.device, mount.root, mount.point) for mount in outside}
    return [
        mount
        for mount in now
        if not (mount.arrived or mount.number in known or (mount.device, mount.root, mount.point) in of_host)
        and not (mount.filesystem in _MOUNTED_BY_LINUX and kinds.get(mount.parent) == mount.filesystem)
    ]


def inspect(
    root: int, stopped: bool, allow_unconfined: bool = False, own: Sequence[Mount] = (), *, kernel: int = 0
) -> Found:
    """Inspect process ``root``, a child of the caller, which has the capabilities over it, and its descendants.

    ``kernel``: the one of them that is the kernel, if that is not the root.
    ``stopped``: all threads are in a group stop; also inspect what only a stopped process shows.  ``allow_unconfined``:
    the administrator lets a kernel that is confined by Landlock come back without that.  ``own``: mounts made in the
    capsule since the kernel began (`own_mounts`).  A process or thread that ends meanwhile is left out.  Raises
    `OSError` where ``/proc`` cannot be read.
    """
    found = Found()
    for mount in own:
        found.refuse(f"a file system that it has mounted itself ({mount.point})", "file", "Unmount it (umount).")
    tree = _Tree(root, kernel or root, list(_tree(root)))
    mine = _OwnState()
    found.unasked = sorted(mine.forbidden)
    inspected: dict[int, Found] = {}
    for pid in tree.pids:
        if _outlives_leader(pid):
            what = f"a process whose main thread has ended while others run (pthread_exit), {procfs.described(pid)}"
            found.refuse(what, hint="End that process, or wait for its end.")
            continue
        own_state = inspected[pid] = Found()
        try:
            _Process(pid, tree, own_state, mine).inspect(stopped, allow_unconfined)
        except procfs.GONE:  # it ended
            pass
        except PermissionError as error:
            _refuse_hidden(pid, own_state, error, is_child=pid not in (root, tree.kernel))
    # Of one that ends some may have been read when nothing was left, or when Linux showed something else instead.
    found.add({pid: state for pid, state in inspected.items() if not procfs.is_ending(pid)}, tree.kernel)
    for holders in tree.semaphores.values():
        if len(holders) > 1:  # each process would get one of its own
            names = " and ".join(map(procfs.described, sorted(holders - {tree.kernel})))
            what = f"an eventfd that is a semaphore and that processes share, {names}"
            found.refuse(what, hint="End the process that shares it.")
    if "kcmp" not in mine.forbidden:
        for what, number in (("memory (CLONE_VM)", syscalls.KCMP_VM), ("directories (CLONE_FS)", syscalls.KCMP_FS)):
            for first, second in _sharing(tree.pids, number):
                shown = f"processes that share their {what}, {procfs.described(first)} and {procfs.described(second)}"
                found.refuse(shown, hint="End one of them.")
    return found


def _sharing(pids: Sequence[int], number: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of processes that have the same object of the kind that ``number`` names for ``kcmp(2)``.

    A parent that waits for its child to start a program (vfork) is not among them: that passes, or it does not stop.
    """

    def order(first: int, second: int) -> int:
        try:
            return (0, -1, 1)[syscalls.call("kcmp", first, second, number, 0, 0)]
        except OSError:  # one of them has ended
            return first - second

    def runs(pid: int) -> bool:
        with contextlib.suppress(*procfs.GONE):
            return procfs.stat(pid).state != "D" and not procfs.is_ending(pid)
        return False

    ordered = sorted(filter(runs, pids), key=functools.cmp_to_key(order))
    for first, second in itertools.pairwise(ordered):
        # Of an ending process Linux compares nothing, which is equal.
        if order(first, second) == 0 and runs(first) and runs(second):
            yield min(first, second), max(first, second)


def _refuse_hidden(pid: int, found: Found, error: PermissionError, *, is_child: bool) -> None:
    """Refuse a process that the caller may not inspect, or not by the call that raised ``error``."""
    if procfs.is_ending(pid):
        return
    named = procfs.described(pid)
    what = f"a process about which Linux does not answer its server, {named} ({error.filename or error.strerror})"
    hint = "A seccomp filter or a security module of the host forbids it; its administrator can allow it."
    try:
        procfs.descriptors(pid)
    except PermissionError:
        what = f"a process that nobody may look into, {named} (PR_SET_DUMPABLE is 0)"
        hint = "prctl(PR_SET_DUMPABLE, 1) in the kernel makes it dumpable again."
        if is_child:
            hint = "It hides its secrets, as ssh-agent does. End it, or start it outside of the kernel."
    except procfs.GONE:  # it ended
        return
    found.refuse(what, hint=hint)


def _outlives_leader(pid: int) -> bool:
    """Return whether the first thread of a process has ended, and another one runs."""
    try:
        return procfs.stat(pid).state == "Z" and any(not _has_ended(pid, tid) for tid in procfs.threads(pid))
    except procfs.GONE:
        return False


def _has_ended(pid: int, tid: int) -> bool:
    try:
        return procfs.stat(pid, tid).is_ending
    except procfs.GONE:
        return True


def _tree(root: int) -> Iterator[int]:
    fresh = [root]
    while fresh:
        pid = fresh.pop()
        yield pid
        with contextlib.suppress(*procfs.GONE):
            if not procfs.stat(pid).has_ended:
                fresh += procfs.children(pid)


def _optional(path: str | Callable[[], str]) -> str:
    """Read a file, or call what does; empty on a Linux that is built without it.  The end of its process is raised."""
    try:
        return path() if callable(path) else procfs.read(path)
    except ProcessLookupError:
        raise
    except OSError:
        return ""


class _ThreadedRead:
    """A file that is read meanwhile by a thread: Linux takes long for some of a process with much memory."""

    def __init__(self, path: str) -> None:
        self._content: list[str] = []
        self._error: list[OSError] = []

        def read() -> None:
            try:
                self._content.append(procfs.read(path))
            except OSError as error:
                self._error.append(error)

        self._thread = threading.Thread(target=read, daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # there are no more threads
            read()

    def result(self) -> str:
        """Return the content.  Raises `OSError`."""
        if self._thread.ident is not None:
            self._thread.join()
        for error in self._error:
            raise error
        return self._content[0]


class _OwnState:
    """State of the caller, PID 1 of the capsule: restored processes inherit from it what CRIU does not restore."""

    def __init__(self) -> None:
        self.affinity = os.sched_getaffinity(0)
        self.slice = _slice(0)
        self.cgroup = procfs.read("/proc/self/cgroup")
        self.label = _optional("/proc/self/attr/current")
        self.namespaces = _namespaces(f"/proc/{os.getpid()}")
        self.coredump_filter = _optional("/proc/self/coredump_filter")
        self.forbidden = syscalls.forbidden()
        #: Pids that were the last to change some System V semaphore.
        self.semaphore_users = set(syscalls.semaphore_users())
        self.status = procfs.status()
        self.open_files = descriptors.limit_of_criu()


def _slice(tid: int) -> bytes:
    with contextlib.suppress(OSError):
        return syscalls.scheduling(tid)
    return b""


def _robust_list(pid: int, tid: int) -> Iterator[int]:
    """Yield the addresses of the robust futexes that a thread has locked.  Raises `OSError`, `OverflowError`."""
    head, length = ctypes.c_uint64(), ctypes.c_uint64()
    syscalls.call("get_robust_list", tid, ctypes.addressof(head), ctypes.addressof(length))
    if length.value != _ROBUST_LIST.size:  # that of a program of 32 bits, or none
        return
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        following, offset, _ = _ROBUST_LIST.unpack(os.pread(memory.fileno(), _ROBUST_LIST.size, head.value))
        for _ in range(_LONGEST_ROBUST_LIST):
            if (entry := following & ~1) == head.value:  # the lowest bit: its priority is inherited
                return
            yield entry + offset
            following = int.from_bytes(os.pread(memory.fileno(), 8, entry), "little")


def _namespaces(root: str) -> dict[str, str]:
    found = {}
    for name in _NAMESPACES:
        with contextlib.suppress(FileNotFoundError):
            found[name] = os.readlink(f"{root}/ns/{name}")
    return found


class _Tree:
    """The kernel's tree of processes, from its root process or itself on, and what several of them may have open."""

    def __init__(self, root: int, kernel: int, pids: list[int]) -> None:
        self.root = root
        self.kernel = kernel
        self.pids = pids
        #: Eventfds that are semaphores, by their id: the processes that have them open.
        self.semaphores: dict[str, set[int]] = {}
        #: Directories whose file server has not answered: it is asked once.
        self.silent: set[str] = set()
        #: By process, ranges of addresses that are larger than this host's memory and count as used (`mappings`).
        self.large: dict[int, set[tuple[int, int]]] = {}
        facts = procfs.fields(procfs.read("/proc/meminfo"))
        self.memory = sum(int(facts[name].split()[0]) * 1024 for name in ("MemTotal", "SwapTotal"))


class _Process:
    """The inspection of one process."""

    def __init__(self, pid: int, tree: _Tree, found: Found, mine: _OwnState) -> None:
        self.pid = pid
        self.tree = tree
        self.found = found
        self.mine = mine
        self.root = f"/proc/{pid}"
        self.notes: Notes = {}
        self.inventory: dict[str, Any] = {}
        self.eventfds: dict[str, list[int]] = {}
        self.epolls: dict[int, list[dict[str, int]]] = {}

    def inspect(self, stopped: bool, allow_unconfined: bool) -> None:
        """Add this process's state to `Found`."""
        if procfs.stat(self.pid).has_ended:
            return
        if (directory := os.readlink(f"{self.root}/root")) != "/":
            self.refuse_file(f"a root directory of its own ({directory})", _OUTSIDE)
        if stopped:
            self.smaps, self.numa_maps = _ThreadedRead(f"{self.root}/smaps"), _ThreadedRead(f"{self.root}/numa_maps")
        self.threads()
        self.descriptors()
        self.process()
        self.mapping_names()
        if stopped:
            self.mappings()
            self.injected(allow_unconfined)
        else:  # what is sent to a process that a dump has stopped arrives after the wake
            self.waiting_signals()
        if self.notes:
            self.found.notes[str(self.pid)] = self.notes
        self.found.inventory[str(self.pid)] = self.inventory

    # -- threads

    def threads(self) -> None:
        tids = procfs.threads(self.pid)
        self.inventory["threads"] = tids
        self.suspects: list[int] = []
        first = procfs.status(self.pid)  # not the first in the list, once threads are made after a wake
        self.user = first.get("Uid"), first.get("Gid")
        if any(len(set((ids or "").split())) > 1 for ids in self.user):
            what = "real, effective and saved user or group ids that are not the same (setresuid)"
            self.found.refuse(what, hint=f"Make them the same. {_OUTSIDE}")
        for tid in tids:
            with contextlib.suppress(*procfs.GONE):
                if notes := self.thread(tid):
                    self.notes.setdefault("threads", {})[str(tid)] = notes

    def thread(self, tid: int) -> Notes:
        root = f"{self.root}/task/{tid}"
        status = procfs.status(self.pid, tid)
        self.confinement(tid, root, status)
        notes: Notes = {}
        if (affinity := os.sched_getaffinity(tid)) != self.mine.affinity:
            notes["affinity"] = sorted(affinity)
        if (slack := _optional(f"/proc/{tid}/timerslack_ns").strip()) and int(slack) not in (0, _DEFAULT_SLACK):
            notes["timer_slack_ns"] = int(slack)
        if personality := int(_optional(f"{root}/personality") or "0", 16):
            notes["personality"] = personality
        for name, (number, values) in _SPECULATION.items():
            if status.get(name) in values:
                notes.setdefault("speculation", []).append([number, values[status[name]]])
        with contextlib.suppress(FileNotFoundError), open(f"{root}/numa_maps", "rb", buffering=0) as file:
            # Linux writes a line at a time, and no more than is read: the first mapping is of the program.
            policy = file.read(64).decode(errors="replace").split()
            if len(policy) > 1 and policy[1] != "default":
                notes["numa"] = self.numa_policy(policy[1])
        if "ioprio_get" not in self.mine.forbidden and (
            priority := syscalls.call("ioprio_get", syscalls.IOPRIO_WHO_PROCESS, tid)
        ):
            notes["io_priority"] = priority
        self.sharing(tid)
        self.robust_locks(tid)
        attributes = _slice(tid)
        if attributes and int.from_bytes(attributes[4:8], "little") in _SCHED_SLICED:
            if attributes[24:32] != self.mine.slice[24:32]:
                notes["slice_ns"] = int.from_bytes(attributes[24:32], "little")
        elif attributes and attributes[4] == 6:
            self.found.refuse("a thread with a deadline (SCHED_DEADLINE)", hint="Give it another policy.")
        return notes

    def robust_locks(self, tid: int) -> None:
        """Refuse locks in mapped files that a thread has and Linux gives up at its end (``set_robust_list(2)``).

        It writes that to the file, which a wake would then find changed: LMDB's transactions that write.
        """
        with contextlib.suppress(OSError, OverflowError):  # a thread that runs changes the list meanwhile
            addresses = [address for address in _robust_list(self.pid, tid) if address]
            for mapping in procfs.maps(self.pid) if addresses else ():
                in_file = mapping.permissions.endswith("s") and mapping.name.startswith("/")
                if in_file and not mapping.name.endswith(_DELETED) and any(map(mapping.contains, addresses)):
                    what = f"a lock in the mapped file {mapping.name} that Linux gives up at the end of its thread"
                    hint = "Release it: commit or abort the transaction (LMDB), and try again."
                    self.found.refuse(f"{what} (robust mutex)", hint=hint)

    def confinement(self, tid: int, root: str, status: dict[str, str]) -> None:
        """Confinement of a thread: all of it must come back, or the thread would regain rights that it gave up."""
        if tid != self.pid and (status.get("Uid"), status.get("Gid")) != self.user:
            self.found.refuse("a thread of another user", hint="End that thread.")
        is_filtered = status.get("Seccomp", "0") != "0" and not inherited_filters.all_inherited(
            status, self.mine.status
        )
        if is_filtered and (os.geteuid() != 0 or self.mine.status.get("Seccomp", "0") != "0"):
            why = "Only root's CRIU can save it, outside of a container."
            self.found.refuse("a seccomp filter", hint=f"{why} {_OUTSIDE}")
        namespaces = _namespaces(root)
        for name, other in self.mine.namespaces.items():
            if namespaces and namespaces.get(name) != other:  # it has none at all once it has ended
                self.found.refuse(f"a {_NAMESPACES[name]} namespace of its own", hint=_OUTSIDE)
        with contextlib.suppress(FileNotFoundError):  # CRIU makes a time namespace for what it restores
            if os.readlink(f"{root}/ns/time") != os.readlink(f"{root}/ns/time_for_children"):
                self.found.refuse("a time namespace for its children", hint=_OUTSIDE)
        restricted = status.get("NoNewPrivs", "0") != "0"
        powerful = int(status.get("CapPrm", "0"), 16) & _CAP_SYS_ADMIN
        if restricted or powerful or os.geteuid() == 0:
            self.suspects.append(tid)

    def sharing(self, tid: int) -> None:
        """Refuse threads with descriptors or directories of their own (``unshare(2)``): CRIU does not save those."""
        if tid != self.pid and "kcmp" not in self.mine.forbidden:
            for what, number in (("descriptors", syscalls.KCMP_FILES), ("directories", syscalls.KCMP_FS)):
                if syscalls.call("kcmp", self.pid, tid, number, 0, 0):
                    self.found.refuse(f"a thread with {what} of its own (unshare)", hint="End that thread.")

    def numa_policy(self, text: str) -> str:
        """Return a NUMA policy as Linux writes it; refuse one that cannot be reapplied."""
        if not readable_policy(text):
            self.found.refuse(f"a NUMA policy of an unknown kind ({text})")
        return text

    # -- the process

    def process(self) -> None:
        self.limit()
        tracer = int(procfs.status(self.pid).get("TracerPid", "0"))
        if tracer not in (0, os.getpid()):
            what = f"a process that another one traces (by its debugger, process {tracer})"
            self.found.refuse(what, hint="End the debugger.")
        if procfs.read(f"{self.root}/cgroup") != self.mine.cgroup:
            self.found.refuse("a control group of its own", hint="Move it back to where its server is.")
        if (label := _optional(f"{self.root}/attr/current")) != self.mine.label:
            self.found.refuse(f"a security label of its own ({label.strip()})", hint="Run it with its server's label.")
        if (program := os.readlink(f"{self.root}/exe")).startswith("/memfd:") and program.endswith(_DELETED):
            name = program.removeprefix("/memfd:").removesuffix(_DELETED)
            hint = "End it, or start the program from a file."
            self.refuse_file(f"a program that runs from memory (memfd: {name}, process {self.pid})", hint)
        self.relations()
        self.foreground()
        self.ended_children()
        if self.pid in self.mine.semaphore_users:
            # Nothing shows whether it was with SEM_UNDO.
            why = "A checkpoint ends the process, and Linux then undoes what it has done to them (SEM_UNDO)."
            hint = f"Remove them if nobody needs them any more (semctl with IPC_RMID; `ipcs -s`, `ipcrm -s ID`). {why}"
            self.found.refuse("System V semaphores that it has changed (semop)", hint=hint)
        if (filter_ := _optional(f"{self.root}/coredump_filter")) != self.mine.coredump_filter and filter_:
            self.notes["coredump_filter"] = int(filter_, 16)
        self.inventory["limits"] = procfs.limits(self.pid)
        words = _optional(f"{self.root}/autogroup").split()
        if words and words[-1] != "0":
            self.notes["autogroup_nice"] = int(words[-1])

    def limit(self) -> None:
        """Refuse a process that may not open the few descriptors that CRIU's code in it needs, or has none left for it.

        See `descriptors` for the latter, which is of the restore.
        """
        highest, most = max(self.inventory["descriptors"], default=0), self.mine.open_files
        if descriptors.highest_number(most) < descriptors.STANDARD:
            what = f"a limit of {most} open files (RLIMIT_NOFILE) for the server, which no restore can do with"
            self.found.refuse(what, hint="Have the server started with a higher hard limit (ulimit -Hn).")
        elif highest > descriptors.highest_number(most):
            where = f"where a process may open {most} files (RLIMIT_NOFILE)"
            what = f"a descriptor with the number {highest}, which is too high {where}"
            last = f"Numbers up to {descriptors.highest_number(most)} come back: close it, or give it a lower number"
            self.found.refuse(what, hint=f"{last} (os.dup); or have the server started with a higher hard limit.")
        if (found := _OPEN_FILES.search(procfs.read(f"{self.root}/limits"))) is None:  # it is unlimited
            return
        limit = int(found[1])
        used = sum(number < limit for number in self.inventory["descriptors"])
        if limit - used < _CRIU_DESCRIPTORS:
            named = procfs.described(self.pid)
            what = f"a limit of {limit} open files (RLIMIT_NOFILE), {used} of them in use, in {named}"
            enough = used + _CRIU_DESCRIPTORS
            hint = f"A checkpoint opens {_CRIU_DESCRIPTORS} more in it: start it with a limit of {enough} or more."
            self.found.refuse(what, hint=hint)

    def waiting_signals(self) -> None:
        """Refuse a process that somebody has stopped and that a signal waits for: CRIU lets it run for a moment."""
        if procfs.stat(self.pid).state != "T":
            return
        for tid in procfs.threads(self.pid):
            status = procfs.status(self.pid, tid)
            pending, held = (
                int(status[one], 16) | int(status[two], 16) for one, two in (("SigPnd", "ShdPnd"), ("SigBlk", "SigIgn"))
            )
            if waiting := pending & ~held & ~_HARMLESS_SIGNALS:
                what = f"a stopped process (process {self.pid}) that signal {waiting.bit_length()} waits for"
                self.found.refuse(what, hint="Let it continue (SIGCONT), or end it, and try again.")

    def relations(self) -> None:
        """Refuse a session that CRIU makes again for no process here, which it says at the restore only.

        It makes a session for its leader, whose children inherit it, and one of any other process for a child of the
        root (`subreaper`).  A process group whose leader has ended it makes with a process of its own in its place; in
        the foreground of a terminal it did not always come back as that.
        """
        stat, group = procfs.stat(self.pid), os.getpgid(self.pid)
        if self.pid in (self.tree.root, self.tree.kernel) or stat.parent not in self.tree.pids:
            return
        if self.user != tuple(procfs.status(self.tree.kernel).get(name) for name in ("Uid", "Gid")):
            what = f"a process of another user, {procfs.described(self.pid)}"
            self.found.refuse(what, hint="End that process.")
        adopted = stat.parent == self.tree.root != self.tree.kernel
        if not adopted and os.getsid(self.pid) not in (self.pid, os.getsid(stat.parent)):
            self.found.refuse("a process in a session that is not its parent's", hint="End that process.")
        if group == stat.foreground and group not in self.tree.pids:
            what = "a process in the foreground of a terminal, in a group whose leader has ended"
            self.found.refuse(what, hint="Wait until the command has ended, or end it.")

    def foreground(self) -> None:
        """Refuse a terminal whose foreground command has ended since preflight (`terminals.obstacle`)."""
        if terminals.foreground_has_ended(self.pid):
            what = f"a terminal in whose foreground a command has just ended ({procfs.described(self.pid)})"
            self.found.refuse(what, "moment", "Try again: the shell is about to notice it.")

    # -- descriptors

    def descriptors(self) -> None:
        numbers = procfs.descriptors(self.pid)
        self.inventory["descriptors"] = numbers
        self.candidates: list[tuple[str, bytes]] | None = None
        self.mounts: dict[str, str] | None = None
        self.sockets: dict[int, Notes] = {}
        seen: set[str] = set()
        with syscalls.pidfd_of(self.pid) as self.pidfd:
            for number in numbers:
                try:
                    try:
                        self.descriptor(number, seen)
                    except OSError as error:
                        if error.errno not in (errno.EBADF, errno.ENOTSOCK):
                            raise
                        # Closed by the running process in the middle of this, or its number reused: inspect it anew.
                        self.descriptor(number, seen)
                except FileNotFoundError:  # closed since
                    pass
                except (PermissionError, ProcessLookupError, BlockingIOError):  # of the whole process, or the caller
                    raise
                except OSError as error:
                    target = "a name that is too long"
                    with contextlib.suppress(OSError):
                        target = os.readlink(f"{self.root}/fd/{number}")
                    shown = f"{target}, descriptor {number}: {os.strerror(error.errno or 0)}"
                    self.refuse_file(f"a file that cannot be reached ({shown})", "Close it and try again.")
        if self.sockets:
            self.notes["sockets"] = {str(number): notes for number, notes in self.sockets.items()}
        for numbers in self.eventfds.values():  # semaphores: their descriptors, and the epoll registrations of them
            epolls = [
                {"epoll": epoll, **entry}
                for epoll, entries in self.epolls.items()
                for entry in entries
                if entry["fd"] in numbers
            ]
            self.notes.setdefault("semaphores", []).append({"descriptors": numbers, "epolls": epolls})

    def descriptor(self, number: int, seen: set[str]) -> None:
        """Inspect one descriptor: refuse an unproven kind, and note what CRIU forgets of it.

        Nothing here may wait for the server of a file, which may never answer (`file_facts`).
        """
        path = f"{self.root}/fd/{number}"
        target = os.readlink(path)
        if target.startswith("socket:["):  # what has a name in a file system begins with a slash
            if target not in seen and "pidfd_getfd" not in self.mine.forbidden:
                # All descriptors of a socket share its options.
                self.socket(number)
            seen.add(target)
            return
        if target.startswith("anon_inode:"):
            self.anonymous(number, target.removeprefix("anon_inode:"))
            return
        facts = file_facts.of(path)
        kind = facts.mode
        if not stat.S_ISDIR(kind):
            self.deleted_name(target, facts.inode, f"open (descriptor {number})")
            self.remaining_name(path, target, facts.inode, number)
        if stat.S_ISFIFO(kind):
            if int(procfs.fdinfo(self.pid, number)["flags"], 8) & _O_DIRECT:
                self.refuse_file(f"a pipe in packet mode (O_DIRECT, descriptor {number})")
        elif stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
            known = facts.device in _STATELESS_DEVICES | _TERMINALS or target.startswith("/dev/nvidia")
            if stat.S_ISBLK(kind) or not known:
                self.refuse_file(f"the device {target} (descriptor {number})")
        elif target.startswith("/secretmem"):
            self.refuse_file(f"secret memory (memfd_secret, descriptor {number})")
        elif stat.S_ISREG(kind):
            if what := self.file_system(target, number):
                self.refuse_file(f"{what} ({target}, descriptor {number})")
        elif stat.S_ISDIR(kind):
            self.directory(number, target)
        elif not stat.S_ISLNK(kind):
            self.refuse_file(f"a file of an unknown kind, {target} (descriptor {number})")

    def deleted_name(self, name: str, inode: int, used: str) -> None:
        """Refuse a file that was deleted and has too long a name: CRIU gives it one that is longer, when it restores.

        It then lacks the space for `` (deleted)`` (if the file has another name) or for ``.cr.1.ghost``.  How long the
        latter is shows in its image (`images.with_too_long_names`).
        """
        if len(os.fsencode(name).rpartition(b"/")[2]) <= _LONGEST_NAME + len(_DELETED) or name.startswith("/memfd:"):
            return
        if path := self.path_of_deleted(name, inode):
            bytes = len(os.fsencode(os.path.basename(path)))
            what = f"a deleted file {used} whose name has {bytes} bytes ({path})"
            hint = f"Close it; or give the file a name of at most {_SAFE_NAME} bytes before it is deleted (os.rename)."
            self.refuse_file(what, hint)

    def path_of_deleted(self, name: str, inode: int) -> str:
        """Return as `procfs.path_of_deleted`; raises `TimeoutError`: the file's server does not answer."""
        if (directory := os.path.dirname(name)) in self.tree.silent:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), name)
        try:
            return procfs.path_of_deleted(name, inode, file_facts.is_there)
        except TimeoutError:
            self.tree.silent.add(directory)
            raise

    def remaining_name(self, path: str, target: str, inode: int, number: int) -> None:
        """Refuse a file that has a name although this one was deleted, in a directory where its user may make none.

        CRIU makes one there, in the user's own directories in any case, and the server could not remove it.
        """
        if os.geteuid() == 0 or not target.endswith(_DELETED) or not file_facts.names(path):
            return
        if deleted := self.path_of_deleted(target, inode):
            directory = os.path.dirname(deleted)
            if file_facts.forbids_names(directory):
                what = f"a file that was deleted under the name {deleted}, and has another one (descriptor {number})"
                hint = f"Allow its user to write to {directory} (chmod u+wx), or close the file, and try again."
                self.refuse_file(f"{what}, in a directory that its user may not write to", hint)

    def file_system(self, target: str, number: int) -> str:
        """Why a regular file's file system keeps it from coming back, as a noun phrase; empty if it does not.

        Of the mounts that no process sees only memfd's are Linux's own for certain: others may be a server's.
        """
        if not target.startswith("/"):  # a namespace
            return ""
        if self.mounts is None:
            self.mounts = {mount.number: mount.filesystem for mount in procfs.mounts(self.pid)}
        mount = procfs.fdinfo(self.pid, number)["mnt_id"]
        if mount in self.mounts:
            return _FILE_SYSTEMS.get(self.mounts[mount], "")
        if target.startswith("/memfd:"):
            huge = syscalls.file_system(f"{self.root}/fd/{number}") == _HUGETLBFS_MAGIC
            return _FILE_SYSTEMS["hugetlbfs"] if huge else ""
        return "a POSIX message queue, or a file whose file system is mounted nowhere"

    def directory(self, number: int, path: str) -> None:
        """Refuse a notification on a directory (``F_NOTIFY``): ``fs/notify/dnotify`` gives its file an owner."""
        if "pidfd_getfd" not in self.mine.forbidden:
            with syscalls.borrowed(self.pidfd, number) as descriptor, contextlib.suppress(OSError):  # O_PATH
                if fcntl.fcntl(descriptor, fcntl.F_GETOWN):
                    hint = "Close the directory and try again."
                    self.refuse_file(f"a notification on the directory {path} (F_NOTIFY, descriptor {number})", hint)

    def refuse_file(self, what: str, hint: str = "") -> None:
        self.found.refuse(what, "file", hint)

    def anonymous(self, number: int, name: str) -> None:
        if name not in _ANONYMOUS:
            shown = _ANONYMOUS_NAMES.get(name) or _ANONYMOUS_NAMES.get(f"[{name}]") or f"a kernel object of kind {name}"
            self.refuse_file(f"{shown} (descriptor {number})", _ANONYMOUS_HINTS.get(name, ""))
            return
        text = procfs.read(f"{self.root}/fdinfo/{number}")
        if name == "[eventfd]":
            facts = procfs.fields(text)
            if (count := int(facts.get("eventfd-count", "0"), 16)) >= 1 << 32:  # CRIU makes it anew with 32 bits
                self.notes.setdefault("eventfd_counts", {})[str(number)] = count
            if facts.get("eventfd-semaphore", "0") == "1":
                self.eventfds.setdefault(facts["eventfd-id"], []).append(number)
                self.tree.semaphores.setdefault(facts["eventfd-id"], set()).add(self.pid)
        elif name == "[eventpoll]":
            self.epoll(number, text)
        elif name == "[pidfd]":
            facts = procfs.fields(text)
            pid = int(facts.get("Pid", "-1"))
            if int(facts["flags"], 8) & _PIDFD_THREAD:
                self.refuse_file(f"a pidfd of a thread (PIDFD_THREAD, descriptor {number})")
            elif pid not in self.tree.pids and pid != -1:
                self.refuse_file(f"a pidfd of a process that does not come along (descriptor {number})")
        elif name == "inotify":
            self.inotify(number)
        elif name == "[timerfd]":
            self.timer(number, text)

    def timer(self, number: int, text: str) -> None:
        """Note a periodic timer that went off and was not read: it shows no time left, so CRIU takes it for unset."""
        facts = procfs.fields(text)
        interval = timer_time(facts["it_interval"])
        if not interval or timer_time(facts["it_value"]) or "pidfd_getfd" in self.mine.forbidden:
            return
        with syscalls.borrowed(self.pidfd, number) as descriptor:
            syscalls.rearm_timer(descriptor)
        facts = procfs.fdinfo(self.pid, number)
        self.notes.setdefault("timers", {})[str(number)] = {
            "clock": int(facts["clockid"]),
            "flags": int(facts["settime flags"], 8),
            "ticks": int(facts["ticks"]),
            "value": timer_time(facts["it_value"]) or interval,
            "interval": interval,
        }

    def inotify(self, number: int) -> None:
        """Refuse unread events; whether the watched files are found is known when all is stopped (`watched_files`)."""
        if "pidfd_getfd" not in self.mine.forbidden:
            with syscalls.borrowed(self.pidfd, number) as descriptor:
                if syscalls.readable_bytes(descriptor):
                    hint = "Let the program read them and try again, or stop what watches files (watchdog, watchfiles)."
                    self.refuse_file(f"{watched_files.UNREAD} (descriptor {number})", hint)

    def epoll(self, number: int, text: str) -> None:
        """Note the registrations of an epoll instance: those of a semaphore are made again with it."""
        if "pidfd_getfd" not in self.mine.forbidden:
            with syscalls.borrowed(self.pidfd, number) as fd, contextlib.suppress(OSError):  # before Linux 6.9
                if any(parameters := fcntl.ioctl(fd, syscalls.EPIOCGPARAMS, bytes(8))):
                    self.notes.setdefault("epoll_parameters", {})[str(number)] = parameters.hex()
        entries = [{"fd": fd, "events": events, "data": data} for fd, events, data in procfs.epoll_entries(text)]
        if spent := [entry for entry in entries if not entry["events"] & ~EPOLL_PRIVATE]:
            # They are used up once more after a wake, by an event that also takes those of others.
            others = [each for each in entries if each not in spent and each["events"] & _EPOLL_TAKEN]
            if all(self.is_ready(each["fd"]) for each in spent) and self.can_change(number, [*spent, *others]):
                self.notes.setdefault("spent", []).append({"epoll": number, "spent": spent, "others": others})
            else:
                what = f"a registration that was used up (EPOLLONESHOT) in an epoll instance (descriptor {number})"
                hint = "Register the descriptor again, or close it (trio leaves such registrations until then)."
                self.refuse_file(what, hint)
        self.epolls[number] = entries

    def is_ready(self, number: int) -> bool:
        """Return whether a socket or pipe can be read from or written to, as it then can after a wake, too."""
        with contextlib.suppress(OSError):  # closed since it was registered
            if self.mine.forbidden.isdisjoint({"pidfd_getfd", "kcmp"}):
                with syscalls.borrowed(self.pidfd, number) as descriptor:
                    mode, poll = os.fstat(descriptor).st_mode, select.poll()
                    poll.register(descriptor, EPOLL_ANY)
                    return bool((stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)) and poll.poll(0))
        return False

    def can_change(self, epoll: int, entries: Sequence[dict[str, int]]) -> bool:
        """Return whether each registration is of the file that has its descriptor now, and may be changed."""
        numbers = [entry["fd"] for entry in entries]
        if len(set(numbers)) < len(numbers) or any(entry["events"] & select.EPOLLEXCLUSIVE for entry in entries):
            return False
        with contextlib.suppress(OSError):
            slots = [(number, (ctypes.c_uint32 * 3)(epoll, number, 0)) for number in numbers]
            return all(
                syscalls.call("kcmp", self.pid, self.pid, syscalls.KCMP_EPOLL_TFD, number, ctypes.addressof(slot)) == 0
                for number, slot in slots
            )
        return False

    def socket(self, number: int) -> None:
        """Refuse a socket of an unproven kind or queue, and note the options that CRIU forgets."""
        with syscalls.socket_of(self.pidfd, number) as sock:
            queued = int(procfs.fdinfo(self.pid, number).get("scm_fds", "0"))
            if what := sockets.refusal(sock, queued):
                self.found.refuse(f"{what} (descriptor {number})", "socket")
                return
            notes: Notes = {"options": options} if (options := sockets.options(sock)) else {}
            if sock.family != sockets.AF_UNIX and sock.type == sockets.SOCK_DGRAM:
                if self.candidates is None:
                    self.candidates = sockets.groups(self.pid)
                if groups := sockets.memberships(sock, self.candidates):
                    notes["groups"] = groups
            if sock.family == sockets.AF_UNIX and (path := sockets.bound_path(sock)):
                where = path if path.startswith("/") else os.path.join(os.readlink(f"{self.root}/cwd"), path)
                if where.startswith("/proc/"):  # of a descriptor, which need not be open when CRIU binds it again
                    what = f"a unix socket bound to {where} (descriptor {number})"
                    self.found.refuse(what, "socket", "Bind it to the path itself, without /proc, and try again.")
                    return
                try:
                    facts = self.facts_of(where)
                    notes["path"] = {"path": where, "inode": facts.inode, "mtime": facts.mtime_ns}
                except TimeoutError:
                    what = f"a unix socket whose file cannot be reached ({where}, descriptor {number})"
                    self.found.refuse(what, "socket", "Close the socket and try again.")
                except BlockingIOError:  # nothing is known of it
                    raise
                except OSError:
                    # Root's CRIU makes it again under a name of its own; an ordinary user's restore of it fails.
                    if os.geteuid() != 0 and sockets.is_found_by_path(sock):
                        what = f"a unix socket whose file {where} was deleted (descriptor {number})"
                        self.found.refuse(what, "socket", "Close the socket and try again.")
            if notes:
                self.sockets[number] = notes

    def facts_of(self, path: str) -> file_facts.FileFacts:
        directory = os.open(f"{self.root}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return file_facts.within_timeout(path.lstrip("/"), directory)
        finally:
            os.close(directory)

    # -- memory

    def mapping_names(self) -> None:
        """Refuse mappings of an unproven kind, by their names in ``/proc/PID/maps``."""
        memfds = set[tuple[str, int]]()
        for mapping in procfs.maps(self.pid):
            self.mapping_name(mapping.name)
            try:
                self.mapped_file(mapping.name, mapping.inode)
            except TimeoutError:
                what = f"memory of a file that cannot be reached ({mapping.name})"
                self.refuse_file(what, "Unmap it, or have its file server answer, and try again.")
            if mapping.name == "/dev/zero (deleted)" and os.geteuid() != 0:
                self.shared_memory(mapping.end)
            elif mapping.name.startswith(shared_memory.MEMFD) and mapping.permissions[3] == "s":
                memfds.add((mapping.device, mapping.inode))
        if memfds and os.geteuid() != 0 and "pidfd_getfd" not in self.mine.forbidden:
            self.memfds(memfds)

    def mapped_file(self, name: str, inode: int) -> None:
        self.deleted_name(name, inode, "mapped")
        if "\n" in name and os.geteuid() != 0 and not self.path_of_deleted(name, inode):
            # An ordinary user's CRIU opens it by the name that /proc/PID/smaps shows.
            what = f"memory of a file with a line break in its name ({name})"
            self.refuse_file(what, "Rename the file, or close it, and try again.")

    def memfds(self, mapped: set[tuple[str, int]]) -> None:
        """Refuse memfds, ``mapped`` by device and inode, that cannot be given a name as `shared_memory` does."""
        with syscalls.pidfd_of(self.pid) as pidfd:
            for number, name in procfs.links(self.pid):
                sealed = False
                if name.startswith(shared_memory.MEMFD):
                    with contextlib.suppress(OSError), syscalls.borrowed(pidfd, number) as descriptor:  # or closed
                        is_mapped = shared_memory.key_of(os.fstat(descriptor)) in mapped
                        sealed = is_mapped and shared_memory.may_be_sealed(descriptor)
                if sealed:
                    shown = name.removeprefix(shared_memory.MEMFD).removesuffix(_DELETED)
                    what = f"a mapped memfd that is sealed, or can be ({shown}, descriptor {number})"
                    hint = "Close the descriptor, or make the memfd without MFD_ALLOW_SEALING."
                    self.refuse_file(what, hint)

    def shared_memory(self, end: int) -> None:
        """Refuse shared memory that mremap(2) has enlarged: an ordinary user's CRIU cannot read beyond its old end."""
        with open(f"{self.root}/mem", "rb", buffering=0) as memory:
            try:
                os.pread(memory.fileno(), 1, end - 1)
            except OSError as error:
                if error.errno == errno.EIO:
                    hint = "Close it: make new memory of that size and copy what was in it."
                    self.found.refuse("shared memory that was enlarged beyond its end (mremap)", hint=hint)

    def mapping_name(self, name: str) -> None:
        if name.startswith("/SYSV"):
            self.found.refuse(f"System V shared memory (key 0x{name[5:13]})", hint="Detach it (shmdt) and try again.")
        elif name.startswith(_ASYNCHRONOUS_IO):
            self.found.refuse("an asynchronous I/O context (io_setup)", hint="Destroy it (io_destroy) and try again.")
        elif name.startswith("/secretmem"):
            self.found.refuse("secret memory (memfd_secret)")
        elif name.startswith(("anon_inode:", "socket:")):
            kind = name.removeprefix("anon_inode:")
            what = f"memory that it shares with Linux ({_ANONYMOUS_NAMES.get(kind, name)})"
            self.found.refuse(what, hint=_ANONYMOUS_HINTS.get(kind, ""))
        elif name.startswith("/dev/") and not name.startswith(_MAPPED_DEVICES):
            self.refuse_file(f"memory of the device {name}")

    def mappings(self) -> None:
        """Flags, protection keys and NUMA policies of every mapping, from smaps and numa_maps."""
        ranges: list[list[int]] = []
        sealed, on_fault = [], []
        content = self.smaps.result()
        has_keys = content.count("\nProtectionKey:") != content.count("\nProtectionKey:           0\n")
        known: dict[str, frozenset[str]] = {}  # hundreds of mappings have some ten sets of flags
        for low, high, name, facts in _MAPPING.findall(content):
            if name in _OF_LINUX:
                continue
            start, end = int(low, 16), int(high, 16)
            ranges.append([start, end])
            shown = facts.rpartition("VmFlags:")[2] if "VmFlags:" in facts else ""
            if (flags := known.get(shown)) is None:
                flags = known[shown] = frozenset(shown.split())
            if not flags <= _MAPPING_FLAGS:
                unproven = flags - _MAPPING_FLAGS
                if name.startswith(_ASYNCHRONOUS_IO):
                    unproven -= {"de"}  # it is refused by its name
                elif name.startswith("/") and not name.startswith("/dev/"):
                    unproven -= _DAX_FLAGS
                for flag in sorted(unproven):
                    self.found.refuse(_MAPPING_NAMES.get(flag, f"memory with the flag {flag!r} (/proc/PID/smaps)"))
            if "sl" in flags:
                sealed.append([start, end])
            if end - start > self.tree.memory and not name and not flags & {"nr", "sh"}:
                self.reservation(start, end)
            if "lf" in flags:
                on_fault.append([start, end])
            if has_keys and (key := _PROTECTION_KEY.search(facts)) is not None:
                self.found.refuse(f"memory with a protection key (pkey {key[1]})", hint="Free the key (pkey_free).")
        self.inventory["mappings"] = ranges
        own = self.notes.get("threads", {}).get(str(self.pid), {}).get("numa", "default")
        policies = []
        for line in procfs.lines(_optional(self.numa_maps.result)):
            words = line.split(None, 2)
            if words[1] not in ("default", own):
                start = int(words[0], 16)
                end = next((high for low, high in ranges if low == start), start)
                policies.append([start, end, self.numa_policy(words[1])])
        noted = {"sealed": sealed, "locked_on_fault": on_fault, "numa": policies}
        self.notes |= {name: found for name, found in noted.items() if found}

    def reservation(self, start: int, end: int) -> None:
        """Refuse more addresses than there is memory where a child has inherited them, and they count as used.

        CRIU maps what a child inherits writable for a moment (``premap_private_vma`` in its mem.c), which Linux refuses
        for so much that was not made with MAP_NORESERVE.
        """
        self.tree.large.setdefault(self.pid, set()).add((start, end))
        if (start, end) in self.tree.large.get(procfs.stat(self.pid).parent, ()):
            what = f"{size(end - start)} of reserved addresses, more than this host has memory, which a child inherits"
            hint = "End its forked child processes, or reserve the addresses with MAP_NORESERVE."
            self.found.refuse(what, hint=hint)

    # -- by system calls of the process itself

    def injected(self, allow_unconfined: bool) -> None:
        """State that only the stopped process itself can read."""
        with Injection.into(self.pid) as injection:
            if settings := injection.settings():
                self.notes["settings"] = settings
            self.ended_children(injection)
            user, group = (int((ids or "0").split()[0]) for ids in self.user)
            for what in injection.unproven(user):
                self.found.refuse(what)
            if not allow_unconfined and self.suspects and injection.confined(self.suspects, user, group):
                others = "the administrator sets GpuCkptProvisioner.allow_unconfined_wake."
                hint = f"It would come back without it. {_OUTSIDE} Or {others}"
                self.found.refuse("a confinement by Landlock", hint=hint)

    def ended_children(self, injection: Injection | None = None) -> None:
        """Refuse children that nobody has waited for, and of whose end a wake would tell something else.

        CRIU restores 7 bits of an exit status, which makes a failure with the status 128 a success, and not that memory
        was dumped.  Of a child that CRIU itself had restored, Linux may hide the exit code from an ordinary user; the
        parent can ask for it, by ``injection``.
        """
        hint = "Wait for it (os.waitpid, or the poll method of its Popen) and try again."
        for child in procfs.children(self.pid):
            seen = procfs.stat(child)
            if seen.state != "Z":
                continue
            end = injection.end_of(child) if injection is not None else None
            if end not in (None, seen.exit_code):
                what = f"an ended child (process {child}) of which Linux does not tell how it ended"
                self.found.refuse(what, hint=hint)
            elif seen.exit_code >> 8 > _LARGEST_STATUS:
                what = f"an ended child (process {child}) with the exit status {seen.exit_code >> 8}"
                self.found.refuse(what, hint=hint)
            elif seen.exit_code & _DUMPED or seen.exit_code == _LAST_SIGNAL:
                dumped = ", and a file of its memory" if seen.exit_code & _DUMPED else ""
                what = f"an ended child (process {child}) that was ended by signal {seen.exit_code & ~_DUMPED}{dumped}"
                self.found.refuse(what, hint=hint)


def describe(refusals: list[dict[str, str]]) -> str:
    """The refusals in words: the first three, and the number of the others."""
    shown = ", ".join(refusal["what"] for refusal in refusals[:3])
    return shown + (f" and {len(refusals) - 3} more" if len(refusals) > 3 else "")
