"""Drain a server, at the request of the hub's culler and spawner, so that it can be stopped (see `drain`).

The server's own stop (`persistence`) checkpoints as well, but verifies nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from logging import Logger
from typing import Any

from ..errors import GpuCkptError, StateError
from ..image.store import Store
from ..kernel.provisioner import GpuCkptProvisioner
from ..lifecycle import host_memory
from ..lifecycle.plans import State
from ..lifecycle.rates import RATES

#: Kernels that are checkpointed at the same time.  They share a disk and the host's processors: more are no faster.
PARALLEL = 4

#: Seconds beyond what the bytes need: namespaces, agents, the manifest.
GRACE = 10.0

#: Bytes per second at which a slow disk has an image verified.
VERIFY_RATE = 100e6


@dataclass(frozen=True)
class DrainResult:
    """The verified image of one kernel and its bytes, or the error's ``code`` and ``hint``."""

    kernel_id: str
    image: str | None = None
    bytes: int = 0
    code: str | None = None
    hint: str = ""


@dataclass(frozen=True)
class DrainWork:
    """Kernels that are awake, bytes to write, and the seconds that a drain takes at most."""

    kernels: int
    bytes: int
    seconds: float


def start_limited(
    kernels: Mapping[str, GpuCkptProvisioner], call: Callable[[str, GpuCkptProvisioner], Awaitable[Any]]
) -> dict[str, asyncio.Task[Any]]:
    """Start ``call`` for each kernel, `PARALLEL` of them at a time; return the tasks by kernel id."""
    slots = asyncio.Semaphore(PARALLEL)

    async def run(kernel_id: str, provisioner: GpuCkptProvisioner) -> Any:
        async with slots:
            return await call(kernel_id, provisioner)

    return {id: asyncio.create_task(run(id, kernel), name=f"gpu-ckpt drain {id}") for id, kernel in kernels.items()}


async def drain(
    kernel_ids: list[str], kernels: Mapping[str, GpuCkptProvisioner], store: Store, log: Logger
) -> dict[str, Any]:
    """Checkpoint every kernel and verify its image; return the reply of REST.

    ``kernels``: those of ``kernel_ids`` that have our provisioner.  ``drained`` is true when the server can be stopped
    without loss.  After failure of some the others sleep all the same; the next cell wakes them.
    """
    dead = {id for id, kernel in kernels.items() if kernel.state is State.DEAD}  # nothing of them can be lost
    ids = [id for id in kernel_ids if id not in dead]
    tasks = start_limited(
        {id: kernel for id, kernel in kernels.items() if kernel.lifecycle is not None and id not in dead},
        lambda id, kernel: _drain_kernel(id, kernel, store),
    )
    hint = "It would end with the server: end it, or find out why by `jupyter gpu-ckpt doctor` and restart it."
    results = [await tasks[id] if id in tasks else DrainResult(id, code=StateError.code, hint=hint) for id in ids]
    for result in results:
        if result.code is not None:
            log.warning("Kernel %s could not be drained: %s", result.kernel_id, result.code)
    return {"drained": all(each.code is None for each in results), "kernels": [asdict(each) for each in results]}


async def _drain_kernel(kernel_id: str, provisioner: GpuCkptProvisioner, store: Store) -> DrainResult:
    try:
        image = await provisioner.checkpoint()
        if not image.archived:  # that was verified before it was archived
            await asyncio.to_thread(store.check, image)
        if provisioner.state is not State.CHECKPOINTED:
            raise StateError("The kernel came back meanwhile.", hint="Its user works with it; try again later.")
    except Exception as failure:
        error = GpuCkptError.from_exception(failure)
        return DrainResult(kernel_id, code=error.code, hint=error.hint)
    return DrainResult(kernel_id, image.id, image.manifest.bytes)


def estimate(kernels: Mapping[str, GpuCkptProvisioner], log: Logger, *, verify: bool) -> DrainWork:
    """Estimate the work of draining these kernels one after the other.  Reads ``/proc`` and queries the driver.

    ``verify``: count the verification of images of kernels that sleep already.
    """
    awake, bytes, seconds = 0, 0, 0.0
    for kernel in kernels.values():
        lifecycle = kernel.lifecycle
        image = lifecycle.image if verify and lifecycle is not None else None
        if image is not None and not image.archived:
            seconds += image.manifest.bytes / VERIFY_RATE
        if lifecycle is None or lifecycle.state is State.CHECKPOINTED or lifecycle.capsule is None:
            continue
        resident = device = 0
        try:
            resident = host_memory.resident(lifecycle.kernel)
            device = sum(host_memory.device_bytes(lifecycle.kernel).values())
        except GpuCkptError as error:
            log.warning("Kernel %s: its device memory cannot be measured: %s", kernel.kernel_id, error.code)
        expected = RATES.estimate(resident, device)
        awake, bytes = awake + 1, bytes + expected.image_bytes
        seconds += kernel.drain_timeout + 2 * expected.saved
    return DrainWork(awake, bytes, GRACE + seconds)
