"""The messages that wait for the kernel, in the order in which they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .wire import Request

#: Beyond either, requests that do not wake are refused rather than kept: a browser tab that asks for ever must not fill
#: the server's memory while the kernel sleeps for a week.  What a user asked for is always kept.
MAX_MESSAGES = 10_000
MAX_BYTES = 64 * 1024 * 1024


class Hold:
    """A queue of requests that knows its size."""

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def full(self) -> bool:
        """Whether a bound is reached."""
        return len(self._requests) >= MAX_MESSAGES or self._bytes >= MAX_BYTES

    def append(self, request: Request) -> None:
        """Keep ``request``; the caller has looked at `full`."""
        self._requests.append(request)
        self._bytes += request.size

    def first(self, wanted: Callable[[Request], bool]) -> Request | None:
        """The oldest request that is ``wanted``; it stays."""
        return next(filter(wanted, self._requests), None)

    def take(self, wanted: Callable[[Request], bool] = lambda _: True) -> list[Request]:
        """Remove and return the requests that are ``wanted``, oldest first."""
        taken: list[Request] = []
        left: deque[Request] = deque()
        for request in self._requests:
            (taken if wanted(request) else left).append(request)
        self._requests = left
        self._bytes = sum(request.size for request in left)
        return taken
