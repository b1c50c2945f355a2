"""SQLite databases with a write-ahead log: what a kernel relies on that sleeps with one open.

Beside a database ``X`` lie its log ``X-wal`` and the index of the log, ``X-shm``, which all processes map ("WAL-mode
File Format" and "Database File Format", 4, of SQLite's documentation).  An open connection keeps two POSIX locks:
SHARED on the database, and the "dead man's switch" (DMS) on the index.  While others see them they remove neither log
nor index, do not clear the index, and do not leave WAL mode.  What they commit, a connection without a transaction
notices by the header of the index, which differs from its copy then: it drops the pages that it has cached.

A sleeping kernel has no locks.  So others may have cleared the index and removed the log, after all of it had been
copied to the database; a log that is made anew has an index with the same header as any other empty log, and a woken
kernel would trust its old pages.  `lock_database` sets both locks in the kernel's place and does what SQLite does:

- If nobody else has DMS, the index is cleared.  SQLite builds it again from the log (recovery).  An empty log gets a
  header with a random salt, and a byte behind it so that the header counts, as a writer leaves it that was killed in
  its first write.  The header of the index gets that salt, which no connection can have seen.
- If others have it, log and index are theirs and complete.  Where the header of the index is that of an empty log, it
  gets a random salt, too, under the lock of writers.

A log may have frames that are nowhere else: pages that were committed and not copied to the database yet.  `uncopied`
notes the pages of the database that these are to replace, `is_lost` whether log and copies are gone: somebody has
removed the log, or has copied the database without it.

This holds for connections without a transaction alone (`transaction`): one in a transaction reads or writes by what it
knew of the log.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

#: Names of log and index, and of a rollback journal: these after that of the database.
LOG, INDEX, JOURNAL = "-wal", "-shm", "-journal"
#: The first bytes of a database, and how many of them `page_size` needs.
MAGIC, HEADER_BYTES = b"SQLite format 3\0", 20
#: Of a database (os.h): the lock SHARED.  Of an index (os_unix.c): those of a writer, a checkpoint, a recovery and of
#: readers, from the first byte to the second, which is DMS.
_SHARED, _SHARED_BYTES = 0x40000002, 510
#: All locks of a database: PENDING, RESERVED and SHARED.
_PENDING, _ALL_BYTES = 0x40000000, 512
_WRITER, _DMS = 120, 128
#: Errors of a file system without locks of open files.
_NO_LOCKS = (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
#: Seconds for others to have done what they do for moments only.
_PATIENCE = 2.0
#: ``struct flock``
_FLOCK = struct.Struct("=hh4xqqi4x")
#: Of the index: version, unused, number of changes, whether it is complete, order of bytes in checksums, page size,
#: frames, pages, checksum of the last frame, salt, checksum.  There are two copies of it.
_INDEX_HEADER = struct.Struct("=IIIBBHII2I2I2I")
_COMPLETE, _FRAMES, _SALT, _CHECKSUM = 3, 6, slice(10, 12), slice(12, 14)
_CHECKSUMMED = 40
#: Where the index has the number of frames that were copied to the database (``nBackfill``), behind both headers.
_COPIED = 2 * _INDEX_HEADER.size
#: Pages of a database that are noted at most.
_NOTED_PAGES = 256
_INDEX_BYTES = 1 << 15
#: Of the log: magic number, version, page size, number of checkpoints, salt, checksum; in the order of networks.
_LOG_HEADER = struct.Struct(">IIII2I2I")
_LOG_MAGIC, _LOG_VERSION, _FRAME_HEADER_BYTES = 0x377F0682, 3007000, 24

Lock = Sequence[int]


class DatabaseLocked(OSError):
    """Another process has a lock for longer than a moment; ``filename``: of what."""


class DatabaseChanged(OSError):
    """A file is not the one that was compared; ``filename``: which."""


def page_size(header: bytes) -> int:
    """Return the size of a page of a database by its first `HEADER_BYTES`; 0 if it is none, or not in WAL mode."""
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC) or header[18:20] != b"\2\2":
        return 0
    (size,) = struct.unpack_from(">H", header, 16)
    return 65536 if size == 1 else int(size)


def transaction(database: Iterable[Lock], index: Iterable[Lock]) -> str:
    """Return whether a process is in a transaction, by its locks on both files: ``none``, ``read`` or ``write``.

    A lock is ``l_type``, ``l_start`` and ``l_len``.  Empty if they are not those of an open connection.
    """
    database, index = list(database), list(index)
    if not _reads(database, _SHARED) or not _reads(index, _DMS):
        return ""
    if any(kind != fcntl.F_RDLCK for kind, _, _ in (*database, *index)):
        return "write"
    # Linux joins adjacent locks, so one that covers DMS may also be that of a reader.
    return "read" if any(_reads(index, byte) for byte in range(_WRITER, _DMS)) else "none"


def _reads(locks: Iterable[Lock], byte: int) -> bool:
    return any(
        kind == fcntl.F_RDLCK and start <= byte and (length == 0 or byte < start + length)
        for kind, start, length in locks
    )


def lock_database(path: str, index_bytes: int, anew: bool, unchanged: dict[str, list[int]] | None = None) -> list[int]:
    """Set the locks of a connection to the database at ``path``; return the descriptors that have them.

    ``index_bytes``: of the index that the kernel has mapped; it is enlarged if need be.  ``anew``: make log and index
    ready for a kernel that was in no transaction, as others may have changed them.  ``unchanged``: inode, size, mtime
    and ctime (ns) of each file that must not have changed since it was compared.  Returns none if the file system has
    no such locks and nothing is made anew.  Raises `DatabaseLocked`, `DatabaseChanged`, `OSError`.
    """
    descriptors: list[int] = []
    try:
        descriptors.append(database := _open(path, os.O_RDONLY))
        # Before the other files are opened: from here on nobody removes them.
        _wait(lambda: _lock(database, fcntl.F_RDLCK, _SHARED, _SHARED_BYTES), path)
        size = page_size(os.pread(database, HEADER_BYTES, 0))
        if not size:
            raise DatabaseChanged(errno.ESTALE, "not in WAL mode", path)
        if not anew:
            descriptors.append(index := _open(path + INDEX, os.O_RDWR))
            _wait(lambda: _lock(index, fcntl.F_RDLCK, _DMS), path + INDEX)
            _require_unchanged(unchanged or {})
            _enlarge(index, index_bytes)
            return descriptors
        like = os.fstat(database)
        log = _open(path + LOG, os.O_RDWR, like)
        try:
            descriptors.append(index := _open(path + INDEX, os.O_RDWR, like))
            _prepare(log, index, path, size, max(index_bytes, _INDEX_BYTES))
        finally:
            os.close(log)
    except BaseException as error:
        for descriptor in descriptors:
            os.close(descriptor)
        if isinstance(error, OSError) and error.errno in _NO_LOCKS and not anew:
            return []
        raise
    return descriptors


def uncopied(path: str, page_size: int) -> dict[str, Any]:
    """Return the salt of the log of the database at ``path``, and pages of the database that it is to replace.

    ``pages``: the digest of each as it is in the database, by number; of many a part.  Empty if all of the log was
    copied.  Called while the kernel is stopped.  Raises `OSError`.
    """
    with open(path, "rb") as database, open(path + LOG, "rb") as log, open(path + INDEX, "rb") as index:
        if (header := _index_header(index.fileno())) is None:
            return {}
        (copied,) = struct.unpack("=I", os.pread(index.fileno(), 4, _COPIED))
        size, last = _FRAME_HEADER_BYTES + page_size, {}
        for number in range(copied, header[_FRAMES]):
            at = _LOG_HEADER.size + number * size
            (page,) = struct.unpack(">I", os.pread(log.fileno(), 4, at))
            last[page] = at + _FRAME_HEADER_BYTES
        pages = {}
        for page in sorted(last)[:: len(last) // _NOTED_PAGES + 1]:
            before = os.pread(database.fileno(), page_size, (page - 1) * page_size)
            # Of one that is new nothing can be compared, but the first page, which counts them, is in the log then.
            if before and before != os.pread(log.fileno(), page_size, last[page]):
                pages[str(page)] = _digest(before)
        return {"salt": _salt_of(log.fileno()), "pages": pages} if pages else {}


def is_lost(path: str, page_size: int, noted: dict[str, Any]) -> bool:
    """Return whether frames that `uncopied` has ``noted`` are neither in the log nor in the database at ``path``.

    The last process that closes the database copies all of them.  One of several pages that is as before shows that
    nobody has.
    Raises `OSError`.
    """
    with contextlib.suppress(FileNotFoundError), open(path + LOG, "rb") as log:
        if _salt_of(log.fileno()) == noted["salt"]:
            return False
    with open(path, "rb") as database:
        return any(
            _digest(os.pread(database.fileno(), page_size, (int(page) - 1) * page_size)) == before
            for page, before in noted["pages"].items()
        )


def _salt_of(log: int) -> str:
    return os.pread(log, 8, 16).hex()


def _digest(page: bytes) -> str:
    return hashlib.blake2b(page, digest_size=16).hexdigest()


def _open(path: str, flags: int, like: os.stat_result | None = None) -> int:
    """Open a regular file.  ``like``: make it if there is none, with the rights of the database, as SQLite does."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags | (os.O_CREAT if like is not None else 0), 0o600)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise DatabaseChanged(errno.ESTALE, "not a file", path)
        if like is not None and facts.st_size == 0:
            if os.geteuid() == 0 and (facts.st_uid, facts.st_gid) != (like.st_uid, like.st_gid):
                os.fchown(descriptor, like.st_uid, like.st_gid)
            if (facts.st_mode ^ like.st_mode) & 0o777:
                os.fchmod(descriptor, like.st_mode & 0o777)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_unchanged(files: dict[str, list[int]]) -> None:
    for path, was in files.items():
        facts = os.stat(path)
        if [facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns] != was:
            raise DatabaseChanged(errno.ESTALE, "changed", path)


