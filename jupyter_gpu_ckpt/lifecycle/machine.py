"""The states of a kernel: ``(kernel, event) -> (kernel, steps)``, one literal table, no I/O.

A verb (`Suspend`, `Resume`, `Checkpoint`, `Restore`, `Wake`) is a plan: a row of steps.  `driver` runs the steps that
`advance` returns one by one and reports `StepDone` or `StepFailed`.  When a step fails, the machine returns the undo of
every step that was done, in reverse, and the kernel ends in the plan's ``back`` state.  So every transition ends in a
named state in which either the kernel runs (or is suspended) or a verified image is kept.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

from ..errors import StateError


class State(enum.Enum):
    """What a kernel is, or is becoming."""

    STARTING = "starting"
    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    RESUMING = "resuming"
    DUMPING = "dumping"
    CHECKPOINTED = "checkpointed"
    RESTORING = "restoring"
    DEAD = "dead"


class Step(enum.Enum):
    """The steps plans are made of; `driver.STEPS` has a function for each."""

    PREFLIGHT = "preflight"
    DRAIN = "drain"
    QUIESCE = "quiesce"
    CUDA_SUSPEND = "cuda_suspend"
    DISCONNECT = "disconnect"
    DUMP = "dump"
    PUBLISH = "publish"
    END_PROCESS = "end_process"
    SLEEP = "sleep"
    MATCH = "match"
    RESERVE = "reserve"
    CRIU_RESTORE = "criu_restore"
    CUDA_RESUME = "cuda_resume"
    CONNECT = "connect"
    THAW = "thaw"
    RELEASE = "release"
    DISCARD_IMAGE = "discard_image"
    CONTINUE = "continue"
    UNRESERVE = "unreserve"
    UNLEASE = "unlease"


# -- events


@dataclass(frozen=True)
class Event:
    """Something that happened or is requested."""


class Launched(Event):
    """The kernel process was started."""


@dataclass(frozen=True)
class Attached(Event):
    """A kernel whose owner has ended was found: running, suspended, or checkpointed."""

    state: State


class Suspend(Event):
    """Move the CUDA state to host RAM."""


class Resume(Event):
    """Move the CUDA state back."""


class Checkpoint(Event):
    """Write everything to an image and end the process."""


class Restore(Event):
    """Bring the process back from its image."""


class Wake(Event):
    """Resume or restore, whatever the kernel needs to run."""


@dataclass(frozen=True)
class StepDone(Event):
    """The last step was done."""

    step: Step


@dataclass(frozen=True)
class StepFailed(Event):
    """The last step failed and left everything as it was before, unless ``done``: some of its work was done."""

    step: Step
    code: str
    done: bool = False


@dataclass(frozen=True)
class Unwound(Event):
    """The undo steps were run; ``failed`` are those that failed."""

    failed: tuple[Step, ...] = ()


class Exited(Event):
    """The kernel process ended by itself, or was killed."""


class Terminated(Event):
    """The owner ended the kernel (shutdown, restart); its image is not touched."""


# -- plans


@dataclass(frozen=True)
class Plan:
    """A verb: through ``via`` to ``to``; after a failure back to ``back``.

    Once the step ``commit`` is done nothing is undone: the steps after it only tidy up, and the failure of one of them
    does not stop the next.
    """

    via: State
    to: State
    back: State
    steps: tuple[Step, ...]
    commit: Step | None = None


_SUSPEND = (Step.PREFLIGHT, Step.DRAIN, Step.QUIESCE, Step.CUDA_SUSPEND)
_DUMP = (Step.DISCONNECT, Step.DUMP, Step.PUBLISH, Step.END_PROCESS, Step.SLEEP)
_RESUME = Plan(
    State.RESUMING,
    State.RUNNING,
    State.SUSPENDED,
    (Step.RESERVE, Step.CUDA_RESUME, Step.UNRESERVE, Step.THAW, Step.RELEASE),
    commit=Step.CUDA_RESUME,
)
_PROCESS_BACK = (Step.MATCH, Step.RESERVE, Step.CRIU_RESTORE, Step.CUDA_RESUME, Step.UNRESERVE)
_RESTORE = Plan(
    State.RESTORING,
    State.RUNNING,
    State.CHECKPOINTED,
    (*_PROCESS_BACK, Step.CONNECT, Step.THAW, Step.RELEASE, Step.DISCARD_IMAGE),
    commit=Step.RELEASE,
)
_CHECKPOINT = Plan(State.DUMPING, State.CHECKPOINTED, State.RUNNING, (*_SUSPEND, *_DUMP), commit=Step.END_PROCESS)

#: Every legal request.  None: the kernel is in the state already.
PLANS: dict[tuple[State, type[Event]], Plan | None] = {
    (State.RUNNING, Suspend): Plan(State.SUSPENDING, State.SUSPENDED, State.RUNNING, (*_SUSPEND, Step.SLEEP)),
    (State.RUNNING, Checkpoint): _CHECKPOINT,
    (State.RUNNING, Resume): None,
    (State.RUNNING, Restore): None,
    (State.RUNNING, Wake): None,
    (State.SUSPENDED, Suspend): None,
    (State.SUSPENDED, Checkpoint): replace(_CHECKPOINT, back=State.SUSPENDED, steps=_DUMP),
    (State.SUSPENDED, Resume): _RESUME,
    (State.SUSPENDED, Wake): _RESUME,
    (State.CHECKPOINTED, Checkpoint): None,
    (State.CHECKPOINTED, Restore): _RESTORE,
    (State.CHECKPOINTED, Wake): _RESTORE,
}

#: How a done step is undone.  The others leave nothing to undo.
UNDO: dict[Step, Step] = {
    Step.DRAIN: Step.RELEASE,
    Step.QUIESCE: Step.THAW,
    Step.CUDA_SUSPEND: Step.CUDA_RESUME,
    Step.DISCONNECT: Step.CONNECT,
    Step.DUMP: Step.CONTINUE,
    Step.PUBLISH: Step.DISCARD_IMAGE,
    Step.MATCH: Step.UNLEASE,
    Step.RESERVE: Step.UNRESERVE,
    Step.CRIU_RESTORE: Step.END_PROCESS,
    Step.CONNECT: Step.DISCONNECT,
}

#: What a done step makes true of the pair (a process exists, an image exists).
_FACTS: dict[Step, dict[str, Any]] = {
    Step.PUBLISH: {"image": True},
    Step.END_PROCESS: {"process": False},
    Step.CRIU_RESTORE: {"process": True},
    Step.DISCARD_IMAGE: {"image": False},
}


@dataclass(frozen=True)
class MachineState:
    """A kernel as the machine sees it; ``history``: the last events, for the error that an illegal one raises."""

    state: State = State.STARTING
    plan: Plan | None = None
    done: tuple[Step, ...] = ()
    unwinding: bool = False
    process: bool = False
    image: bool = False
    history: tuple[str, ...] = ()

    def with_event(self, event: Event) -> MachineState:
        """The same kernel with ``event`` at the end of its history."""
        return replace(self, history=(*self.history, f"{self.state.value}: {event}")[-40:])


Outcome = tuple[MachineState, tuple[Step, ...]]


def advance(kernel: MachineState, event: Event) -> Outcome:
    """Return the kernel after ``event`` and the steps to run now (one of a plan, or all undo steps).

    Raises `StateError` with the whole history when ``event`` is not legal in this state.
    """
    kernel = kernel.with_event(event)
    key = (kernel.state, type(event))
    if key in PLANS and kernel.plan is None:
        plan = PLANS[key]
        if plan is None:
            return kernel, ()
        return replace(kernel, state=plan.via, plan=plan, done=()), plan.steps[:1]
    handler = _HANDLERS.get(type(event))
    outcome = handler(kernel, event) if handler else None
    if outcome is None:
        raise StateError(
            f"A kernel that is {kernel.state.value} cannot take {type(event).__name__}.",
            state=kernel.state.value,
            history=list(kernel.history),
        )
    _validate(outcome[0])
    return outcome


def _launched(kernel: MachineState, _: Event) -> Outcome | None:
    if kernel.state not in (State.STARTING, State.DEAD):
        return None
    return MachineState(State.RUNNING, process=True, history=kernel.history), ()


def _with(kernel: MachineState, step: Step) -> MachineState:
    """Return the kernel after ``step`` was done."""
    return replace(kernel, done=(*kernel.done, step), **_FACTS.get(step, {}))


def _attached(kernel: MachineState, event: Event) -> Outcome | None:
    assert isinstance(event, Attached)
    resting = (State.RUNNING, State.SUSPENDED, State.CHECKPOINTED)
    if kernel.state is not State.STARTING or event.state not in resting:
        return None
    has_image = event.state is State.CHECKPOINTED
    return MachineState(event.state, process=not has_image, image=has_image, history=kernel.history), ()


def _step_done(kernel: MachineState, event: Event) -> Outcome | None:
    assert isinstance(event, StepDone)
    plan = kernel.plan
    if plan is None or kernel.unwinding or plan.steps[len(kernel.done)] is not event.step:
        return None
    kernel = _with(kernel, event.step)
    if len(kernel.done) < len(plan.steps):
        return kernel, (plan.steps[len(kernel.done)],)
    return replace(kernel, state=plan.to, plan=None, done=()), ()


def _step_failed(kernel: MachineState, event: Event) -> Outcome | None:
    assert isinstance(event, StepFailed)
    plan = kernel.plan
    if plan is None or kernel.unwinding:
        return None
    if plan.commit in kernel.done or (event.done and event.step is plan.commit):
        return _step_done(kernel, StepDone(event.step))
    if event.done:
        kernel = _with(kernel, event.step)
    undo = tuple(UNDO[step] for step in reversed(kernel.done) if step in UNDO)
    if plan.back is State.SUSPENDED and plan.to is State.CHECKPOINTED:
        undo = (*undo, Step.SLEEP)
    return replace(kernel, unwinding=True), undo


def _unwound(kernel: MachineState, event: Event) -> Outcome | None:
    assert isinstance(event, Unwound)
    plan = kernel.plan
    if plan is None or not kernel.unwinding:
        return None
    state = plan.back
    if Step.CUDA_RESUME in event.failed:
        state = State.SUSPENDED  # there was no room on the GPU: the CUDA state is safe in host RAM
    has_image = state is State.CHECKPOINTED
    after = replace(kernel, state=state, plan=None, done=(), unwinding=False)
    return replace(after, process=not has_image, image=has_image), ()


def _exited(kernel: MachineState, _: Event) -> Outcome | None:
    if kernel.plan is not None or kernel.state in (State.CHECKPOINTED, State.STARTING):
        return None
    return replace(kernel, state=State.DEAD, process=False), ()


def _terminated(kernel: MachineState, _: Event) -> Outcome:
    # From every state, and also out of a plan that nobody runs any more: an owner can always get rid of a kernel.
    return replace(kernel, state=State.DEAD, plan=None, done=(), unwinding=False, process=False), ()


_HANDLERS = {
    Launched: _launched,
    Attached: _attached,
    StepDone: _step_done,
    StepFailed: _step_failed,
    Unwound: _unwound,
    Exited: _exited,
    Terminated: _terminated,
}


def _validate(kernel: MachineState) -> None:
    """Assert the promise of the project: outside `DEAD` and `STARTING` there is a process or an image."""
    if kernel.state in (State.DEAD, State.STARTING):
        return
    if not (kernel.process or kernel.image):
        raise AssertionError(f"a kernel without process and image: {kernel}")
    if kernel.plan is None:
        assert kernel.process == (kernel.state is not State.CHECKPOINTED), kernel
