"""The verbs of one kernel, each run step by named step (`steps`) in the order of its plan (`plans`).

Everything here is plain synchronous code on the thread that calls a verb; the kernel's lock makes its verbs take turns.
What was done before a step that failed is undone by the plan's undo steps.  Facts about a kernel are read by functions
of its `KernelState`: `suspend.findings`, `host_memory.device_bytes`, `host_memory.resident`.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from ..capsule.capsule import ANSWER, Capsule
from ..errors import CapsuleError, CapsuleGone, GpuCkptError, KernelSilent, StateError
from ..image.lease import MOMENT
from ..image.save_point import SavePoint, find, of_sleep, require_free_name
from ..image.store import Image
from ..trace import Trace
from . import compatibility, completing, dump, endings, failures, going_back, host_memory, plans, restore, resume
from .context import Attempt, Engine, FilesChoice, GateProtocol, Home, KernelState, Reason, Saved
from .plans import Move, State
from .settings import LifecycleSettings
from .steps import Steps, advance, drive

_log = logging.getLogger(__name__)


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
        self.on_state = self.kernel.on_state

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

    # -- a kernel comes

    def launch(self, argv: Sequence[str], env: Mapping[str, str], cwd: str | None) -> None:
        """Start the kernel in a fresh capsule.  After failure there is no process."""
        with self.kernel.lock:
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
            self.kernel.capsule, self.kernel.exit_status, self.kernel.end_requested = capsule, None, False
            self.kernel.saved, self.kernel.restored_on_gpu, self.kernel.disconnected = Saved(), False, False
            self.kernel.lasting_refusal = self.kernel.refused_checkpoint = None
            self.kernel.serves_off_gpu = False
            self.kernel.inherited, self.kernel.without_cuda = {}, set()
            advance(self.kernel, plans.ProcessEvent.LAUNCHED)

    def attach(self, *, capsule: Capsule | None = None, image: Image | None = None) -> None:
        """Become the owner of a kernel in ``capsule``, or of a checkpointed one with ``image``; its last owner is gone.

        A verb that this owner did not finish is undone: stopped processes continue, a CUDA lock is released.
        """
        with self.kernel.lock:
            kernel = self.kernel
            kernel.capsule, kernel.image = capsule, image
            state = State.CHECKPOINTED if capsule is None else resume.repair(kernel, capsule)
            # Its owner may have ended just after it had published an image.  Of a suspended kernel that still is the
            # state, and what it could be restored from if it died now.
            kernel.supersedes_images = capsule is not None
            kernel.restored_on_gpu = capsule is not None  # nobody knows
            kernel.disconnected = state is State.SUSPENDED
            if state is State.RUNNING:
                resume.supersede_images(kernel)
            advance(self.kernel, plans.Attached(state))
            if state is not State.RUNNING:
                self.gate.sleep()
            if image is not None:
                compatibility.hash_meanwhile(image.manifest, kernel.engine.store)

    # -- verbs

    def suspend(self) -> None:
        """Move the CUDA state to host RAM; the process lives.  After failure the kernel runs on."""
        self._perform(Move.SUSPEND, State.SUSPENDED)

    def yield_gpu(self) -> None:
        """Move the CUDA state to host RAM, also in the middle of a cell; cells run on, and their calls of CUDA wait.

        After failure the kernel runs on.  Raises `UnsupportedCuda` where these calls could not be kept waiting.
        """
        self._perform(Move.YIELD, State.OFF_GPU)

    def resume(self) -> None:
        """Move the CUDA state back to the GPU.  After failure the kernel stays suspended."""
        self._perform(Move.RESUME, State.RUNNING)

    def checkpoint(self, save_point: SavePoint | None = None) -> Image:
        """Write everything to an image; no process, no GPU memory.  After failure the kernel is as it was before.

        ``save_point``: the image stays as this one when the kernel comes back from it.
        """
        self._perform(Move.CHECKPOINT, State.CHECKPOINTED, save_point=save_point)
        assert self.kernel.image is not None
        return self.kernel.image

    def save(self, save_point: SavePoint, notebook: bytes | None = None) -> Image:
        """Write everything to an image, which stays under its name; the kernel pauses for that, and continues.

        ``notebook``: its document, to be kept with it.  Of a kernel that is killed since its dump the save point is
        all that is left.  After failure the kernel is as it was before.  Raises `SavePointExists`, `BadRequest` for a
        name that none can have, `StateError` for a kernel that sleeps.
        """
        with self.kernel.lock:
            if self.state is State.CHECKPOINTED:
                hint = "Wake it first, as a cell does, and save it then. A branch can begin from it as it sleeps."
                raise StateError("A kernel that sleeps cannot be saved: it is in an image.", hint=hint)
            require_free_name(self.engine.store.images(), self.home.kernel_id, save_point.name)
            self.kernel.save_point = None
            options: dict[str, Any] = {"save_point": save_point, "notebook": notebook, "continues": True}
            self._perform(Move.SAVE, State.CHECKPOINTED, **options)
            assert self.kernel.save_point is not None
            return self.kernel.save_point

    def back(
        self,
        name: str,
        files: FilesChoice = None,
        notebook: bytes | None = None,
        gpu_map: Mapping[str, str] | None = None,
    ) -> Image:
        """Go back to the save point of this name.  The present state is saved first, as an automatic one: return that.

        A kernel that sleeps is not woken for that: the image that it sleeps in becomes the save point, or is one.

        ``files``: what the kernel gets of files that differ.  ``notebook``: the present document.  ``gpu_map``: as for
        `restore`, of the save point.  After failure the kernel is in its present state, or asleep in it.  Raises
        `FilesDiffer` for files without a choice, `SavePointNotFound`.
        """
        kernel, store = self.kernel, self.engine.store
        with kernel.lock, contextlib.ExitStack() as stack:
            stack.callback(completing.end, kernel)
            stack.callback(kernel.discard_ahead)
            asleep = restore.image_of_sleep(kernel)
            point = find(store.images(), self.home.kernel_id, name)
            if asleep is not None and asleep.id == point.id and files is None:
                self._perform(Move.RESTORE, State.RUNNING, gpu_map=gpu_map)
                return point
            if self.state not in (State.RUNNING, State.CHECKPOINTED, State.DEAD):
                self.wake()
            if point.archived:
                with point.lease():
                    restore.fetch_content(kernel, point)
            then = going_back.check(kernel, point, files, gpu_map)
            if asleep is not None and not going_back.is_covered(store, asleep, then):
                # Only a dump keeps the files that are replaced.  Others may have changed them: as they are now, they
                # belong to the state that is saved.
                if asleep.is_save_point:
                    going_back.put_missing_files_back(store, asleep)
                going_back.put_code_back(store, point, asleep, then)
                self._perform(Move.RESTORE, State.RUNNING, accept_changed_files=True)
                asleep, then = None, going_back.check(kernel, point, files, gpu_map)
            stack.callback(kernel.release_point_lease)
            kernel.point_lease = point.lease(MOMENT)  # nobody deletes it while the present state is saved
            name = going_back.automatic_name("before going back", store.images(), self.home.kernel_id)
            if asleep is None:
                options: dict[str, Any] = {"save_point": SavePoint(name, automatic=True), "notebook": notebook}
                options |= {"next_image": point, "gpu_map": gpu_map, "replaced": then}
                self._perform(Move.CHECKPOINT, State.CHECKPOINTED, **options)
            elif not asleep.is_save_point:
                before = SavePoint(name, automatic=True, left_out=1, parent=kernel.parent)
                kernel.image = of_sleep(store, asleep, before, notebook, kernel.settings.kept_file_bytes, then)
            present, kernel.image = kernel.image, point
            assert present is not None
            try:
                self._perform(Move.RESTORE, State.RUNNING, files=files, present=present, gpu_map=gpu_map)
            except GpuCkptError as error:
                if self.state is State.CHECKPOINTED:
                    kernel.image = present
                    if asleep is None:
                        with contextlib.suppress(GpuCkptError):  # the next message tries again
                            self._perform(Move.RESTORE, State.RUNNING)
                    error.left = failures.what_is_left(kernel)
                elif kernel.completion is not None:  # it was ended meanwhile
                    completing.begin_save_point(kernel, present)
                else:
                    restore.release_save_point(present)
                raise
            present = completing.save_point(kernel, present)
            restore.release_save_point(present)
            going_back.thin_out(kernel)
            return present

    def restore(self, gpu_map: Mapping[str, str] | None = None, *, accept_changed_files: bool | None = None) -> None:
        """Restore the image, on the GPUs named by ``gpu_map`` (old UUID: new UUID) or the same ones.

        ``accept_changed_files``: accept files that were changed since the checkpoint as they are now; None: as the
        settings say.  After failure the image is kept and the kernel stays checkpointed.  Raises `StateError` for a
        ``gpu_map`` and a kernel that is not checkpointed.
        """
        with self.kernel.lock:
            if gpu_map and self.state is not State.CHECKPOINTED:
                message = f"The kernel is {self.state.value}; other GPUs can be named for a checkpointed one only."
                raise StateError(message, left=failures.what_is_left(self.kernel))
            self._perform(Move.RESTORE, State.RUNNING, gpu_map=gpu_map, accept_changed_files=accept_changed_files)

    def wake(self) -> None:
        """Resume or restore, whatever the kernel needs to run; connect to one that runs and could not be connected to.

        After failure the clients that wait have the error, and the next message tries again.
        """
        with self.kernel.lock:
            if self.state is not State.RUNNING:
                return self._perform(Move.WAKE, State.RUNNING)
            endings.notice_death(self.kernel)
            try:
                endings.reconnect(self.kernel)
            except GpuCkptError as error:
                error.left = failures.what_is_left(self.kernel)
                with contextlib.suppress(StateError):
                    self.gate.fail(error)
                raise

    # -- a kernel goes

    def begin_detach(self) -> None:
        """Announce `detach`: from now on no wake waits for content from the cold tier."""
        self.kernel.cancellation.request(Reason.DETACH_SOON)

    def detach(self) -> None:
        """Give up a kernel for another server to attach; a living one runs on without an owner.

        CRIU is cancelled: a dump is undone, a restore keeps its image.  Calls of the CUDA driver are waited for.
        """
        endings.cancel(self.kernel, Reason.DETACH)
        with self.kernel.lock:
            kernel = self.kernel
            kernel.cancellation.reset(Reason.DETACH_SOON, requested=Reason.DETACH)
            if kernel.capsule is not None:
                with contextlib.suppress(CapsuleError, CapsuleGone):  # ended meanwhile
                    kernel.capsule.outlive()
                kernel.capsule.detach()
                kernel.capsule = None
            kernel.spill_directory = None  # it is the capsule's
            host_memory.discard_chunks(kernel)
            completing.detach(kernel)

    def terminate(self) -> None:
        """End the kernel now, also during a verb.  Its image stays until `endings.discard_image`."""
        # A verb that has done its steps releases the lock in a moment; one that has not is cancelled.
        if self.kernel.lock.acquire(timeout=0.0 if self.kernel.machine.plan is not None else 1.0):
            try:
                endings.end_gently(self.kernel)
            finally:
                self.kernel.lock.release()
        # Outside the lock: a verb under way then fails in its current step, unwinds, and releases the lock.
        endings.cancel(self.kernel, Reason.END)
        with self.kernel.lock:
            endings.terminate(self.kernel)

    def poll(self) -> int | None:
        """Return the exit status of the kernel; None while it runs, sleeps, or is being moved.  Never blocks."""
        kernel = self.kernel
        if self.state is State.DEAD:
            return -signal.SIGKILL if kernel.exit_status is None else kernel.exit_status
        # The lock first: a verb may be in the middle of a request to the capsule, and `Capsule.poll` would wait for it.
        if kernel.capsule is None or not self.kernel.lock.acquire(blocking=False):
            return None  # a verb is under way, and will notice
        try:
            capsule = kernel.capsule
            if capsule is not None and kernel.machine.plan is None and (status := capsule.poll()) is not None:
                if kernel.image is None and capsule.is_cleaning_up():
                    return None  # as long as that takes: else the capsule's end would cut it short
                endings.record_exit(kernel, status)
                return status
        finally:
            self.kernel.lock.release()
        return None

    # -- the drive

    def _perform(self, verb: Move, goal: State, **options: Any) -> None:
        with self.kernel.lock:
            kernel = self.kernel
            if self.state not in (State.CHECKPOINTED, State.DEAD, State.STARTING):
                endings.notice_death(kernel)
            try:
                steps = advance(self.kernel, verb)
            except StateError as error:
                error.left = failures.what_is_left(self.kernel)
                raise
            if kernel.chunks is not None and steps:
                kernel.chunks.stop(outdated=goal is State.RUNNING)
            failure, again = self._attempt(Attempt(kernel, goal, **options), steps, retry=True)
            if again:
                options["needs_children"] = isinstance(failure, KernelSilent)  # perhaps it waits for one of them
                failure, _ = self._attempt(Attempt(kernel, goal, again=True, **options), advance(self.kernel, verb))
            if kernel.chunks is not None:
                kernel.chunks.in_use = False
            if self.state is State.SUSPENDED and steps:
                dump.write_ahead(kernel)
            elif self.state is not State.SUSPENDED and not kernel.settings.keep_chunks:
                host_memory.discard_chunks(kernel)
            done = kernel.save_point is not None if verb is Move.SAVE else self.state is goal
            if failure is not None and not done:
                final = failures.final_error(self.kernel, failure)
                if again and kernel.image is not None and type(failure) in failures.BY_CHANCE:
                    final.hint = failures.TRIED_TWICE.format(image=kernel.image.id)
                if goal is State.RUNNING and self.state not in (State.DEAD, State.OFF_GPU):
                    # The clients that wait for the kernel get this error; the next message tries again.
                    self.gate.fail(final)
                raise final from failure

    def _attempt(self, attempt: Attempt, steps: Steps, *, retry: bool = False) -> tuple[Exception | None, bool]:
        """Run one attempt; return its first failure and, to ``retry``, whether another attempt may succeed."""
        self.kernel.attempt = attempt
        try:
            failed_at, failure = drive(attempt, steps)
            if retry and failures.may_succeed_again(self.kernel, failed_at, failure):
                step, code = failed_at.value if failed_at else "", getattr(failure, "code", "")
                _log.warning("Kernel %s: %s failed (%s); it is woken once more", self.home.kernel_id, step, code)
                return failure, True
            if self.state is not State.CHECKPOINTED:
                if isinstance(failure, CapsuleGone) and self.kernel.capsule is not None:
                    # The init's connection ends before its processes do; a kernel that dies is not called running.
                    self.kernel.capsule.wait(ANSWER)
                endings.notice_death(self.kernel, quiet=failure is not None)
            if failure is not None:
                endings.serve(self.kernel, attempt.goal)
            return failure, False
        finally:
            attempt.reservation.close()
            attempt.resources.close()
            if attempt.draft is not None:  # of a save point that could not be published
                attempt.draft.discard()
            self.kernel.attempt = None
