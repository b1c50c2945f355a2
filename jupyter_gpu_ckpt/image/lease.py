"""Who may bring an image to life: one restorer at a time, and one living kernel for ever.

Three things, each for what the one before cannot know:

*The lock* (``flock``) is held by one process of this host and goes with it, however it ends.

*The lease* is a numbered file in the image, made by an exclusive link: of two restorers on two hosts whose file system
has no working locks, one gets the number.  Its holder touches it while it lives.  One of another host that was not
touched for `EXPIRY` seconds is over, and the next restorer takes the next number.  The time is the file server's.

*The claim* says that the image's kernel lives, and as which process.  It is made by an exclusive link too, just before
the first message reaches a restored kernel: of two restorers, however late one of them comes back from wherever it
hung, one gets it and the other must end what it restored.  It lies in the image's directory, so there is none to be had
once the image was removed.  A checkpoint publishes its image with a claim for the kernel that still runs, and takes it
off when that has ended.  A claim does not expire: it is void when its process is known to be gone, or when somebody who
knows it says so (`break_claim`).  Only its own host can know it: by the process's id, or, where ids mean something else
(in another container), by the lock that the process's capsule keeps on the claim for as long as it lives.  One Linux
has one opinion about who holds a lock.

On a full disk nothing is restored.  A removal, the way out of it, goes on with what could not be made left out.

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .. import procfs
from ..errors import CapsuleError, CapsuleGone, ImageBusy, ImageNotFound, NoSpace
from ..files.atomic import flush
from ..files.disk import mapped
from . import layout
from .layout import CLAIM, LEASES

#: Seconds after which a lease that nobody touched is over.
EXPIRY = 30.0
_FULL = (errno.ENOSPC, errno.EDQUOT)

#: Takes a locked descriptor over, and has it open for as long as the claimed process lives (`Capsule.hold`).
Holder = Callable[[int], object]


class Lease:
    """The right to restore or remove one image, until `end`; `acquire` and `hold` get it."""

    def __init__(self, path: Path, lock: FileLock, *, remove: bool) -> None:
        self.path = path
        self._lock = lock
        self._claimed = False
        self._record = {**_here(), "holder": secrets.token_hex(8)}
        try:
            number = _next(path, self._record)
        except OSError as error:
            if not remove or error.errno not in _FULL:
                raise
            number = 0  # which no lease has: the lock alone must do
        self._file = path / LEASES / str(number)
        self._over = threading.Event()
        self._touching = threading.Thread(target=self._touch, name="image-lease", daemon=True)
        self._touching.start()

    def _touch(self) -> None:
        while not self._over.wait(EXPIRY / 4):
            with contextlib.suppress(OSError):  # removed with its image, or a file server that is away
                os.utime(self._file)

    def claim(self, pid: int, holder: Holder | None = None) -> None:
        """From now on the kernel lives as process ``pid``.

        Raises `ImageBusy` when it lives elsewhere already, `NoSpace` when there is no room to say so.  After failure
        there must not be a kernel from this image: the caller ends it.
        """
        try:
            made = _link(self.path / CLAIM, _process(pid), holder)
        except OSError as error:
            if error.errno in _FULL:
                message = "The disk of the image directory is full: that the kernel lives cannot be written there."
                raise NoSpace(message, directory=str(self.path.parent)) from error
            raise ImageBusy("The image went away while it was being restored.", image=self.path.name) from error
        if not made:
            raise ImageBusy("The kernel was restored elsewhere meanwhile.", image=self.path.name)
        self._claimed = True

    def withdraw(self) -> None:
        """The process that `claim` named, if it was called, has ended.  Raises `OSError`."""
        if self._claimed:
            withdraw_claim(self.path)
            self._claimed = False

    def end(self) -> None:
        """Give the lease up.  A claim stays."""
        self._over.set()
        self._touching.join()
        with contextlib.suppress(OSError):
            if _read(self._file) == self._record:  # else another has taken over, and its lease has our number
                self._file.unlink()
            self._file.parent.rmdir()
        self._lock.release()


def acquire(path: Path, *, remove: bool = False, patience: float = 0.0) -> Lease:
    """The lease of the image at ``path``.

    To ``remove`` an image is no harm to a kernel that lives.  Raises `ImageBusy` when another process of this host has
    it for more than ``patience`` seconds, and at once when another host holds it or, if not to remove it, the kernel
    lives; `ImageNotFound` when another has removed it; `StoreUnwritable` and, if not to
    remove it, `NoSpace`.
    """
    with mapped(path.parent):
        return _acquire(path, remove, patience)


def _acquire(path: Path, remove: bool, patience: float) -> Lease:
    lock = FileLock(layout.mark(path, layout.LOCK), timeout=patience, mode=0o600, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ImageBusy(f"Image {path.name} is in use by another process.", image=path.name) from error
    except OSError as error:
        if not remove or error.errno not in _FULL:  # nobody holds a lock that cannot even be made
            raise
    try:
        if not path.is_dir():  # whoever held the lease before removed it
            Path(lock.lock_file).unlink(missing_ok=True)
            raise ImageNotFound(f"There is no image {path.name!r}.", image=path.name)
        if not remove:
            require_unclaimed(path)
        try:
            return Lease(path, lock, remove=remove)
        except FileNotFoundError as error:  # whoever held it gives it up, or removes the image, at this moment
            raise ImageBusy(f"Image {path.name} is in use by another process.", image=path.name) from error
    except BaseException:
        lock.release()
        raise


@contextlib.contextmanager
def hold(path: Path, *, remove: bool = False, patience: float = 0.0) -> Iterator[Lease]:
    """`acquire` the lease for the body."""
    lease = acquire(path, remove=remove, patience=patience)
    try:
        yield lease
    finally:
        lease.end()


def publish_claim(path: Path, pid: int, holder: Holder | None = None) -> None:
    """In a draft: its kernel lives as process ``pid`` until `withdraw_claim`.  Raises `OSError`."""
    _link(path / CLAIM, _process(pid), holder)


def withdraw_claim(path: Path) -> None:
    """The kernel whose image this is has ended.  On disk when this returns: else the image would seem to be in use."""
    (path / CLAIM).unlink(missing_ok=True)
    flush(path)


def break_claim(path: Path) -> bool:
    """Somebody knows that the kernel is gone; whether there was a claim."""
    if not (path / CLAIM).exists():
        return False
    withdraw_claim(path)
    return True


def require_unclaimed(path: Path) -> None:
    """Raises `ImageBusy` when the kernel lives; takes off a claim whose process is known to be gone."""
    claim = _read(path / CLAIM)
    if claim is None:
        return
    if not _gone(claim) and not _let_go(path / CLAIM, claim):
        host = claim.get("hostname", "?")
        raise ImageBusy(
            f"The kernel of image {path.name} runs on {host}.",
            hint="Use it there. If that host is gone for good, `jupyter gpu-ckpt break-claim IMAGE` says so.",
            image=path.name,
            hostname=host,
        )
    (path / CLAIM).unlink(missing_ok=True)


def _next(path: Path, record: dict[str, Any]) -> int:
    """The number of a fresh lease with ``record``.  Raises `ImageBusy`, `FileNotFoundError`."""
    directory = path / LEASES
    if directory.is_symlink() or directory.is_file():
        directory.unlink()  # not made by us
    directory.mkdir(mode=0o700, exist_ok=True)
    last = max((int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal()), default=0)
    if last and (other := _read(directory / str(last))) is not None and other.get("boot") != record["boot"]:
        # Its holder is on another host, where our lock may mean nothing.
        now = _now(directory)
        with contextlib.suppress(FileNotFoundError):
            age = now - (directory / str(last)).stat().st_mtime
            if age < EXPIRY:
                raise ImageBusy(
                    f"Image {path.name} is in use on {other.get('hostname', '?')}.", image=path.name, seconds=age
                )
    if not _link(directory / str(last + 1), record):
        raise ImageBusy(f"Image {path.name} is in use by another process.", image=path.name)
    with contextlib.suppress(OSError):
        (directory / str(last)).unlink()
    return last + 1


def _now(directory: Path) -> float:
    """The time of the file server, which stamps all files; a stamp needs no room on the disk, as a new file would."""
    os.utime(directory)
    return directory.stat().st_mtime


def _link(path: Path, record: dict[str, Any], holder: Holder | None = None) -> bool:
    """Make ``path`` with ``record`` in it; False when there is one.  Whole or not at all, by one process alone."""
    draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    draft.touch(0o600)
    try:
        if holder is not None:
            record = {**record, "held": _give(draft, holder)}
        draft.write_text(json.dumps(record))
        path.hardlink_to(draft)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def _give(path: Path, holder: Holder) -> list[int] | None:
    """Lock ``path`` and hand the lock over; which file it is, or None where there are no locks or nobody takes it.

    Not a `FileLock`: the lock is to belong to a descriptor that another process keeps, after this one has ended.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        holder(fd)
        return _file(fd)
    except (OSError, CapsuleError, CapsuleGone):  # such a claim is judged by its process's id alone
        return None
    finally:
        os.close(fd)


