"""The driver: the verbs of one kernel, run step by named step as the machine asks.

Everything here is plain synchronous code on whatever thread calls a verb; one lock makes the verbs of one kernel take
turns.  What was done before a step that failed is undone by the machine's undo steps.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import signal
import threading
from collections.abc import Callable, Mapping, Sequence

from ..capsule.capsule import Capsule
from ..cuda.driver import CudaState
from ..errors import (
    AgentError,
    CapsuleError,
    CapsuleGone,
    CriuError,
    CriuKilled,
    CudaError,
    GateError,
    GpuCkptError,
    HelperGone,
    ImageNotFound,
    KernelLost,
    KernelSilent,
    PidTaken,
    PipesExhausted,
    StateError,
)
from ..image.store import Image
from ..trace import TracedStep, notify
from . import machine
from .context import Engine, GateProtocol, Home, LifecycleSettings, Saved
from .leaving import Leaving
from .machine import MachineState, State, Step
from .preflight import MARGIN, available_memory
from .returning import Returning

_log = logging.getLogger(__name__)

#: Seconds to take a process off the GPU that is to be killed, and bytes a second at which the driver does it.
_OFF_GPU, _DRIVERS_RATE = 5.0, 2.5e9
#: The steps of a wake from an image in which a process can be killed, or not answer, by chance.
_CHANCY = frozenset({Step.CRIU_RESTORE, Step.CUDA_RESUME, Step.CONNECT, Step.THAW})
#: What such a step raises then, by its very class.  What is not here is the same however often it is tried: files and
#: ports, room on the GPU, in memory and on the disk, the image itself, its owner's word.  A deadline would pass again.
_BY_CHANCE = frozenset(
    {
        AgentError,
        CapsuleError,
        CapsuleGone,
        CriuError,
        CriuKilled,
        CudaError,
        GateError,
        HelperGone,
        KernelSilent,
        PidTaken,
        PipesExhausted,
    }
)
_TRIED_TWICE = (
    "It was tried twice, each time in a fresh process; nothing is lost. Run a cell to try again. If it fails again, "
    "`jupyter gpu-ckpt match {image}` says what has changed here since; after a restart of the host, or on another "
    "node (`jupyter gpu-ckpt push`), it may come back. A restart of the kernel begins anew without its variables."
)

__all__ = ["Engine", "GateProtocol", "Home", "Lifecycle", "LifecycleSettings", "Saved"]


class Lifecycle(Leaving, Returning):
    """One kernel's way between GPU, RAM and disk.

    Verbs (`suspend`, `resume`, `checkpoint`, `restore`, `wake`) return when the kernel is in the state they name, or
    raise a `GpuCkptError` whose ``left`` says in which state it is instead.
    """

    # -- verbs

    @property
    def state(self) -> State:
        """The kernel's state; may change at any moment."""
        return self.kernel.state

    def launch(self, argv: Sequence[str], env: Mapping[str, str], cwd: str | None) -> None:
        """Start the kernel in a fresh capsule.  After failure there is no process."""
        with self._lock:
            capsule = Capsule.create(self.home.runtime_dir, stdout=self.home.stdout, stderr=self.home.stderr)
            try:
                capsule.spawn(argv, env, cwd)
                if self.home.outlive:
                    capsule.outlive()
            except BaseException:
                capsule.close()
                raise
            self.capsule = capsule
            self.exit_status = None
            self._saved = Saved()
            self._restored_on_gpu = False
            self._take(machine.advance(self.kernel, machine.Launched())[0])

    def adopt(self, *, capsule: Capsule | None = None, image: Image | None = None) -> None:
        """Become the owner of a kernel that lives in ``capsule``, or sleeps on ``image``; its last owner is gone.

        Whatever that owner was in the middle of is mended: stopped processes go on, a CUDA lock is taken off.
        """
        with self._lock:
            self.capsule, self.image = capsule, image
            state = State.CHECKPOINTED if capsule is None else self._mend(capsule)
            # Its owner may have ended just after it had published an image.  Of a suspended kernel that still is the
            # state, and what it could come back from if it died now.
            self._outruns_images = capsule is not None
            self._restored_on_gpu = capsule is not None  # nobody knows
            if state is State.RUNNING:
                self._outrun_images()
            self._take(machine.advance(self.kernel, machine.Adopted(state))[0])
            if state is not State.RUNNING:
                self.gate.sleep()

    def begin_leaving(self) -> None:
        """`leave` will be called: from now on nobody waits for content from the cold tier, however far a wake is."""
        self._leaving.set()

    def leave(self) -> None:
        """Let go of a kernel that another server is to adopt: a living one goes on without an owner.

        CRIU, if it is at work, is made to give up: a dump is taken back, a restore keeps its image.  The driver's part
        of a verb cannot be broken off, and is waited for.
        """
        self.begin_leaving()
        self._break_off()
        for capsule in (self._filling, self.capsule):
            if capsule is not None:
                capsule.cancel_criu()
        with self._lock:
            self._breaking_off.clear()
            if self.capsule is not None:
                with contextlib.suppress(CapsuleError, CapsuleGone):  # ended meanwhile
                    self.capsule.outlive()
                self.capsule.detach()
                self.capsule = None
            self._spill = None  # it is the capsule's
            self._forget_chunks()

    def _break_off(self) -> None:
        self._breaking_off.set()
        if (reading := self._device_read) is not None:
            reading.cancel()

    def suspend(self) -> None:
        """CUDA state to host RAM; the process lives.  After failure the kernel runs on."""
        self._perform(machine.Suspend())

    def resume(self) -> None:
        """CUDA state back to the GPU.  After failure the kernel stays suspended."""
        self._perform(machine.Resume())

    def checkpoint(self) -> Image:
        """Everything to an image; no process, no GPU memory.  After failure the kernel is as it was before."""
        self._perform(machine.Checkpoint())
        assert self.image is not None
        return self.image

    def restore(self, gpu_map: Mapping[str, str] | None = None, *, accept_changed_files: bool | None = None) -> None:
        """Back from the image, on the GPUs named by ``gpu_map`` (old UUID: new UUID) or the same ones.

        ``accept_changed_files``: files that were changed while the kernel was away are taken as they are now; None: as
        the settings say.  After failure the image is kept and the kernel stays checkpointed.  Raises `StateError` for a
        ``gpu_map`` and a kernel that is back already.
        """
        with self._lock:
            if gpu_map and self.state is not State.CHECKPOINTED:
                message = f"The kernel is {self.state.value}; other GPUs can be named for a checkpointed one only."
                raise StateError(message, left=self._left())
            self._gpu_map, self._accept_changed_files = gpu_map, accept_changed_files
            try:
                self._perform(machine.Restore())
            finally:
                self._gpu_map = self._accept_changed_files = None

    def wake(self) -> None:
        """Resume or restore, whatever the kernel needs to run."""
        self._perform(machine.Wake())

    def terminate(self) -> None:
        """End the kernel, now, whatever it is doing.  Its image, if there is one, stays until `discard_image`."""
        self._end_gently()
        # Outside the lock: a verb under way then fails in its current step, unwinds, and lets the lock go.
        self._ending.set()
        self.gate.cancel_prompt()
        if (proof := self._proof) is not None:
            proof.cancel()
        self._break_off()
        for capsule in (self._filling, self.capsule):
            if capsule is not None:
                capsule.close()
        with self._lock:
            self._ending.clear()
            self._breaking_off.clear()
            if self.capsule is not None:
                self.capsule.close()
                self.capsule = None
            self._end_spill()
            if self.state not in (State.DEAD, State.STARTING):
                self._take(machine.advance(self.kernel, machine.Terminated())[0])
            self.exit_status = -signal.SIGKILL if self.exit_status is None else self.exit_status
            self._forget_chunks()
            with contextlib.suppress(GpuCkptError):  # a gate that failed serves nobody who would have to know
                self.gate.kernel_died()

    def _end_gently(self) -> None:
        """End a kernel that no verb is moving, and that has no image, as a kernel ends that nobody checkpoints."""
        # A verb that has done its steps lets go in a moment; one that has not is broken off by what comes next.
        if not self._lock.acquire(timeout=0.0 if self.kernel.plan is not None else 1.0):
            return
        try:
            capsule, resting = self.capsule, self.kernel.plan is None and self.image is None
            if capsule is not None and resting and self.state in (State.RUNNING, State.SUSPENDED):
                if self.state is State.RUNNING and self._restored_on_gpu:
                    self._take_off_gpu(capsule.host_pid)
                capsule.end()
        finally:
            self._lock.release()

    def _take_off_gpu(self, pid: int) -> None:
        """Suspend the CUDA state of a process that is to be killed, if that can be done in `_OFF_GPU` seconds.

        With a newer driver than those this project is made for, the end of a living process that the driver had
        restored hung the host, and that of a suspended one did not (cuda-checkpoint's issue 53).
        """

        def suspend() -> None:
            with contextlib.suppress(GpuCkptError):
                cuda = self.engine.cuda
                if cuda.state(pid) is CudaState.RUNNING:
                    cuda.lock(pid, _OFF_GPU / 2)
                    bytes = sum(self.engine.gpus.used_by(pid).values())
                    if bytes < _OFF_GPU / 2 * _DRIVERS_RATE and bytes + MARGIN < available_memory():
                        cuda.checkpoint(pid, timeout_s=_OFF_GPU / 2)

        thread = threading.Thread(target=suspend, name="gpu-ckpt-off-gpu", daemon=True)
        thread.start()
        thread.join(_OFF_GPU)  # a driver that does not answer keeps nobody from ending the kernel

    def discard_image(self) -> None:
        """Delete the kernel's image: its owner wants a fresh kernel."""
        with self._lock:
            if self.image is not None and self.state is not State.CHECKPOINTED:
                try:
                    self._remove_image()
                except ImageNotFound:
                    self.image = None
                except GpuCkptError:  # in use, or not to be written: at least no server brings it back by itself
                    self._retire_image()

    def retire_image(self) -> None:
        """Keep the image of a kernel that was ended; no server brings it back by itself."""
        with self._lock:
            if self.image is not None and self.state is not State.CHECKPOINTED:
                image, self.image = self.image, None
                with contextlib.suppress(OSError):
                    image.retire()

    def forget(self) -> None:
        """The kernel has ended for good: where no image of it is left, its record is put away."""
        store, kernel_id = self.engine.store, self.home.kernel_id
        with contextlib.suppress(GpuCkptError, OSError):
            if not any(image.manifest.kernel_id == kernel_id for image in store.images()):
                store.generations.close(kernel_id)

    def poll(self) -> int | None:
        """Exit status of the kernel; None while it runs, sleeps, or is on its way.  Never blocks."""
        if self.state is State.DEAD:
            return -signal.SIGKILL if self.exit_status is None else self.exit_status
        # The lock first: a verb may be in the middle of a request to the capsule, and `Capsule.poll` would wait for it.
        if self.capsule is None or not self._lock.acquire(blocking=False):
            return None  # a verb is under way, and will notice
        try:
            if self.capsule is not None and self.kernel.plan is None and (status := self.capsule.poll()) is not None:
                if self.image is None and self.capsule.is_cleaning_up():
                    return None  # as long as that takes: else the capsule's end would cut it short
                self._bury(status)
                return status
        finally:
            self._lock.release()
        return None

    # -- the drive

    def _perform(self, event: machine.Event) -> None:
        with self._lock:
            if self.state not in (State.CHECKPOINTED, State.DEAD, State.STARTING):
                self._notice_death()
            del self._recorder.events[:]
            try:
                steps = self._feed(event)
            except StateError as error:
                error.left = self._left()
                raise
            moved = bool(steps)
            if self._chunks is not None and moved:
                self._chunks.stop(outdated=self._goal(event) is State.RUNNING)
            failed_at, failure = self._drive(steps)
            again = failure is not None and self._may_succeed_again(failed_at, failure)
            if again:
                step, code = failed_at.value if failed_at else "", getattr(failure, "code", "")
                _log.warning("Kernel %s: %s failed (%s); it is woken once more", self.home.kernel_id, step, code)
                failure = self._drive(self._feed(event))[1]
            goal = self._goal(event)
            try:
                if self.state is not State.CHECKPOINTED:
                    self._notice_death(quiet=failure is not None)
                if failure is not None:
                    self._serve(goal)
            finally:
                self._unlease()
            if self._chunks is not None:
                self._chunks.in_use = False
            if self.state is State.SUSPENDED and moved:
                self._write_ahead()
            elif self.state is not State.SUSPENDED and not self.settings.keep_chunks:
                self._forget_chunks()
            if failure is not None and self.state is not goal:
                told = self._told(failure)
                if again and self.image is not None and type(failure) in _BY_CHANCE:
                    told.hint = _TRIED_TWICE.format(image=self.image.id)
                if goal is State.RUNNING and self.state is not State.DEAD:
                    # Whoever waits for the kernel hears why it did not come; the next message tries again.
                    self.gate.fail(told)
                raise told from failure

    def _drive(self, steps: tuple[Step, ...]) -> tuple[Step | None, Exception | None]:
        """Run a plan from its first ``steps`` to its end or, after a failure, back; the first failure and its step."""
        failed_at: Step | None = None
        failure: Exception | None = None
        while steps or self.kernel.unwinding:
            if self.kernel.unwinding:
                steps = self._feed(machine.Unwound(self._unwind(steps)))
                continue
            try:
                self._run(steps[0])
            except Exception as error:
                if failure is None:
                    failed_at, failure = steps[0], error
                code = getattr(error, "code", type(error).__name__)
                steps = self._feed(machine.StepFailed(steps[0], code, done=self._step_done))
            else:
                steps = self._feed(machine.StepDone(steps[0]))
        # No resting state holds either; whatever step was to give them back may have failed before it could.
        self._room.close()
        return failed_at, failure

    def _may_succeed_again(self, failed_at: Step | None, failure: Exception) -> bool:
        """Whether a wake that failed is worth one more try, at once, in a fresh capsule: see `_BY_CHANCE`."""
        unwanted = self._ending.is_set() or self._leaving.is_set() or self._breaking_off.is_set()
        sleeps_on = self.state is State.CHECKPOINTED and not unwanted
        return sleeps_on and failed_at in _CHANCY and type(failure) in _BY_CHANCE

    def _serve(self, goal: State) -> None:
        """A kernel that runs serves its clients, and one that is away is woken by them, whatever else went wrong."""
        if self.state in (State.SUSPENDED, State.CHECKPOINTED) and goal is not State.RUNNING:
            self.gate.sleep()
        elif self.state is State.RUNNING:
            self.discard_image()  # one that its wake could not remove
            try:
                self.gate.release()
            except StateError:  # not connected
                with contextlib.suppress(GpuCkptError), self._answering():
                    self.gate.open(self.settings.connect)
                    self.gate.release()

    def _feed(self, event: machine.Event) -> tuple[Step, ...]:
        kernel, steps = machine.advance(self.kernel, event)
        self._take(kernel)
        return steps

    @staticmethod
    def _goal(event: machine.Event) -> State:
        if isinstance(event, machine.Suspend):
            return State.SUSPENDED
        return State.CHECKPOINTED if isinstance(event, machine.Checkpoint) else State.RUNNING

    def _run(self, step: Step) -> None:
        self._step_done = False
        plan = self.kernel.plan
        if plan is not None and plan.to is State.RUNNING and not self.kernel.unwinding:
            self._require_wanted()
        with self.trace.step(step.value) as traced:
            method: Callable[[TracedStep], None] = getattr(self, f"_{step.value}")
            method(traced)
            # From here on only a fault of the trace can make the step fail, and what it did must be undone.
            self._step_done = True

    def _unwind(self, steps: Sequence[Step]) -> tuple[Step, ...]:
        """Run undo steps, each whatever became of the one before; the ones that failed."""
        failed: list[Step] = []
        for step in steps:
            if Step.CUDA_RESUME in failed:
                # It stays suspended and quiesced: its messages stay held, and the next one tries again.
                if step is Step.THAW:
                    continue
                step = Step.SLEEP if step is Step.RELEASE else step
            try:
                self._run(step)
            except Exception:
                failed.append(step)
        return tuple(failed)

    def _take(self, kernel: MachineState) -> None:
        changed = kernel.state is not self.kernel.state
        self.kernel = kernel
        if changed:
            # In the middle of a plan: nobody who only listens may stop it there.
            notify(self.on_state, kernel.state)

    def _left(self) -> str:
        """What there is of the kernel now, for the ``left`` of an error."""
        image = self.image or self.kept
        kept = f"the image is kept as {image.id}" if image else ""
        place = "in host memory" if self._spill is None else "on the disk"
        return {
            State.RUNNING: "the kernel runs on",
            State.SUSPENDED: f"the kernel is suspended, its device memory is kept {place}",
            State.CHECKPOINTED: kept,
        }.get(self.state, "; ".join(filter(None, ["the kernel is gone", kept])))

    def _told(self, error: Exception) -> GpuCkptError:
        """The error with what is left behind, now that what its step left was undone; the step's own stays as it is."""
        if not isinstance(error, GpuCkptError):
            error = GpuCkptError(f"{type(error).__name__}: {error}")
        error = copy.copy(error)
        if self.state is State.DEAD:
            cause = {} if isinstance(error, KernelLost) else {"cause": error.code}
            ended = f"The kernel's process ended (status {self.exit_status})."
            error = KernelLost(ended, status=self.exit_status, **cause)
        elif self._ending.is_set():
            # `terminate` took the capsule from under the step: what that step says of it would mislead.
            cause = {} if isinstance(error, KernelLost) else {"cause": error.code}
            error = KernelLost("The kernel was ended by its owner (a restart or a shutdown) meanwhile.", **cause)
        error.left = self._left()
        if isinstance(error, KernelLost) and (self.image or self.kept):
            error.hint = f"{error.hint} The image is an earlier state of it (`jupyter gpu-ckpt list`)."
        if isinstance(error, ImageNotFound):
            error.left = "nothing: the image was removed while the kernel was away"
        return error

    def _notice_death(self, quiet: bool = False) -> None:
        """If the process died by itself, say so to the machine, and (unless ``quiet``) to the caller."""
        if self.capsule is not None and (status := self.capsule.poll()) is not None:
            self._bury(status)
            if not quiet:
                raise self._told(KernelLost("The kernel's process ended."))

    def _bury(self, status: int) -> None:
        self.exit_status = status
        if self.capsule is not None:
            if self.image is None:
                self.capsule.wait_for_cleanup()
            self.capsule.close()
            self.capsule = None
        self._end_spill()
        self._retire_image()
        self._forget_chunks()
        self._take(machine.advance(self.kernel, machine.Exited())[0])
        self.gate.kernel_died()

    def _retire_image(self) -> None:
        """Keep the image, but for no server to bring back by itself: the kernel has been something else since."""
        if self.image is not None:
            self.kept, self.image = self.image, None
            with contextlib.suppress(OSError):
                self.kept.retire()
