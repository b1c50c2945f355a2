"""The kernels of this user on this host: a directory for each, below the runtime base, with a record of its state.

The owner (a server, a console) keeps a lock on its kernels' directories as long as it lives, so that nothing is guessed
from process ids.  `reap` removes the directories of dead owners.

To see whether a directory is locked is to lock it, and a new directory exists for a moment before it is locked.  So
all that make, inspect or remove directories first lock the base: else a starting kernel could lose its directory to
another's `reap`, or its lock to an inspection.

A branch, and a kernel of a template, know their directory by the path of the kernel that they come from
(`Session.runtime_dir`), where their capsule mounts it.  So that path stays, as an empty directory, as long as one of
them needs it: Linux unmounts what is mounted on a directory that is removed, in all namespaces.
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

from ..capsule.capsule import Capsule, remove_beside
from ..errors import CapsuleError, CapsuleGone, ProtocolVersion, StateError
from ..files.atomic import write_atomically
from ..image import layout
from .directories import RUNTIME_DIR, make_runtime_dir, require_private, writing

RECORD = "kernel.json"
#: In a directory whose kernel has ended, and that is kept for its path.
_KEPT = ".kept"
#: Of the record: to be raised when a reader has to know of a change.
VERSION = 1
_LOCK = "owner.lock"
#: Below the base: notes of kernels that ended together with their server, and the most that are kept.
_LOST = ".lost"
_MAX_LOST = 100
#: Seconds to wait for the lock of the base; others keep it for milliseconds, or `capsule.ANSWER` if a capsule hangs.
_LOCK_TIMEOUT = 30.0


class Registration:
    """This process's lock on a kernel's directory.

    Raises `CapsuleError` when others lock the base for too long, `StateError` when another process has the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = FileLock(directory / _LOCK, timeout=0, mode=0o600, thread_local=False)
        self._locked: tuple[int, int] | None = None
        self._claim()

    def keep(self, path: Path) -> None:
        """Make the path by which the kernel knows its directory, if that is gone, for as long as a kernel needs it.

        Only beside its own.  Raises `RuntimeDirectory`.
        """
        if path.parent == self.directory.parent and path != self.directory:
            with writing(path), _locked_base(path.parent), contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
                (path / _KEPT).touch(mode=0o600)

    def _claim(self) -> None:
        with writing(self.directory), _locked_base(self.directory.parent):
            self.directory.mkdir(mode=0o700, exist_ok=True)  # it may be gone since, as an empty one
            try:
                self._lock.acquire()
            except Timeout as error:
                raise StateError("Another server has this kernel.", hint="Use it there, or stop it.") from error
            self._locked = _file(self.directory / _LOCK)

    def write(self, **facts: Any) -> None:
        """Replace the record, or remove it where that fails: no record is better than a wrong one.

        Raises `OSError`.
        """
        path = self.directory / RECORD
        own = {"version": VERSION, "owner": os.getpid(), "directory": str(self.directory)}
        try:
            write_atomically(path, json.dumps({**facts, **own}), durable=False)
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
            raise

    def renew(self) -> bool:
        """Make and lock the directory again if it was removed meanwhile; return whether that was needed.

        Raises as the constructor, and `RuntimeDirectory`.
        """
        if _file(self.directory / _LOCK) == self._locked:
            return False
        self._lock.release(force=True)
        make_runtime_dir(self.directory.parent, self.directory.name)
        self._claim()
        return True

    def release(self) -> None:
        """Unlock the directory and leave it as it is, for another owner."""
        self._lock.release()

    def remove(self) -> None:
        """Remove and unlock the directory.  Never raises: `reap` removes what cannot be removed now."""
        with contextlib.suppress(CapsuleError, OSError), _locked_base(self.directory.parent):
            _remove(self.directory)
            _remove_unused(self.directory.parent)
        self._lock.release()


def kernels(base: Path) -> list[dict[str, Any]]:
    """Return the records of all kernels below ``base``, each with ``owned``: whether its owner lives.

    A kernel without an owner is listed if its capsule still runs.  For a record of another release ``state`` is
    ``refused``, and ``refusal`` says why.  Raises `CapsuleError` when others lock the base for too long.
    """
    found = []
    if base.is_dir():
        with _locked_base(base):
            for directory in _directories(base):
                owned = _is_owned(directory)
                if not owned and not _is_alive(directory):
                    continue
                try:
                    record = _record(directory)
                except ProtocolVersion as error:
                    refused = {"kernel_name": "", "state": "refused", "pid": None, "image": None, "owner": None}
                    record = {**error.details, **refused, "directory": str(directory), "refusal": error.message}
                if record is not None:
                    found.append({**record, "owned": owned})
    return found


def owned_kernel(directory: Path) -> dict[str, Any] | None:
    """Return the record of the kernel in ``directory`` if its owner lives on this host.

    Raises `CapsuleError` when others lock the base for too long, `ProtocolVersion` for a record of another release.
    """
    with contextlib.suppress(OSError), _locked_base(directory.parent):
        return _record(directory) if _is_owned(directory) else None
    return None


def owned_by_id(directory: Path, kernel_id: str) -> dict[str, Any] | None:
    """Do as `owned_kernel`, for the kernel ``kernel_id``; raises as that.

    ``directory`` is that of its sockets as the kernel knows it: a branch knows that of its source, and has
    another one beside it.
    """
    found = owned_kernel(directory)
    if found is None or found["kernel_id"] != kernel_id:
        owned = (each for each in kernels(directory.parent) if each["owned"])
        return next((each for each in owned if each["kernel_id"] == kernel_id), None)
    return found


