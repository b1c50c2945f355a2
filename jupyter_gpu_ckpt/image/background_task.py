"""A job on a thread of its own, beside what its caller does meanwhile; one that can be cancelled."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import TypeVar

_Result = TypeVar("_Result")


@contextlib.contextmanager
def beside(work: Callable[[], _Result]) -> Iterator[Future[_Result]]:
    """Run ``work`` on a thread beside the body, which ends after it; before the body where no thread can be started."""
    with ThreadPoolExecutor(1) as pool:
        try:
            future = pool.submit(work)
        except RuntimeError:
            future = Future()
            try:
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)
        yield future


class BackgroundTask:
    """Run ``work`` on a thread, with a function that raises `CancelledError` after `cancel`.  Thread-safe."""

    def __init__(self, name: str, work: Callable[[Callable[[], None]], object]) -> None:
        self._cancelled = threading.Event()
        #: How long it took, once it has ended.
        self.seconds = 0.0

        def measured() -> None:
            began = time.monotonic()
            try:
                work(self._check_cancelled)
            finally:
                self.seconds = time.monotonic() - began

        executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._future = executor.submit(measured)
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
