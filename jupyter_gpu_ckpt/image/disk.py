"""The disk under a store: its errors become ours, and what was flushed is on it."""

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


def flush(path: Path) -> None:
    """``fsync(2)`` of a file or directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
