"""Directories that a capsule has of its own, at paths at which others may have another one.

A branch has its sockets under the names that its kernel knows, beside the kernel that it comes from.  They are mounted
in the capsule's mount namespace.  When the others remove theirs, Linux unmounts what is mounted there in all
namespaces: so the init looks at each change of the table of mounts.
"""

from __future__ import annotations

import os
import select
import shutil
from collections.abc import Sequence

from .namespaces import mount_at

_NAME = "private-"


class PrivateDirectories:
    """The directories of one capsule, whose content is in its ``directory``.  Made in the capsule's mount namespace."""

    def __init__(self, directory: str, paths: Sequence[str]) -> None:
        self._own = {f"{directory}/{_NAME}{number}": path for number, path in enumerate(paths)}

    def clear(self) -> None:
        """Remove what an earlier capsule has left: CRIU makes all sockets anew."""
        for own in self._own:
            shutil.rmtree(own, ignore_errors=True)

    def mount(self) -> None:
        """Mount those that are not.  Raises `OSError`."""
        for own, path in self._own.items():
            os.makedirs(own, mode=0o700, exist_ok=True)
            descriptor = os.open(own, os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if not (os.path.isdir(path) and os.path.samestat(os.stat(path), os.fstat(descriptor))):
                    mount_at(descriptor, path)
            finally:
                os.close(descriptor)

    def watch(self) -> select.epoll | None:
        """Return what becomes readable when the table of mounts changes (proc_pid_mounts(5)); None without any."""
        if not self._own:
            return None
        watch = select.epoll()
        watch.register(os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC), select.EPOLLPRI)
        return watch
