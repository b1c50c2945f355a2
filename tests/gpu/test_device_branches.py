"""Branches of a kernel with device memory: two restores of one image at the same time, and their way apart."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from harness import alive, branch_of

from jupyter_gpu_ckpt.errors import GpuCkptError

pytestmark = pytest.mark.gpu

SETUP = """
import hashlib, torch
torch.manual_seed(1)
x = torch.randn(1 << 24, device="cuda")
static = torch.ones(1 << 16, device="cuda")
graph, warm = torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.cuda.stream(warm): static.mul(2)
torch.cuda.current_stream().wait_stream(warm)
with torch.cuda.graph(graph): result = static * 2 + 1
def digest(): return hashlib.sha256(torch.cat([x, result]).cpu().numpy().tobytes()).hexdigest()
"""
CONTINUE = "x.mul_({}); graph.replay(); torch.cuda.synchronize(); print(x.sum().item(), torch.rand(1).item())"


@pytest.mark.alone
async def test_two_branches_of_one_image_are_restored_at_the_same_time(kernel, tmp_path, record):
    """Each has the very device memory of the point, or says which limit of the driver it met; the kernel continues."""
    await kernel.run(SETUP)
    before = await kernel.run("print(digest())")
    image = await kernel.provisioner.save("point")
    async with contextlib.AsyncExitStack() as stack:
        ways = [branch_of(image.id, kernel, tmp_path / f"branch{number}") for number in range(2)]
        branches = await asyncio.gather(*map(stack.enter_async_context, ways), return_exceptions=True)
        record(restored=[f"{each}" if isinstance(each, BaseException) else "yes" for each in branches])
        assert await kernel.run("print(digest())") == before, "a branch has changed the kernel's memory"
        assert alive(kernel.lifecycle.capsule.processes())
        for each in branches:
            if isinstance(each, GpuCkptError):
                assert each.left == f"the image is kept as {image.id}"
            assert not isinstance(each, BaseException), each
        # All three have their device memory on the GPU now.
        assert [await each.run("print(digest())") for each in branches] == [before, before]
        sums, drawn = zip(
            *[(await each.run(CONTINUE.format(n))).split() for n, each in enumerate(branches, 2)], strict=True
        )
        assert sums[0] != sums[1]
        assert drawn[0] == drawn[1], "torch's generator continues with the same numbers"
        assert await kernel.run("print(digest())") == before
    kernel.lifecycle.engine.store.check(image)


async def test_a_branch_beside_its_kernel_sleeps_and_wakes_with_its_own_device_memory(kernel, tmp_path):
    await kernel.run(SETUP)
    await kernel.provisioner.save("point")
    image = await kernel.provisioner.branch_image("point")
    async with branch_of(image.id, kernel, tmp_path / "branch") as branch:
        await branch.run("x.zero_(); torch.cuda.synchronize()")
        await asyncio.gather(branch.provisioner.checkpoint(), kernel.provisioner.checkpoint())
        assert await branch.run("print(x.abs().sum().item())") == "0.0"
        assert float(await kernel.run("print(x.abs().sum().item())")) > 0
