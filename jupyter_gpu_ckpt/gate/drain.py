"""Waiting until the kernel owes no answer, and finding out about answers that never come."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..errors import GateError, KernelBusy
from .internal_requests import PROBE, InternalRequest
from .pending import Lane, PendingRequest, PendingRequests

# Seconds without progress after which a straggler is taken for one, and a fence is sent.
_QUIET = 0.1

# Seconds for which answers to queries on the control channel are waited for (`PendingRequest.is_query`).
_QUERY_PATIENCE = 1.0


class Drain:
    """Drains of the ``pending`` requests, one at a time.

    ``send`` sends an internal request to the kernel.  ``dropped`` is called with the requests that a fence completed,
    or that are not waited for any longer.
    """

    def __init__(
        self,
        pending: PendingRequests,
        send: Callable[[InternalRequest], None],
        dropped: Callable[[list[PendingRequest]], None],
    ) -> None:
        self._pending, self._send, self._dropped = pending, send, dropped
        self._future: Future[None] | None = None
        self._seconds = self._deadline = 0.0
        # Monotonic seconds: until when queries are waited for, and of the last progress.
        self._queries_until = math.inf
        self._progress = 0.0
        self._fences: set[Lane] = set()

    @property
    def active(self) -> bool:
        """Return whether a drain is under way."""
        return self._future is not None

    def begin(self, future: Future[None], seconds: float) -> None:
        """Settle ``future`` when no request is pending, or fail it with `KernelBusy` after ``seconds``."""
        self._future, self._seconds = future, seconds
        self._progress = time.monotonic()
        self._deadline = self._progress + seconds
        self._queries_until = self._progress + min(_QUERY_PATIENCE, seconds / 2)

    def note_progress(self) -> None:
        """Note that a request was forwarded, or that an answer came."""
        self._progress = time.monotonic()

    def settle(self) -> bool:
        """End the drain if no request is pending any more; whether it ended."""
        if self._future is None or self._pending:
            return False
        self._end().set_result(None)
        return True

    def cancel(self, reason: str) -> None:
        """End the drain because the kernel is gone."""
        self._fences.clear()
        if self._future is not None:
            self._end().set_exception(GateError(f"The drain was cancelled: {reason}."))

    def next_time(self) -> float | None:
        """Return the time at which `tick` has something to do next, in monotonic seconds; None: never."""
        if self._future is None:
            return None
        times = [self._deadline, self._queries_until]
        if any(lane not in self._fences for lane in self._pending.straggling()):
            times.append(self._progress + _QUIET)
        return min(times)

    def tick(self, now: float) -> None:
        """Fail at the deadline; send a fence to each lane in which only stragglers are left; drop late queries."""
        if self._future is not None and now >= self._queries_until:
            self._queries_until = math.inf
            self._dropped(self._pending.drop_queries())
        if self._future is None:
            return
        if now >= self._deadline:
            message, hint = f"The kernel is still working after {self._seconds:g} s.", None
            if self._pending.awaits_input():
                message, hint = "A cell waits for input.", KernelBusy.hint_for_input
            types, left = self._pending.types(), "the kernel is running"
            error = KernelBusy(message, hint=hint, left=left, pending=types, seconds=self._seconds)
            self._end().set_exception(error)
        elif now >= self._progress + _QUIET:
            for lane, order in self._pending.straggling().items():
                if lane not in self._fences:
                    self._fence(lane, order)

    def _end(self) -> Future[None]:
        future, self._future = self._future, None
        assert future is not None
        return future

    def _fence(self, lane: Lane, order: int) -> None:
        """Send a harmless request behind the stragglers: when it is answered, the kernel is through with them."""

        def done(_: dict[str, Any]) -> None:
            self._fences.discard(lane)
            self._dropped(self._pending.drop_fenced(lane, order))

        def failed(_: str) -> None:
            self._fences.discard(lane)

        channel, subshell_id = lane
        self._fences.add(lane)
        self._send(InternalRequest(channel, *PROBE, self._deadline, done, failed, subshell_id))
