"""The event loop of a gate's thread: sockets to read, calls of other threads, deadlines."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

import zmq

from ..errors import GateError

Handler = tuple[str, Callable[[list[bytes]], None]]
Socket = zmq.Socket[Any]

# Messages read from one socket before the others are read.
_BATCH = 50

# Seconds between two lines about messages that were dropped on one socket.
_SILENCE = 1.0


class Loop:
    """Reads sockets in the order given, runs calls, and calls its owner when something falls due.

    `submit` and `stop` are for every thread; all else is for the thread that runs the loop.
    """

    def __init__(self, log: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self._log = log
        self._wakeup = -1
        self._calls: deque[tuple[Callable[[], object], Future[Any]]] = deque()
        self._lock = threading.Lock()
        #: Why the loop runs no calls; None as long as it does.
        self.ended: GateError | None = GateError("The gate was not started.")
        self._readers: dict[Socket, Handler] = {}
        self._poller = zmq.Poller()
        self._running = True
        #: By the socket's name: until when no line is logged for dropped messages, and how many were dropped since.
        self._drops: dict[str, tuple[float, int]] = {}

    def begin(self) -> None:
        """Accept calls from here on, for `run`."""
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.ended = None

    def submit(self, call: Callable[[], object], future: Future[Any]) -> None:
        """Have ``call`` run on the loop's thread, soon and in order; ``future`` fails with what it raises.

        The future fails as well if the loop ends before.  Raises `GateError` if it does not run.
        """
        with self._lock:
            if self.ended is not None:
                raise GateError("The gate does not run.") from self.ended
            self._calls.append((call, future))
            os.eventfd_write(self._wakeup, 1)

    def stop(self) -> None:
        """Let `run` return."""

        def stop() -> None:
            self._running = False

        with contextlib.suppress(GateError):  # it has ended by itself
            self.submit(stop, Future())

    def end(self, error: GateError) -> None:
        """Fail the calls that were not run with ``error``, and free the file descriptor."""
        with self._lock:
            self.ended = error
            os.close(self._wakeup)
        for _, future in self._calls:
            _fail(future, error)

    def reads(self, socket: Socket) -> bool:
        """Return whether ``socket`` is read."""
        return socket in self._readers

    def read(self, readers: dict[Socket, Handler]) -> None:
        """Read these sockets, first to last: each with a name for the log and a function that handles the frames."""
        self._readers = readers
        self._poller = zmq.Poller()
        self._poller.register(self._wakeup, zmq.POLLIN)
        for socket in readers:
            self._poller.register(socket, zmq.POLLIN)

    def run(self, next_time: Callable[[], float | None], tick: Callable[[float], None]) -> None:
        """Run until `stop`.  Raises only what makes it impossible to continue.

        ``next_time`` returns when (monotonic seconds) something falls due; ``tick`` is called in each iteration.
        """
        while self._running:
            ready = dict(self._poller.poll(_milliseconds(next_time())))
            if self._wakeup in ready:
                os.eventfd_read(self._wakeup)
                while self._calls:
                    self._perform(*self._calls.popleft())
            for socket in tuple(self._readers):
                if socket in ready:
                    self.pump(socket, _BATCH)
            tick(time.monotonic())

    def pump(self, socket: Socket, limit: float = math.inf) -> None:
        """Read up to ``limit`` messages that are there; drop and log those that cannot be handled."""
        while limit > 0 and (reader := self._readers.get(socket)) is not None:  # a message may end the reading
            name, handle = reader
            limit -= 1
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                handle(frames)
            except ValueError as error:
                self._dropped(name, error)
            except Exception as error:
                self._log.warning("gate: dropped a message on %s: %s", name, type(error).__name__, exc_info=True)

    def _perform(self, call: Callable[[], object], future: Future[Any]) -> None:
        try:
            call()
        except zmq.ZMQError as error:
            _fail(future, GateError(f"ZMQ failed: {error.strerror}."))
        except Exception as error:
            _fail(future, error)

    def _dropped(self, name: str, error: ValueError) -> None:
        """Log a dropped message, at most once a second: a sender of nonsense must not fill the disk."""
        now = time.monotonic()
        silent_until, count = self._drops.get(name, (0.0, 0))
        if now < silent_until:
            self._drops[name] = silent_until, count + 1
            return
        more = f" (and {count} more since the last line)" if count else ""
        self._log.warning("gate: dropped a message on %s: %s%s", name, error, more)
        self._drops[name] = now + _SILENCE, 0


def _fail(future: Future[Any], error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):  # settled, or cancelled
        future.set_exception(error)


def _milliseconds(until: float | None) -> int | None:
    return None if until is None else max(0, math.ceil((until - time.monotonic()) * 1000))
