"""The steps of plans: the function of each, and the run of a plan to its end or, after a failure, back.

A run asks `plans` for the next steps after each event; `lifecycle.Lifecycle` begins it and reports how it ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from .. import errors
from ..trace import notify
from . import dump, plans, restore, resume, suspend
from .context import Attempt, KernelState, PartlyDone, Reason
from .plans import State, Step

_log = logging.getLogger(__name__)

#: The function of each step; one that differs as an undo step looks at `Attempt.unwinding`.
STEPS: Mapping[Step, Callable[[Attempt], None]] = {
    Step.PREFLIGHT: suspend.check,
    Step.DRAIN: suspend.drain,
    Step.QUIESCE: suspend.quiesce,
    Step.CUDA_SUSPEND: suspend.cuda_suspend,
    Step.SLEEP: suspend.sleep,
    Step.DISCONNECT: dump.disconnect,
    Step.DUMP: dump.dump,
    Step.PUBLISH: dump.publish,
    Step.KEEP: dump.keep,
    Step.END_PROCESS: dump.end_process,
    Step.CONTINUE: dump.continue_,
    Step.MATCH: restore.match,
    Step.CRIU_RESTORE: restore.criu_restore,
    Step.DISCARD_IMAGE: restore.discard_image,
    Step.UNLEASE: lambda attempt: attempt.resources.close(),
    Step.RESERVE: resume.reserve,
    Step.CUDA_RESUME: resume.cuda_resume,
    Step.UNRESERVE: lambda attempt: attempt.reservation.close(),
    Step.CONNECT: resume.connect,
    Step.THAW: resume.thaw,
    Step.RELEASE: resume.release,
}

Steps = tuple[Step, ...]


def advance(kernel: KernelState, event: plans.Event) -> Steps:
    """Return the next steps after ``event``; a new state is reported to `KernelState.on_state`."""
    before = kernel.machine.state
    kernel.machine, steps = plans.advance(kernel.machine, event)
    if kernel.machine.state is not before:
        # In the middle of a plan: a listener that raises must not stop it there.
        notify(kernel.on_state, kernel.machine.state)
    return steps


def drive(attempt: Attempt, steps: Steps) -> tuple[Step | None, Exception | None]:
    """Run a plan to its end or, after a failure, back; return the first failure and its step."""
    kernel = attempt.kernel
    failed_at: Step | None = None
    failure: Exception | None = None
    while steps or kernel.machine.unwinding:
        if kernel.machine.unwinding:
            steps = advance(kernel, plans.Unwound(_unwind(attempt, steps)))
            continue
        error, done = _run(attempt, steps[0])
        if error is None:
            steps = advance(kernel, plans.StepDone(steps[0]))
            continue
        if failure is None:
            failed_at, failure = steps[0], error
        steps = advance(kernel, plans.StepFailed(steps[0], getattr(error, "code", type(error).__name__), done=done))
    # No resting state has a reservation; the step that was to end it may have failed before it could.
    attempt.reservation.close()
    if attempt.unrepaired and isinstance(failure, errors.GpuCkptError):
        failure.details.setdefault("unrepaired", attempt.unrepaired)
    return failed_at, failure


def _run(attempt: Attempt, step: Step) -> tuple[Exception | None, bool]:
    """Run a step; return the error it failed with, if any, and whether it did its work, or some of it."""
    kernel, done = attempt.kernel, False
    cause: BaseException | None = None
    try:
        if attempt.goal is State.RUNNING and not attempt.unwinding:
            kernel.cancellation.check(Reason.END)
        with kernel.trace.step(step.value) as attempt.traced:
            begun = time.monotonic()
            try:
                STEPS[step](attempt)
            except PartlyDone as partly:
                cause = partly.__cause__
                kernel.saved.cuda |= partly.cuda
            # From here on only a fault of the trace can make the step fail, and what it did must be undone.
            done = True
            if cause is not None:
                raise cause
            seconds = time.monotonic() - begun
            attempt.seconds[step.value] = attempt.seconds.get(step.value, 0.0) + seconds
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as foreign:  # a library may raise others: PyO3's PanicException, where Rust gets no thread
        error = foreign if isinstance(foreign, Exception) else errors.GpuCkptError.from_exception(foreign)
        if isinstance(error, errors.CudaError):  # the kernel's end, found later, would hide what the driver said
            _log.warning("Kernel %s: step %s: %s", kernel.home.kernel_id, step.value, error)
        return error, done
    return None, True


def _unwind(attempt: Attempt, steps: Steps) -> Steps:
    """Run undo steps, each whether the one before failed or not; return those that failed."""
    attempt.unwinding = True
    failed: list[Step] = []
    for step in steps:
        if Step.CUDA_RESUME in failed:
            # It stays suspended and quiesced: its messages stay queued, and the next one tries again.
            if step is Step.THAW:
                continue
            step = Step.SLEEP if step is Step.RELEASE else step
        if _run(attempt, step)[0] is not None:
            failed.append(step)
    return tuple(failed)
