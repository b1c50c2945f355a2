"""Waiting until the kernel owes no answer, and finding out about answers that never come."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..errors import GateError, KernelBusy
from .internal_requests import PROBE, InternalRequest
from .pending import Entry, Lane, PendingRequests

# Seconds without news before a straggler is taken for one, and a fence goes out.
_QUIET = 0.1

# Seconds for which answers to questions on the control channel are waited for (`Entry.is_question`).
_PATIENCE = 1.0


class Drain:
    """One drain at a time over the ``pending`` requests.

    ``send`` sends a request to the kernel.  ``freed`` is called with the entries that a fence completed, or
    that are not waited for any longer.
    """

    def __init__(
        self, pending: PendingRequests, send: Callable[[InternalRequest], None], freed: Callable[[list[Entry]], None]
    ) -> None:
        self._pending, self._send, self._freed = pending, send, freed
        self._future: Future[None] | None = None
        self._seconds = self._deadline = 0.0
        self._patience = math.inf  # until when, monotonic seconds
        self._news = 0.0
        self._fences: set[Lane] = set()

    @property
    def active(self) -> bool:
        """Whether somebody waits."""
        return self._future is not None

    def begin(self, future: Future[None], seconds: float) -> None:
        """Settle ``future`` when no request is pending, or fail it with `KernelBusy` after ``seconds``."""
        self._future, self._seconds = future, seconds
        self._news = time.monotonic()
        self._deadline = self._news + seconds
        self._patience = self._news + min(_PATIENCE, seconds / 2)

    def news(self) -> None:
        """Something pending moved."""
        self._news = time.monotonic()

    def settled(self) -> bool:
        """Whether the drain just ended because nothing is under way any more."""
        if self._future is None or self._pending:
            return False
        future, self._future = self._future, None
        future.set_result(None)
        return True

    def give_up(self, reason: str) -> None:
        """End the drain because the kernel is gone."""
        self._fences.clear()
        if self._future is not None:
            future, self._future = self._future, None
            future.set_exception(GateError(f"The drain was given up: {reason}."))

    def next_time(self) -> float | None:
        """When `tick` has something to do next, monotonic seconds."""
        if self._future is None:
            return None
        times = [self._deadline, self._patience]
        if any(lane not in self._fences for lane in self._pending.straggling()):
            times.append(self._news + _QUIET)
        return min(times)

    def tick(self, now: float) -> None:
        """Fail at the deadline; send a fence to each lane in which only stragglers are left; lose patience."""
        if self._future is not None and now >= self._patience:
            self._patience = math.inf
            self._freed(self._pending.without_questions())
        if self._future is None:
            return
        if now >= self._deadline:
            future, self._future = self._future, None
            future.set_exception(
                KernelBusy(
                    f"The kernel is still working after {self._seconds:g} s.",
                    left="the kernel is running",
                    pending=self._pending.types(),
                    seconds=self._seconds,
                )
            )
        elif now >= self._news + _QUIET:
            for lane, order in self._pending.straggling().items():
                if lane not in self._fences:
                    self._fence(lane, order)

    def _fence(self, lane: Lane, order: int) -> None:
        """Ask something harmless behind the stragglers: when that is answered, they are through."""

        def done(_: dict[str, Any]) -> None:
            self._fences.discard(lane)
            self._freed(self._pending.fenced(lane, order))

        def failed(_: str) -> None:
            self._fences.discard(lane)

        channel, subshell_id = lane
        self._fences.add(lane)
        kind, content = PROBE
        self._send(InternalRequest(channel, kind, content, self._deadline, done, failed, subshell_id))
