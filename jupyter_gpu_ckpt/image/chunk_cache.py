"""Chunks of a kernel's device memory that are on the disk already, for its next image.

They come from its last image, whose chunks are kept while it runs; and while it is suspended, what is different is
written ahead.  The next image takes what is the same by a rename instead of writing it: every chunk here was flushed to
the disk, and has the hash that is said of it.  They lie in a draft's directory, so when their owner ends without having
removed them, the next sweep does.

It is a cache: whoever needs the room makes it empty (`make_room`), and nobody waits for it but who is to use it.
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
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from ..errors import GpuCkptError
from . import device_memory, layout
from .manifest import FileEntry

_log = logging.getLogger(__name__)

#: What this process has, of all its kernels; looked at and added to under the lock.
_living: weakref.WeakSet[Chunks] = weakref.WeakSet()
_lock = threading.Lock()


class Chunks:
    """The chunks of one kernel, by name; `discard` ends it.

    ``root``: the image directory.  Nothing is on the disk before something is put here.  What may take long is done on
    one thread of its own, one after the other.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._place = root / f"{layout.DRAFT}chunks-{secrets.token_hex(6)}"
        self._entries: dict[str, FileEntry] = {}
        self._lock = FileLock(
            self._place.with_name(f"{self._place.name}{layout.LOCK}"), timeout=0, mode=0o600, thread_local=False
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpu-ckpt-chunks")
        self._enough = threading.Event()
        self._written: Future[bool] | None = None
        self._outdated = False
        #: Whether a checkpoint counts on what is here.
        self.claimed = False
        with _lock:
            _living.add(self)

    @property
    def bytes(self) -> int:
        """Bytes of device memory that are here.  From any thread."""
        return sum(entry.bytes for entry in list(self._entries.values()))

    def salvage(self, directory: Path, entries: Mapping[str, FileEntry]) -> None:
        """Take the place of ``directory``, of an image that is being removed; nothing was here before.

        ``entries``: what was proved of them when that image was restored.  Raises `OSError`; then nothing is here.
        """
        self._begin()
        directory.rename(self._place)
        self._entries = dict(entries)

    def _begin(self) -> None:
        if not self._lock.is_locked:
            self._lock.acquire()
        self._place.mkdir(mode=0o700, exist_ok=True)

    def write_ahead(self, arena: int, permitted: Callable[[int, int], bool]) -> None:
        """Begin to write what of ``arena`` is not here yet, and to remove what is not its; its caller closes it.

        ``permitted``: asked, on the thread that writes, with the bytes of all of it, and those that will be written.
        Waits for nothing.  Raises `OSError` when no descriptor can be had, ``RuntimeError`` when no thread can.
        """
        own = [os.dup(arena)]
        self._written, self._enough, self._outdated = None, threading.Event(), False
        try:
            self._written = self._thread.submit(self._write, own, permitted, self._enough)
        except RuntimeError:  # a later thread may come upon it all the same
            os.close(own.pop())
            raise

    def _write(self, own: list[int], permitted: Callable[[int, int], bool], enough: threading.Event) -> bool:
        """Whether all of the arena is here.  ``own``: its descriptor; none if the caller has given up."""
        if not own:
            return False
        arena = own.pop()
        begun, before = time.monotonic(), self.bytes
        try:
            size = device_memory.size(arena)
            if enough.is_set() or not permitted(size, max(0, size - before)):
                return False
            self._begin()
            if not device_memory.write_ahead(arena, self._place, self._entries, enough):
                return False
        except (GpuCkptError, OSError, RuntimeError, MemoryError) as error:
            _log.info("Device memory is not written ahead: %s", error)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._remove_all()  # others need what room there is
            return False
        finally:
            os.close(arena)
        seconds = time.monotonic() - begun
        _log.info("Device memory is on the disk: %d bytes (%d before), %.1f s", self.bytes, before, seconds)
        return True

    def halt(self, *, outdated: bool) -> None:
        """Begin no further chunk; ``outdated``: its kernel runs on.  Waits for nothing: a wake waits for no disk."""
        self._outdated = self._outdated or outdated
        self._enough.set()

    def settle(self) -> int:
        """Write no further; the bytes of the arena that are here, if all of it was written ahead, or 0."""
        self._enough.set()
        whole = self._written is not None and self._written.result()
        return self.bytes if whole and not self._outdated else 0

    def take(self, name: str, content: FileEntry, target: Path) -> bool:
        """Rename the chunk ``name`` to ``target``; False if it is not cached with this content.  From any thread."""
        if self._entries.get(name) != content:
            return False
        try:
            (self._place / name).rename(target)
        except OSError:  # somebody has removed it
            return False
        self._entries.pop(name, None)
        return True

    def clear(self) -> None:
        """Remove what is here, and wait for that; its kernel may put something here again.  Never raises."""
        self.halt(outdated=True)
        with contextlib.suppress(RuntimeError):  # it has ended, or no thread can be had
            self._thread.submit(self._remove_all).result()

    def discard(self, *, wait: bool) -> None:
        """Remove what is left: now, or (without ``wait``) as soon as the disk allows.  Idempotent, never raises."""
        self.halt(outdated=True)
        with contextlib.suppress(RuntimeError):  # it has ended, or no thread can be had: then the next sweep does it
            ended = self._thread.submit(self._end)
            self._thread.shutdown(wait=False)
            if wait:
                ended.result()

    def _end(self) -> None:
        if self._lock.is_locked:
            self._remove_all()
            with contextlib.suppress(OSError):
                Path(self._lock.lock_file).unlink()
            self._lock.release()

    def _remove_all(self) -> None:
        self._entries.clear()
        shutil.rmtree(self._place, ignore_errors=True)


def _unclaimed(root: Path) -> list[Chunks]:
    with _lock:
        return [chunks for chunks in _living if chunks.root == root and not chunks.claimed]


def kept_in(root: Path) -> int:
    """Bytes that `make_room` would give back."""
    return sum(chunks.bytes for chunks in _unclaimed(root))


def make_room(root: Path) -> None:
    """Empty the caches of this process's kernels in an image directory, but for what is claimed; waits for the disk."""
    for chunks in _unclaimed(root):
        chunks.clear()
