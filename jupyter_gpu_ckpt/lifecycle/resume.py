"""The steps by which CUDA state is moved back to the GPU and clients reach the kernel; the repair of an orphan."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..capsule.capsule import Capsule
from ..cuda.cuda import CudaState
from ..cuda.gpus import Gpu, gpu_mapping
from ..errors import BadRequest, GpuFull, KeyUnusable, UnsupportedCuda
from ..units import size
from . import cuda_processes, host_memory, preflight
from .context import Attempt, EarlyReturn, KernelState, Reason, Saved
from .plans import State
from .suspend import open_gate, request_agent

#: Seconds that the memory of a kernel which leaves is waited for, while nothing more of it becomes free.
_NEXT_MEMORY_S = 3.0
#: Seconds between two looks at a GPU's free memory.
_LOOK_S = 0.02

_log = logging.getLogger(__name__)


def reserve(attempt: Attempt) -> None:
    """Prove that the GPU has enough free memory, and reserve it until the driver has done its part."""
    kernel = attempt.kernel
    if not kernel.saved.cuda or _is_on_gpu(kernel):
        return
    gpus = kernel.engine.gpus.list()
    present = [gpu.uuid for gpu in gpus]
    try:
        attempt.gpu_mapping = gpu_mapping(kernel.saved.node_gpus, present, attempt.gpu_map)
    except ValueError as error:
        raise BadRequest(f"The GPU mapping cannot be used: {error}.") from error
    if kernel.admission is not None and (needs := _needs(attempt)):
        stays = attempt.held.bytes > 0
        drivers = None if stays else _drivers_part(kernel, needs)
        try:
            elsewhere = not attempt.gpu_map and not stays and not _pids_ahead(kernel)
            admitted = kernel.admission.admit(needs, gpus, elsewhere=elsewhere, early=drivers is not None)
        except OSError as error:  # the directory that users share: then as without sharing
            _log.warning("Kernel %s cannot wait for a GPU: %s", kernel.home.kernel_id, error.strerror)
        else:
            attempt.reservation.callback(kernel.admission.settle)
            if drivers is not None:
                ((home, bytes),) = needs.items()
                attempt.early_return = EarlyReturn(admitted[home], bytes, drivers)
            if any(home != gpu for home, gpu in admitted.items()):
                before = attempt.gpu_mapping or {}
                here = {uuid: before.get(uuid, uuid) for uuid in kernel.saved.node_gpus}
                wanted = {uuid: admitted[home] for uuid, home in here.items() if home in admitted}
                attempt.gpu_mapping = gpu_mapping(kernel.saved.node_gpus, present, wanted)
            return
    try:
        attempt.reservation.enter_context(_reservation(attempt))
    except GpuFull as error:
        if attempt.lease is not None and not attempt.gpu_map:
            _name_another_gpu(attempt, gpus, error)
        raise


def _name_another_gpu(attempt: Attempt, present: Sequence[Gpu], error: GpuFull) -> None:
    """Have an error about a GPU name another one of the same model that has enough free memory, if there is one."""
    full, needed = error.details.get("uuid"), error.details.get("needed", 0)
    home = next((gpu for gpu in present if gpu.uuid == full), None)
    if home is None:  # it is not full, but locked
        return
    claimed, used = attempt.kernel.engine.gpus.claimed, _needs(attempt)
    fits = [
        gpu
        for gpu in present
        if (gpu.name, gpu.uuid in used) == (home.name, False)
        and gpu.total >= home.total
        and gpu.free - claimed(gpu.uuid) >= needed
    ]
    if fits:
        names = {here: saved for saved, here in (attempt.gpu_mapping or {}).items()}
        choice = json.dumps({"gpu_map": {names.get(home.uuid, home.uuid): fits[0].uuid}})
        by_number = f"`--gpu {fits[0].index}` with --branch or --back, " if len(used) == 1 else ""
        error.hint = (
            f"Nothing is lost. Free memory on the GPU (checkpoint another kernel), or use GPU {fits[0].index}, which "
            f"has {size(fits[0].free)} free: {by_number}{choice} in the request by REST, or gpu_map in a program."
        )


def _reservation(attempt: Attempt) -> AbstractContextManager[None]:
    return attempt.kernel.engine.gpus.reservation(_needs(attempt), attempt.kernel.settings.reservation)


def _needs(attempt: Attempt) -> dict[str, int]:
    """Return the bytes that the kernel needs on each GPU of this node, beside those that are held there."""
    kernel, mapping = attempt.kernel, attempt.gpu_mapping or {}
    counted = kernel.saved.pids
    there = cuda_processes.candidates(kernel) if kernel.capsule is not None else _pids_ahead(kernel)
    used = kernel.engine.gpus.used_by(*[pid for pid in there if counted is None or pid in counted])
    return {
        # A warm one still has its context there.
        mapping.get(uuid, uuid): max(0, bytes - used.get(uuid, 0) - attempt.held.bytes)
        for uuid, bytes in kernel.saved.device_bytes.items()
    }


def _pids_ahead(kernel: KernelState) -> list[int]:
    """Return the host pids of processes that were restored ahead and are on the GPU already."""
    return kernel.ahead.on_gpu() if kernel.ahead is not None else []


def _drivers_part(kernel: KernelState, needs: Mapping[str, int]) -> int | None:
    """Return how much of what the kernel needs the driver restores; None if it cannot come while others leave.

    It can if the library brings the rest, from host memory, to one GPU.
    """
    if kernel.capsule is None or len(needs) != 1 or kernel.spill_directory is not None:
        return None
    if [*cuda_processes.states(kernel)] != [kernel.capsule.host_pid]:
        return None
    swapped = cuda_processes.amounts(kernel).swapped_out
    return max(0, sum(needs.values()) - swapped) if swapped else None


def _wait_for_memory(attempt: Attempt) -> float:
    """Wait until the driver's part of an early return is free twice; return the seconds to wait for each allocation.

    Twice, as others may allocate memory meanwhile: with too little the driver's restore destroys the process.  0 for a
    kernel whose memory is all free.  Raises `GpuFull` if nobody leaves the memory; the kernel is suspended as before.
    """
    kernel, early = attempt.kernel, attempt.early_return
    if early is None or attempt.unwinding or (free := kernel.engine.gpus.free(early.gpu)) >= early.bytes:
        return 0.0
    end = time.monotonic() + _NEXT_MEMORY_S
    while free < 2 * early.drivers:
        if time.monotonic() > end:
            message = "The kernel that was leaving the GPU has not freed its memory: "
            message += f"{size(2 * early.drivers, 2)} are needed to begin with; {size(free, 2)} are free."
            raise GpuFull(message, left="nothing was changed", uuid=early.gpu, needed=early.bytes, free=free)
        kernel.cancellation.wait(_LOOK_S, Reason.END)
        kernel.cancellation.check(Reason.END)
        free = kernel.engine.gpus.free(early.gpu)
    return _NEXT_MEMORY_S


def _is_on_gpu(kernel: KernelState) -> bool:
    """Return whether the device memory is back: an earlier try may have ended between restore and unlock."""
    if kernel.capsule is None:
        return False
    states = cuda_processes.states(kernel)
    if any(state not in cuda_processes.ON_GPU for state in states.values()):
        return False
    return not cuda_processes.swapped_out(kernel, {kernel.capsule.host_pid, *states})


def cuda_resume(attempt: Attempt) -> None:
    """Move the CUDA state of the kernel and its children back to the GPU; only then all their threads run.

    Of a kernel that is restored, the driver's part is done while the device memory that it does not move is read.
    """
    kernel = attempt.kernel
    if not kernel.saved.cuda:
        return
    attempt.traced.bytes = sum(kernel.saved.device_bytes.values())
    if attempt.unwinding:  # what the present state goes back to would have its place on the GPU
        kernel.discard_ahead()
    # An undo has no reservation yet, and without proof of free memory the driver could destroy the process.
    missing = attempt.unwinding and not _is_on_gpu(kernel)
    if kernel.admission is not None and not attempt.unwinding:
        kernel.admission.renew()
    with _reservation(attempt) if missing else contextlib.nullcontext():
        capsule, deadline = kernel.require_capsule(), kernel.deadline(attempt.traced.bytes)
        kernel.fast_path().swapped_out()  # raises first if an owner of another release has suspended the processes
        part = attempt.traced.part
        if attempt.lease is not None:  # a driver that is too old does not know what another one has suspended
            kernel.engine.cuda.available()
        wait_s = _wait_for_memory(attempt)
        with part("children"):
            cuda_processes.resume_children(kernel, attempt.gpu_mapping, deadline)
        with part("driver"):
            state = kernel.engine.cuda.state(capsule.host_pid)
            if state not in (*cuda_processes.ON_GPU, CudaState.NONE):
                kernel.restored_on_gpu = True
                kernel.engine.cuda.restore(capsule.host_pid, attempt.gpu_mapping, timeout_s=deadline)
        with part("read"):
            host_memory.require_read(attempt)
        with part("swap_in"):
            fast_path = kernel.fast_path()
            if state is not CudaState.NONE:
                fast_path.swap_in(lock_s=kernel.settings.cuda, timeout_s=deadline, wait_s=wait_s, held=attempt.held)
            else:
                fast_path.open_launch_gate()
        attempt.traced.parts |= {f"swap_in/{name}": seconds for name, seconds in fast_path.parts.items()}
        capsule.unfreeze_threads(all=not attempt.alone)
        host_memory.end_spill(kernel)
        kernel.saved.cuda = kernel.serves_off_gpu = False
        attempt.gpu_mapping = None


def connect(attempt: Attempt) -> None:
    """Connect the gate to the kernel, unless that is suspended: its threads may be frozen, and `thaw` does it."""
    kernel = attempt.kernel
    if kernel.saved.cuda and not kernel.serves_off_gpu:
        return
    if _is_branch(attempt):
        kernel.gate.expect_key(kernel.home.kernel_key)
    # Nothing comes after an undo that could try again, so a kernel that lives gets all the time there is.
    patience = kernel.settings.base if attempt.unwinding else 0.0
    open_gate(kernel, kernel.settings.connect + patience)
    if not kernel.home.has_agent:
        kernel.write_session()  # with the gate's new name


def thaw(attempt: Attempt) -> None:
    """Have the agent undo a quiesce, refresh the environment, and show the settings that could not be put back."""
    kernel, notice = attempt.kernel, ""
    if kernel.disconnected:
        connect(attempt)
    if _is_branch(attempt):
        notice = _become_another_kernel(attempt)
    if attempt.changed_settings:
        notice += f"This kernel came back without what it was set to: {'; '.join(attempt.changed_settings)}"
    if not kernel.home.has_agent:
        if notice:
            kernel.gate.notify(notice)
            kernel.write_session()
    else:
        environ = {name: os.environ[name] for name in kernel.settings.refresh if name in os.environ}
        # Then another one has begun, or continues with, this session of IPython's history.
        again = _is_branch(attempt) or (kernel.image is not None and kernel.image.is_save_point)
        request_agent(kernel, "thaw", {"environ": environ, "notice": notice, "again": again})


def _is_branch(attempt: Attempt) -> bool:
    """Return whether the kernel is restored from an image that was made of another kernel's."""
    image = attempt.kernel.image
    return attempt.lease is not None and image is not None and bool(image.manifest.branched_from)


