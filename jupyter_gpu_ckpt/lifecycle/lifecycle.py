"""The verbs of one kernel, each run step by named step in the order of its plan (`plans`).

Everything here is plain synchronous code on the thread that calls a verb; one lock makes the verbs of one kernel take
turns.  What was done before a step that failed is undone by the plan's undo steps.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import errors
from ..capsule.capsule import ANSWER, Capsule
from ..errors import CapsuleError, CapsuleGone, GpuCkptError, ImageNotFound, KernelLost, StateError
from ..image.store import Image
from ..trace import Trace, notify
from . import dump, host_memory, plans, restore, resume, suspend
from .context import Attempt, Engine, GateProtocol, Home, KernelState, PartlyDone, Reason, Saved
from .plans import Move, State, Step
from .preflight import PreflightFinding
from .settings import LifecycleSettings

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

#: The steps of a wake from an image in which a process can be killed, or not answer, by chance.
_CHANCY = frozenset({Step.CRIU_RESTORE, Step.CUDA_RESUME, Step.CONNECT, Step.THAW})
#: The classes, without subclasses, of the errors of such a step.  Other errors are the same however often it is tried:
#: files, ports, space on the GPU, in memory and on the disk, the image, a cancellation.  A deadline would pass again.
_BY_CHANCE = frozenset[type[Exception]](
    {errors.AgentError, errors.GateError, errors.KernelSilent, errors.CudaError, errors.HelperGone}
    | {errors.CapsuleError, errors.CapsuleGone, errors.CriuError, errors.CriuKilled}
    | {errors.PidTaken, errors.PipesExhausted}
)
_TRIED_TWICE = (
    "It was tried twice, each time in a fresh process; nothing is lost. Run a cell to try again. If it fails again, "
    "`jupyter gpu-ckpt match {image}` says what has changed here since; after a restart of the host, or on another "
    "node (`jupyter gpu-ckpt push`), it may come back. A restart of the kernel begins anew without its variables."
)


class Lifecycle:
    """One kernel's way between GPU, RAM and disk.

    Verbs (`suspend`, `resume`, `checkpoint`, `restore`, `wake`) return when the kernel is in the state they name, or
    raise a `GpuCkptError` whose ``left`` says in which state it is instead.
    """

    def __init__(
        self, home: Home, engine: Engine, gate: GateProtocol, *, settings: LifecycleSettings, trace: Trace
    ) -> None:
        self.home, self.engine, self.gate, self.trace = home, engine, gate, trace
        self.kernel = KernelState(home, engine, gate, settings, trace)
        #: Called with each new state; their errors are logged (`trace.notify`).
        self.on_state: list[Callable[[State], None]] = []
        self._lock = threading.RLock()

    @property
    def state(self) -> State:
        """The kernel's state; may change at any moment."""
        return self.kernel.machine.state

    @property
    def capsule(self) -> Capsule | None:
        """The kernel's capsule, while it has a process."""
        return self.kernel.capsule

    @property
    def image(self) -> Image | None:
        """The kernel's image."""
        return self.kernel.image

    @property
    def kept_image(self) -> Image | None:
        """The image of a kernel that died just after it was restored from it."""
        return self.kernel.kept_image

    def device_bytes(self) -> dict[str, int]:
        """Return the device memory that the kernel has now, in bytes by GPU UUID.  Queries NVML.

        Raises `CudaError` where the driver or NVML does not answer.
        """
        return host_memory.device_bytes(self.kernel) if self.kernel.capsule is not None else {}

    def resident(self) -> int:
        """Return the bytes of host memory of the kernel's processes and of its swapped-out allocations."""
        return host_memory.resident(self.kernel)

    def written(self) -> int:
        """Return the bytes on the disk of the image that is being made; 0 while none is.  From any thread."""
        attempt = self.kernel.attempt
        return draft.size() if attempt is not None and (draft := attempt.draft) is not None else 0

    def findings(self, *, writes: bool = True) -> list[PreflightFinding]:
        """Return what preflight says of a checkpoint now, or of a suspend, which ``writes`` no image.

        The kernel is not disturbed.
        """
        return suspend.findings(self.kernel, writes=writes)

    # -- a kernel comes

    def launch(self, argv: Sequence[str], env: Mapping[str, str], cwd: str | None) -> None:
        """Start the kernel in a fresh capsule.  After failure there is no process."""
        with self._lock:
            capsule = Capsule.create(
                self.home.runtime_dir,
                sockets=self.home.sockets,
                stdout=self.home.stdout,
                stderr=self.home.stderr,
            )
            try:
                capsule.spawn(argv, env, cwd)
                if self.home.outlive:
                    capsule.outlive()
            except BaseException:
                capsule.close()
                raise
            self.kernel.capsule, self.kernel.exit_status = capsule, None
            self.kernel.saved, self.kernel.restored_on_gpu = Saved(), False
            self.kernel.lasting_refusal = self.kernel.refused_checkpoint = None
            self._advance(plans.ProcessEvent.LAUNCHED)

    def attach(self, *, capsule: Capsule | None = None, image: Image | None = None) -> None:
        """Become the owner of a kernel in ``capsule``, or of a checkpointed one with ``image``; its last owner is gone.

        A verb that this owner did not finish is undone: stopped processes continue, a CUDA lock is released.
        """
        with self._lock:
            kernel = self.kernel
            kernel.capsule, kernel.image = capsule, image
            state = State.CHECKPOINTED if capsule is None else resume.repair(kernel, capsule)
            # Its owner may have ended just after it had published an image.  Of a suspended kernel that still is the
            # state, and what it could be restored from if it died now.
            kernel.supersedes_images = capsule is not None
            kernel.restored_on_gpu = capsule is not None  # nobody knows
            if state is State.RUNNING:
                resume.supersede_images(kernel)
            self._advance(plans.Attached(state))
            if state is not State.RUNNING:
                self.gate.sleep()

    # -- verbs

    def suspend(self) -> None:
        """Move the CUDA state to host RAM; the process lives.  After failure the kernel runs on."""
        self._perform(Move.SUSPEND, State.SUSPENDED)

    def resume(self) -> None:
        """Move the CUDA state back to the GPU.  After failure the kernel stays suspended."""
        self._perform(Move.RESUME, State.RUNNING)

    def checkpoint(self) -> Image:
        """Write everything to an image; no process, no GPU memory.  After failure the kernel is as it was before."""
        self._perform(Move.CHECKPOINT, State.CHECKPOINTED)
        assert self.kernel.image is not None
        return self.kernel.image

    def restore(self, gpu_map: Mapping[str, str] | None = None, *, accept_changed_files: bool | None = None) -> None:
        """Restore the image, on the GPUs named by ``gpu_map`` (old UUID: new UUID) or the same ones.

        ``accept_changed_files``: accept files that were changed since the checkpoint as they are now; None: as the
        settings say.  After failure the image is kept and the kernel stays checkpointed.  Raises `StateError` for a
        ``gpu_map`` and a kernel that is not checkpointed.
        """
        with self._lock:
            if gpu_map and self.state is not State.CHECKPOINTED:
                message = f"The kernel is {self.state.value}; other GPUs can be named for a checkpointed one only."
                raise StateError(message, left=self._what_is_left())
            self._perform(Move.RESTORE, State.RUNNING, gpu_map=gpu_map, accept_changed_files=accept_changed_files)

    def wake(self) -> None:
        """Resume or restore, whatever the kernel needs to run."""
        self._perform(Move.WAKE, State.RUNNING)

    # -- a kernel goes

    def begin_detach(self) -> None:
        """Announce `detach`: from now on no wake waits for content from the cold tier."""
        self.kernel.cancellation.request(Reason.DETACH_SOON)

    def detach(self) -> None:
        """Give up a kernel for another server to attach; a living one runs on without an owner.

        CRIU is cancelled: a dump is undone, a restore keeps its image.  Calls of the CUDA driver are waited for.
        """
        self._cancel(Reason.DETACH)
        with self._lock:
            kernel = self.kernel
            kernel.cancellation.reset(Reason.DETACH_SOON, requested=Reason.DETACH)
            if kernel.capsule is not None:
                with contextlib.suppress(CapsuleError, CapsuleGone):  # ended meanwhile
                    kernel.capsule.outlive()
                kernel.capsule.detach()
                kernel.capsule = None
            kernel.spill_directory = None  # it is the capsule's
            host_memory.discard_chunks(kernel)

    def terminate(self) -> None:
        """End the kernel now, also during a verb.  Its image, if there is one, stays until `discard_image`."""
        self._end_gently()
        # Outside the lock: a verb under way then fails in its current step, unwinds, and releases the lock.
        self._cancel(Reason.END)
        with self._lock:
            kernel = self.kernel
            kernel.cancellation.reset()
            if kernel.capsule is not None:
                kernel.capsule.close()
                kernel.capsule = None
            host_memory.end_spill(kernel)
            if self.state not in (State.DEAD, State.STARTING):
                self._advance(plans.ProcessEvent.TERMINATED)
            kernel.exit_status = -signal.SIGKILL if kernel.exit_status is None else kernel.exit_status
            host_memory.discard_chunks(kernel)
            with contextlib.suppress(GpuCkptError):  # a gate that failed has no clients that would have to know
                self.gate.kernel_died()

    def _cancel(self, reason: Reason) -> None:
        """Have the verb under way stop: request it first, then end what the verb waits for."""
        self.kernel.cancellation.request(reason)
        attempt, ends = self.kernel.attempt, reason is Reason.END
        if ends:
            with contextlib.suppress(GpuCkptError):  # the kernel is ended all the same
                self.gate.cancel_prompt()
        if attempt is not None:
            for task in (attempt.verification if ends else None, attempt.device_read):
                if task is not None:
                    task.cancel()
        end = Capsule.close if ends else Capsule.cancel_criu
        for capsule in (attempt.restoring if attempt is not None else None, self.kernel.capsule):
            if capsule is not None:
                end(capsule)

    def _end_gently(self) -> None:
        """End a kernel that no verb is moving and that has no image as a stock kernel ends."""
        # A verb that has done its steps releases the lock in a moment; one that has not is cancelled after this.
        if not self._lock.acquire(timeout=0.0 if self.kernel.machine.plan is not None else 1.0):
            return
        try:
            kernel, rests = self.kernel, self.kernel.machine.plan is None and self.kernel.image is None
            if kernel.capsule is not None and rests and self.state in (State.RUNNING, State.SUSPENDED):
                if self.state is State.RUNNING and kernel.restored_on_gpu:
                    suspend.take_off_gpu(kernel)
                kernel.capsule.end()
        finally:
            self._lock.release()

    def discard_image(self) -> None:
        """Delete the kernel's image: its owner wants a fresh kernel."""
        with self._lock:
            if self.state is not State.CHECKPOINTED and self.kernel.image is not None:
                try:
                    restore.remove_image(self.kernel)
                except ImageNotFound:
                    self.kernel.image = None
                except GpuCkptError:  # in use, or not to be written: at least no server restores it by itself
                    self.kernel.kept_image = restore.retire_image(self.kernel)

    def retire_image(self) -> None:
        """Keep the image of a kernel that was ended; no server restores it by itself."""
        with self._lock:
            if self.state is not State.CHECKPOINTED:
                restore.retire_image(self.kernel)

    def forget(self) -> None:
        """Archive the generations of a kernel that has ended for good, if no image of it is left."""
        store, kernel_id = self.engine.store, self.home.kernel_id
        with contextlib.suppress(GpuCkptError, OSError):
            if not any(image.manifest.kernel_id == kernel_id for image in store.images()):
                store.generations.close(kernel_id)

    def poll(self) -> int | None:
        """Return the exit status of the kernel; None while it runs, sleeps, or is being moved.  Never blocks."""
        kernel = self.kernel
        if self.state is State.DEAD:
            return -signal.SIGKILL if kernel.exit_status is None else kernel.exit_status
        # The lock first: a verb may be in the middle of a request to the capsule, and `Capsule.poll` would wait for it.
        if kernel.capsule is None or not self._lock.acquire(blocking=False):
            return None  # a verb is under way, and will notice
        try:
            capsule = kernel.capsule
            if capsule is not None and kernel.machine.plan is None and (status := capsule.poll()) is not None:
                if kernel.image is None and capsule.is_cleaning_up():
                    return None  # as long as that takes: else the capsule's end would cut it short
                self._record_exit(status)
                return status
        finally:
            self._lock.release()
        return None

    # -- the drive

    def _perform(self, verb: Move, goal: State, **options: Any) -> None:
        with self._lock:
            kernel = self.kernel
            if self.state not in (State.CHECKPOINTED, State.DEAD, State.STARTING):
                self._notice_death()
            try:
                steps = self._advance(verb)
            except StateError as error:
                error.left = self._what_is_left()
                raise
            if kernel.chunks is not None and steps:
                kernel.chunks.stop(outdated=goal is State.RUNNING)
            failure, again = self._attempt(Attempt(kernel, goal, **options), steps, retry=True)
            if again:
                failure, _ = self._attempt(Attempt(kernel, goal, **options), self._advance(verb))
            if kernel.chunks is not None:
                kernel.chunks.in_use = False
            if self.state is State.SUSPENDED and steps:
                dump.write_ahead(kernel)
            elif self.state is not State.SUSPENDED and not kernel.settings.keep_chunks:
                host_memory.discard_chunks(kernel)
            if failure is not None and self.state is not goal:
                final = self._final_error(failure)
                if again and kernel.image is not None and type(failure) in _BY_CHANCE:
                    final.hint = _TRIED_TWICE.format(image=kernel.image.id)
                if goal is State.RUNNING and self.state is not State.DEAD:
                    # The clients that wait for the kernel get this error; the next message tries again.
                    self.gate.fail(final)
                raise final from failure

    def _attempt(self, attempt: Attempt, steps: Steps, *, retry: bool = False) -> tuple[Exception | None, bool]:
        """Run one attempt; return its first failure and, to ``retry``, whether another attempt may succeed."""
        self.kernel.attempt = attempt
        try:
            failed_at, failure = self._drive(attempt, steps)
            if retry and self._may_succeed_again(failed_at, failure):
                step, code = failed_at.value if failed_at else "", getattr(failure, "code", "")
                _log.warning("Kernel %s: %s failed (%s); it is woken once more", self.home.kernel_id, step, code)
                return failure, True
            if self.state is not State.CHECKPOINTED:
                if isinstance(failure, CapsuleGone) and self.kernel.capsule is not None:
                    # The init's connection ends before its processes do; a kernel that dies is not called running.
                    self.kernel.capsule.wait(ANSWER)
                self._notice_death(quiet=failure is not None)
            if failure is not None:
                self._serve(attempt.goal)
            return failure, False
        finally:
            attempt.reservation.close()
            attempt.resources.close()
            self.kernel.attempt = None

    def _drive(self, attempt: Attempt, steps: Steps) -> tuple[Step | None, Exception | None]:
        """Run a plan to its end or, after a failure, back; return the first failure and its step."""
        failed_at: Step | None = None
        failure: Exception | None = None
        while steps or self.kernel.machine.unwinding:
            if self.kernel.machine.unwinding:
                steps = self._advance(plans.Unwound(self._unwind(attempt, steps)))
                continue
            error, done = self._run(attempt, steps[0])
            if error is None:
                steps = self._advance(plans.StepDone(steps[0]))
                continue
            if failure is None:
                failed_at, failure = steps[0], error
            steps = self._advance(plans.StepFailed(steps[0], getattr(error, "code", type(error).__name__), done=done))
        # No resting state has a reservation; the step that was to end it may have failed before it could.
        attempt.reservation.close()
        return failed_at, failure

    def _run(self, attempt: Attempt, step: Step) -> tuple[Exception | None, bool]:
        """Run a step; return the error it failed with, if any, and whether it did its work, or some of it."""
        done = False
        cause: BaseException | None = None
        try:
            if attempt.goal is State.RUNNING and not attempt.unwinding:
                self.kernel.cancellation.check(Reason.END)
            with self.trace.step(step.value) as attempt.traced:
                begun = time.monotonic()
                try:
                    STEPS[step](attempt)
                except PartlyDone as partly:
                    cause = partly.__cause__
                # From here on only a fault of the trace can make the step fail, and what it did must be undone.
                done = True
                if cause is not None:
                    raise cause
                seconds = time.monotonic() - begun
                attempt.seconds[step.value] = attempt.seconds.get(step.value, 0.0) + seconds
        except Exception as error:
            if isinstance(error, errors.CudaError):  # the kernel's end, found later, would hide what the driver said
                _log.warning("Kernel %s: step %s: %s", self.home.kernel_id, step.value, error)
            return error, done
        return None, True

    def _unwind(self, attempt: Attempt, steps: Steps) -> Steps:
        """Run undo steps, each whether the one before failed or not; return those that failed."""
        attempt.unwinding = True
        failed: list[Step] = []
        for step in steps:
            if Step.CUDA_RESUME in failed:
                # It stays suspended and quiesced: its messages stay queued, and the next one tries again.
                if step is Step.THAW:
                    continue
                step = Step.SLEEP if step is Step.RELEASE else step
            if self._run(attempt, step)[0] is not None:
                failed.append(step)
        return tuple(failed)

    def _may_succeed_again(self, failed_at: Step | None, failure: Exception | None) -> bool:
        """Return whether a wake that failed is tried once more, at once, in a fresh capsule: see `_BY_CHANCE`."""
        wanted = self.state is State.CHECKPOINTED and self.kernel.cancellation.reason is Reason.NONE
        return wanted and failed_at in _CHANCY and type(failure) in _BY_CHANCE

    def _serve(self, goal: State) -> None:
        """Have the gate serve a running kernel, or wake it at the next message, whatever else failed."""
        if self.state in (State.SUSPENDED, State.CHECKPOINTED) and goal is not State.RUNNING:
            self.gate.sleep()
        elif self.state is State.RUNNING:
            self.discard_image()  # if its wake could not
            try:
                self.gate.release()
            except StateError:  # not connected
                with contextlib.suppress(GpuCkptError), suspend.answering(self.kernel):
                    self.gate.open(self.kernel.settings.connect)
                    self.gate.release()

    def _advance(self, event: plans.Event) -> Steps:
        before = self.state
        self.kernel.machine, steps = plans.advance(self.kernel.machine, event)
        if self.state is not before:
            # In the middle of a plan: a listener that raises must not stop it there.
            notify(self.on_state, self.state)
        return steps

    def _what_is_left(self) -> str:
        image = self.kernel.image or self.kernel.kept_image
        kept = f"the image is kept as {image.id}" if image else ""
        where = "in host memory" if self.kernel.spill_directory is None else "on the disk"
        suspended = f"the kernel is suspended, its device memory is kept {where}"
        texts = {State.RUNNING: "the kernel runs on", State.SUSPENDED: suspended, State.CHECKPOINTED: kept}
        return texts.get(self.state, "; ".join(filter(None, ["the kernel is gone", kept])))

    def _final_error(self, error: Exception) -> GpuCkptError:
        """Return a copy of a step's error with what is left behind after the undo."""
        error = copy.copy(GpuCkptError.from_exception(error))
        cause = {} if isinstance(error, KernelLost) else {"cause": error.code}
        if self.state is State.DEAD:
            status = self.kernel.exit_status
            error = KernelLost(f"The kernel's process ended (status {status}).", status=status, **cause)
        elif self.kernel.cancellation.reason is Reason.END:
            # `terminate` closed the capsule during the step: that step's own error would mislead.
            error = KernelLost("The kernel was ended by its owner (a restart or a shutdown) meanwhile.", **cause)
        error.left = self._what_is_left()
        if isinstance(error, KernelLost) and (self.kernel.image or self.kernel.kept_image):
            error.hint = f"{error.hint} The image is an earlier state of it (`jupyter gpu-ckpt list`)."
        if isinstance(error, ImageNotFound):
            error.left = "nothing: the image was removed while the kernel was away"
        return error

    def _notice_death(self, quiet: bool = False) -> None:
        """Record the exit of a process that has ended by itself, and (unless ``quiet``) raise `KernelLost`."""
        if self.kernel.capsule is not None and (status := self.kernel.capsule.poll()) is not None:
            self._record_exit(status)
            if not quiet:
                raise self._final_error(KernelLost("The kernel's process ended."))

    def _record_exit(self, status: int) -> None:
        kernel = self.kernel
        kernel.exit_status = status
        if kernel.capsule is not None:
            if kernel.image is None:
                kernel.capsule.wait_for_cleanup()
            kernel.capsule.close()
            kernel.capsule = None
        host_memory.end_spill(kernel)
        kernel.kept_image = restore.retire_image(kernel) or kernel.kept_image
        host_memory.discard_chunks(kernel)
        self._advance(plans.ProcessEvent.EXITED)
        self.gate.kernel_died()
