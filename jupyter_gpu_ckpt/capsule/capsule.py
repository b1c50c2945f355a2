"""A capsule: the user, pid, mount and time namespaces one kernel lives in, and a connection to its init.

The namespaces make a kernel relocatable (its pids are free wherever it is restored, its monotonic clock continues) and
rootless (in a user namespace that maps the caller's own uid CRIU has the rights it needs, over the caller's own
processes only).  When the caller is root there is no user namespace, and nothing else differs.

A capsule ends with its owner: when the connection breaks, its init exits, and Linux ends every process of a pid
namespace whose init has ended.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import procfs
from ..errors import (
    CapsuleError,
    CapsuleGone,
    ChangedFile,
    DeletedMapping,
    GpuCkptError,
    KernelBusy,
    LimitReached,
    LockTaken,
    LoopbackTcp,
    NoMemory,
    NoSpace,
    ProtocolVersion,
    RuntimeDirectory,
    UnprovenState,
    UnsupportedFile,
    UnsupportedTerminal,
)
from . import root_program
from .namespaces import UNSHIFTED, Clocks
from .protocol import PACKET_BYTES, SOCKET, VERSION

#: Deadline of a request that the init answers at once, in seconds.
ANSWER = 10.0
#: Deadline of the init's first report, in seconds: a Python starts, makes namespaces and mounts, and sees every
#: process start beside it.  A kernel that is started without a capsule because of a busy minute can never sleep.
START = 60.0
#: Seconds that a dump has to take everything back when it is overdue, or its owner has gone.
GRACE = 10.0
#: Seconds that `Capsule` waits for the resource trackers of a kernel that has ended: a little more than they get.
CLEANUP_TIMEOUT = 2.5
#: Deadline of an inspection of every thread, descriptor and mapping of the kernel, in seconds.
_INSPECTION = 60.0
#: Bytes of a request that are sent as one packet.
_PACKET = 1 << 16
#: Fields of a reply that name state that a dump cannot save (`init`): the error's class, its sentence, its hint.
_UNSAVABLE: Mapping[str, tuple[type[GpuCkptError], str, str | None]] = {
    "unsupported_terminal": (UnsupportedTerminal, "The kernel's terminals could not come back: {}.", None),
    "unsupported_file": (UnsupportedFile, "The kernel has {}.", None),
    "unsavable_connection": (LoopbackTcp, "The kernel has {}.", None),
    "deleted_mapping": (DeletedMapping, "The kernel's processes share a deleted file: {}.", None),
    "does_not_stop": (
        KernelBusy,
        "A process of the kernel cannot be stopped for a checkpoint: {}.",
        "Try again when it has done what it waits for. A process that a disk or a device does not answer waits, too.",
    ),
    "dispatches_calls": (
        UnprovenState,
        "The kernel has a thread that gets its system calls as signals (PR_SET_SYSCALL_USER_DISPATCH), in {}: that "
        "would not come back from a checkpoint.",
        "End that process (programs under Wine do this).",
    ),
}
_INIT = Path(__file__).with_name("run_init.py")
#: What follows the name of a kernel's directory in that of one beside it (`Capsule.create`).
_BESIDE = ".capsule-"
#: struct ucred: process, user, group (unix(7), SO_PEERCRED).
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True)
class Ran:
    """The end of a program inside: exit status (negative: the signal), and why the kernel is ``unrepaired``, if so.

    ``ended``: pids, in the capsule, of the kernel's descendants that were killed meanwhile.
    """

    status: int
    timed_out: bool
    seconds: float
    unrepaired: str = ""
    ended: Sequence[int] = ()


def first_pid() -> int:
    """Choose the pid a kernel starts at: CRIU's helpers, which take the next low ones, never reach it.

    Drawn at random: programs name files after their pid (``/tmp/ipykernel_8192``), and another user's kernel with the
    same pid would find that name taken, for ever.
    """
    pid_max = int(procfs.sysctl("kernel.pid_max") or 32768)
    return random.randrange(min(pid_max // 4, 100_000), pid_max // 2)  # noqa: S311 - nobody must not guess it


def _make_beside(directory: Path) -> Path:
    """Make a directory beside a kernel's, for another capsule, with the files that the kernel finds there."""
    made = Path(tempfile.mkdtemp(prefix=f"{directory.name}{_BESIDE}", dir=directory.parent))
    for path in directory.iterdir():
        if path.suffix == ".json" and path.is_file():
            with contextlib.suppress(OSError):
                (made / path.name).hardlink_to(path)
    return made