def _become_another_kernel(attempt: Attempt) -> str:
    """Have the agent make unique what the kernel has in common with the one it comes from; return a notice.

    From the reply on the kernel signs with the key that its own clients have.
    """
    kernel, home = attempt.kernel, attempt.kernel.home
    assert kernel.image is not None
    origin = kernel.image.manifest.branched_from
    ports = {str(each.port): each.new_port for each in attempt.separated if each.port}
    content: dict[str, Any] = {
        "ports": ports,
        "key": home.key,
        "reseed": bool(origin.get("reseed")),
        "notebook": home.notebook,
    }
    if origin.get("is_template"):
        content |= {"environ": dict(home.environment), "directory": home.directory}
    reply = request_agent(kernel, "identity", content)["report"]
    kernel.gate.expect_key(home.key)
    kernel.gate.follow_session(str(reply["session"]))
    pipe = kernel.saved.report.get("pipe_port")
    changes = [f"{each.what} ({each.becomes})" for each in attempt.separated if not each.port or each.port != pipe]
    changes += [f"{what} (not changed)" for what in reply.get("probe_errors", ())]
    if not changes:
        return ""
    of = "This kernel has started from a template, which was made of one with"
    of = of if origin.get("is_template") else "This kernel is a branch of another one, which continues with"
    return f"{of}: {'; '.join(changes)}.\n"


