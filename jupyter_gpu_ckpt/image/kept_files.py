"""The user's files that a save point keeps, so that a kernel can go back to them: as they were when it was saved.

Each is a copy in the image, as a reflink where the file system can.  Elsewhere only what the kernel has open for
writing is copied, and small files that it reads.  Not by hard links: they change the file's ctime, by which the images
of other kernels know that it is the same.  Program code, of which there may be gigabytes, is copied when the kernel
runs again, and once: save points share it.  A kernel goes back with a file that was not kept as it is now, if at all.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from blake3 import blake3

from ..errors import ImageDamaged, MissingFile, NoSpace
from ..files import clone
from ..node.facts import file_facts, same_file
from ..process import sqlite_wal
from . import layout
from .image import Image
from .manifest import FileEntry
from .shared_chunks import link

_log = logging.getLogger(__name__)

#: Shared memory is the kernel's, not a file of the user.
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - where glibc keeps it
#: Counters that each Java virtual machine maps, always there, and changes all the time.
_COUNTERS = re.compile(r"/tmp/hsperfdata_[^/]+/[0-9]+$")  # noqa: S108
#: IPython's history, which all kernels of a user write to, those without an agent, too: it does not go back.
_HISTORY = re.compile(r"/profile_[^/]+/history\.sqlite(-(wal|shm|journal))?$")
_BLOCK = 4 << 20
#: Extended attributes that are kept (xattr(7)); Linux and its security modules set the others themselves.
_OF_PROGRAMS = "user.", "system.posix_acl_access"
#: Bytes of the largest file that is copied although the kernel only reads it.
_SMALL = 16 << 20
#: The names of copies.
_COPY = re.compile(rf"[0-9]+|{layout.LIBRARIES}/[0-9a-f]{{64}}")


@dataclass(frozen=True)
class KeptFile:
    """A file as it was; ``copy``: the name of its copy, if there is one, and its hash.  ``mtime`` in ns.

    ``owner``, ``group``: -1 if they are not known.  ``stamped``: a change of it changes ``mtime``.  ``attributes``: the
    extended ones, in hexadecimal digits; None if they are not known.
    """

    bytes: int
    mtime: int
    mode: int
    copy: str = ""
    blake3: str = ""
    owner: int = -1
    group: int = -1
    stamped: bool = True
    attributes: dict[str, str] | None = None

    @property
    def kept(self) -> bool:
        """Return whether the file can be put back."""
        return bool(self.copy)


def keep(
    files: Mapping[str, Mapping[str, Any]], replaced: Iterable[str], directory: Path, most: int, free: int
) -> dict[str, KeptFile]:
    """Copy the files of a fingerprint, and those that are to be replaced after this, to this directory.

    The processes that write to them are stopped.  Copies may cost ``most`` bytes together, those of ``replaced`` files
    all ``free`` bytes: nothing else has their content then.  Raises `NoSpace` or `MissingFile` if one of these cannot
    be copied; any other file that the processes write to is listed without a copy then.
    """
    found: dict[str, KeptFile] = {}
    without_reflinks: set[int] = set()
    wanted = {path: facts for path, facts in files.items() if not (facts.get("made") or _HISTORY.search(path))}
    needed = dict.fromkeys(replaced)
    first = [path for path, facts in wanted.items() if facts.get("writes")]
    for path in dict.fromkeys([*needed, *first, *wanted]):
        writes = path in needed or bool(wanted[path].get("writes"))
        limit = most if writes else min(most, 0 if wanted[path].get("code") else _SMALL)
        with contextlib.suppress(OSError, ValueError):
            facts = os.lstat(path)
            if not stat.S_ISREG(facts.st_mode):
                continue
            cost, name = None, str(len(found))
            if facts.st_dev in without_reflinks and facts.st_size > limit and not writes:
                continue
            with contextlib.suppress(OSError) if path not in needed else _errors_mapped(path):
                directory.mkdir(mode=0o700, exist_ok=True)
                cost = clone.copy(Path(path), directory / name, free if path in needed else min(limit, free))
                if cost != 0:
                    without_reflinks.add(facts.st_dev)
                if cost is None and path in needed:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            free -= cost or 0
            most -= 0 if path in needed else cost or 0
            stamped = not (path in wanted and wanted[path].get("unstamped"))
            if cost is not None or writes or not stamped:
                copy = name if cost is not None else ""
                mode, owners = stat.S_IMODE(facts.st_mode), (facts.st_uid, facts.st_gid)
                attributes = _attributes(path) if copy else None
                found[path] = KeptFile(facts.st_size, facts.st_mtime_ns, mode, copy, "", *owners, stamped, attributes)
    with contextlib.suppress(OSError):  # an image has no empty directories
        directory.rmdir()
    return found


def keep_code(
    files: Mapping[str, Mapping[str, Any]], directory: Path, most: int, free: int, points: Iterable[Image]
) -> dict[str, KeptFile]:
    """Keep program code, files of a fingerprint, in this directory.

    The smallest files first, at most ``most`` bytes.  What one of the save points ``points`` has is shared by a link,
    the rest is copied, at most ``free`` bytes.  Unlike other files it need not be copied while the processes are
    stopped: a new version is another file.  One that cannot be copied, or was replaced meanwhile, is left out.
    """
    others = [(image, image.manifest.fingerprint.get("files", {}), of_image(image)) for image in points]
    found: dict[str, KeptFile] = {}
    known = {path: facts for path, facts in files.items() if facts.get("size") and "inode" in facts}
    for path, facts in sorted(known.items(), key=lambda each: int(each[1]["size"])):
        if facts["size"] > most:
            break
        hash = next(filter(None, (_linked_code(path, facts, directory, *each) for each in others)), "")
        if not hash and facts["size"] <= free and (hash := _copied_code(path, facts, directory)):
            free -= facts["size"]
        if hash:
            most -= facts["size"]
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                mode, owners = stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid)
                found[path] = KeptFile(facts["size"], facts["mtime"], mode, f"{layout.LIBRARIES}/{hash}", hash, *owners)
    for each in (directory / layout.LIBRARIES, directory):  # an image has no empty directories
        with contextlib.suppress(OSError):
            each.rmdir()
    return found


def _linked_code(
    path: str,
    facts: Mapping[str, Any],
    directory: Path,
    image: Image,
    noted: Mapping[str, Mapping[str, Any]],
    kept: Mapping[str, KeptFile],
) -> str:
    """Link the copy that a save point has of the same file; return its hash, empty if it has none."""
    if (
        path not in kept
        or not kept[path].copy.startswith(layout.LIBRARIES)
        or not same_file(noted.get(path, {}), facts)
    ):
        return ""
    hash, target = kept[path].blake3, directory / kept[path].copy
    if not target.exists():
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not link(image.criu_directory / layout.KEPT / kept[path].copy, target):
            return ""
    return hash


def _copied_code(path: str, facts: Mapping[str, Any], directory: Path) -> str:
    """Copy a file; return its hash, empty for one that cannot be copied, or is another one by now."""
    draft, size = directory / layout.LIBRARIES / "draft", facts["size"]
    try:
        draft.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        copied = clone.copy(Path(path), draft, size) is not None
        if copied and (now := file_facts(path)) is not None and same_file(facts, now):
            return draft.replace(draft.with_name(_hash(draft))).name
    except OSError as error:
        _log.info("%s is not copied: %s", path, error.strerror)
    draft.unlink(missing_ok=True)
    return ""


@contextlib.contextmanager
def _errors_mapped(path: str) -> Iterator[None]:
    """Map errors of the copy of a file that is to be replaced."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace(f"There is no space for a copy of {path}, which is to be replaced.", path=path) from error
        message = f"{path}, which is to be replaced, cannot be copied: {error.strerror}."
        raise MissingFile(message, culprit=path) from error


