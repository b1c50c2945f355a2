"""Chunks of a kernel's device memory that are on the disk already, for its next image.

They come from its last image, whose chunks are kept while it runs; and while it is suspended, what is different is
written ahead.  The next image takes what is the same by a rename instead of writing it: every chunk here was flushed to
the disk, and has the hash that is said of it.  They lie in a draft's directory, so when their owner ends without having
removed them, the next sweep does.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from filelock import FileLock

from . import device
from .draft import PREFIX
from .manifest import FileEntry

_log = logging.getLogger(__name__)


class Chunks:
    """The chunks, by name; `discard` ends it.  Raises `OSError`; then there is nothing."""

    def __init__(self, root: Path) -> None:
        self._place = root / f"{PREFIX}chunks-{secrets.token_hex(6)}"
        self._entries: dict[str, FileEntry] = {}
        self._writing: threading.Thread | None = None
        self._enough = threading.Event()
        #: Whether an arena was written ahead to its end, and whether its kernel has run on since.
        self._whole = self._outdated = False
        self._lock = FileLock(
            self._place.with_name(f"{self._place.name}.lock"), timeout=0, mode=0o600, thread_local=False
        )
        self._lock.acquire()
        try:
            self._place.mkdir(mode=0o700)
        except BaseException:
            self.discard()
            raise

    @property
    def bytes(self) -> int:
        """What they take on the disk.  From any thread."""
        return sum(entry.bytes for entry in list(self._entries.values()))

    def salvage(self, directory: Path, entries: Mapping[str, FileEntry]) -> None:
        """Take the place of ``directory``, of an image that is being removed; nothing was here before.

        ``entries``: what was proved of them when that image was restored.  Raises `OSError`; then nothing is here.
        """
        directory.rename(self._place)
        self._entries = dict(entries)

    def write_ahead(self, arena: int) -> None:
        """Begin to write what of ``arena`` is not here yet, and to remove what is not its; its caller closes it."""
        self.settle()
        self._whole = self._outdated = False
        self._enough.clear()
        self._writing = threading.Thread(
            target=self._write_ahead, args=(os.dup(arena),), name="gpu-ckpt-ahead", daemon=True
        )
        self._writing.start()

    def _write_ahead(self, arena: int) -> None:
        begun, before = time.monotonic(), self.bytes
        try:
            if device.write_ahead(arena, self._place, self._entries, self._enough):
                self._whole = True
                seconds = time.monotonic() - begun
                _log.info("Device memory is on the disk: %d bytes (%d before), %.1f s", self.bytes, before, seconds)
        except OSError as error:
            _log.info("Device memory is not written ahead: %s", error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # others need what room there is
                self._remove_all()
        finally:
            os.close(arena)

    def halt(self, *, outdated: bool) -> None:
        """Begin no further chunk; ``outdated``: its kernel runs on.  Waits for nothing: a wake waits for no disk."""
        self._outdated = self._outdated or outdated
        self._enough.set()

    def settle(self) -> int:
        """Write no further; the bytes here that are the arena's, if all of it was written ahead, or 0."""
        self._enough.set()
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        return self.bytes if self._whole and not self._outdated else 0

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

    def _remove_all(self) -> None:
        self._entries.clear()
        shutil.rmtree(self._place, ignore_errors=True)

    def discard(self) -> None:
        """Remove what is left.  Idempotent, never raises."""
        self.settle()
        self._remove_all()
        with contextlib.suppress(OSError):
            Path(self._lock.lock_file).unlink()
        self._lock.release()
