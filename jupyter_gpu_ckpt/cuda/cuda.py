"""The CUDA driver's process checkpoint functions, by the driver's own verbs.

Source of the rules below: the CUDA Driver API's chapter "CUDA Checkpointing".  To suspend: ``lock``, ``checkpoint``; to
resume: ``restore``, ``unlock``; `lifecycle` decides when.  No method tries anything twice.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import math
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .. import procfs
from ..errors import CudaError, CudaTimeout, DriverTooOld, StateError, UnsupportedCuda
from ..process import syscalls
from .checkpoint_api import DriverRefused
from .helper_client import Caller, Facade

# CUresult numbers (CUDA Driver API, "Data types used by CUDA driver").
INVALID_VALUE, OUT_OF_MEMORY, NOT_INITIALIZED = 1, 2, 3
ILLEGAL_STATE, NOT_FOUND, NOT_READY, NOT_SUPPORTED, UNKNOWN = 401, 500, 600, 801, 999

# A full H200 takes about a minute each way; a machine whose host memory grows on first use several times that.
TRANSFER_TIMEOUT_S = 600.0
QUICK_TIMEOUT_S = 30.0

#: How the paths of the driver's device files begin.
DEVICE_FILES = "/dev/nvidia"

#: Part of the paths of NCCL's sockets, and the name of PyTorch's thread that watches a process group of NCCL.
_NCCL_SOCKET, _NCCL_WATCHDOG = "/nccl-socket-", "pt_nccl_watchdg"

_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class CudaState(enum.Enum):
    """The driver's state of a process; ``NONE`` for a process that has not initialised CUDA."""

    NONE = "none"
    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


_STATES = {0: CudaState.RUNNING, 1: CudaState.LOCKED, 2: CudaState.CHECKPOINTED, 3: CudaState.FAILED}


