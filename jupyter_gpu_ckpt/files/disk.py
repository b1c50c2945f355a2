"""The disk of a store: its free space, and its errors as ours."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from filelock import Timeout

from ..errors import FULL, NoSpace, StoreUnwritable


@contextlib.contextmanager
def mapped_errors(root: Path) -> Iterator[None]:
    """Map errors of the file system to `NoSpace` and `StoreUnwritable`."""
    try:
        yield
    except Timeout as error:
        raise StoreUnwritable("Others keep the image directory locked for too long.", directory=str(root)) from error
    except OSError as error:
        if error.errno in FULL:
            raise NoSpace("The disk of the image directory is full.", directory=str(root)) from error
        reason = error.strerror or type(error).__name__
        raise StoreUnwritable(f"The image directory cannot be written: {reason}.", directory=str(root)) from error


def free(directory: Path) -> int:
    """Return the bytes an unprivileged user may still write in ``directory`` or, before it exists, in its parent."""
    facts = os.statvfs(next(path for path in (directory, *directory.parents) if path.exists()))
    return facts.f_bavail * facts.f_frsize
