"""Close IPython's history database before a dump, and open it again.

All kernels of a profile have the same ``history.sqlite`` open, and it grows while this kernel sleeps; CRIU refuses to
restore a process whose open file changed its size.  So no descriptor of it may be in an image.

Knows IPython 7.x to 9.x: `HistoryManager` has a connection of its own (``db``), and a `HistorySavingThread` with
another one.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import Any

from . import limits

#: Seconds to wait for another process's lock on the database.
_LOCK_TIMEOUT = 5.0
#: Connections to the database that IPython opens: its manager's and its saving thread's.
_CONNECTIONS = 2


class History:
    """The history of one shell: open, or closed without a descriptor on the file."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self.closed = False
        #: The class of a saving thread that `close` has ended and no `reopen` has replaced.
        self._thread_class: Any = None

    @property
    def complete(self) -> bool:
        """Return whether the database is open and the saving thread runs, where there was one."""
        return not self.closed and self._thread_class is None

    def close(self) -> bool:
        """Write out cached lines, stop the saving thread and close both connections; return whether there were any.

        Session number, input and output caches stay as they are.  A database that cannot be written now (locked by
        another kernel) loses nothing: its lines stay cached and are written after `reopen`.  After failure: `reopen`.
        """
        manager = getattr(self._shell, "history_manager", None)
        if self.closed or manager is None or not manager.enabled or str(manager.hist_file) == ":memory:":
            return False
        from IPython.core.history import DummyDB

        self.closed = True  # first, so that `reopen` works after a failure here
        if (thread := getattr(manager, "save_thread", None)) is not None:
            self._thread_class = type(thread)
            thread.stop()  # joins it; the thread closes its own connection
            with contextlib.suppress(Exception):
                atexit.unregister(thread.stop)  # IPython < 8.13 registers once for each thread ever made
            manager.save_thread = None
            if hasattr(manager, "using_thread"):  # IPython >= 9.10, where else each cell starts one if there is none
                manager.using_thread = False
        cached = list(manager.db_input_cache), list(manager.db_output_cache)
        try:
            manager.writeout_cache()
        except Exception:
            manager.db_input_cache, manager.db_output_cache = cached
        # IPython >= 9 keeps every connection it ever opened in a finalizer, which closes and drops it.
        if (finalizer := getattr(manager, "_finalizer", None)) is not None:
            finalizer()
        manager.db.close()
        # Not the closed connection: after an error of sqlite IPython renames the user's file.
        manager.db = DummyDB()
        return True

    def reopen(self) -> str:
        """Open the database again and continue the session; return the problem, or ``""``.

        *After failure* (`OSError`, `RuntimeError`: the kernel has reached a limit) lines stay cached; call it again.
        """
        if self.complete:
            return ""
        problem, manager = "", self._shell.history_manager
        if self.closed:
            limits.require_headroom(descriptors=_CONNECTIONS)
            if problem := _unreadable(manager):
                # `init_db` would rename the user's file; history continues in memory, as IPython does without a file.
                manager.hist_file = ":memory:"
                self._thread_class = None
            manager.init_db()
            self.closed = False
        if self._thread_class is not None:
            limits.require_headroom(descriptors=1)
            if manager.save_flag is not None:
                manager.save_flag.clear()  # IPython < 9 shares one flag between threads; `stop` left it set
            self._start_saving(manager)
        return problem

    def begin_session(self) -> None:
        """Give the lines from now on a session of their own: those of this one, which has such numbers, were written.

        Of a kernel that has gone back IPython would notice that itself, and print an error about it.
        """
        manager = getattr(self._shell, "history_manager", None)
        if self.complete and manager is not None and manager.enabled:
            manager.new_session()

    def _start_saving(self, manager: Any) -> None:
        thread = self._thread_class(manager)
        try:
            thread.start()
        except RuntimeError:
            with contextlib.suppress(Exception):
                atexit.unregister(thread.stop)  # it would wait for a thread that never ran
            raise
        manager.save_thread, self._thread_class = thread, None
        if hasattr(manager, "using_thread"):
            manager.using_thread = True


def _unreadable(manager: Any) -> str:
    """Return why the database file cannot be used, or ``""``; a file that does not exist yet is usable."""
    import sqlite3

    path = str(manager.hist_file)
    if not os.path.exists(path):
        return ""
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=_LOCK_TIMEOUT)) as connection:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error as error:
        return f"history stays in memory: {type(error).__name__}: {error}"
    return ""
