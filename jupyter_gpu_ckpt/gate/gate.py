"""The gate: clients connect to it as if it were the kernel; the kernel comes and goes behind it.

The gate is bound where the `KernelManager` said that the kernel would be, and connected to where the kernel really is.
While the kernel is there it forwards; while the kernel is suspended or checkpointed it keeps what clients send, answers
what it can answer itself, and has the kernel woken when a user wants something of it (see `wake`).  Frames pass
untouched: signatures are those of the two ends.

One thread a gate, one ZMQ context for all of them.  `lifecycle` calls the verbs below from its own thread; each brings
a call to the gate's thread and waits for it with a deadline.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import zmq

from ..errors import GateError, GpuCkptError, StateError
from . import wire
from .loop import Loop
from .router import AGENT_REQUEST, GateState, Router, UnderWay

__all__ = ["AGENT_REQUEST", "Gate", "GateState", "UnderWay"]

T = TypeVar("T")

# A call that needs only the thread's attention; the thread never blocks, so this passes only if the process is starved.
_PROMPT = 10.0


class Gate:
    """A proxy between the clients and one kernel.

    Parameters
    ----------
    front, back:
        Connection infos as in a connection file (``transport``, ``ip``, ``key``, ``signature_scheme``, the five ports,
        and ``curve_publickey`` and ``curve_secretkey`` where CURVE is wanted).  Clients connect to ``front``; the
        kernel is at ``back``.  Both have the same ``key``.
    on_wake:
        Called with a message type on the gate's thread, once a sleep, when a message arrives or lies waiting that wakes
        the kernel.  Must not block, and must not call the gate.
    on_agent_request:
        Called with the content of the kernel's ``gpu_ckpt_request`` on the gate's thread: at once where it says ``now``
        (answer by `request` on the control channel), else after the reply and the idle of the cell that sent it were
        forwarded.  From there on requests are queued if the verb is ``suspend`` or ``checkpoint``: run the verb, or
        call `release`.  Also called with ``{"verb": "shutdown", "restart": bool}`` when the gate answered a
        ``shutdown_request`` for a kernel that is away.  Must not block, and must not call the gate.
    kernel_id:
        For topics, the thread's name and the gate's identity at the kernel.
    identity:
        What `identity` of an earlier gate of this kernel was: a kernel adopted asleep can then answer
        ``kernel_info_request`` before it was ever heard.

    Errors: verbs raise `StateError` if they make no sense in the present state, `GateError` if ZMQ failed or the gate's
    thread does not run.  Times are in seconds.
    """

    def __init__(
        self,
        front: Mapping[str, Any],
        back: Mapping[str, Any],
        *,
        on_wake: Callable[[str], None],
        on_agent_request: Callable[[dict[str, Any]], None],
        kernel_id: str,
        log: logging.Logger | logging.LoggerAdapter[Any] | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self._front, self._back = dict(front), dict(back)
        self._on_wake, self._on_agent_request, self._kernel_id = on_wake, on_agent_request, kernel_id
        self._log = log or logging.getLogger(__name__)
        self._known = identity
        self._router: Router | None = None
        self._thread: threading.Thread | None = None
        self._loop: Loop | None = None
        self._broken: BaseException | None = None
        self._stopped = False
        self._waiting: deque[Future[Any]] = deque()
        self._lock = threading.Lock()

    # -- verbs ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bind the front and start the thread; messages are kept until `open` and `release`.

        *After failure* nothing is bound.  Raises `GateError` with the address if one is taken.
        """
        if self._thread is not None:
            raise StateError("The gate was started already.")
        sockets = wire.bind(self._front)
        loop = Loop(self._log)
        try:
            self._router = Router(
                self._front,
                self._back,
                sockets=sockets,
                loop=loop,
                on_wake=self._on_wake,
                on_agent_request=self._on_agent_request,
                kernel_id=self._kernel_id,
                log=self._log,
            )
            if self._known is not None:
                self._router.replies.learn(self._known)
        except BaseException:
            wire.close(sockets)
            loop.dispose()
            raise
        self._loop = loop
        # Sockets may change threads across a full fence, and starting a thread is one.
        self._thread = threading.Thread(target=self._run, name=f"gate-{self._kernel_id}", daemon=True)
        self._thread.start()

    def open(self, timeout: float) -> None:
        """Connect to the kernel and wait until an answer came back over iopub; what is kept stays kept.

        *After failure* the connection is closed again and the state is as before.  Raises `KernelSilent`.
        """
        self._await(lambda router, future: router.open(future, timeout), timeout)

    def release(self) -> None:
        """Forward what was kept, in order, and keep no more."""
        self._do(lambda router: router.release())

    def drain(self, timeout: float) -> None:
        """Keep new requests from here on; wait until those forwarded before have their replies and idles.

        Interrupts, shutdowns and answers to ``input()`` still pass.  *After failure* the gate goes on keeping: call
        `release`. Raises `KernelBusy` with the message types under way.
        """
        self._await(lambda router, future: router.drain(future, timeout), timeout)

    def when_idle(self) -> Future[None]:
        """Settled once no cell runs or waits in the kernel; at that moment new requests begin to be kept.

        Whoever waits does a verb then, or calls `release`.  Never blocks.  The future may be cancelled; one that was
        settled before it could be has begun the keeping.  It fails with `StateError` if the kernel ends or is
        restarted before, with `GateError` if the gate does.
        """
        future: Future[None] = self._submit(lambda router, future: router.when_idle(future))
        future.add_done_callback(self._forget)
        return future

    def close(self) -> None:
        """Disconnect from the kernel and go on keeping.

        libzmq closes the connections some milliseconds later, and so does the kernel.
        """
        self._do(lambda router: router.close())

    def sleep(self) -> None:
        """The kernel is suspended or checkpointed now: have it woken by the next message that wakes, or one kept."""
        self._do(lambda router: router.sleep())

    def fail(self, error: GpuCkptError) -> None:
        """A wake failed: answer each execution that waits by ``error``; other messages stay, and so does the sleep."""
        self._do(lambda router: router.fail(error))

    def interrupt(self) -> bool:
        """Answer each execution that waits for the kernel as interrupted, whether a wake is under way or not.

        False, and nothing is done, when the gate is open: then the kernel itself is to be interrupted.
        """
        return self._do(lambda router: router.interrupt())

    def request(
        self, msg_type: str, content: Mapping[str, Any], timeout: float, channel: str = "shell"
    ) -> dict[str, Any]:
        """Send the kernel a request of the gate's own, also while clients' requests are queued; the reply's content.

        Clients do not see it.  On the ``control`` channel the kernel answers while a cell runs.  Raises `KernelSilent`.
        """
        return self._await(
            lambda router, future: router.request(future, msg_type, dict(content), timeout, channel), timeout
        )

    def prompt(self, text: str, timeout: float) -> str | None:
        """Ask the user whose cell waits for the kernel a question; None when nobody can be asked, or nobody answers."""
        try:
            return self._await(lambda router, future: router.prompt(future, text), timeout)
        except GateError:
            self.cancel_prompt()
            return None

    def cancel_prompt(self) -> None:
        """Whoever waits in `prompt` gets no answer.  Does nothing if the gate was stopped."""
        with contextlib.suppress(GateError):
            self._do(lambda router: router.cancel_prompt())

    def publish(self, msg_type: str, content: Mapping[str, Any]) -> None:
        """Send clients an output in the kernel's name, also while the kernel is away."""
        self._do(lambda router: router.publish(msg_type, content))

    def kernel_died(self) -> None:
        """The kernel's process is gone: forget what is under way and what was kept, disconnect, echo no heartbeat.

        Messages that come later are kept for the next kernel.  Does nothing if the gate was stopped.
        """
        if self._stopped:
            return
        self._do(lambda router: router.kernel_died())

    def rebind_kernel(self, back: Mapping[str, Any]) -> None:
        """The kernel is another process at ``back``: forget what is under way and what is known of the old one."""
        self._do(lambda router: router.rebind_kernel(back))

    def stop(self) -> None:
        """Unbind and end the thread.  Does nothing if that was done.  Raises `GateError` if the thread does not end."""
        thread, loop = self._thread, self._loop
        if thread is None or loop is None or not thread.is_alive():
            return
        try:
            self._do(lambda _: loop.stop())
        except GateError:
            if self._broken is None:
                raise  # else the thread is ending already, for a reason that was logged
        self._stopped = True
        thread.join(_PROMPT)
        if thread.is_alive():
            raise GateError("The gate's thread does not end.")

    # -- what it is doing ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> GateState:
        """One of ``closed``, ``open``, ``draining``, ``drained``, ``asleep``; compares equal to these strings."""
        return self._router.state if self._router else GateState.CLOSED

    @property
    def last_activity(self) -> float:
        """When a client last had something run (or that ended), `time.monotonic` seconds; looking does not count."""
        return self._router.last_activity if self._router else time.monotonic()

    @property
    def queries(self) -> int:
        """How many requests the kernel was given so far that only ask: what pages and monitors do by themselves."""
        return self._router.queries if self._router else 0

    @property
    def queued(self) -> int:
        """How many messages are kept."""
        return len(self._router.queue) if self._router else 0

    @property
    def pending(self) -> list[str]:
        """The types of the requests under way in the kernel, oldest first."""
        return self._do(lambda router: router.pending.types())

    @property
    def working(self) -> bool:
        """Whether the kernel is at work on what a client had it do; its answers to mere questions do not count."""
        return self._do(lambda router: router.pending.working())

    @property
    def identity(self) -> dict[str, Any] | None:
        """Who the kernel said it is: JSON, for the ``identity`` of a later `Gate`; ``None`` until heard."""
        return self._do(lambda router: router.replies.identity)

    # -- to the thread and back ---------------------------------------------------------------------------------------

    @property
    def lag(self) -> int:
        """Bytes of outputs that the slowest reader is behind, at the last look."""
        return self._do(lambda router: router.readers.lag)

    @property
    def under_way(self) -> UnderWay:
        """What the kernel has not yet done of that which clients asked of it."""
        return self._do(lambda router: router.under_way())

    def _do(self, verb: Callable[[Router], T]) -> T:
        def at_once(router: Router, future: Future[T]) -> None:
            future.set_result(verb(router))

        return self._await(at_once, 0.0)

    def _await(self, verb: Callable[[Router, Future[T]], None], timeout: float) -> T:
        """Have ``verb`` run on the gate's thread and wait for its future.  The thread keeps the deadline itself."""
        if self._thread is threading.current_thread():
            raise GateError("The gate was called from its own callback, which would wait for itself.")
        future = self._submit(verb)
        try:
            return future.result(timeout + _PROMPT)
        except FutureTimeout as error:
            raise GateError(f"The gate's thread did not answer within {timeout + _PROMPT:g} s.") from error
        finally:
            self._forget(future)

    def _submit(self, verb: Callable[[Router, Future[T]], None]) -> Future[T]:
        """Have ``verb`` run on the gate's thread; its future."""
        future: Future[T] = Future()
        with self._lock:
            router, loop = self._router, self._loop
            if router is None or loop is None or self._thread is None or self._broken is not None:
                raise GateError("The gate does not run.") from self._broken
            self._waiting.append(future)
            loop.call(lambda: _perform(verb, router, future))
        return future

    def _forget(self, future: Future[Any]) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._waiting.remove(future)

    def _run(self) -> None:
        router = self._router
        assert router is not None and self._loop is not None
        reason = "the gate was stopped"
        try:
            router.run()
        except BaseException as error:
            reason = "the gate's thread failed"
            self._broken = error
            self._log.critical("gate: the thread failed: %s", type(error).__name__, exc_info=True)
        try:
            router.shut(reason)
        except Exception:
            self._log.exception("gate: the sockets could not be closed")
        with self._lock:
            self._broken = self._broken or GateError("The gate was stopped.")
            self._loop.dispose()
            waiting = list(self._waiting)
        for future in waiting:
            with contextlib.suppress(InvalidStateError):  # done, or cancelled
                future.set_exception(GateError(f"The call was given up: {reason}."))


def _perform(verb: Callable[[Router, Future[T]], None], router: Router, future: Future[T]) -> None:
    try:
        verb(router, future)
    except zmq.ZMQError as error:
        future.set_exception(GateError(f"ZMQ failed: {error.strerror}."))
    except Exception as error:
        future.set_exception(error)