def _file(fd: int) -> list[int]:
    facts = os.fstat(fd)
    return [facts.st_dev, facts.st_ino]


def _let_go(path: Path, claim: dict[str, Any]) -> bool:
    """Whether a claim from elsewhere on this host is held by nobody any more.

    The very file must be seen through the very mount: of two mounts of one directory each may have locks of its own.
    Not a `FileLock`, which is exclusive and could meet another that looks: shared locks are in nobody's way.
    """
    if claim.get("boot") != _here()["boot"] or claim.get("pids") == _pids() or claim.get("held") is None:
        return False
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if _file(fd) != claim["held"]:
            return False
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _read(path: Path) -> dict[str, Any] | None:
    """The record in ``path``; None when there is no file, an empty one for what cannot be read."""
    try:
        record = json.loads(path.read_bytes()[:4096])
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _here() -> dict[str, Any]:
    """This host, since it was booted."""
    machine = Path("/etc/machine-id")
    return {
        "boot": procfs.boot_id(),
        "machine": machine.read_text().strip() if machine.is_file() else "",
        "hostname": socket.gethostname(),
    }


def _process(pid: int) -> dict[str, Any]:
    return {**_here(), "pids": _pids(), "pid": pid, "started": _started(pid)}


def _pids() -> str:
    """In which namespace a pid of ours means what it says."""
    return str(Path("/proc/self/ns/pid").readlink())


