"""The thread on which a kernel's verbs run one after the other, so that the caller's event loop stays free."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from ..errors import GpuCkptError, LimitReached, StateError

Result = TypeVar("Result")


class Worker:
    """Runs calls one after the other; its thread starts with the first and ends with `end`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None
        #: The last run of each verb: its arguments and its future.
        self._last_runs: dict[str, tuple[tuple[Any, ...], Future[Any]]] = {}

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Run ``call`` after those submitted before.

        Raises `LimitReached` where there are no more threads, `StateError` where this program ends: it is not run.
        """
        pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix=self._name)
        try:
            future = pool.submit(call)
        except RuntimeError as error:
            if self._pool is None:  # the next call would have it run
                pool.shutdown(wait=False, cancel_futures=True)
            known = GpuCkptError.from_exception(error)
            if not isinstance(known, LimitReached):  # the interpreter has ended the threads of all pools
                known = StateError("The program that owns this kernel is ending.", left="nothing was done")
            raise known from error
        self._pool = pool
        return future

    async def verb(self, name: str, call: Callable[..., Result], *arguments: Any) -> Result:
        """Run a verb; a second request for the same joins the one under way.

        Raises `StateError` when the one under way has other arguments.
        """
        joined, future = self._last_runs.get(name, ((), None))
        if future is None or future.done():
            self._last_runs = {each: run for each, run in self._last_runs.items() if not run[1].done()}
            future = self.submit(functools.partial(call, *arguments))
            self._last_runs[name] = arguments, future
        elif joined != arguments:
            message = f"Another {name} of this kernel is under way, and not the same."
            raise StateError(message, hint="Wait for its end.", left="the one under way continues")
        # Shielded: a caller that is cancelled must not cancel what another caller waits for.
        return await asyncio.shield(asyncio.wrap_future(future))

    def end(self) -> None:
        """End the thread once it has run what was submitted; the next call starts another."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)