def hashed(files: Mapping[str, KeptFile], directory: Path) -> dict[str, dict[str, Any]]:
    """Return the files as JSON objects, with hashes of their copies in ``directory``.  Raises `OSError`."""
    return {
        path: {**vars(file), "blake3": file.blake3 or (_hash(directory / file.copy) if file.copy else "")}
        for path, file in files.items()
    }


def entries(files: Mapping[str, KeptFile]) -> dict[str, FileEntry]:
    """Return the entries of files whose hashes are known, by their names in a manifest."""
    kept = [file for file in files.values() if file.blake3]
    return {f"{layout.CRIU}/{layout.KEPT}/{file.copy}": FileEntry(file.bytes, file.blake3) for file in kept}


def of_image(image: Image) -> dict[str, KeptFile]:
    """Return the kept files of a save point by path; those whose facts have another shape are left out."""
    files = (image.manifest.save_point or {}).get("files")
    found = {}
    for path, facts in files.items() if isinstance(files, dict) else ():
        with contextlib.suppress(TypeError):
            file = KeptFile(**facts)
            if isinstance(file.copy, str) and (not file.copy or _COPY.fullmatch(file.copy)):
                found[path] = file
    return found


def is_memory(path: str) -> bool:
    """Return whether a file is memory of the processes that map it, and no file of the user's."""
    return path.startswith(SHARED_MEMORY) or _COUNTERS.match(path) is not None


def differs(path: str, file: KeptFile) -> bool:
    """Return whether the file at ``path`` is another one now, or may be.

    Reads it if its size is the same, and its time is not or proves nothing.
    """
    try:
        now = os.lstat(path)
        if not stat.S_ISREG(now.st_mode) or now.st_size != file.bytes:
            return True
        if file.attributes is not None and _attributes(path) != file.attributes:
            return True
        if now.st_mtime_ns == file.mtime and file.stamped and not path.startswith(SHARED_MEMORY):
            return False
        return _hash(Path(path)) != file.blake3 if file.blake3 else not file.stamped
    except OSError:
        return True


