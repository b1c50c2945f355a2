"""Chunks of device memory of a kernel's last image, kept on the disk while the kernel runs.

The next checkpoint takes those that are the same by a rename instead of writing them.  They were on the disk when their
image was published, and their hashes were proved when it was restored.  They lie in a draft's directory, so when their
owner ends without having removed them, the next sweep does.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from .draft import PREFIX
from .manifest import FileEntry


class Unchanged:
    """The chunks, by name; `discard` ends it.

    Parameters
    ----------
    chunks:
        The directory of an image that is being removed; it is taken away from there.
    entries:
        Their hashes.

    Raises `OSError`; then nothing is kept.
    """

    def __init__(self, root: Path, chunks: Path, entries: Mapping[str, FileEntry]) -> None:
        self._place = root / f"{PREFIX}unchanged-{secrets.token_hex(6)}"
        self._entries = dict(entries)
        self._lock = FileLock(
            self._place.with_name(f"{self._place.name}.lock"), timeout=0, mode=0o600, thread_local=False
        )
        self._lock.acquire()
        try:
            chunks.rename(self._place)
        except BaseException:
            self.discard()
            raise

    @property
    def bytes(self) -> int:
        """What they take on the disk."""
        return sum(entry.bytes for entry in self._entries.values())

    def take(self, name: str, entry: FileEntry, target: Path) -> bool:
        """Make chunk ``name`` the file ``target``, if it is what ``entry`` says; whether it was.  From any thread."""
        if self._entries.get(name) != entry:
            return False
        try:
            (self._place / name).rename(target)
        except OSError:  # somebody has removed it
            return False
        del self._entries[name]
        return True

    def discard(self) -> None:
        """Remove what is left.  Idempotent, never raises."""
        self._entries.clear()
        shutil.rmtree(self._place, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path(self._lock.lock_file).unlink()
        self._lock.release()
