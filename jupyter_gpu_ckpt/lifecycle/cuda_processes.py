"""The processes of a kernel that have CUDA state, moved together: all of them, or none.

Each that has the library (`cuda.fastpath`) swaps its own allocations; the driver moves the rest.  It suspends and
restores the children here, the kernel's own process by the steps in `suspend` and `resume`.  A child may end at any
moment, which is no failure.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TypeVar

from .. import errors, procfs
from ..cuda import refusals
from ..cuda.cuda import Cuda, CudaState
from ..cuda.fastpath import MUCH, SOCKET, Amounts, ChooseDirectory
from ..cuda.held_memory import HeldMemory
from ..errors import GpuCkptError
from .context import KernelState
from .preflight import MARGIN, available_memory, read_process

#: Seconds beyond the lock's own deadline after which a driver that does not answer is given up.
_GRACE = 5.0
#: Seconds for a lock that was given up to be done after all, once its peers are unlocked; it is then undone.
_LATE = 3.0
#: How often processes that began to use CUDA during the lock of the others are locked, too.
_ROUNDS = 5

#: Seconds to suspend a process that is to be killed, and bytes a second at which the driver does it.
_BEFORE_END, _DRIVERS_RATE = 5.0, 2.5e9

#: The driver's states in which a process has its device memory on the GPU.
ON_GPU = (CudaState.RUNNING, CudaState.LOCKED)

_T = TypeVar("_T")
_E = TypeVar("_E", bound=GpuCkptError)


def candidates(kernel: KernelState) -> list[int]:
    """Return the processes of the kernel's capsule that have loaded the CUDA driver, by host pid.  Reads /proc only."""
    return [pid for pid in _all(kernel) if _unless_ended(kernel, pid, kernel.engine.cuda.uses_cuda)]


def mirrored(kernel: KernelState) -> bool:
    """Return whether host memory has a copy of the kernel's device memory as it is; never of a tree that uses CUDA.

    Raises `CudaError` if the process has ended.
    """
    return len(candidates(kernel)) == 1 and kernel.fast_path().mirrored()


def states(kernel: KernelState, cuda: Cuda | None = None, *, but: Collection[int] = ()) -> dict[int, CudaState]:
    """Return the CUDA state of the processes that have one, by host pid, the kernel's own first.  Raises `CudaError`.

    ``cuda``: the facade that asks the driver, if it is not the shared one.  ``but``: without these, which are not asked
    for: the driver takes a millisecond for each.
    """
    asked = [pid for pid in _all(kernel) if pid not in but]
    found = {pid: _unless_ended(kernel, pid, (cuda or kernel.engine.cuda).state) for pid in asked}
    return {pid: state for pid, state in found.items() if state not in (None, CudaState.NONE)}  # type: ignore[misc]


def states_of_children(kernel: KernelState) -> dict[int, CudaState]:
    """Return the CUDA state of the kernel's children that have one, by host pid.  Raises `CudaError`."""
    return states(kernel, but=[kernel.require_capsule().host_pid])


def inherited_files(kernel: KernelState, using: Collection[int]) -> dict[int, list[str]]:
    """Return the device files that processes forked from those ``using`` CUDA have, by host pid; raises `CudaError`.

    The driver opens files anew when a process is resumed: those that a child had inherited before are known from the
    last suspend, and so are those of its own children.
    """

    def of(pid: int) -> list[str]:
        held = kernel.engine.cuda.device_files(pid) if pid not in using else []
        is_known = set(held) <= set(kernel.inherited.get(pid, ()))
        return held if held and (is_known or inherits(kernel, pid, using)) else []

    return {pid: held for pid in _all(kernel) if (held := _unless_ended(kernel, pid, of))}


def inherits(kernel: KernelState, pid: int, using: Iterable[int]) -> bool:
    """Return whether all device files of a process are those of others: ``using`` CUDA, or that have inherited them."""
    owners = [owner for owner in (*using, *kernel.inherited) if owner != pid]
    return kernel.engine.cuda.has_inherited_all(pid, owners)