def _prepare(log: int, index: int, path: str, page_size: int, index_bytes: int) -> None:
    """Lock DMS, and make log and index such that every connection notices a change."""
    alone = False

    def lock_index() -> bool:
        nonlocal alone
        alone = _lock(index, fcntl.F_WRLCK, _DMS)
        return alone or _lock(index, fcntl.F_RDLCK, _DMS)

    _wait(lock_index, path + INDEX)
    if alone:
        if _is_empty(log, path):
            _make_log(log, page_size)
        os.ftruncate(index, 0)
    _enlarge(index, index_bytes)
    if alone:
        _lock(index, fcntl.F_RDLCK, _DMS)
        return
    _wait(lambda: _is_distinguished(log, index, path, page_size), path + INDEX)


def _enlarge(index: int, index_bytes: int) -> None:
    """Enlarge the index to ``index_bytes``: an access to a mapping beyond its end would end the kernel."""
    if (present := os.fstat(index).st_size) < index_bytes:
        os.posix_fallocate(index, present, index_bytes - present)


def _is_distinguished(log: int, index: int, path: str, page_size: int) -> bool:
    """Return whether the header of the index can be no connection's copy of an older one, or made such that it cannot.

    False while another process writes.
    """
    if (header := _index_header(index)) is not None and not _is_of_empty_log(header):
        if header[_FRAMES] and os.fstat(log).st_size <= _LOG_HEADER.size:
            raise DatabaseChanged(errno.ESTALE, "removed", path + LOG)
        return True
    if not _lock(index, fcntl.F_WRLCK, _WRITER):
        return False
    try:
        if (header := _index_header(index)) is None:  # it will be built from the log
            if _is_empty(log, path):
                _make_log(log, page_size)
        elif _is_of_empty_log(header):
            copy = _INDEX_HEADER.pack(*header[: _SALT.start], *_salt(), 0, 0)[:_CHECKSUMMED]
            copy += struct.pack("=2I", *_checksum(copy, sys.byteorder))
            os.pwrite(index, copy, len(copy))  # the second copy first: readers read the first one first
            os.pwrite(index, copy, 0)
        return True
    finally:
        _lock(index, fcntl.F_UNLCK, _WRITER)


