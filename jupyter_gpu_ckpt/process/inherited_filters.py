"""Seccomp filters that a kernel has inherited from its capsule, as in a container, hidden from CRIU for a dump.

CRIU saves filters by ptrace(2), which Linux permits to no process that is itself below a filter.  But these need not be
saved: CRIU makes the restored processes below the same filters, or those of the server that wakes them.  Linux adds
filters and removes none (seccomp(2)), and the init of a capsule adds none.  So a process of the capsule with as many
filters as its init has the same ones and no other.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import syscalls

#: Of a capsule's directory.
DIRECTORY = "status"
_FILTER = "2"  # SECCOMP_MODE_FILTER
_MODE = re.compile(r"^Seccomp:\t\d+$", re.M)


def all_inherited(status: Mapping[str, str], own: Mapping[str, str]) -> bool:
    """Return whether a thread has the filters of the capsule's init and no other.  Always false before Linux 5.11.

    ``status``, ``own``: the fields of `procfs.status` of the thread and of the init.
    """
    mine = own.get("Seccomp", ""), own.get("Seccomp_filters", "")
    return mine[0] == _FILTER and mine[1] != "" and (status.get("Seccomp"), status.get("Seccomp_filters")) == mine


class InheritedFilters:
    """Hides inherited filters in ``/proc``, the only file of which CRIU learns that there are some.

    ``directory``: gets the files that are mounted over ``/proc/TID/status`` of stopped threads.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._mounted: list[str] = []

    def hide(self, pids: Iterable[int]) -> None:
        """Hide the inherited filters of stopped processes.  Raises `OSError`; *after failure* nothing is hidden."""
        own = procfs.status()
        if own.get("Seccomp") != _FILTER:
            return
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        try:
            for tid in (tid for pid in pids for tid in procfs.threads(pid)):
                with contextlib.suppress(*procfs.GONE):  # it was killed
                    self._hide(tid, own)
        except BaseException:
            self.show()
            raise

    def _hide(self, tid: int, own: Mapping[str, str]) -> None:
        text = procfs.read(f"/proc/{tid}/status")
        if not all_inherited(procfs.fields(text), own):
            return  # CRIU saves them, or fails
        path = f"{self._directory}/{tid}"
        with open(path, "w", errors="surrogateescape") as file:
            file.write(_MODE.sub("Seccomp:\t0", text))
        syscalls.mount(path, f"/proc/{tid}/status", None, syscalls.MS_BIND)
        self._mounted.append(f"/proc/{tid}/status")

    def show(self) -> None:
        """Unmount what `hide` has mounted: `inventory` reads the same files."""
        while self._mounted:
            with contextlib.suppress(OSError):  # of a process that has ended Linux has unmounted it
                syscalls.umount(self._mounted.pop())
        with contextlib.suppress(OSError):
            for name in os.listdir(self._directory):
                os.unlink(f"{self._directory}/{name}")
            os.rmdir(self._directory)