def note_new_forks(kernel: KernelState) -> None:
    """Add processes that were forked since the suspend to ``kernel.inherited``.  Raises `CudaError`.

    Only those all of whose device files are inherited: of a process that is noted there, which may have opened others
    of its own since, or of one whose CUDA state the driver has only locked.
    """
    cuda, noted, others = kernel.engine.cuda, kernel.inherited, kernel.require_capsule().other_processes()
    if not kernel.saved.cuda and not noted:
        return
    held = {pid: _unless_ended(kernel, pid, cuda.device_files) for pid in others if pid not in noted}
    new = {pid: files for pid, files in held.items() if files}
    if not new:
        return
    using, known = states(kernel), {file for files in noted.values() for file in files}
    for pid, files in new.items():
        owners = [*using, *(noted if known.issuperset(files) else ())]
        inherits = functools.partial(cuda.has_inherited_all, owners=owners)
        if pid not in using and _unless_ended(kernel, pid, inherits):
            noted[pid] = files


def is_beginning(kernel: KernelState, pid: int) -> bool:
    """Return whether a process may be beginning to use CUDA: it has device files of its own, and no CUDA state yet.

    With processes that use the driver's libraries for something else.  Raises `CudaError`.
    """
    cuda = kernel.engine.cuda
    if not cuda.uses_cuda(pid) or set(held := cuda.device_files(pid)) <= set(kernel.inherited.get(pid, ())) or not held:
        return False
    return cuda.state(pid) is CudaState.NONE and not inherits(kernel, pid, states(kernel))


def beginning(kernel: KernelState) -> list[int]:
    """Return the children of the kernel that may be beginning to use CUDA (`is_beginning`).  Raises `CudaError`."""
    others = [pid for pid in kernel.require_capsule().other_processes() if pid not in kernel.without_cuda]
    return [pid for pid in others if _unless_ended(kernel, pid, lambda pid: is_beginning(kernel, pid))]


def unlock_children(kernel: KernelState) -> list[int]:
    """Have the children of the kernel run that the driver has locked and not suspended; return them."""
    capsule, done = kernel.require_capsule(), list[int]()
    for pid, state in states_of_children(kernel).items():
        if state is CudaState.LOCKED:
            with suppress(GpuCkptError):  # a resume of the kernel does it
                kernel.fast_path(pid=pid).swap_in(lock_s=kernel.settings.cuda, timeout_s=kernel.deadline(0))
                capsule.unfreeze_threads(child=pid)
                done.append(pid)
    return done


def shared(kernel: KernelState, loaded: Collection[int]) -> list[errors.UnsupportedCuda]:
    """Return why processes of the kernel cannot be suspended together, as far as that shows.  Raises `CudaError`.

    ``loaded``: its `candidates`.
    """
    cuda, found = kernel.engine.cuda, list[errors.UnsupportedCuda]()
    if len(loaded) < 2:
        return found
    using = states(kernel)  # forked children have loaded the driver, and do not use CUDA
    peers = [pid for pid in using if _unless_ended(kernel, pid, cuda.communicates_by_nccl)]
    if len(peers) > 1:
        found.append(_nccl_peers(peers))
    if len(using) > 1 and (count := sum(amounts(kernel, pid).shared for pid in using)):
        message = f"The kernel's processes share device memory ({count} allocations) with each other (CUDA IPC)."
        found.append(errors.SharedDeviceMemory(message))
    return found


def explained(
    kernel: KernelState, refusal: refusals.Refusal, *, pid: int | None = None, at_lock: bool = False
) -> refusals.Refusal:
    """Return a refusal of the driver, for the kernel or its child ``pid``, by its reason where that is known."""
    own, engine, used = kernel.require_capsule().host_pid, kernel.engine, kernel.saved.device_bytes
    pid = own if pid is None else pid
    managed = amounts(kernel, pid).managed
    return refusals.explained(refusal, pid, engine.cuda, engine.gpus, used, managed, at_lock=at_lock)


def uses_cuda_alone(kernel: KernelState, using: Collection[int]) -> bool:
    """Return whether only the kernel's own process uses CUDA, of those ``using`` it by `states`.  Raises `CudaError`.

    With a driver that is too old these may be processes that the kernel has forked, which have inherited its files.
    """
    own, cuda = kernel.require_capsule().host_pid, kernel.engine.cuda
    inherits = functools.partial(cuda.has_inherited_all, owners=[own])
    return own in using and all(_unless_ended(kernel, pid, inherits) is not False for pid in using if pid != own)


def amounts(kernel: KernelState, pid: int | None = None) -> Amounts:
    """Return the amounts of the kernel's library, or of process ``pid``; none if it is busy, or another release's."""
    try:
        return kernel.fast_path(pid=pid).amounts()
    except (errors.CudaError, errors.ProtocolVersion, errors.CapsuleError):
        return Amounts()


