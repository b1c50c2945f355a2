"""Watches the kernels: their traces and states, told on worker threads, become a story on the event loop.

Events, metrics, the log and the REST documents all read this story; none of them listens to a kernel by itself.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from logging import Logger
from typing import Protocol

from tornado.ioloop import IOLoop

from .. import errors
from ..cuda.driver import CudaState
from ..kernel.provisioner import GpuCkptProvisioner
from ..lifecycle.driver import Lifecycle
from ..lifecycle.machine import PLANS, Plan, State, Step
from ..trace import StepEvent
from .progress import Progress, Sizes

#: What is being done to a kernel in each state that does not last.
VERBS = {
    State.SUSPENDING: "suspend",
    State.RESUMING: "resume",
    State.DUMPING: "checkpoint",
    State.RESTORING: "restore",
}

#: Seconds between two looks at a step under way, and the part of the verb that is worth an event.
PULSE = 0.25
NEWS = 0.005

_ERRORS: dict[str, type[errors.GpuCkptError]] = {
    error.code: error
    for _, error in inspect.getmembers(errors, inspect.isclass)
    if issubclass(error, errors.GpuCkptError)
}

_LEFT = {
    State.RUNNING: "the kernel runs on",
    State.SUSPENDED: "the kernel is suspended, its device memory is kept in host memory",
    State.CHECKPOINTED: "the image is kept",
    State.DEAD: "the kernel is gone",
}


@dataclass(frozen=True)
class Changed:
    """A kernel has another state.  ``at`` is seconds since the epoch, ``seconds`` what it spent in the one before."""

    kernel_id: str
    state: State
    previous: State | None
    at: float
    seconds: float
    image: str | None
    device_bytes: int
    code: str | None


@dataclass(frozen=True)
class Stepped:
    """An edge or a moment of a step, and how far the verb is (``fraction``, 0 to 1)."""

    event: StepEvent
    verb: str
    fraction: float
    expected_bytes: int
    expected_seconds: float


@dataclass(frozen=True)
class Failed:
    """A verb failed and everything it did was undone; ``left`` says what there is."""

    kernel_id: str
    verb: str
    step: str
    code: str
    hint: str
    left: str
    at: float

    @property
    def message(self) -> str:
        """What the code means.  The error's own sentence, which may name what is the user's, goes to who asked."""
        return (inspect.getdoc(_ERRORS.get(self.code, errors.GpuCkptError)) or "").partition("\n")[0]


@dataclass(frozen=True)
class Away:
    """Device memory that left the GPUs: bytes by UUID, since when (seconds since the epoch)."""

    since: float
    device: Mapping[str, int]

    def gpu_seconds(self, until: float) -> float:
        """Time given back to others, counted for each GPU."""
        return len(self.device) * max(0.0, until - self.since)


class Listener(Protocol):
    """Called on the event loop, in the order in which things happened."""

    def changed(self, change: Changed) -> None:
        """A kernel has another state."""

    def stepped(self, step: Stepped) -> None:
        """A step started, goes on, was completed, or failed."""

    def failed(self, failure: Failed) -> None:
        """A verb failed."""


class Watcher:
    """The kernels being watched, by id.  Belongs to one event loop; `Watched` brings everything there."""

    def __init__(self, loop: IOLoop, log: Logger) -> None:
        self.loop = loop
        self.log = log
        self.listeners: list[Listener] = []
        #: Called with a kernel's id and until when it is protected (seconds since the epoch), or None.
        self.on_protected: list[Callable[[str, float | None], None]] = []
        self.kernels: dict[str, Watched] = {}
        #: GPU-seconds of absences that have ended.
        self.given_back = 0.0
        self._pulsing = False

    def follow(self, kernel_id: str, provisioner: GpuCkptProvisioner) -> Watched:
        """Watch a kernel from now on, through all its restarts."""
        watched = self.kernels.get(kernel_id)
        if watched is None or watched.provisioner is not provisioner:
            if watched is not None:
                self.forget(kernel_id)
            watched = self.kernels[kernel_id] = Watched(self, kernel_id, provisioner)
        return watched

    def forget(self, kernel_id: str) -> None:
        """The kernel was shut down."""
        if (watched := self.kernels.pop(kernel_id, None)) is not None:
            watched.end()

    def keep(self, provisioners: Mapping[str, GpuCkptProvisioner]) -> None:
        """Watch these kernels and no others."""
        for gone in set(self.kernels) - set(provisioners):
            self.forget(gone)
        for kernel_id, provisioner in provisioners.items():
            self.follow(kernel_id, provisioner)

    def close(self) -> None:
        """Watch nothing any more."""
        self.keep({})

    def step_began(self) -> None:
        """A kernel is in the middle of a step: look how it goes on, until there is none any more."""
        if not self._pulsing:
            self._pulsing = True
            self.loop.add_callback(self._pulse)

    async def _pulse(self) -> None:
        while any(watched.step is not None for watched in self.kernels.values()):
            await asyncio.sleep(PULSE)
            for watched in list(self.kernels.values()):
                try:
                    await watched.pulse()
                except Exception:  # the next look may see more
                    self.log.exception("The progress of a kernel could not be told.")
        self._pulsing = False

    def gpu_seconds(self, until: float) -> float:
        """GPU time given back to others since this server's start, by absences that ended and those that last."""
        away = (watched.away for watched in self.kernels.values() if watched.away is not None)
        return self.given_back + sum(absence.gpu_seconds(until) for absence in away)

    def tell(self, call: Callable[[Listener], None]) -> None:
        """Tell every listener, whatever becomes of the telling of another."""
        for listener in self.listeners:
            try:
                call(listener)
            except Exception:
                self.log.exception("A listener to the kernels' states failed.")


