"""Branches, and going back, on another GPU than that of the save point: real kernels, with the double of the driver."""

from __future__ import annotations

import os

import pytest
from harness import Notebook, branch_of

from jupyter_gpu_ckpt.errors import BadRequest, GpuFull
from jupyter_gpu_ckpt.image import save_point
from jupyter_gpu_ckpt.kernel import engine
from jupyter_gpu_ckpt.testing.fake_host import FakeHost, allocation_cell, install

pytestmark = pytest.mark.asyncio(loop_scope="function")

A = "GPU-00000000-0000-0000-0000-00000000000a"
B = "GPU-00000000-0000-0000-0000-00000000000b"
MIB = 1 << 20


@pytest.fixture
def gpus(tmp_path, monkeypatch, criu_binary) -> FakeHost:
    """Two GPUs of one model, with 100 MiB each."""
    monkeypatch.setattr(engine, "_engines", {})
    return install({A: 100 * MIB, B: 100 * MIB}, tmp_path / "images")


@pytest.fixture
async def point(gpus, kernel):
    """A save point of the kernel, which has 60 MiB on the first GPU then and now."""
    await kernel.run(allocation_cell({A: 60 * MIB}))
    await kernel.run("x = 1")
    return await kernel.provisioner.save("one")


def free(gpus: FakeHost) -> list[int]:
    return [gpus.free(uuid) // MIB for uuid in (A, B)]


async def works(kernel: Notebook) -> bool:
    return await kernel.run("print(x)") == "1" and kernel.state == "running"


async def test_a_branch_goes_to_the_gpu_that_is_chosen_while_the_other_kernel_stays_on_its_own(
    gpus, kernel, point, tmp_path
):
    assert free(gpus) == [40, 100]
    async with branch_of(point.id, kernel, tmp_path / "branch", gpu_map={A: B}) as branch:
        assert await works(branch)
        assert free(gpus) == [40, 40]
        assert await works(kernel)
    assert free(gpus) == [40, 100]


async def test_without_a_choice_a_full_gpu_refuses_a_branch_and_the_hint_names_another(gpus, kernel, point, tmp_path):
    with pytest.raises(GpuFull) as caught:
        async with branch_of(point.id, kernel, tmp_path / "branch"):
            pass
    assert f'{{"gpu_map": {{"{A}": "{B}"}}}}' in caught.value.hint
    assert "or use GPU 1, which has 100.0 MiB free" in caught.value.hint
    assert caught.value.left == f"the image is kept as {point.id}"
    gpus.start({B: 50 * MIB}, pid=os.getpid())
    with pytest.raises(GpuFull) as caught:
        async with branch_of(point.id, kernel, tmp_path / "another"):
            pass
    assert "gpu_map" not in caught.value.hint, "the other one is full, too"
    assert await works(kernel)


async def test_a_choice_of_gpus_that_are_not_there_is_refused(gpus, kernel, point, tmp_path):
    with pytest.raises(BadRequest, match="The GPU mapping cannot be used"):
        async with branch_of(point.id, kernel, tmp_path / "branch", gpu_map={A: "GPU-none"}):
            pass
    with pytest.raises(BadRequest, match="The GPU mapping cannot be used"):
        await kernel.provisioner.back("one", gpu_map={A: "GPU-none"})
    assert kernel.lifecycle.engine.store.images() == [point], "the present state was not saved for that"
    assert await works(kernel)


@pytest.mark.parametrize("asleep", [False, True])
async def test_a_kernel_goes_back_on_the_gpu_that_is_chosen_and_that_is_undone(gpus, kernel, point, asleep):
    await kernel.run("x = 2")
    if asleep:
        await kernel.provisioner.checkpoint()
    before = await kernel.provisioner.back("one", gpu_map={A: B})
    assert free(gpus) == [100, 40]
    assert await works(kernel)
    now = save_point.of_image(before)
    assert now is not None
    await kernel.provisioner.back(now.name)
    assert await kernel.run("print(x)") == "2"