def remove_beside(directory: Path, but: Path | None = None) -> None:
    """Remove what capsules beside a kernel's ``directory`` have left, whose servers were killed.  Never raises.

    ``but``: the directory of one that lives.
    """
    for path in directory.parent.glob(f"{glob.escape(directory.name + _BESIDE)}*"):
        if path != but:
            _remove_links(directory, path.name)
            shutil.rmtree(path, ignore_errors=True)


def _own_directory(directory: Path) -> Path:
    """Return the directory of the capsule that a kernel's ``directory`` has or leads to."""
    with contextlib.suppress(OSError):
        name = (directory / SOCKET).readlink().parent.name
        if name.startswith(directory.name + _BESIDE):
            return directory.with_name(name)
    return directory


def _remove_links(directory: Path, name: str) -> None:
    """Remove the links in ``directory`` to the sockets in the one beside it of this name.  Never raises."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.is_symlink() and path.readlink().parent == Path("..", name):
                path.unlink()


class Capsule(contextlib.AbstractContextManager["Capsule"]):
    """One capsule, from `create` to `close`.  Thread-safe: requests queue behind one lock."""

    def __init__(self, directory: Path) -> None:
        #: The kernel's directory; and the capsule's: the same, or one beside it, if another capsule lived in that.
        self.kernel_directory = self.directory = directory
        self._outer: subprocess.Popen[bytes] | None = None
        #: PID 1 of the capsule: a pidfd, and its process id here.  It ends when all other processes have ended.
        self._init_fd = -1
        self._init_pid = 0
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._number = 0
        self._pidfd = -1
        self._status: int | None = None
        self.inner_pid = 0
        self.host_pid = 0
        self.pipes: list[int] = []

    # -- life

    @classmethod
    def create(
        cls,
        directory: Path,
        *,
        offsets: Clocks = UNSHIFTED,
        known_as: Path | None = None,
        sockets: Path | None = None,
        private: Sequence[str] = (),
        stdout: int | Any = None,
        stderr: int | Any = None,
        beside: bool = False,
    ) -> Capsule:
        """Make the namespaces and wait for their init, whose socket lies in the existing 0700 ``directory``.

        ``offsets`` are added to the host's clocks inside: `Clocks` of the dump minus `Clocks` now.  ``known_as``: the
        path at which the kernel finds ``directory``, if it comes from a host where that was another.  ``sockets``: a
        path for a socket of the kernel; its directory is another name of ``directory``, too.  ``private``: paths of
        directories that the capsule has of its own (`private_directories`).  ``stdout`` and ``stderr`` get the kernel's
        raw output, as for `subprocess.Popen`; by default the caller's own.  ``beside``: another capsule lives in the
        directory: this one gets its own, which its processes find in the place of that, and which no other owner finds
        before `replace_other`.  Raises `CapsuleError`, or `CapsuleGone` when its init is killed at once; nothing is
        left behind then.
        """
        capsule = cls(directory)
        try:
            remove_beside(directory, but=_own_directory(directory) if beside else directory)
            if beside:
                capsule.directory = _make_beside(directory)
            else:
                (directory / SOCKET).unlink(missing_ok=True)
        except OSError as error:
            raise RuntimeDirectory(f"{directory} cannot be written: {error.strerror}.") from error
        known_as = known_as or directory
        report, reported = os.pipe()
        options = {
            "directory": str(capsule.directory),
            "monotonic_ns": offsets.monotonic,
            "boottime_ns": offsets.boottime,
            "known_as": str(known_as) if known_as != capsule.directory else "",
            "sockets": str(sockets.parent) if sockets else "",
            "private": [*private],
            "report": reported,
        }
        try:
            capsule._outer = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_INIT), json.dumps(options)],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[reported],
                start_new_session=True,
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"},
            )
        except OSError as error:
            os.close(report)
            remove_beside(directory, but=_own_directory(directory))
            raise CapsuleError(f"The capsule's init could not be started: {error}") from error
        finally:
            os.close(reported)
        try:
            capsule._read_report(report)
            capsule._connect()
        except BaseException:
            capsule.close()
            raise
        return capsule

    def _read_report(self, report: int) -> None:
        with open(report, "rb") as file:
            if not _ready([file.fileno()], START):
                raise CapsuleError("The capsule's init did not report in time.")
            text = file.read()
        if not text:
            raise CapsuleError("The capsule's init ended before it reported; its stderr says why.")
        answer = json.loads(text)
        if "error" in answer:
            raise CapsuleError(f"The {answer['at']} of the capsule could not be made: {answer['error']}", **answer)

    @classmethod
    def attach(cls, directory: Path) -> Capsule:
        """Become the owner of a capsule that outlived its last one.  Raises `CapsuleGone`, `ProtocolVersion`."""
        capsule = cls(directory)
        capsule.directory = _own_directory(directory)
        capsule._connect()
        try:
            reply, _ = capsule._request({"verb": "status"}, GRACE + ANSWER)  # a dump of the last owner is undone first
            if not reply["kernel"] or reply["status"] is not None:
                raise CapsuleGone("The kernel of the capsule has ended.")
            capsule.attach_kernel(reply["kernel"])
        except BaseException:
            capsule.detach()
            raise
        return capsule

    def _connect(self) -> None:
        try:
            directory = os.open(self.directory, os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CapsuleGone(f"The capsule has no directory any more: {error}") from error
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(ANSWER)
            connection.connect(f"/proc/self/fd/{directory}/{SOCKET}")
        except OSError as error:
            connection.close()
            raise CapsuleGone(f"The capsule does not answer: {error}") from error
        finally:
            os.close(directory)
        self._socket = connection
        # The listener is PID 1 of the capsule; as the connection is still open, its id was not reused.
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(peer)
        with contextlib.suppress(OSError):
            init = os.pidfd_open(pid)
            if _ready([connection.fileno()], 0):
                os.close(init)
            else:
                self._init_fd, self._init_pid = init, pid

    def require_alive(self) -> None:
        """Raise `CapsuleGone` if the capsule's init has ended."""
        if self._init_fd < 0 or _ready([self._init_fd], 0):
            raise CapsuleGone("The capsule's init has ended.")

    def replace_other(self) -> None:
        """Become the capsule of the kernel's directory, in which the other one has ended.

        That gets links to the sockets in its own.  Nothing is done for a capsule that was not made beside another one.
        Raises `OSError`, `CapsuleGone`.
        """
        if self.directory == self.kernel_directory:
            return
        self.require_alive()
        names = [path.name for path in self.directory.iterdir() if path.is_socket()]
        for name in sorted(names, key=SOCKET.__eq__):  # that of the init last
            draft = self.kernel_directory / f".{name}"
            draft.unlink(missing_ok=True)
            draft.symlink_to(f"../{self.directory.name}/{name}")
            draft.replace(self.kernel_directory / name)

    def outlive(self, outlive: bool = True) -> None:
        """Let the capsule and its kernel run on when the owner's connection breaks, or not."""
        self._request({"verb": "outlive", "outlive": outlive})

    def detach(self) -> None:
        """Close the connection only: a capsule that may outlive its owner runs on."""
        with self._closing, self._lock:
            self._disconnect()
            for descriptor in {self._pidfd, self._init_fd} - {-1}:
                os.close(descriptor)
            self._pidfd = self._init_fd = -1
            self._outer = None

    def close(self) -> None:
        """Kill every process of the capsule.  Idempotent.  A request of another thread fails with `CapsuleGone`."""
        with self._closing:
            if self._outer is None and self._socket is None:
                return  # closed or detached
            if self._init_fd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._init_fd, signal.SIGKILL)
                _ready([self._init_fd], ANSWER)
                os.close(self._init_fd)
                self._init_fd = -1
            if self._outer is not None:
                _end(self._outer)
                self._outer = None
            if self._pidfd >= 0:
                self.wait(ANSWER)
                os.close(self._pidfd)
                self._pidfd = -1
            with self._lock:
                self._disconnect()
            with contextlib.suppress(OSError):  # gone already, or read-only by now: the next capsule meets it
                (self.directory / SOCKET).unlink()
            if self.directory != self.kernel_directory:
                _remove_links(self.kernel_directory, self.directory.name)
                shutil.rmtree(self.directory, ignore_errors=True)

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def end(self) -> None:
        """Kill the kernel, let its resource trackers remove its files in shared memory, and `close`.

        Takes `CLEANUP_TIMEOUT` seconds at most, and hardly any where there is nothing to remove.  Not for a kernel that
        has an image: that needs what would be removed.
        """
        with contextlib.suppress(CapsuleError, CapsuleGone):
            self._request({"verb": "end"}, CLEANUP_TIMEOUT)
            if self._pidfd >= 0:
                _ready([self._pidfd], CLEANUP_TIMEOUT)
            self.wait_for_cleanup()
        self.close()

    def is_cleaning_up(self) -> bool:
        """Return whether the kernel has ended, and its resource trackers still remove its files in shared memory."""
        with contextlib.suppress(CapsuleError, CapsuleGone):
            return bool(self._request({"verb": "status"}, CLEANUP_TIMEOUT)[0]["cleaning_up"])
        return False

    def wait_for_cleanup(self) -> None:
        """Wait until `is_cleaning_up` is over, for `CLEANUP_TIMEOUT` seconds at most."""
        deadline = time.monotonic() + CLEANUP_TIMEOUT
        while self.is_cleaning_up() and time.monotonic() < deadline:
            time.sleep(0.01)

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests

    def _request(
        self, request: Mapping[str, Any], timeout: float = ANSWER, fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        with self._lock:
            if self._socket is None:
                raise CapsuleGone("The capsule was closed.")
            self._number += 1
            try:
                self._socket.settimeout(timeout)
                _send(self._socket, json.dumps({**request, "version": VERSION, "number": self._number}).encode(), fds)
                while True:
                    packet, received, _, _ = socket.recv_fds(self._socket, PACKET_BYTES, 4)
                    for fd in received:  # as Python's own; recv_fds passes no flags on (Python 3.11)
                        os.set_inheritable(fd, False)
                    if not packet or json.loads(packet).get("number") == self._number:
                        break
                    for fd in received:  # the late answer to a request that has timed out
                        os.close(fd)
            except TimeoutError as error:
                raise CapsuleError(f"The capsule's init did not answer {request['verb']!r} in time.") from error
            except OSError as error:
                raise CapsuleGone(f"The capsule ended ({error}).") from error
        if not packet:
            raise CapsuleGone("The capsule ended.")
        reply = json.loads(packet)
        if (version := reply.get("version")) != VERSION:
            message = f"The kernel's capsule speaks version {version} of its protocol, this release version {VERSION}."
            raise ProtocolVersion(message, left="the kernel is as it was", version=version)
        if "error" in reply:
            if request["verb"] in ("run", "inspect") and (limit := LimitReached.from_errno(reply["errno"])) is not None:
                raise limit
            raise CapsuleError(f"{request['verb']} failed inside the capsule: {reply['error']}", errno=reply["errno"])
        return reply, received

    def spawn(self, argv: Sequence[str], env: Mapping[str, str], cwd: str | None) -> None:
        """Start the kernel as an ordinary process (no capabilities), leader of its own session, fds 0-2 only."""
        request = {"verb": "spawn", "argv": list(argv), "env": dict(env), "cwd": cwd, "first_pid": first_pid()}
        request["root_program"] = str(root_program.install() or "")
        self._set_kernel(*self._request(request))

    def attach_kernel(self, pid: int, *, frozen: bool = False, alone: bool = False) -> None:
        """Let the process ``pid`` that CRIU restored run as the kernel, with its descendants.

        ``frozen``: of all of them, only the CUDA driver's threads run; ``alone``: of the descendants.  The others run
        after `unfreeze_threads`.
        """
        which = {"frozen": frozen, "alone": alone}
        self._set_kernel(*self._request({"verb": "attach_kernel", "pid": pid, **which}, 2 * ANSWER))

    def _set_kernel(self, reply: dict[str, Any], fds: list[int]) -> None:
        self.inner_pid = reply["pid"]
        self.pipes = reply["pipes"]
        self._pidfd = fds[0]
        # A pidfd names the process without a race; its fdinfo shows the pid in the namespace of our /proc.
        self.host_pid = int(procfs.fdinfo("self", self._pidfd)["Pid"])

    def run(
        self,
        argv: Sequence[str],
        *,
        cwd: Path,
        output: Path,
        timeout: float,
        env: Mapping[str, str],
        inherit_pipes: bool = False,
        grace: float = 0.0,
        on_kernel: bool = False,
        terminals: Path | None = None,
        root: int = 0,
        adopted: Sequence[int] = (),
        restores: int = 0,
    ) -> Ran:
        """Run a program inside, with CRIU's capabilities, to its end; at ``timeout`` seconds it is killed.

        ``inherit_pipes``: it gets the writing ends of the kernel's stdout and stderr as fds 3 and 4.  ``grace``: its
        writes to files fail from ``timeout`` on, and it is killed only ``grace`` seconds later.  ``on_kernel``: it is a
        dump; the kernel is stopped meanwhile, frozen threads where they are frozen, and stays stopped if the program
        succeeds.  Else it runs on, but for threads that must not run while its CUDA state is suspended.
        ``terminals``: file of the data in the kernel's terminals, if there is any; a dump writes it, and after another
        program (a restore) has succeeded it is put into the terminals.  ``root``, ``adopted``: of a restore, for
        `subreaper.Subreaper`.  ``restores``: the inner pid of the kernel that it makes; if that is killed and the
        program continues, it is killed, too.

        Raises, before the program runs, `KernelBusy` if a process does not stop, `UnsupportedTerminal` if the terminals
        have too much unread data, `UnsupportedFile` if an inotify instance has unread events, `LoopbackTcp` if a
        connection among the processes cannot be saved (`connections`), `DeletedMapping` if the kernel is an ordinary
        user's and shared memory cannot be saved (`shared_memory`), `NoSpace` and `NoMemory` without space for the
        copies of shared memory and of the terminals' data.
        """
        program = {"argv": list(argv), "env": dict(env), "cwd": str(cwd), "output": str(output)}
        limits = {"timeout": timeout, "grace": grace}
        kernel = {"inherit_pipes": inherit_pipes, "on_kernel": on_kernel, "terminals": str(terminals or "")}
        try:
            adopts = {"root": root, "adopted": list(adopted)} if adopted else {}
            makes = {"restores": restores} if restores else {}
            request = {"verb": "run", **program, **limits, **kernel, **adopts, **makes}
            reply, _ = self._request(request, timeout + grace + ANSWER)
        except CapsuleError as error:
            if error.details.get("errno") not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if on_kernel:
                raise NoSpace("The disk filled up while the image was written.") from error
            raise NoMemory("The kernel's shared memory does not fit into this host's memory.") from error
        for field, (error_class, sentence, hint) in _UNSAVABLE.items():
            if field in reply:
                raise error_class(sentence.format(reply[field]), hint=hint, culprit=reply[field])
        ended = reply.get("ended", [])  # the capsule's init may be of an older release
        return Ran(reply["status"], reply["timed_out"], reply["seconds"], reply["unrepaired"], ended)

    def cancel_criu(self) -> None:
        """End the program of `run` as at its deadline.  From any thread; waits for nothing."""
        if (connection := self._socket) is not None:
            with contextlib.suppress(OSError):  # closed meanwhile
                _send(connection, json.dumps({"verb": "cancel_criu", "version": VERSION}).encode())

    def resume_processes(self) -> str:
        """Let the processes that a dump left stopped run; those that were stopped before it stay stopped.

        Return what is not as it was before the dump, in words.
        """
        reply, _ = self._request({"verb": "resume_processes"})
        return str(reply.get("unrepaired", ""))  # the capsule's init may be of an older release

    def freeze_threads(self, timeout: float, *, insist: bool = False, child: int | None = None) -> None:
        """Freeze all threads of the kernel but the CUDA driver's and its library's.

        ``insist``: see `freezer.FrozenThreads`.  ``child``: the host pid of a process of the capsule, instead of the
        kernel.  Raises `CapsuleError` when that cannot be done in ``timeout`` seconds; all run on then.  They stay
        frozen when the owner goes.
        """
        request = {"verb": "freeze_threads", "timeout": timeout, "insist": insist, **self._named(child)}
        self._request(request, timeout + ANSWER)

    def freeze_threads_in_driver(self, *, child: int | None = None) -> None:
        """Freeze threads as `freezer.FrozenThreads.freeze_waiting_in_driver`.  Raises `CapsuleError`.

        ``child``: as for `freeze_threads`.
        """
        self._request({"verb": "freeze_threads_in_driver", **self._named(child)})

    def freeze_callers(self, timeout: float, *, child: int | None = None) -> None:
        """Freeze threads as `freezer.FrozenThreads.freeze_callers`.  Raises `CapsuleError` as `freeze_threads`.

        ``child``: as for `freeze_threads`.  They stay frozen when the owner goes, and after a dump that fails.
        """
        self._request({"verb": "freeze_callers", "timeout": timeout, **self._named(child)}, timeout + ANSWER)

    def note_inherited_files(self, inherited: Mapping[int, Iterable[str]]) -> None:
        """Have the next dump take these device files from children that have inherited them (`process.device_files`).

        ``inherited``: the files' paths by the children's host pids.  Raises `CapsuleError`, also if the init is of an
        older release.
        """
        noted = {}
        for child, paths in inherited.items():
            with contextlib.suppress(CapsuleError):  # it has ended
                noted[str(self.pid_inside(child))] = [*paths]
        self._request({"verb": "note_inherited_files", "paths": noted})

    def _named(self, child: int | None) -> dict[str, Any]:
        """Return the argument that names a child by its pid inside; none for the kernel."""
        return {} if child is None else {"pid": self.pid_inside(child)}

    def pid_inside(self, child: int) -> int:
        """Return the pid inside of a process by its host pid.  Raises `CapsuleError` if it has ended."""
        try:
            level = len(procfs.status(self._init_pid)["NSpid"].split()) - 1
            return int(procfs.status(child)["NSpid"].split()[level])
        except (OSError, KeyError, IndexError) as error:
            raise CapsuleError(f"The kernel's child {child} has ended.", pid=child) from error

    def unfreeze_threads(self, *, all: bool = False, child: int | None = None) -> None:
        """Let frozen threads of the kernel run, if there are any; or of ``all`` its processes.

        ``child``: as for `freeze_threads`.
        """
        self._request({"verb": "unfreeze_threads", **({"all": True} if all else self._named(child))})

    def host_memory(self) -> int:
        """Return a descriptor, to be closed, of the kernel's `namespaces.HOST_MEMORY`.  Raises `CapsuleError`."""
        _, fds = self._request({"verb": "host_memory"})
        os.set_inheritable(fds[0], False)
        return fds[0]

    def keep_fd(self, fd: int) -> None:
        """Have the capsule keep ``fd``, and so a lock on its file, until the capsule ends or the file is removed."""
        self._request({"verb": "keep_fd"}, fds=[fd])

    def inspect(self, *, allow_unconfined: bool = False) -> dict[str, Any]:
        """Return the state of the kernel's processes: `inventory.Found` as a dict.

        Complete after a dump, which leaves them stopped; of running ones only what can be seen without a stop.  Raises
        `CapsuleError`, `LimitReached`.
        """
        _, fds = self._request({"verb": "inspect", "allow_unconfined": allow_unconfined}, _INSPECTION)
        with open(fds[0], "rb") as file:
            file.seek(0)
            return dict(json.load(file))

    def reapply(self, notes: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
        """Reapply what CRIU forgets to processes that it has restored and that have not run since.

        ``notes`` are those of `inspect`.  Returns what could not be reapplied, in words: what the kernel must not run
        without, what it may (`reapply.reapply`), and the locks that it lost (`file_locks.reapply`).  Raises
        `CapsuleError`.
        """
        reply, _ = self._request({"verb": "reapply", "notes": dict(notes)}, _INSPECTION)
        return reply["vital"], reply["failed"], reply["locks"]

    def lock_databases(self, databases: Sequence[Mapping[str, Any]]) -> None:
        """Lock databases of a kernel to be restored here, until `attach_kernel` (`sqlite_wal.lock_database`).

        Raises `LockTaken` for one that another process has locked, `ChangedFile` for one that has changed meanwhile or
        is not in WAL mode any more, `NoSpace`, and `CapsuleError` for one that cannot be opened.
        """
        try:
            reply, _ = self._request({"verb": "lock_databases", "databases": list(databases)}, _INSPECTION)
        except CapsuleError as error:
            if error.details.get("errno") not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise NoSpace("The disk is full: there is no space for the index of a database.") from error
        if path := reply.get("locked"):
            message = f"The kernel cannot lock {path} again as it had: another process has locked it."
            raise LockTaken(message, culprit=path, lacking=[path])
        if path := reply.get("changed"):
            hint = "Run a cell to try again: it is compared again, and what is not as it was is named."
            raise ChangedFile(f"{path} was changed as the kernel was woken ({reply['why']}).", culprit=path, hint=hint)

    def clocks(self) -> Clocks:
        """Return the clocks as the kernel in the capsule reads them."""
        reply, _ = self._request({"verb": "clocks"})
        return Clocks(reply["monotonic"], reply["boottime"])

    # -- the kernel process

    def poll(self) -> int | None:
        """Return the kernel's exit status, None while it lives.  Never blocks; -9 when the whole capsule was killed."""
        if self._status is not None or self._pidfd < 0:
            return self._status
        if not _ready([self._pidfd], 0):
            return None
        self._status = -signal.SIGKILL
        with contextlib.suppress(CapsuleError, CapsuleGone):
            reply, _ = self._request({"verb": "status"})
            if reply["status"] is not None:
                self._status = reply["status"]
        return self._status

    def wait(self, timeout: float) -> int | None:
        """Wait for the kernel's end.  Return its exit status, or None when it still lives after ``timeout`` seconds."""
        if self._pidfd >= 0:
            _ready([self._pidfd], timeout)
        return self.poll()

    @contextlib.contextmanager
    def watch_exit(self, callback: Callable[[], object]) -> Iterator[None]:
        """Call ``callback`` on another thread if the kernel ends during the body, or has ended before.

        Again and again until the body ends: the first call may come before the body waits for what ``callback`` is to
        break.  Raises `CapsuleGone` when there is no kernel.
        """
        if self._pidfd < 0:
            raise CapsuleGone("The capsule has no kernel.")
        # A descriptor of its own: `close` on another thread closes ours, whose number is then reused.
        pidfd = os.dup(self._pidfd)
        over, finish = os.pipe()

        def watch() -> None:
            ended = _ready([pidfd, over], None)
            while over not in ended:
                with contextlib.suppress(GpuCkptError):
                    callback()
                ended = _ready([over], 0.1)

        watcher = threading.Thread(target=watch, name="kernel-watch", daemon=True)
        try:
            watcher.start()
            yield
        finally:
            os.close(finish)
            if watcher.ident is not None:  # else there were no more threads
                watcher.join()
            os.close(over)
            os.close(pidfd)

    def signal(self, number: int) -> None:
        """Send a signal to the kernel's process group, as jupyter_client does for a local kernel."""
        if self.poll() is not None or not self.host_pid:
            return
        try:
            os.killpg(self.host_pid, number)
        except ProcessLookupError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.host_pid, number)

    def processes(self) -> list[int]:
        """Host pids of the kernel, its descendants, and those of its descendants' that have lost their parents.

        The latter are children of its root process, which is not in the list.
        """
        if not self.host_pid:
            return []
        root = self.root()
        return [self.host_pid, *(pid for pid in _with_descendants([root]) if pid not in (root, self.host_pid))]

    def other_processes(self) -> list[int]:
        """Host pids of all processes in the capsule but the kernel and its root process.

        Nor what its init forks for a moment, to ask file systems that may not answer.
        """
        top = procfs.children(self._init_pid) if self._init_fd >= 0 else []
        top = [pid for pid in top if not _is_fork(pid, self._init_pid)]
        root = self.root() if self.host_pid else 0
        return [pid for pid in _with_descendants(top) if pid not in (root, self.host_pid)]

    def tree(self) -> int:
        """The pid, inside, of the process whose tree is to be dumped: the root process, or without one the kernel."""
        return _inner_pid(self.root()) or self.inner_pid

    def root(self) -> int:
        """The host pid of that process.  Without a root process the kernel's parent is the init (`root_process`)."""
        try:
            parent = procfs.stat(self.host_pid).parent
        except procfs.GONE:
            return self.host_pid
        return parent if _inner_pid(parent) > 1 else self.host_pid


def _is_fork(pid: int, of: int) -> bool:
    """Return whether a child of the process ``of`` runs the same program still."""
    with contextlib.suppress(*procfs.GONE):
        return procfs.arguments(pid) == procfs.arguments(of)
    return False


def _end(outer: subprocess.Popen[bytes]) -> None:
    # The outer process ignores SIGTERM; its only child is PID 1, should there be no connection to that.
    for pid in procfs.children(outer.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        outer.wait(ANSWER)
    except subprocess.TimeoutExpired:
        outer.kill()
        outer.wait(ANSWER)
    for stream in (outer.stdout, outer.stderr):
        if stream is not None:
            stream.close()


def _inner_pid(pid: int) -> int:
    """Return the pid that a process of the host has in its own namespace; 0 for one that has ended."""
    try:
        return int(procfs.status(pid)["NSpid"].split()[-1])
    except (*procfs.GONE, KeyError, IndexError):
        return 0


def _with_descendants(pids: list[int]) -> list[int]:
    found: list[int] = []
    while pids:
        found += pids
        pids = [child for pid in pids for child in procfs.children(pid)]
    return found


def _send(connection: socket.socket, request: bytes, fds: Sequence[int] = ()) -> None:
    """Send a request as one packet, or in a file: a packet must fit into 200 KB of buffer (``net.core.wmem_max``)."""
    if len(request) <= _PACKET:
        socket.send_fds(connection, [request], list(fds))
        return
    with os.fdopen(os.memfd_create("request"), "wb") as file:
        file.write(request)
        file.flush()
        socket.send_fds(connection, [b"{}"], [file.fileno()])


def _ready(descriptors: list[int], timeout: float | None) -> list[int]:
    """Return the descriptors that can be read or have ended.  Not ``select``, which takes none above 1023."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(None if timeout is None else timeout * 1000)]
