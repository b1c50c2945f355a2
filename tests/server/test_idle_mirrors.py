"""Kernels that are idle have their device memory mirrored, once until they are used again."""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace

import pytest

from jupyter_gpu_ckpt.errors import CudaError
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.server import idle_saves
from jupyter_gpu_ckpt.server.idle_saves import INTERVAL, IdleSaves


class Kernel:
    """A provisioner, as far as `IdleSaves` uses it."""

    def __init__(self, *, fails: Exception | None = None, **traits) -> None:
        self.mirror_when_idle, self.host_copy_bytes, self.save_when_idle = True, 1 << 30, 0.0
        self.state, self.log, self.fails, self.mirrors = State.RUNNING, logging.getLogger("test"), fails, 0
        self.gate = SimpleNamespace(under_way=SimpleNamespace(cells=()), last_activity=time.monotonic() - 2 * INTERVAL)
        for name, value in traits.items():
            setattr(self, name, value)

    async def mirror(self) -> bool:
        self.mirrors += 1
        if self.fails is not None:
            raise self.fails
        return True


@pytest.fixture
def kernels():
    return {
        "broken": Kernel(fails=RuntimeError("not foreseen")),
        "idle": Kernel(host_copy_bytes=None),
        "refused": Kernel(fails=CudaError("It is busy.")),
        "unwanted": Kernel(mirror_when_idle=False),
        "without memory": Kernel(host_copy_bytes=0),
        "suspended": Kernel(state=State.SUSPENDED),
        "without a gate": Kernel(gate=None),
    }


def rounds(kernels: dict[str, Kernel], saves: IdleSaves) -> dict[str, int]:
    for _ in range(2):
        asyncio.run(saves.mirror_round())
    return {name: kernel.mirrors for name, kernel in kernels.items() if kernel.mirrors}


def test_each_is_mirrored_once_until_it_is_used(kernels, monkeypatch):
    saves = IdleSaves(lambda: kernels)
    assert rounds(kernels, saves) == {"broken": 1, "idle": 1, "refused": 1}
    kernels["idle"].gate.last_activity += 0.001
    kernels["refused"].gate.under_way.cells = ("a cell",)
    kernels["refused"].gate.last_activity += 0.001
    assert rounds(kernels, saves) == {"broken": 1, "idle": 2, "refused": 1}
    kernels["refused"].gate.under_way.cells = ()
    kernels["idle"].gate.last_activity = time.monotonic() + 1000
    assert rounds(kernels, saves) == {"broken": 1, "idle": 2, "refused": 2}
    monkeypatch.setattr(idle_saves, "INTERVAL", -2000)
    assert rounds(kernels, saves) == {"broken": 1, "idle": 3, "refused": 2}
