"""CRIU's two verbs, run inside a capsule: `Criu.dump` and `Criu.restore`.

No policy and no hidden retries.  The option table is fixed and printable; every call has a deadline; CRIU's log is read
here, and only here, to turn a failure into an error class with a cause that a notebook user understands.

CRIU runs without its CUDA plugin, which can fail silently and let a dump "succeed" without the device state.  CUDA
state is suspended before the dump (`cuda.cuda`), so for CRIU the process is an ordinary one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import procfs
from ..capsule import root_program
from ..capsule.capsule import GRACE, Capsule, Ran
from ..errors import (
    CapsuleError,
    CapsuleGone,
    ChangedFile,
    CriuError,
    CriuKilled,
    CriuTimeout,
    DeletedMapping,
    DumpInterrupted,
    KernelBusy,
    LimitReached,
    LockTaken,
    MissingFile,
    NoSpace,
    PidTaken,
    PipesExhausted,
    PortTaken,
    ProcessEnded,
    RuntimeDirectory,
    UnsupportedFile,
    UnsupportedSocket,
)
from ..process import terminals
from . import images, tasks

_log = logging.getLogger(__name__)

#: Seconds in which all threads of a kernel must be frozen.
FREEZE_TIMEOUT = 5.0
#: Options of both verbs, and why.  A dump and its restore must agree on them.
OPTIONS: tuple[tuple[str, ...], ...] = (
    ("--no-default-config",),  # an administrator's criu.conf must not change what an image means
    ("--shell-job",),  # the session leader's terminal, if any, lies outside
    ("--file-locks",),  # SQLite and others hold them
    ("--link-remap",),  # open files that were deleted but have another name
    ("--ghost-limit", "1G"),  # open files that were deleted for good travel in the image up to this size
    ("--tcp-close",),  # connections to the outside come back closed; `process.connections` makes the others again
    ("--network-lock", "skip"),  # there is nothing to lock: those connections are closed
    ("-v2",),  # errors and warnings
)

#: The whole environment of CRIU: a user's LD_PRELOAD must not reach it.
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


@dataclass(frozen=True)
class Restored:
    """The result of a restore: its seconds, and the noted state that could not be reapplied, in words."""

    seconds: float
    changed: list[str]


#: Lines of CRIU's log that name a cause: pattern (group 1: the culprit), class of the error, sentence for the user.
# In CRIU's source: files-reg.c, sk-inet.c, sk-unix.c, proc_parse.c, cr-restore.c, page-xfer.c, image.c,
# compel's infect.c (release 4.2).
_CAUSES: tuple[tuple[str, type[CriuError | NoSpace | LimitReached], str], ...] = (
    (r"No space left on device()", NoSpace, "The disk filled up while the image was written."),
    (
        r"remote mmap\(\) failed: Cannot allocate memory()",
        LimitReached,
        "The kernel may not have the few MiB of memory that CRIU needs in it (RLIMIT_AS).",
    ),
    (
        r"(?:Unable to create a thread: -11|\bfork\b.*: Resource temporarily unavailable)()",
        LimitReached,
        "The kernel had more threads and processes than this user (RLIMIT_NPROC) or this control group (pids.max) may "
        "have besides those that run now.",
    ),
    (r"Disk quota exceeded()", NoSpace, "The disk quota was used up while the image was written."),
    (r"File (\S.*?) has bad (?:size|build-ID|mode)", ChangedFile, "{0} was changed while the kernel was away."),
    (r"Can't open file (\S.*?)(?: on restore)?: No such file", MissingFile, "{0} is not there any more."),
    (r"Can't open mapped \[(.*?) \(deleted\)\]", DeletedMapping, "The kernel maps {0}, which was deleted."),
    (r"Can't open mapped \[(.*?)\]", UnsupportedFile, "The kernel maps {0}, which cannot be opened by that name."),
    (r"Can't dump ghost file (\S+)", UnsupportedFile, "{0} was deleted while open, and is too big for an image."),
    (
        r"Can't bind inet socket \(id \d+\): Address already in use()",
        PortTaken,
        "A TCP or UDP port the kernel had open cannot be bound: it is in use.",
    ),
    (
        r"(?:Unable to set a pipe size|Can't restore pipe size): Operation not permitted()",
        PipesExhausted,
        "The user's processes have too many pipes (fs.pipe-user-pages-soft).",
    ),
    (r"Unexpected (\d+) task interruption", DumpInterrupted, "A signal interrupted the dump in process {0}."),
    (r"Can't fork for (\d+)", PidTaken, "Process id {0} is in use."),
    (
        r"(?:Can't dump half of stream unix connection|External socket is used|name-less external socket)"
        r"(?:.*?name: (\S+))?",
        UnsupportedSocket,
        "The kernel is connected to a process outside through a unix socket ({0}).",
    ),
    (
        r"Unable too? cut .* from (/.*)",
        UnsupportedSocket,
        "The file of a unix socket of the kernel was renamed or moved after it was bound: it is {0} now.",
    ),
    (r"In-flight connection()", UnsupportedSocket, "A connection to a port of the kernel is not accepted yet."),
    (
        r"Control messages in queue()",
        UnsupportedSocket,
        "Credentials or descriptors were sent through a unix socket of the kernel and are not received yet.",
    ),
    (
        r"Unsupported (?:proto|type|socket family)\D*(\d+)",
        UnsupportedSocket,
        "The kernel has a socket of a kind that cannot be saved (number {0}).",
    ),
    (r"Can't dump file \d+ of that type \[\d+\] \((.*?)\)", UnsupportedFile, "An open file cannot be saved: {0}."),
    (r"Can't lookup mount=\d+ for fd=-?\d+ path=(\S+)", UnsupportedFile, "{0} lies on a foreign mount."),
    (r"ctty inheritance detected()", UnsupportedFile, "/dev/tty is open, and its terminal is not the kernel's."),
    (r"The path \[(.*?)\] is not supported", UnsupportedFile, "The open file {0} cannot be saved."),
)


#: What to do about a limit while there is no kernel in which something could be closed.
_WITHOUT_KERNEL = (
    "End other programs or kernels of this user or container, or have the limit raised (`ulimit`, TasksMax= of "
    "systemd, podPidsLimit of Kubernetes), then run a cell to try again."
)
#: Bytes that CRIU writes at a time, to files other than those of pages, at most.
_LARGEST_RECORD = 64 << 10
#: Errors that CRIU gets over: what an ordinary user may not do.
_NOISE = re.compile(r"rlimit: Can't setup RLIMIT_NOFILE|net: Unexpected error: -1")
#: Sockets that were missing in CRIU's list of all sockets of the host's network (sk-unix.c, sk-inet.c).  Linux's list
#: (sock_diag(7)) passes over some while others are made and closed beside it; the next one has them.
_UNLISTED = re.compile(r"Unix socket \d+ (?:not found|without peer)|Socket state \d+ obtained but expected \d+")
#: What a line begins with: time, process, and where in CRIU's source.
_PLACE = re.compile(r"^(?:\([\d.]+\))?\s*(?:pie: )?(?:\d+:\s*)?Error \([^)]*\): ")


class Criu:
    """Runs CRIU inside capsules.  ``argv``: a path, or a loader with its arguments and a path (`install.find`)."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = tuple(argv)

    def _run(
        self,
        verb: str,
        capsule: Capsule,
        directory: Path,
        timeout: float,
        options: Sequence[str],
        work: Path | None = None,
        root: int = 0,
        adopted: Sequence[int] = (),
        restores: int = 0,
    ) -> Ran:
        work = work or capsule.directory
        arguments = [
            *self.argv,
            verb,
            "--images-dir",
            str(directory),
            # Logs and statistics stay out of the image: a restore writes nothing into it.
            "--work-dir",
            str(work),
            "--log-file",
            f"{verb}.log",
            # CRIU's own alarm: it covers the freezing of the processes only.
            "--timeout",
            str(max(1, int(timeout))),
            *(["--unprivileged"] if os.geteuid() != 0 else []),
            *(word for option in OPTIONS for word in option),
            *options,
        ]
        log, output = work / f"{verb}.log", work / f"{verb}.out"
        try:
            # A CRIU that ends before it opens its log must not be explained by an earlier log.
            log.unlink(missing_ok=True)
            output.unlink(missing_ok=True)
        except OSError as error:
            raise RuntimeDirectory(f"{work} cannot be written: {error.strerror}.") from error
        try:
            ran = capsule.run(
                arguments,
                cwd=work,
                output=output,
                timeout=timeout,
                # A half-restored process ends with the capsule anyhow; a dumped one is the user's work.
                grace=GRACE if verb == "dump" else 0.0,
                env=ENVIRONMENT,
                inherit_pipes=verb == "restore",
                on_kernel=verb == "dump",
                terminals=directory / terminals.FILE,
                root=root,
                adopted=adopted,
                restores=restores,
            )
            if ran.status != 0:
                failure = explain(verb, ran, log, output)
                if verb == "restore" and _is_full(capsule.directory):
                    full = f"{capsule.directory} is full: the kernel's sockets could not be made there."
                    raise RuntimeDirectory(full, **failure.details)
                # After a write that was cut short CRIU's log names no reason.
                if verb == "dump" and type(failure) is CriuError and _is_full(directory):
                    raise NoSpace("The disk filled up while the image was written.", **failure.details)
                raise failure
        finally:
            if work != capsule.kernel_directory:
                for source in (log, output):
                    with contextlib.suppress(OSError):  # users look there; it may be full
                        shutil.copy(source, capsule.kernel_directory)
        if ran.unrepaired:  # the kernel runs on all the same
            _log.warning("The kernel could not be repaired after CRIU's %s: %s", verb, ran.unrepaired)
        return ran

    def dump(
        self,
        capsule: Capsule,
        directory: Path,
        *,
        timeout: float,
        freeze: bool = False,
        children: Sequence[int] = (),
        work: Path | None = None,
    ) -> float:
        """Dump the kernel of ``capsule`` to ``directory``.  Return the seconds.

        ``work``: the directory of CRIU's log, by default the capsule's; the kernel's gets a copy of it anyhow.

        The processes are left stopped, not ended: until the image is published they are the only copy.
        `Capsule.resume_processes` lets them run again.  With ``freeze`` the kernel and these ``children`` (host pids)
        are stopped where they hold no lock of the C library or the driver; raises `KernelBusy` where that cannot be.
        After failure they run on, and the partial image in ``directory`` is useless.
        """
        options = ["--tree", str(capsule.tree()), "--leave-stopped"]
        for child in (*children, None) if freeze else ():  # the kernel's own threads last: it has clients to answer
            try:
                capsule.freeze_threads(FREEZE_TIMEOUT, insist=True, child=child)
            except CapsuleGone:
                raise
            except CapsuleError as error:
                if child is not None and _has_ended(child):
                    continue
                message = "A thread of the kernel is never where it can be stopped safely."
                hint = "It is in the C library or the CUDA driver all the time: try again when it has ended."
                raise KernelBusy(message, hint=hint, cause=error.message) from error
        seconds = self._run("dump", capsule, directory, timeout, options, work=work).seconds
        images.clear_device_owners(directory)
        images.clear_chosen_addresses(directory)
        if (root := capsule.root()) != capsule.host_pid:
            root_program.save(root, directory)
        return seconds

    def restore(
        self,
        capsule: Capsule,
        directory: Path,
        *,
        pid: int,
        pipes: Sequence[int],
        timeout: float,
        freeze: bool = False,
        alone: bool = False,
        before_running: Callable[[], object] = lambda: None,
        notes: Mapping[str, Any] | None = None,
    ) -> Restored:
        """Restore the process tree in ``directory`` into the empty ``capsule``.

        ``pid`` is the kernel's inner pid and ``pipes`` the inodes of its stdout and stderr, both from the manifest.
        ``before_running`` is called when the processes are restored and stopped; if it raises, they do not run.
        ``freeze``, ``alone``: see `Capsule.attach_kernel`.  ``notes``: see `Capsule.reapply`.  Raises `CriuError` when
        CRIU fails or a note that the kernel must not run without cannot be reapplied.
        After failure the image is untouched, and half-restored processes end with the capsule.
        """
        ran = self.restore_stopped(capsule, directory, pid=pid, pipes=pipes, timeout=timeout)
        return self.run_restored(
            capsule, ran, pid=pid, freeze=freeze, alone=alone, before_running=before_running, notes=notes
        )

    def restore_stopped(
        self, capsule: Capsule, directory: Path, *, pid: int, pipes: Sequence[int], timeout: float
    ) -> Ran:
        """Do the first part of `restore`: the processes are there, and stopped.  Raises as that."""
        options = ["--restore-detached", "--leave-stopped"]
        for fd, inode in enumerate(pipes, start=3):
            options += ["--inherit-fd", f"fd[{fd}]:pipe:[{inode}]"]
        root, adopted = tasks.adopted(directory)
        try:
            root_program.put_back(directory)
        except OSError as error:
            raise MissingFile(f"{root_program.path_of(directory)} cannot be written: {error.strerror}.") from error
        return self._run("restore", capsule, directory, timeout, options, root=root, adopted=adopted, restores=pid)

    def run_restored(
        self,
        capsule: Capsule,
        ran: Ran,
        *,
        pid: int,
        freeze: bool = False,
        alone: bool = False,
        before_running: Callable[[], object] = lambda: None,
        notes: Mapping[str, Any] | None = None,
    ) -> Restored:
        """Do the second part of `restore`, of processes that it has left stopped: they run.  Raises as that."""
        before_running()
        vital, changed, locks = capsule.reapply(notes) if notes else ([], [], [])
        if vital:
            raise CriuError(f"The kernel's state could not be restored: {'; '.join(vital)}.", lacking=vital)
        if locks:
            message = f"The kernel cannot lock its files again as it had: {'; '.join(locks)}."
            raise LockTaken(message, culprit=locks[0], lacking=locks)
        if changed:
            _log.warning("The kernel is restored without these settings: %s", "; ".join(changed))
        if ran.unrepaired:
            changed = [*changed, ran.unrepaired]
        capsule.attach_kernel(pid, frozen=freeze, alone=alone)
        return Restored(ran.seconds, changed)