def obstacle(path: str, file: KeptFile, image: Path) -> str:
    """Return why the kept file cannot be put back at ``path``; empty if it can be, as far as that shows before.

    Its directory need not be there.  ``image``: the directory of the copy.
    """
    target, uid = Path(path), os.geteuid()
    directory = target.parent
    while not os.path.lexists(directory):
        directory = directory.parent
    if not directory.is_dir():
        return f"{directory} is no directory"
    try:
        facts, there = directory.stat(), target.lstat() if os.path.lexists(target) else None
        if there is not None and (other := _kind_of_no_file(there.st_mode)):
            return f"{other} has its name"
        if not os.access(directory, os.W_OK | os.X_OK):
            return f"no file can be made in {directory}"
        if there is not None and facts.st_mode & stat.S_ISVTX and uid not in (0, facts.st_uid, there.st_uid):
            return f"it is another user's, and in {directory} only its owner can replace it"
        if facts.st_dev != image.stat().st_dev and shutil.disk_usage(directory).free < file.bytes:
            return f"there is no space for it in {directory}"
    except OSError as error:
        return f"{directory} cannot be read: {error.strerror}"
    return ""


def mode_of_directory(file: KeptFile) -> int:
    """Return the mode for a directory that is made for a file.  An installer leaves the mode of one that is there."""
    readers = file.mode & 0o044 if file.copy.startswith(layout.LIBRARIES) else 0
    return 0o700 | readers | readers >> 2


def put_back(path: str, file: KeptFile, directory: Path, *, database: int = 0) -> None:
    """Replace the file at ``path``, atomically, by the kept one, as its owner's.  Raises `OSError`, `ImageDamaged`.

    Another user may own its directory, and put a link in the draft's place: only its descriptor is used.
    ``database``: the inode of one of SQLite's that the kernel has open, which is written over where it is still there.
    """
    target, copy = Path(path), directory / file.copy
    if database and _write_over(path, file, copy, database):
        return
    draft = target.with_name(f".{target.name[:200]}-{secrets.token_hex(4)}")
    made = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(made, "r+b", buffering=0) as content:
            os.ftruncate(made, copy.stat().st_size)
            clone.copy_into(copy, made, 0)
            if _hash_of(content) != file.blake3:
                raise ImageDamaged(f"The copy of {path} is not what was saved.", path=path)
            _set_facts(made, file)
        if os.path.lexists(target) and (other := _kind_of_no_file(target.lstat().st_mode)):
            raise FileExistsError(errno.EEXIST, f"{other} has its name", path)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def _write_over(path: str, file: KeptFile, copy: Path, inode: int) -> bool:
    """Write a database over what the file has now, as a transaction of SQLite does; return whether that was possible.

    A connection that was opened before knows the file by its inode, and writes to no other (os_unix.c, fileHasMoved).
    Not possible while others are in a transaction.  When this breaks off, the kernel's present state has a copy.
    """
    try:
        opened = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    with open(opened, "r+b", buffering=0) as target, copy.open("rb", buffering=0) as content:
        if os.fstat(opened).st_ino != inode or not sqlite_wal.lock_alone(opened):
            return False
        if _hash_of(content) != file.blake3:
            raise ImageDamaged(f"The copy of {path} is not what was saved.", path=path)
        content.seek(0)
        while block := content.read(_BLOCK):
            target.write(block)  # holes, too: it never has less than what others may have mapped of both
        os.ftruncate(opened, file.bytes)
        _set_facts(opened, file)
    return True


def _set_facts(made: int, file: KeptFile) -> None:
    """Give a file that is open its owner, attributes, mode and time, and flush it."""
    with contextlib.suppress(PermissionError):  # only root can, who works in directories of others
        os.fchown(made, file.owner, file.group)
    for name, value in (file.attributes or {}).items():  # before the mode, which may not allow it
        os.setxattr(made, name, bytes.fromhex(value))
    os.fchmod(made, file.mode)
    os.utime(made, ns=(file.mtime, file.mtime))
    os.fsync(made)  # else a power failure may leave a file without content


def _kind_of_no_file(mode: int) -> str:
    """Return what has this mode, empty for a regular file: no save point keeps it, so it must not be replaced."""
    if stat.S_ISREG(mode):
        return ""
    return "a directory" if stat.S_ISDIR(mode) else "a symbolic link" if stat.S_ISLNK(mode) else "a special file"


def _attributes(path: str) -> dict[str, str] | None:
    """Return the extended attributes of a file that a program sets: its own, and lists of who may access the file."""
    try:
        names = [name for name in os.listxattr(path, follow_symlinks=False) if name.startswith(_OF_PROGRAMS)]
        return {name: os.getxattr(path, name, follow_symlinks=False).hex() for name in sorted(names)}
    except OSError:  # a file system without them
        return None


def _hash(path: Path) -> str:
    with path.open("rb", buffering=0) as file:
        return _hash_of(file)


def _hash_of(file: FileIO) -> str:
    hasher = blake3()
    while block := file.read(_BLOCK):
        hasher.update(block)
    return hasher.hexdigest()
