"""Reapply to a restored process what CRIU forgets, before it runs.

The notes are those of `inventory.inspect`, taken when the process was stopped for its dump.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import resource
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import controlling_terminals, injection, syscalls, watched_files
from jupyter_gpu_ckpt.process import sockets as socket_state
from jupyter_gpu_ckpt.process.injection import Injection
from jupyter_gpu_ckpt.process.syscalls import pidfd_of

Notes = dict[str, Any]

_EFD_SEMAPHORE = 1
_TFD_TIMER_ABSTIME = 1
#: Bits of ``struct epoll_event`` that are no events, and all that are but errors, which are always watched.
EPOLL_PRIVATE, EPOLL_ANY = 0xF << 28, 0x27C7
_MLOCK_ONFAULT = 1
_MPOL_MF_NONE = 0
#: set_mempolicy(2): modes and their flags, as ``mm/mempolicy.c: mpol_to_str`` writes them.
_POLICIES = {"default": 0, "prefer": 1, "bind": 2, "interleave": 3, "local": 4}
_WITH_NODES = ("prefer", "bind", "interleave")
_POLICY_FLAGS = {"static": 1 << 15, "relative": 1 << 14}
_NODES = 1024
#: Of `Injection.apply`: a program that has them would misbehave, or could do more, without them.
_VITAL_SETTINGS = frozenset({"lock_future", "mdwe", "no_cpuid", "tiles"})


def reapply(notes: dict[str, Notes]) -> tuple[list[str], list[str]]:
    """Reapply the notes of each process, by its pid.  Return what could not be reapplied, in words.

    The first list is what a kernel must not run without: what protects others from it, and what its own locks are made
    of.  The second is what another machine may lack: processors, memory nodes, network devices.

    The processes are children of the caller, all their threads in a group stop, before and after.
    """
    vital: list[str] = []
    failed: list[str] = []
    for pid, of_process in notes.items():
        restorer = _Restorer(int(pid), of_process, [], [])
        restorer.run()
        if not procfs.is_ending(int(pid)):  # one that was killed meanwhile lacks nothing
            vital += restorer.vital
            failed += restorer.failed
    return vital, failed


def readable_policy(text: str) -> bool:
    """Return whether a policy that ``/proc/PID/numa_maps`` shows as ``text`` can be reapplied."""
    return _policy(text) is not None


def is_above(limit: int, other: int) -> bool:
    """Return whether a limit of `resource` is higher than another one."""
    infinity = resource.RLIM_INFINITY
    return other != infinity and (limit == infinity or limit > other)


def timer_time(text: str) -> int:
    """Nanoseconds of a time in the form of a timerfd's fdinfo: ``(seconds, nanoseconds)``."""
    seconds, nanoseconds = text.strip("()").split(",")
    return int(seconds) * 10**9 + int(nanoseconds)


