"""The steps by which a kernel's CUDA state is moved off the GPU, and the findings before they are tried."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from .. import errors
from ..cuda import refusals
from ..cuda.cuda import UNKNOWN, CudaState
from ..cuda.fastpath import ChooseDirectory
from ..errors import GpuCkptError
from ..image import chunk_cache
from ..image.background_task import beside
from ..process import descriptors
from . import cuda_processes, host_copies, host_memory, preflight, restore
from .context import Attempt, KernelState, PartlyDone, Reason, Saved
from .plans import State
from .preflight import PreflightFinding

#: Parts of a quiesce that the agent measures.
_PARTS = ("flush", "gc", "trim", "files", "report")
#: Seconds to wait for the agent before a save; a kernel may be busy, or its agent of an older release.
_COLLECT = 2.0
#: Times that a running kernel is inspected for state that cannot be saved, and seconds between them.
_INSPECTIONS, _PAUSE = 3, 0.1
#: The launch gate stays closed without a suspended process for this many times the seconds of a lock.
_LOCKS = 2
#: Seconds in which a process that is beginning to use CUDA has CUDA state; and times that such ones are looked for.
_BEGINS, _LATE_ROUNDS = 2.0, 5
#: Begins the hint of a refused checkpoint.
_CAN_BE_SUSPENDED = "A suspend is possible."


def findings(kernel: KernelState, *, writes: bool = True) -> list[PreflightFinding]:
    """Return the findings of preflight; the kernel is not disturbed.  A suspend ``writes`` no image."""
    capsule = kernel.require_capsule()
    if not writes:
        return _findings(kernel, _extents(kernel), None)
    if (hidden := preflight.undumpable(capsule.host_pid)) is not None:
        return [hidden]  # nothing more can be found out about it
    extents = _extents(kernel)  # before: the capsule's init answers one request after the other
    with beside(functools.partial(_lasting_refusals, kernel)) as inspection:
        return _findings(kernel, extents, inspection)


def _extents(kernel: KernelState) -> tuple[int, int]:
    """Return the bytes of device memory in host memory: those swapped out, and a copy of what is on the device."""
    return kernel.fast_path().host_memory_bytes(), kernel.fast_path().kept_bytes()


def _findings(
    kernel: KernelState, extents: tuple[int, int], inspection: Future[list[dict[str, str]]] | None
) -> list[PreflightFinding]:
    """Return the findings, with those of an ``inspection`` if an image is to be written."""
    capsule, writes = kernel.require_capsule(), inspection is not None
    device_bytes, companions = host_memory.device_bytes(kernel), capsule.other_processes()
    if device_bytes:
        try:
            kernel.engine.cuda.available()
        except errors.DriverTooOld:  # `_refused_by_driver` has it
            pass
        except errors.CudaUnavailable as unavailable:  # it cannot be asked for more
            return [preflight.blocking(unavailable)]
    found = preflight.inspect(
        kernel_pid=capsule.host_pid,
        companions=companions,
        device_bytes=device_bytes,
        has_agent=kernel.home.has_agent,
        swapped_out=extents[0],
        kept=extents[1],
        release_copies=functools.partial(host_copies.release_copies, kernel),
        spillable=functools.partial(_spillable, kernel),
        zeros=functools.partial(_possible_zeros, kernel),
        disk_free=_space_for_image(kernel) if writes else None,
        over_quota=functools.partial(kernel.engine.store.over_quota, kernel.home.kernel_id),
        why_not=why_not(kernel, writes=writes),
    )
    loaded = cuda_processes.candidates(kernel) if device_bytes else []  # some may have begun to use CUDA
    found += [preflight.blocking(reason) for reason in cuda_processes.shared(kernel, loaded)]
    for reason in _refused_by_driver(kernel, device_bytes):
        if writes:
            _say_if_suspendable(kernel, reason)
        only_suspended = not writes and _is_suspendable(kernel, reason)
        found.append(PreflightFinding(reason.code, reason.message) if only_suspended else preflight.blocking(reason))
    if inspection is not None:
        if (error := without_sockets(kernel, gate_connections(kernel))) is not None:
            found.append(preflight.blocking(error))
        if not kernel.home.has_agent:
            found.append(preflight.WITHOUT_AGENT)
        without_agent = companions if kernel.home.has_agent else [capsule.host_pid, *companions]
        found += preflight.judge_connections(without_agent, capsule.processes())
        # State of the kernel that is not proven to be restored, as far as it shows while the kernel runs.
        found += preflight.judge_state(inspection.result())
    own = device_bytes
    if device_bytes and companions:
        own = kernel.engine.gpus.used_by(capsule.host_pid)
    if own and (why := kernel.fast_path().why_slow(sum(own.values()))):
        found.append(PreflightFinding("DRIVERS_RATE", f"Device memory moves at the driver's own rate: {why}."))
    slow = cuda_processes.slow_children(kernel, loaded, device_bytes)
    found += [PreflightFinding("DRIVERS_RATE", text) for text in slow]
    return found


def _lasting_refusals(kernel: KernelState) -> list[dict[str, str]]:
    """Return the refusals that each of several inspections of the running kernel finds (`inventory.inspect`).

    Other state passes by itself: a connection that is about to be accepted, a child that is about to run its program.
    """
    lasting: list[dict[str, str]] = []
    for number in range(_INSPECTIONS):
        if number:
            time.sleep(_PAUSE)
        found = kernel.require_capsule().inspect(allow_unconfined=kernel.settings.allow_unconfined_wake)["refusals"]
        lasting = [each for each in found if not number or each in lasting]
        if not lasting:
            break
    return lasting


def _refused_by_driver(kernel: KernelState, used: Mapping[str, int]) -> list[refusals.Refusal]:
    """Return why the driver will not suspend a kernel with so much memory on GPUs, as far as that is known."""
    if not used:
        return []
    managed = cuda_processes.amounts(kernel).managed
    found = refusals.known(kernel.require_capsule().host_pid, kernel.engine.cuda, kernel.engine.gpus, used, managed)
    met = kernel.refusal if kernel.machine.state is State.SUSPENDED else kernel.lasting_refusal
    return [*found, met] if met is not None and not found else found


def _is_suspendable(kernel: KernelState, refusal: refusals.Refusal) -> bool:
    """Return whether a kernel that the driver will not checkpoint can be suspended as far as its library serves it.

    Where the driver does not lock, threads of the kernel's own process are frozen instead, and of no other.
    """
    own = kernel.require_capsule().host_pid
    if not _allocated(kernel) or refusal.details.get("pid", own) != own:
        return False
    locks = isinstance(refusal, errors.ManagedMemory)
    return locks or cuda_processes.uses_cuda_alone(kernel, cuda_processes.states(kernel))


def _say_if_suspendable(kernel: KernelState, refusal: refusals.Refusal) -> None:
    """Have the hint of a refused checkpoint say that the kernel can be suspended, if it can and is not."""
    if not kernel.saved.cuda and _is_suspendable(kernel, refusal):
        refusal.hint = f"{_CAN_BE_SUSPENDED} {refusal.default_hint}"


def why_not(kernel: KernelState, *, writes: bool, suspended: bool = False) -> Callable[[int], str]:
    """Return a function that says why another process of the capsule prevents a suspend, or a checkpoint (``writes``).

    ``suspended``: the kernel is, and no process of it may be on the GPU.  The driver is not called then, for a process
    that a dump has stopped could not answer it.

    A forked child inherits open and mapped device files, but no CUDA state: the driver says NOT_INITIALIZED of it, and
    frees all device memory of its parent nevertheless (driver 580.159, H200).  CRIU cannot save these files, so a dump
    takes them from the child; that others are the child's own cannot be excluded once its parent has closed them.
    """
    cuda = kernel.engine.cuda
    tree = set(kernel.require_capsule().processes())
    using, end = list[int](), time.monotonic() + _BEGINS

    def reason(pid: int) -> str:
        try:
            if (suspended or (cuda.state(pid) is CudaState.NONE and writes)) and (held := cuda.device_files(pid)):
                known = set(held) <= set(kernel.inherited.get(pid, ()))
                if not known and not suspended:
                    using[:] = using or cuda_processes.states(kernel)
                    known = cuda_processes.inherits(kernel, pid, using)
                    if not known and pid not in kernel.without_cuda:
                        known = _has_begun(kernel, pid, end)
                        using.clear()
                if not known:
                    return "it has open device files of the GPU"
        except errors.CudaError as error:
            if cuda_processes.lives(pid):
                return error.message.rstrip(".")
        return left_tree(pid)

    def left_tree(pid: int) -> str:
        if not writes or pid in tree:
            return ""
        return "its parent has ended, and the kernel has no root process, which would have become its parent"

    return reason


def _has_begun(kernel: KernelState, pid: int, end: float) -> bool:
    """Wait until ``end`` for a child that may be beginning to use CUDA; return whether it keeps nothing from the disk.

    It uses CUDA then, has no device files any more, or only such as it has inherited of one that has just begun.
    """
    while cuda_processes.is_beginning(kernel, pid):
        if time.monotonic() > end or kernel.cancellation.wait(0.05, Reason.DETACH):
            kernel.without_cuda.add(pid)
            return False
    cuda, using = kernel.engine.cuda, cuda_processes.states(kernel)
    return pid in using or not cuda.device_files(pid) or cuda_processes.inherits(kernel, pid, using)


def _spillable(kernel: KernelState) -> int:
    """Return the bytes of device memory that need no host memory, should there be too little."""
    bytes = _allocated(kernel)
    return bytes if host_memory.may_spill(kernel, bytes) else 0


def _possible_zeros(kernel: KernelState) -> int:
    """Return the bytes of the kernel's device memory that may be zeros, as far as that can be known on the GPU."""
    if kernel.engine.store.vault.encrypts:  # memory, not the disk, is what may be too small then
        return 0
    bytes = _allocated(kernel)
    pid, before, other = kernel.other_than_zeros or (0, 0, 0)
    is_known = (pid, before) == (kernel.require_capsule().host_pid, bytes)
    return bytes - other if is_known else bytes