def _has_ended(pid: int) -> bool:
    try:
        return procfs.stat(pid).has_ended
    except procfs.GONE:
        return True


def _is_full(directory: Path) -> bool:
    """Return whether the file system of ``directory`` has no space for one of CRIU's files, or no free inodes.

    False where it reports none.
    """
    try:
        facts = os.statvfs(directory)
    except OSError:
        return False
    return facts.f_bavail * facts.f_frsize < _LARGEST_RECORD or (facts.f_files > 0 and facts.f_favail == 0)


def explain(verb: str, ran: Ran, log: Path, output: Path) -> CriuError | NoSpace | LimitReached:
    """Return the error for a failed run, from CRIU's log; with the detail ``passes`` where the next run may succeed."""
    lines: list[str] = []
    for source in (log, output):
        with contextlib.suppress(OSError):
            lines += source.read_text(errors="replace").splitlines()
    errors = [line for line in lines if "Error" in line or "error" in line][-12:] or lines[-5:]
    details: dict[str, Any] = {"verb": verb, "status": ran.status, "seconds": round(ran.seconds, 3), "log": errors}
    if ran.unrepaired:
        details["unrepaired"] = ran.unrepaired
    for pattern, error, sentence in _CAUSES:
        for line in errors:
            if match := re.search(pattern, line):
                culprit = match.group(1) or "unnamed"
                if culprit.startswith(("./", "home/", "tmp/")):
                    culprit = "/" + culprit.removeprefix("./")
                hint = _WITHOUT_KERNEL if error is LimitReached and verb == "restore" else None
                return error(sentence.format(culprit), hint=hint, culprit=culprit, **details)
    if ran.timed_out or any("Timeout reached" in line for line in lines):
        return CriuTimeout(f"CRIU did not finish its {verb} within the deadline.", **details)
    if ran.status < 0:
        return CriuKilled(f"CRIU was ended by {signal.Signals(-ran.status).name} during the {verb}.", **details)
    if ran.ended:
        return ProcessEnded.during_dump(ran.ended, **details)
    reasons = [line for line in errors if not _NOISE.search(line)]
    reason = f": {_PLACE.sub('', reasons[0]).rstrip('.')}" if reasons else ""
    if any(map(_UNLISTED.search, reasons)):
        details["passes"] = True
    return CriuError(f"CRIU could not {verb} the kernel{reason}.", **details)
