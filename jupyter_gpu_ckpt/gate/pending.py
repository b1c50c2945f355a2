"""Pending requests: those that were forwarded and have not yet both their reply and their idle.

A kernel may only be dumped when there are none.  Pure bookkeeping: no sockets, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .wake_rules import wakes
from .wire import Request

#: Requests that the protocol answers.  Comm messages have no reply, and for a type that is not here none is known:
#: those are complete with their idle.
REPLIED_TYPES = frozenset(
    {"execute_request", "inspect_request", "complete_request", "history_request", "is_complete_request"}
    | {"comm_info_request", "kernel_info_request", "connect_request", "shutdown_request", "interrupt_request"}
    | {"debug_request", "usage_request"}
    | {"create_subshell_request", "delete_subshell_request", "list_subshell_request"}
)

#: Queries on the control channel that are kept here: a kernel that answers none gets more and more of them, from every
#: page that is opened and every monitor.
_MAX_QUERIES = 100

#: Channel and subshell, in which a kernel handles requests one after the other.
Lane = tuple[str, str | None]


@dataclass
class PendingRequest:
    """A msg_id that the kernel has not completed.

    ``replies`` and ``idles`` that are still to come are one each as a rule; they add up for a client that uses a msg_id
    twice at a time.  ``agent_requests``: what its cell requested of the server, to be done after it.  ``awaits_input``:
    its cell waits for an answer of the user (``input()``, a debugger's prompt).
    """

    request: Request
    order: int
    replies: int = 0
    idles: int = 0
    begun: bool = False
    awaits_input: bool = False
    agent_requests: list[dict[str, Any]] = field(default_factory=list)

    @property
    def lane(self) -> Lane:
        """The lane in which the kernel handles it."""
        return self.request.channel, self.request.subshell_id

    @property
    def is_cell(self) -> bool:
        """Return whether the request runs a user's code with visible output."""
        request = self.request
        return request.msg_type == "execute_request" and not request.content.get("silent", False)

    @property
    def runs(self) -> bool:
        """Return whether the request's code runs, or waits to: its reply comes at its end, an idle a moment later."""
        return self.replies > 0 and not self.straggles

    @property
    def is_query(self) -> bool:
        """Return whether no answer to the request is needed: on the control channel no code of a user runs.

        Some kernels answer nothing there (IRkernel 1.3), and jupyter_server sends each a ``kernel_info_request`` there.
        """
        request = self.request
        return request.channel == "control" and request.msg_type != "shutdown_request" and not wakes(request)

    @property
    def straggles(self) -> bool:
        """Return whether the kernel has possibly sent all that it will send for the request.

        A handler that raises sends an idle and no reply.  ipykernel 7 handles a comm message that arrives while a cell
        awaits concurrently, without busy and without idle.  Only a request behind it in the same lane, the fence, tells
        that from an answer that is merely late.
        """
        if self.request.msg_type.startswith("comm_"):
            return not self.begun
        return self.idles <= 0 < self.replies


class PendingRequests:
    """The pending requests, by msg_id."""

    def __init__(self) -> None:
        self._by_id: dict[str, PendingRequest] = {}
        self._queries: deque[str] = deque()
        self._order = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def types(self) -> list[str]:
        """Types of the pending requests, oldest first."""
        return [entry.request.msg_type for entry in self._by_id.values()]

    def working(self) -> bool:
        """Return whether the kernel works on something that a user requested, as far as messages tell."""
        return any(wakes(entry.request) and not entry.straggles for entry in self._by_id.values())

    def cells(self) -> int:
        """Number of cells that run in the kernel or wait there.

        Silent executions do not count: front ends' tools send them as queries.
        """
        return sum(entry.is_cell and entry.runs for entry in self._by_id.values())

    def ending(self) -> bool:
        """Return whether a cell, silent or not, has its reply and not its idle, before which it may request a verb."""
        entries = (entry for entry in self._by_id.values() if entry.request.msg_type == "execute_request")
        return any(entry.replies <= 0 for entry in entries)

    def running_cell(self) -> Request | None:
        """Return the request of the cell that runs, if there is one that is not silent."""
        return next((entry.request for entry in self._by_id.values() if entry.is_cell and entry.runs), None)

    def agent_requests(self) -> list[dict[str, Any]]:
        """Return what cells that have not ended have requested of the server, to be done after them."""
        return [content for entry in self._by_id.values() for content in entry.agent_requests]

    def awaits_input(self) -> bool:
        """Return whether a cell waits for an answer of its user."""
        return any(entry.awaits_input for entry in self._by_id.values())

    def input_requested(self, msg_id: str) -> None:
        """Note that the cell of ``msg_id`` has requested input of its user."""
        if entry := self._by_id.get(msg_id):
            entry.awaits_input = True

    def answered(self) -> None:
        """Note an answer, or an interrupt: a kernel requests one input at a time."""
        for entry in self._by_id.values():
            entry.awaits_input = False

    def other_types(self) -> tuple[str, ...]:
        """Types of the pending requests that are no cells, oldest first."""
        return tuple(entry.request.msg_type for entry in self._by_id.values() if not entry.is_cell)

    def waits_unread(self) -> bool:
        """Return whether there are requests on the shell channel and none of them has begun."""
        entries = [entry for entry in self._by_id.values() if entry.request.channel == "shell"]
        return bool(entries) and not any(entry.begun for entry in entries)

    def find(self, msg_id: str) -> PendingRequest | None:
        """Return the request ``msg_id`` if it is pending."""
        return self._by_id.get(msg_id)

    def forwarded(self, request: Request) -> None:
        """Note that ``request`` was sent to the kernel."""
        self._order += 1
        entry = self._by_id.setdefault(request.msg_id, PendingRequest(request, self._order))
        entry.order = self._order
        entry.replies += request.msg_type in REPLIED_TYPES
        entry.idles += 1
        if entry.is_query:
            self._queries.append(request.msg_id)
            if len(self._queries) > _MAX_QUERIES:
                self._by_id.pop(self._queries.popleft(), None)

    def replied(self, msg_id: str) -> PendingRequest | None:
        """Note a reply to ``msg_id``; return the request if that completes it."""
        if entry := self._by_id.get(msg_id):
            entry.replies -= 1
        return self._completed(entry)

    def begun(self, msg_id: str) -> None:
        """Note the busy of ``msg_id``."""
        if entry := self._by_id.get(msg_id):
            entry.begun = True

    def idled(self, msg_id: str) -> PendingRequest | None:
        """Note the idle of ``msg_id``; return the request if that completes it."""
        if entry := self._by_id.get(msg_id):
            entry.idles -= 1
        return self._completed(entry)

    def straggling(self) -> dict[Lane, int]:
        """Lanes in which only stragglers are left, with the order of the last one."""
        orders: dict[Lane, int] = {}
        moving: set[Lane] = set()
        for entry in self._by_id.values():
            orders[entry.lane] = max(entry.order, orders.get(entry.lane, 0))
            if not entry.straggles:
                moving.add(entry.lane)
        return {lane: order for lane, order in orders.items() if lane not in moving}

    def drop_fenced(self, lane: Lane, order: int) -> list[PendingRequest]:
        """Drop and return the stragglers up to ``order`` in ``lane``: a fence behind them was answered."""
        return self._drop(e for e in self._by_id.values() if e.lane == lane and e.order <= order and e.straggles)

    def drop_queries(self) -> list[PendingRequest]:
        """Drop and return the queries; their answers are still forwarded if they come."""
        return self._drop(entry for entry in self._by_id.values() if entry.is_query)

    def drop_subshell(self, subshell_id: str) -> list[PendingRequest]:
        """Drop and return the requests of a deleted subshell, which the kernel never answers."""
        return self._drop(e for e in self._by_id.values() if e.request.subshell_id == subshell_id)

    def clear(self) -> list[PendingRequest]:
        """Drop and return all requests."""
        return self._drop(self._by_id.values())

    def _drop(self, entries: Iterable[PendingRequest]) -> list[PendingRequest]:
        dropped = list(entries)
        for entry in dropped:
            del self._by_id[entry.request.msg_id]
        return dropped

    def _completed(self, entry: PendingRequest | None) -> PendingRequest | None:
        if entry is None or entry.replies > 0 or entry.idles > 0:
            return None
        del self._by_id[entry.request.msg_id]
        return entry
