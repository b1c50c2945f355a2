"""Automatic save points of idle kernels: one once a kernel has been idle for some minutes, until it is used again."""

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
    """The save points of idle kernels.  Belongs to one event loop."""

    def __init__(self, kernels: Callable[[], Mapping[str, GpuCkptProvisioner]]) -> None:
        self._kernels = kernels
        #: The last use of each kernel that was saved since, or could not be.
        self._saved: dict[str, float] = {}
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
            await asyncio.sleep(INTERVAL)

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
