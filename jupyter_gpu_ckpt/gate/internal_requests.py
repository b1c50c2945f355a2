"""The gate's own requests to the kernel: probes of a fresh connection, the agent's verbs, fences.

Their answers come among those of the clients, on the same sockets; the session id in their headers tells them apart.
Pure bookkeeping: who sends and what time it is, the caller knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jupyter_client.session import Session, new_id

from .wire import DELIMITER

# The reply is sent before the idle, but on another socket; who has seen the idle and waits longer waits for a reply
# that was never sent: a kernel has an idle for a message type that it does not know, and no reply.
_REPLY_GRACE = 2.0

#: A question that every kernel answers and that changes nothing in it: the comms of a target nobody has.
PROBE: tuple[str, dict[str, Any]] = ("comm_info_request", {"target_name": "gpu_ckpt_probe"})


@dataclass
class Errand:
    """One request of the gate under way; done when reply and idle came.

    ``deadline`` and ``resend_at`` are monotonic seconds.  ``resend_every`` sends it again under a new id until done: a
    subscription that is not yet live loses the idle of the first ones.
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


class Errands:
    """The gate's requests under way, by msg_id."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._name = new_id()
        self._tag = self._name.encode()
        self._by_id: dict[str, Errand] = {}

    def owns(self, frame: bytes) -> bool:
        """Whether ``frame``, a parent header, is that of a request of the gate, be it forgotten since."""
        return self._tag in frame

    def __iter__(self) -> Iterator[Errand]:
        return iter({id(errand): errand for errand in self._by_id.values()}.values())

    def frames(self, errand: Errand, now: float) -> list[bytes]:
        """The frames of ``errand`` under a new id; from here its answer is awaited."""
        header = self._session.msg_header(errand.msg_type)
        header["msg_id"], header["session"] = f"{self._name}_{new_id()}", self._name
        if errand.subshell_id is not None:
            header["subshell_id"] = errand.subshell_id
        errand.ids.append(header["msg_id"])
        self._by_id[header["msg_id"]] = errand
        errand.resend_at = None if errand.resend_every is None else now + errand.resend_every
        frames = self._session.serialize(self._session.msg(errand.msg_type, errand.content, header=header))
        assert frames[0] == DELIMITER
        return frames

    def replied(self, message: dict[str, Any]) -> None:
        """The kernel's reply to a request of the gate came."""
        errand = self._by_id.get(message["parent_header"].get("msg_id", ""))
        if errand is not None and errand.reply is None:
            errand.reply = message
            self._settle(errand)

    def idled(self, msg_id: str, now: float) -> None:
        """The kernel's idle for a request of the gate came."""
        errand = self._by_id.get(msg_id)
        if errand is not None and not errand.idle:
            errand.idle = True
            errand.deadline = min(errand.deadline, now + _REPLY_GRACE)
            self._settle(errand)

    def due(self, now: float) -> list[Errand]:
        """Drop what is over its deadline; return what is to be sent again."""
        if not self._by_id:  # nearly always: this is asked with every message
            return []
        for errand in list(self):
            # The failure of one may have dropped others.
            if now >= errand.deadline and errand.ids[0] in self._by_id:
                self.drop(errand)
                errand.failed("it has no handler for it" if errand.idle else "no answer before the deadline")
        return [errand for errand in self if errand.resend_at is not None and now >= errand.resend_at]

    def next_time(self) -> float | None:
        """When `due` has something to do next, monotonic seconds."""
        if not self._by_id:
            return None
        times = [errand.deadline for errand in self]
        times += [errand.resend_at for errand in self if errand.resend_at is not None]
        return min(times, default=None)

    def drop(self, errand: Errand) -> None:
        """Await ``errand`` no more; answers that still come stay the gate's own and are swallowed."""
        for msg_id in errand.ids:
            self._by_id.pop(msg_id, None)

    def _settle(self, errand: Errand) -> None:
        if errand.reply is not None and errand.idle:
            self.drop(errand)
            errand.done(errand.reply)
