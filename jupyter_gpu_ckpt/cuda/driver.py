"""The CUDA driver's process checkpoint functions, with the driver's own verbs and nothing else.

Source of the rules below: the CUDA Driver API's chapter "CUDA Checkpointing".  The way out is ``lock -> checkpoint``,
the way back ``restore -> unlock``; what each means for a kernel is `lifecycle`'s business.  No method tries anything
twice.
"""

from __future__ import annotations

import enum
import math
import os
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from .. import procfs
from ..errors import CudaError, CudaTimeout, CudaUnavailable, StateError, UnsupportedCuda
from .client import Caller, Helper
from .helper import DriverRefused

# CUresult numbers (CUDA Driver API, "Data types used by CUDA driver").
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
ILLEGAL_STATE = 401
NOT_FOUND = 500
NOT_READY = 600
NOT_SUPPORTED = 801

# A full H200 takes about a minute each way; a machine whose host memory grows on first use several times that.
TRANSFER_TIMEOUT_S = 600.0
QUICK_TIMEOUT_S = 30.0

_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class CudaState(enum.Enum):
    """The driver's state of a process; ``NONE`` for a process that has not initialised CUDA."""

    NONE = "none"
    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"


_STATES = {0: CudaState.RUNNING, 1: CudaState.LOCKED, 2: CudaState.CHECKPOINTED, 3: CudaState.FAILED}


class Cuda:
    """The driver's verbs for the processes of this node.  Thread-safe: calls for one process run one after the other,
    those for different processes side by side.

    Parameters
    ----------
    helper:
        The helper process to ask, shared with a `gpus.Gpus`; its own by default, ended by `close`.

    Process ids are the caller's view of them (for a kernel in a capsule: the outer one).  Every method that takes one
    raises ``TypeError`` or ``ValueError`` for what is not a process id (a bool; a thread's id, which the driver would
    take for its process: NVIDIA/cuda-checkpoint issue 41) and `CudaError` when there is no such process.

    The verbs raise `CudaUnavailable` as `available` does, and

    CudaTimeout
        No answer before the deadline: the helper that asked is ended and replaced, and *after failure* the process's
        state is whatever the driver had reached: ask `state`.  A process that was left ``LOCKED`` hangs in its next
        CUDA call until `unlock`, which works from any helper.  Or another call for the process was under way all the
        time; then nothing was done.
    HelperGone
        The helper ended during the call; *after failure* as with `CudaTimeout`.
    StateError
        The process is not in the state the verb starts from; nothing was done.
    CudaError
        The driver refused; its number and name are in the details as ``cuda_result`` and ``cuda_name``.
    """

    def __init__(self, helper: Caller | None = None) -> None:
        self._helper: Caller = helper or Helper()
        self._owns_helper = helper is None

    def available(self) -> None:
        """Return if this host can checkpoint CUDA processes.

        Raises `CudaUnavailable` with ``details["reason"]``: ``binding-missing``, ``binding-too-old`` or
        ``symbol-missing`` (the package cuda-bindings), ``driver-missing``, ``driver-too-old``, ``driver-refuses``
        (cuInit failed: no GPU, or the kernel module and the library differ).
        """
        self._helper.call("cuda.open", timeout_s=QUICK_TIMEOUT_S)

    def uses_cuda(self, pid: int) -> bool:
        """Whether the process may have CUDA state: it has loaded the driver's library.  Cheap; asks /proc only.

        Not "has ``/dev/nvidia*`` open": a suspended process has none, and one that only uses NVML has.  A process that
        loaded the library but never initialised it is in `state` ``NONE``.  One that nobody may look into
        (PR_SET_DUMPABLE) has none on a host without the driver.
        """
        return not self._is_hidden(pid) and "/libcuda.so" in self._read(pid, "maps")

    def device_files(self, pid: int) -> list[str]:
        """The ``/dev/nvidia*`` the process has open or mapped, sorted; must be empty before a dump.  Cheap: /proc."""
        if self._is_hidden(pid):
            return []
        files = set(re.findall(r"/dev/nvidia\S+", self._read(pid, "maps")))
        try:
            files.update(target for _, target in procfs.links(pid) if target.startswith("/dev/nvidia"))
        except OSError as error:
            raise _unreadable(pid, error) from error
        return sorted(files)

    def state(self, pid: int) -> CudaState:
        """The process's CUDA state.  Does not ask the driver about a process that never loaded it."""
        self._check_process(pid)
        if not self.uses_cuda(pid):
            return CudaState.NONE
        try:
            number = self._helper.call("cuda.state", lane=pid, timeout_s=QUICK_TIMEOUT_S, pid=pid)
        except DriverRefused as refusal:
            # The driver has no word of its own for "no CUDA here"; a process with open device files is no such process.
            if refusal.number == NOT_INITIALIZED or (refusal.number == INVALID_VALUE and not self.device_files(pid)):
                return CudaState.NONE
            raise _error("tell the state of", pid, refusal, left="") from refusal
        if number not in _STATES:
            raise CudaError("The CUDA driver reports a state this release does not know.", pid=pid, cuda_state=number)
        return _STATES[number]

    def lock(self, pid: int, timeout_s: float) -> None:
        """``RUNNING -> LOCKED``: wait for submitted GPU work, at most ``timeout_s`` seconds, and block further CUDA
        calls.

        *After failure* the process runs on; so it does after the `CudaTimeout` of work that did not end in time.
        """
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
            raise TypeError("timeout_s must be a number")
        if not 0 < timeout_s < 86400:  # the driver takes 0 for "wait for ever"
            raise ValueError("timeout_s must be positive and less than a day")
        milliseconds = math.ceil(timeout_s * 1000)
        deadline_s = timeout_s + QUICK_TIMEOUT_S
        self._do("lock", pid, deadline_s, left="the process runs on", timeout_ms=milliseconds)

    def checkpoint(self, pid: int, *, timeout_s: float = TRANSFER_TIMEOUT_S) -> None:
        """``LOCKED -> CHECKPOINTED``: device memory to host memory, all device files closed.  The process lives on,
        locked.

        The process needs as much free host memory as it used on the GPU.  *After failure* it is still locked, or
        ``FAILED``. Raises `UnsupportedCuda` for memory of a kind the driver cannot save.
        """
        self._do("checkpoint", pid, timeout_s, left="the process is locked; unlock it to let it run on")
        state = self.state(pid)
        if state is not CudaState.CHECKPOINTED:
            raise CudaError(
                "The CUDA driver reports success, but the process is not checkpointed.", pid=pid, state=state.value
            )

    def restore(
        self, pid: int, gpu_mapping: Mapping[str, str] | None = None, *, timeout_s: float = TRANSFER_TIMEOUT_S
    ) -> None:
        """``CHECKPOINTED -> LOCKED``: everything back to the GPU, at the same addresses.

        Call it inside `gpus.Gpus.room` only: *after failure* for want of memory the process is destroyed, and every
        later restore fails too.  ``gpu_mapping`` from `gpus.gpu_mapping`; one that leaves out a GPU destroys it as
        well.
        """
        pairs = list((gpu_mapping or {}).items())
        for pair in pairs:
            for uuid in pair:
                if not isinstance(uuid, str):
                    raise TypeError("gpu_mapping must map GPU UUIDs to GPU UUIDs")
                if not _UUID.fullmatch(uuid):
                    raise ValueError(f"not a GPU UUID: {uuid!r}")
        if len({new for _, new in pairs}) != len(pairs):
            raise ValueError("gpu_mapping puts two GPUs in one place")
        self._do("restore", pid, timeout_s, left="the process may be lost; its image is as good as before", pairs=pairs)

    def unlock(self, pid: int) -> None:
        """``LOCKED -> RUNNING``: the process's CUDA calls go on.  *After failure* the process is still locked."""
        self._do("unlock", pid, QUICK_TIMEOUT_S, left="the process is still locked")

    def close(self) -> None:
        """End the helper process, if it is this object's own, after the calls under way."""
        if self._owns_helper:
            self._helper.close()

    def __enter__(self) -> Cuda:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @staticmethod
    def _is_hidden(pid: int) -> bool:
        """Whether nobody may look into the process, and need not: the host has no driver that it could use."""
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

    def _read(self, pid: int, name: str) -> str:
        """One file of /proc/``pid``; overridden by the fake."""
        check_pid(pid)
        try:
            return procfs.read(f"/proc/{pid}/{name}")
        except OSError as error:
            raise _unreadable(pid, error) from error


