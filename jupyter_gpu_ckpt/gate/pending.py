"""What the kernel still owes: every request that was forwarded and has not yet both its reply and its idle.

A kernel may only be dumped when this is empty.  Pure bookkeeping: no sockets, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .wake_rules import wakes
from .wire import Request

#: Requests that the protocol answers.  Comm messages have no reply, and of a type that is not here none is known: for
#: those the idle alone ends the matter.
REPLIED_TYPES = frozenset(
    {
        "execute_request",
        "inspect_request",
        "complete_request",
        "history_request",
        "is_complete_request",
        "comm_info_request",
        "kernel_info_request",
        "connect_request",
        "shutdown_request",
        "interrupt_request",
        "debug_request",
        "usage_request",
        "create_subshell_request",
        "delete_subshell_request",
        "list_subshell_request",
    }
)

#: What is remembered of questions on the control channel: a kernel that answers none is asked again and again, by every
#: page that is opened and every monitor that looks.
_MOST_QUESTIONS = 100

#: Where a kernel works requests off one after the other: channel and subshell.
Lane = tuple[str, str | None]


@dataclass
class Entry:
    """One msg_id under way.

    The two counts are 1 as a rule; they add up for a client that uses one msg_id twice at a time.
    """

    request: Request
    order: int
    replies: int = 0
    idles: int = 0
    begun: bool = False
    asks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def lane(self) -> Lane:
        """Where the kernel works it off."""
        return self.request.channel, self.request.subshell_id

    @property
    def is_cell(self) -> bool:
        """Whether a user has this code run, and sees its output."""
        request = self.request
        return request.msg_type == "execute_request" and not request.content.get("silent", False)

    @property
    def is_question(self) -> bool:
        """Whether nothing is lost if it is never answered: on the control channel nothing runs that a user started.

        Some kernels answer nothing there (IRkernel 1.3), and jupyter_server asks each kernel there who it is.
        """
        request = self.request
        return request.channel == "control" and request.msg_type != "shutdown_request" and not wakes(request)

    @property
    def straggles(self) -> bool:
        """Whether it may be that nothing more comes.

        A handler that raises leaves an idle without a reply.  ipykernel 7 handles a comm message that arrives while a
        cell awaits on the side, without busy and without idle.  Neither can be told from "a moment later" but by a
        request behind it in the same lane, the fence.
        """
        if self.request.msg_type.startswith("comm_"):
            return not self.begun
        return self.idles <= 0 < self.replies


class PendingRequests:
    """The requests under way, by msg_id."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._questions: deque[str] = deque()
        self._order = 0

    def __len__(self) -> int:
        return len(self._entries)

    def types(self) -> list[str]:
        """Message types under way, oldest first."""
        return [entry.request.msg_type for entry in self._entries.values()]

    def working(self) -> bool:
        """Whether the kernel is at work on something that a user asked it to do, as far as can be told from here."""
        return any(wakes(entry.request) and not entry.straggles for entry in self._entries.values())

    def cells(self) -> int:
        """How many cells run in the kernel or wait there behind one that does.

        Silent executions do not count: they are the questions of a front end's tools.
        """
        entries = self._entries.values()
        return sum(entry.is_cell and not entry.straggles for entry in entries)

    def other_types(self) -> tuple[str, ...]:
        """Message types under way of what is no cell, oldest first."""
        return tuple(entry.request.msg_type for entry in self._entries.values() if not entry.is_cell)

    def find(self, msg_id: str) -> Entry | None:
        """The entry of ``msg_id`` if it is under way."""
        return self._entries.get(msg_id)

    def forwarded(self, request: Request) -> None:
        """``request`` was given to the kernel."""
        self._order += 1
        entry = self._entries.setdefault(request.msg_id, Entry(request, self._order))
        entry.order = self._order
        entry.replies += request.msg_type in REPLIED_TYPES
        entry.idles += 1
        if entry.is_question:
            self._questions.append(request.msg_id)
            if len(self._questions) > _MOST_QUESTIONS:
                self._entries.pop(self._questions.popleft(), None)

    def replied(self, msg_id: str) -> Entry | None:
        """A reply to ``msg_id`` came; the entry if that completes it."""
        entry = self._entries.get(msg_id)
        if entry is not None:
            entry.replies -= 1
        return self._completed(entry)

    def begun(self, msg_id: str) -> None:
        """The busy of ``msg_id`` came."""
        if entry := self._entries.get(msg_id):
            entry.begun = True

    def idled(self, msg_id: str) -> Entry | None:
        """The idle of ``msg_id`` came; the entry if that completes it."""
        entry = self._entries.get(msg_id)
        if entry is not None:
            entry.idles -= 1
        return self._completed(entry)

    def straggling(self) -> dict[Lane, int]:
        """Lanes in which nothing but stragglers is left, with the order of the last one."""
        orders: dict[Lane, int] = {}
        moving: set[Lane] = set()
        for entry in self._entries.values():
            orders[entry.lane] = max(entry.order, orders.get(entry.lane, 0))
            if not entry.straggles:
                moving.add(entry.lane)
        return {lane: order for lane, order in orders.items() if lane not in moving}

    def fenced(self, lane: Lane, order: int) -> list[Entry]:
        """A fence behind ``order`` in ``lane`` was answered: drop and return the stragglers before it."""
        return self._drop(e for e in self._entries.values() if e.lane == lane and e.order <= order and e.straggles)

    def without_questions(self) -> list[Entry]:
        """Questions were waited for long enough: drop and return them; an answer that comes late is passed on."""
        return self._drop(entry for entry in self._entries.values() if entry.is_question)

    def without_subshell(self, subshell_id: str) -> list[Entry]:
        """A subshell was deleted: drop and return what was queued in it; the kernel never answers that."""
        return self._drop(e for e in self._entries.values() if e.request.subshell_id == subshell_id)

    def clear(self) -> list[Entry]:
        """Drop and return everything."""
        return self._drop(self._entries.values())

    def _drop(self, entries: Iterable[Entry]) -> list[Entry]:
        dropped = list(entries)
        for entry in dropped:
            del self._entries[entry.request.msg_id]
        return dropped

    def _completed(self, entry: Entry | None) -> Entry | None:
        if entry is None or entry.replies > 0 or entry.idles > 0:
            return None
        del self._entries[entry.request.msg_id]
        return entry
