"""PID 1 of a capsule: starts the kernel and CRIU, reaps, forwards the kernel's raw output.

`start` runs it; it is never imported by the server.  It uses the standard library only and opens nothing it does not
need: whatever the kernel inherits from here must be restorable.  A wake waits for its imports, so they are few: no
dataclasses, which import ``inspect``; and what a wake does not need before CRIU has begun is imported where it is
needed (`_import_rest`).

The owner sends requests over a SEQPACKET unix socket, and the init answers them in order.  `Init.REQUESTS` has their
verbs, `protocol` the form of the packets.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import math
import os
import re
import resource
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule import namespaces
from jupyter_gpu_ckpt.capsule.private_directories import PrivateDirectories
from jupyter_gpu_ckpt.capsule.protocol import PACKET_BYTES, VERSION
from jupyter_gpu_ckpt.capsule.root_process import fork_below, root_of
from jupyter_gpu_ckpt.capsule.stdio import Pipe
from jupyter_gpu_ckpt.capsule.subreaper import Subreaper
from jupyter_gpu_ckpt.process import descriptors, device_files, inherited_filters, shared_memory, syscalls
from jupyter_gpu_ckpt.process.ptrace import STOP_TIMEOUT, release_late
from jupyter_gpu_ckpt.process.shared_memory import SharedMemory
from jupyter_gpu_ckpt.process.unsavable import Unsavable

if TYPE_CHECKING:
    from jupyter_gpu_ckpt.capsule.criu_guard import CriuGuard
    from jupyter_gpu_ckpt.process.freezer import FrozenThreads
    from jupyter_gpu_ckpt.process.preparation import Preparation
    from jupyter_gpu_ckpt.process.watched_files import WatchedFiles

#: Seconds that a capsule without an owner waits for one.
OWNER_TIMEOUT = 15.0
#: Seconds in which a kernel that has ended is reaped: its root process must have ended first.
REAP_TIMEOUT = 1.0
#: Seconds for CRIU to notice that the kernel it restores was killed.
KILLED_TIMEOUT = 2.0
#: Seconds that resource trackers may clean up behind a kernel that has ended; its other children get half of it.
CLEANUP_TIMEOUT = 2.0
#: File systems that CRIU mounts for a moment, to try what Linux can (its kerndat.c).
_CRIUS_MOUNT = re.compile(r"/\.criu\.[^/]+$")
_TRACKER = re.compile(r"\b(resource|semaphore)_tracker\b")


class RunningProgram:
    """A program that runs for the owner: CRIU.  ``number``: of its request; ``guard``: of a dump.

    ``subreaper``: of a restore that needs one.  ``restores``: the kernel that a restore makes; 0 for another program.
    """

    def __init__(
        self,
        pid: int,
        number: int,
        timeout: float,
        grace: float,
        output: str,
        terminals: str,
        guard: CriuGuard | None,
        subreaper: Subreaper | None,
        restores: int,
    ) -> None:
        self.pid, self.number, self.output, self.guard = pid, number, output, guard
        self.began = time.monotonic()
        #: SIGKILL comes ``grace`` seconds later.
        self.deadline, self.grace = self.began + timeout, grace
        #: The file of the terminals' contents; empty for a program that has none.
        self.terminals = terminals
        self.subreaper = subreaper
        self.timed_out = False
        self.restores = restores
        #: Since when the kernel that is being restored has ended, by the monotonic clock; infinite: it has not.
        self.ended_at = math.inf


def _failure(work: Callable[[], object]) -> str:
    """Call ``work``; return why it failed, or an empty string."""
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Init:
    """The event loop of PID 1."""

    def __init__(
        self,
        listener: socket.socket,
        rootless: bool,
        directory: str,
        host_mounts: int,
        private: PrivateDirectories,
    ) -> None:
        self.listener = listener
        #: A descriptor of the host's mount table: a file shows that of the namespace it was opened in.
        self.host_mounts = host_mounts
        self.mounted = procfs.mounts()
        self.directory = directory
        #: A descriptor of the directory in host memory; -1 until the owner asks for it.
        self.memory_directory = -1
        self.rootless = rootless
        self.shared_memory = SharedMemory(f"{directory}/{shared_memory.DIRECTORY}")
        self.filters = inherited_filters.InheritedFilters(f"{directory}/{inherited_filters.DIRECTORY}")
        self.owner: socket.socket | None = None
        self.may_outlive = False
        #: Descriptors that the owner gave us to keep; the locks on their files end with the capsule.
        self.kept_fds: list[int] = []
        #: Descriptors with the locks on databases of a kernel that is being restored, which has none yet.
        self.database_fds: list[int] = []
        #: Of the current request: the owner recognizes late answers to earlier ones by it.
        self.number = 0
        self.kernel = 0
        #: A pidfd of the kernel, until it has ended: it need not be our child.
        self.kernel_fd = -1
        self.kernel_status: int | None = None
        #: When the kernel ended, by the monotonic clock.
        self.kernel_ended = 0.0
        #: Whether there may be an image of the kernel, which needs what its resource trackers would remove.
        self.imaged = False
        self.job: RunningProgram | None = None
        #: Of a dump that succeeded: the processes that it left stopped.
        self.stopped: CriuGuard | None = None
        #: Changes to those processes for the dump.
        self.preparation: Preparation | None = None
        #: Paths of device files that processes (by pid) have inherited, and are to lose at the next dump.
        self.inherited_files: dict[int, frozenset[str]] = {}
        #: Found for the last dump; None before the first.
        self.watched_files: WatchedFiles | None = None
        #: Restored processes that were stopped before their dump by somebody else.
        self.stay_stopped: set[int] = set()
        #: By process, threads that must not run while its device memory is copied, also without an owner; and while its
        #: CUDA state is suspended, those that wait in the driver's code, or all that could call it.
        self.frozen: dict[int, FrozenThreads] = {}
        self.selector = selectors.DefaultSelector()
        self.deadline = time.monotonic() + OWNER_TIMEOUT
        self.pipes = [Pipe(target, self.selector) for target in (1, 2)]
        self.waker, self._wakeup = socket.socketpair()
        for end in (self.waker, self._wakeup):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self.selector.register(self.waker, selectors.EVENT_READ, lambda: self.waker.recv(4096))
        self.selector.register(listener, selectors.EVENT_READ, self.connect)
        if (watch := private.watch()) is not None:
            self.selector.register(watch, selectors.EVENT_READ, functools.partial(self.mount_private, watch, private))

    # -- the loop

    def serve(self) -> int:
        """Serve until the owner has disconnected (and the capsule may not outlive it), or none has connected."""
        while True:
            wait = 0.02 if self.owner is None and self.kernel_status is not None else 1.0
            if self.job:
                wait = min(wait, max(0.0, self.job.deadline - time.monotonic()))
            for key, _ in self.selector.select(wait):
                key.data()
            self.reap()
            if self.job and time.monotonic() >= self.job.deadline:
                self.expire(self.job)
            if self.job and self.job.restores:
                self.give_up_killed(self.job)
            abandoned = self.owner is None and time.monotonic() >= self.deadline
            if abandoned and (not self.may_outlive or self.kernel_status is not None) and not self.must_stay():
                return 0

    def must_stay(self) -> bool:
        """Kill the kernel, which has no owner any more.  Return whether its end or cleanup still takes time."""
        if self.imaged or not self.kernel:
            return False
        if self.kernel_status is not None:
            return self.is_cleaning_up()
        self.end()
        return time.monotonic() < self.kernel_ended + CLEANUP_TIMEOUT

    def is_cleaning_up(self) -> bool:
        """Return whether resource trackers clean up behind the kernel: they begin when all their users have ended."""
        if self.kernel_status is None:
            return False
        trackers, others = self.other_processes()
        waited = time.monotonic() - self.kernel_ended
        if waited > CLEANUP_TIMEOUT / 2:
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return bool(trackers) and waited < CLEANUP_TIMEOUT

    @staticmethod
    def other_processes() -> tuple[list[int], list[int]]:
        """The pids of the capsule's living processes but for this one: resource trackers, and all others."""
        found: tuple[list[int], list[int]] = [], []
        for pid in procfs.pids():
            with contextlib.suppress(OSError):
                if pid != os.getpid() and (command := procfs.arguments(pid)):  # of a zombie there is none
                    found[_TRACKER.search(" ".join(command)) is None].append(pid)
        return found

    def expire(self, job: RunningProgram) -> None:
        """End a program at its deadline: by an error it can handle if it has a grace, after that by SIGKILL.

        A file size limit makes CRIU's next write fail, as a full disk would, and it takes everything back by itself,
        and also what `CriuGuard` cannot see: names it gave to deleted files, for instance.
        """
        grace = 0.0 if job.timed_out else job.grace
        job.timed_out = True
        job.deadline = time.monotonic() + grace if grace else math.inf
        with contextlib.suppress(ProcessLookupError):
            if grace:
                resource.prlimit(job.pid, resource.RLIMIT_FSIZE, (0, 0))
            else:
                self.kill_job(job)

    @staticmethod
    def kill_job(job: RunningProgram) -> None:
        """Kill a program and its process group; with a restore all that it has made so far, of which nothing may run.

        What CRIU traces would run on once CRIU has ended.
        """
        with contextlib.suppress(ProcessLookupError):
            if job.restores:
                os.kill(-1, signal.SIGKILL)  # all processes of this pid namespace but its init
            else:
                os.killpg(job.pid, signal.SIGKILL)

    @staticmethod
    def give_up_killed(job: RunningProgram) -> None:
        """End a restore whose kernel was killed meanwhile: CRIU may wait for it until the deadline.

        It does so in wait4(2) for a process that it traces, which Linux does not report while it has threads, and in
        futex(2) for one to reach the next stage of the restore (``attach_to_tasks`` in its cr-restore.c).
        """
        ended = False
        with contextlib.suppress(*procfs.GONE):  # not made yet, or reaped by CRIU, which knows it then
            ended = procfs.stat(job.restores).has_ended
        job.ended_at = min(job.ended_at, time.monotonic()) if ended else math.inf
        if time.monotonic() - job.ended_at > KILLED_TIMEOUT:
            Init.fail(job, f"process {job.restores} was killed while it was restored")
            job.ended_at = math.inf
            Init.kill_job(job)

    def connect(self) -> None:
        """Accept a new owner, if there is none."""
        if self.owner is None and self.job:
            return  # the last owner went a moment ago: see `drop_owner`
        connection, _ = self.listener.accept()
        if self.owner is not None:
            connection.close()
            return
        self.owner = connection
        self.selector.register(connection, selectors.EVENT_READ, self.handle)

    def drop_owner(self) -> None:
        """Take back whatever the owner, which has gone, was in the middle of, before another one is accepted."""
        if self.owner is None:
            return
        self.selector.unregister(self.owner)
        self.owner.close()
        self.owner = None
        self.deadline = time.monotonic()
        self.resume_without_owner()
        if self.job:
            self.selector.unregister(self.listener)
            self.cancel_criu()

    def reap(self) -> None:
        """Collect children that have ended or stopped."""
        while True:
            pid = 0
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                self.reap_frozen()
                return
            was_traced = release_late(pid, status)
            if os.WIFSTOPPED(status):
                if self.job and self.job.subreaper and self.traces(self.job, self.job.subreaper, pid, status):
                    continue
                if not was_traced:
                    # A child of a CRIU that was killed, come to us just before it asked its parent to trace it.
                    os.kill(pid, signal.SIGKILL)
            elif pid == self.kernel:
                self.kernel_status = os.waitstatus_to_exitcode(status)
                self.kernel_ended = time.monotonic()
            elif self.job and pid == self.job.pid:
                self.finish_job(self.job, os.waitstatus_to_exitcode(status))

    @staticmethod
    def traces(job: RunningProgram, subreaper: Subreaper, pid: int, status: int) -> bool:
        """Let the tracing of a restore handle a stop.  A failure ends the restore."""
        try:
            return subreaper.stopped(pid, status)
        except ProcessLookupError:  # killed meanwhile
            return True
        except OSError as error:
            Init.fail(job, f"the root of the processes could not be made a subreaper: {error}")
            for each in (pid, job.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            return True

    @staticmethod
    def fail(job: RunningProgram, why: str) -> int:
        """Write why a program is to be taken for one that failed below its output.  Return the status of such a one."""
        with contextlib.suppress(OSError), open(job.output, "a") as file:
            file.write(f"Error: {why}\n")
        return 1

    def watch_kernel(self) -> None:
        """Notice the end of the kernel, which may be a child of its root process."""
        self.kernel_fd = os.pidfd_open(self.kernel)
        self.selector.register(self.kernel_fd, selectors.EVENT_READ, self.reparent_kernel)

    def reparent_kernel(self) -> None:
        """Make a kernel that has ended a child of this process: end its root process, which may be stopped."""
        if self.kernel_fd < 0:
            return  # a request was first
        self.selector.unregister(self.kernel_fd)
        os.close(self.kernel_fd)
        self.kernel_fd = -1
        with contextlib.suppress(*procfs.GONE):  # reaped already
            if (root := root_of(self.kernel)) != self.kernel:
                os.kill(root, signal.SIGKILL)

    def reap_kernel(self) -> None:
        """Reap the kernel, if it has ended: its owner may have seen that before we have."""
        self.reap()
        if self.kernel_fd >= 0 and _is_ready(self.kernel_fd):
            self.reparent_kernel()
        deadline = time.monotonic() + REAP_TIMEOUT
        while self.kernel and self.kernel_fd < 0 and self.kernel_status is None and time.monotonic() < deadline:
            time.sleep(0.0005)
            self.reap()

    def reap_frozen(self) -> None:
        """Reap frozen threads of children of the kernel that were killed: until then their parents see no end."""
        for pid in [pid for pid in self.frozen if pid != self.kernel]:
            with contextlib.suppress(*procfs.GONE):
                if not procfs.stat(pid).has_ended:
                    continue
            self.frozen.pop(pid).release()

    def finish_job(self, job: RunningProgram, code: int) -> None:
        """Repair the kernel after a dump, or complete a restore, and answer the request."""
        self.job = None
        self.filters.show()
        if code != 0:
            self.kill_job(job)  # what it has left: a child that has stopped itself would stay for good
            self.unmount_left()
        seconds = time.monotonic() - job.began
        ended = job.guard.ended() if job.guard is not None else []
        lost = self.undo_preparation() if code != 0 else ""  # before the processes run on
        unrepaired = self.finish_guard(job, code) or lost
        if code == 0 and job.subreaper is not None and (strays := job.subreaper.strays()):
            code = self.fail(job, f"processes {strays} have another parent than they had")
        if code == 0 and job.guard is None and job.terminals:
            from jupyter_gpu_ckpt.process.preparation import complete_restore

            unrepaired = complete_restore(job.terminals)
        self.stopped = job.guard if code == 0 else None
        if self.owner is None:
            self.resume_without_owner()
            self.selector.register(self.listener, selectors.EVENT_READ, self.connect)
        reply = {"status": code, "timed_out": job.timed_out, "seconds": seconds, "unrepaired": unrepaired}
        self.answer({"number": job.number, **reply, "ended": ended})

    def unmount_left(self) -> None:
        """Unmount what a killed CRIU has left: it would be taken for a mount of the kernel's own."""
        for mount in self.own_mounts():
            if _CRIUS_MOUNT.search(mount.point):
                with contextlib.suppress(OSError):
                    syscalls.umount(mount.point)
                    os.rmdir(mount.point)

    def resume_without_owner(self) -> None:
        """Undo a dump's stop for an owner that is gone.  What is lost by it is written to our stderr."""
        if why := self.resume_processes()["unrepaired"]:
            with contextlib.suppress(OSError):
                print(f"gpu-ckpt-init: {why}", file=sys.stderr, flush=True)

    def save_shared_memory(self, pids: list[int], target: str) -> None:
        """Give names to the deleted files that stopped processes share, and copy these files to ``target``."""
        shared_memory.own_pages(pids)
        with self.mounting():
            self.shared_memory.give_names(pids)
        self.shared_memory.save(pids, target)

    def prepare(self, guard: CriuGuard, terminals: str) -> Preparation:
        """Change what CRIU cannot save in stopped processes, until `undo_preparation`."""
        from jupyter_gpu_ckpt.process.preparation import Preparation
        from jupyter_gpu_ckpt.process.watched_files import WatchedFiles

        self.watched_files = self.watched_files or WatchedFiles()
        return Preparation(guard.pids, terminals, self.watched_files)

    def replace_inherited_files(self, guard: CriuGuard) -> None:
        """Replace the noted device files of stopped processes."""
        for pid in guard.pids:
            if pid in self.inherited_files:
                with contextlib.suppress(*procfs.GONE):  # it was killed
                    device_files.replace(pid, self.inherited_files[pid])
                    guard.mapped_anew(pid)
        if self.inherited_files:
            guard.settle(time.monotonic() + STOP_TIMEOUT)
        self.inherited_files = {}

    def load_shared_memory(self, source: str) -> None:
        """Copy the named files of an image back, before its processes are restored."""
        with self.mounting():
            self.shared_memory.load(source)

    def mount_private(self, watch: select.epoll, private: PrivateDirectories) -> None:
        """Mount private directories again whose paths others have removed."""
        watch.poll(0)
        with contextlib.suppress(OSError), self.mounting():
            private.mount()

    @contextlib.contextmanager
    def mounting(self) -> Iterator[None]:
        """Note the mounts that the body makes: they are not the kernel's own."""
        before = procfs.mounts()
        try:
            yield
        finally:
            self.mounted += [mount for mount in procfs.mounts() if mount not in before]

    def undo_preparation(self) -> str:
        """Put back what was otherwise for a dump.  Return what is lost, in words; never raises."""
        preparation, self.preparation = self.preparation, None
        return preparation.undo() if preparation is not None else ""

    @staticmethod
    def finish_guard(job: RunningProgram, code: int) -> str:
        """Repair what CRIU left after a dump.  Return why not, if not: that must not end the kernel, as our end would.

        The reason is also written below CRIU's output, which is not read after a dump that succeeded.
        """
        guard = job.guard
        why = _failure(lambda: guard.finish(success=code == 0)) if guard is not None else ""
        if why:
            Init.fail(job, f"what CRIU left in the kernel could not be repaired: {why}")
        return why

    # -- requests

    def handle(self) -> None:
        """Do one request of the owner; an empty packet means that it has gone."""
        assert self.owner is not None
        try:
            packet, fds, _, _ = socket.recv_fds(self.owner, PACKET_BYTES, 1)
        except OSError:
            packet, fds = b"", []
        for fd in fds:
            os.set_inheritable(fd, False)
        if fds and packet == b"{}":
            with open(fds.pop(), "rb") as file:
                file.seek(0)
                packet = file.read()
        if not packet:
            self.drop_owner()
            return
        verb = ""
        try:
            request = {**json.loads(packet), **({"fd": fds[0]} if fds else {})}
            self.number = request.pop("number", 0)
            if (version := request.pop("version", None)) != VERSION:
                raise RuntimeError(f"the request is of version {version}")
            verb = request.pop("verb")
            reply = self.REQUESTS[verb](self, **request)
            if reply is not None:
                self.answer(reply)
        except Exception as error:
            for fd in fds:
                if fd not in self.kept_fds:
                    os.close(fd)
            if verb == "run" and isinstance(error, Unsavable):
                self.answer({error.field: error.strerror})
                return
            self.answer({"error": f"{type(error).__name__}: {error}", "errno": getattr(error, "errno", None)})

    def answer(self, reply: dict[str, Any], *fds: int) -> None:
        """Send a reply to the owner, if there is one."""
        if self.owner is None:
            return
        packet = json.dumps({"version": VERSION, "number": self.number, **reply}).encode()
        try:
            socket.send_fds(self.owner, [packet], list(fds))
        except OSError:
            self.drop_owner()

    def spawn(
        self, argv: list[str], env: dict[str, str], cwd: str | None, first_pid: int, root_program: str = ""
    ) -> None:
        if self.kernel:
            raise RuntimeError("this capsule has a kernel already")
        # The kernel's pid and thread ids start high, so that CRIU's own processes take low ones and never the kernel's.
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(first_pid - 1))
        fds = [pipe.writer for pipe in self.pipes]
        self.kernel = self.fork(argv, env, cwd, fds, capable=False, root_program=root_program)
        self.watch_kernel()
        self.answer_kernel()
        _import_rest()

    def run(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: str,
        timeout: float,
        output: str,
        inherit_pipes: bool,
        grace: float,
        on_kernel: bool,
        terminals: str,
        root: int = 0,
        adopted: Sequence[int] = (),
        restores: int = 0,
    ) -> None:
        """Start a program; `finish_job` answers when it has ended."""
        if self.job:
            raise RuntimeError("a program is running already")
        guard = self.guard() if on_kernel else None
        try:
            if guard is not None and terminals:
                self.replace_inherited_files(guard)
                if self.rootless:
                    self.save_shared_memory(guard.pids, os.path.dirname(terminals))
                    guard.settle(time.monotonic() + STOP_TIMEOUT)
                self.preparation = self.prepare(guard, terminals)
                if self.preparation.has_injected:
                    guard.settle(time.monotonic() + STOP_TIMEOUT)
                self.filters.hide(guard.pids)
            elif terminals:
                self.load_shared_memory(os.path.dirname(terminals))
            log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                inherited = [pipe.writer for pipe in self.pipes] if inherit_pipes else []
                subreaper = Subreaper(root, adopted) if adopted else None
                begin = subreaper.trace if subreaper is not None else None
                pid = self.fork(argv, env, cwd, [log, log, *inherited], capable=True, begin=begin)
            finally:
                os.close(log)
        except BaseException as error:
            self.filters.show()
            if guard is not None:
                lost = self.undo_preparation()
                guard.finish(success=False)
                if lost:
                    raise OSError(f"{error}; {lost}") from error
            raise
        self.imaged = True
        self.job = RunningProgram(pid, self.number, timeout, grace, output, terminals, guard, subreaper, restores)
        _import_rest()

    def guard(self) -> CriuGuard:
        """Stop the kernel's tree of processes for a dump."""
        from jupyter_gpu_ckpt.capsule.criu_guard import CriuGuard

        root, deadline = root_of(self.kernel), time.monotonic() + STOP_TIMEOUT
        return CriuGuard(root, deadline, self.frozen, kernel=self.kernel)

    def attach_kernel(self, pid: int, frozen: bool = False, alone: bool = False) -> None:
        """Make a restored process the capsule's kernel and let its tree run, all its threads ``frozen`` if wanted.

        ``alone``: those of all processes but the kernel and its root process.
        """
        from jupyter_gpu_ckpt.capsule.criu_guard import unguard

        os.kill(pid, 0)
        if pid != self.kernel:
            self.kernel, root = pid, root_of(pid)
            self.watch_kernel()
            self.close_databases()

            def frozen_threads(each: int) -> FrozenThreads | None:
                return self.frozen_threads(each) if frozen or (alone and each not in (root, pid)) else None

            unguard(root, frozen_threads, self.stay_stopped, kernel=pid)
        self.answer_kernel()

    def status(self) -> dict[str, Any]:
        """Report the kernel's pid and exit status (None while it lives), and whether it is being cleaned up."""
        self.reap_kernel()
        return {"status": self.kernel_status, "kernel": self.kernel, "cleaning_up": self.is_cleaning_up()}

    def end(self) -> dict[str, Any]:
        if self.kernel and self.kernel_status is None:
            self.kernel_ended = self.kernel_ended or time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.kernel, signal.SIGKILL)
        return {}

    def cancel_criu(self) -> None:
        """End the running program as at its deadline.  There is no answer but that of `run`."""
        if self.job and not self.job.timed_out:
            self.expire(self.job)

    def resume_processes(self) -> dict[str, Any]:
        """Let the processes that a dump has left stopped run.

        Report what is not as it was before, and a failure: that must not end the kernel, as our end would.
        """
        stopped, self.stopped = self.stopped, None
        if stopped is None:
            return {"unrepaired": ""}
        lost = self.undo_preparation(), _failure(stopped.resume)
        return {"unrepaired": "; ".join(filter(None, lost))}

    def frozen_threads(self, pid: int) -> FrozenThreads:
        """The frozen threads of a process, of which there may be none yet."""
        from jupyter_gpu_ckpt.process.freezer import FrozenThreads

        if pid not in self.frozen:
            self.frozen[pid] = FrozenThreads(pid)
        return self.frozen[pid]

    def note_inherited_files(self, paths: dict[str, list[str]]) -> dict[str, Any]:
        """Note device files that processes (by pid) have inherited: the next dump takes them away."""
        self.inherited_files = {int(pid): frozenset(of_process) for pid, of_process in paths.items()}
        return {}

    def freeze_threads(self, timeout: float, insist: bool, pid: int = 0) -> dict[str, Any]:
        """Freeze the threads of a process, by default the kernel, but the CUDA driver's."""
        self.frozen_threads(pid or self.kernel).freeze_all(time.monotonic() + timeout, insist=insist)
        return {}

    def freeze_threads_in_driver(self, pid: int = 0) -> dict[str, Any]:
        self.frozen_threads(pid or self.kernel).freeze_waiting_in_driver()
        return {}

    def freeze_callers(self, timeout: float, pid: int = 0) -> dict[str, Any]:
        """Freeze the threads of a process, by default the kernel, that could call the CUDA driver."""
        self.frozen_threads(pid or self.kernel).freeze_callers(time.monotonic() + timeout)
        return {}

    def unfreeze_threads(self, all: bool = False, pid: int = 0) -> dict[str, Any]:
        """Let the frozen threads of a process run, by default the kernel's, or those of all processes."""
        for each in [*self.frozen] if all else [pid or self.kernel]:
            if (frozen := self.frozen.pop(each, None)) is not None:
                frozen.release()
        return {}

    def own_mounts(self) -> list[procfs.Mount]:
        """Return the kernel's own mounts; an ordinary user's kernel cannot mount."""
        from jupyter_gpu_ckpt.process import inventory

        if self.rootless:
            return []
        with open(self.host_mounts, errors="surrogateescape", closefd=False) as file:
            file.seek(0)
            on_host = procfs.parse_mounts(file.read())
        return inventory.own_mounts(procfs.mounts(), self.mounted, on_host)

    def host_memory(self) -> None:
        """Answer with a descriptor of a directory in host memory, made on first use."""
        if self.memory_directory < 0:
            with self.mounting():
                path = namespaces.mount_host_memory(self.directory)
                self.memory_directory = os.open(path, os.O_DIRECTORY | os.O_CLOEXEC)
        self.answer({}, self.memory_directory)

    def inspect(self, allow_unconfined: bool) -> None:
        """Answer with a descriptor of a file that has `inventory.Found` of the kernel's processes as JSON."""
        from jupyter_gpu_ckpt.process import inventory

        if not self.kernel:
            raise RuntimeError("this capsule has no kernel")
        stopped = self.stopped is not None
        root, own = root_of(self.kernel), self.own_mounts()
        found = inventory.inspect(root, stopped, allow_unconfined, own, kernel=self.kernel)
        for pid in self.stopped.were_stopped() if self.stopped is not None else ():
            found.notes.setdefault(str(pid), {})["stopped"] = True
        for pid, locks in self.stopped.locks().items() if self.stopped is not None else ():
            found.notes.setdefault(str(pid), {})["locks"] = locks
        for pid, notes in self.preparation.notes().items() if self.preparation is not None else ():
            found.notes.setdefault(str(pid), {}).update(notes)
        with os.fdopen(os.memfd_create("state"), "wb") as file:  # more than a packet may hold
            file.write(json.dumps(vars(found)).encode())
            file.flush()
            self.answer({}, file.fileno())

    def reapply(self, notes: dict[str, Any]) -> dict[str, Any]:
        from jupyter_gpu_ckpt.process import file_locks, reapply

        vital, failed = reapply.reapply(notes)
        locks = file_locks.reapply(notes)  # last: until then descriptors are closed
        self.stay_stopped = {int(pid) for pid, of_process in notes.items() if of_process.get("stopped")}
        return {"vital": vital, "failed": failed, "locks": locks}

    def lock_databases(self, databases: list[dict[str, Any]]) -> dict[str, Any]:
        """Lock databases (`sqlite_wal.lock_database`) until the kernel has its locks; answer which failed, and why."""
        from jupyter_gpu_ckpt.process import sqlite_wal

        self.close_databases()
        try:
            self.database_fds = sqlite_wal.lock_databases(databases)
        except sqlite_wal.DatabaseLocked as error:
            return {"locked": error.filename}
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            return {"changed": error.filename, "why": error.strerror}
        return {}

    def close_databases(self) -> None:
        """Release the locks of `lock_databases`."""
        for descriptor in self.database_fds:
            os.close(descriptor)
        self.database_fds = []

    def clocks(self) -> dict[str, Any]:
        return namespaces.Clocks.now()._asdict()

    def outlive(self, outlive: bool) -> dict[str, Any]:
        self.may_outlive = outlive
        return {}

    def keep_fd(self, fd: int) -> dict[str, Any]:
        """Keep the descriptor that came with the request, and close those whose files were removed."""
        for old in [each for each in self.kept_fds if os.fstat(each).st_nlink == 0]:
            self.kept_fds.remove(old)
            os.close(old)
        self.kept_fds.append(fd)
        return {}

    #: An allow-list: requests come from another process.  A method that returns None answers by itself, or later.
    REQUESTS: ClassVar[dict[str, Callable[..., dict[str, Any] | None]]] = {
        "spawn": spawn,
        "run": run,
        "cancel_criu": cancel_criu,
        "resume_processes": resume_processes,
        "attach_kernel": attach_kernel,
        "status": status,
        "end": end,
        "outlive": outlive,
        "note_inherited_files": note_inherited_files,
        "freeze_threads": freeze_threads,
        "freeze_threads_in_driver": freeze_threads_in_driver,
        "freeze_callers": freeze_callers,
        "unfreeze_threads": unfreeze_threads,
        "host_memory": host_memory,
        "inspect": inspect,
        "reapply": reapply,
        "lock_databases": lock_databases,
        "clocks": clocks,
        "keep_fd": keep_fd,
    }

    def answer_kernel(self) -> None:
        """Name the kernel by pid and pidfd; from here on only the kernel holds the writing ends of its pipes."""
        for pipe in self.pipes:
            if pipe.writer >= 0:  # closed already when a later owner attaches the kernel again
                os.close(pipe.writer)
                pipe.writer = -1
        pidfd = os.pidfd_open(self.kernel)
        self.answer({"pid": self.kernel, "pipes": [pipe.inode for pipe in self.pipes]}, pidfd)
        os.close(pidfd)

    def fork(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: str | None,
        fds: list[int],
        *,
        capable: bool,
        root_program: str = "",
        begin: Callable[[int], object] | None = None,
    ) -> int:
        """Start a program as the leader of its own session, with ``fds`` as its descriptors from 1 on and no other.

        ``root_program``: of a process that is to be its parent (`root_process`) in place of this one.  ``begin``:
        called with the process before it becomes the program; if it raises, the process is killed.
        """
        pipes: list[tuple[int, int]] = []
        try:
            for _ in range(3):
                pipes.append(os.pipe2(os.O_CLOEXEC))
            pid = parent = os.fork()
        except OSError:
            for pipe in pipes:
                for end in pipe:
                    os.close(end)
            raise
        (failure, report), (child, below), (may_begin, begins) = pipes
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                os.close(begins)
                os.read(may_begin, 1)  # until it is closed
                if root_program:
                    fork_below(root_program, below)
                self.execute(argv, env, cwd, [os.open("/dev/null", os.O_RDONLY), *fds], report, capable)
            except BaseException as error:
                os.write(report, f"{type(error).__name__}: {error}".encode())
                os._exit(127)
        for descriptor in (report, below, may_begin):
            os.close(descriptor)
        with open(begins, "wb"):
            text = _failure(lambda: begin(pid)) if begin is not None else ""
            if text:
                os.kill(pid, signal.SIGKILL)
        with open(failure, "rb") as file, open(child, "rb") as number:
            text = file.read().decode(errors="replace") or text
            pid = int(number.read() or pid)
        if text:
            for ended in dict.fromkeys((parent, pid)):  # the root process first: it ends with its child
                os.waitpid(ended, 0)
            raise OSError(f"{argv[0]}: {text}")
        return pid

    def execute(
        self, argv: list[str], env: dict[str, str], cwd: str | None, fds: list[int], report: int, capable: bool
    ) -> None:
        """Replace this process, a fresh child, by a program; a failure goes to ``report``."""
        os.setsid()
        # Signals that are ignored here would stay ignored in the program.  Python and the init ignore some, and so does
        # the process that has started the server: a shell's background job ignores SIGQUIT.
        for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(each, signal.SIG_DFL)
        if capable:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # see `expire`
            descriptors.raise_limit()
        if self.rootless and capable:
            syscalls.raise_ambient()
        elif self.rootless:
            # A notebook's kernel is an ordinary process, without capabilities.
            syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
        # Two moves, so that no target number is overwritten before it was copied.  Everything else is close-on-exec.
        floor = len(fds) + 1
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor) for fd in [*fds, report]]
        for number, fd in enumerate(moved[:-1]):
            os.dup2(fd, number)
        if cwd:
            os.chdir(cwd)
        try:
            os.execvpe(argv[0], argv, env)  # noqa: S606 - an argument list, never a shell line
        except OSError as error:
            os.write(moved[-1], f"{type(error).__name__}: {error}".encode())
            os._exit(127)


def _import_rest() -> None:
    """Import what requests import where they need it, while the kernel starts or CRIU runs: none waits for it then.

    Never raises: a failure is met again where it is needed, and that request is answered with it.
    """
    with contextlib.suppress(Exception):
        from jupyter_gpu_ckpt.capsule import criu_guard  # noqa: F401
        from jupyter_gpu_ckpt.process import inventory, preparation, reapply  # noqa: F401


def _is_ready(descriptor: int) -> bool:
    """Return whether a descriptor can be read.  Not ``select``, which takes none above 1023."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
