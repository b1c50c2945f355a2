"""Content hashes of the files that kernels use, computed once for each state of a file.

A kernel maps hundreds of libraries, of gigabytes together, and most of them never change.  `Hashes` caches the BLAKE3
of a file by its identity (`facts.identity`): device, inode, size, mtime and ctime.  Linux sets ctime itself at every
change, so another content means another identity, but for these cases, in which nothing is cached:

- The file was changed so shortly before it was read that a later change could get the same time stamp.
- The stamp is one of whole seconds: a coarse file system, or an image of one whose times were chosen.  Such a hash is
  cached by this process alone: while it runs, no other image is mounted in the place of that one.
- The file's identity changed while it was read.

A file that a kernel writes through a shared mapping gets another content with the same identity: Linux notes the time
of the first write to a page, but of no other until that one is on the disk, and in a tmpfs of none.  The hash of such a
file is cached for one checkpoint (``noted`` of its facts).

The cache lies beside the images in `FILE`, 0600, with `MOST_KEPT` hashes at most; the least used are removed first.  If
it is lost, damaged or written by two servers at once, that costs nothing but time.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from blake3 import blake3

from ..files.atomic import remove_leftovers, write_atomically
from .facts import Facts, identity, open_regular

#: In the image directory.
FILE = ".hashes.json"
#: Hashes in the cache; a kernel with PyTorch has some 300 files.
MOST_KEPT = 4096
#: Bytes that `of_kernel` hashes while its caller waits, of all files of one kernel that are not cached yet.
AT_ONCE = 16 << 20
#: Bytes of the largest file that is hashed in the background, and of all files of one kernel.
LARGEST, LATER = 2 << 30, 8 << 30
#: Nanoseconds: a younger change may be followed by another one with the same stamp.
_SETTLED = 2_000_000_000
#: Seconds between two checks whether a file that was changed just now has settled.
_POLL_SECONDS = 0.05
_SECOND = 1_000_000_000
_BLOCK = 1 << 20
_VERSION = 1


class Hashes:
    """The hashes of files of this node, cached in the image directory ``root``.  Thread-safe."""

    def __init__(self, root: Path) -> None:
        self._path = root / FILE
        self._lock = threading.Lock()
        self._kept: dict[str, str] = {}
        self._read: tuple[int, ...] | None = None
        self._unsaved = False
        self._pending: dict[str, Facts] = {}
        self._thread: threading.Thread | None = None

    def known(self, facts: Facts) -> str:
        """Return the cached hash of the file with these facts (`facts.file_facts`) in hex; empty without one.

        It is that of the content which the file had with this identity, whenever it was read.
        """
        key = _key(facts)
        with self._lock:
            self._load()
            found = self._kept.pop(key, "")
            if found:
                self._kept[key] = found  # the last one was used last
        return found

    def of(self, path: str, facts: Facts, cancelled: Callable[[], bool] = lambda: False) -> str:
        """Return the hash, reading the file if need be; empty if it is unreadable, another, or ``cancelled()``."""
        if found := self.known(facts):
            return found
        if not stat.S_ISREG(facts["mode"]):
            return ""
        hasher = blake3()
        try:
            with open_regular(path) as file:
                if identity(os.fstat(file.fileno())) != _identity(facts):
                    return ""
                # Mapped: memory of an allocator would stay with each thread that has ever hashed.
                block = mmap.mmap(-1, _BLOCK)
                while count := file.readinto(block):
                    hasher.update(memoryview(block)[:count])
                    if cancelled():
                        return ""
                if identity(os.fstat(file.fileno())) != _identity(facts):
                    return ""
        except OSError:
            return ""
        found = hasher.hexdigest()
        if _unsettled(facts) <= 0:
            with self._lock:
                self._kept[_key(facts)] = found
                self._unsaved = self._unsaved or _lasts(_key(facts))
        return found

    def of_kernel(self, files: Iterable[tuple[str, Facts, bool]]) -> dict[str, str]:
        """Return the hashes of a kernel's files (path, facts, whether it may write to it) by path, if they are cheap.

        Those that are not cached are read, the smallest first, up to `AT_ONCE` bytes; the others are left to `begin`.
        """
        found, unknown = {}, []
        for path, facts, writes in files:
            if hash := self.known(facts):
                found[path] = hash
            elif stat.S_ISREG(facts["mode"]):
                unknown.append((path, facts, writes))
        left, later = AT_ONCE, []
        for path, facts, writes in sorted(unknown, key=lambda each: (each[1]["size"], each[0])):
            if facts["size"] <= left:
                left -= facts["size"]
                if hash := self.of(path, facts):
                    found[path] = hash
            else:
                later.append((path, facts, writes))
        self.queue(later)
        return found

    def queue(self, files: Iterable[tuple[str, Facts, bool]]) -> None:
        """Leave a sleeping kernel's files (as for `of_kernel`) to `begin`, as far as they are not cached.

        Of all files of one kernel `LATER` bytes at most: those first that it does not write to, the smallest first.
        The others have another content after each time that the kernel is awake.
        """
        left = LATER
        for path, facts, _ in sorted(files, key=lambda each: (each[2], each[1]["size"], each[0])):
            if facts.get("unstamped"):  # it may be another content by then, and nothing shows it
                continue
            if stat.S_ISREG(facts["mode"]) and facts["size"] <= min(LARGEST, left) and not self.known(facts):
                left -= facts["size"]
                with self._lock:
                    self._pending.pop(path, None)
                    self._pending[path] = facts

    def begin(self) -> None:
        """Hash the files of `queue` on a thread of the lowest priority, and save the cache.

        Where the process may have no more threads, the next call does.
        """
        with self._lock:
            if self._thread is None and (self._pending or self._unsaved):
                # No daemon: it must not be interrupted when the interpreter ends, and `_work` ends soon then.  No
                # executor: its threads are joined while the main thread still counts as alive (Python 3.11).
                self._thread = thread = threading.Thread(target=self._work, name="gpu-ckpt-hashes")
                try:
                    thread.start()
                except RuntimeError:
                    self._thread = None

    def settle(self) -> None:
        """Wait until the background thread has ended."""
        while (thread := self._thread) is not None:
            thread.join()

    def _work(self) -> None:
        with contextlib.suppress(OSError):  # of the thread alone, as Linux has it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        main = threading.main_thread()

        def cancelled() -> bool:
            return not main.is_alive()

        while True:
            with self._lock:
                if not self._pending or cancelled():
                    self._pending.clear()
                    break
                file = self._next_settled()
            if file is not None:
                self.of(*file, cancelled)
            else:
                self._save()  # for other processes; the files that are left may take a while
                time.sleep(_POLL_SECONDS)
        self._save()
        with self._lock:
            self._thread = None
            more = bool(self._pending) and not cancelled()  # just added, without a thread
        if more:
            self.begin()

    def _next_settled(self) -> tuple[str, Facts] | None:
        """Remove and return the first pending file that has not changed just now.  Called with the lock held."""
        for path, facts in [*self._pending.items()]:
            if (wait := _unsettled(facts)) <= 0 or wait > _SETTLED:  # a time in the future: it would never be
                del self._pending[path]
                if wait <= 0:
                    return path, facts
        return None

    def sweep(self) -> None:
        """Remove files of a process that ended while it saved; one that saves just now does it again next time."""
        remove_leftovers(self._path)

    # -- the file; called with the lock held, but for `_save`

    def _load(self) -> None:
        with contextlib.suppress(OSError):
            if (now := identity(self._path.lstat())) != self._read:
                self._read = now
                self._kept = {**_parsed(self._path), **self._kept}

    def _save(self) -> None:
        with self._lock:
            if not self._unsaved:
                return
            self._load()  # hashes that another server has saved meanwhile
            for key in list(self._kept)[:-MOST_KEPT]:
                del self._kept[key]
            lasting = {key: found for key, found in self._kept.items() if _lasts(key)}
            text = json.dumps({"version": _VERSION, "files": lasting})
            self._unsaved = False
        with contextlib.suppress(OSError):  # a full disk: next time
            write_atomically(self._path, text, durable=False)


def _parsed(path: Path) -> dict[str, str]:
    """Read the cache; empty if it cannot be read or is not in the form that `Hashes` writes."""
    try:
        with open_regular(str(path)) as file:
            data: Any = json.loads(file.read(MOST_KEPT * 512))
        if data["version"] == _VERSION:
            return {key: hash for key, hash in data["files"].items() if re.fullmatch(r"[0-9a-f]{64}", hash)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    return {}


def _unsettled(facts: Facts) -> int:
    """Return in how many ns a later change of the file gets another time stamp for certain."""
    return int(max(facts["ctime"], facts["mtime"])) + _SETTLED - time.time_ns() + 1


def _lasts(key: str) -> bool:
    """Return whether the file's ctime is no whole number of seconds."""
    return int(key.rpartition(":")[2]) % _SECOND != 0


def _identity(facts: Facts) -> tuple[int, ...]:
    return tuple(facts[name] for name in ("device", "inode", "size", "mtime", "ctime"))


def _key(facts: Facts) -> str:
    noted = [facts["noted"]] if "noted" in facts else []
    return ":".join(map(str, (*noted, *_identity(facts))))
