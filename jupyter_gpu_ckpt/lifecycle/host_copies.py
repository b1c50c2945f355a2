"""Copies in host memory of device memory that is on the GPU: how much of it they may have, and who gives it back.

A copy saves a later suspend time, and no kernel needs it: whatever else needs the memory comes first.
"""

from __future__ import annotations

import contextlib
import logging

from ..errors import GpuCkptError
from . import cuda_processes
from .context import KernelState
from .plans import State
from .preflight import MARGIN, available_memory, reserved_memory

_log = logging.getLogger(__name__)


def begin_mirror(kernel: KernelState) -> bool:
    """Begin to copy a running kernel's device memory to host memory in the background; return whether that was begun.

    Not if host memory is too small for all of it; then a copy that is not allowed any more is given up.  Raises as
    `FastPath.begin_mirror`.
    """
    if kernel.require_capsule().host_pid not in cuda_processes.candidates(kernel):
        return False  # a kernel without CUDA is not disturbed
    fast_path, amounts = kernel.fast_path(), cuda_processes.amounts(kernel)
    if not amounts.allocations:
        return False
    if _headroom(kernel) + amounts.kept < amounts.bytes:
        if amounts.kept and kernel.settings.host_copy_bytes is None:
            fast_path.give_up_copy()
        return False
    return bool(fast_path.begin_mirror().mirrors)


def _headroom(kernel: KernelState) -> int:
    """Return the bytes of host memory that another copy of the kernel's device memory may have.

    By default what remains if everything else on the GPUs were suspended, and a part of all memory stayed free.  Copies
    of this server's other kernels are of what is on the GPUs, and need no memory for it any more.
    """
    if kernel.settings.host_copy_bytes is not None:
        return available_memory() - MARGIN
    gpus, own = kernel.engine.gpus, cuda_processes.candidates(kernel)
    others = sum(gpu.used for gpu in gpus.list()) - sum(gpus.used_by(*own).values())
    copied = sum(peer.fast_path().kept_bytes() for peer in _running_peers(kernel))
    return available_memory() - max(reserved_memory(), MARGIN) - max(0, others - copied)


def release_copies(kernel: KernelState, bytes: int) -> None:
    """Have this server's other kernels give up copies until so many bytes of host memory are available.  Never raises.

    Those of other servers are given up when memory is short for all (`memory_pressure.c`).
    """
    for peer in _running_peers(kernel) if available_memory() < bytes else ():
        if (kept := peer.fast_path().kept_bytes()) and available_memory() < bytes:
            try:
                peer.fast_path().give_up_copy()
            except GpuCkptError as error:
                _log.info("Kernel %s does not give up a copy: %s", peer.home.kernel_id, error)
            else:
                _log.info("Kernel %s has given up a copy of %d bytes for another", peer.home.kernel_id, kept)


def _running_peers(kernel: KernelState) -> list[KernelState]:
    """Return the other kernels of this server that run, and that nothing is being done with."""
    found = []
    for peer in list(kernel.engine.kernels.values()):
        with contextlib.suppress(GpuCkptError):
            runs = peer.machine.state is State.RUNNING and peer.attempt is None
            if peer is not kernel and runs and peer.require_capsule().host_pid:
                found.append(peer)
    return found
