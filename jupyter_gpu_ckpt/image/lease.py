"""The right to restore an image: one restorer at a time, and one living kernel at most.

Three mechanisms, each for what the one before cannot know:

*The lock* (``flock``) belongs to one process of this host and ends with it.

*The lease* is a numbered file in the image, made by an exclusive link: of two restorers on two hosts whose file system
has no working locks, one gets the number.  Its owner touches it.  A lease of another host that was not touched for
`EXPIRY` seconds has expired, and the next restorer takes the next number.  The time is the file server's.

*The claim* says that the image's kernel lives, and as which process.  It is made by an exclusive link too, just before
the first message reaches a restored kernel: of two restorers, however late one of them resumes, one gets it and the
other must end what it restored.  It lies in the image's directory, so there is none once the image was removed.  A
checkpoint publishes its image with a claim for the kernel that still runs, and withdraws it when that has ended.  A
claim does not expire: it is void when its process is known to have ended, or when a user says so (`break_claim`).  Only
its own host can know: by the process's id, or, where ids mean something else (in another container), by the lock that
the process's capsule keeps on the claim for as long as it lives.  One Linux has one opinion about the owner of a lock.

On a full disk nothing is restored.  A removal, the way out of it, does without the files that could not be made.

Limits: a file system whose exclusive link is not atomic (none we know of); hosts with one machine id and one name, or
with one boot id (clones of a virtual machine that runs).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .. import procfs
from ..errors import CapsuleError, CapsuleGone, ImageBusy, ImageNotFound, NoSpace
from ..files.atomic import flush
from ..files.disk import mapped_errors
from . import layout
from .layout import CLAIM, LEASES

#: Seconds after which an untouched lease has expired.
EXPIRY = 30.0
#: Seconds to wait for a lease that another has for a moment only: the cold tier, a restore that has just been done.
MOMENT = 5.0
_FULL = (errno.ENOSPC, errno.EDQUOT)

#: Passes a locked descriptor to a process that keeps it open for as long as the claimed process lives.
KeepFd = Callable[[int], object]


class Lease(contextlib.AbstractContextManager["Lease"]):
    """The right to restore or remove one image, until `release` or the end of a ``with`` block; made by `acquire`."""

    def __init__(self, path: Path, lock: FileLock, *, remove: bool) -> None:
        self.path = path
        self._lock = lock
        self._claimed = False
        self._record = {**_this_host(), "holder": secrets.token_hex(8)}
        try:
            number = _link_next(path, self._record)
        except OSError as error:
            if not remove or error.errno not in _FULL:
                raise
            number = 0  # which no lease has: the lock alone must do
        self._file = path / LEASES / str(number)
        self._released = threading.Event()
        self._toucher = threading.Thread(target=self._touch, name="image-lease", daemon=True)
        self._toucher.start()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _touch(self) -> None:
        while not self._released.wait(EXPIRY / 4):
            with contextlib.suppress(OSError):  # removed with its image, or the file server does not answer
                os.utime(self._file)

    def claim(self, pid: int, keep_fd: KeepFd | None = None) -> None:
        """Record that the kernel lives as process ``pid`` from now on.

        Raises `ImageBusy` when it lives elsewhere already, `NoSpace` when the record cannot be written.  After failure
        there must not be a kernel from this image: the caller ends it.
        """
        try:
            made = _link(self.path / CLAIM, self.path / LEASES, _process(pid), keep_fd)
        except OSError as error:
            if error.errno in _FULL:
                message = "The disk of the image directory is full: that the kernel lives cannot be written there."
                raise NoSpace(message, directory=str(self.path.parent)) from error
            raise ImageBusy("The image went away while it was being restored.", image=self.path.name) from error
        if not made:
            raise ImageBusy("The kernel was restored elsewhere meanwhile.", image=self.path.name)
        self._claimed = True

    def withdraw_claim(self) -> None:
        """Remove the claim of `claim`, if there is one: its process has ended.  Raises `OSError`."""
        if self._claimed:
            withdraw_claim(self.path)
            self._claimed = False

    def release(self) -> None:
        """End the lease.  A claim stays."""
        self._released.set()
        self._toucher.join()
        with contextlib.suppress(OSError):
            if _read(self._file) == self._record:  # else it expired, and another's lease has our number
                self._file.unlink()
            self._file.parent.rmdir()
        self._lock.release()


def acquire(path: Path, *, remove: bool = False, timeout: float = 0.0) -> Lease:
    """Acquire the lease of the image at ``path``.

    ``remove``: for removing the image, which does no harm to a kernel that lives.  Raises `ImageBusy` when another
    process of this host keeps it for more than ``timeout`` seconds, and at once when another host has it or, without
    ``remove``, the kernel lives; `ImageNotFound` when the image was removed; `StoreUnwritable` and, without ``remove``,
    `NoSpace`.
    """
    with mapped_errors(path.parent):
        lock = FileLock(layout.mark(path, layout.LOCK), timeout=timeout, mode=0o600, thread_local=False)
        try:
            lock.acquire()
        except Timeout as error:
            raise _busy(path) from error
        except OSError as error:
            if not remove or error.errno not in _FULL:  # where no lock can be made, nobody has one
                raise
        try:
            if not path.is_dir():  # removed by the lock's last owner
                Path(lock.lock_file).unlink(missing_ok=True)
                raise ImageNotFound(f"There is no image {path.name!r}.", image=path.name)
            if not remove:
                require_unclaimed(path)
            try:
                return Lease(path, lock, remove=remove)
            except FileNotFoundError as error:  # its owner releases it, or removes the image, at this moment
                raise _busy(path) from error
        except BaseException:
            lock.release()
            raise


def _busy(path: Path) -> ImageBusy:
    return ImageBusy(f"Image {path.name} is in use by another process.", image=path.name)


def publish_claim(path: Path, pid: int, keep_fd: KeepFd | None = None) -> None:
    """Record in a draft that its kernel lives as process ``pid``, until `withdraw_claim`.  Raises `OSError`."""
    (path / LEASES).mkdir(mode=0o700, exist_ok=True)
    _link(path / CLAIM, path / LEASES, _process(pid), keep_fd)


def withdraw_claim(path: Path) -> None:
    """Remove the claim of an image whose kernel has ended.  On disk on return: else the image would seem in use."""
    (path / CLAIM).unlink(missing_ok=True)
    flush(path)


def break_claim(path: Path) -> bool:
    """Remove a claim because a user says that the kernel is gone.  Return whether there was one."""
    if found := (path / CLAIM).exists():
        withdraw_claim(path)
    return found


def require_unclaimed(path: Path) -> None:
    """Raise `ImageBusy` when the kernel lives; remove a claim whose process is known to have ended."""
    if (claim := _read(path / CLAIM)) is None:
        return
    if not _has_ended(claim) and not _is_unlocked(path / CLAIM, claim):
        host = claim.get("hostname", "?")
        hint = "Use it there. If that host is gone for good, `jupyter gpu-ckpt break-claim {image}` says so."
        message = f"The kernel of image {path.name} runs on {host}."
        raise ImageBusy(message, hint=hint, image=path.name, hostname=host)
    (path / CLAIM).unlink(missing_ok=True)


def _link_next(path: Path, record: dict[str, Any]) -> int:
    """Make the next lease with ``record``; return its number.  Raises `ImageBusy`, `FileNotFoundError`."""
    directory = path / LEASES
    if directory.is_symlink() or directory.is_file():
        directory.unlink()  # not made by us
    directory.mkdir(mode=0o700, exist_ok=True)
    last = max((int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal()), default=0)
    if last and (other := _read(directory / str(last))) is not None and other.get("boot") != record["boot"]:
        # Its owner is on another host, where our lock may mean nothing.
        os.utime(directory)  # the file server's time; a timestamp needs no space on the disk, as a new file would
        with contextlib.suppress(FileNotFoundError):
            age = directory.stat().st_mtime - (directory / str(last)).stat().st_mtime
            if age < EXPIRY:
                host = other.get("hostname", "?")
                raise ImageBusy(f"Image {path.name} is in use on {host}.", image=path.name, seconds=age)
    if not _link(directory / str(last + 1), directory, record):
        raise _busy(path)
    with contextlib.suppress(OSError):
        (directory / str(last)).unlink()
    return last + 1


def _link(path: Path, directory: Path, record: dict[str, Any], keep_fd: KeepFd | None = None) -> bool:
    """Make ``path`` with ``record`` in it, atomically; return False if it exists.

    ``directory``, that of the leases, gets the temporary file: a killed process leaves it, and elsewhere in an image
    it would be damage.
    """
    draft = directory / f".{path.name}-{secrets.token_hex(4)}"
    draft.touch(0o600)
    try:
        if keep_fd is not None:
            record = {**record, "locked": _lock_for(keep_fd, draft)}
        draft.write_text(json.dumps(record))
        path.hardlink_to(draft)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def _lock_for(keep_fd: KeepFd, path: Path) -> list[int] | None:
    """Lock ``path`` and pass the descriptor on.  Return the file's identity, or None where that cannot be done.

    Not a `FileLock`: the lock belongs to a descriptor that another process keeps after this one has ended.
    """
    with open(path, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            keep_fd(file.fileno())
            return _file_identity(file.fileno())
        except (OSError, CapsuleError, CapsuleGone):  # such a claim is judged by its process's id alone
            return None


def _file_identity(fd: int) -> list[int]:
    facts = os.fstat(fd)
    return [facts.st_dev, facts.st_ino]


def _is_unlocked(path: Path, claim: dict[str, Any]) -> bool:
    """Return whether a claim from another pid namespace of this host has lost its lock.

    The very file must be seen through the very mount: of two mounts of one directory each may have locks of its own.
    Not a `FileLock`, which is exclusive and could meet another process that tests it; shared locks meet nobody.
    """
    locked = claim.get("locked")
    if claim.get("boot") != _this_host()["boot"] or claim.get("pids") == _pid_namespace() or locked is None:
        return False
    with contextlib.suppress(OSError), open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b") as file:
        if _file_identity(file.fileno()) == locked:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
    return False


def _read(path: Path) -> dict[str, Any] | None:
    """Return the record in ``path``; None when there is no file, an empty one for a file that cannot be read."""
    try:
        record = json.loads(path.read_bytes()[:4096])
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _this_host() -> dict[str, Any]:
    """Return what identifies this host since its boot."""
    machine = Path("/etc/machine-id")
    return {
        "boot": procfs.boot_id(),
        "machine": machine.read_text().strip() if machine.is_file() else "",
        "hostname": socket.gethostname(),
    }


def _process(pid: int) -> dict[str, Any]:
    return {**_this_host(), "pids": _pid_namespace(), "pid": pid, "started": _start_time(pid)}


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _start_time(pid: int) -> int:
    """Return the start of the process in clock ticks since the boot; 0 when there is none, or a zombie."""
    with contextlib.suppress(OSError):
        if not (seen := procfs.stat(pid)).has_ended:
            return seen.started
    return 0


def _was_rebooted(record: dict[str, Any]) -> bool:
    """Return whether ``record`` is of this machine before its last boot; unknown in a container without an own id."""
    here = _this_host()
    same = record.get("machine") == here["machine"] and record.get("hostname") == here["hostname"]
    return bool(here["machine"]) and same and bool(re.fullmatch(r"[0-9a-f-]{32,36}", str(record.get("boot"))))


def write_host(path: Path) -> None:
    """Record in ``path`` that the files beside it are this host's.  Raises `OSError`."""
    path.write_text(json.dumps(_this_host()))


def is_of_another_host(path: Path) -> bool:
    """Return whether `write_host` of another host made ``path``: nothing is known of its processes and locks."""
    record = _read(path)
    return record is not None and record.get("boot") != _this_host()["boot"] and not _was_rebooted(record)


def _has_ended(claim: dict[str, Any]) -> bool:
    """Return whether the process that ``claim`` names is known to have ended."""
    if claim.get("boot") != _this_host()["boot"]:
        return _was_rebooted(claim)
    if claim.get("pids") != _pid_namespace():
        return False
    started = _start_time(int(claim["pid"])) if isinstance(claim.get("pid"), int) else 1
    return started == 0 or started != claim.get("started")
