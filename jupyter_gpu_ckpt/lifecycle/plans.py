"""The states of a kernel and the plan of each verb, its steps in their order: a state machine, one literal table.

`advance` maps ``(kernel, event)`` to ``(kernel, steps)`` without I/O.  `lifecycle` runs these steps one by one and
reports `StepDone` or `StepFailed`.  When a step fails, `advance` returns the undo of every step that was done, in
reverse, and the kernel ends in the plan's ``back`` state.  So every transition ends in a named state in which either
the kernel runs (or is suspended) or a verified image is kept.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Any

from ..errors import StateError


class State(enum.Enum):
    """State of a kernel: a resting state, or the name of the move under way."""

    STARTING = "starting"
    RUNNING = "running"
    SUSPENDING = "suspending"
    SUSPENDED = "suspended"
    YIELDING = "yielding"
    #: Its CUDA state is in host memory as well, but it runs cells; their calls that use the GPU wait.
    OFF_GPU = "off_gpu"
    RESUMING = "resuming"
    DUMPING = "dumping"
    SAVING = "saving"
    CHECKPOINTED = "checkpointed"
    RESTORING = "restoring"
    DEAD = "dead"


class Step(enum.Enum):
    """The steps plans are made of; `steps.STEPS` has a function for each."""

    PREFLIGHT = "preflight"
    DRAIN = "drain"
    QUIESCE = "quiesce"
    CUDA_SUSPEND = "cuda_suspend"
    DISCONNECT = "disconnect"
    DUMP = "dump"
    PUBLISH = "publish"
    KEEP = "keep"
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


class Move(enum.Enum):
    """A verb: a request to move the kernel between GPU, host memory and disk; `lifecycle.Lifecycle` explains each."""

    SUSPEND = "suspend"
    YIELD = "yield"
    RESUME = "resume"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    WAKE = "wake"
    SAVE = "save"


class ProcessEvent(enum.Enum):
    """A start or an end of the kernel's process."""

    LAUNCHED = "launched"
    #: The process ended by itself, or was killed.
    EXITED = "exited"
    #: The owner ended the kernel (shutdown, restart); its image is not touched.
    TERMINATED = "terminated"


@dataclass(frozen=True)
class Attached:
    """A kernel whose owner has ended was found: running, suspended, or checkpointed."""

    state: State


@dataclass(frozen=True)
class StepDone:
    """End of a step that was done."""

    step: Step


@dataclass(frozen=True)
class StepFailed:
    """The last step failed and left everything as it was before, unless ``done``: some of its work was done."""

    step: Step
    code: str
    done: bool = False


@dataclass(frozen=True)
class Unwound:
    """End of the undo steps; ``failed``: those that failed."""

    failed: tuple[Step, ...] = ()


Event = Move | ProcessEvent | Attached | StepDone | StepFailed | Unwound


# -- plans


