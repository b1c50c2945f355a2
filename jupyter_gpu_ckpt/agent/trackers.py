"""What resource trackers would remove when this kernel ends: shared memory, semaphores, files of joblib.

A program that makes such a thing registers it with a tracker, a process of its own (`multiprocessing.resource_tracker`,
and loky's, which is a subclass), which removes what is left when the program has ended.  The tracker of a kernel that
sleeps is in the image, so whoever drops that image has to do its work, and must know what it is.  The tracker tells
nobody; so what this process tells the tracker is noted on the way.
"""

from __future__ import annotations

import os
from typing import Any

_FILES = {
    "shared_memory": "/dev/shm/{}",  # noqa: S108 - where glibc keeps them: shm_overview(7), sem_overview(7)
    "semaphore": "/dev/shm/sem.{}",  # noqa: S108
    "file": "{}",
    "folder": "{}",
}


class Trackers:
    """What this process has registered and not taken back, from `watch` on."""

    def __init__(self) -> None:
        #: How often, by the kind and name of a thing: loky counts its users.
        self._registered: dict[tuple[str, str], int] = {}
        self._unwatched: Any = None

    def watch(self) -> None:
        """Note what is registered from now on."""
        from multiprocessing.resource_tracker import ResourceTracker

        send = self._unwatched = ResourceTracker._send  # type: ignore[attr-defined]

        def send_and_note(tracker: Any, command: str, name: str, kind: str, *more: Any) -> Any:
            sent = send(tracker, command, name, kind, *more)
            self._note(command, name, kind)
            return sent

        ResourceTracker._send = send_and_note  # type: ignore[attr-defined]

    def unwatch(self) -> None:
        """Note nothing any more."""
        if self._unwatched is not None:
            from multiprocessing.resource_tracker import ResourceTracker

            ResourceTracker._send = self._unwatched  # type: ignore[attr-defined]
            self._unwatched = None

    def _note(self, command: str, name: str, kind: str) -> None:
        key = (kind, name)
        if command == "REGISTER":
            self._registered[key] = self._registered.get(key, 0) + 1
        elif command == "UNREGISTER" or (command == "MAYBE_UNLINK" and self._registered.get(key, 0) <= 1):
            self._registered.pop(key, None)
        elif command == "MAYBE_UNLINK":
            self._registered[key] -= 1

    def living(self) -> list[dict[str, Any]]:
        """The files of what is registered: ``path``, ``device`` and ``inode``; those that exist, and are the user's."""
        found = []
        for kind, name in sorted(self._registered):
            path = _FILES.get(kind, "").format(name.lstrip("/") if kind in ("shared_memory", "semaphore") else name)
            try:
                facts = os.lstat(path)
            except (OSError, ValueError):
                continue
            if facts.st_uid == os.geteuid():
                found.append({"path": path, "device": facts.st_dev, "inode": facts.st_ino})
        return found
