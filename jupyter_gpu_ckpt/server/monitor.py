"""Monitor the kernels: bring their states and steps from worker threads to listeners on the event loop."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from logging import Logger
from typing import Any

from tornado.ioloop import IOLoop

from .. import errors
from ..kernel.provisioner import GpuCkptProvisioner
from ..lifecycle import host_memory
from ..lifecycle.lifecycle import Lifecycle
from ..lifecycle.plans import PLANS, Plan, State, Step
from ..lifecycle.rates import RATES
from ..trace import StepEvent

#: The verb under way in each transitional state.
VERBS = {
    State.SUSPENDING: "suspend",
    State.YIELDING: "suspend",
    State.RESUMING: "resume",
    State.DUMPING: "checkpoint",
    State.SAVING: "save",
    State.RESTORING: "restore",
}

#: Seconds between two measurements of a step under way.
POLL_INTERVAL = 0.25
#: Growth of a verb's fraction that is worth an event.
MIN_PROGRESS = 0.005

#: How many of a kernel's failures are remembered.
FAILURES = 5

#: Seconds a step takes however little it moves: measured with a kernel without CUDA (docs/measurements.md).
_FLOORS = {Step.QUIESCE: 0.03, Step.DUMP: 0.08, Step.CRIU_RESTORE: 0.07, Step.CONNECT: 0.02, Step.END_PROCESS: 0.03}
_FLOOR = 0.005

_ERRORS = {
    each.code: each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, errors.GpuCkptError)
}

_LEFT = {
    State.RUNNING: "the kernel runs on",
    State.SUSPENDED: "the kernel is suspended, its device memory is kept in host memory",
    State.OFF_GPU: "the kernel runs on, its device memory is kept in host memory",
    State.CHECKPOINTED: "the image is kept",
    State.DEAD: "the kernel is gone",
}


@dataclass(frozen=True)
class Changed:
    """A change of state at ``at`` (seconds since the epoch), after ``seconds`` in the previous state."""

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
    """An event of a step, and the ``fraction`` (0 to 1) of the verb that is done."""

    event: StepEvent
    verb: str
    fraction: float
    expected_bytes: int
    expected_seconds: float


@dataclass(frozen=True)
class Failed:
    """A verb that failed and was undone; ``left`` names the state things were left in.

    ``code`` and ``hint`` are for everybody; ``error``, if it is known, may name private files (`for_owner`).
    """

    kernel_id: str
    verb: str
    step: str
    code: str
    hint: str
    left: str
    at: float
    error: errors.GpuCkptError | None = None

    def is_again(self, other: Failed) -> bool:
        """Return whether the same verb failed for the same reason."""
        return (self.verb, self.step, self.code) == (other.verb, other.step, other.code)

    def for_owner(self) -> dict[str, Any]:
        """Return the failure for JSON, with the error's own text, for those who may use the kernel."""
        shown = {name: getattr(self, name) for name in ("verb", "step", "code", "hint", "left", "at")}
        if self.error is not None:
            return {**shown, "message": self.error.message, "hint": self.error.hint, "details": self.error.details}
        meaning = inspect.getdoc(_ERRORS.get(self.code, errors.GpuCkptError)) or ""
        return {**shown, "message": meaning.partition("\n")[0], "details": {}}


@dataclass(frozen=True)
class SwappedOut:
    """Device memory that is off the GPUs since ``since`` (seconds since the epoch), in bytes by GPU UUID."""

    since: float
    device: Mapping[str, int]

    def gpu_seconds(self, until: float) -> float:
        """Seconds off the GPUs, counted for each GPU."""
        return len(self.device) * max(0.0, until - self.since)


@dataclass(frozen=True)
class Sizes:
    """Bytes known before a verb starts: resident host memory, device memory by GPU UUID, the image."""

    host: int = 0
    device: dict[str, int] = field(default_factory=dict)
    image: int = 0

    def moved_by(self, step: Step) -> int:
        """Return the bytes that ``step`` will move."""
        on_device = sum(self.device.values())
        if step in (Step.CUDA_SUSPEND, Step.CUDA_RESUME):
            return on_device
        if step in (Step.DUMP, Step.PUBLISH, Step.KEEP):
            return self.host + on_device
        return self.image if step is Step.CRIU_RESTORE else 0


