"""The gate's thread: forward messages between clients and the kernel, and queue them while the kernel is away.

Everything here runs on one thread and is touched by no other; `gate.Gate` runs the verbs here for other threads.
"""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..errors import GpuCkptError, KernelSilent, StateError
from . import wire
from .drain import Drain
from .internal_requests import PROBE, InternalRequest, InternalRequests
from .loop import Handler, Loop, Socket
from .pending import PendingRequest, PendingRequests
from .queue import RequestQueue
from .readers import Readers
from .replies import Replies
from .wake_rules import UNKNOWN_AFTER, wakes
from .wire import CONTENT, HEADER, PARENT, Request

#: The iopub message by which the agent requests something of its server; no client ever sees it.
AGENT_REQUEST = "gpu_ckpt_request"

_PROBE_EVERY = 0.05  # seconds between the probes of a fresh connection

# Seconds for which a kernel that runs nothing may leave a request unread before it is nudged (`wire.nudge`), at first
# and at most: the time doubles, for a kernel may be stopped or hold the interpreter's lock.
_UNREAD, _LONGEST_UNREAD = 0.5, 30.0

# So many messages of the kernel are read on the other socket before a cell's reply or idle has its effects.
_OUTPUTS = 1000

# Requested by a cell, these are done between that cell and the next request of its client.
_QUEUEING_VERBS = frozenset({"suspend", "checkpoint", "save", "back", "save_after_cell"})

# The first line of a cell before which a save point is made.
RISKY = "%%risky"

# So many pending requests stop the reading of new ones: ZMQ then blocks the sender, as the kernel itself would have.
_MAX_PENDING = 10_000

# Answered here for a kernel that is away: it runs nothing that could be interrupted (the queued cells are answered
# here), and its process is ended by the provisioner.  Queued and delivered later they would hit a kernel that has just
# been woken, or restarted.
_DONE_WITHOUT_KERNEL = frozenset({"shutdown_request", "interrupt_request"})

# After one of these no cell waits for its user any more.
_ANSWERS = frozenset({"input_reply", "interrupt_request"})


class GateState(str, Enum):
    """State of a gate: the treatment of a client's request."""

    CLOSED = "closed"  # queues it: no kernel yet, or no kernel any more
    OPEN = "open"  # forwards it
    DRAINING = "draining"  # queues it, and waits for the answers to those forwarded before
    DRAINED = "drained"  # queues it: the kernel is idle, on its way out or on its way back
    ASLEEP = "asleep"  # queues it, and has the kernel woken if `wake_rules` say so

    __str__ = str.__str__


@dataclass(frozen=True)
class UnderWay:
    """Work of a kernel for clients: the number of cells that run or wait in it, and the types of other requests.

    ``awaits_input``: a cell waits for an answer of its user.  ``ending``: a cell has its reply, and what it
    requests may still come.
    """

    cells: int
    others: tuple[str, ...]
    awaits_input: bool = False
    ending: bool = False


@dataclass
class _Prompt:
    """A question to the client of ``request``; ``deadline`` in monotonic seconds."""

    request: Request
    answer: Future[str | None]
    deadline: float


