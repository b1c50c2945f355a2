"""Failures of a verb: whether a wake is tried once more, and the error that the caller gets."""

from __future__ import annotations

import copy

from .. import errors
from ..errors import GpuCkptError, ImageNotFound, KernelLost
from ..image.image import Image
from .context import ENDED, REQUESTED, KernelState, Reason
from .plans import State, Step

#: The steps of a wake from an image in which a process can be killed, or not answer, by chance.
_CHANCY = frozenset({Step.CRIU_RESTORE, Step.CUDA_RESUME, Step.CONNECT, Step.THAW})
#: The classes, without subclasses, of the errors of such a step.  Other errors are the same however often it is tried:
#: files, ports, space on the GPU, in memory and on the disk, the image, a cancellation.  A deadline would pass again.
BY_CHANCE = frozenset[type[Exception]](
    {errors.AgentError, errors.GateError, errors.KernelSilent, errors.CudaError, errors.HelperGone}
    | {errors.CapsuleError, errors.CapsuleGone, errors.CriuError, errors.CriuKilled}
    | {errors.PidTaken, errors.PipesExhausted}
)
TRIED_TWICE = (
    "It was tried twice, each time in a fresh process; nothing is lost. Run a cell to try again. If it fails again, "
    "`jupyter gpu-ckpt match {image}` says what has changed here since; after a restart of the host, or on another "
    "node (`jupyter gpu-ckpt push`), it may come back. A restart of the kernel begins anew without its variables."
)


def may_succeed_again(kernel: KernelState, failed_at: Step | None, failure: Exception | None) -> bool:
    """Return whether a wake that failed is tried once more, at once, in a fresh capsule: see `BY_CHANCE`."""
    wanted = kernel.machine.state is State.CHECKPOINTED and kernel.cancellation.reason is Reason.NONE
    return wanted and failed_at in _CHANCY and type(failure) in BY_CHANCE


def what_is_left(kernel: KernelState) -> str:
    """Return what is left of a kernel, for `GpuCkptError.left`."""
    image = _kept(kernel)
    kept = f"the image is kept as {image.id}" if image else ""
    if kernel.image is not None and not image:
        return "the kernel is gone, and its image is deleted"
    where = "in host memory" if kernel.spill_directory is None else "on the disk"
    suspended = f"the kernel is suspended, its device memory is kept {where}"
    texts = {State.RUNNING: "the kernel runs on", State.SUSPENDED: suspended, State.CHECKPOINTED: kept}
    texts[State.OFF_GPU] = f"the kernel runs on, its device memory is kept {where}"
    return texts.get(kernel.machine.state, "; ".join(filter(None, ["the kernel is gone", kept])))


def _kept(kernel: KernelState) -> Image | None:
    """Return the image that a failure leaves: of a kernel that its owner ends, what the owner keeps."""
    if kernel.is_being_ended and kernel.image is not None and not kernel.keeps_at_end(kernel.image):
        return kernel.kept_image
    return kernel.image or kernel.kept_image


def final_error(kernel: KernelState, error: Exception) -> GpuCkptError:
    """Return a copy of a step's error with what is left behind after the undo."""
    error = copy.copy(GpuCkptError.from_exception(error))
    cause = {} if isinstance(error, KernelLost) else {"cause": error.code}
    is_dead = kernel.machine.state is State.DEAD
    if kernel.cancellation.reason is Reason.END or (is_dead and kernel.end_requested):
        # `terminate` closed the capsule during the step: that step's own error would mislead.
        error = KernelLost(ENDED, hint=REQUESTED, **cause)
    elif is_dead:
        status = kernel.exit_status
        error = KernelLost(f"The kernel's process ended (status {status}).", status=status, **cause)
    error.left = what_is_left(kernel)
    if image := _kept(kernel):
        error.details = {"image": image.id, **error.details}
    if isinstance(error, KernelLost) and image:
        error.hint = f"{error.hint} The image is an earlier state of it (`jupyter gpu-ckpt list`)."
    if isinstance(error, ImageNotFound):
        error.left = "nothing: the image was removed while the kernel was away"
    return error
