"""The gate's own requests to the kernel: probes of a fresh connection, the agent's verbs, fences.

Their answers come among those of the clients, on the same sockets; the session id in their headers tells them apart.
Pure bookkeeping: the caller sends, and passes the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.session import Session, new_id

from .wire import DELIMITER

# Seconds from the idle to the reply, which is sent before, but on another socket.  Later none comes: a kernel sends an
# idle for a message type that it does not know, and no reply.
_REPLY_GRACE = 2.0

#: A request that every kernel answers and that changes nothing in it: the comms of a target that does not exist.
PROBE: tuple[str, dict[str, Any]] = ("comm_info_request", {"target_name": "gpu_ckpt_probe"})


@dataclass
class InternalRequest:
    """A request of the gate; ``done`` is called with the reply when that and the idle came, else ``failed``.

    ``deadline`` and ``resend_at`` are monotonic seconds.  ``resend_every``: seconds after which it is sent again under
    a new id, until done: a subscription that is not yet live loses the idle of the first ones.
    """

    channel: str
    msg_type: str
    content: dict[str, Any]
    deadline: float
    done: Callable[[dict[str, Any]], None]
    failed: Callable[[str], None]
    subshell_id: str | None = None
    resend_every: float | None = None
    resend_at: float | None = None
    reply: dict[str, Any] | None = None
    idle: bool = False
    ids: list[str] = field(default_factory=list)


class InternalRequests:
    """The gate's pending requests, by msg_id."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._name = new_id()
        self._tag = self._name.encode()
        self._by_id: dict[str, InternalRequest] = {}

    def owns(self, frame: bytes) -> bool:
        """Return whether ``frame``, a parent header, is that of a request of the gate, pending or dropped."""
        return self._tag in frame

    def __iter__(self) -> Iterator[InternalRequest]:
        return iter({id(request): request for request in self._by_id.values()}.values())

    def frames(self, request: InternalRequest, now: float) -> list[bytes]:
        """Return the frames of ``request`` under a new id; it is pending from here on."""
        header = self._session.msg_header(request.msg_type)
        header["msg_id"], header["session"] = f"{self._name}_{new_id()}", self._name
        if request.subshell_id is not None:
            header["subshell_id"] = request.subshell_id
        request.ids.append(header["msg_id"])
        self._by_id[header["msg_id"]] = request
        request.resend_at = None if request.resend_every is None else now + request.resend_every
        message = self._session.msg(request.msg_type, request.content, header=header)
        try:
            frames = self._session.serialize(message)
        except UnicodeEncodeError:
            frames = self._session.serialize({**message, "content": _encodable(request.content)})
        assert frames[0] == DELIMITER
        return frames

    def replied(self, message: dict[str, Any]) -> None:
        """Note the kernel's reply to a request of the gate."""
        request = self._by_id.get(message["parent_header"].get("msg_id", ""))
        if request is not None and request.reply is None:
            request.reply = message
            self._settle(request)

    def idled(self, msg_id: str, now: float) -> None:
        """Note the kernel's idle for a request of the gate."""
        request = self._by_id.get(msg_id)
        if request is not None and not request.idle:
            request.idle = True
            request.deadline = min(request.deadline, now + _REPLY_GRACE)
            self._settle(request)

    def expire(self, now: float) -> list[InternalRequest]:
        """Fail the requests whose deadline has passed; return those to be sent again."""
        if not self._by_id:  # nearly always, and this is called with every message
            return []
        for request in list(self):
            # The failure of one may have dropped others.
            if now >= request.deadline and request.ids[0] in self._by_id:
                self.drop(request)
                request.failed("it has no handler for it" if request.idle else "no answer before the deadline")
        return [request for request in self if request.resend_at is not None and now >= request.resend_at]

    def next_time(self) -> float | None:
        """Return the time at which `expire` has something to do next, in monotonic seconds; None: never."""
        if not self._by_id:
            return None
        times = [request.deadline for request in self]
        times += [request.resend_at for request in self if request.resend_at is not None]
        return min(times, default=None)

    def drop(self, request: InternalRequest) -> None:
        """Wait for ``request`` no more; answers that still come are the gate's own, and are not forwarded."""
        for msg_id in request.ids:
            self._by_id.pop(msg_id, None)

    def _settle(self, request: InternalRequest) -> None:
        if request.reply is not None and request.idle:
            self.drop(request)
            request.done(request.reply)


def _encodable(value: Any) -> Any:
    """Return a copy of ``value``, JSON data, with escapes for lone surrogates, which no message can have."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(name): _encodable(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_encodable(each) for each in value]
    return value