def _started(pid: int) -> int:
    """When the process was started, in clock ticks since the boot; 0 when there is none, or a zombie."""
    with contextlib.suppress(OSError):
        seen = procfs.stat(pid)
        return 0 if seen.has_ended else seen.started
    return 0


def _booted_since(record: dict[str, Any]) -> bool:
    """The same machine, booted again.  A container without an id of its own is not known to be the same."""
    here = _here()
    same = record.get("machine") == here["machine"] and record.get("hostname") == here["hostname"]
    return bool(here["machine"]) and same and bool(re.fullmatch(r"[0-9a-f-]{32,36}", str(record.get("boot"))))


def write_host(path: Path) -> None:
    """What this is a file beside is this host's.  Raises `OSError`."""
    path.write_text(json.dumps(_here()))


def is_of_another_host(path: Path) -> bool:
    """Whether a file of `write_host` is there, and another host's, of whose processes and locks nothing is known."""
    record = _read(path)
    return record is not None and record.get("boot") != _here()["boot"] and not _booted_since(record)


def _gone(claim: dict[str, Any]) -> bool:
    """Whether the process that ``claim`` names is known not to live."""
    if claim.get("boot") != _here()["boot"]:
        return _booted_since(claim)
    if claim.get("pids") != _pids():
        return False
    started = _started(int(claim["pid"])) if isinstance(claim.get("pid"), int) else 1
    return started == 0 or started != claim.get("started")