def check_pid(pid: int) -> None:
    """Raise ``TypeError`` or ``ValueError`` for what cannot be a process id."""
    if isinstance(pid, bool) or not isinstance(pid, int):
        raise TypeError("pid must be an int")
    if pid <= 0:
        raise ValueError("pid must be positive")


def _unreadable(pid: int, error: OSError) -> CudaError:
    if isinstance(error, procfs.GONE):
        return CudaError(f"There is no process {pid}.", hint="Restart the kernel, or restore its image.", pid=pid)
    return CudaError(
        f"Process {pid} cannot be looked into: {error.strerror}.",
        hint="It must be a process of the same user, and dumpable (PR_SET_DUMPABLE).",
        pid=pid,
    )


def _error(verb: str, pid: int, refusal: DriverRefused, *, left: str) -> CudaError | StateError | UnsupportedCuda:
    facts: dict[str, Any] = {"pid": pid, "cuda_result": refusal.number, "cuda_name": refusal.name}
    said = f"The CUDA driver refused to {verb} the process ({refusal.name})."
    if verb == "lock" and refusal.number == NOT_READY:
        return CudaTimeout("The process's GPU work did not end before the deadline.", left=left, **facts)
    if refusal.number == ILLEGAL_STATE:
        return StateError(said, hint="Ask for the process's CUDA state first.", left="nothing was changed", **facts)
    if refusal.number == NOT_SUPPORTED:
        return UnsupportedCuda(said, left=left, **facts)
    if refusal.number == NOT_FOUND:
        return CudaUnavailable(said, left=left, reason="driver-too-old", **facts)
    if verb == "restore" and refusal.number == OUT_OF_MEMORY:
        said = "There was too little GPU memory to restore the process, and it cannot be restored any more."
        return CudaError(said, hint="Restore the image again, with room.", left="the process is lost", **facts)
    return CudaError(said, left=left, **facts)
