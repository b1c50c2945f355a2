"""Automatic save points and mirrors of idle kernels: each once in a while without use.

A save point is made after some minutes; a mirror is a copy of device memory in host memory (`mirror_when_idle`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from ..errors import GpuCkptError
from ..kernel import automatic_saves
from ..kernel.provisioner import GpuCkptProvisioner
from ..lifecycle.plans import State
from .periodic_task import PeriodicTask

#: Seconds between two rounds.
INTERVAL = 15.0


class IdleSaves:
    """The save points and the mirrors of idle kernels.  Belongs to one event loop."""

    def __init__(self, kernels: Callable[[], Mapping[str, GpuCkptProvisioner]]) -> None:
        self._kernels = kernels
        #: The last use of each kernel that was saved since, or could not be.
        self._saved: dict[str, float] = {}
        #: The same of those whose device memory is mirrored, or could not be.
        self._mirrored: dict[str, float] = {}
        self._rounds = PeriodicTask("gpu-ckpt-idle-saves", self._run)

    def start(self) -> None:
        """Called from the extension, on its event loop."""
        self._rounds.start()

    async def stop(self) -> None:
        """Stop.  A save under way continues on its kernel's thread."""
        await self._rounds.stop()

    async def _run(self) -> None:
        while True:
            await self.round()
            await self.mirror_round()
            await asyncio.sleep(INTERVAL)

    async def mirror_round(self) -> None:
        """Begin to mirror the kernels that have been idle for an interval."""
        kernels = dict(self._kernels())
        self._mirrored = {id: used for id, used in self._mirrored.items() if id in kernels}
        for kernel_id, provisioner in kernels.items():
            gate = provisioner.gate
            if not provisioner.mirror_when_idle or provisioner.host_copy_bytes == 0 or gate is None:
                continue
            used = gate.last_activity
            is_idle = provisioner.state is State.RUNNING and not gate.under_way.cells
            if not is_idle or time.monotonic() - used < INTERVAL or self._mirrored.get(kernel_id) == used:
                continue
            self._mirrored[kernel_id] = used
            try:
                await provisioner.mirror()
            except GpuCkptError as error:
                provisioner.log.info("Kernel %s is not mirrored while it is idle: %s", kernel_id, error.code)
            except Exception:  # of one kernel; the others are mirrored all the same
                provisioner.log.exception("Kernel %s is not mirrored while it is idle", kernel_id)

    async def round(self) -> None:
        """Save the kernels that are due, one after the other."""
        kernels = dict(self._kernels())
        self._saved = {id: used for id, used in self._saved.items() if id in kernels}
        for kernel_id, provisioner in kernels.items():
            try:
                await self._save_if_due(kernel_id, provisioner)
            except GpuCkptError as error:  # until it is used again: it would be refused once more
                provisioner.log.info("Kernel %s has no save point while it is idle: %s", kernel_id, error.code)
            except Exception:  # of one kernel; the others are saved all the same
                provisioner.log.exception("Kernel %s has no save point while it is idle", kernel_id)

    async def _save_if_due(self, kernel_id: str, provisioner: GpuCkptProvisioner) -> None:
        gate, after = provisioner.gate, 60 * provisioner.save_when_idle
        if not after or gate is None or provisioner.state is not State.RUNNING or gate.under_way.cells:
            return
        used = gate.last_activity
        if time.monotonic() - used < after or self._saved.get(kernel_id) == used:
            return
        self._saved[kernel_id] = used
        await provisioner.save_automatically(automatic_saves.IDLE)
