"""One lock file per GPU, shared by all users of one machine.

``filelock`` cannot do this: it opens with ``O_RDWR | O_CREAT``, which the kernel refuses for another user's file in a
sticky world-writable directory (``fs.protected_regular`` in proc(5)).  ``flock(2)`` needs no write access, so the file
is opened read-only, and created by its first user with ``O_EXCL``.

Limits: a program that does not use the locks can allocate GPU memory at any time; any user can keep a lock (others wait
until their deadline, no longer); users with private temporary directories (systemd's ``PrivateTmp``, containers) share
locks only if a common directory is configured.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ..errors import GpuFull, HostError

# flock(2) has no deadline of its own.
POLL_S = 0.05
#: UUIDs of GPUs, as names of files.
NAME = re.compile(r"[A-Za-z0-9-]+")
#: Of files that other users may have replaced by links, or by FIFOs that nobody writes to.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@contextmanager
def locked(directory: Path, uuids: Iterable[str], timeout_s: float) -> Iterator[None]:
    """Lock these GPUs during the body, in the order of their UUIDs so that two callers cannot deadlock.

    Raises `GpuFull` if another process had one of the locks for all of ``timeout_s``, `HostError` if the lock directory
    cannot be used, or an entry in it is not a lock file.
    """
    deadline = time.monotonic() + timeout_s
    with ExitStack() as descriptors:
        for uuid in sorted(set(uuids)):
            if not NAME.fullmatch(uuid):
                raise ValueError(f"not a GPU UUID: {uuid!r}")
            if (descriptor := _lock(directory, uuid, deadline)) is None:
                message = "Another kernel is being restored to the same GPU; this one was not tried."
                raise GpuFull(message, hint="Nothing is lost. Run a cell again in a moment.", uuid=uuid, locked=True)
            descriptors.callback(os.close, descriptor)
        yield


def _lock(directory: Path, uuid: str, deadline: float) -> int | None:
    while True:
        try:
            descriptor = _open(directory, f"{uuid}.lock")
        except OSError as error:
            # Between another user's mkdir and chmod, or open and fchmod, neither can be opened yet.
            if not isinstance(error, PermissionError | FileNotFoundError) or time.monotonic() >= deadline:
                message = f"The directory of the GPU locks cannot be used: {error.strerror}."
                hint = "Ask the administrator to remove it, or set another lock directory."
                raise HostError(message, hint=hint) from error
        else:
            if _try_lock(directory / f"{uuid}.lock", descriptor):
                return descriptor
            os.close(descriptor)
            if time.monotonic() >= deadline:
                return None
        time.sleep(POLL_S)


def open_directory(directory: Path) -> int:
    """Open the directory that all users share, created if it is missing; the caller closes it.  Raises `OSError`.

    World-writable and sticky, like the directory around it: each user removes and renames files of their own only.
    """
    with suppress(FileExistsError):
        os.mkdir(directory)
        # Not in mkdir, which applies the umask.
        os.chmod(directory, 0o1777)  # noqa: S103
    return os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _open(directory: Path, name: str) -> int:
    parent = open_directory(directory)
    try:
        try:
            descriptor = os.open(name, READ | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=parent)
            os.fchmod(descriptor, 0o644)
        except FileExistsError:
            descriptor = os.open(name, READ, dir_fd=parent)
    finally:
        os.close(parent)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, f"{name} is not a regular file")
    return descriptor


def _try_lock(path: Path, descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # A cleaner of temporary files may have removed it since it was opened: then the next caller locks another file.
    with suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    return False
