"""Changes to stopped processes for the time of a dump, of state that CRIU cannot save: `Preparation`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from jupyter_gpu_ckpt.process import connections, controlling_terminals, watched_files
from jupyter_gpu_ckpt.process.terminals import Terminals
from jupyter_gpu_ckpt.process.watched_files import WatchedFiles


class Preparation:
    """TCP connections saved, data taken out of terminals, /dev/tty opened by another name, inotify watches removed.

    ``path``: of the file in the dump that gets the terminals' data; `connections.FILE` is beside it.  Raises `OSError`;
    *after failure* all is as before, but for what its ``strerror`` names.
    """

    def __init__(self, pids: Iterable[int], path: str, files: WatchedFiles) -> None:
        pids = list(pids)
        self._drained: list[connections.Drained | connections.DrainedClosed] = []
        self._reopened: dict[int, controlling_terminals.Files] = {}
        self._watches: dict[int, watched_files.Noted] = {}
        self._terminals = Terminals()
        try:
            self._drained = connections.save(pids, _beside(path))
            self._terminals.drain()
            self._terminals.save(path)
            self._reopened = controlling_terminals.reopen(pids)
            self._watches = watched_files.remove(pids, files)
        except BaseException as error:
            if (lost := self.undo()) and isinstance(error, OSError):
                error.strerror = f"{error.strerror}; {lost}"
            raise

    @property
    def has_injected(self) -> bool:
        """Return whether system calls were made in processes (`injection`): only to open /dev/tty by another name."""
        return bool(self._reopened)

    def notes(self) -> dict[int, dict[str, Any]]:
        """Return the notes that `reapply` needs, by process."""
        found: dict[int, dict[str, Any]] = {}
        for name, processes in (("controlling_terminal", self._reopened), ("watches", self._watches)):
            for pid, noted in processes.items():
                found.setdefault(pid, {})[name] = noted
        return found

    def undo(self) -> str:
        """Put everything back.  Return what is lost, in words.  Never raises: the processes must run on."""
        steps = (self._put_watches_back, self._put_terminals_back, self._terminals.restore, self._put_bytes_back)
        lost = [why for step in steps if (why := attempted(step))]
        self._terminals.close()
        return "; ".join(lost)

    def _put_watches_back(self) -> str:
        failed = [why for pid, noted in self._watches.items() for why in watched_files.put_back(pid, noted)]
        return ", ".join(f"inotify watch on {why}" for why in failed)

    def _put_terminals_back(self) -> str:
        controlling_terminals.put_back(self._reopened)
        return ""

    def _put_bytes_back(self) -> str:
        lost = connections.put_back(self._drained)
        return f"closed: {lost}" if lost else ""


def complete_restore(path: str) -> str:
    """Write the data in the file ``path`` of a dump to the restored terminals, and connect the TCP connections again.

    Return what is lost, in words.  Never raises.
    """

    def restore_terminals() -> str:
        terminals = Terminals()
        try:
            terminals.load(path)
            return terminals.restore()
        finally:
            terminals.close()

    def connect() -> str:
        return connections.restore(_beside(path))

    return "; ".join(lost for step in (restore_terminals, connect) if (lost := attempted(step)))


def _beside(path: str) -> str:
    return os.path.join(os.path.dirname(path), connections.FILE)


def attempted(work: Callable[[], str]) -> str:
    """Call ``work``.  Return what it returns, or why it failed."""
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