def _policy(text: str) -> tuple[int, bytes] | None:
    """Mode with its flags, and mask of nodes; None for a policy that is not known here."""
    found = re.fullmatch(r"(\w+)(?:=(\w+))?(?::([\d,-]+))?", text)
    if found is None or found[1] not in _POLICIES or (found[2] and found[2] not in _POLICY_FLAGS):
        return None
    if (found[1] in _WITH_NODES) != bool(found[3]):
        return None
    mask = 0
    for part in found[3].split(",") if found[3] else ():
        first, _, last = part.partition("-")
        for node in range(int(first), int(last or first) + 1):
            mask |= 1 << node
    mode = _POLICIES[found[1]] | _POLICY_FLAGS.get(found[2] or "", 0)
    return mode, mask.to_bytes(_NODES // 8, "little")


class _Restorer(NamedTuple):
    """One process and its notes, and what could not be reapplied so far."""

    pid: int
    notes: Notes
    vital: list[str]
    failed: list[str]

    def run(self) -> None:
        with self.trying("settings of the process"):
            self.process()
        for tid, notes in self.notes.get("threads", {}).items():
            self.thread(int(tid), notes)
        if self.notes.get("sockets"):
            self.sockets()
        if watches := self.notes.get("watches"):
            with self.trying("inotify watches"):
                self.failed.extend(f"inotify watch on {why}" for why in watched_files.put_back(self.pid, watches))
        if files := self.notes.get("controlling_terminal"):
            with self.trying("/dev/tty"):
                controlling_terminals.put_back({self.pid: files})
        if self.needs_injection():
            what = "settings that only the process can make"
            with self.trying(what, vital=True), Injection.into(self.pid) as inside:
                self.inject(inside)
        for number, count in self.notes.get("eventfd_counts", {}).items():
            with self.trying("count of an eventfd", vital=True), self.borrowed(int(number)) as descriptor:
                if (lacking := count - int(procfs.fdinfo(self.pid, int(number))["eventfd-count"], 16)) > 0:
                    os.write(descriptor, lacking.to_bytes(8, "little"))
        for number, timer in self.notes.get("timers", {}).items():
            with self.trying("periodic timer (timerfd)", vital=True), self.borrowed(int(number)) as descriptor:
                begin = time.clock_gettime_ns(timer["clock"]) if timer["flags"] & _TFD_TIMER_ABSTIME else 0
                value, interval = begin + timer["value"], timer["interval"]
                syscalls.set_timer(descriptor, timer["flags"], value, interval, timer["ticks"])

    def needs_injection(self) -> bool:
        """Return whether some note can only be reapplied by a system call of the process itself."""
        own = {"personality", "speculation", "numa", "death_signal"}
        threads = any(own & notes.keys() for notes in self.notes.get("threads", {}).values())
        inside = {"settings", "semaphores", "spent", "sealed", "locked_on_fault", "numa"}
        return threads or bool(self.notes.keys() & inside)

    @contextlib.contextmanager
    def trying(self, what: str, *, vital: bool = False) -> Iterator[None]:
        """Note ``what`` where the body fails."""
        try:
            yield
        except (OSError, ValueError) as error:
            self.note(f"{what} (process {self.pid}): {error}", vital)

    def note(self, what: str, vital: bool) -> None:
        (self.vital if vital else self.failed).append(what)

    def require(self, result: int, what: str, *, vital: bool = False) -> None:
        """Note ``what`` where an injected call failed."""
        if result < 0:
            self.note(f"{what} (process {self.pid}): {os.strerror(-result)}", vital)

    # -- from outside

    def process(self) -> None:
        self.limits()
        for name in ("coredump_filter", "autogroup_nice"):
            if name in self.notes:
                path = f"/proc/{self.pid}/{name.removesuffix('_nice')}"
                with self.trying(name), open(path, "w") as file:
                    file.write(str(self.notes[name]))
        for number, parameters in self.notes.get("epoll_parameters", {}).items():
            with self.trying("parameters of an epoll instance"), self.borrowed(int(number)) as descriptor:
                fcntl.ioctl(descriptor, syscalls.EPIOCSPARAMS, bytes.fromhex(parameters))

    def limits(self) -> None:
        """Set limits again (``setrlimit(2)``) that are above CRIU's own, which it neither sets nor reports."""
        limits = procfs.limits(self.pid)
        for name, (soft, hard) in self.notes.get("limits", {}).items():
            number, (_, most) = getattr(resource, name), limits[name]
            if limits[name] == (soft, hard):
                continue
            with self.trying(name):
                try:
                    resource.prlimit(self.pid, number, (soft, hard))
                except (OSError, ValueError):  # ValueError: only root may raise a hard limit
                    resource.prlimit(self.pid, number, (most if is_above(soft, most) else soft, most))
                    self.note(f"{name} of process {self.pid}, which cannot be more than {most} here", False)

    @contextlib.contextmanager
    def borrowed(self, number: int) -> Iterator[int]:
        """Duplicate a descriptor of the process for as long as the body lasts."""
        with pidfd_of(self.pid) as pidfd, syscalls.borrowed(pidfd, number) as descriptor:
            yield descriptor

    def thread(self, tid: int, notes: Notes) -> None:
        if "affinity" in notes:
            with self.trying(f"CPU affinity {notes['affinity']} of thread {tid}"):
                os.sched_setaffinity(tid, notes["affinity"])
        if "timer_slack_ns" in notes:
            with self.trying(f"timer slack of thread {tid}"), open(f"/proc/{tid}/timerslack_ns", "w") as file:
                file.write(str(notes["timer_slack_ns"]))
        if "io_priority" in notes:
            with self.trying(f"I/O priority of thread {tid}"):
                syscalls.call("ioprio_set", syscalls.IOPRIO_WHO_PROCESS, tid, notes["io_priority"])
        if "slice_ns" in notes:
            with self.trying(f"time slice of thread {tid}"):
                attributes = bytearray(syscalls.scheduling(tid))
                attributes[24:32] = int(notes["slice_ns"]).to_bytes(8, "little")
                syscalls.set_scheduling(tid, bytes(attributes))

    def sockets(self) -> None:
        with pidfd_of(self.pid) as pidfd:
            for number, notes in self.notes["sockets"].items():
                with self.trying(f"socket {number}"), syscalls.socket_of(pidfd, int(number)) as sock:
                    failed = socket_state.reapply(sock, notes.get("options", {}))
                    self.failed.extend(f"{name} of socket {number} (process {self.pid})" for name in failed)
                    for group in notes.get("groups", ()):
                        with self.trying(f"multicast on {group['device']} of socket {number}"):
                            socket_state.join(sock, group)

    # -- by system calls of the process itself

    def inject(self, inside: Injection) -> None:
        """Settings that only the process can make; those that forbid later ones come last."""
        for semaphore in self.notes.get("semaphores", ()):
            with self.trying("an eventfd that is a semaphore", vital=True):
                self.semaphore(inside, semaphore)
        for instance in self.notes.get("spent", ()):
            self.use_up(inside, **instance)
        for start, end, policy in self.notes.get("numa", ()):
            with self.policy(inside, policy) as (mode, address):
                done = inside.call("mbind", start, end - start, mode, address, _NODES, _MPOL_MF_NONE)
                self.require(done, f"NUMA policy {policy}")
        for start, end in self.notes.get("locked_on_fault", ()):
            done = inside.call("mlock2", start, end - start, _MLOCK_ONFAULT)
            self.require(done, "memory locked on fault")
        for tid, notes in self.notes.get("threads", {}).items():
            with self.trying(f"settings of thread {tid}"):
                self.inject_thread(inside, int(tid), notes)
        for start, end in self.notes.get("sealed", ()):
            self.require(inside.call("mseal", start, end - start, 0), "sealed memory (mseal)", vital=True)
        for name in inside.apply(self.notes.get("settings", {})):
            self.note(f"{name} (process {self.pid})", name in _VITAL_SETTINGS)

    def use_up(self, inside: Injection, epoll: int, spent: list[Notes], others: list[Notes]) -> None:
        """Use up registrations that were so (EPOLLONESHOT), by an event of any kind.

        CRIU makes them anew, and they would report an error or the end of a connection.  ``others``: registrations
        whose events are taken, too, and which are set anew.
        """
        what = f"registrations that were used up in epoll instance {epoll}"
        for each in spent:
            done = inside.change(epoll, each["fd"], each["events"] | EPOLL_ANY, each["data"])
            self.require(done, what)
        numbers = {each["fd"] for each in spent}
        for _ in self.registrations(epoll):
            if not any(fd in numbers and events & ~EPOLL_PRIVATE for fd, events, _ in self.registrations(epoll)):
                break
            inside.collect(epoll)
        for fd, events, data in self.registrations(epoll):
            if fd in numbers and events & ~EPOLL_PRIVATE:
                inside.change(epoll, fd, events & EPOLL_PRIVATE, data)
                self.note(f"{what} (process {self.pid}): descriptor {fd} is not ready for anything", vital=False)
        for each in others:
            self.require(inside.change(epoll, **each), what, vital=True)

    def registrations(self, epoll: int) -> list[tuple[int, int, int]]:
        return procfs.epoll_entries(procfs.read(f"/proc/{self.pid}/fdinfo/{epoll}"))

    @contextlib.contextmanager
    def policy(self, inside: Injection, text: str, tid: int = 0) -> Iterator[tuple[int, int]]:
        """A NUMA policy's mode, and the address of its nodes in the process."""
        if (parsed := _policy(text)) is None:
            raise ValueError(f"NUMA policy {text!r}")
        mode, nodes = parsed
        with inside.on_stack(nodes, tid) as address:
            yield mode, address if any(nodes) else 0

    def inject_thread(self, inside: Injection, tid: int, notes: Notes) -> None:
        if "numa" in notes:
            with self.policy(inside, notes["numa"], tid) as (mode, address):
                done = inside.call("set_mempolicy", mode, address, _NODES if address else 0, tid=tid)
                self.require(done, f"NUMA policy {notes['numa']} of thread {tid}")
        if "personality" in notes:
            self.require(inside.call("personality", notes["personality"], tid=tid), f"personality of thread {tid}")
        for which, value in notes.get("speculation", ()):
            done = inside.call("prctl", injection.PR_SET_SPECULATION_CTRL, which, value, tid=tid)
            self.require(done, f"speculation control of thread {tid}", vital=True)
        if "death_signal" in notes:
            done = inside.call("prctl", syscalls.PR_SET_PDEATHSIG, notes["death_signal"], tid=tid)
            self.require(done, f"PR_SET_PDEATHSIG of thread {tid}")

    def semaphore(self, inside: Injection, semaphore: Notes) -> None:
        """Replace a plain eventfd by a semaphore of the same count, also in the epoll instances that watch it."""
        descriptors = semaphore["descriptors"]
        facts = procfs.fdinfo(self.pid, descriptors[0])
        if facts.get("eventfd-semaphore", "0") == "1":
            return  # this CRIU knows of them
        count, flags = int(facts["eventfd-count"], 16), int(facts["flags"], 8)
        made = inside.call("eventfd2", count, flags & os.O_NONBLOCK | _EFD_SEMAPHORE)
        if made < 0:
            raise OSError(-made, os.strerror(-made))
        for number in descriptors:
            closes = int(procfs.fdinfo(self.pid, number)["flags"], 8) & os.O_CLOEXEC
            self.require(inside.call("dup3", made, number, closes), f"semaphore {number}", vital=True)
        inside.call("close", made)
        for watched in semaphore["epolls"]:
            done = inside.register(**watched)
            self.require(done, f"semaphore {watched['fd']} in epoll instance {watched['epoll']}", vital=True)
