"""The present state of a kernel that goes back: its image is completed when the kernel is back (`image.completion`).

Its device memory stays in host memory, by links, and takes nobody's time before the kernel runs again.  Until the image
is complete the kernel sleeps in it all the same: a wake of it waits for that first.
"""

from __future__ import annotations

import contextlib
import logging

from ..cuda.fastpath import unlink_extents
from ..errors import GpuCkptError, NoSpace
from ..files.disk import mapped_errors
from ..image import chunk_cache, layout, lease, links
from ..image.completion import Completion
from ..image.draft import Draft
from ..image.image import Image
from ..image.manifest import Manifest
from .context import Attempt, KernelState, Reason
from .plans import State, Step

_log = logging.getLogger(__name__)

_KEPT_NOT = "The disk filled up: the kernel is back, and its state from before could not be kept."


def may_be_later(attempt: Attempt, needed: int) -> bool:
    """Return whether an image of ``needed`` bytes may be completed when its kernel is back from another one.

    The disk must have the space of its device memory twice, as others may need it meanwhile.  Nothing that is to be
    encrypted waits: CRIU's files lie in memory then, which ends with the server's process.
    """
    store = attempt.kernel.engine.store
    if attempt.next_image is None or not store.may_write_plain():
        return False
    return store.free() >= needed + attempt.swapped_bytes


def begin(attempt: Attempt, draft: Draft) -> bool:
    """Begin the completion of a draft with the device memory that is linked; return False if that cannot be."""
    assert attempt.linked is not None
    try:
        completion = Completion(attempt.kernel.engine.store, draft, attempt.linked, unlink_extents)
    except (GpuCkptError, OSError) as error:
        _log.info("Device memory is written before the kernel goes back: %s", error)
        return False
    attempt.resources.pop_all()  # the links are the completion's from now on
    attempt.resources.callback(completion.abort)
    attempt.completion = completion
    return True


def hand_over(attempt: Attempt, manifest: Manifest) -> Image | None:
    """Hand the draft over, and have the kernel sleep in what will be its image; return None if that cannot be.

    Raises `QuotaExceeded`, `NoSpace`, `StoreUnwritable`.
    """
    kernel, draft, completion = attempt.kernel, attempt.draft, attempt.completion
    assert draft is not None and completion is not None
    capsule, image = kernel.require_capsule(), Image(draft.target, manifest)
    with mapped_errors(kernel.engine.store.root):
        draft.reserve(draft.size() + attempt.swapped_bytes)
        lease.publish_claim(draft.path, capsule.host_pid, capsule.keep_fd)
        image.unretire()
    try:
        completion.hand_over(manifest)
    except GpuCkptError as error:
        _log.info("Device memory is written before the kernel goes back: %s", error)
        with mapped_errors(kernel.engine.store.root):
            lease.withdraw_claim(draft.path)
        return None
    attempt.resources.pop_all()
    kernel.completion, attempt.completion, attempt.linked = completion, None, None
    attempt.draft = attempt.manifest = None
    links.keep(manifest)
    kernel.engine.store.hashes.begin()
    return image


def completed(kernel: KernelState) -> Image:
    """Wait for the image that is being completed.

    Raises `NoSpace` where the disk is full: a kernel that sleeps in it waits on, of any other the image is given up;
    `StoreUnwritable`, and `KernelLost` if the kernel is ended, whose image is completed all the same.
    """
    completion, sleeps = kernel.completion, kernel.machine.process is False
    assert completion is not None
    with kernel.trace.step(Step.KEEP.value):
        try:
            image = completion.wait(
                lambda: kernel.cancellation.check(Reason.END),
                lambda: chunk_cache.evict(kernel.engine.store.root),
                gives_up=not sleeps,
            )
        except NoSpace as error:
            if sleeps:
                raise
            kernel.completion = None
            raise NoSpace(_KEPT_NOT, **error.details) from error
        except BaseException:
            detach(kernel)
            raise
    kernel.completion = None
    return image


def save_point(kernel: KernelState, present: Image) -> Image:
    """Return the save point of the state from before, complete, of a kernel that is back.  Raises as `completed`."""
    if kernel.completion is None:
        return present
    _wake(present)
    return completed(kernel)


def begin_save_point(kernel: KernelState, image: Image) -> None:
    """Begin to complete an image in which the kernel does not sleep: it could not go back."""
    assert kernel.completion is not None
    _wake(image)
    kernel.completion.begin()


def _wake(image: Image) -> None:
    """Record that the kernel does not sleep in an image that may still be a draft."""
    image.retire()
    layout.mark(image.path, layout.REPLACED).unlink(missing_ok=True)


def end(kernel: KernelState) -> None:
    """Complete what a going back has left that failed.  Never raises."""
    if kernel.completion is not None and kernel.machine.state is not State.CHECKPOINTED:
        with contextlib.suppress(GpuCkptError):
            completed(kernel).withdraw_claim()


def detach(kernel: KernelState) -> None:
    """Leave an image to be completed by itself.  Never raises."""
    completion, kernel.completion = kernel.completion, None
    if completion is not None:
        completion.detach()