class Cuda(Facade):
    """The driver's verbs for the processes of this node.

    Thread-safe: calls for one process run one after the other, calls for different processes in parallel.

    ``helper``: the helper process, shared with a `gpus.Gpus`; by default an own one, ended by `close`.

    Process ids are those of the caller's pid namespace (for a kernel in a capsule: the outer one).  Every method with a
    process id raises ``TypeError`` or ``ValueError`` for a bool or a thread's id (which the driver would accept for its
    process: NVIDIA/cuda-checkpoint issue 41), and `CudaError` when there is no such process.

    The verbs raise `CudaUnavailable` as `available` does, and

    A driver without these functions (`DriverTooOld`) suspends nothing, so `state` does without it: a process that has
    device files open is ``RUNNING``, any other has no CUDA state.

    CudaTimeout
        No reply before the deadline: the helper is ended and replaced, and *after failure* the process is in whatever
        state the driver had reached (`state`).  A ``LOCKED`` process hangs in its next CUDA call until `unlock`, which
        works from any helper.  Or another call for the process was running all the time; then nothing was done.
    HelperGone
        The helper ended during the call; *after failure* as with `CudaTimeout`.
    StateError
        The process is not in the state that the verb starts from; nothing was done.
    CudaError
        The driver refused; ``cuda_result`` and ``cuda_name`` in the details are the error's number and name.
    """

    def __init__(self, helper: Caller | None = None) -> None:
        super().__init__(helper)
        #: Processes of which the driver has reported a state, with the time of their start (`state`).
        self._known = dict[int, int]()

    def available(self) -> None:
        """Return if this host can checkpoint CUDA processes.

        Raises `CudaUnavailable` with ``details["reason"]``: ``binding-missing``, ``binding-too-old`` or
        ``symbol-missing`` (the package cuda-bindings), ``driver-missing``, ``driver-too-old``, ``driver-refuses``
        (cuInit failed: no GPU, or the kernel module and the library differ).
        """
        self._helper.call("cuda.open", timeout_s=QUICK_TIMEOUT_S)

    def uses_cuda(self, pid: int) -> bool:
        """Return whether the process has loaded the driver's library, and so may have CUDA state.  Reads /proc only.

        Open ``/dev/nvidia*`` would not do: a suspended process has none, and a process that only uses NVML has some.  A
        process that loaded the library but never initialised it is in `state` ``NONE``.  An unreadable process
        (PR_SET_DUMPABLE) has no CUDA state on a host without the driver.  One that had a state when the driver was last
        asked is not looked at again: where it runs another program since, the next `state` says so.
        """
        if self._is_hidden(pid):
            return False
        # Linux writes hundreds of lines for that, in a millisecond.
        return self._had_state(pid) or "/libcuda.so" in self._read(pid, "maps")

    def _had_state(self, pid: int) -> bool:
        """Return whether a readable process that lives on had a CUDA state when the driver was last asked."""
        known = self._known.get(pid)
        if known is None or not os.access(f"/proc/{pid}/fd", os.R_OK) or procfs.is_ending(pid):
            return False
        return known == self._started(pid)

    def has_profiler(self, pid: int) -> bool:
        """Return whether the process has loaded CUPTI, the library of profilers.  Reads /proc only.

        That it uses it does not follow: PyTorch loads it in every process.
        """
        return "/libcupti.so" in self._read(pid, "maps")

    def has_nccl(self, pid: int) -> bool:
        """Return whether the process has loaded NCCL.  Reads /proc only.  PyTorch loads it in every process."""
        return "/libnccl.so" in self._read(pid, "maps")

    def communicates_by_nccl(self, pid: int) -> bool:
        """Return whether the process has a communicator of NCCL with others of this host.  Reads /proc only.

        It has a socket of NCCL's (its source, misc/ipcsocket.cc), by which the ranks pass each other their device
        memory, or has mapped NCCL's files (misc/shmutils.cc), which are deleted then: by what the GPUs support.  A
        process group of PyTorch has a thread besides, which watches it.
        """
        if self._is_hidden(pid):
            return False
        if "/shm/nccl-" in self._read(pid, "maps"):
            return True
        try:
            return _has_thread(pid, _NCCL_WATCHDOG) or _has_unix_socket(pid, _NCCL_SOCKET)
        except OSError as error:
            raise _unreadable(pid, error) from error

    def device_files(self, pid: int) -> list[str]:
        """Return the ``/dev/nvidia*`` that the process has open or mapped, sorted; none may be left before a dump."""
        if self._is_hidden(pid):
            return []
        files = set(re.findall(rf"{DEVICE_FILES}\S+", self._read(pid, "maps")))
        try:
            files.update(target for _, target in procfs.links(pid) if target.startswith(DEVICE_FILES))
        except OSError as error:
            raise _unreadable(pid, error) from error
        return sorted(files)

    def has_inherited_all(self, pid: int, owners: Iterable[int]) -> bool:
        """Return whether each device file that the process has open is one of ``owners``' own, under the same number.

        Then it was forked from one of them.  Reads /proc and compares by kcmp(2) only.
        """
        owners = [*owners]
        try:
            opened = [number for number, target in procfs.links(pid) if target.startswith(DEVICE_FILES)]
        except OSError as error:
            raise _unreadable(pid, error) from error
        # A child that has some mapped and none open is not compared.
        return bool(opened) and all(any(_is_same_file(pid, owner, number) for owner in owners) for number in opened)

    def state(self, pid: int) -> CudaState:
        """Return the process's CUDA state.  A process that never loaded the driver costs no call of it.

        With a driver that is too old a process that another one has suspended is in state ``NONE``: see `available`.
        """
        self._check_process(pid)
        started = self._started(pid)
        # The list of a large process's mappings takes as long to read as the driver to answer.
        if self._known.get(pid) != started and not self.uses_cuda(pid):
            return CudaState.NONE
        state = self._reported(pid)
        if state is not CudaState.NONE:
            self._known[pid] = started
        else:  # another program may run in it by now
            self._known.pop(pid, None)
        return state

    def _reported(self, pid: int) -> CudaState:
        try:
            number = self._helper.call("cuda.state", lane=pid, timeout_s=QUICK_TIMEOUT_S, pid=pid)
        except DriverTooOld:
            return self._state_by_files(pid)
        except DriverRefused as refusal:
            if refusal.number == NOT_FOUND:
                return self._state_by_files(pid)
            # The driver has no error of its own for "no CUDA here"; a process with open device files has CUDA.
            if refusal.number == NOT_INITIALIZED or (refusal.number == INVALID_VALUE and not self.device_files(pid)):
                return CudaState.NONE
            raise _error("report the state of", pid, refusal, left="") from refusal
        if number not in _STATES:
            raise CudaError("The CUDA driver reports an unknown state.", pid=pid, cuda_state=number)
        return _STATES[number]

    def _state_by_files(self, pid: int) -> CudaState:
        return CudaState.RUNNING if self.device_files(pid) else CudaState.NONE

    def lock(self, pid: int, timeout_s: float, *, grace_s: float = QUICK_TIMEOUT_S) -> None:
        """``RUNNING -> LOCKED``: wait at most ``timeout_s`` seconds for submitted GPU work; block further CUDA calls.

        A driver that does not answer gets ``grace_s`` seconds more.  *After failure*, also the `CudaTimeout` of work
        that did not end in time, the process runs on.
        """
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
            raise TypeError("timeout_s must be a number")
        if not 0 < timeout_s < 86400:  # 0 would mean no limit
            raise ValueError("timeout_s must be positive and less than a day")
        milliseconds, deadline_s = math.ceil(timeout_s * 1000), timeout_s + grace_s
        self._do("lock", pid, deadline_s, left="the process runs on", timeout_ms=milliseconds)

    def checkpoint(self, pid: int, *, timeout_s: float = TRANSFER_TIMEOUT_S) -> None:
        """``LOCKED -> CHECKPOINTED``: move device memory to host memory and close all device files.

        The process lives on, locked; it needs as much free host memory as it used on the GPU.  *After failure* it is
        still locked, or ``FAILED``.  Raises `UnsupportedCuda` for kinds of memory that the driver cannot save.
        """
        self._do("checkpoint", pid, timeout_s, left="the process is locked; unlock it to let it run on")
        state = self.state(pid)
        if state is not CudaState.CHECKPOINTED:
            message = "The CUDA driver reports success, but the process is not checkpointed."
            raise CudaError(message, pid=pid, state=state.value)

    def restore(
        self, pid: int, gpu_mapping: Mapping[str, str] | None = None, *, timeout_s: float = TRANSFER_TIMEOUT_S
    ) -> None:
        """``CHECKPOINTED -> LOCKED``: move everything back to the GPU, to the same addresses.

        Call it inside `gpus.Gpus.reservation` only: *after failure* for lack of memory the process is destroyed, and
        every later restore fails, too.  A ``gpu_mapping`` (`gpus.gpu_mapping`) that omits a GPU also destroys it.
        """
        pairs = list((gpu_mapping or {}).items())
        for uuid in itertools.chain.from_iterable(pairs):
            if not isinstance(uuid, str):
                raise TypeError("gpu_mapping must map GPU UUIDs to GPU UUIDs")
            if not _UUID.fullmatch(uuid):
                raise ValueError(f"not a GPU UUID: {uuid!r}")
        if len({new for _, new in pairs}) != len(pairs):
            raise ValueError("gpu_mapping maps two GPUs to one")
        self._do("restore", pid, timeout_s, left="the process may be lost; its image is unchanged", pairs=pairs)

    def unlock(self, pid: int) -> None:
        """``LOCKED -> RUNNING``: let the process's CUDA calls continue.  *After failure* it is still locked."""
        self._do("unlock", pid, QUICK_TIMEOUT_S, left="the process is still locked")

    @staticmethod
    def _is_hidden(pid: int) -> bool:
        """Return whether the process is unreadable, and has no CUDA state: the host has no driver."""
        check_pid(pid)
        hidden = os.path.exists(f"/proc/{pid}") and not os.access(f"/proc/{pid}/fd", os.R_OK)
        return hidden and not os.path.exists("/dev/nvidiactl")

    def _do(self, verb: str, pid: int, timeout_s: float, *, left: str, **args: Any) -> None:
        self._check_process(pid)
        try:
            self._helper.call(f"cuda.{verb}", lane=pid, timeout_s=timeout_s, pid=pid, **args)
        except DriverRefused as refusal:
            raise _error(verb, pid, refusal, left=left) from refusal

    def _check_process(self, pid: int) -> None:
        group = procfs.fields(self._read(pid, "status")).get("Tgid", str(pid))
        if int(group) != pid:
            raise ValueError(f"{pid} is a thread of process {group}")

    def _started(self, pid: int) -> int:
        """Return when the process was started, in clock ticks since the boot; overridden by the fake."""
        try:
            return procfs.stat(pid).started
        except OSError as error:
            raise _unreadable(pid, error) from error

    def _read(self, pid: int, name: str) -> str:
        """Read a file of /proc/``pid``; overridden by the fake."""
        check_pid(pid)
        try:
            return procfs.read(f"/proc/{pid}/{name}")
        except OSError as error:
            raise _unreadable(pid, error) from error


