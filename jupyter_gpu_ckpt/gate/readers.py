"""Readers of a kernel's outputs: how far behind each is, and the disconnection of those that do not read.

Everybody on this host may subscribe to a kernel's outputs, with its key or without, and ZMQ keeps for each subscriber
what it has not read: the kernel's outputs could fill the server's memory.  ZMQ limits the number of those messages and
not their bytes, and does not tell how many wait for a subscriber.  Linux does: the bytes sent to everybody since a
TCP connection was idle, less those that its peer has acknowledged, are how far it is behind.

A reader that is behind and does not read is disconnected; a client that was merely slow connects again.  While a reader
is far behind, outputs wait here, up to `MOST_QUEUED`; more are dropped, as the kernel's socket drops more than 1,000.
(They cannot be left in the kernel: libzmq stops reading for good where ``ZMQ_RCVHWM`` of a connected socket was 0 and
is not any more, as its reader has not reported how much it has read.)

Readers on unix sockets are not measured: those lie in directories of the user's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import struct
import termios
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from ..units import size
from . import wire

#: Bytes that a reader may be behind before its progress is checked, and beyond which the others wait for it.
BEHIND = 64 << 20
FAR_BEHIND = 192 << 20
#: Bytes of outputs that wait then.
MOST_QUEUED = 64 << 20

#: Seconds in which a reader that is behind must read so many bytes.  (Without a gate a kernel drops for it what is more
#: than 1,000 messages.)
PATIENCE = 1.0
PROGRESS = 4 << 20

# Bytes sent between two measurements, and seconds between them while a reader is behind.
_MEASURE_BYTES = 1 << 20
_MEASURE_EVERY = 0.02

# `tcpi_bytes_acked`, linux/tcp.h, since Linux 4.1.
_BYTES_ACKED = struct.Struct("=120xQ")

# Bytes with which ZMTP 3 frames a frame, at most.
_FRAMING = 9


@dataclass
class _Reader:
    """A connection.  ``sent`` and ``acked``: values of the byte counters when it had last read everything."""

    connection: socket.socket
    sent: int
    acked: int
    behind: int = 0
    #: Since when it is behind, monotonic seconds, and the bytes it had acknowledged then.
    since: float | None = None
    since_acked: int = 0


class Readers:
    """The connections of one publishing socket; for the thread that sends on it."""

    def __init__(self, publisher: zmq.Socket[Any], log: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self._publisher, self._log = publisher, log
        #: Reports connections; each of its messages is for `on_connection`.
        self.monitor: zmq.Socket[Any] = publisher.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self._port = publisher.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self._readers: dict[int, _Reader] = {}
        self._sent = self._measured = 0
        #: Whether a reader is so far behind that nothing more is to be sent for now; and what waits.
        self.full = False
        self._queued: deque[list[bytes]] = deque()
        self._queued_bytes = self._dropped = 0
        #: Whether a reader is to be measured again soon, whatever is sent.
        self.late = False

    def close(self) -> None:
        """Forget all connections."""
        self._publisher.disable_monitor()
        self.monitor.close(linger=0)
        for reader in self._readers.values():
            reader.connection.close()
        self._readers.clear()

    def on_connection(self, frames: list[bytes]) -> None:
        """Called with each message of `monitor`."""
        event = parse_monitor_message(frames)
        number = int(event["value"])
        if (closed := self._readers.pop(number, None)) is not None:  # also where its number was used again
            closed.connection.close()
        if event["event"] != zmq.EVENT_ACCEPTED:
            return
        with contextlib.suppress(OSError):  # closed already
            # A duplicate: ZMQ closes its own descriptor at any time, and the number may be used again.
            connection = socket.socket(fileno=os.dup(number))
            tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if not tcp or str(connection.getsockname()[1]) != self._port:
                connection.close()
                return
            self._readers[number] = _Reader(connection, self._sent, _acked(connection))

    def send(self, frames: list[bytes], *, needed: bool = False) -> None:
        """Send a message to all, now or once nobody is far behind.  It may be dropped then, unless it is ``needed``."""
        if not self.full and not self._queued:
            self._send(frames)
        elif needed or self._queued_bytes < MOST_QUEUED:
            self._queued.append(frames)
            self._queued_bytes += _bytes(frames)
        else:
            self._dropped += 1

    def send_queued(self) -> None:
        """Send what waits, as far as nobody is far behind."""
        while self._queued and not self.full:
            frames = self._queued.popleft()
            self._queued_bytes -= _bytes(frames)
            self._send(frames)
        if self._dropped and not self._queued:
            self._log.warning("gate: dropped %d outputs: a client is far behind with its reading", self._dropped)
            self._dropped = 0

    def _send(self, frames: list[bytes]) -> None:
        wire.send(self._publisher, frames)
        self._sent += _bytes(frames)
        if self._sent - self._measured >= _MEASURE_BYTES:
            self.measure(time.monotonic())

    def next_time(self) -> float | None:
        """Return the time at which to `measure` again, in monotonic seconds."""
        return time.monotonic() + _MEASURE_EVERY if self.late else None

    def measure(self, now: float) -> None:
        """Measure how far each reader is behind, and disconnect those that do not read."""
        self._measured = self._sent
        limit = FAR_BEHIND // 2 if self.full else FAR_BEHIND
        self.full = self.late = False
        for reader in self._readers.values():
            try:
                self._measure(reader, now)
            except OSError:  # disconnected; the monitor will report it
                reader.behind, reader.since = 0, None
            self.full = self.full or reader.behind > limit
            self.late = self.late or reader.since is not None

    def _measure(self, reader: _Reader, now: float) -> None:
        acked = _acked(reader.connection)
        reader.behind = (self._sent - reader.sent) - (acked - reader.acked)
        if reader.behind <= 0 or _unread(reader.connection) == 0:
            # It has everything; it may have subscribed to a part of the outputs only.
            reader.sent, reader.acked, reader.behind = self._sent, acked, 0
        if reader.behind <= (BEHIND if reader.since is None else BEHIND // 2):
            reader.since = None
        elif reader.since is None:
            reader.since, reader.since_acked = now, acked
        elif now - reader.since >= PATIENCE:
            if acked - reader.since_acked >= PROGRESS:
                reader.since, reader.since_acked = now, acked
                return
            behind, reader.behind, reader.since = reader.behind, 0, None
            self._log.warning("gate: disconnected a client that does not read outputs and is %s behind", size(behind))
            reader.connection.shutdown(socket.SHUT_RDWR)


def _bytes(frames: list[bytes]) -> int:
    """Bytes of a message on its way."""
    return sum(map(len, frames)) + _FRAMING * len(frames)


def _acked(connection: socket.socket) -> int:
    """Bytes that the peer of a TCP connection has acknowledged."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.size)
    return int(_BYTES_ACKED.unpack(info)[0])


def _unread(connection: socket.socket) -> int:
    """Bytes that a socket has not yet sent, or its peer not acknowledged (SIOCOUTQ, which is TIOCOUTQ)."""
    return int(struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, b"\0" * 4))[0])