def slow_children(kernel: KernelState, loaded: Iterable[int], used: Mapping[str, int]) -> list[str]:
    """Return, for each child with much of the device memory that is ``used``, why the driver has to move that.

    ``loaded``: the kernel's `candidates`.
    """
    own, found = kernel.require_capsule().host_pid, list[str]()
    for pid in (pid for pid in loaded if pid != own) if sum(used.values()) > MUCH else ():
        bytes, process = sum(kernel.engine.gpus.used_by(pid).values()), read_process(pid)
        if bytes > MUCH and process and (why := kernel.fast_path(pid=pid).why_slow(bytes)):
            found.append(f"Device memory of {process.shown()} (pid {pid}) moves at the driver's own rate: {why}.")
    return found


def moved_by_driver(kernel: KernelState, own: Mapping[str, int]) -> bool:
    """Return whether the driver has to move most of what the kernel's process has: ``own``, in bytes by GPU UUID."""
    return bool(own) and bool(kernel.fast_path().why_slow(sum(own.values())))


def swapped_out(kernel: KernelState, pids: Iterable[int]) -> bool:
    """Return whether memory of any of these processes is swapped out.  Raises as `FastPath.swapped_out`."""
    return any(_unless_ended(kernel, pid, lambda pid: kernel.fast_path(pid=pid).swapped_out()) for pid in pids)


def close_launch_gates(kernel: KernelState, pids: Iterable[int], lease_s: float = 0.0) -> None:
    """Close the launch gates of these processes, as `FastPath.close_launch_gate`."""
    _raise_first(kernel, _each(kernel, pids, lambda pid: kernel.fast_path(pid=pid).close_launch_gate(lease_s)))


def drop_zero_pages(kernel: KernelState) -> None:
    """Give back the zeros of the contexts that the driver has suspended, before a dump; see `FastPath`."""
    suspended = [pid for pid, state in states(kernel).items() if state is CudaState.CHECKPOINTED]
    _raise_first(kernel, _each(kernel, suspended, lambda pid: kernel.fast_path(pid=pid).drop_zero_pages()))


def remove_stale_sockets(kernel: KernelState) -> None:
    """Remove the sockets that the libraries of processes have left which were killed."""
    capsule = kernel.require_capsule()
    found = [*capsule.directory.glob(f"{SOCKET}-*")]  # first: of a process that begins meanwhile it is not in here
    pids = [pid for pid in capsule.processes() if lives(pid)] if found else ()
    living = [str(_unless_ended(kernel, pid, capsule.pid_inside)) for pid in pids]
    for path in found:
        if path.name.removeprefix(f"{SOCKET}-") not in living:
            path.unlink(missing_ok=True)


def swap_out(
    kernel: KernelState,
    pids: Collection[int],
    *,
    timeout_s: float,
    choose_directory: ChooseDirectory,
    held: HeldMemory | None = None,
) -> tuple[dict[int, int], dict[str, float]]:
    """Have the libraries of locked processes swap out their memory, at the same time.

    Return the bytes by process, and the `FastPath.parts` of the kernel's own.  ``choose_directory``: of the kernel's
    own, as for `FastPath.swap_out`; see there for ``held`` and a failure.
    """
    own = kernel.require_capsule().host_pid
    moved, paths = dict.fromkeys(pids, 0), {pid: kernel.fast_path(pid=pid) for pid in pids}

    def swap(pid: int) -> None:
        moved[pid] = paths[pid].swap_out(
            lock_s=kernel.settings.cuda,
            timeout_s=timeout_s,
            choose_directory=choose_directory,
            held=held if pid == own else None,
        )

    _raise_first(kernel, _each(kernel, pids, swap))
    return moved, paths[own].parts if own in paths else {}


