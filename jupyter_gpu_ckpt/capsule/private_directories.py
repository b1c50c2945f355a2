"""Directories that a capsule has of its own, at paths at which others may have another one.

A branch has sockets of `multiprocessing` under the names that its processes know, beside the kernel that it comes from.
Their directories are mounted in the capsule's mount namespace.  When the others remove theirs, Linux unmounts what is
mounted there in all namespaces: so the init looks at each change of the table of mounts.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence

from ..process import syscalls
from .namespaces import mount_at

_NAME, _MADE = "private-", ".made"


class PrivateDirectories:
    """The directories of one capsule, whose content is in its ``directory``.  Made in the capsule's mount namespace."""

    def __init__(self, directory: str, paths: Sequence[str]) -> None:
        self._own = {f"{directory}/{_NAME}{number}": path for number, path in enumerate(paths)}

    def mount(self) -> None:
        """Mount those that are not; what has no path any more gets one.  Raises `OSError`."""
        for own, path in self._own.items():
            os.makedirs(own, mode=0o700, exist_ok=True)
            descriptor = os.open(own, os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if not os.path.lexists(path):
                    os.close(os.open(f"{own}{_MADE}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
                elif os.path.samestat(os.lstat(path), os.fstat(descriptor)):
                    continue
                mount_at(descriptor, path)
            finally:
                os.close(descriptor)

    def remove_made(self) -> None:
        """Remove the paths that `mount` has made for a capsule that has ended, if they are empty.  Never raises."""
        for own, path in self._own.items():
            with contextlib.suppress(OSError):
                os.unlink(f"{own}{_MADE}")
                with contextlib.suppress(OSError):  # others have unmounted it
                    syscalls.umount(path)
                os.rmdir(path)

    def watch(self) -> select.epoll | None:
        """Return what becomes readable when the table of mounts changes (proc_pid_mounts(5)); None without any."""
        if not self._own:
            return None
        watch = select.epoll()
        watch.register(os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC), select.EPOLLPRI)
        return watch
