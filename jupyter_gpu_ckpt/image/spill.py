"""Device memory that is swapped out to disk, where host memory is too small for it.

Its directory lies beside the images and has the same files as device memory in an image.  The capsule keeps its lock,
so a sweep (`Store.sweep`) removes it after the end of the kernel, in any server.  A lock of another host says
nothing, so a sweep spares directories of other hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path

from ..files.disk import mapped_errors
from . import layout, lease

#: In the directory: its host.  The kernel's library ignores names that begin with a dot (`host_memory.c`).
_HOST = ".host"


def begin(root: Path, keep_fd: lease.KeepFd) -> Path:
    """Make an empty directory in the image directory ``root``.

    ``keep_fd``: keeps a descriptor open until the capsule ends.  Not a `FileLock`: the lock belongs to that descriptor,
    in another process.  Raises `NoSpace`, `StoreUnwritable`, and what ``keep_fd`` raises; then there is none.
    """
    path = root.absolute() / f"{layout.DRAFT}spill-{secrets.token_hex(6)}"
    with mapped_errors(root):
        fd = os.open(_lock(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            keep_fd(fd)
            path.mkdir(mode=0o700)
            lease.write_host(path / _HOST)
        except BaseException:
            end(path)
            raise
        finally:
            os.close(fd)
    return path


def _lock(path: Path) -> Path:
    return path.with_name(f"{path.name}{layout.LOCK}")


def is_of_another_host(path: Path) -> bool:
    """Return whether a directory is spilled device memory of another host."""
    return lease.is_of_another_host(path / _HOST)


def end(path: Path) -> None:
    """Remove the directory.  Never raises: a sweep removes what is left."""
    shutil.rmtree(path, ignore_errors=True)
    if not path.exists():
        with contextlib.suppress(OSError):
            _lock(path).unlink()