def lock(kernel: KernelState, but: Collection[int] = ()) -> list[int]:
    """Have the driver lock all processes with CUDA state ``but`` some; return them, the kernel's own first.

    Also those that begin to use CUDA meanwhile.  *After failure* none is locked, as far as the driver answers.  Several
    are locked at the same time, by a helper of their own: while one process of a group that communicates is locked, the
    driver may not answer for another, and only the end of the helper ends that.  Raises `UnsupportedCuda` by its reason
    where that is known, and as `Cuda.lock`.
    """
    own, cuda, locked = kernel.require_capsule().host_pid, kernel.engine.cuda, list[int]()
    with ExitStack() as stack:
        try:
            for _ in range(_ROUNDS):
                if not (new := [*states(kernel, cuda, but=(*locked, *but))]):
                    return locked
                if cuda is kernel.engine.cuda and [*locked, *new] != [own]:
                    cuda = stack.enter_context(cuda.with_own_helper())
                locked += _lock(kernel, cuda, new)
        except BaseException:
            _unlock(cuda, locked)
            raise
        _unlock(cuda, locked)
    raise errors.CudaTimeout("Again and again, other processes of the kernel begin to use CUDA.")


def _lock(kernel: KernelState, cuda: Cuda, pids: list[int]) -> list[int]:
    """Lock processes at the same time; return those that have not ended.  *After failure* none is locked."""
    own = kernel.require_capsule().host_pid
    several = pids != [own]
    grace = {"grace_s": _GRACE} if several else {}
    failed = _each(kernel, pids, lambda pid: cuda.lock(pid, kernel.settings.cuda, **grace))
    done = [pid for pid in pids if pid not in failed]
    failures = {pid: error for pid, error in failed.items() if error is not None}
    if not failures:
        return done
    if several:
        _unlock(cuda, done, late=failures)
    pid, failure = next(iter(failures.items()))
    if isinstance(failure, errors.UnsupportedCuda):
        reason = explained(kernel, failure, pid=pid, at_lock=True)
        if isinstance(reason, errors.ProfilerUsed) and pid == own:
            kernel.lasting_refusal = reason
        raise _named(kernel, pid, reason) from failure
    if isinstance(failure, errors.CudaTimeout) and failure.details.get("op") is not None:  # no answer at all
        using = [each for each in pids if _unless_ended(kernel, each, cuda.has_nccl)]
        if len(using) > 1:
            raise _nccl_peers(using) from failure
    raise _named(kernel, pid, failure)


def _unlock(cuda: Cuda, pids: Iterable[int], late: Iterable[int] = ()) -> None:
    """Unlock processes, and those of which it is not known whether they are, or still will be, locked (``late``)."""
    for pid in pids:
        with suppress(GpuCkptError):  # what is still locked, the undo of the whole step unlocks
            cuda.unlock(pid)
    deadline = time.monotonic() + _LATE
    for pid in late:
        with suppress(GpuCkptError):
            while (state := cuda.state(pid)) is not CudaState.LOCKED and time.monotonic() < deadline:
                time.sleep(0.1)
            if state is CudaState.LOCKED:
                cuda.unlock(pid)


def keep_from_driver(kernel: KernelState, pids: Iterable[int], *, from_forking: bool = False) -> None:
    """Freeze the threads of locked processes that must not run while the driver has suspended these.

    As `FastPath.freeze_for_driver`, with ``from_forking`` for the children: torch's compile worker forks 16 others at
    once.  They run again once the kernel is resumed.  *After failure* some may be frozen.  Raises `KernelBusy` when a
    thread cannot be frozen.
    """
    own = kernel.require_capsule().host_pid

    def freeze(pid: int) -> None:
        kernel.fast_path(pid=pid).freeze_for_driver(from_forking=from_forking and pid != own)

    for pid in pids:
        try:
            _unless_ended(kernel, pid, freeze)
        except errors.CapsuleError as error:
            message = "A thread cannot be stopped safely for as long as its CUDA state is suspended."
            hint = "It is in the C library or the CUDA driver all the time, or a debugger traces it: try again then."
            raise _named(kernel, pid, errors.KernelBusy(message, hint=hint, cause=error.message)) from error


def checkpoint(kernel: KernelState, children: Iterable[int], timeout_s: float) -> None:
    """Have the driver suspend locked children of the kernel, after `keep_from_driver`.

    Raises `UnsupportedCuda`, by its reason, `CudaError`.
    """
    cuda = kernel.engine.cuda
    failed = _each(kernel, children, lambda pid: cuda.checkpoint(pid, timeout_s=timeout_s))
    for pid, failure in failed.items():
        if isinstance(failure, errors.UnsupportedCuda):
            raise _named(kernel, pid, explained(kernel, failure, pid=pid)) from failure
        if failure is not None:
            raise _named(kernel, pid, failure)


