"""Take snapshots of kernels for the idle policy, from their gates, from /proc (`activity`) and from NVML.

Not from HTTP traffic: an open browser tab polls for ever, and a script that trains has no browser.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...cuda.cuda import CudaState
from ...cuda.gpus import Gpus
from ...errors import CudaError, GpuCkptError
from ...gate.gate import Gate
from ...kernel.provisioner import GpuCkptProvisioner
from ...lifecycle import cuda_processes, host_memory
from ...lifecycle.lifecycle import Lifecycle
from ...lifecycle.plans import State
from .activity import Activity, SocketTables
from .policy import KernelSnapshot

#: Seconds of NVML's samples to request at first.
_FIRST = 1.0


class KernelProbe:
    """Takes snapshots of kernels.  Blocks (every external call has a deadline), so it is not for an event loop."""

    def __init__(self, log: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self._log = log
        self._sampled = time.time() - _FIRST
        self._activity = Activity()
        self._states: dict[str, State] = {}

    def snapshots(self, provisioners: Mapping[str, GpuCkptProvisioner]) -> list[KernelSnapshot]:
        """Take a snapshot of each kernel that can be checkpointed.  One that cannot be inspected (it is just ending,
        its driver does not answer) counts as working, so that the policy leaves it alone.
        """
        found: list[KernelSnapshot] = []
        holders: dict[str, list[int]] = {}
        gpus: Gpus | None = None
        tables = SocketTables()
        for kernel_id, provisioner in provisioners.items():
            lifecycle, gate = provisioner.lifecycle, provisioner.gate
            if lifecycle is None or gate is None:
                continue
            until = provisioner.agent_requests.protection()
            left = max(0.0, until - time.time()) if until else 0.0
            name, state = lifecycle.home.kernel_name, lifecycle.state
            snapshot = KernelSnapshot(kernel_id, name, state, gate.last_activity, protected=left)
            try:
                snapshot, pids = inspect(snapshot, lifecycle, gate)
            except GpuCkptError as error:
                self._log.debug("Kernel %s cannot be inspected: %s", kernel_id, error.code)
                snapshot, pids = replace(snapshot, working=True), []
            else:
                snapshot = replace(snapshot, computing=self._worked(snapshot, lifecycle, gate, tables))
            found.append(snapshot)
            if snapshot.on_gpu:
                holders[kernel_id], gpus = pids, lifecycle.engine.gpus
        self._activity.keep(snapshot.kernel_id for snapshot in found)
        self._states = {snapshot.kernel_id: snapshot.state for snapshot in found}
        on_gpu = self._computing(gpus, holders) if gpus else set()
        return [replace(each, computing=each.computing or each.kernel_id in on_gpu) for each in found]

    def forget(self, kernel_id: str) -> None:
        """Discount the CPU time that a verb has cost the kernel: it is not the kernel's own work."""
        self._activity.forget(kernel_id)

    def _worked(self, snapshot: KernelSnapshot, lifecycle: Lifecycle, gate: Gate, tables: SocketTables) -> bool:
        """Return whether the kernel's processes worked since the last snapshot, with a cell or without."""
        capsule, home = lifecycle.capsule, lifecycle.home
        if snapshot.state is not self._states.get(snapshot.kernel_id):
            self.forget(snapshot.kernel_id)
        if capsule is None or snapshot.state not in (State.RUNNING, State.SUSPENDED, State.OFF_GPU):
            return False
        own = filter(None, (home.runtime_dir, home.known_as, home.sockets and home.sockets.parent))
        pids = {capsule.host_pid, *capsule.other_processes()}
        now, queries = time.monotonic(), gate.queries
        return self._activity.worked(snapshot.kernel_id, pids, now=now, queries=queries, own=own, tables=tables)

    def _computing(self, gpus: Gpus, holders: Mapping[str, list[int]]) -> set[str]:
        """Return which of the kernels with device memory used a GPU since the last call; all if NVML fails."""
        since, self._sampled = self._sampled, time.time()
        try:
            return computing(gpus, holders, since)
        except CudaError as error:
            self._log.debug("NVML does not say which processes compute: %s", error.code)
            return set(holders)


def inspect(snapshot: KernelSnapshot, lifecycle: Lifecycle, gate: Gate) -> tuple[KernelSnapshot, list[int]]:
    """Add the facts from a kernel's processes and gate to its snapshot; return it with the process ids."""
    capsule = lifecycle.capsule
    if capsule is None or snapshot.state not in (State.RUNNING, State.SUSPENDED, State.OFF_GPU):
        return snapshot, []  # during a verb the driver would keep us waiting
    pids = capsule.processes()
    if snapshot.state is State.SUSPENDED:
        return replace(snapshot, process=capsule.host_pid, resident=host_memory.resident(lifecycle.kernel)), pids
    if snapshot.state is State.OFF_GPU:
        resident = host_memory.resident(lifecycle.kernel)
        return replace(snapshot, process=capsule.host_pid, working=gate.working, resident=resident), pids
    # A process with a CUDA context has device memory (0.6 GiB with torch), also where NVML counts none for it.
    on_gpu = CudaState.RUNNING in cuda_processes.states(lifecycle.kernel).values()
    return replace(snapshot, process=capsule.host_pid, working=gate.working, on_gpu=on_gpu), pids


def computing(gpus: Gpus, holders: Mapping[str, list[int]], since: float) -> set[str]:
    """Return which of ``holders`` (process ids by kernel id) computed on a GPU after ``since`` (as `time.time`).

    Where NVML does not say which processes compute, or does not know a kernel's processes (it uses the host's process
    ids, which may differ in a container), all work on these GPUs counts for every kernel that may have done it: to keep
    a kernel too long costs memory, to stop it in the middle of its work costs more.

    Raises `CudaError` if NVML refuses.
    """
    busy, known, any_work = set[int](), set[int](), False
    for gpu in gpus.list():
        here = set(gpus.processes(gpu.uuid))
        known |= here
        shares = gpus.process_utilisation(gpu.uuid, since)
        if shares is not None:
            busy |= {pid for pid, percent in shares.items() if percent > 0}
        if gpus.utilisation(gpu.uuid) > 0:
            any_work = True
            if shares is None:
                busy |= here
    return {
        kernel_id
        for kernel_id, pids in holders.items()
        if not busy.isdisjoint(pids) or (any_work and known.isdisjoint(pids))
    }
