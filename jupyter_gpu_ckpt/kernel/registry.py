"""The kernels of this user on this host: one directory each, below the runtime base, with a record of what it is.

The owner (a server, a console) holds a lock on its kernels' directories for as long as it lives, so that nobody has to
guess from process ids whether a kernel still has an owner.  `reap` removes what dead owners left.

Whether that lock is held is found out by taking it, and a directory is there for a moment before it is locked.  So
whoever makes, judges or removes directories takes turns on the base: else a kernel's start could lose its directory to
the reaper of another start, or its lock to somebody who only looks.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..capsule.capsule import Capsule
from ..errors import CapsuleError, CapsuleGone, ProtocolVersion, RuntimeDirectory, StateError
from .directories import make_runtime_dir, require_private

RECORD = "kernel.json"
_LOCK = "owner.lock"
#: Below the base: notes of kernels that ended together with their server.
_LOST = ".lost"
_MOST_LOST = 100
#: Seconds to wait for one's turn; a turn takes milliseconds, or `capsule.capsule.ANSWER` for a capsule that hangs.
_TURN = 30.0


class Registration:
    """This process's claim on one kernel's directory.

    Raises `CapsuleError` when others hold the base for too long, `StateError` when another process has the claim.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = FileLock(directory / _LOCK, timeout=0, mode=0o600, thread_local=False)
        self._locked: tuple[int, int] | None = None
        self._claim()

    def _claim(self) -> None:
        try:
            with _turn(self.directory.parent):
                self._lock.acquire()
                self._locked = _file(self.directory / _LOCK)
        except Timeout as error:
            raise StateError("Another server has this kernel.", hint="Use it there, or stop it.") from error
        except OSError as error:
            raise RuntimeDirectory(f"{self.directory} cannot be written: {error.strerror}.") from error

    def write(self, **facts: Any) -> None:
        """Replace the record, or remove it where that cannot be done: an old one says what is not true any more.

        Of a kernel without a record others know that its directory has an owner.  Raises `OSError`.
        """
        draft = self.directory / f".{RECORD}"
        try:
            draft.touch(0o600)
            draft.write_text(json.dumps({**facts, "owner": os.getpid(), "directory": str(self.directory)}))
            draft.rename(self.directory / RECORD)
        except OSError:
            for stale in (draft, self.directory / RECORD):
                with contextlib.suppress(OSError):
                    stale.unlink(missing_ok=True)
            raise

    def renew(self) -> bool:
        """Make the directory again if it was removed under us, and claim it; whether that was needed.

        Raises as the constructor, and `RuntimeDirectory`.
        """
        if _file(self.directory / _LOCK) == self._locked:
            return False
        self._lock.release(force=True)
        make_runtime_dir(self.directory.parent, self.directory.name)
        self._claim()
        return True

    def release(self) -> None:
        """Give the directory up as it is, for another owner to find."""
        self._lock.release()

    def remove(self) -> None:
        """Give the directory up and remove it.  Never raises: what cannot be removed now is left to `reap`."""
        with contextlib.suppress(CapsuleError, OSError), _turn(self.directory.parent):
            shutil.rmtree(self.directory, ignore_errors=True)
        self._lock.release()


def kernels(base: Path) -> list[dict[str, Any]]:
    """The records of all kernels below ``base``, each with ``owned``: whether its owner lives.

    A kernel without an owner is listed if its capsule lives on; if that has ended too, there is no kernel any more.
    Raises `CapsuleError` when others hold the base for too long.
    """
    found = []
    if base.is_dir():
        with _turn(base):
            for directory in _directories(base):
                owned = _is_owned(directory)
                if (owned or _is_alive(directory)) and (record := _record(directory)) is not None:
                    found.append({**record, "owned": owned})
    return found


def owned_kernel(directory: Path) -> dict[str, Any] | None:
    """The record of the kernel whose directory this is, if its owner lives on this host.

    Raises `CapsuleError` when others hold the base for too long.
    """
    with contextlib.suppress(OSError), _turn(directory.parent):
        return _record(directory) if _is_owned(directory) else None
    return None


