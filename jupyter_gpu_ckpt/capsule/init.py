"""PID 1 of a capsule: makes the namespaces, starts the kernel and CRIU, reaps, forwards the kernel's raw output.

Run as a script (``python -I -S init.py '<json>'``) by `capsule.Capsule`; never imported by the server.  It
uses the standard library only and opens nothing it does not need: whatever the kernel inherits from here must be
restorable.

The owner speaks to it over a SEQPACKET unix socket, one JSON object a packet (or, where it is larger than a packet can
be, in a file whose descriptor comes with an empty object), answers in order, each with the version of the protocol
(`protocol`) and the number of its request:

``spawn``   start the kernel                        -> ``{"pid", "pipes"}`` and a pidfd
``run``     run a program (CRIU) to its end         -> ``{"status", "timed_out", "seconds", "unmended"}``
``adopt``   take a restored process as the kernel   -> ``{"pid"}`` and a pidfd
``status``  exit status of the kernel               -> ``{"status": int | null, "tidying": bool}``
``end``     end the kernel                          -> ``{}``
``hurry``   the program is overdue as of now        -> no answer
``go_on``   undo a dump's stop                      -> ``{}``
``park``    stop the kernel's threads (`freezer`)   -> ``{"threads"}``, how many
``shield``  stop those that wait in the CUDA driver -> ``{"threads"}``, how many are stopped
``unpark``  let them go on                          -> ``{}``
``arena``   a file system in memory (`namespaces`) -> ``{}`` with a descriptor of its directory
``inspect`` state of the processes (`inventory`) -> ``{}`` with a descriptor of a file of JSON
``put_back`` what CRIU forgets (`reapply`)    -> ``{"vital", "failed"}``, what could not be, in words
``clocks``  the capsule's clocks                    -> ``{"monotonic", "boottime"}`` in nanoseconds
``outlive`` keep running when the owner goes        -> ``{}``
``hold``    keep the descriptor that comes with it  -> ``{}``
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import resource
import selectors
import signal
import socket
import sys
import time
from typing import Any

sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule import namespaces
from jupyter_gpu_ckpt.capsule.criu_guard import Rescue, unguard
from jupyter_gpu_ckpt.capsule.protocol import VERSION
from jupyter_gpu_ckpt.capsule.stdio import Pipe
from jupyter_gpu_ckpt.process import inventory, reapply, syscalls
from jupyter_gpu_ckpt.process.freezer import Parking
from jupyter_gpu_ckpt.process.ptrace import MACHINE, let_go
from jupyter_gpu_ckpt.process.ptrace import PATIENCE as STOP
from jupyter_gpu_ckpt.process.terminals import Terminals, Unsupported

PACKET = 1 << 20
#: How long a capsule without an owner waits for one, in seconds.
PATIENCE = 15.0
#: How long resource trackers may tidy up behind a kernel that has ended, in seconds; its other children half of it.
TIDY = 2.0
_TRACKER = re.compile(r"\b(resource|semaphore)_tracker\b")


class Init:
    """The event loop of PID 1."""

    def __init__(self, listener: socket.socket, rootless: bool, directory: str, outside: int) -> None:
        self.listener = listener
        #: The mount table of the host: a file shows that of the namespace it was opened in.
        self.outside = outside
        self.mounted = procfs.mounts()
        self.directory = directory
        self.arena = -1
        self.rootless = rootless
        self.owner: socket.socket | None = None
        self.outlive = False
        #: Descriptors that the owner gave us to hold; the locks on their files end with the capsule.
        self.held: list[int] = []
        #: Of the request being answered: the owner tells by it a late answer from the one it waits for.
        self.number = 0
        self.kernel = 0
        self.kernel_status: int | None = None
        #: When it had ended, by the monotonic clock.
        self.kernel_ended = 0.0
        #: Whether there may be an image of it, which needs what its resource trackers would remove.
        self.imaged = False
        self.job: dict[str, Any] | None = None
        #: Of a dump that went well: the processes that it left stopped.
        self.stopped: Rescue | None = None
        #: What was under way in the terminals of those processes.
        self.terminals: Terminals | None = None
        #: Threads of the kernel, while device memory is on its way: also without an owner, for they must not touch it.
        #: And while its CUDA state is suspended, those that wait in the driver's code.
        self.parked: Parking | None = None
        self.selector = selectors.DefaultSelector()
        self.deadline = time.monotonic() + PATIENCE
        self.pipes: list[Pipe] = []
        for target in (1, 2):
            self.pipes.append(Pipe(target, self.selector))
        waker, wakeup = socket.socketpair()
        for end in (waker, wakeup):
            end.setblocking(False)
        self.waker = waker
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        self._wakeup = wakeup
        self.selector.register(waker, selectors.EVENT_READ, "child")
        self.selector.register(listener, selectors.EVENT_READ, "connect")

    # -- the loop

    def serve(self) -> int:
        """Until the owner has gone (and we may not outlive it), or nobody came."""
        while True:
            wait = 0.02 if self.owner is None and self.kernel_status is not None else 1.0
            if self.job:
                wait = min(wait, max(0.0, self.job["deadline"] - time.monotonic()))
            for key, _ in self.selector.select(wait):
                if key.data == "connect":
                    self.connect()
                elif key.data == "child":
                    with contextlib.suppress(BlockingIOError):
                        self.waker.recv(4096)
                elif key.data == "owner":
                    if not self.hear():
                        self.drop_owner()
                else:
                    key.data()
            self.reap()
            if self.job and time.monotonic() >= self.job["deadline"]:
                self.hurry(self.job)
            forsaken = self.owner is None and time.monotonic() >= self.deadline
            if forsaken and (not self.outlive or self.kernel_status is not None) and not self.keeps_us():
                return 0

    def keeps_us(self) -> bool:
        """Nobody wants the kernel: end it, if it lives.  Whether it, or what tidies up behind it, is still to end."""
        if self.imaged or not self.kernel:
            return False
        if self.kernel_status is not None:
            return self.tidying()
        self.do_end()
        return time.monotonic() < self.kernel_ended + TIDY

    def tidying(self) -> bool:
        """Whether resource trackers still remove what the kernel, which has ended, left behind.

        They begin when the last process has ended that could register anything with them.
        """
        if self.kernel_status is None:
            return False
        trackers, others = self.others()
        waited = time.monotonic() - self.kernel_ended
        if waited > TIDY / 2:
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return bool(trackers) and waited < TIDY

    @staticmethod
    def others() -> tuple[list[int], list[int]]:
        """The pids of the capsule's living processes but for this one: resource trackers, and all others."""
        found: tuple[list[int], list[int]] = [], []
        for pid in procfs.pids():
            if pid != os.getpid():
                with contextlib.suppress(OSError):
                    if command := procfs.arguments(pid):  # of a zombie there is none
                        found[_TRACKER.search(" ".join(command)) is None].append(pid)
        return found

    def hurry(self, job: dict[str, Any]) -> None:
        """End a program that is overdue: by an error it can handle if it has a grace, after that by SIGKILL.

        A file size limit makes CRIU's next write fail, as a full disk would, and it takes everything back by itself,
        and also what `Rescue` cannot see: names it gave to deleted files, for instance.
        """
        grace = 0.0 if job["timed_out"] else job["grace"]
        job["timed_out"] = True
        job["deadline"] = time.monotonic() + grace if grace else math.inf
        with contextlib.suppress(ProcessLookupError):
            if grace:
                resource.prlimit(job["pid"], resource.RLIMIT_FSIZE, (0, 0))
            else:
                os.killpg(job["pid"], signal.SIGKILL)

    def connect(self) -> None:
        if self.owner is None and self.job:
            return  # the last owner went a moment ago: see `drop_owner`
        connection, _ = self.listener.accept()
        if self.owner is not None:
            connection.close()
            return
        self.owner = connection
        self.selector.register(connection, selectors.EVENT_READ, "owner")

    def drop_owner(self) -> None:
        """The owner has gone: what it was in the middle of is taken back before another one is heard."""
        if self.owner is None:
            return
        self.selector.unregister(self.owner)
        self.owner.close()
        self.owner = None
        self.deadline = time.monotonic()
        self.go_on_alone()
        if self.job:
            self.selector.unregister(self.listener)
            self.do_hurry()

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            kept = let_go(pid, status)
            if os.WIFSTOPPED(status):
                if kept:  # a thread of the kernel
                    continue
                # A child of a CRIU that was killed, come to us just before it asked its parent to trace it.
                os.kill(pid, signal.SIGKILL)
                continue
            code = os.waitstatus_to_exitcode(status)
            if pid == self.kernel:
                self.kernel_status = code
                self.kernel_ended = time.monotonic()
            elif self.job and pid == self.job["pid"]:
                job, self.job = self.job, None
                seconds = time.monotonic() - job["began"]
                told = {"status": code, "timed_out": job["timed_out"], "seconds": seconds}
                lost = self.refill_terminals() if code != 0 else ""  # before the processes run on
                unmended = self.conclude(job, code) or lost
                if code == 0 and not job["rescue"]:
                    unmended = self.fill_terminals(job)
                self.stopped = job["rescue"] if code == 0 else None
                if self.owner is None:
                    self.go_on_alone()
                    self.selector.register(self.listener, selectors.EVENT_READ, "connect")
                self.answer({"number": job["number"], **told, "unmended": unmended})

    def go_on_alone(self) -> None:
        """Undo a dump's stop for an owner that is gone.  A failure is written to our stderr: our end would be worse."""
        try:
            self.do_go_on()
        except Exception as error:
            with contextlib.suppress(OSError):
                print(f"gpu-ckpt-init: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def fill_terminals(self, job: dict[str, Any]) -> str:
        """After a restore, before the processes run: put into their terminals what was under way.

        What is lost of it, in words: that must not keep the kernel from coming back.
        """
        if not job["terminals"]:
            return ""
        try:
            terminals = Terminals()
            try:
                terminals.read(job["terminals"])
                lost = terminals.put_back()
            finally:
                terminals.close()
        except Exception as error:
            lost = f"{type(error).__name__}: {error}"
        return f"terminals: {lost}" if lost else ""

    def empty_terminals(self, path: str) -> None:
        """Before a dump, of stopped processes: take out what is under way in their terminals, and write it to a file.

        After failure nothing is taken out.  Raises `OSError`.
        """
        self.terminals = Terminals()
        try:
            self.terminals.take_out()
            self.terminals.write(path)
        except BaseException:
            self.refill_terminals()
            raise

    def refill_terminals(self) -> str:
        """Undo `empty_terminals`: the dump failed, or is taken back.  Why not, if not: the processes run on anyhow."""
        terminals, self.terminals = self.terminals, None
        if terminals is None:
            return ""
        try:
            lost = terminals.put_back()
        except Exception as error:
            lost = f"{type(error).__name__}: {error}"
        finally:
            terminals.close()
        return f"terminals: {lost}" if lost else ""

    @staticmethod
    def conclude(job: dict[str, Any], code: int) -> str:
        """After a dump: what CRIU left is made good.  Why not, if not: that must not end the kernel, as our end would.

        It is also written below what CRIU said, for a dump that went well has nobody who asks.
        """
        rescue: Rescue | None = job["rescue"]
        if rescue is None:
            return ""
        try:
            rescue.conclude(well=code == 0)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            with contextlib.suppress(OSError), open(job["output"], "a") as file:
                file.write(f"Error: what CRIU left in the kernel is not made good: {why}\n")
            return why
        return ""

    # -- requests

    def hear(self) -> bool:
        assert self.owner is not None
        try:
            packet, fds, _, _ = socket.recv_fds(self.owner, PACKET, 1)
        except OSError:
            return False
        for fd in fds:
            os.set_inheritable(fd, False)
        if fds and packet == b"{}":
            with open(fds.pop(), "rb") as file:
                file.seek(0)
                packet = file.read()
        if not packet:
            return False
        try:
            request = {**json.loads(packet), **({"fd": fds[0]} if fds else {})}
            self.number = request.pop("number", 0)
            if (version := request.pop("version", None)) != VERSION:
                raise RuntimeError(f"the request is of version {version}")
            getattr(self, "do_" + request.pop("verb"))(**request)
        except Unsupported as error:
            self.answer({"unsupported_terminal": error.strerror})
        except Exception as error:
            self.answer({"error": f"{type(error).__name__}: {error}", "errno": getattr(error, "errno", None)})
        return True

    def answer(self, reply: dict[str, Any], *fds: int) -> None:
        if self.owner is None:
            return
        packet = json.dumps({"version": VERSION, "number": self.number, **reply}).encode()
        try:
            socket.send_fds(self.owner, [packet], list(fds))
        except OSError:
            self.drop_owner()

    def do_spawn(self, argv: list[str], env: dict[str, str], cwd: str | None, first_pid: int) -> None:
        if self.kernel:
            raise RuntimeError("this capsule has a kernel already")
        # The kernel's pid and thread ids start high, so that CRIU's own processes take low ones and never the kernel's.
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(first_pid - 1))
        self.kernel = self.fork(argv, env, cwd, capable=False, stdio=[pipe.writer for pipe in self.pipes])
        self.answer_kernel({"pipes": [pipe.inode for pipe in self.pipes]})

    def do_run(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: str,
        timeout: float,
        output: str,
        inherit_pipes: bool = False,
        grace: float = 0.0,
        on_kernel: bool = False,
        terminals: str = "",
    ) -> None:
        if self.job:
            raise RuntimeError("a program is running already")
        rescue = Rescue(self.kernel, time.monotonic() + STOP, self.parked) if on_kernel else None
        try:
            if rescue is not None and terminals:
                self.empty_terminals(terminals)
            pid = self.start(argv, env, cwd, output, inherit_pipes)
        except BaseException:
            if rescue is not None:
                self.refill_terminals()
                rescue.conclude(well=False)
            raise
        self.imaged = True
        began = time.monotonic()
        self.job = {
            "pid": pid,
            "began": began,
            "deadline": began + timeout,
            "grace": grace,
            "timed_out": False,
            "number": self.number,
            "rescue": rescue,
            "output": output,
            "terminals": terminals,
        }

    def start(self, argv: list[str], env: dict[str, str], cwd: str, output: str, inherit_pipes: bool) -> int:
        log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            extra = [pipe.writer for pipe in self.pipes] if inherit_pipes else []
            return self.fork(argv, env, cwd, capable=True, stdio=[log, log], extra=extra)
        finally:
            os.close(log)

    def do_adopt(self, pid: int, park: bool = False) -> None:
        os.kill(pid, 0)
        if pid != self.kernel:
            self.kernel = pid
            unguard(pid, self.parking() if park else None)
        self.answer_kernel({"pipes": [pipe.inode for pipe in self.pipes]})

    def do_status(self) -> None:
        self.reap()  # the owner may have seen the kernel's end before our own signal arrived
        self.answer({"status": self.kernel_status, "kernel": self.kernel, "tidying": self.tidying()})

    def do_end(self) -> None:
        if self.kernel and self.kernel_status is None:
            self.kernel_ended = self.kernel_ended or time.monotonic()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.kernel, signal.SIGKILL)
        self.answer({})

    def do_hurry(self) -> None:
        if self.job and not self.job["timed_out"]:
            self.hurry(self.job)

    def do_go_on(self) -> None:
        stopped, self.stopped = self.stopped, None
        if stopped is not None:
            self.refill_terminals()
            stopped.go_on()
        self.answer({})

    def parking(self) -> Parking:
        """The kernel's threads that are parked, or are to be."""
        if self.parked is None:
            if MACHINE is None:
                raise OSError(errno.ENOTSUP, "threads cannot be parked on this machine")
            self.parked = Parking(MACHINE, self.kernel)
        return self.parked

    def do_park(self, patience: float, insist: bool) -> None:
        parking = self.parking()
        parking.everybody(time.monotonic() + patience, insist=insist)
        self.answer({"threads": len(parking)})

    def do_shield(self) -> None:
        parking = self.parking()
        parking.waiting_in_driver()
        self.answer({"threads": len(parking)})

    def do_unpark(self) -> None:
        parked, self.parked = self.parked, None
        if parked is not None:
            parked.leave()
        self.answer({})

    def own_mounts(self) -> list[procfs.Mount]:
        """What the kernel has mounted: an ordinary user's has no right to."""
        if self.rootless:
            return []
        with open(self.outside, errors="surrogateescape", closefd=False) as file:
            file.seek(0)
            outside = procfs.parse_mounts(file.read())
        return inventory.own_mounts(procfs.mounts(), self.mounted, outside)

    def do_arena(self) -> None:
        if self.arena < 0:
            before = procfs.mounts()
            self.arena = os.open(namespaces.mount_arena(self.directory), os.O_DIRECTORY | os.O_CLOEXEC)
            self.mounted += [mount for mount in procfs.mounts() if mount not in before]
        self.answer({}, self.arena)

    def do_inspect(self, allow_unconfined: bool) -> None:
        if not self.kernel:
            raise RuntimeError("this capsule has no kernel")
        found = inventory.inspect(
            self.kernel,
            stopped=self.stopped is not None,
            allow_unconfined=allow_unconfined,
            own=self.own_mounts(),
        )
        with os.fdopen(os.memfd_create("state"), "wb") as file:  # more than a packet may hold
            file.write(json.dumps(found.as_dict()).encode())
            file.flush()
            self.answer({}, file.fileno())

    def do_put_back(self, notes: dict[str, Any]) -> None:
        vital, failed = reapply.put_back(notes)
        self.answer({"vital": vital, "failed": failed})

    def do_clocks(self) -> None:
        self.answer({"monotonic": time.monotonic_ns(), "boottime": time.clock_gettime_ns(time.CLOCK_BOOTTIME)})

    def do_outlive(self, outlive: bool) -> None:
        self.outlive = outlive
        self.answer({})

    def do_hold(self, fd: int) -> None:
        for old in [each for each in self.held if os.fstat(each).st_nlink == 0]:
            self.held.remove(old)
            os.close(old)
        self.held.append(fd)
        self.answer({})

    def answer_kernel(self, reply: dict[str, Any]) -> None:
        """Name the kernel by pid and pidfd; from here on only the kernel holds the writing ends of its pipes."""
        for pipe in self.pipes:
            if pipe.writer >= 0:  # closed already when a later owner adopts the kernel again
                os.close(pipe.writer)
                pipe.writer = -1
        pidfd = os.pidfd_open(self.kernel)
        self.answer({"pid": self.kernel, **reply}, pidfd)
        os.close(pidfd)

    def fork(
        self,
        argv: list[str],
        env: dict[str, str],
        cwd: str | None,
        *,
        capable: bool,
        stdio: list[int],
        extra: list[int] | None = None,
    ) -> int:
        """Start a program as the leader of its own session with fds 0-2 (and ``extra`` from 3 on) and no other."""
        failure, report = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                fds = [os.open("/dev/null", os.O_RDONLY), *stdio, *(extra or [])]
                self.become(argv, env, cwd, capable, fds, report)
            except BaseException as error:
                os.write(report, f"{type(error).__name__}: {error}".encode())
                os._exit(127)
        os.close(report)
        with open(failure, "rb") as file:
            text = file.read().decode(errors="replace")
        if text:
            os.waitpid(pid, 0)
            raise OSError(f"{argv[0]}: {text}")
        return pid

    def become(
        self, argv: list[str], env: dict[str, str], cwd: str | None, capable: bool, fds: list[int], report: int
    ) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        # What is ignored here would stay ignored in the program: by Python, by init, or by whoever started the server:
        # a shell's background job ignores SIGQUIT.
        for each in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(each, signal.SIG_DFL)
        if capable:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # see `hurry`
        if self.rootless:
            if capable:
                syscalls.raise_ambient(syscalls.CAPABILITIES_FOR_CRIU)
            else:
                syscalls.clear_ambient()
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