class Router:
    """Moves the messages of one gate, and does its verbs."""

    def __init__(
        self,
        front: Mapping[str, Any],
        back: Mapping[str, Any],
        *,
        loop: Loop,
        on_wake: Callable[[str], None],
        on_agent_request: Callable[[dict[str, Any]], None],
        on_work: Callable[[str], None],
        kernel_id: str,
        log: logging.Logger | logging.LoggerAdapter[Any],
        stable_name: bool = True,
        may_nudge: Callable[[], bool] = lambda: True,
        keeps_queueing: Callable[[], bool] = lambda: False,
    ) -> None:
        self.state = GateState.CLOSED
        self.last_activity = time.monotonic()
        self.queries = 0
        self.queue = RequestQueue()
        self.pending = PendingRequests()
        self._front_info, self._back_info = dict(front), dict(back)
        self._front: dict[str, Socket] = {}
        self._back: dict[str, Socket] = {}
        self._loop = loop
        self.readers: Readers
        #: The gate's routing id at the kernel.
        self.name = self._first_name = f"gate-{kernel_id}"[:200]  # ZMQ's limit is 255 bytes
        self._stable_name, self._disconnected = stable_name, False
        self._may_nudge, self._keeps_queueing = may_nudge, keeps_queueing
        #: Notices of `notify` that no cell has shown.
        self.notices: list[str] = []
        self._on_wake, self._on_agent_request, self._on_work, self._log = on_wake, on_agent_request, on_work, log
        self._verifier = wire.session(front, history=True)
        self._signer = wire.session(back, history=False)
        self._internal = InternalRequests(self._signer)
        self.replies = Replies(wire.session(front, history=False), kernel_id, self._to_clients)
        self._drain = Drain(self.pending, self._send_internal, self._dropped)
        self._waiting_for_idle: list[Future[None]] = []
        self._wake_requested = False  # on_wake was called for this sleep
        #: The risky cell, the first in the queue, whose save point is being made.
        self._unsaved: Request | None = None
        self._dead = False
        self._prompt: _Prompt | None = None
        self._nudge_at: float | None = None
        self._unread = _UNREAD
        self._nudging: Socket | None = None
        #: Queued requests that are answered without the kernel if it is not back in time (monotonic seconds).
        self._impatient: deque[tuple[float, Request]] = deque()
        self._beats: deque[list[bytes]] = deque(maxlen=64)  # forwarded, not yet back

    @property
    def identity(self) -> dict[str, Any] | None:
        """`Gate.identity`."""
        known = self.replies.identity
        return None if known is None else known | {"name": self.name, "notices": self.notices[:]}

    # -- the loop

    def bind(self) -> None:
        """Bind the sockets for clients.  Raises `GateError` with the address if one cannot be bound; then none is."""
        self._front = wire.bind(self._front_info)
        try:
            self.readers = Readers(self._front["iopub"], self._log)
        except BaseException:
            wire.close(self._front)
            raise
        self._rewire()

    def run(self) -> None:
        """Move messages until the loop is stopped.  Raises only what makes it impossible to continue."""
        self._loop.run(self._next_time, self._tick)

    def shut(self, reason: str) -> None:
        """Close every socket and fail the verbs under way."""
        self.cancel_prompt()
        self._disconnect(reason)
        self.readers.close()
        wire.close(self._front)

    def _rewire(self) -> None:
        """Poll the sockets that exist, in the order of reading: replies before outputs, answers before requests."""
        handlers: dict[Socket, Handler] = {}
        if self._back:
            for channel in ("control", "shell", "stdin"):
                handlers[self._back[channel]] = (f"kernel {channel}", functools.partial(self._on_reply, channel))
            handlers[self._back["iopub"]] = ("kernel iopub", self._on_output)
            handlers[self._back["hb"]] = ("kernel hb", self._on_returned_beat)
        handlers[self.readers.monitor] = ("connections", self.readers.on_connection)
        handlers[self._front["iopub"]] = ("client iopub", self._on_subscription)
        for channel in ("control", "shell", "stdin"):
            if channel != "shell" or len(self.pending) < _MAX_PENDING:
                handlers[self._front[channel]] = (f"client {channel}", functools.partial(self._on_request, channel))
        handlers[self._front["hb"]] = ("client hb", self._on_beat)
        self._loop.read(handlers)

    def _next_time(self) -> float | None:
        prompt = self._prompt.deadline if self._prompt else None
        times = [self._internal.next_time(), self._drain.next_time(), self.readers.next_time(), prompt, self._nudge_at]
        times.append(self._impatient[0][0] if self._impatient else None)
        return min((at for at in times if at is not None), default=None)

    def _tick(self, now: float) -> None:
        for request in self._internal.expire(now):
            self._send_internal(request)
        self._drain.tick(now)
        if self._prompt is not None and now >= self._prompt.deadline:
            self.cancel_prompt()
        while self._impatient and now >= self._impatient[0][0]:
            _, late = self._impatient.popleft()
            if self.queue.discard(late):
                self.replies.answer(late, {"status": "unknown"})
        if self._nudge_at is not None and now >= self._nudge_at:
            self._nudge(now)
        if self.readers.late:
            self.readers.measure(now)
        self.readers.send_queued()
        if self._loop.reads(self._front["shell"]) != (len(self.pending) < _MAX_PENDING):
            self._rewire()

    def _expect_reading(self) -> None:
        """Expect the kernel to begin soon: a request is on its way to it, or another request is done."""
        if self._nudge_at is None:
            self._nudge_at = time.monotonic() + self._unread

    def _nudge(self, now: float) -> None:
        """Nudge a kernel that has left requests unread."""
        self._end_nudge()
        own = any(request.channel == "shell" for request in self._internal)
        if self._back and (self.pending.waits_unread() or (own and not self.pending)):
            self._nudging = wire.nudge(self._back_info) if self._may_nudge() else None
            self._nudge_at, self._unread = now + self._unread, min(2 * self._unread, _LONGEST_UNREAD)
        else:
            self._unread = _UNREAD

    def _end_nudge(self) -> None:
        nudging, self._nudging, self._nudge_at = self._nudging, None, None
        if nudging is not None:
            nudging.close(linger=0)

    # -- the verbs

    def open(self, timeout: float) -> tuple[Future[None], float]:
        """Connect to the kernel if not connected, and wait until an answer came back over iopub.

        Requests stay queued.  *After failure* (`KernelSilent`) the connection is closed and the state as before.
        """
        if self.state in (GateState.OPEN, GateState.DRAINING):
            raise StateError(f"The gate is {self.state} already.")
        fresh = not self._back
        if fresh:
            if self._disconnected and not self._stable_name:
                # Nothing of the last connection is pending: the answers are to the name from which a request came.
                self.name = f"{self._first_name}-{secrets.token_hex(4)}"
            self._back = wire.connect(self._back_info, self.name.encode())
            self._rewire()
        self._dead = False
        future: Future[None] = Future()
        # Only a kernel that was never heard gets a kernel_info_request: IPython draws the tip in its banner from the
        # user's random numbers, so that request is not for a kernel that has work in it.
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
        return future, timeout

    def release(self) -> None:
        """Forward the queued requests, in order, and queue no more.

        Those from a risky cell on stay queued until it has its save point: see `risky_saved`.  All stay queued where
        the owner says so, which is about to run another verb: they would run in a state that this verb discards.
        """
        if not self._back:
            raise StateError("The gate has no connection to the kernel; open it first.")
        if self._drain.active:
            raise StateError("The gate is being drained by another call.")
        self.state, self._wake_requested = GateState.OPEN, False
        if self._keeps_queueing():
            self.state = GateState.DRAINING
        while self.state is GateState.OPEN and (request := self.queue.first()) is not None:
            if _is_risky(request) and not request.saved:
                self._precede(request)
            else:
                self.queue.pop_first()
                self._forward(request)

    def risky_saved(self, cell: str, error: GpuCkptError | None) -> None:
        """Forward the risky cell with this message id, which waits for its save point, and the requests behind it.

        With an ``error`` there is no save point: the cell is answered by it and does not run, and those that its client
        has sent behind it are aborted, as behind a cell that fails.
        """
        if (risky := self._unsaved) is None or risky.msg_id != cell:
            return  # its kernel has ended
        self._unsaved = None
        if error is None:
            risky.saved = True
        else:
            self._answer_executions(
                lambda request: self.replies.failed(request, error), lambda request: _sender(request) == _sender(risky)
            )
        self._release_abandoned()

    def drain(self, timeout: float) -> tuple[Future[None], float]:
        """Queue new requests from here on; wait until those forwarded before have their replies and idles.

        Interrupts, shutdowns and answers to ``input()`` still pass.  *After failure* the gate continues queueing: call
        `release`.  Raises `KernelBusy` with the types of the pending requests.
        """
        future: Future[None] = Future()
        if self.state is GateState.DRAINED:
            future.set_result(None)
        elif self.state not in (GateState.OPEN, GateState.DRAINING) or self._drain.active:
            raise StateError(f"The gate is {self.state}; only an open one is drained, by one caller.")
        else:
            self.state = GateState.DRAINING
            self._drain.begin(future, timeout)
            self._settle_drain()
        return future, timeout

    def when_idle(self, future: Future[None]) -> None:
        """Settle ``future`` once no cell runs or waits in the kernel; cells that come later wait here.

        From that moment on all new requests are queued, and its owner runs a verb, or calls `release`.  The future may
        be cancelled: if it was settled before, requests are queued; else call `forget_cancelled`.  It fails with
        `StateError` if the kernel ends or is restarted before.
        """
        self._waiting_for_idle.append(future)
        self._settle_idle()

    def forget_cancelled(self) -> None:
        """Forward the cells that waited for futures of `when_idle` which were cancelled."""
        waiting = [future for future in self._waiting_for_idle if not future.cancelled()]
        was_waiting, self._waiting_for_idle = bool(self._waiting_for_idle), waiting
        if was_waiting and not waiting and self.state is GateState.OPEN:
            self.release()

    def close(self) -> None:
        """Disconnect from the kernel and continue queueing.

        libzmq closes the connections some milliseconds later, and so does the kernel.
        """
        for socket in self._back.values():
            self._loop.pump(socket)
        if self.pending:
            self._log.warning("gate: closed with %d requests under way; they are forgotten", len(self.pending))
        self._disconnect("the gate was closed")
        if self.state in (GateState.OPEN, GateState.DRAINING):
            self.state = GateState.DRAINED

    def sleep(self) -> None:
        """Have a suspended or checkpointed kernel woken by the next request that wakes, or by a queued one."""
        if self.state in (GateState.OPEN, GateState.DRAINING):
            raise StateError(f"The gate is {self.state}; drain it first.")
        self.state, self._wake_requested = GateState.ASLEEP, False
        self._disconnected = self._disconnected or not self._back  # an earlier gate was
        if (waiting := self.queue.first(wakes)) is not None:
            self._wake(waiting.msg_type)

    def fail(self, error: GpuCkptError) -> None:
        """Answer each queued execution by the ``error`` of a wake.  Other requests stay, and so does the sleep."""
        if self.state in (GateState.OPEN, GateState.DRAINING):
            raise StateError(f"The gate is {self.state}; there is no wake that could fail.")
        if self.state is GateState.DRAINED:
            self.state = GateState.ASLEEP
        self._wake_requested = False
        self._answer_executions(lambda request: self.replies.failed(request, error))

    def interrupt(self) -> bool:
        """Answer each queued execution as interrupted; False, and nothing is done, when the gate is open.

        Then the kernel itself is to be interrupted, but not where it works on nothing and a risky cell waited for its
        save point: that cell, which does not run then, was meant.  A wake continues: the kernel may be needed for the
        next cell.
        """
        if self.state in (GateState.OPEN, GateState.DRAINING):
            self.pending.answered()
            return self._interrupt_risky()
        # Requests sent before the interrupt may still lie unread in the front socket.
        self._loop.pump(self._front["shell"])
        self.cancel_prompt()
        self._answer_executions(self.replies.interrupted)
        return True

    def _interrupt_risky(self) -> bool:
        """Answer a risky cell that waits for its save point, and what is queued behind it, as interrupted.

        Return whether that was all: an idle kernel gets no interrupt, by which ipykernel drops a cell that begins then.
        """
        if self._unsaved is None or self.pending.cells():
            return False
        self._answer_executions(self.replies.interrupted)
        return not self.pending.working()

    def _answer_executions(
        self, answer: Callable[[Request], object], wanted: Callable[[Request], bool] = lambda _: True
    ) -> None:
        """Answer each ``wanted`` queued execution; those behind one of the same client that stops are aborted."""
        stopped: set[tuple[bytes | str | None, ...]] = set()
        for request in self.queue.remove(lambda request: request.msg_type == "execute_request" and wanted(request)):
            if _sender(request) in stopped:
                self.replies.aborted(request)
                continue
            answer(request)
            if request.stops:
                stopped.add(_sender(request))

    def request(
        self, msg_type: str, content: Mapping[str, Any], timeout: float, channel: str = "shell"
    ) -> tuple[Future[dict[str, Any]], float]:
        """Send the kernel a request of the gate's own, also while clients' requests are queued; the reply's content.

        Clients do not see it.  On the ``control`` channel the kernel answers while a cell runs.  Raises `KernelSilent`.
        """
        if not self._back:
            raise StateError("The gate has no connection to the kernel; open it first.")
        future: Future[dict[str, Any]] = Future()

        def failed(why: str) -> None:
            message = f"The kernel did not answer {msg_type} within {timeout:g} s: {why}."
            future.set_exception(KernelSilent(message, msg_type=msg_type, seconds=timeout))

        def done(reply: dict[str, Any]) -> None:
            future.set_result(reply["content"])

        deadline = time.monotonic() + timeout
        self._send_internal(InternalRequest(channel, msg_type, dict(content), deadline, done, failed))
        return future, timeout

    def prompt(self, text: str, timeout: float) -> tuple[Future[str | None], float]:
        """Ask the user of the first queued cell whose client allows ``input()``; None without an answer in time."""
        self.cancel_prompt()
        answer: Future[str | None] = Future()
        waiting = self.queue.first(lambda r: r.msg_type == "execute_request" and bool(r.content.get("allow_stdin")))
        if waiting is None:
            answer.set_result(None)
        else:
            self._prompt = _Prompt(waiting, answer, time.monotonic() + timeout)
            self.replies.prompt(waiting, text)
        return answer, timeout

    def cancel_prompt(self) -> None:
        """End a `prompt` without an answer."""
        if self._prompt is not None:
            self._prompt.answer.set_result(None)
            self._prompt = None

    def publish(self, msg_type: str, content: Mapping[str, Any]) -> None:
        """Send clients an output in the kernel's name, also while the kernel is away."""
        self.replies.publish(msg_type, dict(content))

    def notify(self, notice: str) -> None:
        """Show ``notice`` in the output of the next cell that is not silent: the kernel has no agent that could."""
        self.notices.append(notice)

    def print_notice(self, text: str) -> None:
        """Show ``text`` at once in the output of the cell that waits for the kernel; of no cell if none waits."""
        waiting = self.queue.first(lambda r: r.msg_type == "execute_request" and not r.content.get("silent", False))
        if waiting is None:  # or that runs, and waits in a call
            waiting = self.pending.running_cell()
        if waiting is not None:
            self.replies.notice(waiting, text)

    def kernel_died(self) -> None:
        """Drop pending and queued requests of a process that is gone, disconnect, echo no heartbeat.

        Requests that come later are queued for the next kernel.
        """
        self._dead = True
        self._beats.clear()  # a beat in flight is not echoed: there is no kernel
        self._disconnect("the kernel died")
        self.queue.remove()
        self._unsaved = None
        self.state, self._wake_requested = GateState.CLOSED, False

    def rebind_kernel(self, back: Mapping[str, Any]) -> None:
        """Serve another process, at ``back``: drop pending requests and the replies known of the old one."""
        self._disconnect("the kernel was restarted")
        self._back_info = dict(back)
        self.replies.forget()
        self._dead = self._wake_requested = False
        self.state = GateState.CLOSED

    def expect_key(self, key: str) -> None:
        """Sign the gate's own requests with ``key``, and expect it of the kernel: that of a branch changes."""
        self._signer.key = key.encode("ascii")

    def follow_session(self, session: str) -> None:
        """Answer with the kernel's new session id: it has become another kernel."""
        self.replies.follow(session)

    def _disconnect(self, reason: str) -> None:
        """Close the kernel's side, and fail what waits for an answer of the kernel."""
        back, self._back = self._back, {}
        self._end_nudge()
        if back:
            self._disconnected = True
            self._rewire()
            wire.close(back)
        while self._beats:
            wire.send(self._front["hb"], self._beats.popleft())
        self._drain.cancel(reason)
        self._fail_idle(reason)
        self._pass_agent_requests(self.pending.clear())
        while (request := next(iter(self._internal), None)) is not None:  # a failure may end in here again
            self._internal.drop(request)
            request.failed(reason)

    def _to_clients(self, channel: str, frames: list[bytes], *, needed: bool = True) -> None:
        if channel == "iopub":
            self.readers.send(frames, needed=needed)
        else:
            wire.send(self._front[channel], frames)

    # -- from clients

    def _on_request(self, channel: str, frames: list[bytes]) -> None:
        if self.state is not GateState.OPEN or self._waiting_for_idle:
            self._handle_request(wire.read_request(self._verifier, channel, frames))
            return
        # Only signed messages are forwarded: a kernel that computes does not read, and others' messages would wait
        # for it in this process.  The rest is checked once the message was sent, because that takes longer than
        # sending: to a message that then turns out wrong no answer is expected, and the kernel does with it what it
        # would without a gate.
        wire.require_signed(self._verifier, frames)
        if any(RISKY.encode() in frame for frame in frames):
            request = wire.read_request(self._verifier, channel, frames)
            if not _is_risky(request):
                self._forward(request)
            elif self.queue.append(request):
                self._precede(request)
            return
        wire.send(self._back[channel], frames)
        try:
            request = wire.read_request(self._verifier, channel, frames)
        except ValueError as error:
            self._log.warning("gate: no answer is expected to a message on client %s: %s", channel, error)
            return
        self._forwarded(request)

    def _precede(self, risky: Request) -> None:
        """Queue requests from ``risky`` on, the first in the queue, and have a save point made before it."""
        self.state = GateState.DRAINING  # as for a cell with a request: see `_pass_agent_requests`
        if risky is self._unsaved:
            return
        self._unsaved = risky
        content = {"verb": "save_before_cell", "cell": risky.msg_id}
        if (error := self._notify(self._on_agent_request, content)) is not None:
            self.risky_saved(risky.msg_id, GpuCkptError.from_exception(error))

    def _handle_request(self, request: Request) -> None:
        kind = request.msg_type
        if kind == "input_reply" and self._prompt is not None and request.idents == self._prompt.request.idents:
            self._prompt.answer.set_result(str(request.content.get("value", "")))
            self._prompt = None
            return
        # A running cell may need an answer to its input(), an interrupt, its end: those pass a drain.
        passes = request.channel == "stdin" or kind in _DONE_WITHOUT_KERNEL
        if kind == "interrupt_request" and self.state is GateState.DRAINING and self._interrupt_risky():
            self._notify(self._on_agent_request, {"verb": "interrupt"})
            self.replies.done(request)
        elif self._is_open_for(request) or (self.state is GateState.DRAINING and passes):
            self._forward(request)
        elif kind in _DONE_WITHOUT_KERNEL:
            if kind == "interrupt_request":
                self.interrupt()
                self._notify(self._on_agent_request, {"verb": "interrupt"})
            self.replies.done(request)
            if kind == "shutdown_request" and not self._dead:
                restart = bool(request.content.get("restart", False))
                self._notify(self._on_agent_request, {"verb": "shutdown", "restart": restart})
        elif kind == "kernel_info_request" and self.replies.info is not None and not self._dead:
            self.replies.answer(request, dict(self.replies.info))
            if self.state in (GateState.DRAINED, GateState.ASLEEP):  # in a drain its cells may run still
                self.replies.idle()
        elif not self.queue.append(request):
            self.replies.refused(request)
        else:
            if kind == "is_complete_request":
                self._impatient.append((time.monotonic() + UNKNOWN_AFTER, request))
            if self.state is GateState.ASLEEP and wakes(request):
                self._wake(kind)

    def _is_open_for(self, request: Request) -> bool:
        """Return whether a request is forwarded by an open gate: no cell is behind a verb that waits for the others."""
        waits = bool(self._waiting_for_idle) and request.msg_type == "execute_request"
        return self.state is GateState.OPEN and not waits

    def _forward(self, request: Request) -> None:
        # A client's identity stays in front: the kernel returns it, and the front ROUTER finds the client by it.
        wire.send(self._back[request.channel], request.frames)
        self._forwarded(request)

    def _forwarded(self, request: Request) -> None:
        if wakes(request):
            self.last_activity = time.monotonic()
            self._notify(self._on_work, request.msg_type)
        else:
            self.queries += 1
        if self.notices and request.msg_type == "execute_request" and not request.content.get("silent", False):
            self.replies.notice(request, "\n".join(self.notices))
            self.notices.clear()
        if request.msg_type in _ANSWERS:
            self.pending.answered()
        if request.msg_type == "interrupt_request":
            self._notify(self._on_agent_request, {"verb": "interrupt"})
        if request.channel != "stdin":
            self.pending.forwarded(request)
            self._drain.note_progress()
            if request.channel == "shell":
                self._expect_reading()
        if request.msg_type == "shutdown_request":  # its cells end by that, and there is nothing to come after them
            if self._waiting_for_idle:
                self._answer_executions(self.replies.aborted)
            self._fail_idle("the kernel is being shut down")

    def _wake(self, msg_type: str) -> None:
        if self._wake_requested:
            return
        self._wake_requested = True
        if (error := self._notify(self._on_wake, msg_type)) is not None:
            self.fail(GpuCkptError.from_exception(error))  # the next request wakes again

    def _notify(self, callback: Callable[[Any], None], argument: Any) -> Exception | None:
        """Call a callback of the gate's owner; return, and log, the error that it raises."""
        try:
            callback(argument)
        except Exception as error:
            self._log.error("gate: a callback failed: %s", type(error).__name__, exc_info=True)
            return error
        return None

    def _release_abandoned(self) -> None:
        """Forward the requests that are queued for a verb which does not come."""
        if self.state is GateState.DRAINING and self._back and not self._drain.active:
            self.release()

    def _on_subscription(self, frames: list[bytes]) -> None:
        if frames[0][:1] == b"\x01":
            self.replies.welcome(frames[0][1:])

    def _on_beat(self, frames: list[bytes]) -> None:
        if self._dead or sum(map(len, frames)) > wire.LONGEST_BEAT:
            return
        if self.state in (GateState.OPEN, GateState.DRAINING):
            self._beats.append(frames)
            wire.send(self._back["hb"], frames)
        else:
            wire.send(self._front["hb"], frames)

    # -- from the kernel

    def _on_returned_beat(self, frames: list[bytes]) -> None:
        if frames in self._beats:
            self._beats.remove(frames)
            wire.send(self._front["hb"], frames)

    def _on_reply(self, channel: str, frames: list[bytes]) -> None:
        _, rest = wire.split(frames)
        if self._internal.owns(rest[PARENT]):
            self._internal.replied(self._signer.deserialize(rest))
            return
        wire.send(self._front[channel], frames)
        parent = str(self._signer.unpack(rest[PARENT]).get("msg_id"))
        if channel != "stdin":
            self._reply_passed(parent, rest)
        elif self._signer.unpack(rest[HEADER]).get("msg_type") == "input_request":
            self.pending.input_requested(parent)

    def _reply_passed(self, msg_id: str, rest: list[bytes]) -> None:
        if (pending := self.pending.find(msg_id)) is None:
            return
        self._drain.note_progress()
        request = pending.request
        content: dict[str, Any] = {}
        if request.msg_type == "delete_subshell_request" or (request.stops and self._may_queue_cells()):
            content = self._signer.unpack(rest[CONTENT])
        if request.stops and content.get("status") == "error":
            self._abort(request.subshell_id)
        elif request.msg_type == "delete_subshell_request" and content.get("status") == "ok":
            self._pass_agent_requests(self.pending.drop_subshell(str(request.content.get("subshell_id"))))
        if request.msg_type == "execute_request":
            self._loop.pump(self._back["iopub"], _OUTPUTS)  # what it has requested may lie there unread
            self._pass_queueing_verbs(pending)
        self._completed(self.pending.replied(msg_id))

    def _may_queue_cells(self) -> bool:
        return self.state is GateState.DRAINING or bool(self._waiting_for_idle)

    def _pass_queueing_verbs(self, cell: PendingRequest) -> None:
        """Pass on what a cell has requested with its reply or its idle, if a verb comes between it and the next cell.

        A client that has the one may send the next cell before the other comes.
        """
        if _requests_queueing(cell):
            contents, cell.agent_requests = cell.agent_requests, []
            self._pass_contents(contents)

    def _abort(self, subshell_id: str | None) -> None:
        """Abort the queued executions, as the kernel does to those in its own queue when one fails.

        Requests that came before the error reply may still lie unread in the front socket, so that is read first.
        """
        self._loop.pump(self._front["shell"])
        for request in self.queue.remove(lambda r: r.msg_type == "execute_request" and r.subshell_id == subshell_id):
            self.replies.aborted(request)

    def _on_output(self, frames: list[bytes]) -> None:
        _, rest = wire.split(frames)
        header = rest[HEADER]
        # Most outputs are forwarded unread; a byte test finds the few that matter to the gate, and those are parsed.
        if b'"status"' in header:
            self._on_status(frames, rest)
        elif b'"iopub_welcome"' in header:
            self.replies.kernel_welcomed()  # it welcomes the gate; each client has a welcome of its own
        elif b'"' + AGENT_REQUEST.encode() + b'"' in header and self._handle_agent_request(rest):
            pass
        else:
            self._to_clients("iopub", frames, needed=False)

    def _on_status(self, frames: list[bytes], rest: list[bytes]) -> None:
        own = self._internal.owns(rest[PARENT])
        if not own:
            self._to_clients("iopub", frames)
        if self._nudging is not None:  # the kernel reads again
            self._end_nudge()
            self._expect_reading()
        msg_id = str(self._signer.unpack(rest[PARENT]).get("msg_id"))
        state = self._signer.unpack(rest[CONTENT]).get("execution_state")
        if own and state == "idle":
            self._internal.idled(msg_id, time.monotonic())
        elif not own and self.pending.find(msg_id) is not None:
            self._drain.note_progress()
            if state == "busy":
                self.pending.begun(msg_id)
            elif state == "idle":
                if (cell := self.pending.find(msg_id)) is not None and _requests_queueing(cell):
                    self._loop.pump(self._back["shell"], _OUTPUTS)  # its reply is first: it may abort what is queued
                    self._pass_queueing_verbs(cell)
                self._completed(self.pending.idled(msg_id))
                if self.pending:
                    self._expect_reading()
                self._settle_idle()  # also where the reply is late, or never comes

    def _handle_agent_request(self, rest: list[bytes]) -> bool:
        message = self._signer.deserialize(rest)  # checks the signature: this message makes the gate do something
        if message["msg_type"] != AGENT_REQUEST:
            return False
        cell = self.pending.find(str(message["parent_header"].get("msg_id")))
        if cell is None or message["content"].get("now"):
            self._notify(self._on_agent_request, {**message["content"], "requested": self.pending.agent_requests()})
        else:
            cell.agent_requests.append(message["content"])
        return True

    # -- pending requests

    def _completed(self, pending: PendingRequest | None) -> None:
        if pending is not None:
            if wakes(pending.request):
                self.last_activity = time.monotonic()
            self._dropped([pending])

    def _dropped(self, dropped: list[PendingRequest]) -> None:
        self._pass_agent_requests(dropped)
        self._settle_drain()

    def _pass_agent_requests(self, completed: list[PendingRequest]) -> None:
        self._pass_contents([content for pending in completed for content in pending.agent_requests])
        self._settle_idle()

    def _pass_contents(self, contents: list[dict[str, Any]]) -> None:
        # A client that has read the reply of the cell sends the next cell at once; the kernel must be gone then, and
        # that cell must not keep it.
        queueing = [content for content in contents if content.get("verb") in _QUEUEING_VERBS]
        was_open = self.state is GateState.OPEN
        if was_open and queueing:
            self.state = GateState.DRAINING
        failed = [content for content in contents if self._notify(self._on_agent_request, content) is not None]
        if was_open and queueing and all(content in failed for content in queueing):
            self._release_abandoned()

    def _fail_idle(self, reason: str) -> None:
        futures, self._waiting_for_idle = self._waiting_for_idle, []
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(StateError(f"The wait for the kernel's cells has ended early: {reason}."))

    def _settle_idle(self) -> None:
        if not self._waiting_for_idle or self.pending.cells():
            return
        futures, self._waiting_for_idle = self._waiting_for_idle, []
        wanted = [future for future in futures if future.set_running_or_notify_cancel()]
        if wanted and self.state is GateState.OPEN:
            self.state = GateState.DRAINING  # as for a cell with a request: see `_pass_agent_requests`
        for future in wanted:
            future.set_result(None)

    def _settle_drain(self) -> None:
        if self._drain.settle():
            self.state = GateState.DRAINED

    def _send_internal(self, request: InternalRequest) -> None:
        wire.send(self._back[request.channel], self._internal.frames(request, time.monotonic()))
        if request.channel == "shell":
            self._expect_reading()


def _requests_queueing(cell: PendingRequest) -> bool:
    return any(content.get("verb") in _QUEUEING_VERBS for content in cell.agent_requests)


def _is_risky(request: Request) -> bool:
    """Return whether it is a cell whose first line is `RISKY`, as `agent.unmarked` finds it."""
    code = request.content.get("code") if request.msg_type == "execute_request" else None
    return isinstance(code, str) and code.strip().partition("\n")[0].split() == [RISKY]


def _sender(request: Request) -> tuple[bytes | str | None, ...]:
    """Return what tells the client and the subshell of an execution, which stop together."""
    return *request.idents, request.subshell_id
