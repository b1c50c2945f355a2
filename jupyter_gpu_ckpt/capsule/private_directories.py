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
from .namespaces import mount_over

_NAME, _MADE = "private-", ".made"
#: Others may remove a directory between the moment when it is made and when it is mounted over, as often.
_ATTEMPTS = 10


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
                for attempt in range(_ATTEMPTS):
                    with contextlib.suppress(FileNotFoundError):
                        if os.path.samestat(os.lstat(path), os.fstat(descriptor)):
                            break
                    try:
                        _make(path, f"{own}{_MADE}")
                        mount_over(descriptor, path)
                        break
                    except FileNotFoundError:
                        if attempt == _ATTEMPTS - 1:
                            raise
            finally:
                os.close(descriptor)

    def remove_made(self) -> None:
        """Remove the paths that `mount` has made for a capsule that has ended, if they are empty.  Never raises."""
        for own, path in self._own.items():
            with contextlib.suppress(OSError):
                with open(f"{own}{_MADE}", encoding="ascii") as file:
                    made = file.read()
                os.unlink(f"{own}{_MADE}")
                with contextlib.suppress(OSError):  # others have unmounted it
                    syscalls.umount(path)
                if _identity(path) == made:  # others may have made theirs, after they had removed ours
                    os.rmdir(path)

    def watch(self) -> select.epoll | None:
        """Return what becomes readable when the table of mounts changes (proc_pid_mounts(5)); None without any."""
        if not self._own:
            return None
        watch = select.epoll()
        watch.register(os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC), select.EPOLLPRI)
        return watch


def _make(path: str, mark: str) -> None:
    """Make a directory, and note which, unless it is there.

    One that others are removing is there for some milliseconds after it was unmounted; mkdir(2) waits for its end.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    try:
        with open(mark, "w", encoding="ascii") as file:
            file.write(_identity(path))
    except OSError:
        with contextlib.suppress(OSError):
            os.rmdir(path)
        raise


def _identity(path: str) -> str:
    status = os.lstat(path)
    return f"{status.st_dev} {status.st_ino}"