def reap(base: Path) -> list[Path]:
    """Remove the directories whose owner is gone and whose capsule (if any) has ended; returns them.

    A capsule that was told to outlive its owner is left alone: somebody may adopt it.  Raises `CapsuleError` when
    others hold the base for too long.
    """
    removed = []
    if base.is_dir():
        with _turn(base):
            for directory in _directories(base):
                if not _is_owned(directory) and not _is_alive(directory):
                    with contextlib.suppress(OSError):
                        _note_lost(base, directory)
                    shutil.rmtree(directory, ignore_errors=True)
                    removed.append(directory)
    return removed


def claim_lost(base: Path, kernel_id: str, notebook: str) -> str:
    """The id of a kernel that ended together with its server, and that a new one takes the place of; empty if none.

    It is the one of this id, or else of this ``notebook``; and it is said once.  Called after `reap`, which notes them.
    """
    with contextlib.suppress(OSError, CapsuleError), _turn(base):
        notes = [(path, _json(path)) for path in sorted((base / _LOST).glob("*.json"))]
        mine = [(path, note) for path, note in notes if note.get("kernel_id") == kernel_id]
        same = [(path, note) for path, note in notes if notebook and note.get("notebook") == notebook]
        for path, _ in [*mine, *same]:
            path.unlink(missing_ok=True)
        if mine or same:
            return str((mine or same)[-1][1]["kernel_id"])
    return ""


def _note_lost(base: Path, directory: Path) -> None:
    """A kernel whose server and whose process have ended, and that was not asleep: remember it for who comes after."""
    record, session = _record(directory) or {}, _json(directory / "session.json")
    if record.get("state") in (None, "dead", "checkpointed") or not record.get("kernel_id"):
        return
    place = base / _LOST
    place.mkdir(mode=0o700, exist_ok=True)
    for old in sorted(place.glob("*.json"), key=lambda path: path.stat().st_mtime)[: -_MOST_LOST or None]:
        old.unlink(missing_ok=True)
    note = place / f"{directory.name}.json"
    note.touch(0o600)
    note.write_text(json.dumps({"kernel_id": record["kernel_id"], "notebook": session.get("notebook", "")}))


@contextlib.contextmanager
def _turn(base: Path) -> Iterator[None]:
    """Hold the lock of the base, which is a flock(2) on the directory itself.

    Not a `FileLock`: that opens a file for writing, so that one would be left in the base, which is empty when no
    kernel is there; and a cleaner of temporary files may remove a file that is locked, but leaves a directory that is
    (tmpfiles.d(5)).  Nothing below a base that others can write to is believed, locked or removed: `CapsuleError`.
    """
    require_private(base)
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _TURN
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = "Another process holds the directory of the kernels for too long."
                    raise CapsuleError(message, directory=str(base)) from None
                time.sleep(0.005)
        yield
    finally:
        os.close(fd)


def _file(path: Path) -> tuple[int, int] | None:
    """Which file ``path`` is; None where there is none."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _directories(base: Path) -> list[Path]:
    return sorted(path.parent for path in base.glob(f"*/{_LOCK}"))


def _record(directory: Path) -> dict[str, Any] | None:
    """The record in ``directory``; none while a kernel is being started there."""
    return _json(directory / RECORD) or None


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_owned(directory: Path) -> bool:
    if not (directory / _LOCK).exists():  # else a `FileLock` would make the directory, too
        return False
    try:
        with FileLock(directory / _LOCK, timeout=0, mode=0o600):
            return False
    except Timeout:
        return True
    except OSError:
        return False


def _is_alive(directory: Path) -> bool:
    """Whether a capsule without an owner answers.  It goes on undisturbed."""
    try:
        Capsule.attach(directory).detach()
    except ProtocolVersion:  # its own release may adopt it
        return True
    except (CapsuleError, CapsuleGone, OSError):
        return False
    return True
