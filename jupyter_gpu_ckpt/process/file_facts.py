"""Facts about a file that Linux has in memory, without waiting for the server of its file system.

The file may lie on a network file system or in a program (FUSE) that never answers, and ``stat(2)`` waits as long.
``statx(2)`` with ``AT_STATX_DONT_SYNC`` and ``openat2(2)`` with ``RESOLVE_CACHED`` (Linux 5.12) do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import struct
from collections.abc import Callable
from typing import NamedTuple

from jupyter_gpu_ckpt.process import syscalls

#: Seconds that `within_timeout` and its like wait for the server of a file.
TIMEOUT = 2.0

_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _AT_EMPTY_PATH, _AT_STATX_DONT_SYNC = -100, 0x100, 0x1000, 0x4000
_STATX_TYPE, _STATX_MODE, _STATX_NLINK, _STATX_MTIME, _STATX_INO, _STATX_BTIME = 0x1, 0x2, 0x4, 0x40, 0x100, 0x800
#: ``struct statx``, and where the number of names, the mode, the inode, the times of birth and of the last change, the
#: device of a device file and that of the file system are.
_STATX_BYTES, _AT_NLINK, _AT_MODE, _AT_INODE, _AT_BTIME, _AT_MTIME, _AT_DEVICE = 256, 16, 28, 32, 80, 112, 128
_AT_FILE_SYSTEM = 136
_RESOLVE_CACHED = 0x20


class FileFacts(NamedTuple):
    """Mode as in ``stat(2)``; major and minor number of a device file; inode; time of the last change in ns."""

    mode: int
    device: tuple[int, int]
    inode: int
    mtime_ns: int


def of(path: str, directory: int = _AT_FDCWD, flags: int = 0) -> FileFacts:
    """Return the facts of a file that Linux has in memory; raises `OSError`.

    The path is walked as always, which may wait; not so for ``/proc/PID/fd/N``.
    """
    buffer = _statx(path, directory, flags, _STATX_TYPE | _STATX_MODE | _STATX_MTIME | _STATX_INO)
    mode, inode = struct.unpack_from("=H2xQ", buffer, _AT_MODE)
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, _AT_MTIME)
    major, minor = struct.unpack_from("=II", buffer, _AT_DEVICE)
    return FileFacts(mode, (major, minor), inode, seconds * 10**9 + nanoseconds)


def names(path: str) -> int:
    """Return the number of names that a file has, without waiting, as `of`; raises `OSError`."""
    (count,) = struct.unpack_from("=I", _statx(path, _AT_FDCWD, 0, _STATX_NLINK), _AT_NLINK)
    return int(count)


def identity(path: str) -> tuple[int, int, int]:
    """Return the major and minor number of a file's file system, and its inode, as `of`; raises `OSError`."""
    buffer = _statx(path, _AT_FDCWD, 0, _STATX_INO)
    (inode,) = struct.unpack_from("=Q", buffer, _AT_INODE)
    major, minor = struct.unpack_from("=II", buffer, _AT_FILE_SYSTEM)
    return major, minor, inode


def birth_ns(path: str) -> int:
    """Return the time at which a file was made, in ns; 0 on a file system that does not keep it.  Raises `OSError`.

    An inode number alone does not tell a file from a later one: ext4 gives that of a removed file to the next.
    """
    buffer = _statx(path, _AT_FDCWD, 0, _STATX_BTIME)
    (known,) = struct.unpack_from("=I", buffer)
    seconds, nanoseconds = struct.unpack_from("=qI", buffer, _AT_BTIME)
    return seconds * 10**9 + nanoseconds if known & _STATX_BTIME else 0


def _statx(path: str, directory: int, flags: int, wanted: int) -> ctypes.Array[ctypes.c_char]:
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    statx = syscalls.libc.statx
    syscalls.check(statx(directory, os.fsencode(path), _AT_STATX_DONT_SYNC | flags, wanted, buffer), f"statx {path}")
    return buffer


def cached(path: str, directory: int = _AT_FDCWD, *, follow: bool = True) -> FileFacts:
    """Return the same of a path that Linux has in memory, which ``/proc/PID/root`` never is; else `BlockingIOError`.

    ``follow``: of the file that a symbolic link leads to.
    """
    flags = os.O_PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    how = ctypes.create_string_buffer(struct.pack("=3Q", flags, 0, _RESOLVE_CACHED), 24)
    name = ctypes.create_string_buffer(os.fsencode(path))
    try:
        fd = syscalls.call("openat2", directory, ctypes.addressof(name), ctypes.addressof(how), 24)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EINVAL, errno.EPERM):  # an older Linux, or one that forbids the call
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), path) from error
        raise
    try:
        return of("", fd, _AT_EMPTY_PATH)
    finally:
        os.close(fd)


def within_timeout(path: str, directory: int = _AT_FDCWD, *, follow: bool = True) -> FileFacts:
    """Return the same of any path; raises `OSError`, `TimeoutError` where no answer comes in `TIMEOUT` seconds.

    Raises `BlockingIOError` where there may be no further process.
    """
    with contextlib.suppress(BlockingIOError):
        return cached(path, directory, follow=follow)

    def facts() -> list[int]:
        found = of(path, directory, 0 if follow else _AT_SYMLINK_NOFOLLOW)
        return [found.mode, *found.device, found.inode, found.mtime_ns]

    mode, major, minor, inode, mtime_ns = _by_child(facts, path)
    return FileFacts(mode, (major, minor), inode, mtime_ns)


def is_there(path: str, inode: int) -> bool:
    """Return whether the path is that of the file with this inode, as `procfs.is_there`; raises as `within_timeout`."""
    try:
        return within_timeout(path, follow=False).inode == inode
    except (TimeoutError, BlockingIOError):
        raise
    except OSError:
        return False


def forbids_names(directory: str) -> bool:
    """Return whether a directory is there in which the caller may make no names; raises as `within_timeout`."""

    def forbids() -> list[int]:
        return [os.path.isdir(directory) and not os.access(directory, os.W_OK | os.X_OK)]

    return bool(_by_child(forbids, directory)[0])


def _by_child(ask: Callable[[], list[int]], path: str) -> list[int]:
    """Return the numbers that ``ask`` returns in a child process, which waits for the server of the file ``path``.

    If that does not answer, the child is killed, and reaped with the caller's other children when Linux ends its wait.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    with open(reading, "rb", buffering=0) as answer:
        try:
            pid = os.fork()
            if pid == 0:
                _answer(ask, writing)
        finally:
            os.close(writing)
        words = answer.read(256).split() if select.select([answer], [], [], TIMEOUT)[0] else []
    os.kill(pid, signal.SIGKILL)
    if not words:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), path)
    os.waitpid(pid, 0)
    code, *numbers = map(int, words)
    if code:
        raise OSError(code, os.strerror(code), path)
    return numbers


def _answer(ask: Callable[[], list[int]], writing: int) -> None:
    """Write the numbers that ``ask`` returns, after a 0 or the number of its error, and end the process."""
    try:
        try:
            numbers = [0, *map(int, ask())]
        except OSError as error:
            numbers = [error.errno or errno.EIO]
        os.write(writing, " ".join(map(str, numbers)).encode())
    finally:
        os._exit(0)