def _index_header(index: int) -> tuple[int, ...] | None:
    """Return the header of an index; None for one that is not complete."""
    both = os.pread(index, 2 * _INDEX_HEADER.size, 0)
    first, second = both[: _INDEX_HEADER.size], both[_INDEX_HEADER.size :]
    if first != second or len(first) < _INDEX_HEADER.size:
        return None
    header = _INDEX_HEADER.unpack(first)
    intact = header[_CHECKSUM] == _checksum(first[:_CHECKSUMMED], sys.byteorder)
    return header if header[_COMPLETE] and intact else None


def _is_of_empty_log(header: tuple[int, ...]) -> bool:
    return header[_FRAMES] == 0 and header[_SALT] == (0, 0)


def _is_empty(log: int, path: str) -> bool:
    """Return whether a log has no complete frame.  Raises `DatabaseChanged` for one of another version."""
    header = os.pread(log, _LOG_HEADER.size, 0)
    if len(header) < _LOG_HEADER.size:
        return True
    magic, version, page_size, *_, first, second = _LOG_HEADER.unpack(header)
    order = "big" if magic & 1 else "little"
    usable = magic & ~1 == _LOG_MAGIC and 512 <= page_size <= 65536 and page_size & (page_size - 1) == 0
    if not usable or (first, second) != _checksum(header[:24], order):
        return True
    if version != _LOG_VERSION:
        raise DatabaseChanged(errno.ESTALE, f"of version {version}", path + LOG)
    return os.fstat(log).st_size < _LOG_HEADER.size + _FRAME_HEADER_BYTES + int(page_size)