def _has_thread(pid: int, name: str) -> bool:
    for tid in procfs.threads(pid):
        with contextlib.suppress(*procfs.GONE):  # this thread has ended
            if procfs.stat(pid, tid).name == name:
                return True
    return False


def _has_unix_socket(pid: int, part: str) -> bool:
    """Return whether the process has a unix socket open whose path has this part; abstract ones have paths, too."""
    own = {target for _, target in procfs.links(pid)}
    return any(part in row[7] and f"socket:[{row[6]}]" in own for row in procfs.sockets("unix", pid) if len(row) > 7)


def _is_same_file(pid: int, other: int, number: int) -> bool:
    """Return whether two processes have the same open file under one number."""
    try:
        return syscalls.call("kcmp", pid, other, syscalls.KCMP_FILE, number, number) == 0
    except OSError:  # it has none, or one of them has ended
        return False


def check_pid(pid: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a value that cannot be a process id."""
    if isinstance(pid, bool) or not isinstance(pid, int):
        raise TypeError("pid must be an int")
    if pid <= 0:
        raise ValueError("pid must be positive")


def _unreadable(pid: int, error: OSError) -> CudaError:
    if isinstance(error, procfs.GONE):
        return CudaError(f"There is no process {pid}.", hint="Restart the kernel, or restore its image.", pid=pid)
    hint = "It must be a process of the same user, and dumpable (PR_SET_DUMPABLE)."
    return CudaError(f"Process {pid} cannot be read: {error.strerror}.", hint=hint, pid=pid)


def _error(verb: str, pid: int, refusal: DriverRefused, *, left: str) -> CudaError | StateError | UnsupportedCuda:
    facts: dict[str, Any] = {"pid": pid, "cuda_result": refusal.number, "cuda_name": refusal.name}
    message = f"The CUDA driver refused to {verb} the process ({refusal.name})."
    if verb == "lock" and refusal.number == NOT_READY:
        return CudaTimeout("The process's GPU work did not end before the deadline.", left=left, **facts)
    if refusal.number == ILLEGAL_STATE:
        return StateError(message, left="nothing was changed", **facts)
    if refusal.number == NOT_SUPPORTED:
        return UnsupportedCuda(message, left=left, **facts)
    if refusal.number == NOT_FOUND:
        return DriverTooOld(message, left=left, reason="driver-too-old", **facts)
    if verb == "restore" and refusal.number == OUT_OF_MEMORY:
        message = "There was too little GPU memory to restore the process, and it cannot be restored any more."
        hint = "Restore the image again when more GPU memory is free."
        return CudaError(message, hint=hint, left="the process is lost", **facts)
    return CudaError(message, left=left, **facts)