def resume_children(kernel: KernelState, gpu_mapping: Mapping[str, str] | None, timeout_s: float) -> None:
    """Bring the children of the kernel back to the GPU, whatever was done of that before.  Raises `CudaError`.

    Call it inside a reservation for all of them, as `Cuda.restore`.  Frozen threads stay so.
    """
    cuda, children = kernel.engine.cuda, states_of_children(kernel)
    kernel.restored_on_gpu = kernel.restored_on_gpu or CudaState.CHECKPOINTED in children.values()

    def resume(pid: int) -> None:
        if children[pid] not in ON_GPU:
            cuda.restore(pid, gpu_mapping, timeout_s=timeout_s)
        kernel.fast_path(pid=pid).swap_in(lock_s=kernel.settings.cuda, timeout_s=timeout_s)

    _raise_first(kernel, _each(kernel, children, resume))


# -- one process


def _all(kernel: KernelState) -> list[int]:
    capsule = kernel.require_capsule()
    return [capsule.host_pid, *capsule.other_processes()]


def _unless_ended(kernel: KernelState, pid: int, call: Callable[[int], _T]) -> _T | None:
    """Return ``call(pid)``, or None if the process, a child of the kernel, has ended."""
    try:
        return call(pid)
    except GpuCkptError:
        if pid == kernel.require_capsule().host_pid or lives(pid):
            raise
        return None


def lives(pid: int) -> bool:
    """Return whether a process has not ended, and is not ending: its files are closed before it has."""
    return not procfs.is_ending(pid)


def _each(kernel: KernelState, pids: Iterable[int], call: Callable[[int], object]) -> dict[int, GpuCkptError | None]:
    """Call ``call`` for all processes at the same time.  Return the errors, None for a child that has ended."""

    def error_of(pid: int) -> tuple[bool, GpuCkptError | None]:
        try:
            call(pid)
        except GpuCkptError as error:
            return True, error if pid == kernel.require_capsule().host_pid or lives(pid) else None
        return False, None

    pids = [*pids]
    with ThreadPoolExecutor(max(1, len(pids) - 1), "gpu-ckpt-driver") as pool:
        others = pool.map(error_of, pids[1:])
        outcomes = dict(zip(pids, [*map(error_of, pids[:1]), *others], strict=True))  # one needs no thread
    return {pid: error for pid, (failed, error) in outcomes.items() if failed}


def _raise_first(kernel: KernelState, failed: Mapping[int, GpuCkptError | None]) -> None:
    """Raise the first of the errors of `_each`, if there is one."""
    for pid, failure in failed.items():
        if failure is not None:
            raise _named(kernel, pid, failure)


def _named(kernel: KernelState, pid: int, error: _E) -> _E:
    """Have the error of a child name it."""
    process = read_process(pid)
    if pid != kernel.require_capsule().host_pid and process is not None:
        error.message = f"Of the kernel's child {process.shown()} (pid {pid}): {error.message}"
        error.details |= {"pid": pid, "command": process.shown()}
    return error


def _nccl_peers(pids: list[int]) -> errors.NcclPeers:
    message = f"The kernel's processes {', '.join(map(str, pids))} communicate by NCCL."
    return errors.NcclPeers(message, pids=pids)


def suspend_before_end(kernel: KernelState, pids: Collection[int] | None = None) -> None:
    """Suspend the CUDA state of processes that are to be killed, if that can be done in `_BEFORE_END` seconds.

    ``pids``: by default all of the kernel's.  With a newer driver than those this project is made for, the end of a
    living process that the driver had restored hung the host, and that of a suspended one did not (cuda-checkpoint's
    issue 53).
    """
    cuda = kernel.engine.cuda

    def suspend() -> None:
        with suppress(GpuCkptError):
            found = states(kernel) if pids is None else {pid: cuda.state(pid) for pid in pids}
            for pid in [pid for pid, state in found.items() if state in ON_GPU]:
                if found[pid] is CudaState.RUNNING:
                    cuda.lock(pid, _BEFORE_END / 2)
                bytes = sum(kernel.engine.gpus.used_by(pid).values())
                fits = bytes + MARGIN < available_memory()
                if fits and bytes < _BEFORE_END / 2 * _DRIVERS_RATE:
                    cuda.checkpoint(pid, timeout_s=_BEFORE_END / 2)

    thread = threading.Thread(target=suspend, name="gpu-ckpt-last-suspend", daemon=True)
    thread.start()
    thread.join(_BEFORE_END)  # a driver that does not answer keeps nobody from ending the kernel
