"""A coroutine that runs beside the server's requests, started and stopped cleanly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class PeriodicTask:
    """Runs ``work`` as a task called ``name`` from `start` to `stop`.  Belongs to one event loop.

    ``work`` handles its errors itself and continues; if it raises, asyncio logs the error and it is not restarted.
    """

    def __init__(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name, self._work = name, work
        self._task: asyncio.Task[None] | None = None

    @property
    def started(self) -> bool:
        """Return whether `start` was called, and `stop` not since."""
        return self._task is not None

    def start(self) -> None:
        """Start; does nothing if it was started.  Called on the event loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name=self._name)

    async def stop(self) -> None:
        """Cancel the work and wait for its end; does nothing if it was not started.  Never raises the work's error."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            # Not `await task`: the caller's own cancellation would look the same.
            await asyncio.wait({task})


async def wait(event: asyncio.Event, timeout: float) -> None:
    """Wait until the event is set; set it after ``timeout`` seconds."""
    # A timer and not `wait_for`, which before Python 3.12 can lose the cancellation by `PeriodicTask.stop`.
    timer = asyncio.get_running_loop().call_later(timeout, event.set)
    try:
        await event.wait()
    finally:
        timer.cancel()
