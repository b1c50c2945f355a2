"""The gate: clients connect to it as if it were the kernel; the kernel comes and goes behind it.

The gate is bound where the `KernelManager` said that the kernel would be, and connected to where the kernel really is.
While the kernel is there it forwards; while the kernel is suspended or checkpointed it queues what clients send,
answers what it can answer itself, and has the kernel woken by requests that need it (`wake_rules`).  Frames pass
untouched: signatures are those of the two ends.

Each gate has one thread; all gates share one ZMQ context.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..errors import GateError, StateError
from .loop import Loop
from .router import AGENT_REQUEST, GateState, Router, UnderWay

__all__ = ["AGENT_REQUEST", "Gate", "GateState", "UnderWay"]

P = ParamSpec("P")
T = TypeVar("T")

# Seconds for a call that only needs the thread's attention; the thread never blocks, so this passes only if the process
# is starved.
_PROMPT = 10.0


def _verb(method: Callable[Concatenate[Router, P], T]) -> Callable[Concatenate[Gate, P], T]:
    """Return ``method`` as a verb of the gate: called from any thread, run on the gate's."""

    @functools.wraps(method)
    def verb(gate: Gate, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return gate._call(lambda router: method(router, *args, **kwargs))

    return verb


def _waiting_verb(
    method: Callable[Concatenate[Router, P], tuple[Future[T], float]],
) -> Callable[Concatenate[Gate, P], T]:
    """The same for a ``method`` that returns a future and the seconds within which the gate's thread settles it."""

    @functools.wraps(method)
    def verb(gate: Gate, /, *args: P.args, **kwargs: P.kwargs) -> T:
        future, seconds = gate._call(lambda router: method(router, *args, **kwargs))
        return _result(future, seconds + _PROMPT)

    return verb


def _verb_if_running(method: Callable[Concatenate[Router, P], None]) -> Callable[Concatenate[Gate, P], None]:
    """The same for a ``method`` that a gate that was stopped, or has failed, has no need of."""
    call = _verb(method)

    @functools.wraps(method)
    def verb(gate: Gate, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(gate, *args, **kwargs)
        except GateError:
            if gate._loop.ended is None:
                raise

    return verb


def _result(future: Future[T], seconds: float) -> T:
    try:
        return future.result(seconds)
    except FutureTimeout as error:
        raise GateError(f"The gate's thread did not answer within {seconds:g} s.") from error


class Gate:
    """A proxy between the clients and one kernel.

    Parameters
    ----------
    front, back:
        Connection infos as in a connection file (with ``curve_publickey`` and ``curve_secretkey`` where CURVE is
        wanted).  Clients connect to ``front``; the kernel is at ``back``.  Both have the same ``key``, but for a branch
        until it has its own (`expect_key`).
    on_wake:
        Called with a message type, once a sleep, when a message arrives or lies waiting that wakes the kernel.
    on_agent_request:
        Called with the content of the kernel's ``gpu_ckpt_request``: at once where it says ``now`` (answer by `request`
        on the control channel), with what cells that run have ``requested`` before.  Else after the reply and the idle
        of the cell that sent it were forwarded; after the first of them for a verb such as ``suspend``, ``checkpoint``
        or ``back``, for which requests are queued from there on: run the verb, or call `release`.  The gate itself
        requests ``save_before_cell`` of a risky ``cell``, named by its message id: call `risky_saved`.  Also called
        with ``{"verb": "shutdown", "restart": bool}`` when the gate answered a ``shutdown_request`` for a kernel that
        is away, and with ``{"verb": "interrupt"}`` for each ``interrupt_request``.  Both are called on the gate's
        thread; they must not block, and must not call the gate.
    on_work:
        Called with the type of each client's request that is forwarded and does not only query; as these.
    kernel_id:
        For topics, the thread's name and the gate's identity at the kernel.
    identity:
        `identity` of an earlier gate of this kernel: this one can then answer ``kernel_info_request`` for a kernel that
        it has never heard, and has the name at the kernel from which that one's requests came.
    stable_name:
        Whether the gate has the same name at the kernel for each connection.  Kernels that do not set ROUTER_HANDOVER
        need another one for each: they ignore a connection whose name an earlier one had, as long as they have not
        noticed the end of that.
    may_nudge:
        Whether the kernel can accept one connection more.  Called on the gate's thread; must not block.
    keeps_queueing:
        Whether requests stay queued at a `release`, because a verb follows that discards what they would do.  Called
        on the gate's thread; must not block.

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
        on_work: Callable[[str], None] = lambda msg_type: None,
        kernel_id: str,
        log: logging.Logger | logging.LoggerAdapter[Any] | None = None,
        identity: Mapping[str, Any] | None = None,
        stable_name: bool = True,
        may_nudge: Callable[[], bool] = lambda: True,
        keeps_queueing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._log = log or logging.getLogger(__name__)
        self._loop = Loop(self._log)
        self._router = Router(
            front,
            back,
            loop=self._loop,
            on_wake=on_wake,
            on_agent_request=on_agent_request,
            on_work=on_work,
            kernel_id=kernel_id,
            log=self._log,
            stable_name=stable_name,
            may_nudge=may_nudge,
            keeps_queueing=keeps_queueing,
        )
        if identity is not None:
            self._router.replies.learn(identity)
            if identity.get("welcomes"):
                self._router.replies.kernel_welcomed()
            self._router.name = str(identity.get("name") or self._router.name)
            self._router.notices += identity.get("notices") or ()
        self._thread = threading.Thread(target=self._run, name=f"gate-{kernel_id}", daemon=True)

    # -- verbs, for every thread; described at the router's methods

    open = _waiting_verb(Router.open)
    release = _verb(Router.release)
    risky_saved = _verb_if_running(Router.risky_saved)
    drain = _waiting_verb(Router.drain)
    close = _verb(Router.close)
    sleep = _verb(Router.sleep)
    fail = _verb(Router.fail)
    interrupt = _verb(Router.interrupt)
    request = _waiting_verb(Router.request)
    prompt = _waiting_verb(Router.prompt)
    cancel_prompt = _verb_if_running(Router.cancel_prompt)
    publish = _verb(Router.publish)
    notify = _verb(Router.notify)
    print_notice = _verb(Router.print_notice)
    kernel_died = _verb_if_running(Router.kernel_died)
    rebind_kernel = _verb(Router.rebind_kernel)
    expect_key = _verb(Router.expect_key)
    follow_session = _verb(Router.follow_session)

    def when_idle(self) -> Future[None]:
        """Return a future that is settled once no cell runs or waits in the kernel; see `Router.when_idle`.

        Never blocks.  The future fails with `GateError` if the gate is stopped.
        """

        def done(settled: Future[None]) -> None:
            if settled.cancelled():
                with contextlib.suppress(GateError):  # it was stopped
                    self._loop.submit(self._router.forget_cancelled, Future())

        future: Future[None] = Future()
        future.add_done_callback(done)
        self._loop.submit(lambda: self._router.when_idle(future), future)
        return future

    def start(self) -> None:
        """Bind the front and start the thread; requests are queued until `open` and `release`.

        *After failure* nothing is bound.  Raises `GateError` with the address if one is taken.
        """
        if self._thread.ident is not None:
            raise StateError("The gate was started already.")
        self._loop.begin()
        try:
            self._router.bind()
        except BaseException as error:
            self._loop.end(GateError(f"The gate could not be started: {error}"))
            raise
        try:
            # Sockets may change threads across a full fence, and starting a thread is one.
            self._thread.start()
        except RuntimeError as error:  # there are no more
            self._router.shut("the gate could not be started")
            self._loop.end(GateError(f"The gate could not be started: {error}"))
            raise

    def stop(self) -> None:
        """Unbind and end the thread.  Does nothing if that was done.  Raises `GateError` if the thread does not end."""
        if self._loop.ended is not None:
            return
        self._loop.stop()
        self._thread.join(_PROMPT)
        if self._thread.is_alive():
            raise GateError("The gate's thread does not end.")

    # -- state

    @property
    def state(self) -> GateState:
        """One of ``closed``, ``open``, ``draining``, ``drained``, ``asleep``; compares equal to these strings."""
        return self._router.state

    @property
    def last_activity(self) -> float:
        """The time of the last start or end of a client's request, `time.monotonic` seconds; queries do not count."""
        return self._router.last_activity

    @property
    def queries(self) -> int:
        """Number of requests forwarded so far that only query: pages and monitors send them by themselves."""
        return self._router.queries

    @property
    def queued(self) -> int:
        """Number of requests that wait for the kernel."""
        return len(self._router.queue)

    @property
    def pending(self) -> list[str]:
        """Types of the requests pending in the kernel, oldest first."""
        return self._call(lambda router: router.pending.types())

    @property
    def working(self) -> bool:
        """Return whether the kernel runs a client's request; queries do not count."""
        return self._call(lambda router: router.pending.working())

    @property
    def identity(self) -> dict[str, Any] | None:
        """JSON for the ``identity`` of a later `Gate`; None if the kernel was never heard.

        The kernel's session id and ``kernel_info``, whether it sends ``iopub_welcome``, the gate's name, the notices
        that no cell has shown.
        """
        return self._call(lambda router: router.identity)

    @property
    def under_way(self) -> UnderWay:
        """Clients' requests that the kernel has not finished."""

        def read(router: Router) -> UnderWay:
            pending = router.pending
            return UnderWay(pending.cells(), pending.other_types(), pending.awaits_input(), pending.ending())

        return self._call(read)

    # -- the thread

    def _call(self, call: Callable[[Router], T]) -> T:
        if self._thread is threading.current_thread():
            raise GateError("The gate was called from its own callback, which would wait for itself.")
        future: Future[T] = Future()
        self._loop.submit(lambda: future.set_result(call(self._router)), future)
        return _result(future, _PROMPT)

    def _run(self) -> None:
        reason = "the gate was stopped"
        try:
            self._router.run()
        except BaseException as error:
            reason = "the gate's thread failed"
            self._log.critical("gate: the thread failed: %s", type(error).__name__, exc_info=True)
        try:
            self._router.shut(reason)
        except Exception:
            self._log.exception("gate: the sockets could not be closed")
        self._loop.end(GateError(f"The call was cancelled: {reason}."))
