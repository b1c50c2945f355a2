"""The disk under a store: its errors become ours."""

from __future__ import annotations

import contextlib
import errno
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