def _make_log(log: int, page_size: int) -> None:
    """Write a log without frames.  Called with a lock that keeps every writer out."""
    header = struct.pack(">IIII2I", _LOG_MAGIC | (sys.byteorder == "big"), _LOG_VERSION, page_size, 0, *_salt())
    header += struct.pack(">2I", *_checksum(header, sys.byteorder))
    os.pwrite(log, header + b"\0", 0)
    os.ftruncate(log, len(header) + 1)


def _salt() -> tuple[int, ...]:
    while (salt := struct.unpack("=2I", os.urandom(8))) == (0, 0):
        pass
    return salt


def _checksum(data: bytes, order: str) -> tuple[int, int]:
    """Return the checksum of log and index over words of this ``order`` of bytes."""
    first = second = 0
    words = struct.unpack(f"{'>' if order == 'big' else '<'}{len(data) // 4}I", data)
    for one, other in zip(words[::2], words[1::2], strict=True):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return first, second


def _lock(descriptor: int, kind: int, start: int, length: int = 1) -> bool:
    """Set a lock of the open file, not of this process; return whether it could be had.

    A lock of the process would end with any other descriptor of the file that it closes.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, length, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def lock_alone(descriptor: int) -> bool:
    """Lock a database as its writer does (EXCLUSIVE), as long as the file is open; False if that cannot be had."""
    try:
        return _lock(descriptor, fcntl.F_WRLCK, _PENDING, _ALL_BYTES)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise


def _wait(attempt: Callable[[], bool], path: str) -> None:
    """Repeat ``attempt`` until it succeeds.  Raises `DatabaseLocked` if it does not in time."""
    deadline = time.monotonic() + _PATIENCE
    while not attempt():
        if time.monotonic() > deadline:
            raise DatabaseLocked(errno.EAGAIN, "another process has it locked", path)
        time.sleep(0.01)


def lock_databases(databases: Iterable[dict[str, Any]]) -> list[int]:
    """Do as `lock_database` for each of ``databases``, its arguments by name.  The error of one has a ``filename``."""
    locked: list[int] = []
    try:
        for database in databases:
            try:
                locked += lock_database(**database)
            except OSError as error:
                error.filename = error.filename or database["path"]
                raise
    except BaseException:
        for descriptor in locked:
            os.close(descriptor)
        raise
    return locked
