"""The disk under a store: its errors become ours, what is private stays so, and what was flushed is on it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import NoSpace, StoreUnwritable


@contextlib.contextmanager
def mapped(root: Path) -> Iterator[None]:
    """Errors of the file system become ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace("The disk of the image directory is full.", directory=str(root)) from error
        reason = error.strerror or type(error).__name__
        raise StoreUnwritable(f"The image directory cannot be written: {reason}.", directory=str(root)) from error


def write_private(path: Path, text: str) -> None:
    """Write a file of 0600, whatever the umask, and flush it to disk.  Raises `OSError`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w") as file:
        os.fchmod(fd, 0o600)
        file.write(text)
        file.flush()
        os.fsync(fd)


def flush(path: Path) -> None:
    """``fsync(2)`` of a file or directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
