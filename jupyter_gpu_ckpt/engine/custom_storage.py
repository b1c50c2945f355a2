"""CUDA 13.4's custom storage: whether this host offers it, and what a storage is.  No checkpoint uses it yet.

Source: CUDA Driver API 13.4, chapter "CUDA Checkpointing", with its structures ``CUcheckpointCheckpointArgs``,
``CUcheckpointRestoreArgs`` and ``CUcheckpointCustomStorageInfo``.  Without it ``cuCheckpointProcessCheckpoint`` copies
device memory to the process's own host memory.  With ``customStorageInfo_out`` in its arguments it maps that memory
into the process that calls, one range for each GPU; the caller copies, and ``cuCheckpointOperationComplete`` waits for
the ranges' streams and unmaps them.  ``cuCheckpointProcessRestore`` is the mirror.

What that asks of an implementation, none of which has been tried on a driver that has it:

- The caller is the helper process (`cuda_helper`), so a `Storage` lives there; `cuda.Cuda.checkpoint` and
  `cuda.Cuda.restore` can only name one to it.
- The caller has retained the primary context of every GPU of the process, or is refused
  (``CUDA_ERROR_INVALID_CONTEXT``).  A context takes some hundred MiB of the GPU.
- Between the two calls the process is in one of two states that `cuda.CudaState` has no word for: 4, "checkpointing",
  and 5, "restoring" (``CUprocessState`` of cuda-bindings 13.5.0).  The chapter names no way out of them but
  ``cuCheckpointOperationComplete``.
- cuda-bindings 13.4.1 and 13.5.0 look that function up as one of version 13041, which a driver of 13040 must refuse
  (seen with a stand-in for libcuda).  `look` asks by 13040; to call it, take the address from the driver's answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

#: The version (1000 * major + 10 * minor) of the driver that brought it, and the function whose presence tells it.
NEEDED_DRIVER = 13040
COMPLETE = "cuCheckpointOperationComplete"
#: What the bindings must have for it.
NEEDED_SYMBOLS = (COMPLETE, "CUcheckpointCheckpointArgs", "CUcheckpointCustomStorageInfo")

#: Why a host does not offer it.
DRIVER_TOO_OLD, FUNCTION_MISSING, BINDING_TOO_OLD = "driver-too-old", "function-missing", "binding-too-old"


@dataclass(frozen=True)
class CustomStorage:
    """Whether a host offers custom storage.

    ``cuda``: the CUDA version that the driver knows (``13.0``).  ``reason``: empty if it is offered, else
    ``driver-too-old`` (that version is below 13.4), ``function-missing`` (it is not, and the driver lacks the function
    all the same) or ``binding-too-old`` (the driver has it, the package cuda-bindings has not).
    """

    cuda: str
    reason: str = ""

    @property
    def offered(self) -> bool:
        """Whether driver and bindings both have it; that a GPU supports it only a call would tell."""
        return not self.reason


@dataclass(frozen=True)
class Mapped:
    """A process's memory on one GPU, mapped into the caller: ``CUcheckpointCustomStoragePerDeviceData``.

    ``pointer``: its device address in the caller.  ``size``: bytes.  ``stream``: the ``CUstream``, of that GPU's
    primary context, on which to enqueue copies and which tells the GPU.
    """

    pointer: int
    size: int
    stream: int


class Storage(Protocol):
    """Where device memory goes instead of host memory.  The package has none: this is what one would have to be."""

    def take(self, mapped: Sequence[Mapped]) -> None:
        """Copy the memory out, or enqueue that on its streams.

        To be called between ``cuCheckpointProcessCheckpoint`` and ``cuCheckpointOperationComplete``, which waits for
        the streams and after which the process is ``CHECKPOINTED``.
        """

    def give(self, mapped: Sequence[Mapped]) -> None:
        """Copy what `take` took back, or enqueue that on the streams; the ranges are as many and as large as then.

        To be called between ``cuCheckpointProcessRestore`` and ``cuCheckpointOperationComplete``, after which the
        process is ``LOCKED``.
        """


def look(api: Any) -> CustomStorage:
    """Ask driver and bindings; ``api`` is ``cuda.bindings.driver``, initialised.  Does not raise for what they lack.

    The driver is asked by ``cuGetProcAddress`` (chapter "Driver Entry Point Access"), which refuses a version above its
    own, and answers 0 for a function that it lacks.
    """
    _, version = api.cuDriverGetVersion()
    cuda = f"{version // 1000}.{version % 1000 // 10}"
    if version < NEEDED_DRIVER:
        return CustomStorage(cuda, DRIVER_TOO_OLD)
    error, address, *_ = api.cuGetProcAddress(COMPLETE.encode(), NEEDED_DRIVER, 0)
    if int(error) != 0 or not address:
        return CustomStorage(cuda, FUNCTION_MISSING)
    if not all(hasattr(api, name) for name in NEEDED_SYMBOLS):
        return CustomStorage(cuda, BINDING_TOO_OLD)
    return CustomStorage(cuda)