def release(attempt: Attempt) -> None:
    """Let the children of a restored kernel run, and forward the queued messages to it."""
    kernel = attempt.kernel
    if not attempt.unwinding:
        if attempt.lease is not None:
            # The point of no return: of all that ever restored this image, one kernel gets messages.
            capsule = kernel.require_capsule()
            attempt.lease.claim(capsule.host_pid, capsule.keep_fd)
            if attempt.present is not None:  # and nobody wakes the state that it has gone back from
                (kernel.completion or attempt.present).claim(capsule.host_pid, capsule.keep_fd)
            if kernel.image is not None and kernel.image.is_save_point:
                kernel.descend_from(kernel.image)
        else:  # until a restored kernel's image is deleted it is what is left if the kernel dies
            supersede_images(kernel)
    if attempt.alone:
        capsule = kernel.require_capsule()
        if kernel.home.outlive:  # else they would have run if this server ends before the image is deleted
            capsule.outlive()
        capsule.unfreeze_threads(all=True)
    kernel.gate.release()
    if kernel.completion is not None:
        kernel.completion.begin()


def supersede_images(kernel: KernelState) -> None:
    """Note that an attached kernel continues: whatever image its last owner published is outdated."""
    if kernel.supersedes_images:
        kernel.supersedes_images = False
        with contextlib.suppress(KeyUnusable):
            kernel.engine.store.generations.record_restored(kernel.home.kernel_id)
        kernel.engine.store.supersede(kernel.home.kernel_id)


