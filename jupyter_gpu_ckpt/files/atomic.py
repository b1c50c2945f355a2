"""Atomic writes: a temporary file in the same directory, flushed, then a rename, then a flush of the directory.

A reader sees the old content or the new, never a part of either.  A crash between the first byte and the rename leaves
the temporary file, which `remove_leftovers` removes.  Limit: a file system that lies about fsync can lose flushed
content.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_atomically(path: Path, content: str | bytes, *, durable: bool, mode: int = 0o600) -> None:
    """Write a file with this content and mode, whatever the umask; replace the one that is there.

    ``durable``: flush the file before the rename and its directory after it, so that the new content survives a crash
    of the machine once this returns.  Without it, a crash may leave the old content, the new, or an empty file: for
    caches, and for files that do not outlive the machine's boot.

    Raises `OSError`.  After failure the old content is there; if only the flush of the directory failed, the new one,
    which a crash of the machine may take back.
    """
    draft = path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(fd)
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    if durable:
        flush(path.parent)


def remove_leftovers(path: Path) -> int:
    """Remove temporary files of killed writers of ``path``; return their number.

    A write under way may fail with `FileNotFoundError`.
    """
    drafts = [*path.parent.glob(f"{_prefix(path)}????????")]
    for draft in drafts:
        draft.unlink(missing_ok=True)
    return len(drafts)


def _prefix(path: Path) -> str:
    """Return the prefix of temporary files for ``path``: hidden, so that no listing shows them."""
    return f".{path.name.removeprefix('.')}-"


def flush(path: Path) -> None:
    """Flush a file or directory to disk (fsync(2)).  Raises `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
