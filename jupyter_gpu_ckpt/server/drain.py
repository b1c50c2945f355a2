"""A server is parked: each of its kernels sleeps in an image that was proved, so that the server can be stopped.

Asked for by REST (``park``: the hub's culler and spawner), and in its first half, `leaving`, by the server's own stop,
which whoever stops it otherwise (an age limit, a signal, an administrator) comes to as well.
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
from ..lifecycle.machine import State
from ..lifecycle.rates import RATES

#: Kernels that leave at the same time.  They share a disk and the host's processors: more of them are no faster.
PARALLEL = 4

#: Beyond what the bytes need, in seconds: namespaces, agents, the manifest.
GRACE = 10.0


#: Bytes per second at which a slow disk has an image proved.
PROVED = 100e6


@dataclass(frozen=True)
class Parked:
    """What became of one kernel: the proved image that holds it, of so many bytes, or why there is none."""

    kernel_id: str
    image: str | None = None
    bytes: int = 0
    code: str | None = None
    hint: str = ""

    @classmethod
    def failed(cls, kernel_id: str, error: GpuCkptError) -> Parked:
        """It was not parked; what the error says was left behind is still there."""
        return cls(kernel_id, code=error.code, hint=error.hint)


@dataclass(frozen=True)
class DrainWork:
    """What parking has to do: kernels that are awake, bytes to write, seconds that this takes at most."""

    kernels: int
    bytes: int
    seconds: float


async def leaving(
    kernels: Mapping[str, GpuCkptProvisioner], leave: Callable[[str, GpuCkptProvisioner], Awaitable[Any]]
) -> dict[str, asyncio.Task[Any]]:
    """Begin ``leave`` for each kernel, `PARALLEL` of them at a time; returns the tasks by kernel id."""
    turn = asyncio.Semaphore(PARALLEL)

    async def one(kernel_id: str, provisioner: GpuCkptProvisioner) -> Any:
        async with turn:
            return await leave(kernel_id, provisioner)

    return {id: asyncio.create_task(one(id, kernel), name=f"gpu-ckpt leaving {id}") for id, kernel in kernels.items()}


async def park(
    kernel_ids: list[str], kernels: Mapping[str, GpuCkptProvisioner], store: Store, log: Logger
) -> list[Parked]:
    """Checkpoint every kernel, and prove its image.  ``kernels``: those of ``kernel_ids`` that have our provisioner.

    After failure of some the others are parked all the same: they sleep, and the next cell wakes them.
    """
    dead = {id for id, one in kernels.items() if one.state is State.DEAD}  # nothing of them can be lost any more
    kernel_ids = [id for id in kernel_ids if id not in dead]
    ours = {id: one for id, one in kernels.items() if one.lifecycle is not None and id not in dead}
    tasks = await leaving(ours, lambda id, one: _park_one(id, one, store))
    answers = [await tasks[id] if id in tasks else _plain(id) for id in kernel_ids]
    for answer in answers:
        if answer.code is not None:
            log.warning("Kernel %s could not be parked: %s", answer.kernel_id, answer.code)
    return answers


async def _park_one(kernel_id: str, provisioner: GpuCkptProvisioner, store: Store) -> Parked:
    try:
        image = await provisioner.checkpoint()
        if not image.archived:  # that was proved before it was sent
            await asyncio.to_thread(store.check, image)
        if provisioner.state is not State.CHECKPOINTED:
            raise StateError("The kernel came back meanwhile.", hint="Somebody uses it; try again later.")
    except GpuCkptError as error:
        return Parked.failed(kernel_id, error)
    except Exception as error:
        return Parked.failed(kernel_id, GpuCkptError(f"{type(error).__name__}: {error}"))
    return Parked(kernel_id, image.id, image.manifest.bytes)


def _plain(kernel_id: str) -> Parked:
    error = StateError(
        "This kernel cannot be checkpointed at all.",
        hint="It would end with the server: end it, or find out why by `jupyter gpu-ckpt doctor` and restart it.",
    )
    return Parked.failed(kernel_id, error)


def need(kernels: Mapping[str, GpuCkptProvisioner], log: Logger, *, prove: bool) -> DrainWork:
    """What parking these would need if they left one after the other.  Asks ``/proc`` and the driver.

    ``prove``: the images of those that sleep already are to be proved, too.
    """
    awake, bytes, seconds = 0, 0, 0.0
    for one in kernels.values():
        lifecycle = one.lifecycle
        image = lifecycle.image if prove and lifecycle is not None else None
        if image is not None and not image.archived:
            seconds += image.manifest.bytes / PROVED
        if lifecycle is None or lifecycle.state is State.CHECKPOINTED or lifecycle.capsule is None:
            continue
        resident = device = 0
        try:
            resident = lifecycle.resident()
            device = sum(lifecycle.device_bytes().values())
        except GpuCkptError as error:
            log.warning("Kernel %s: its device memory cannot be told: %s", one.kernel_id, error.code)
        estimate = RATES.estimate(resident, device)
        awake, bytes = awake + 1, bytes + estimate.image_bytes
        seconds += one.drain_timeout + 2 * estimate.saved
    return DrainWork(awake, bytes, GRACE + seconds)


def document(answers: list[Parked]) -> dict[str, Any]:
    """What REST tells of it: ``parked`` is true when the server can be stopped and nothing is lost."""
    return {"parked": all(answer.code is None for answer in answers), "kernels": [asdict(one) for one in answers]}
