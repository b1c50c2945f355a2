"""The disk under a store: its errors become ours, and how much room it has."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import NoSpace, StoreUnwritable


@contextlib.contextmanager
def mapped_errors(root: Path) -> Iterator[None]:
    """Errors of the file system become ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace("The disk of the image directory is full.", directory=str(root)) from error
        reason = error.strerror or type(error).__name__
        raise StoreUnwritable(f"The image directory cannot be written: {reason}.", directory=str(root)) from error


def free(place: Path) -> int:
    """Bytes an unprivileged user may still write at ``place``, or at what is above it if that does not exist yet."""
    facts = os.statvfs(next(path for path in (place, *place.parents) if path.exists()))
    return facts.f_bavail * facts.f_frsize
