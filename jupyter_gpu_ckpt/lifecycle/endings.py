"""The end of a kernel's process, of its image, and of a verb that is cancelled or has failed.

`lifecycle.Lifecycle` calls most of these functions, with the kernel's lock; `cancel` needs no lock, and `discard_image`
and `keep_image`, which the kernel's owner calls, take it themselves.
"""

from __future__ import annotations

import contextlib
import signal

from ..capsule.capsule import Capsule
from ..errors import GpuCkptError, ImageNotFound, KernelLost, StateError
from . import completing, cuda_processes, failures, host_memory, plans, restore, suspend
from .context import KernelState, Reason
from .plans import State
from .steps import advance


def cancel(kernel: KernelState, reason: Reason) -> None:
    """Have the verb under way stop: request it first, then end what the verb waits for."""
    kernel.cancellation.request(reason)
    attempt, ends = kernel.attempt, reason is Reason.END
    if ends:
        with contextlib.suppress(GpuCkptError):  # the kernel is ended all the same
            kernel.gate.cancel_prompt()
    if attempt is not None:
        reading = attempt.device_read
        for task in (attempt.verification if ends else None, reading.task if reading is not None else None):
            if task is not None:
                task.cancel()
    if (ahead := kernel.ahead) is not None:
        ahead.cancel()
    end = Capsule.close if ends else Capsule.cancel_criu
    for capsule in (attempt.restoring if attempt is not None else None, kernel.capsule):
        if capsule is not None:
            end(capsule)


def end_gently(kernel: KernelState) -> None:
    """End a kernel that no verb is moving and that has no image as a stock kernel ends."""
    rests, state = kernel.machine.plan is None and kernel.image is None, kernel.machine.state
    if kernel.capsule is not None and rests and state in (State.RUNNING, State.SUSPENDED, State.OFF_GPU):
        if state is State.RUNNING and kernel.restored_on_gpu:
            cuda_processes.suspend_before_end(kernel)
        kernel.capsule.end()


def terminate(kernel: KernelState) -> None:
    """End the kernel's process, whatever it does; its image stays."""
    kernel.cancellation.reset()
    if kernel.capsule is not None:
        kernel.capsule.close()
        kernel.capsule = None
    host_memory.end_spill(kernel)
    if kernel.machine.state not in (State.DEAD, State.STARTING):
        advance(kernel, plans.ProcessEvent.TERMINATED)
    kernel.exit_status = -signal.SIGKILL if kernel.exit_status is None else kernel.exit_status
    host_memory.discard_chunks(kernel)
    if kernel.completion is not None and kernel.image is not None:  # the kernel slept in what has no space on the disk
        completing.begin_save_point(kernel, kernel.image)
        kernel.image = None
    completing.detach(kernel)
    with contextlib.suppress(GpuCkptError):  # a gate that failed has no clients that would have to know
        kernel.gate.kernel_died()


def discard_image(kernel: KernelState) -> None:
    """Delete the image of a kernel that is not asleep; one that cannot be deleted is kept and retired."""
    with kernel.lock:
        if kernel.machine.state is not State.CHECKPOINTED and kernel.image is not None:
            try:
                restore.remove_image(kernel)
            except ImageNotFound:
                kernel.image = None
            except GpuCkptError:  # in use, or not to be written: at least no server restores it by itself
                kernel.kept_image = restore.retire_image(kernel)


def keep_image(kernel: KernelState) -> None:
    """Keep the image of a kernel that was ended; no server restores it by itself."""
    with kernel.lock:
        if kernel.machine.state is not State.CHECKPOINTED:
            restore.retire_image(kernel)


def serve(kernel: KernelState, goal: State) -> None:
    """Have the gate serve a running kernel, or wake it at the next message, after a verb towards ``goal`` failed."""
    state = kernel.machine.state
    if state in (State.SUSPENDED, State.CHECKPOINTED) and goal is not State.RUNNING:
        kernel.gate.sleep()
    elif state in (State.RUNNING, State.OFF_GPU):
        discard_image(kernel)  # if its wake could not
        try:
            kernel.gate.release()
        except StateError:  # not connected
            try:
                reconnect(kernel)
            except GpuCkptError:
                with contextlib.suppress(GpuCkptError):
                    kernel.gate.sleep()  # the next message tries again (`Lifecycle.wake`)


def reconnect(kernel: KernelState) -> None:
    """Have the gate serve a running kernel that it could not be connected to.  Does nothing if it is."""
    try:
        suspend.open_gate(kernel, kernel.settings.connect)
    except StateError:  # it is open
        return
    kernel.gate.release()


def notice_death(kernel: KernelState, quiet: bool = False) -> None:
    """Record the exit of a process that has ended by itself, and (unless ``quiet``) raise `KernelLost`."""
    if kernel.capsule is not None and (status := kernel.capsule.poll()) is not None:
        record_exit(kernel, status)
        if not quiet:
            raise failures.final_error(kernel, KernelLost("The kernel's process ended."))


def record_exit(kernel: KernelState, status: int) -> None:
    """Record that the process has ended, with that exit status; its image, if there is one, is retired."""
    kernel.exit_status, kernel.died = status, not kernel.is_being_ended
    if kernel.capsule is not None:
        if kernel.image is None:
            kernel.capsule.wait_for_cleanup()
        kernel.capsule.close()
        kernel.capsule = None
    host_memory.end_spill(kernel)
    kernel.kept_image = restore.retire_image(kernel) or kernel.kept_image
    host_memory.discard_chunks(kernel)
    advance(kernel, plans.ProcessEvent.EXITED)
    kernel.gate.kernel_died()