def repair(kernel: KernelState, capsule: Capsule) -> State:
    """Return the state of a kernel whose owner ended, RUNNING or SUSPENDED; repair what is half done."""
    fast_path = kernel.fast_path(capsule)
    fast_path.remove_links()  # of a save point that nobody completes
    states = cuda_processes.states(kernel)
    locked = [each for each in states if states[each] is CudaState.LOCKED]
    warm, frozen = cuda_processes.swapped_out(kernel, locked), fast_path.is_frozen()
    kernel.spill_directory = fast_path.disk_directory()
    if CudaState.CHECKPOINTED in states.values() or warm or frozen:
        # How much device memory it had is not known any more; the memory of the processes and the files of its
        # allocations are an upper bound.
        most = sum(process.rss for each in states if (process := preflight.read_process(each)))
        most += fast_path.host_memory_bytes() + host_memory.spilled_bytes(kernel)
        gpus = [gpu.uuid for gpu in kernel.engine.gpus.list()]
        kernel.saved = Saved({}, dict.fromkeys(gpus, most), gpus, cuda=True)
        if frozen:
            refusal = UnsupportedCuda("The CUDA driver has not locked the kernel, whose threads are frozen instead.")
            kernel.refusal = cuda_processes.explained(kernel, refusal, at_lock=True)
        return State.SUSPENDED
    deadline = kernel.deadline(host_memory.spilled_bytes(kernel))
    cuda_processes.resume_children(kernel, None, deadline)  # none that is suspended
    fast_path.swap_in(lock_s=kernel.settings.cuda, timeout_s=deadline)
    capsule.unfreeze_threads(all=True)
    host_memory.end_spill(kernel)
    return State.RUNNING
