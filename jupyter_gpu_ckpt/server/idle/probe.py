"""How the idle policy learns what its kernels are doing: from their gates, from /proc (`activity`) and from NVML.

Not from HTTP traffic: an open browser tab polls for ever, and a script that trains has no browser.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...cuda.driver import CudaState
from ...cuda.gpus import Gpus
from ...errors import CudaError, GpuCkptError
from ...gate.gate import Gate
from ...kernel.provisioner import GpuCkptProvisioner
from ...lifecycle.driver import Lifecycle
from ...lifecycle.machine import State
from .activity import Activity
from .policy import Look

#: Seconds of samples to ask NVML for at first.
_FIRST = 1.0


class Senses:
    """Looks at kernels.  Blocks (every call to the outside has a deadline), so it is not for an event loop."""

    def __init__(self, log: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self._log = log
        self._sampled = time.time() - _FIRST
        self._activity = Activity()
        self._states: dict[str, State] = {}

    def look(self, provisioners: Mapping[str, GpuCkptProvisioner]) -> list[Look]:
        """One look at each kernel that can be checkpointed.

        A kernel that cannot be looked at (it ends just now, its driver does not answer) counts as working: it is left
        alone.
        """
        looks: list[Look] = []
        holders: dict[str, list[int]] = {}
        gpus: Gpus | None = None
        for kernel_id, provisioner in provisioners.items():
            lifecycle, gate = provisioner.lifecycle, provisioner.gate
            if lifecycle is None or gate is None:
                continue
            until = provisioner.agent_requests.protection()
            look = Look(
                kernel_id,
                lifecycle.home.kernel_name,
                lifecycle.state,
                gate.last_activity,
                protected=max(0.0, until - time.time()) if until else 0.0,
            )
            try:
                look, pids = closer(look, lifecycle, gate)
            except GpuCkptError as error:
                self._log.debug("Kernel %s cannot be looked at: %s", kernel_id, error.code)
                look, pids = replace(look, working=True), []
            else:
                look = replace(look, computing=self._worked(look, lifecycle, gate))
            looks.append(look)
            if look.on_gpu:
                holders[kernel_id], gpus = pids, lifecycle.engine.gpus
        self._activity.keep(look.kernel_id for look in looks)
        self._states = {look.kernel_id: look.state for look in looks}
        computing = self._computing(gpus, holders) if gpus else set()
        return [replace(look, computing=look.computing or look.kernel_id in computing) for look in looks]

    def forget(self, kernel_id: str) -> None:
        """A verb was done to a kernel, or was tried: what that cost is none of its own work."""
        self._activity.forget(kernel_id)

    def _worked(self, look: Look, lifecycle: Lifecycle, gate: Gate) -> bool:
        """Whether its processes worked since the last look, cell or not."""
        capsule, home = lifecycle.capsule, lifecycle.home
        if look.state is not self._states.get(look.kernel_id):
            self.forget(look.kernel_id)
        if capsule is None or look.state not in (State.RUNNING, State.SUSPENDED):
            return False
        own = [directory for directory in (home.runtime_dir, home.known_as) if directory is not None]
        pids = {capsule.host_pid, *capsule.companions()}
        return self._activity.worked(look.kernel_id, pids, now=time.monotonic(), questions=gate.queries, own=own)

    def _computing(self, gpus: Gpus, holders: Mapping[str, list[int]]) -> set[str]:
        """Which of the kernels with device memory (by id, with their processes) used a GPU since the last time."""
        since, self._sampled = self._sampled, time.time()
        try:
            return computing(gpus, holders, since)
        except CudaError as error:
            self._log.debug("NVML does not tell who computes: %s", error.code)
            return set(holders)


def closer(look: Look, lifecycle: Lifecycle, gate: Gate) -> tuple[Look, list[int]]:
    """What only its processes and its gate can tell of a kernel that has a process; and these processes."""
    capsule = lifecycle.capsule
    if capsule is None or look.state not in (State.RUNNING, State.SUSPENDED):
        return look, []  # between states it is nobody's business, and the driver would keep us waiting
    pids = capsule.processes()
    if look.state is State.SUSPENDED:
        return replace(look, process=capsule.host_pid, resident=lifecycle.resident()), pids
    # Whoever has a CUDA context holds device memory (0.6 GiB with torch), also where NVML counts none for it.
    on_gpu = lifecycle.engine.cuda.state(capsule.host_pid) is CudaState.RUNNING
    return replace(look, process=capsule.host_pid, working=gate.working, on_gpu=on_gpu), pids


def computing(gpus: Gpus, holders: Mapping[str, list[int]], since: float) -> set[str]:
    """Which of ``holders`` (process ids by kernel id) computed on a GPU after ``since`` (seconds of `time.time`).

    Where NVML does not say who computes, or does not know a kernel's processes (it counts in the host's process ids,
    which in a container may be others), all work on the GPUs in question counts for every kernel that may have done it:
    a kernel that stays too long costs memory, one that is stopped in the middle of its work costs more.

    Raises `CudaError` if NVML refuses.
    """
    busy: set[int] = set()
    known: set[int] = set()
    somebody = False
    for gpu in gpus.list():
        here = set(gpus.processes(gpu.uuid))
        known |= here
        shares = gpus.process_utilisation(gpu.uuid, since)
        if shares is not None:
            busy |= {pid for pid, percent in shares.items() if percent > 0}
        if gpus.utilisation(gpu.uuid) > 0:
            somebody = True
            if shares is None:
                busy |= here
    return {
        kernel_id
        for kernel_id, pids in holders.items()
        if not busy.isdisjoint(pids) or (somebody and known.isdisjoint(pids))
    }
