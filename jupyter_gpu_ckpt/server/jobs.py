"""Jobs of REST: a POST starts a verb, later GETs find its outcome."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from ..errors import GpuCkptError, StateError

#: How many jobs that have ended are remembered, the newest.
REMEMBERED = 200


@dataclass
class Job:
    """One verb on one kernel, or on all (``kernel_id`` is empty).  Times are seconds since the epoch."""

    id: str
    kernel_id: str
    verb: str
    parameters: dict[str, Any]
    started: float = field(default_factory=time.time)
    ended: float | None = None
    error: dict[str, Any] | None = None
    #: The verb's result as JSON; None for most.
    result: dict[str, Any] | None = None
    #: Whether the verb has not begun: it waits until no cell runs.
    waits: bool = False
    #: Whether it was cancelled while it waited.
    cancelled: bool = False

    @property
    def status(self) -> str:
        """``waiting``, ``running``, ``done``, ``failed`` or ``cancelled``."""
        if self.cancelled:
            return "cancelled"
        if self.ended is None:
            return "waiting" if self.waits else "running"
        return "failed" if self.error else "done"

    def as_dict(self) -> dict[str, Any]:
        """Return the job as JSON-serialisable data."""
        names = ("id", "kernel_id", "verb", "parameters", "status", "started", "ended", "error", "result")
        return {name: getattr(self, name) for name in names}


class Jobs:
    """The jobs of this server.  Belongs to one event loop."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(
        self,
        kernel_id: str,
        verb: str,
        parameters: Mapping[str, Any],
        call: Callable[[], Awaitable[Any]],
        turn: AbstractAsyncContextManager[None] | None = None,
    ) -> Job:
        """Start ``call``, inside ``turn`` if it has to wait; a request equal to one under way joins that.

        On return the wait has begun: what a client sends once it is answered comes behind it.
        """
        for job in self.running():
            if (job.kernel_id, job.verb, job.parameters) == (kernel_id, verb, parameters):
                return job
        job = Job(secrets.token_hex(8), kernel_id, verb, dict(parameters), waits=turn is not None)
        self._jobs[job.id] = job
        run = self._run(job, call, turn or contextlib.nullcontext())
        task = self._tasks[job.id] = asyncio.create_task(run, name=f"gpu-ckpt {verb} {kernel_id}")
        task.add_done_callback(lambda _: self._ended(job))  # also if it is cancelled before it has begun
        await asyncio.sleep(0)  # tasks run in the order in which they were made ready: this one has begun then
        return job

    def is_under_way(self, kernel_id: str, verb: str) -> bool:
        """Return whether a job with this verb of the kernel has begun, and not ended."""
        return any((job.kernel_id, job.verb, job.waits) == (kernel_id, verb, False) for job in self.running())

    def cancel(self, job: Job) -> None:
        """Cancel a job that waits.  Raises `StateError` for any other."""
        if job.status != "waiting":
            raise StateError(
                f"The job is {job.status}; only a waiting job can be cancelled.", left=f"the job is {job.status}"
            )
        job.cancelled, job.ended = True, time.time()
        self._tasks[job.id].cancel()

    async def _run(self, job: Job, call: Callable[[], Awaitable[Any]], turn: AbstractAsyncContextManager[None]) -> None:
        try:
            async with turn:
                job.waits = False
                result = await call()
            job.result = result if isinstance(result, dict) else None
        except asyncio.CancelledError:
            if job.cancelled:
                return
            error = GpuCkptError(
                "The server stopped before the job ended.", hint="Reload the page, which then shows the kernel's state."
            )
            job.error = error.as_dict()
            raise
        except Exception as failure:
            job.error = GpuCkptError.from_exception(failure).as_dict()

    def _ended(self, job: Job) -> None:
        job.ended = job.ended or time.time()
        self._tasks.pop(job.id, None)
        ended = [job.id for job in self._jobs.values() if job.ended is not None]
        for id in ended[:-REMEMBERED]:
            del self._jobs[id]

    def get(self, id: str) -> Job | None:
        """Return the job of that id; None if there is none, or it was forgotten."""
        return self._jobs.get(id)

    def running(self) -> list[Job]:
        """Return the jobs that wait or are under way, oldest first."""
        return [job for job in self._jobs.values() if job.ended is None]

    def of_kernel(self, kernel_id: str) -> Job | None:
        """Return the kernel's newest job."""
        return next((job for job in reversed(self._jobs.values()) if job.kernel_id == kernel_id), None)

    async def stop(self) -> None:
        """Stop waiting.  The verbs continue on their kernels' own threads."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
