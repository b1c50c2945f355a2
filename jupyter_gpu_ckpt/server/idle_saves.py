"""Automatic save points and mirrors of kernels that their clients do not use.

A save point is made after some minutes, and again each time they have passed while the kernel's processes work, as a
thread that trains does: of one that does nothing another would be the same.  A mirror is a copy of device memory in
host memory (`mirror_when_idle`), made once in a while without use.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..capsule.capsule import Capsule
from ..errors import GpuCkptError
from ..kernel import automatic_saves
from ..kernel.provisioner import GpuCkptProvisioner
from ..lifecycle.plans import State
from .idle import activity
from .periodic_task import PeriodicTask

#: Seconds between two rounds.
INTERVAL = 15.0
#: Seconds of CPU time that a kernel takes which does nothing: at once, per second (ten times that of one with clients,
#: see `activity.SHARE`), and for each request that is no use of it.
_FLOOR, _SHARE, _QUERY = 0.1, 0.001, activity.QUERY


@dataclass(frozen=True)
class _Saved:
    """The last save of a kernel: its last use before, when the save had ended, and the counters of its processes then.

    ``at``: monotonic seconds.  ``pid``: of the kernel, 0 without one.  ``cpu``: seconds of CPU time by process id.
    ``queries``: how many requests that are no use of the kernel it has had.
    """

    used: float
    at: float
    pid: int = 0
    cpu: Mapping[int, float] | None = None
    queries: int = 0

    @classmethod
    def now(cls, used: float, capsule: Capsule | None, queries: int) -> _Saved:
        """Return the counters as they are now.  Reads ``/proc``; raises `GpuCkptError`."""
        if capsule is None:
            return cls(used, time.monotonic())
        pids = {capsule.host_pid, *capsule.other_processes()}
        times = {pid: spent for pid in pids if (spent := activity.cpu_seconds(pid)) is not None}
        return cls(used, time.monotonic(), capsule.host_pid, times, queries)

    def worked(self, then: _Saved) -> bool:
        """Return whether the kernel's processes have used the CPU since ``then``.

        Of a process that has ended the time may be lost to its parent: it has worked.
        """
        before, after = then.cpu or {}, self.cpu or {}
        spent = sum(after.values()) - sum(before.values())
        allowed = _FLOOR + _SHARE * (self.at - then.at) + _QUERY * (self.queries - then.queries)
        return spent > allowed or bool(before.keys() - after.keys())


class IdleSaves:
    """The save points and the mirrors of idle kernels.  Belongs to one event loop."""

    def __init__(self, kernels: Callable[[], Mapping[str, GpuCkptProvisioner]]) -> None:
        self._kernels = kernels
        #: Of each kernel that was saved since its last use, or could not be.
        self._saved: dict[str, _Saved] = {}
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
        self._saved = {id: saved for id, saved in self._saved.items() if id in kernels}
        for kernel_id, provisioner in kernels.items():
            try:
                await self._save_if_due(kernel_id, provisioner)
            except GpuCkptError as error:  # until it is used again, or works: it would be refused once more
                provisioner.log.info("Kernel %s has no save point while it is idle: %s", kernel_id, error.code)
            except Exception:  # of one kernel; the others are saved all the same
                provisioner.log.exception("Kernel %s has no save point while it is idle", kernel_id)

    async def _save_if_due(self, kernel_id: str, provisioner: GpuCkptProvisioner) -> None:
        gate, after = provisioner.gate, 60 * provisioner.save_when_idle
        if not after or gate is None or provisioner.state is not State.RUNNING or gate.under_way.cells:
            return
        used, last = gate.last_activity, self._saved.get(kernel_id)

        def counters() -> _Saved:
            lifecycle = provisioner.lifecycle
            return _Saved.now(used, lifecycle.capsule if lifecycle is not None else None, gate.queries)

        if time.monotonic() - used < after:
            return
        if last is not None and last.used == used:
            if time.monotonic() - last.at < after:
                return
            now = await asyncio.to_thread(counters)
            if now.pid != last.pid:  # it has slept: what it has done since is not known, and will be from now on
                self._saved[kernel_id] = now
            if now.pid != last.pid or not now.worked(last):
                return
        self._saved[kernel_id] = _Saved(used, time.monotonic())
        try:
            await provisioner.save_automatically(automatic_saves.IDLE)
        finally:
            self._saved[kernel_id] = await asyncio.to_thread(
                counters
            )  # what the save has cost is not the kernel's work
