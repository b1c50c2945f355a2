"""Blocks on the disk: where a kernel's device memory goes when host memory is too small for it.

A directory beside the images, with the same files as an image has of device memory.  It is the capsule's, which keeps
its lock: a sweep (`store`) leaves it alone as long as the kernel lives, whoever owns that, and removes it after.  Of
another host's lock nothing is known, so a sweep leaves alone what is not this host's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from ..files.disk import mapped_errors
from . import layout, lease

#: In the directory: whose it is.  The kernel's library leaves names with a dot alone (`host_memory.c`).
_HOST = ".host"


def begin(root: Path, hold: Callable[[int], object]) -> Path:
    """An empty directory in the image directory ``root``.

    ``hold``: keeps a descriptor open until the capsule ends (`Capsule.keep_fd`).  No `FileLock`: the lock is to belong
    to that descriptor, in another process.  Raises `NoSpace`, `StoreUnwritable`, and what ``hold`` does; then there is
    none.
    """
    place = root.absolute() / f"{layout.DRAFT}blocks-{secrets.token_hex(6)}"
    with mapped_errors(root):
        fd = os.open(_lock(place), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            hold(fd)
            place.mkdir(mode=0o700)
            lease.write_host(place / _HOST)
        except BaseException:
            end(place)
            raise
        finally:
            os.close(fd)
    return place


def _lock(place: Path) -> Path:
    return place.with_name(f"{place.name}{layout.LOCK}")


def is_of_another_host(place: Path) -> bool:
    """Whether a draft's directory is one of these, and not this host's to remove."""
    return lease.is_of_another_host(place / _HOST)


def end(place: Path) -> None:
    """Nobody needs it any more.  Never raises: what cannot be removed now, the next sweep removes."""
    shutil.rmtree(place, ignore_errors=True)
    if not place.exists():
        with contextlib.suppress(OSError):
            _lock(place).unlink()