class Progress:
    """One verb under way: how far it is, from bytes known beforehand and this host's measured rates.

    Inside a step the fraction moves by the bytes that were written to disk, else by the seconds that have passed.
    """

    def __init__(self, plan: Plan, sizes: Sizes) -> None:
        self.plan = plan
        self.bytes = {step: sizes.moved_by(step) for step in plan.steps}
        self.seconds = {step: _seconds(step, bytes) for step, bytes in self.bytes.items()}
        self._parts: dict[Step, float] = {}

    @property
    def fraction(self) -> float:
        """The part of the expected time that is done, 0 to 1.  Never decreases; 1 when all steps are done."""
        if all(self._parts.get(step) == 1.0 for step in self.seconds):
            return 1.0
        return sum(self.seconds[step] * part for step, part in self._parts.items()) / sum(self.seconds.values())

    def under_way(self, step: Step, seconds: float, bytes: int | None = None) -> None:
        """Record that a step has run for ``seconds`` and, if known, has moved ``bytes``."""
        if step in self.seconds:
            by_bytes = bytes is not None and self.bytes[step] > 0
            share = (bytes or 0) / self.bytes[step] if by_bytes else seconds / self.seconds[step]
            self._parts[step] = max(self._parts.get(step, 0.0), _damped(share))

    def done(self, step: Step) -> None:
        """Record that a step of the plan was completed; undo steps do not count."""
        if step in self.seconds:
            self._parts[step] = 1.0


class Listener:
    """Base of listeners: called on the event loop, in the order of events."""

    def changed(self, change: Changed) -> None: ...
    def stepped(self, step: Stepped) -> None: ...
    def failed(self, failure: Failed) -> None: ...
    def protected(self, kernel_id: str, until: float | None) -> None:
        """A protection was set, until some seconds since the epoch, or (None) ended."""

    def planned(self, kernel_id: str, verb: str | None, seconds: float | None) -> None:
        """The idle policy will run ``verb`` in so many seconds; None: nothing soon."""


class KernelMonitor:
    """The monitored kernels by id.  Belongs to one event loop."""

    def __init__(self, loop: IOLoop, log: Logger) -> None:
        self.loop = loop
        self.log = log
        self.listeners: list[Listener] = []
        self.kernels: dict[str, MonitoredKernel] = {}
        #: GPU-seconds of device memory that was swapped out and is back, or gone.
        self.freed_gpu_seconds = 0.0
        self._polling = False

    def add(self, kernel_id: str, provisioner: GpuCkptProvisioner) -> MonitoredKernel:
        """Monitor a kernel from now on, through all its restarts."""
        kernel = self.kernels.get(kernel_id)
        if kernel is None or kernel.provisioner is not provisioner:
            self.remove(kernel_id)
            kernel = self.kernels[kernel_id] = MonitoredKernel(self, kernel_id, provisioner)
        return kernel

    def remove(self, kernel_id: str) -> None:
        if (kernel := self.kernels.pop(kernel_id, None)) is not None:
            kernel.close()

    def keep_only(self, provisioners: Mapping[str, GpuCkptProvisioner]) -> None:
        for gone in set(self.kernels) - set(provisioners):
            self.remove(gone)
        for kernel_id, provisioner in provisioners.items():
            self.add(kernel_id, provisioner)

    def start_polling(self) -> None:
        """Poll the progress of steps until none is under way.  Called when a step has started."""
        if not self._polling:
            self._polling = True
            self.loop.add_callback(self._poll)

    async def _poll(self) -> None:
        while any(kernel.step is not None for kernel in self.kernels.values()):
            await asyncio.sleep(POLL_INTERVAL)
            for kernel in list(self.kernels.values()):
                try:
                    await kernel.poll()
                except Exception:  # the next measurement may succeed
                    self.log.exception("The progress of kernel %s could not be measured.", kernel.kernel_id)
        self._polling = False

    def gpu_seconds(self, until: float) -> float:
        """GPU-seconds for which kernels were off the GPUs since this server's start, those that still are included."""
        swapped_out = (kernel.swapped_out for kernel in self.kernels.values())
        return self.freed_gpu_seconds + sum(memory.gpu_seconds(until) for memory in swapped_out if memory)

    def notify(self, call: Callable[[Listener], None]) -> None:
        """Apply ``call`` to every listener; the error of one is logged and does not keep it from the others."""
        for listener in self.listeners:
            try:
                call(listener)
            except Exception:
                self.log.exception("A listener of the kernel monitor failed.")


