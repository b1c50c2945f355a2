"""A job on a thread of its own, beside what its caller does meanwhile; one that can be cancelled."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import TypeVar

_Result = TypeVar("_Result")

#: Seconds between two calls of a function that follows what the body does.
_POLL_SECONDS = 0.005


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


@contextlib.contextmanager
def following(
    name: str,
    advance: Callable[[Callable[[], None]], object],
    finish: Callable[[Callable[[], None]], object],
    check: Callable[[], object],
) -> Iterator[None]:
    """Call ``advance`` every few milliseconds on a thread beside the body, and ``finish`` there after it.

    Both get a function to call often: it calls ``check``, and raises `CancelledError` once the body has failed; then
    ``finish`` is not called.  The thread has ended in any case when this returns.  Raises what the functions raise,
    after the body.
    """
    ended = threading.Event()

    def work(check_task: Callable[[], None]) -> None:
        def check_cancelled() -> None:
            check()
            check_task()

        while not ended.wait(_POLL_SECONDS):
            check_cancelled()
            advance(check_cancelled)
        finish(check_cancelled)

    task = BackgroundTask(name, work)
    try:
        yield
    except BaseException:  # which says more than what the task may raise
        task.cancel(wait_for_end=True)
        raise
    ended.set()
    task.wait()
