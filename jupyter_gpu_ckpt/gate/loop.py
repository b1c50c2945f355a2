"""The loop of a gate's thread: sockets to read, calls from other threads, and things that fall due."""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

Reader = tuple[str, Callable[[list[bytes]], None]]
Socket = zmq.Socket[Any]

# Messages read from one socket before the others have their turn.
_BATCH = 50

# Seconds between two lines about messages that were dropped on one socket.
_SILENCE = 1.0


class Loop:
    """Reads sockets in the order given, runs calls, and asks its owner when it wants to be called next.

    `call` is for every thread; all else is for the one that runs the loop.
    """

    def __init__(self, log: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self._log = log
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: deque[Callable[[], None]] = deque()
        self._readers: dict[Socket, Reader] = {}
        self._poller = zmq.Poller()
        self._running = True
        #: By the socket's name, until when no line is written for dropped messages, and how many were since.
        self._drops: dict[str, tuple[float, int]] = {}

    def call(self, what: Callable[[], None]) -> None:
        """Have ``what`` run on the loop's thread, soon and in order.  It must not raise."""
        self._calls.append(what)
        os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        """Let `run` return."""
        self._running = False

    def dispose(self) -> None:
        """Free the file descriptor; `call` is not to be called any more."""
        os.close(self._bell)

    def reads(self, socket: Socket) -> bool:
        """Whether ``socket`` is read."""
        return socket in self._readers

    def read(self, readers: dict[Socket, Reader]) -> None:
        """Read these sockets, first to last: each with a name for the log and what to do with a message's frames."""
        self._readers = readers
        self._poller = zmq.Poller()
        self._poller.register(self._bell, zmq.POLLIN)
        for socket in readers:
            self._poller.register(socket, zmq.POLLIN)

    def run(self, next_time: Callable[[], float | None], tick: Callable[[float], None]) -> None:
        """Go round until `stop`.  Raises only what makes going on impossible.

        ``next_time`` says when (monotonic seconds) something falls due, ``tick`` is called with the time once a round.
        """
        while self._running:
            ready = dict(self._poller.poll(_milliseconds(next_time())))
            if self._bell in ready:
                os.eventfd_read(self._bell)
                while self._calls:
                    self._calls.popleft()()
            for socket in tuple(self._readers):
                if socket in ready:
                    self.pump(socket, _BATCH)
            tick(time.monotonic())

    def pump(self, socket: Socket, limit: float = math.inf) -> None:
        """Read up to ``limit`` messages that are there; one that cannot be handled is dropped with one log line."""
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

    def _dropped(self, name: str, error: ValueError) -> None:
        """One log line, or one a while: whoever sends nonsense may send much of it, and must not fill the disk."""
        now = time.monotonic()
        silent_until, count = self._drops.get(name, (0.0, 0))
        if now < silent_until:
            self._drops[name] = silent_until, count + 1
            return
        more = f" (and {count} more since the last line)" if count else ""
        self._log.warning("gate: dropped a message on %s: %s%s", name, error, more)
        self._drops[name] = now + _SILENCE, 0


def _milliseconds(until: float | None) -> int | None:
    return None if until is None else max(0, math.ceil((until - time.monotonic()) * 1000))
