"""The gate's thread: moves messages between clients and the kernel, and keeps them while the kernel is away.

Everything here runs on one thread and is touched by no other; `gate.Gate` brings the calls of other threads here.  A
method that takes a ``future`` is such a call: it raises at once what is wrong at once, and settles the future when it
is done.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any

import zmq

from ..errors import GpuCkptError, KernelSilent, StateError
from . import wire
from .drain import Drain
from .internal_requests import PROBE, InternalRequest, InternalRequests
from .loop import Loop, Reader, Socket
from .pending import Entry, PendingRequests
from .queue import RequestQueue
from .readers import Readers
from .replies import Replies
from .wake_rules import wakes
from .wire import CONTENT, HEADER, PARENT, Request

#: The iopub message by which a magic asks for its own kernel's checkpoint; no client ever sees it.
AGENT_REQUEST = "gpu_ckpt_request"

_PROBE_EVERY = 0.05  # seconds between the probes of a fresh connection

# Asked for by a cell, these are done between that cell and whatever its client sends next.
_HOLDING_ASKS = frozenset({"suspend", "checkpoint"})

# So many requests under way stop the reading of new ones: ZMQ then holds the sender up, as the kernel itself would
# have.
_UNDER_WAY = 10_000

# What a kernel that is away is not asked: it runs nothing that could be interrupted (the cells that wait are answered
# here), and its process is ended by the provisioner.  Kept and delivered later they would hit a kernel that has just
# been woken, or restarted.
_DONE_WITHOUT_KERNEL = frozenset({"shutdown_request", "interrupt_request"})


class GateState(str, Enum):
    """What the gate does with a client's request."""

    CLOSED = "closed"  # keeps it: no kernel yet, or no kernel any more
    OPEN = "open"  # forwards it
    DRAINING = "draining"  # keeps it, and waits for the answers to those forwarded before
    DRAINED = "drained"  # keeps it: the kernel is quiet, on its way out or on its way back
    ASLEEP = "asleep"  # keeps it, and has the kernel woken if it is of the wake allow-list

    __str__ = str.__str__


@dataclass(frozen=True)
class UnderWay:
    """What a kernel is doing for clients: how many cells run or wait in it, and the types of its other requests."""

    cells: int
    others: tuple[str, ...]


