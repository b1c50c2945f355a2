"""What the server does beside its requests, for as long as it runs: one coroutine, begun and ended cleanly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Background:
    """Runs ``work`` as a task called ``name`` from `start` to `stop`.  Belongs to one event loop.

    ``work`` tells its own faults and goes on; one that ends by an error is told by asyncio, and not begun again.
    """

    def __init__(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name, self._work = name, work
        self._task: asyncio.Task[None] | None = None

    @property
    def begun(self) -> bool:
        """Whether `start` was called, and `stop` not since."""
        return self._task is not None

    def start(self) -> None:
        """Begin; does nothing if it has begun.  Called on the event loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name=self._name)

    async def stop(self) -> None:
        """Cancel it and wait for its end; does nothing if it has not begun.  Never raises what the work raised."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            # And not `await task`: a caller that is cancelled itself could not be told from it.
            await asyncio.wait({task})
