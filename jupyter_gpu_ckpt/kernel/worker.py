"""One thread for the verbs of one kernel: they take turns, and the caller's event loop (if it has one) stays free."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ..errors import StateError

Result = TypeVar("Result")


class Worker:
    """Runs calls one after the other; its thread starts with the first and ends with `end`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        #: The last request for each verb: its arguments, and what becomes of it.
        self._joined: dict[str, tuple[tuple[Any, ...], Future[Any]]] = {}

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Have ``call`` run after those before it."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        return self._pool.submit(call)

    async def verb(self, name: str, call: Callable[..., Result], *arguments: Any) -> Result:
        """Run a verb; a second request for the same joins the one under way.

        Raises `StateError` when the one under way has other arguments.
        """
        joined, future = self._joined.get(name, ((), None))
        if future is None or future.done():
            future = self.submit(functools.partial(call, *arguments))
            self._joined[name] = arguments, future
        elif joined != arguments:
            message = f"Another {name} of this kernel is under way, and not the same."
            raise StateError(message, hint="Wait for its end.", left="the one under way goes on")
        # Shielded: a caller that is cancelled must not cancel what another caller waits for.
        return await asyncio.shield(asyncio.wrap_future(future))

    def end(self) -> None:
        """Let the thread go once it has done what was submitted; the next call starts another."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None
