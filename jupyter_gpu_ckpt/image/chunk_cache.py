"""Chunks of a kernel's device memory that are on the disk before its next image is written.

They are kept from its last image while the kernel runs; and while it is suspended, changed chunks are written ahead.
The next image renames those whose hash is the same instead of writing them: every cached chunk was flushed.  They lie
in a draft's directory, so a sweep removes them if their owner ends without doing so.

`evict` empties the cache when disk space is needed.
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

#: The caches of all kernels of this process; read and added to under the lock.
_caches: weakref.WeakSet[ChunkCache] = weakref.WeakSet()
_lock = threading.Lock()


class ChunkCache:
    """The cached chunks of one kernel, by name, until `discard`.  Long work is done on one thread, in order."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._path = root / f"{layout.DRAFT}chunks-{secrets.token_hex(6)}"
        self._entries: dict[str, FileEntry] = {}
        lock = root / f"{self._path.name}{layout.LOCK}"
        self._lock = FileLock(lock, timeout=0, mode=0o600, thread_local=False)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="gpu-ckpt-chunks")
        self._stopped = threading.Event()
        self._written: Future[bool] | None = None
        self._outdated = False
        #: Whether a checkpoint under way relies on the cache; then `evict` spares it.
        self.in_use = False
        with _lock:
            _caches.add(self)

    @property
    def bytes(self) -> int:
        """Bytes of cached chunks.  From any thread."""
        return sum(entry.bytes for entry in list(self._entries.values()))

    def reuse(self, directory: Path, entries: Mapping[str, FileEntry]) -> None:
        """Fill the empty cache with a ``directory`` of verified ``entries``.  Raises `OSError`; then it stays empty."""
        self._create()
        directory.rename(self._path)
        self._entries = dict(entries)

    def _create(self) -> None:
        if not self._lock.is_locked:
            self._lock.acquire()
        self._path.mkdir(mode=0o700, exist_ok=True)

    def write_ahead(self, extents: int, permitted: Callable[[int, int], bool]) -> None:
        """Begin to bring the cache up to date with ``extents``, which the caller closes.  Returns at once.

        ``permitted``: called on the writing thread with the bytes of all extents, and of those that will be written.
        Raises `OSError` when no descriptor is left, ``RuntimeError`` when no thread can be started.
        """
        own = [os.dup(extents)]
        self._written, self._stopped, self._outdated = None, threading.Event(), False
        try:
            self._written = self._executor.submit(self._write, own, permitted, self._stopped)
        except RuntimeError:  # the executor may have queued the call all the same
            os.close(own.pop())
            raise

    def _write(self, own: list[int], permitted: Callable[[int, int], bool], stopped: threading.Event) -> bool:
        """Return whether all chunks are cached.  ``own``: the descriptor, or empty if the caller has closed it."""
        if not own:
            return False
        extents = own.pop()
        begun, before = time.monotonic(), self.bytes
        try:
            size = device_memory.size(extents)
            if stopped.is_set() or not permitted(size, max(0, size - before)):
                return False
            self._create()
            if not device_memory.write_ahead(extents, self._path, self._entries, stopped):
                return False
        except (GpuCkptError, OSError, RuntimeError, MemoryError) as error:
            _log.info("Device memory is not written ahead: %s", error)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._remove_all()
            return False
        finally:
            os.close(extents)
        seconds = time.monotonic() - begun
        _log.info("Device memory is on the disk: %d bytes (%d before), %.1f s", self.bytes, before, seconds)
        return True

    def stop(self, *, outdated: bool) -> None:
        """Begin no further chunk; ``outdated``: the kernel runs on.  Returns at once: a wake waits for no disk."""
        self._outdated = self._outdated or outdated
        self._stopped.set()

    def stop_and_wait(self) -> int:
        """Stop writing.  Return the cached bytes if all device memory was written ahead, else 0."""
        self._stopped.set()
        complete = self._written is not None and self._written.result()
        return self.bytes if complete and not self._outdated else 0

    def claim(self, name: str, content: FileEntry, target: Path) -> bool:
        """Rename the chunk ``name`` to ``target``; False if it is not cached with this content.  From any thread."""
        if self._entries.get(name) != content:
            return False
        with contextlib.suppress(OSError):  # removed behind our back
            (self._path / name).rename(target)
            self._entries.pop(name, None)
            return True
        return False

    def clear(self) -> None:
        """Empty the cache and wait for that; it can be filled again.  Never raises."""
        self.stop(outdated=True)
        with contextlib.suppress(RuntimeError):  # it was discarded, or no thread can be started
            self._executor.submit(self._remove_all).result()

    def discard(self, *, wait: bool) -> None:
        """Remove the cache, now or (without ``wait``) as soon as the disk allows.  Idempotent, never raises."""
        self.stop(outdated=True)
        with contextlib.suppress(RuntimeError):  # it was discarded, or no thread can be started: a sweep removes it
            ended = self._executor.submit(self._end)
            self._executor.shutdown(wait=False)
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
        shutil.rmtree(self._path, ignore_errors=True)


def _evictable(root: Path) -> list[ChunkCache]:
    with _lock:
        return [cache for cache in _caches if cache.root == root and not cache.in_use]


def evictable_bytes(root: Path) -> int:
    """Return the bytes that `evict` would free."""
    return sum(cache.bytes for cache in _evictable(root))


def evict(root: Path) -> None:
    """Empty the caches of this process's kernels below ``root`` that are not in use, and wait for the disk."""
    for cache in _evictable(root):
        cache.clear()