class Router:
    """The thread's side of one gate; see `gate.Gate` for the meaning of the verbs."""

    def __init__(
        self,
        front: Mapping[str, Any],
        back: Mapping[str, Any],
        *,
        sockets: dict[str, Socket],
        loop: Loop,
        on_wake: Callable[[str], None],
        on_agent_request: Callable[[dict[str, Any]], None],
        kernel_id: str,
        log: logging.Logger | logging.LoggerAdapter[Any],
    ) -> None:
        self.state = GateState.CLOSED
        self.last_activity = time.monotonic()
        self.queries = 0
        self.queue = RequestQueue()
        self.pending = PendingRequests()
        self.back_info = dict(back)
        self._front, self._loop = sockets, loop
        self.readers = Readers(sockets["iopub"], log)
        self._back: dict[str, Socket] = {}
        self._identity = f"gate-{kernel_id}".encode()[:255]  # ZMQ's limit
        self._on_wake, self._on_agent_request, self._log = on_wake, on_agent_request, log
        self._verifier = wire.session(front, history=True)
        self._signer = wire.session(front, history=False)
        self._internal = InternalRequests(self._signer)
        self.replies = Replies(self._signer, kernel_id, self._to_clients)
        self._drain = Drain(self.pending, self._send_internal, self._freed)
        self._idlers: list[Future[None]] = []
        self._woken = False  # on_wake was called for this sleep
        self._dead = self._closing = False
        self._question: tuple[Request, Future[str | None]] | None = None
        self._beats: deque[list[bytes]] = deque(maxlen=64)  # forwarded, not yet back
        self._rewire()

    # -- the loop ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Move messages until the loop is stopped.  Raises only what makes going on impossible."""
        self._loop.run(self._next_time, self._tick)

    def shut(self, reason: str) -> None:
        """Close every socket and fail every call under way."""
        self._disconnect(reason)
        self.readers.close()
        wire.close(self._front)

    def _rewire(self) -> None:
        """Poll the sockets there are, in the order of reading: replies before outputs, answers before requests."""
        handlers: dict[Socket, Reader] = {}
        if self._back:
            for channel in ("control", "shell", "stdin"):
                handlers[self._back[channel]] = (f"kernel {channel}", self._replies(channel))
            if not self.readers.full:
                handlers[self._back["iopub"]] = ("kernel iopub", self._output)
            handlers[self._back["hb"]] = ("kernel hb", self._beat_back)
        handlers[self.readers.monitor] = ("connections", self.readers.heard)
        handlers[self._front["iopub"]] = ("client iopub", self._subscription)
        for channel in ("control", "shell", "stdin"):
            if channel != "shell" or len(self.pending) < _UNDER_WAY:
                handlers[self._front[channel]] = (f"client {channel}", self._requests(channel))
        handlers[self._front["hb"]] = ("client hb", self._beat)
        self._loop.read(handlers)
        if self._back:
            # What is not read while somebody is behind waits in the kernel, and not here in ZMQ's own memory.
            self._back["iopub"].setsockopt(zmq.RCVHWM, wire.PAUSED_HIGH_WATER if self.readers.full else 0)

    def _next_time(self) -> float | None:
        times = (self._internal.next_time(), self._drain.next_time(), self.readers.next_time())
        return min((at for at in times if at is not None), default=None)

    def _tick(self, now: float) -> None:
        for request in self._internal.due(now):
            self._send_internal(request)
        self._drain.tick(now)
        if self.readers.late and self.readers.look(now):
            self._rewire()
        if self._loop.reads(self._front["shell"]) != (len(self.pending) < _UNDER_WAY):
            self._rewire()

    # -- the verbs --------------------------------------------------------------------------------------------------

    def open(self, future: Future[None], timeout: float) -> None:
        """Connect if not connected, then prove that an answer comes back over iopub."""
        if self.state in (GateState.OPEN, GateState.DRAINING):
            raise StateError(f"The gate is {self.state} already.")
        fresh = not self._back
        if fresh:
            self._back = wire.connect(self.back_info, self._identity)
            self._rewire()
        self._dead = False
        # Only a kernel that was never heard is asked who it is: IPython draws the tip in its banner from the user's
        # random numbers, so that question is not one to ask of a kernel that has work in it.
        kind, content = ("kernel_info_request", {}) if self.replies.info is None else PROBE

        def done(reply: dict[str, Any]) -> None:
            if kind == "kernel_info_request":
                self.replies.learn(reply)
            if self.state is GateState.CLOSED or self.state is GateState.ASLEEP:
                self.state = GateState.DRAINED
            future.set_result(None)

        def failed(why: str) -> None:
            if fresh:
                self._disconnect("the kernel did not answer")
            message = f"The kernel did not answer within {timeout:g} s: {why}."
            future.set_exception(KernelSilent(message, left="messages are kept", seconds=timeout))

        deadline = time.monotonic() + timeout
        self._send_internal(InternalRequest("shell", kind, content, deadline, done, failed, resend_every=_PROBE_EVERY))

    def release(self) -> None:
        """Forward what was kept, in order."""
        if not self._back:
            raise StateError("The gate has no connection to the kernel; open it first.")
        if self._drain.active:
            raise StateError("The gate is being drained by another call.")
        self.state, self._woken = GateState.OPEN, False
        for request in self.queue.take():
            self._forward(request)

    def drain(self, future: Future[None], timeout: float) -> None:
        """Keep new requests, wait for the answers to the old ones."""
        if self.state is GateState.DRAINED:
            future.set_result(None)
            return
        if self.state not in (GateState.OPEN, GateState.DRAINING) or self._drain.active:
            raise StateError(f"The gate is {self.state}; only an open one is drained, by one caller.")
        self.state = GateState.DRAINING
        self._drain.begin(future, timeout)
        self._settle_drain()

    def when_idle(self, future: Future[None]) -> None:
        """Keep new requests from the moment at which no cell is under way any more."""
        self._idlers.append(future)
        self._settle_idlers()

    def under_way(self) -> UnderWay:
        """What the kernel is doing for clients."""
        return UnderWay(self.pending.cells(), self.pending.other_types())

    def close(self) -> None:
        """Disconnect from the kernel and go on keeping."""
        # What the kernel printed last, however far behind a reader of it is.
        self._closing, self.readers.full = True, False
        self._rewire()
        for socket in self._back.values():
            self._loop.pump(socket)
        self._closing = False
        if self.pending:
            self._log.warning("gate: closed with %d requests under way; they are forgotten", len(self.pending))
        self._disconnect("the gate was closed")
        if self.state in (GateState.OPEN, GateState.DRAINING):
            self.state = GateState.DRAINED

    def sleep(self) -> None:
        """Have the kernel woken from here on."""
        if self.state in (GateState.OPEN, GateState.DRAINING):
            raise StateError(f"The gate is {self.state}; drain it first.")
        self.state, self._woken = GateState.ASLEEP, False
        waiting = self.queue.first(wakes)
        if waiting is not None:
            self._wake(waiting.msg_type)

    def fail(self, error: GpuCkptError) -> None:
        """Answer the executions that wait by ``error``, and sleep on."""
        if self.state in (GateState.OPEN, GateState.DRAINING):
            raise StateError(f"The gate is {self.state}; there is no wake that could fail.")
        if self.state is GateState.DRAINED:
            self.state = GateState.ASLEEP
        self._woken = False
        self._answer_executions(lambda request: self.replies.failed(request, error))

    def interrupt(self) -> bool:
        """Answer the executions that wait as interrupted; False when the gate is open: the kernel is to be told.

        A wake under way goes on: it is the cell that is interrupted, and the kernel may be wanted for the next one.
        """
        if self.state in (GateState.OPEN, GateState.DRAINING):
            return False
        # What was sent before the interrupt may still lie unread in the front socket.
        self._loop.pump(self._front["shell"])
        self.cancel_prompt()
        self._answer_executions(self.replies.interrupted)
        return True

    def _answer_executions(self, answer: Callable[[Request], object]) -> None:
        """Each execution that waits fails by ``answer``, or is aborted behind one of its queue that did."""
        stopped: set[tuple[bytes | str | None, ...]] = set()
        for request in self.queue.take(lambda request: request.msg_type == "execute_request"):
            queue = (*request.idents, request.subshell_id)
            if queue in stopped:
                self.replies.aborted(request)
                continue
            answer(request)
            if request.stops:
                stopped.add(queue)

    def prompt(self, future: Future[str | None], text: str) -> None:
        """Ask the client of the first cell that waits, if it lets itself be asked."""
        self.cancel_prompt()
        waiting = self.queue.first(
            lambda request: request.msg_type == "execute_request" and bool(request.content.get("allow_stdin"))
        )
        if waiting is None:
            future.set_result(None)
            return
        self._question = waiting, future
        self.replies.prompt(waiting, text)

    def cancel_prompt(self) -> None:
        """Nobody waits for the answer any more."""
        if self._question is not None and not self._question[1].done():
            self._question[1].set_result(None)
        self._question = None

    def request(
        self,
        future: Future[dict[str, Any]],
        msg_type: str,
        content: dict[str, Any],
        timeout: float,
        channel: str = "shell",
    ) -> None:
        """Ask the kernel something of the gate's own."""
        if not self._back:
            raise StateError("The gate has no connection to the kernel; open it first.")

        def failed(why: str) -> None:
            message = f"The kernel did not answer {msg_type} within {timeout:g} s: {why}."
            future.set_exception(KernelSilent(message, msg_type=msg_type, seconds=timeout))

        def done(reply: dict[str, Any]) -> None:
            future.set_result(reply["content"])

        self._send_internal(InternalRequest(channel, msg_type, content, time.monotonic() + timeout, done, failed))

    def publish(self, msg_type: str, content: Mapping[str, Any]) -> None:
        """An output in the kernel's name, to all clients."""
        self.replies.publish(msg_type, dict(content))

    def kernel_died(self) -> None:
        """The kernel's process is gone."""
        self._dead = True
        self._beats.clear()  # a beat in flight is not echoed: nobody is there
        self._disconnect("the kernel died")
        self.queue.take()
        self.state, self._woken = GateState.CLOSED, False

    def rebind_kernel(self, back: Mapping[str, Any]) -> None:
        """Another process is the kernel."""
        self._disconnect("the kernel was restarted")
        self.back_info = dict(back)
        self.replies.forget()
        self._dead = self._woken = False
        self.state = GateState.CLOSED

    def _disconnect(self, reason: str) -> None:
        """Close the kernel's side; every answer that has not come will not come."""
        back, self._back = self._back, {}
        if back:
            self._rewire()
            wire.close(back)
        while self._beats:
            wire.send(self._front["hb"], self._beats.popleft())
        self._drain.give_up(reason)
        self._fail_idlers(reason)
        self._asked(self.pending.clear())
        while (request := next(iter(self._internal), None)) is not None:  # a failure may end in here again
            self._internal.drop(request)
            request.failed(reason)

    def _to_clients(self, channel: str, frames: list[bytes]) -> None:
        if channel == "iopub":
            self._publish(frames)
        else:
            wire.send(self._front[channel], frames)

    def _publish(self, frames: list[bytes]) -> None:
        wire.send(self._front["iopub"], frames)
        if self.readers.sent(frames) and not self._closing:
            self._rewire()

    # -- from clients -----------------------------------------------------------------------------------------------

    def _requests(self, channel: str) -> Callable[[list[bytes]], None]:
        def handle(frames: list[bytes]) -> None:
            if self.state is not GateState.OPEN:
                self._request_came(wire.read_request(self._verifier, channel, frames))
                return
            # Only what has the key gets anywhere: a kernel that computes does not read, and what others send would wait
            # for it in this process.  The rest is looked at when it is on its way, because that takes longer than the
            # way: of what then is wrong no answer is waited for, and the kernel does with it what it would without a
            # gate.
            wire.require_signed(self._verifier, frames)
            wire.send(self._back[channel], frames)
            try:
                request = wire.read_request(self._verifier, channel, frames)
            except ValueError as error:
                self._log.warning("gate: no answer is expected to a message on client %s: %s", channel, error)
                return
            self._forwarded(request)

        return handle

    def _request_came(self, request: Request) -> None:
        kind = request.msg_type
        if kind == "input_reply" and self._question is not None and request.idents == self._question[0].idents:
            self._question[1].set_result(str(request.content.get("value", "")))
            self._question = None
            return
        # A running cell may need an answer to its input(), an interrupt, its end: those pass a drain.
        passes = request.channel == "stdin" or kind in _DONE_WITHOUT_KERNEL
        if self.state is GateState.OPEN or (self.state is GateState.DRAINING and passes):
            self._forward(request)
        elif kind in _DONE_WITHOUT_KERNEL:
            if kind == "interrupt_request":
                self.interrupt()
            self.replies.done(request)
            if kind == "shutdown_request" and not self._dead:
                self._notify(
                    self._on_agent_request, {"verb": "shutdown", "restart": bool(request.content.get("restart", False))}
                )
        elif kind == "kernel_info_request" and self.replies.info is not None and not self._dead:
            self.replies.kernel_info(request)
            if self.state in (GateState.DRAINED, GateState.ASLEEP):  # in a drain its cells may run still
                self.replies.idle()
        elif not self.queue.append(request):
            self.replies.refused(request)
        elif self.state is GateState.ASLEEP and wakes(request):
            self._wake(kind)

    def _forward(self, request: Request) -> None:
        # A client's identity stays in front: the kernel returns it, and the front ROUTER finds the client by it.
        wire.send(self._back[request.channel], request.frames)
        self._forwarded(request)

    def _forwarded(self, request: Request) -> None:
        if wakes(request):
            self.last_activity = time.monotonic()
        else:
            self.queries += 1
        if request.channel != "stdin":
            self.pending.forwarded(request)
            self._drain.news()
        if request.msg_type == "shutdown_request":  # its cells end by that, and there is nothing to come after them
            self._fail_idlers("the kernel is being shut down")

    def _wake(self, msg_type: str) -> None:
        if self._woken:
            return
        self._woken = True
        self._notify(self._on_wake, msg_type)

    def _notify(self, callback: Callable[[Any], None], argument: Any) -> None:
        try:
            callback(argument)
        except Exception as error:
            self._log.error("gate: a callback failed: %s", type(error).__name__, exc_info=True)

    def _subscription(self, frames: list[bytes]) -> None:
        if frames[0][:1] == b"\x01":
            self.replies.welcome(frames[0][1:])

    def _beat(self, frames: list[bytes]) -> None:
        if self._dead or sum(map(len, frames)) > wire.LONGEST_BEAT:
            return
        if self.state in (GateState.OPEN, GateState.DRAINING):
            self._beats.append(frames)
            wire.send(self._back["hb"], frames)
        else:
            wire.send(self._front["hb"], frames)

    # -- from the kernel --------------------------------------------------------------------------------------------

    def _beat_back(self, frames: list[bytes]) -> None:
        if frames in self._beats:
            self._beats.remove(frames)
            wire.send(self._front["hb"], frames)

    def _replies(self, channel: str) -> Callable[[list[bytes]], None]:
        def handle(frames: list[bytes]) -> None:
            _, rest = wire.split(frames)
            if self._internal.owns(rest[PARENT]):
                self._internal.replied(self._signer.deserialize(rest))
                return
            wire.send(self._front[channel], frames)
            if channel != "stdin":
                self._reply_passed(str(self._signer.unpack(rest[PARENT]).get("msg_id")), rest)

        return handle

    def _reply_passed(self, msg_id: str, rest: list[bytes]) -> None:
        entry = self.pending.find(msg_id)
        if entry is None:
            return
        self._drain.news()
        request = entry.request
        content: dict[str, Any] = {}
        if request.msg_type == "delete_subshell_request" or (request.stops and self.state is GateState.DRAINING):
            content = self._signer.unpack(rest[CONTENT])
        if request.stops and content.get("status") == "error":
            self._abort(request.subshell_id)
        elif request.msg_type == "delete_subshell_request" and content.get("status") == "ok":
            self._asked(self.pending.without_subshell(str(request.content.get("subshell_id"))))
        self._completed(self.pending.replied(msg_id))

    def _abort(self, subshell_id: str | None) -> None:
        """Do to the executions that are kept what the kernel does to those in its own queue when one fails.

        What came before the error reply may still lie unread in the front socket, so that is read first.
        """
        self._loop.pump(self._front["shell"])
        queued = self.queue.take(lambda r: r.msg_type == "execute_request" and r.subshell_id == subshell_id)
        for request in queued:
            self.replies.aborted(request)

    def _output(self, frames: list[bytes]) -> None:
        _, rest = wire.split(frames)
        header = rest[HEADER]
        # Most outputs are forwarded unread; a byte test finds the few that matter to the gate, and those are parsed.
        if b'"status"' in header:
            self._status_came(frames, rest)
        elif b'"iopub_welcome"' in header:
            self.replies.kernel_welcomed()  # it welcomes the gate; each client has a welcome of its own
        elif b'"' + AGENT_REQUEST.encode() + b'"' in header and self._ask_came(rest):
            pass
        else:
            self._publish(frames)

    def _status_came(self, frames: list[bytes], rest: list[bytes]) -> None:
        own = self._internal.owns(rest[PARENT])
        if not own:
            self._publish(frames)
        msg_id = str(self._signer.unpack(rest[PARENT]).get("msg_id"))
        state = self._signer.unpack(rest[CONTENT]).get("execution_state")
        if own and state == "idle":
            self._internal.idled(msg_id, time.monotonic())
        elif not own and self.pending.find(msg_id) is not None:
            self._drain.news()
            if state == "busy":
                self.pending.begun(msg_id)
            elif state == "idle":
                self._completed(self.pending.idled(msg_id))
                self._settle_idlers()  # also where the reply is late, or never comes

    def _ask_came(self, rest: list[bytes]) -> bool:
        message = self._signer.deserialize(rest)  # checks the signature: this message makes the gate do something
        if message["msg_type"] != AGENT_REQUEST:
            return False
        entry = self.pending.find(str(message["parent_header"].get("msg_id")))
        if entry is None or message["content"].get("now"):
            self._notify(self._on_agent_request, message["content"])
        else:
            entry.asks.append(message["content"])
        return True

    # -- what is under way ------------------------------------------------------------------------------------------

    def _completed(self, entry: Entry | None) -> None:
        if entry is not None:
            if wakes(entry.request):
                self.last_activity = time.monotonic()
            self._asked([entry])
            self._settle_drain()

    def _asked(self, entries: list[Entry]) -> None:
        asks = [content for entry in entries for content in entry.asks]
        # Whoever reads the answer of the cell that asked sends the next cell at once, and that one must find the kernel
        # gone already, not keep it from going.
        if self.state is GateState.OPEN and any(content.get("verb") in _HOLDING_ASKS for content in asks):
            self.state = GateState.DRAINING
        for content in asks:
            self._notify(self._on_agent_request, content)
        self._settle_idlers()

    def _freed(self, entries: list[Entry]) -> None:
        self._asked(entries)
        self._settle_drain()

    def _fail_idlers(self, reason: str) -> None:
        idlers, self._idlers = self._idlers, []
        for future in idlers:
            if future.set_running_or_notify_cancel():
                future.set_exception(StateError(f"The kernel's cells were not waited for to the end: {reason}."))

    def _settle_idlers(self) -> None:
        if not self._idlers or self.pending.cells():
            return
        idlers, self._idlers = self._idlers, []
        wanted = [future for future in idlers if future.set_running_or_notify_cancel()]
        if wanted and self.state is GateState.OPEN:
            self.state = GateState.DRAINING  # as for a cell that asked: see `_asked`
        for future in wanted:
            future.set_result(None)

    def _settle_drain(self) -> None:
        if self._drain.settled():
            self.state = GateState.DRAINED

    def _send_internal(self, request: InternalRequest) -> None:
        wire.send(self._back[request.channel], self._internal.frames(request, time.monotonic()))
