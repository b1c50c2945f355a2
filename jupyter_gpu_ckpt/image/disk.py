"""The disk under a store: its errors become ours, what is private stays so, and what was flushed is on it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
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


#: Seconds between two looks at what was written.
_LOOK = 0.02
#: Bytes that are worth a request.
_WORTH = 8 << 20
_START_WRITING = 2  # <fcntl.h>, SYNC_FILE_RANGE_WRITE
_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


@contextlib.contextmanager
def written_early(directory: Path) -> Iterator[None]:
    """What the body has written to files in ``directory`` begins its way to the disk at once (sync_file_range(2)).

    By itself Linux begins when a tenth of the memory is full of it (``vm.dirty_background_ratio``), and whoever flushes
    the files in the end waits for nearly all of it.
    """
    over = threading.Event()
    thread = threading.Thread(target=_keep_writing, args=(directory, over), name="image-write-early", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _keep_writing(directory: Path, over: threading.Event) -> None:
    begun: dict[str, int] = {}
    while not over.wait(_LOOK):
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                size, there = entry.stat(follow_symlinks=False).st_size, begun.get(entry.name, 0)
                if entry.is_file(follow_symlinks=False) and size - there >= _WORTH:
                    _start_writing(Path(entry.path), there, size)
                    begun[entry.name] = size


def _start_writing(path: Path, start: int, end: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        _libc.sync_file_range(fd, start, end - start, _START_WRITING)  # where it cannot be, the flush does it all
    finally:
        os.close(fd)
