"""The requests that wait for the kernel, in the order in which they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .wake_rules import wakes
from .wire import Request

#: Beyond either, requests that do not wake are refused: a browser tab that polls must not fill the server's memory
#: while the kernel sleeps for a week.
MAX_MESSAGES = 10_000
MAX_BYTES = 64 * 1024 * 1024
#: Limit for requests that wake the kernel: they wait for a wake, and not for a week.
MAX_WAKE_BYTES = 256 * 1024 * 1024

# Bytes of a queued request beside its frames: those are parsed, and Python's objects are not small.
_OVERHEAD = 2048


class RequestQueue:
    """A queue of requests that knows its size."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self._bytes = 0
        self._full = False

    def __len__(self) -> int:
        return len(self._requests)

    def append(self, request: Request) -> bool:
        """Append ``request``; False if the queue is full."""
        if wakes(request):
            # After a refusal all later ones are refused, too: a small cell must not run where the large one before it
            # did not.
            self._full = full = self._full or self._bytes >= MAX_WAKE_BYTES
        else:
            full = len(self._requests) >= MAX_MESSAGES or self._bytes >= MAX_BYTES
        if not full:
            self._requests.append(request)
            self._bytes += _cost(request)
        return not full

    def pop_first(self) -> None:
        """Remove the oldest request."""
        self._bytes -= _cost(self._requests.popleft())
        self._full = False

    def first(self, wanted: Callable[[Request], bool] = lambda _: True) -> Request | None:
        """Return the oldest request that is ``wanted``; it stays in the queue."""
        return next(filter(wanted, self._requests), None)

    def discard(self, request: Request) -> bool:
        """Remove that one request; False if it is not in the queue any more."""
        return bool(self.remove(lambda each: each is request))

    def remove(self, wanted: Callable[[Request], bool] = lambda _: True) -> list[Request]:
        """Remove and return the requests that are ``wanted``, oldest first."""
        removed: list[Request] = []
        left: deque[Request] = deque()
        for request in self._requests:
            (removed if wanted(request) else left).append(request)
        self._requests = left
        self._bytes = sum(map(_cost, left))
        self._full = self._full and not removed
        return removed


def _cost(request: Request) -> int:
    return 2 * request.size + _OVERHEAD