class Watched:
    """One kernel's story.  Attributes are the event loop's; `_hear_*` run on the kernel's worker thread."""

    def __init__(self, watcher: Watcher, kernel_id: str, provisioner: GpuCkptProvisioner) -> None:
        self.watcher = watcher
        self.kernel_id = kernel_id
        self.provisioner = provisioner
        self.state: State | None = None
        self.since = time.time()
        self.progress: Progress | None = None
        #: The step under way: the event of its start.
        self.step: StepEvent | None = None
        self.away: Away | None = None
        self.failure: Failed | None = None
        self._sizes = Sizes()
        self._broken: StepEvent | None = None
        self._told = 0.0
        provisioner.sinks.append(self._hear_step)
        provisioner.on_state.append(self._hear_state)
        provisioner.on_protected.append(self._hear_protection)
        if provisioner.lifecycle is not None:
            self._hear_state(provisioner.lifecycle.state, measure=False)  # the event loop has no time for NVML

    def end(self) -> None:
        """Stop listening."""
        self.step = None
        self.provisioner.sinks.remove(self._hear_step)
        self.provisioner.on_state.remove(self._hear_state)
        self.provisioner.on_protected.remove(self._hear_protection)
        self._return(time.time())

    # -- on the worker's thread.  A listener that raises would make the step fail, so these never do.

    def _hear_step(self, event: StepEvent) -> None:
        self._post(lambda: self._take_step(event))

    def _hear_protection(self, until: float | None) -> None:
        def tell() -> None:
            for told in self.watcher.on_protected:
                told(self.kernel_id, until)

        self._post(tell)

    def _hear_state(self, state: State, measure: bool = True) -> None:
        at, lifecycle = time.time(), self.provisioner.lifecycle
        sizes = self._measure(lifecycle) if measure and state in VERBS and lifecycle is not None else Sizes()
        image = lifecycle.image if lifecycle is not None else None
        known = Away(image.manifest.created, image.manifest.device_bytes) if image is not None else None
        self._post(lambda: self._take_state(state, at, sizes, image.id if image else None, known))

    def _measure(self, lifecycle: Lifecycle) -> Sizes:
        """What the verb that begins will have to move."""
        try:
            if lifecycle.image is not None:
                manifest = lifecycle.image.manifest
                return Sizes(device=manifest.device_bytes, image=manifest.bytes)
            if lifecycle.capsule is None:
                return Sizes()
            return Sizes(host=lifecycle.resident(), device=device_bytes(lifecycle))
        except Exception as error:  # an estimate is not worth a checkpoint
            self.watcher.log.debug("Kernel %s could not be measured: %s", self.kernel_id, type(error).__name__)
            return Sizes()

    def _post(self, call: Callable[[], None]) -> None:
        # In order, from any thread, and no error when the loop is closed: a kernel may end after its server did.
        self.watcher.loop.add_callback(call)

    # -- on the event loop

    def _take_state(self, state: State, at: float, sizes: Sizes, image: str | None, known: Away | None) -> None:
        previous, began, progress = self.state, self.since, self.progress
        if state is previous:
            return
        self.state, self.since = state, at
        if state in VERBS:
            plan = _plan(previous, state)
            if state is State.RESUMING and self.away is not None:
                sizes = Sizes(device=dict(self.away.device))
            self._sizes, self._broken = sizes, None
            self.progress = Progress(plan, sizes) if plan is not None else None
            if known is not None and self.away is None and known.device:
                self.away = known
        else:
            self.progress = self.step = None
            if state is State.CHECKPOINTED and self.away is None and known is not None and known.device:
                self.away = known
            elif state is State.DEAD:
                self._return(at)
        code = None
        if progress is not None and state not in VERBS and previous in VERBS:
            code = self._settle(progress.plan, previous, state, at)
        on_device = sum((self.away.device if self.away else self._sizes.device).values())
        change = Changed(self.kernel_id, state, previous, at, max(0.0, at - began), image, on_device, code)
        self.watcher.tell(lambda listener: listener.changed(change))
        if code is not None and (failure := self.failure) is not None:
            self.watcher.tell(lambda listener: listener.failed(failure))

    def _settle(self, plan: Plan, via: State | None, state: State, at: float) -> str | None:
        """A verb ended; the code of what made it fail, if it did."""
        broken, self._broken = self._broken, None
        if state is plan.to:
            self.failure = None
            return None
        code = "KERNEL_LOST" if state is State.DEAD else (broken.code if broken else None) or "INTERNAL"
        hint = _ERRORS.get(code, errors.GpuCkptError).default_hint
        verb = VERBS[via] if via else ""
        step = broken.step if broken else ""
        self.failure = Failed(self.kernel_id, verb, step, code, hint, _LEFT.get(state, state.value), at)
        return code

    def _take_step(self, event: StepEvent) -> None:
        step, progress = Step(event.step), self.progress
        self.step = event if event.kind == "started" and progress is not None and self._broken is None else None
        if self.step is not None:
            self.watcher.step_began()
        if event.kind == "completed":
            if step is Step.CUDA_SUSPEND and event.bytes:
                self.away = Away(event.at, self._sizes.device or {"unknown": event.bytes})
            elif step is Step.CUDA_RESUME and event.bytes:
                self._return(event.at)
            if progress is not None and self._broken is None:
                progress.done(step)
        elif event.kind == "failed" and self._broken is None:
            self._broken = event
        self._tell_step(event)

    async def pulse(self) -> None:
        """Called now and then while a step is under way: tell how far it is, if that is news."""
        began, progress, lifecycle = self.step, self.progress, self.provisioner.lifecycle
        if began is None or progress is None:
            return
        step, written = Step(began.step), None
        if step is Step.DUMP and lifecycle is not None:
            written = await asyncio.to_thread(lifecycle.written)
            if self.step is not began:
                return  # it ended while we looked
        now = time.time()
        seconds = max(0.0, now - began.at)
        progress.under_way(step, seconds, written)
        if progress.fraction - self._told >= NEWS:
            self._tell_step(replace(began, kind="running", at=now, seconds=seconds, bytes=written))

    def _tell_step(self, event: StepEvent) -> None:
        step, progress = Step(event.step), self.progress
        self._told = progress.fraction if progress else 0.0
        told = Stepped(
            event,
            verb=VERBS.get(self.state, "") if self.state else "",
            fraction=self._told,
            expected_bytes=progress.bytes.get(step, 0) if progress else 0,
            expected_seconds=progress.seconds.get(step, 0.0) if progress else 0.0,
        )
        self.watcher.tell(lambda listener: listener.stepped(told))

    def _return(self, at: float) -> None:
        """Its device memory is on the GPU again, or nobody will want it back."""
        if self.away is not None:
            self.watcher.given_back += self.away.gpu_seconds(at)
            self.away = None


def device_bytes(lifecycle: Lifecycle) -> dict[str, int]:
    """Device memory a kernel with a process holds now, in bytes by GPU UUID.  Asks NVML: not for the event loop.

    Raises `CudaError` where the driver or NVML does not answer.
    """
    capsule, engine = lifecycle.capsule, lifecycle.engine
    if capsule is None or engine.cuda.state(capsule.host_pid) is not CudaState.RUNNING:
        return {}
    return engine.gpus.used_by(capsule.host_pid)


def _plan(before: State | None, via: State) -> Plan | None:
    """The plan that leads through ``via``; any such plan, if we came too late to see where it began."""
    return next(_plans(before, via), None) or next(_plans(None, via), None)


def _plans(before: State | None, via: State) -> Iterator[Plan]:
    for (state, _), plan in PLANS.items():
        if plan is not None and plan.via is via and before in (None, state):
            yield plan