@dataclass(frozen=True)
class Plan:
    """The plan of a verb: through ``via`` to ``to``; after a failure back to ``back``.

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
_BACK_ON_GPU = (Step.RESERVE, Step.CUDA_RESUME, Step.UNRESERVE, Step.THAW, Step.RELEASE)
_RESUME = Plan(State.RESUMING, State.RUNNING, State.SUSPENDED, _BACK_ON_GPU, commit=Step.CUDA_RESUME)
_PROCESS_BACK = (Step.MATCH, Step.RESERVE, Step.CRIU_RESTORE, Step.CUDA_RESUME, Step.UNRESERVE)
_SERVED = (Step.CONNECT, Step.THAW, Step.RELEASE, Step.DISCARD_IMAGE)
_RESTORE = Plan(State.RESTORING, State.RUNNING, State.CHECKPOINTED, (*_PROCESS_BACK, *_SERVED), commit=Step.RELEASE)
_AWAY_IDLE = (Step.DRAIN, Step.QUIESCE)
_BACK_FOR_CALLS = (Step.RESERVE, Step.CUDA_RESUME, Step.UNRESERVE)
_RETURN = Plan(State.RESUMING, State.RUNNING, State.OFF_GPU, _BACK_FOR_CALLS, commit=Step.CUDA_RESUME)
_CHECKPOINT = Plan(State.DUMPING, State.CHECKPOINTED, State.RUNNING, (*_SUSPEND, *_DUMP), commit=Step.END_PROCESS)
# The kernel is served again before its save point is published: hashes and the disk are not waited for.
_DUMP_ON = (Step.DISCONNECT, Step.DUMP, Step.CONTINUE)
_SERVED_AGAIN = (Step.RESERVE, Step.CUDA_RESUME, Step.UNRESERVE, Step.CONNECT, Step.THAW, Step.RELEASE)
_SAVE_STEPS = (*_SUSPEND, *_DUMP_ON, *_SERVED_AGAIN, Step.KEEP)
_SAVE = Plan(State.SAVING, State.RUNNING, State.RUNNING, _SAVE_STEPS, commit=Step.RELEASE)
_SAVE_SUSPENDED = Plan(
    State.SAVING, State.SUSPENDED, State.SUSPENDED, (*_DUMP_ON, Step.SLEEP, Step.KEEP), commit=Step.SLEEP
)

#: Every legal request.  None: the kernel is in the state already.
PLANS: dict[tuple[State, Move], Plan | None] = {
    (State.RUNNING, Move.SUSPEND): Plan(State.SUSPENDING, State.SUSPENDED, State.RUNNING, (*_SUSPEND, Step.SLEEP)),
    (State.RUNNING, Move.YIELD): Plan(
        State.YIELDING, State.OFF_GPU, State.RUNNING, (Step.PREFLIGHT, Step.CUDA_SUSPEND)
    ),
    (State.RUNNING, Move.CHECKPOINT): _CHECKPOINT,
    (State.RUNNING, Move.SAVE): _SAVE,
    (State.RUNNING, Move.RESUME): None,
    (State.RUNNING, Move.RESTORE): None,
    (State.RUNNING, Move.WAKE): None,
    (State.SUSPENDED, Move.SUSPEND): None,
    (State.SUSPENDED, Move.CHECKPOINT): replace(_CHECKPOINT, back=State.SUSPENDED, steps=_DUMP),
    (State.SUSPENDED, Move.SAVE): _SAVE_SUSPENDED,
    (State.SUSPENDED, Move.YIELD): None,
    (State.SUSPENDED, Move.RESUME): _RESUME,
    (State.SUSPENDED, Move.WAKE): _RESUME,
    (State.OFF_GPU, Move.SUSPEND): Plan(State.SUSPENDING, State.SUSPENDED, State.OFF_GPU, (*_AWAY_IDLE, Step.SLEEP)),
    (State.OFF_GPU, Move.YIELD): None,
    (State.OFF_GPU, Move.SAVE): replace(
        _SAVE_SUSPENDED, back=State.OFF_GPU, steps=(*_AWAY_IDLE, *_SAVE_SUSPENDED.steps)
    ),
    (State.OFF_GPU, Move.CHECKPOINT): replace(_CHECKPOINT, back=State.OFF_GPU, steps=(*_AWAY_IDLE, *_DUMP)),
    (State.OFF_GPU, Move.RESUME): _RETURN,
    (State.OFF_GPU, Move.WAKE): _RETURN,
    (State.CHECKPOINTED, Move.YIELD): None,
    (State.CHECKPOINTED, Move.CHECKPOINT): None,
    (State.CHECKPOINTED, Move.RESTORE): _RESTORE,
    (State.CHECKPOINTED, Move.WAKE): _RESTORE,
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

#: The effect of a done step on the pair (a process exists, an image exists).
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


Outcome = tuple[MachineState, tuple[Step, ...]]


def advance(kernel: MachineState, event: Event) -> Outcome:
    """Return the kernel after ``event`` and the steps to run now (one of a plan, or all undo steps).

    Raises `StateError` with the whole history when ``event`` is not legal in this state.
    """
    kernel = replace(kernel, history=(*kernel.history, f"{kernel.state.value}: {event}")[-40:])
    if (outcome := _advance(kernel, event)) is None:
        name = event.value if isinstance(event, Move | ProcessEvent) else type(event).__name__
        message = f"{name!r} is not possible for a kernel that is {kernel.state.value}."
        raise StateError(message, state=kernel.state.value, history=list(kernel.history))
    _validate(outcome[0])
    return outcome


def _advance(kernel: MachineState, event: Event) -> Outcome | None:
    plan, at_rest = kernel.plan, kernel.plan is None
    match event:
        case Move() if at_rest and (kernel.state, event) in PLANS:
            plan = PLANS[kernel.state, event]
            return (replace(kernel, state=plan.via, plan=plan, done=()), plan.steps[:1]) if plan else (kernel, ())
        case ProcessEvent.LAUNCHED if kernel.state in (State.STARTING, State.DEAD):
            return MachineState(State.RUNNING, process=True, history=kernel.history), ()
        case Attached(State.RUNNING | State.SUSPENDED | State.CHECKPOINTED as state) if kernel.state is State.STARTING:
            return _at_rest(kernel, state), ()
        case StepDone(step) if plan and not kernel.unwinding and plan.steps[len(kernel.done)] is step:
            kernel = _with_done(kernel, step)
            if left := plan.steps[len(kernel.done) :]:
                return kernel, left[:1]
            return replace(kernel, state=plan.to, plan=None, done=()), ()
        case StepFailed(step, done=done) if plan and not kernel.unwinding:
            if plan.commit in kernel.done or (done and step is plan.commit):
                return _advance(kernel, StepDone(step))
            kernel = _with_done(kernel, step) if done else kernel
            undo = tuple(UNDO[step] for step in reversed(kernel.done) if step in UNDO)
            if plan.back is State.SUSPENDED and plan.to is not State.RUNNING:
                undo = (*undo, Step.SLEEP)
            return replace(kernel, unwinding=True), undo
        case Unwound(failed) if plan and kernel.unwinding:
            # Without free memory on the GPU the CUDA state is safe in host RAM.
            away = State.OFF_GPU if plan.to is State.OFF_GPU else State.SUSPENDED
            return _at_rest(kernel, away if Step.CUDA_RESUME in failed else plan.back), ()
        case ProcessEvent.EXITED if at_rest and kernel.state not in (State.CHECKPOINTED, State.STARTING):
            return replace(kernel, state=State.DEAD, process=False), ()
        case ProcessEvent.TERMINATED:
            # Also out of a plan that nobody runs any more: an owner can always end a kernel.
            return replace(kernel, state=State.DEAD, plan=None, done=(), unwinding=False, process=False), ()
    return None


def _at_rest(kernel: MachineState, state: State) -> MachineState:
    has_image = state is State.CHECKPOINTED
    return MachineState(state, process=not has_image, image=has_image, history=kernel.history)


def _with_done(kernel: MachineState, step: Step) -> MachineState:
    return replace(kernel, done=(*kernel.done, step), **_FACTS.get(step, {}))


def _validate(kernel: MachineState) -> None:
    """Assert the promise of the project: outside `DEAD` and `STARTING` there is a process or an image."""
    if kernel.state not in (State.DEAD, State.STARTING):
        assert kernel.process or kernel.image, f"a kernel without process and image: {kernel}"
        assert kernel.plan or kernel.process == (kernel.state is not State.CHECKPOINTED), kernel