def close_inherited(keep: int) -> None:
    """No descriptor of the owner but 0-2 (and the one we report on) enters the capsule."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


def main(argument: str) -> int:
    """Make the capsule; the outcome goes to the descriptor ``report`` as one JSON object."""
    options = json.loads(argument)
    report = options["report"]
    close_inherited(report)
    os.set_inheritable(report, False)
    rootless = os.geteuid() != 0
    at = "namespaces"
    try:
        directory = os.open(options["directory"], os.O_DIRECTORY | os.O_CLOEXEC)
        outside = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        namespaces.enter_namespaces(rootless, options["monotonic_ns"], options["boottime_ns"])
        pid = os.fork()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if pid:
            os.close(directory)
            os.close(outside)
            os.close(report)
            return wait_for_init(pid)
        at = "init"
        os.setsid()
        syscalls.set_name("gpu-ckpt-init")
        namespaces.mount_proc()
        with contextlib.suppress(OSError):
            namespaces.mount_terminals(rootless)
        if options.get("known_as"):
            at = "directory"
            # Opened again: what is bound must be seen in this mount namespace.
            again = os.open(options["directory"], os.O_DIRECTORY | os.O_CLOEXEC)
            namespaces.mount_under_old_path(again, options["known_as"])
            os.close(again)
        # Through the directory's descriptor: the path of a unix socket may have 107 bytes, ours may be longer.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"/proc/self/fd/{directory}/capsule.sock")
        listener.listen(4)
        os.close(directory)
        os.chdir("/")
        init = Init(listener, rootless, options.get("known_as") or options["directory"], outside)
    except OSError as error:
        os.write(report, json.dumps({"error": str(error), "errno": error.errno, "at": at}).encode())
        return 1
    os.write(report, b"{}")
    os.close(report)
    return init.serve()


def wait_for_init(pid: int) -> int:
    """The outer process is there for its owner to wait for; PID 1 is its child, in the new namespaces."""
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    syscalls.set_name("gpu-ckpt-outer")
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