def _allocated(kernel: KernelState) -> int:
    """Return the bytes of device memory that the fast path moves."""
    return cuda_processes.amounts(kernel).bytes


def _space_for_image(kernel: KernelState) -> int:
    """Return the bytes that an image may have."""
    store = kernel.engine.store
    if not store.vault.encrypts:
        return store.free() + chunk_cache.evictable_bytes(store.root)
    # CRIU's files are in memory first.  Allocations are not, and swapped-out ones are in memory already.
    memory = preflight.available_memory() + kernel.fast_path().host_memory_bytes()
    return min(store.free(), memory, store.vault.free() + _allocated(kernel))


def gate_connections(kernel: KernelState, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the connections at the kernel's own sockets, as `preflight.open_connections`."""
    return preflight.open_connections(kernel.require_capsule().host_pid, kernel.home.own_sockets, known)


def without_sockets(kernel: KernelState, connections: Mapping[str, str]) -> errors.RuntimeDirectory | None:
    """Return why the kernel could not be reached once its `gate_connections` are closed; None if it can.

    CRIU saves a socket whose file was removed as one without a name.
    """
    directory = kernel.home.runtime_dir
    if all((directory / Path(path).name).exists() for path in {*connections.values()}):
        return None
    message = f"The sockets of the kernel were removed from {directory}: it could not be reached after a restore."
    hint = "Save what you need from it to a file; a restart of the kernel makes the directory anew."
    return errors.RuntimeDirectory(message, hint=hint)


# -- steps


def check(attempt: Attempt) -> None:
    """Refuse a kernel that preflight finds unfit."""
    kernel, writes = attempt.kernel, attempt.goal is State.CHECKPOINTED
    if writes:
        kernel.engine.store.prepare()
    found = findings(kernel, writes=writes)
    preflight.require(found)
    attempt.counts_on_zeros = any(each.code in (errors.NoSpace.code, errors.QuotaExceeded.code) for each in found)
    if attempt.continues:
        _collect_garbage(attempt)


def _collect_garbage(attempt: Attempt) -> None:
    """Have the agent collect garbage while the kernel is still served, which is not to wait for that during a save.

    Where that could be device memory: else a quiesce does not take long.  A kernel that is busy does it when it is not.
    """
    kernel = attempt.kernel
    if kernel.home.has_agent and kernel.require_capsule().host_pid in cuda_processes.candidates(kernel):
        with attempt.traced.part("gc"), contextlib.suppress(GpuCkptError):
            kernel.gate.request("gpu_ckpt_collect_request", {}, _COLLECT)


def drain(attempt: Attempt) -> None:
    """Have the gate queue new requests and wait for those under way."""
    kernel = attempt.kernel
    try:
        with answering(kernel):
            kernel.gate.drain(kernel.settings.drain)
    except GpuCkptError as error:
        if not isinstance(error, errors.CapsuleGone):
            kernel.gate.release()
        raise


def quiesce(attempt: Attempt) -> None:
    """Have the agent prepare the kernel for a dump; refuse a kernel by its report."""
    kernel, writes = attempt.kernel, attempt.goal is State.CHECKPOINTED
    if attempt.next_image is not None and host_memory.may_go_back_before_suspend(kernel, attempt.next_image):
        restore.begin_to_go_back(attempt, attempt.next_image)
    if not kernel.saved.cuda:
        kernel.saved, kernel.refusal = Saved(), None
    if not kernel.home.has_agent:
        return
    # Off the GPU, what frees device memory would wait for it.
    content: dict[str, Any] = {"trim": not kernel.saved.cuda, "files": True}
    content["summary"] = attempt.save_point is not None
    content |= {"writes": attempt.goal is not State.SUSPENDED, "goes_back": attempt.next_image is not None}
    if content["writes"]:
        content["bytes"] = host_memory.resident(kernel) + sum(host_memory.device_bytes(kernel).values())
    report = request_agent(kernel, "quiesce", content).get("report", {})
    attempt.traced.bytes = report.get("trimmed_bytes")
    if isinstance(seconds := report.pop("seconds", None), dict):
        attempt.traced.parts |= {part: each for part in _PARTS if isinstance(each := seconds.get(part), float)}
    try:
        pid, engine = kernel.require_capsule().host_pid, kernel.engine
        own = engine.gpus.used_by(pid) if engine.cuda.uses_cuda(pid) else {}
        by_driver = cuda_processes.moved_by_driver(kernel, own)
        preflight.require(preflight.judge_report(report, gpus=len(own), by_driver=by_driver, writes=writes))
    except GpuCkptError:
        request_agent(kernel, "thaw", {"environ": {}})
        raise
    kernel.saved.report = report


def cuda_suspend(attempt: Attempt) -> None:
    """Move all CUDA state of the kernel and its children to host memory, or to the disk."""
    kernel, settings, saved = attempt.kernel, attempt.kernel.settings, attempt.kernel.saved
    capsule, cuda, gpus = kernel.require_capsule(), kernel.engine.cuda, kernel.engine.gpus
    pid, part = capsule.host_pid, attempt.traced.part
    with part("inspect"):
        cuda_processes.remove_stale_sockets(kernel)
        using = [*cuda_processes.states(kernel)]
        if attempt.goal is State.OFF_GPU:
            # No step before has begun the facts of this suspend: the kernel is not quiesced.
            saved = kernel.saved = Saved(saved.report)
            kernel.refusal = None
            if using != [pid]:
                message = "Other processes of the kernel use the GPU, or none does; "
                message += "their calls do not wait at its launch gate."
                raise errors.UnsupportedCuda(message)
        if pid not in using:
            refuse_device_files(kernel)
        saved.pids = frozenset(using)
        if not using:
            _let_another_resume(kernel)
            return
        saved.device_bytes = gpus.used_by(*using)
        saved.node_gpus = [gpu.uuid for gpu in gpus.list()]
        kernel.serves_off_gpu = attempt.goal is State.OFF_GPU
    try:
        unlockable = None
        with part("lock"):
            cuda_processes.close_launch_gates(kernel, using, _LOCKS * settings.cuda)
        if attempt.goal is State.OFF_GPU and not kernel.fast_path().launch_gate_is_closed():
            message = "The kernel has no launch gate (fast_path): its calls would wait in the driver, with its cells."
            raise errors.UnsupportedCuda(message)
        try:
            with part("lock"):
                locked = cuda_processes.lock(kernel)
        except (errors.UnsupportedCuda, errors.DriverTooOld) as error:
            if attempt.goal is not State.SUSPENDED or not cuda_processes.uses_cuda_alone(kernel, using):
                raise
            unlockable = error
        else:
            saved.device_bytes = gpus.used_by(*locked)  # one may have begun, or ended, meanwhile
            saved.pids = frozenset(locked)
        attempt.traced.bytes = total = sum(saved.device_bytes.values())
        deadline = kernel.deadline(total)
        choose = functools.partial(host_memory.choose_directory, kernel, capsule, all=total)
        if for_others := attempt.goal is State.OFF_GPU and kernel.admission is not None:
            choose = functools.partial(_choose_for_others, kernel, choose, total)
        if unlockable is not None:
            if not kernel.fast_path().swap_out_frozen(timeout_s=deadline, choose_directory=choose):
                host_memory.end_spill(kernel)
                raise unlockable
            saved.cuda, kernel.refusal = True, unlockable
            return
        if children := [each for each in locked if each != pid]:  # theirs cannot go to the disk
            host_memory.require_memory(sum(gpus.used_by(*children).values()))
        attempt.resources.callback(attempt.held.close)
        with part("swap_out"):
            swapped, moments = cuda_processes.swap_out(
                kernel,
                locked,
                timeout_s=deadline,
                choose_directory=choose,
                held=attempt.held if attempt.continues and len(saved.device_bytes) == 1 else None,
            )
        attempt.traced.parts |= {f"swap_out/{name}": seconds for name, seconds in moments.items()}
        moved = swapped.get(pid, 0)
        if not moved:
            host_memory.end_spill(kernel)
            if pid in locked and saved.report.get("jax_preallocates") and len(gpus.used_by(pid)) > 1:
                raise preflight.jax_on_several_gpus()
        if for_others and not moved and kernel.admission is not None:
            kernel.admission.frees(False)
        # If allocations that were to go to the disk were not swapped out: the driver moves them to host memory.
        host_memory.require_memory(max(0, total - sum(swapped.values())))
        warm = settings.warm and moved > 0 and attempt.goal is State.SUSPENDED
        # For good, and before the driver suspends: some calls do not wait at its lock, and then end the process.
        with part("freeze"):
            cuda_processes.close_launch_gates(kernel, locked)
            writes = attempt.goal not in (State.SUSPENDED, State.OFF_GPU)
            suspended = [each for each in locked if each != pid or not warm]
            cuda_processes.keep_from_driver(kernel, suspended, from_forking=writes)
            # Not before: a process that runs forks others, and once the driver has closed its files, those of its forks
            # cannot be distinguished from files of their own.
            kernel.inherited = cuda_processes.inherited_files(kernel, locked)
        with part("driver"):
            cuda_processes.checkpoint(kernel, children, deadline)
            if pid in locked and not warm:  # else the lock alone keeps the kernel from CUDA
                try:
                    driver_checkpoint(kernel, deadline)
                except errors.UnsupportedCuda as refusal:
                    if cuda.state(pid) is not CudaState.LOCKED or not moved or attempt.goal is not State.SUSPENDED:
                        raise
                    capsule.unfreeze_threads()  # the lock alone does here, too
                    kernel.refusal = refusal
    except BaseException as error:
        if attempt.goal is State.CHECKPOINTED and (
            isinstance(error, errors.DriverTooOld)
            or (isinstance(error, errors.UnsupportedCuda) and "cuda_result" in error.details)
        ):
            with contextlib.suppress(GpuCkptError):
                _say_if_suspendable(kernel, error)
        # Nobody knows how far the driver came (its helper may have ended after the work was done), and the way back
        # needs proof of free memory: so the undo of this step inspects the process and completes the way back.
        raise PartlyDone(cuda=True) from error
    saved.cuda = True
    _let_another_resume(kernel)


def _let_another_resume(kernel: KernelState) -> None:
    """Let the state that the kernel goes back to move to the GPU: this one has left it."""
    if kernel.ahead is not None:
        kernel.ahead.may_resume()


def suspend_late(kernel: KernelState) -> None:
    """Suspend the children of a suspended kernel that began to use CUDA while the others were locked, or since.

    For one that is beginning to use it, it waits.  Not of a kernel that serves cells off the GPU: nothing would bring
    them back there.  *After failure* some may be suspended, and none is locked, as far as the driver answers; a resume
    of the kernel brings all back.  Raises as `cuda_processes.lock` and `cuda_processes.checkpoint`, `KernelBusy`,
    `NoMemory`.
    """
    if kernel.serves_off_gpu:
        return
    saved, own, end = kernel.saved, kernel.require_capsule().host_pid, time.monotonic() + _BEGINS
    cuda_processes.unlock_children(kernel)  # of a try that failed before
    for _ in range(_LATE_ROUNDS):
        while True:
            begin = cuda_processes.beginning(kernel)  # before: one that has begun since is among those with a state
            states = cuda_processes.states_of_children(kernel)
            late = [pid for pid, state in states.items() if state is CudaState.RUNNING]
            if late or not begin:
                break
            if time.monotonic() > end or kernel.cancellation.wait(0.02, Reason.DETACH):
                kernel.without_cuda.update(begin)
                break
        if not late:
            return
        used: dict[int, dict[str, int]] = {}
        try:
            locked = cuda_processes.lock(kernel, but=[own, *(pid for pid in states if pid not in late)])
            used = {pid: kernel.engine.gpus.used_by(pid) for pid in locked}
            _count(saved, used)
            _suspend_children(kernel, locked, sum(bytes for each in used.values() for bytes in each.values()))
        except BaseException:
            with contextlib.suppress(GpuCkptError):
                _count(saved, {pid: used.get(pid, {}) for pid in cuda_processes.unlock_children(kernel)}, -1)
            raise


def _count(saved: Saved, used: Mapping[int, Mapping[str, int]], sign: int = 1) -> None:
    """Add the bytes that processes have on GPUs to those that the kernel needs again, or subtract them."""
    total = dict(saved.device_bytes)  # others have the old one
    for uuid, bytes in itertools.chain.from_iterable(each.items() for each in used.values()):
        total[uuid] = total.get(uuid, 0) + sign * bytes
    saved.device_bytes = {uuid: bytes for uuid, bytes in total.items() if bytes}
    if saved.pids is not None:
        saved.pids = saved.pids.union(used) if sign > 0 else saved.pids.difference(used)


def _suspend_children(kernel: KernelState, locked: list[int], bytes: int) -> None:
    """Suspend locked children of a suspended kernel, with so many bytes on GPUs, which are counted."""
    saved = kernel.saved
    host_memory.require_memory(bytes)
    saved.cuda, saved.node_gpus = True, saved.node_gpus or [gpu.uuid for gpu in kernel.engine.gpus.list()]
    cuda_processes.close_launch_gates(kernel, locked)
    cuda_processes.keep_from_driver(kernel, locked, from_forking=True)
    new = cuda_processes.inherited_files(kernel, locked)
    kernel.inherited = {**new, **kernel.inherited}  # one that was noted may have opened others of its own since
    cuda_processes.checkpoint(kernel, locked, kernel.deadline(bytes))


def _choose_for_others(kernel: KernelState, choose: ChooseDirectory, all: int, bytes: int, kept: int) -> Path | None:
    """Choose as ``choose``, and let others know if memory becomes free at the rate of the bus from now on."""
    directory = choose(bytes, kept)
    if kernel.admission is not None and directory is None and bytes > all / 2:
        kernel.admission.frees(True)
    return directory


def driver_checkpoint(kernel: KernelState, timeout_s: float) -> None:
    """Have the driver suspend the kernel's locked process, after `cuda_processes.keep_from_driver`.

    Raises `UnsupportedCuda` by its reason where that is known.
    """
    try:
        kernel.engine.cuda.checkpoint(kernel.require_capsule().host_pid, timeout_s=timeout_s)
    except errors.UnsupportedCuda as refusal:
        kernel.refused_checkpoint = refusal
        raise cuda_processes.explained(kernel, refusal) from refusal
    except errors.CudaError as error:
        if error.details.get("cuda_result") != UNKNOWN or (first := kernel.refused_checkpoint) is None:
            raise
        # Of a process that it has refused once, the driver gives no reason any more (580.159).
        raise cuda_processes.explained(kernel, copy.copy(first)) from error
    refuse_device_files(kernel)


def refuse_device_files(kernel: KernelState) -> None:
    """Raise `DeviceHeld` if the kernel has device files open that are not CUDA's."""
    if held := kernel.engine.cuda.device_files(kernel.require_capsule().host_pid):
        message = "The kernel has GPU device files open that are not CUDA's (NVML, graphics)."
        raise errors.DeviceHeld(message, files=held)


def sleep(attempt: Attempt) -> None:
    """Have the gate wake the kernel at the next message that needs it."""
    if not (attempt.unwinding and attempt.goal is State.RUNNING):
        attempt.kernel.gate.sleep()
        attempt.kernel.serves_off_gpu = False
    # Else a wake failed.  `Gate.fail` comes next: it answers those who wait, and sleeps.  A sleep now would wake again
    # at once, for messages that are about to be answered with that failure.


# -- requests to the kernel


@contextlib.contextmanager
def answering(kernel: KernelState) -> Iterator[None]:
    """Have the body's wait for an answer of the kernel end when the kernel does, not at its deadline."""
    capsule = kernel.require_capsule()
    with capsule.watch_exit(kernel.gate.close):
        try:
            yield
        except GpuCkptError as error:
            if (status := capsule.poll()) is not None:
                raise errors.CapsuleGone(f"The kernel's process ended (status {status}).", status=status) from error
            raise


def open_gate(kernel: KernelState, timeout: float) -> None:
    """Connect the gate to a kernel that runs, if it can accept that, and wait until it has answered.

    Raises `LimitReached`: it was not connected to, because that would have ended it.
    """
    with answering(kernel), descriptors.headroom(kernel.require_capsule().host_pid, timeout):
        kernel.gate.open(timeout)
    kernel.disconnected = False


def request_agent(kernel: KernelState, verb: str, content: dict[str, Any]) -> dict[str, Any]:
    """Send a request to the agent and return its reply.  Raises `AgentError`, `LimitReached`."""
    with answering(kernel):
        reply = kernel.gate.request(f"gpu_ckpt_{verb}_request", content, kernel.settings.agent)
    if reply.get("status") != "ok":
        if lacking := reply.get("lacking"):
            raise errors.LimitReached(f"The kernel has reached a limit: it gets no more {lacking}.")
        message = f"The agent could not {verb} the kernel: {reply.get('ename')}: {reply.get('evalue')}"
        raise errors.AgentError(message, traceback=reply.get("traceback", []))
    return reply