def reap(base: Path) -> list[Path]:
    """Remove and return the directories whose owner is gone and whose capsule (if any) has ended.

    A capsule that outlives its owner stays, to be attached.  Raises `CapsuleError` as `kernels` does.
    """
    removed = []
    if base.is_dir():
        with _locked_base(base):
            for directory in _directories(base):
                if not _is_owned(directory) and not _is_alive(directory):
                    with contextlib.suppress(OSError, ProtocolVersion):
                        _note_lost(base, directory)
                    _remove(directory)
                    removed.append(directory)
            _remove_unused(base)
    return removed


def claim_lost(base: Path, kernel_id: str, notebook: str) -> str:
    """Return the id of a kernel that ended together with its server, once; empty if there is none.

    It has the id ``kernel_id``, or else this ``notebook``.  Called after `reap`, which notes such kernels.
    """
    with contextlib.suppress(OSError, CapsuleError), _locked_base(base):
        notes = [(path, _json(path)) for path in sorted((base / _LOST).glob("*.json"))]
        mine = [(path, note) for path, note in notes if note.get("kernel_id") == kernel_id]
        same = [(path, note) for path, note in notes if notebook and note.get("notebook") == notebook]
        for path, _ in [*mine, *same]:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # there are others
            (base / _LOST).rmdir()
        if mine or same:
            return str((mine or same)[-1][1]["kernel_id"])
    return ""


def _note_lost(base: Path, directory: Path) -> None:
    """Write a note of a kernel that ended, not asleep, together with its server, for `claim_lost`."""
    record, session = _record(directory) or {}, _json(directory / layout.SESSION)
    if record.get("state") in (None, "dead", "checkpointed") or not record.get("kernel_id"):
        return
    notes = base / _LOST
    notes.mkdir(mode=0o700, exist_ok=True)
    for old in sorted(notes.glob("*.json"), key=lambda path: path.stat().st_mtime)[: -_MAX_LOST or None]:
        old.unlink(missing_ok=True)
    note = {"kernel_id": record["kernel_id"], "notebook": session.get("notebook", "")}
    write_atomically(notes / f"{directory.name}.json", json.dumps(note), durable=False)


def _remove(directory: Path) -> None:
    """Remove a kernel's directory, or only its content if other kernels know theirs by its path.  Never raises."""
    remove_beside(directory)
    if directory.name not in _known_names(directory.parent, but=directory):
        shutil.rmtree(directory, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        (directory / _KEPT).touch(mode=0o600)
    with contextlib.suppress(OSError):
        for path in [each for each in directory.iterdir() if each.name != _KEPT]:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _remove_unused(base: Path) -> None:
    """Remove directories that `_remove` has kept, by whose paths no kernel knows its own any more.  Never raises.

    Others that are empty may be where the capsule of a kernel with another base has mounted its directory.
    """
    known = _known_names(base)
    with contextlib.suppress(OSError):
        for path in base.iterdir():
            if RUNTIME_DIR.fullmatch(path.name) and path.name not in known and (path / _KEPT).exists():
                with contextlib.suppress(OSError):  # it is a kernel's again
                    if [each.name for each in path.iterdir()] == [_KEPT]:
                        (path / _KEPT).unlink()
                        path.rmdir()


def _known_names(base: Path, but: Path | None = None) -> set[str]:
    """Return the last names of the paths by which kernels know their directories, but for the one in ``but``."""
    sessions = [_json(path / layout.SESSION) for path in _directories(base) if path != but]
    return {Path(str(session.get("runtime_dir", ""))).name for session in sessions}


@contextlib.contextmanager
def _locked_base(base: Path) -> Iterator[None]:
    """Lock the base, by a flock(2) on the directory itself.

    Not by a `FileLock`: that would leave a file in the base, which is empty when there is no kernel; and a cleaner of
    temporary files may remove a locked file, but leaves a locked directory (tmpfiles.d(5)).  In a base that others can
    write to nothing is read, locked or removed: `CapsuleError`.
    """
    require_private(base)
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = "Another process has locked the directory of the kernels for too long."
                    raise CapsuleError(message, directory=str(base)) from None
                time.sleep(0.005)
        yield
    finally:
        os.close(fd)


def _file(path: Path) -> tuple[int, int] | None:
    """Return device and inode of ``path``; None where there is no file."""
    with contextlib.suppress(OSError):
        facts = path.stat()
        return facts.st_dev, facts.st_ino
    return None


def _directories(base: Path) -> list[Path]:
    return sorted(path.parent for path in base.glob(f"*/{_LOCK}"))


def _record(directory: Path) -> dict[str, Any] | None:
    """Return the record in ``directory``; None while a kernel is being started there.  Raises `ProtocolVersion`."""
    record = _json(directory / RECORD)
    if record and (version := record.pop("version", None)) != VERSION:
        message = f"The record {directory / RECORD} is of version {version}; this release knows version {VERSION}."
        kernel_id = str(record.get("kernel_id", directory.name))
        raise ProtocolVersion(message, left="the kernel is as it was", kernel_id=kernel_id, version=version)
    return record or None


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty where there is none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}


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
    """Return whether a capsule without an owner answers."""
    try:
        Capsule.attach(directory).detach()
    except ProtocolVersion:  # for its own release to attach
        return True
    except (CapsuleError, CapsuleGone, OSError):
        return False
    return True
