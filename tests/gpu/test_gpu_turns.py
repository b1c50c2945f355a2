"""Notebooks that share a real GPU on which only one of them fits, beside a process that does not take part."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest
from harness import notebook

from jupyter_gpu_ckpt.kernel import engine
from jupyter_gpu_ckpt.sharing.policy import Rules

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(590)]

GIB = 1 << 30
#: Bytes of each kernel's tensor, and of the memory that is left for kernels: a context takes less than the difference.
TENSOR, LEFT = 3 * GIB, 5 * GIB
#: Turns scaled as the sizes are: a swap of so few bytes takes some tenths of a second.
RULES = Rules(first_turn=3.0, turn=6.0, cut=1.0)
SETUP = """
import time, torch
x, steps = torch.arange({bytes} // 8, device="cuda"), 0
torch.cuda.synchronize()
def compute(seconds):
    global steps
    used = 0
    while used < seconds:
        began = time.monotonic()
        x.add_(1)
        torch.cuda.synchronize()
        steps += 1
        took = time.monotonic() - began
        used += took if took < 0.3 else 0.0  # not the time in which the GPU was another's
def intact():
    part = 1 << 24
    return all(
        bool((x[at:at + part] == torch.arange(at, min(at + part, len(x)), device="cuda") + steps).all())
        for at in range(0, len(x), part)
    )
"""
HOG = "held = torch.empty({bytes}, dtype=torch.uint8, device='cuda:{index}').fill_(7); result = len(held)"


@contextlib.asynccontextmanager
async def shared(tmp_path, runtime_base, count: int):
    """Kernels with a tensor each, all off the GPU."""
    async with contextlib.AsyncExitStack() as stack:
        kernels = []
        for number in range(count):
            directory = tmp_path / str(number)
            directory.mkdir()
            traits = {"gpu_sharing": "turns", "image_dir": str(tmp_path / "images")}
            kernel = await stack.enter_async_context(notebook(directory, runtime_base / str(number), **traits))
            engine.shared_exchange(kernel.lifecycle.engine.gpus).rules = RULES
            await kernel.run(SETUP.format(bytes=TENSOR), timeout=120)
            await asyncio.to_thread(kernel.lifecycle.yield_gpu)
            kernels.append(kernel)
        yield kernels


@pytest.mark.alone
async def test_four_kernels_and_a_process_that_does_not_take_part(tmp_path, runtime_base, subject, gpus, record):
    chance = random.Random(1)
    async with shared(tmp_path, runtime_base, 4) as kernels:
        hog = subject()
        hog.run(HOG.format(bytes=gpus.list()[0].free - LEFT - GIB, index=0), 120)
        waits: list[float] = []

        async def run(kernel, cells: list[float]) -> None:
            for seconds in cells:
                await asyncio.sleep(chance.expovariate(1 / 2))
                began = time.monotonic()
                await kernel.run(f"compute({seconds})", timeout=300)
                waits.append(time.monotonic() - began - seconds)
            assert await kernel.run("print(intact())", timeout=300) == "True"

        cells = [[chance.expovariate(1 / 2) for _ in range(6)] for _ in range(3)] + [[25.0]]
        await asyncio.gather(*(run(kernel, each) for kernel, each in zip(kernels, cells, strict=True)))
        swaps = [swap.seconds for kernel in kernels for swap in kernel.provisioner.sharing.participant.swaps]
        record(waits=sorted(round(each, 2) for each in waits), swaps=len(swaps), swap_seconds=round(sum(swaps), 2))
        assert swaps
        began = time.monotonic()
        away = next(kernel for kernel in kernels if kernel.state == "off_gpu")
        assert await away.run("print(6 * 7)") == "42"
        record(without_cuda_s=round(time.monotonic() - began, 3))
        assert away.state == "off_gpu"


@pytest.mark.alone
@pytest.mark.two_gpus
async def test_a_kernel_comes_back_on_another_gpu_that_is_free(tmp_path, runtime_base, subject, gpus):
    async with shared(tmp_path, runtime_base, 1) as (kernel,):
        subject().run(HOG.format(bytes=gpus.list()[0].free - 2 * GIB, index=0), 120)
        assert await kernel.run("compute(0.1); print(intact())", timeout=120) == "True"
        first, second, *_ = gpus.list()
        assert set(kernel.lifecycle.engine.gpus.used_by(kernel.lifecycle.capsule.host_pid)) == {second.uuid}
        await asyncio.to_thread(kernel.lifecycle.yield_gpu)
        assert await kernel.run("compute(0.1); print(intact())", timeout=120) == "True"
        assert first.uuid != second.uuid
