"""Notebooks that share a real GPU on which only one of them fits, beside a process that does not take part."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest
from harness import notebook, until

from jupyter_gpu_ckpt.kernel import engine
from jupyter_gpu_ckpt.sharing.policy import Rules

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

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


#: Several allocations, of which each can leave by itself.
SEVERAL = """
import torch
x = [torch.full((1 << 24,), {seed} + n, dtype=torch.int64, device="cuda") for n in range({count})]  # of 128 MiB
torch.cuda.synchronize()
def intact():
    return all(bool((each == {seed} + n).all()) for n, each in enumerate(x))
"""


@pytest.mark.alone
async def test_two_kernels_change_places_with_little_free_memory(tmp_path, runtime_base, subject, gpus, record):
    """Again and again; the one that comes begins before the other one has left."""
    async with shared(tmp_path, runtime_base, 2) as kernels:
        for seed, kernel in enumerate(kernels):
            await kernel.run("del x; torch.cuda.empty_cache()", timeout=120)
            await kernel.run(SEVERAL.format(seed=100 * seed, count=96), timeout=120)
            await asyncio.to_thread(kernel.lifecycle.yield_gpu)
        subject().run(HOG.format(bytes=gpus.list()[0].free - 15 * GIB, index=0), 120)
        overlaps = []
        assert await kernels[0].run("print(intact())", timeout=120) == "True"
        for turn in range(10):
            leaving, coming = kernels[turn % 2], kernels[1 - turn % 2]
            for kernel in kernels:
                kernel.steps.events.clear()
            assert await coming.run("print(intact())", timeout=120) == "True"
            await until(lambda: leaving.state == "off_gpu")  # noqa: B023
            (away,) = (event for event in leaving.steps.completed() if event.step == "cuda_suspend")
            (back,) = (event for event in coming.steps.completed() if event.step == "cuda_resume")
            overlaps.append(round(away.at - (back.at - (back.seconds or 0.0)), 3))
        record(overlaps_s=overlaps)
        assert max(overlaps) > 0


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


@pytest.mark.alone
@pytest.mark.two_gpus
async def test_three_kernels_each_get_a_gpu_that_is_free(tmp_path, runtime_base, subject, gpus, record):
    """Of two GPUs, on each of which only one of them fits: two compute at the same time, the third has its turn."""
    first, second, *_ = gpus.list()
    async with shared(tmp_path, runtime_base, 3) as kernels:
        for index, gpu in enumerate((first, second)):
            subject().run(HOG.format(bytes=gpu.free - LEFT - GIB, index=index), 120)

        def where(kernel) -> set[str]:
            return set(gpus.used_by(kernel.lifecycle.capsule.host_pid))

        one, two, three = kernels
        long = [asyncio.create_task(kernel.run("compute(12.0)", timeout=200)) for kernel in (one, two)]
        await until(lambda: one.state == two.state == "running")
        places = [where(one), where(two)]
        assert sorted(map(sorted, places)) == sorted([[first.uuid], [second.uuid]])
        began = time.monotonic()
        await three.run("compute(0.5)", timeout=120)
        record(third_s=round(time.monotonic() - began, 2), its=sorted(where(three)))
        assert not all(task.done() for task in long), "the third one has waited for the end of a cell"
        await asyncio.gather(*long)
        for kernel in kernels:
            assert await kernel.run("print(intact())", timeout=120) == "True"
        record(swaps=[len(kernel.provisioner.sharing.participant.swaps) for kernel in kernels], places=places)


#: All of the memory that is left but what no context fits into.
FILL = """
import torch
torch.zeros(1, device="cuda")
x = torch.full(((torch.cuda.mem_get_info()[0] - ({left})) // 8,), 7, dtype=torch.int64, device="cuda")
torch.cuda.synchronize()
"""
#: Allocations by all ways that PyTorch has.
ALLOCATE = """
import os
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = {allocator!r}
import torch
y = torch.full(({bytes},), 3, dtype=torch.uint8, device="cuda")
print(int(y[-1]))
"""


@pytest.mark.alone
@pytest.mark.parametrize("allocator", ["", "expandable_segments:True", "backend:cudaMallocAsync"])
async def test_the_first_context_and_each_kind_of_allocation_wait_on_a_full_gpu(
    tmp_path, runtime_base, subject, gpus, allocator, record
):
    """Another process leaves little of the GPU, so that host memory is enough for both kernels."""
    subject().run(HOG.format(bytes=gpus.list()[0].free - LEFT - 3 * GIB, index=0), 120)
    async with contextlib.AsyncExitStack() as stack:
        kernels = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            traits = {"gpu_sharing": "room", "image_dir": str(tmp_path / "images")}
            kernels.append(await stack.enter_async_context(notebook(tmp_path / name, runtime_base / name, **traits)))
        one, two = kernels
        await one.run(FILL.format(left=64 << 20), timeout=60)
        free = gpus.list()[0].free
        began = time.monotonic()
        code = ALLOCATE.format(allocator=allocator, bytes=TENSOR)
        assert await two.run(code, timeout=60) == "3"
        record(free_mib=free >> 20, seconds=round(time.monotonic() - began, 2))
        assert one.state in ("off_gpu", "suspended")
        assert await one.run("print(int(x.min()), int(x.max()))", timeout=60) == "7 7"
