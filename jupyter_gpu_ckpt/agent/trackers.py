"""Record the resources that Python's resource trackers would remove when this kernel ends.

Shared memory, semaphores and joblib's files are registered with a tracker, a process of its own
(`multiprocessing.resource_tracker`, and loky's subclass of it), which removes leftovers when the program has ended.  A
sleeping kernel's tracker is in the image, so the code that deletes the image must remove these resources itself.  The
tracker cannot be queried; so this process records its own registrations.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

_FILES = {
    "shared_memory": "/dev/shm/{}",  # noqa: S108 - where glibc keeps them: shm_overview(7), sem_overview(7)
    "semaphore": "/dev/shm/sem.{}",  # noqa: S108
    "file": "{}",
    "folder": "{}",
}


class Trackers:
    """The registrations of this process since `watch`."""

    def __init__(self) -> None:
        #: Count by kind and name: loky counts the users of a resource.
        self._registered: dict[tuple[str, str], int] = {}
        #: Kinds and names that the present trackers do not know, as `forget` has ended those that did, and their files.
        self._forgotten: dict[tuple[str, str], tuple[int, int] | None] = {}
        self._unwatched: Any = None

    def watch(self) -> None:
        """Record registrations from now on."""
        from multiprocessing.resource_tracker import ResourceTracker

        send = self._unwatched = ResourceTracker._send  # type: ignore[attr-defined]

        def send_and_record(tracker: Any, command: str, name: str, kind: str, *more: Any) -> Any:
            key = (kind, name)
            if key in self._forgotten and key not in self._registered:
                if command != "REGISTER":
                    return None  # the tracker would print an error
                if (file := _file(*key)) is not None and file == self._forgotten[key]:
                    return None  # opened anew: it would be removed at this kernel's end, and the other one has it
            sent = send(tracker, command, name, kind, *more)
            self._record(command, name, kind)
            return sent

        ResourceTracker._send = send_and_record  # type: ignore[attr-defined]

    def unwatch(self) -> None:
        """Stop recording."""
        if self._unwatched is not None:
            from multiprocessing.resource_tracker import ResourceTracker

            ResourceTracker._send = self._unwatched  # type: ignore[attr-defined]
            self._unwatched = None

    def forget(self) -> None:
        """Forget all resources, which belong to the kernel that this process comes from, and end the trackers.

        One is started again as soon as something is registered.
        """
        self._forgotten |= {key: _file(*key) for key in self._registered}
        self._registered.clear()
        for name, module in list(sys.modules.items()):
            tracker = getattr(module, "_resource_tracker", None) if name.endswith(".resource_tracker") else None
            if tracker is None or tracker._pid is None:
                continue
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has ended by itself
                os.kill(tracker._pid, signal.SIGKILL)
                os.waitpid(tracker._pid, 0)
            os.close(tracker._fd)
            tracker._fd = tracker._pid = None

    def _record(self, command: str, name: str, kind: str) -> None:
        key = (kind, name)
        if command == "REGISTER":
            self._registered[key] = self._registered.get(key, 0) + 1
        elif command == "UNREGISTER" or (command == "MAYBE_UNLINK" and self._registered.get(key, 0) <= 1):
            self._registered.pop(key, None)
        elif command == "MAYBE_UNLINK":
            self._registered[key] -= 1

    def living(self) -> list[dict[str, Any]]:
        """Return ``path``, ``device`` and ``inode`` of registered resources that exist and belong to the user."""
        found = []
        for kind, name in sorted(self._registered):
            path = _path(kind, name)
            with contextlib.suppress(OSError, ValueError):
                facts = os.lstat(path)
                if facts.st_uid == os.geteuid():
                    found.append({"path": path, "device": facts.st_dev, "inode": facts.st_ino})
        return found


def _path(kind: str, name: str) -> str:
    return _FILES.get(kind, "").format(name.lstrip("/") if kind in ("shared_memory", "semaphore") else name)


def _file(kind: str, name: str) -> tuple[int, int] | None:
    """Return device and inode of a resource, or None if there is none of this name."""
    with contextlib.suppress(OSError, ValueError):
        facts = os.lstat(_path(kind, name))
        return facts.st_dev, facts.st_ino
    return None
