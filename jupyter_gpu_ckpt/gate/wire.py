"""ZMQ sockets and message frames of Jupyter's protocol: addresses, socket options, signatures.

The layout of a message is "Messaging in Jupyter", section "The Wire Protocol":
``[routing id, ..., DELIMITER, signature, header, parent_header, metadata, content, buffer, ...]``.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import socket as stdlib_socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import zmq
from jupyter_client.session import Session

from ..errors import GateError

DELIMITER = b"<IDS|MSG>"
CHANNELS = ("control", "shell", "stdin", "iopub", "hb")

# Offsets behind the delimiter.
SIGNATURE, HEADER, PARENT, METADATA, CONTENT = range(5)

_FRONT = {"control": zmq.ROUTER, "shell": zmq.ROUTER, "stdin": zmq.ROUTER, "iopub": zmq.XPUB, "hb": zmq.ROUTER}
_BACK = {"control": zmq.DEALER, "shell": zmq.DEALER, "stdin": zmq.DEALER, "iopub": zmq.SUB, "hb": zmq.DEALER}

# A client that does not read costs memory; with ZMQ's default of 1,000 it would lose outputs instead, and one loop that
# prints makes more.  A client 100,000 messages behind loses messages, as without a gate.  `readers` limits their bytes.
_IOPUB_HIGH_WATER = 100_000

# Requests that a client has sent and the gate has not read: beyond that ZMQ blocks the sender, as the kernel would.
_REQUESTS_HIGH_WATER = 50

# Echoed heartbeats that a client has not read: beyond that they are dropped.
_BEATS_HIGH_WATER = 64

#: Bytes of a heartbeat that is echoed; clients send one word and their identity.
LONGEST_BEAT = 1024

# Seconds that a gate waits for the ports of one just stopped: libzmq closes a listener some milliseconds after `close`.
_BIND_TIMEOUT = 2.0

_MORE = int(zmq.SNDMORE)

_IN_USE_HINT = "Another process took the port between its choice and its use; start the kernel again."

_contexts: dict[int, zmq.Context[Any]] = {}
_contexts_lock = threading.Lock()


def context() -> zmq.Context[Any]:
    """Return the context of all gates of this process: not the global one, which any library may terminate.

    Made once for each process id: a forked child must not use its parent's.
    """
    with _contexts_lock:
        pid = os.getpid()
        if pid not in _contexts:
            fresh: zmq.Context[Any] = zmq.Context()
            # Ten sockets a gate: libzmq's default of 1,023 sockets would end at a hundred kernels.
            fresh.set(zmq.MAX_SOCKETS, 16_384)
            _contexts[pid] = fresh
        return _contexts[pid]


def address(info: Mapping[str, Any], channel: str) -> str:
    """Return the ZMQ endpoint of ``channel`` in the connection info ``info``."""
    separator = "-" if info.get("transport") == "ipc" else ":"
    return f"{info.get('transport', 'tcp')}://{info['ip']}{separator}{info[channel + '_port']}"


def session(info: Mapping[str, Any], *, history: bool) -> Session:
    """Return a `Session` with the key of ``info``; with ``history`` it detects repeated signatures, as kernels do."""
    made = Session(key=_bytes(info.get("key", b"")), signature_scheme=info.get("signature_scheme") or "hmac-sha256")
    if not history:
        made.digest_history_size = 0
    return made


def bind(front: Mapping[str, Any]) -> dict[str, zmq.Socket[Any]]:
    """Bind the five sockets that clients connect to.  They are CURVE servers if ``front`` has curve keys.

    Raises `GateError` with the address if one cannot be bound; then none is left bound.
    """

    def settle(channel: str, made: zmq.Socket[Any]) -> None:
        if channel == "iopub":
            made.setsockopt(zmq.SNDHWM, _IOPUB_HIGH_WATER)
            # All subscriptions, not only the first of a topic: each is answered by a welcome.
            made.setsockopt(zmq.XPUB_VERBOSE, 1)
        else:
            # A client that reconnects comes with the same identity before the old connection is known to be gone.
            made.setsockopt(zmq.ROUTER_HANDOVER, 1)
            made.setsockopt(zmq.RCVHWM, _REQUESTS_HIGH_WATER)
        if channel == "hb":
            made.setsockopt(zmq.SNDHWM, _BEATS_HIGH_WATER)
        if front.get("curve_secretkey"):
            made.curve_publickey = _bytes(front["curve_publickey"])
            made.curve_secretkey = _bytes(front["curve_secretkey"])
            made.curve_server = True
        _bind(made, address(front, channel))

    return _sockets(_FRONT, settle)


def connect(back: Mapping[str, Any], identity: bytes) -> dict[str, zmq.Socket[Any]]:
    """Connect five sockets to the kernel at ``back``.

    ``identity`` names shell, control and stdin alike: the kernel sends an ``input_request`` to the identity from which
    the ``execute_request`` came.  A kernel that does not listen yet is no error: ZMQ connects when it does.
    """

    def settle(channel: str, made: zmq.Socket[Any]) -> None:
        if channel == "iopub":
            made.setsockopt(zmq.SUBSCRIBE, b"")
        if channel in ("shell", "control", "stdin"):
            made.setsockopt(zmq.IDENTITY, identity)
        if back.get("curve_secretkey"):
            made.curve_serverkey = _bytes(back["curve_publickey"])
            made.curve_publickey = _bytes(back["curve_publickey"])
            made.curve_secretkey = _bytes(back["curve_secretkey"])
        endpoint = address(back, channel)
        try:
            made.connect(endpoint)
        except zmq.ZMQError as error:
            raise GateError(f"The gate cannot connect to {endpoint}: {error.strerror}.") from error

    return _sockets(_BACK, settle)


def nudge(back: Mapping[str, Any]) -> zmq.Socket[Any]:
    """Return one more connection to the kernel's shell socket, for the caller to close some moments later.

    ipykernel 7.0 to 7.3 can miss a request that comes while it sends a reply, and sees it when a client connects
    (ipykernel's issue 1554).  The gate's connection is the only one, so nobody else would.
    """
    made: zmq.Socket[Any] = context().socket(zmq.DEALER)
    made.linger = 0
    if back.get("curve_secretkey"):
        made.curve_serverkey = _bytes(back["curve_publickey"])
        made.curve_publickey = _bytes(back["curve_publickey"])
        made.curve_secretkey = _bytes(back["curve_secretkey"])
    made.connect(address(back, "shell"))
    return made


def _sockets(kinds: Mapping[str, int], settle: Callable[[str, zmq.Socket[Any]], None]) -> dict[str, zmq.Socket[Any]]:
    """Make a socket for each channel, without high-water marks, and bind or connect it by ``settle``; all or none."""
    sockets: dict[str, zmq.Socket[Any]] = {}
    try:
        for channel in CHANNELS:
            made = sockets[channel] = context().socket(kinds[channel])
            made.linger = 0
            made.setsockopt(zmq.RCVHWM, 0)
            made.setsockopt(zmq.SNDHWM, 0)
            settle(channel, made)
    except BaseException:
        close(sockets)
        raise
    return sockets


def close(sockets: Mapping[str, zmq.Socket[Any]]) -> None:
    """Close ``sockets`` and drop their unsent messages."""
    for each in sockets.values():
        each.close(linger=0)


@dataclass(eq=False)
class Request:
    """A verified message of a client: its untouched frames, and their parsed header and content.

    ``saved``: a save point was made before it, so it need not wait for one.
    """

    channel: str
    frames: list[bytes]
    idents: list[bytes]
    header: dict[str, Any]
    content: dict[str, Any]
    saved: bool = False

    @property
    def msg_id(self) -> str:
        """The id that replies and outputs have in their parent header."""
        return str(self.header["msg_id"])

    @property
    def msg_type(self) -> str:
        """``execute_request`` and the like."""
        return str(self.header["msg_type"])

    @property
    def subshell_id(self) -> str | None:
        """The subshell that is to handle it; None is the main one."""
        found = self.header.get("subshell_id")
        return found if isinstance(found, str) else None

    @property
    def stops(self) -> bool:
        """Return whether a failure of the request aborts the executions queued behind it, as in ipykernel."""
        stops = self.content.get("stop_on_error", True) and not self.content.get("silent", False)
        return self.msg_type == "execute_request" and bool(stops)

    @property
    def size(self) -> int:
        """Bytes of all frames."""
        return sum(map(len, self.frames))


def send(socket: zmq.Socket[Any], frames: list[bytes]) -> None:
    """Send one message.

    `Socket.send_multipart` adds up its flags as enums for every frame, which is a quarter of its time, and here that is
    latency of every message of every client.
    """
    for frame in frames[:-1]:
        socket.send(frame, _MORE)
    socket.send(frames[-1])


def split(frames: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Split frames into routing ids and message.  Raises `ValueError` if these are not the frames of a message."""
    at = frames.index(DELIMITER)
    if len(frames) - at < 6:
        raise ValueError("too few frames")
    return frames[:at], frames[at + 1 :]


def require_signed(verifier: Session, frames: list[bytes]) -> None:
    """Raise `ValueError` for frames that are no message, or were not signed with the key."""
    _, rest = split(frames)
    parts, signature = rest[HEADER : CONTENT + 1], rest[SIGNATURE]
    if verifier.auth is not None and not hmac.compare_digest(verifier.sign(parts), signature):
        raise ValueError("forged signature")


def read_request(verifier: Session, channel: str, frames: list[bytes]) -> Request:
    """Verify and parse a client's message.

    Raises `ValueError` for what a kernel would silently drop: a forged or repeated signature, a malformed message.  The
    text of the error has nothing of the message in it.
    """
    idents, rest = split(frames)
    if verifier.auth is not None and rest[SIGNATURE] in verifier.digest_history:
        raise ValueError("repeated signature")
    try:
        message = verifier.deserialize(rest)
        header, content = message["header"], message["content"]
        well_formed = isinstance(header["msg_id"], str) and isinstance(header["msg_type"], str)
    except Exception as error:
        raise ValueError(f"forged signature or malformed message, {type(error).__name__}") from None
    if not well_formed or not isinstance(content, dict):
        raise ValueError("malformed header or content")
    return Request(channel, frames, idents, header, content)


def _bind(made: zmq.Socket[Any], endpoint: str) -> None:
    deadline = time.monotonic() + _BIND_TIMEOUT
    while True:
        try:
            if _is_listening(endpoint):  # perhaps of a gate that has just closed: libzmq does so in the background
                raise zmq.ZMQError(errno.EADDRINUSE)
            made.bind(endpoint)
            return
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise GateError(f"The gate cannot bind {endpoint}: {error.strerror}.", hint=_IN_USE_HINT) from error
        time.sleep(0.01)


def _is_listening(endpoint: str) -> bool:
    """Return whether a process listens on a unix socket.  libzmq does not check: it unlinks the path and binds anew."""
    if not endpoint.startswith("ipc://"):
        return False
    with stdlib_socket.socket(stdlib_socket.AF_UNIX) as probe:
        probe.setblocking(False)
        with contextlib.suppress(OSError):  # a path that is too long
            # EAGAIN: its backlog is full, so it does listen.
            return probe.connect_ex(endpoint.removeprefix("ipc://")) in (0, errno.EAGAIN)
    return False


def _bytes(key: str | bytes) -> bytes:
    return key.encode("ascii") if isinstance(key, str) else key