class MonitoredKernel:
    """One kernel.  Attributes belong to the event loop; `_on_*` run on the kernel's worker thread."""

    def __init__(self, monitor: KernelMonitor, kernel_id: str, provisioner: GpuCkptProvisioner) -> None:
        self.monitor = monitor
        self.kernel_id = kernel_id
        self.provisioner = provisioner
        self.state: State | None = None
        self.since = time.time()
        self.progress: Progress | None = None
        #: The step under way: the event of its start.
        self.step: StepEvent | None = None
        self.swapped_out: SwappedOut | None = None
        self.failure: Failed | None = None
        #: The last failures of the kernel, newest first; of the same one several times in a row the last.
        self.failures: deque[Failed] = deque(maxlen=FAILURES)
        self._sizes = Sizes()
        self._failed_step: StepEvent | None = None
        self._error: errors.GpuCkptError | None = None
        self._reported_fraction = 0.0
        provisioner.sinks.append(self._on_step)
        provisioner.on_state.append(self._on_state)
        provisioner.on_protected.append(self._on_protection)
        if provisioner.lifecycle is not None:
            self._on_state(provisioner.lifecycle.state, measure=False)  # NVML would block the event loop

    def close(self) -> None:
        self.step = None
        self.provisioner.sinks.remove(self._on_step)
        self.provisioner.on_state.remove(self._on_state)
        self.provisioner.on_protected.remove(self._on_protection)
        self._clear_swapped_out(time.time())

    # -- on the worker's thread.  A listener that raises would make the step fail, so these never raise.

    def _on_step(self, event: StepEvent) -> None:
        lifecycle = self.provisioner.lifecycle
        error = lifecycle.trace.error if event.kind == "failed" and lifecycle is not None else None
        self._post(lambda: self._process_step(event, error))

    def _on_protection(self, until: float | None) -> None:
        self._post(lambda: self.monitor.notify(lambda listener: listener.protected(self.kernel_id, until)))

    def _on_state(self, state: State, measure: bool = True) -> None:
        at, lifecycle = time.time(), self.provisioner.lifecycle
        sizes = self._measure(lifecycle) if measure and state in VERBS and lifecycle else Sizes()
        image = lifecycle.image if lifecycle else None
        saved = SwappedOut(image.manifest.created, image.manifest.device_bytes) if image else None
        requested = lifecycle is not None and lifecycle.kernel.is_being_ended
        self._post(lambda: self._process_state(state, at, sizes, image.id if image else None, saved, requested))

    def _measure(self, lifecycle: Lifecycle) -> Sizes:
        """Measure the bytes that a verb which begins will move."""
        try:
            if lifecycle.image is not None:
                manifest = lifecycle.image.manifest
                return Sizes(device=manifest.device_bytes, image=manifest.bytes)
            if lifecycle.capsule is None:
                return Sizes()
            return Sizes(host=host_memory.resident(lifecycle.kernel), device=host_memory.device_bytes(lifecycle.kernel))
        except Exception as error:  # an estimate is not worth a checkpoint
            self.monitor.log.debug("Kernel %s could not be measured: %s", self.kernel_id, type(error).__name__)
            return Sizes()

    def _post(self, call: Callable[[], None]) -> None:
        # In order, from any thread, and without an error when the loop is closed: a kernel may end after its server.
        self.monitor.loop.add_callback(call)

    # -- on the event loop

    def _process_state(
        self,
        state: State,
        at: float,
        sizes: Sizes,
        image: str | None,
        saved: SwappedOut | None,
        requested: bool = False,
    ) -> None:
        """Take note of a new state.  ``requested``: the kernel is being ended, by a restart or a shutdown."""
        previous, began, progress = self.state, self.since, self.progress
        if state is previous:
            return
        self.state, self.since = state, at
        if state in VERBS:
            plan = _plan(previous, state)
            if state is State.RESUMING and self.swapped_out is not None:
                sizes = Sizes(device=dict(self.swapped_out.device))
            self._sizes, self._failed_step, self._error = sizes, None, None
            self.progress = Progress(plan, sizes) if plan is not None else None
        else:
            self.progress = self.step = None
        if state is State.DEAD:
            self._clear_swapped_out(at)
        elif (state in VERBS or state is State.CHECKPOINTED) and saved is not None and saved.device:
            self.swapped_out = self.swapped_out or saved
        code = None
        if progress is not None and state not in VERBS and previous in VERBS:
            code = self._settle(progress.plan, VERBS[previous], state, at, image)
        device = sum((self.swapped_out.device if self.swapped_out else self._sizes.device).values())
        if requested or previous is State.DEAD:  # that is no failure; and a restarted kernel has none of the last one
            self.failure, code = None, "KERNEL_LOST" if code is not None else None
            self.failures.clear()
        elif code is not None and self.failure is not None:
            if self.failures and self.failures[0].is_again(self.failure):
                self.failures.popleft()
            self.failures.appendleft(self.failure)
        change = Changed(self.kernel_id, state, previous, at, max(0.0, at - began), image, device, code)
        self.monitor.notify(lambda listener: listener.changed(change))
        if code is not None and (failure := self.failure) is not None:
            self.monitor.notify(lambda listener: listener.failed(failure))

    def _settle(self, plan: Plan, verb: str, state: State, at: float, image: str | None) -> str | None:
        """Record the end of a verb; return the error's code if it failed."""
        failed, self._failed_step = self._failed_step, None
        if state is plan.to:
            self.failure = None
            return None
        code = "KERNEL_LOST" if state is State.DEAD else (failed.code if failed else None) or "INTERNAL"
        hint = errors.GpuCkptError.filled(_ERRORS.get(code, errors.GpuCkptError).default_hint, image)
        step = failed.step if failed else ""
        error = self._error if self._error is not None and self._error.code == code else None
        self.failure = Failed(self.kernel_id, verb, step, code, hint, _LEFT.get(state, state.value), at, error)
        return code

    def _process_step(self, event: StepEvent, error: errors.GpuCkptError | None = None) -> None:
        step, progress = Step(event.step), self.progress
        forward = progress is not None and self._failed_step is None  # else an undo step
        self.step = event if event.kind == "started" and forward else None
        if self.step is not None:
            self.monitor.start_polling()
        if event.kind == "completed":
            if step is Step.CUDA_SUSPEND and event.bytes:
                self.swapped_out = SwappedOut(event.at, self._sizes.device or {"unknown": event.bytes})
            elif step is Step.CUDA_RESUME and event.bytes:
                self._clear_swapped_out(event.at)
            if progress is not None and forward:
                progress.done(step)
        elif event.kind == "failed" and self._failed_step is None:
            self._failed_step, self._error = event, error
        self._report_step(event)

    async def poll(self) -> None:
        """Measure the step under way, and report it if it has progressed enough."""
        started, progress, lifecycle = self.step, self.progress, self.provisioner.lifecycle
        if started is None or progress is None:
            return
        step, written = Step(started.step), None
        if step is Step.DUMP and lifecycle is not None:
            written = await asyncio.to_thread(lifecycle.kernel.written)
            if self.step is not started:
                return  # it ended during the measurement
        now = time.time()
        seconds = max(0.0, now - started.at)
        progress.under_way(step, seconds, written)
        if progress.fraction - self._reported_fraction >= MIN_PROGRESS:
            self._report_step(replace(started, kind="running", at=now, seconds=seconds, bytes=written))

    def _report_step(self, event: StepEvent) -> None:
        step, progress = Step(event.step), self.progress
        self._reported_fraction = progress.fraction if progress else 0.0
        expected = (progress.bytes.get(step, 0), progress.seconds.get(step, 0.0)) if progress else (0, 0.0)
        verb = VERBS.get(self.state, "") if self.state else ""
        stepped = Stepped(event, verb, self._reported_fraction, *expected)
        self.monitor.notify(lambda listener: listener.stepped(stepped))

    def _clear_swapped_out(self, at: float) -> None:
        """Account for device memory that is back on the GPU, or gone for good."""
        if self.swapped_out is not None:
            self.monitor.freed_gpu_seconds += self.swapped_out.gpu_seconds(at)
            self.swapped_out = None


def _plan(before: State | None, via: State) -> Plan | None:
    """Return the plan that leads through ``via``: the one from ``before``, else any (its start may not be known)."""
    plans = [(state, plan) for (state, _), plan in PLANS.items() if plan is not None and plan.via is via]
    return next((plan for state, plan in plans if state is before), None) or next((plan for _, plan in plans), None)


def _damped(share: float) -> float:
    """Damp an estimate of the part that is done: beyond nine tenths it grows ever slower, never to 1."""
    return max(0.0, share) if share <= 0.9 else 1.0 - 0.09 / share


def _seconds(step: Step, bytes: int) -> float:
    floor = _FLOORS.get(step, _FLOOR)
    return floor + RATES.seconds([step.value], bytes) if bytes else floor
