"""A cancellable job on a thread of its own, beside what its caller does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait


class BackgroundTask:
    """Run ``work`` on a thread, with a function that raises `CancelledError` after `cancel`.  Thread-safe."""

    def __init__(self, name: str, work: Callable[[Callable[[], None]], object]) -> None:
        self._cancelled = threading.Event()
        executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._future = executor.submit(work, self._check_cancelled)
        executor.shutdown(wait=False)

    def _check_cancelled(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError

    def wait(self) -> bool:
        """Wait for the end.  Return False if the task was cancelled before.  Raises what ``work`` raised."""
        try:
            self._future.result()
        except CancelledError:
            return False
        return True

    def cancel(self, *, wait_for_end: bool = False) -> None:
        """Make the task end soon; with ``wait_for_end`` it has no file open when this returns.  Idempotent."""
        self._cancelled.set()
        if wait_for_end:
            wait([self._future])
