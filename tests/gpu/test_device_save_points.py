"""Save points of a kernel with device memory: it goes back to the very bytes, from the GPU and from off it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from jupyter_gpu_ckpt.files import direct_io

pytestmark = pytest.mark.gpu

SETUP = """
import hashlib, torch
torch.manual_seed(1)
model = torch.nn.Linear(1024, 1024, device="cuda")
optimiser = torch.optim.Adam(model.parameters())
x, steps = torch.randn(256, 1024, device="cuda"), 0
def train(count):
    global steps
    for _ in range(count):
        optimiser.zero_grad(); model(x).square().mean().backward(); optimiser.step()
        steps += 1
def digest():
    tensors = [*model.parameters(), *(each for state in optimiser.state.values() for each in state.values())]
    return hashlib.sha256(b"".join(each.detach().cpu().numpy().tobytes() for each in tensors)).hexdigest()[:16]
"""
STATE = "print(steps, digest(), torch.cuda.memory_allocated())"


async def test_a_training_goes_back_and_forth_between_its_save_points(kernel):
    """The third point is made and left while the kernel is off the GPU."""
    await kernel.run(SETUP)
    states = {}
    for name in ("one", "two", "off the GPU"):
        await kernel.run("train(5)")
        states[name] = await kernel.run(STATE)
        if name == "off the GPU":
            await kernel.provisioner.suspend()
        await kernel.provisioner.save(name)
    assert len(set(states.values())) == 3
    for name in ("one", "off the GPU", "two", "one"):
        await kernel.run("train(1)")
        await kernel.provisioner.back(name)
        assert await kernel.run(STATE) == states[name], name
    await kernel.run("train(5)")
    assert await kernel.run(STATE) == states["two"], "the same steps from the same point lead elsewhere"
    await kernel.run("train(5)")
    assert await kernel.run(STATE) == states["off the GPU"]


async def test_a_kernel_that_was_killed_and_started_again_goes_back_to_its_last_save_point(kernel):
    await kernel.run(SETUP)
    await kernel.run("train(5)")
    state = await kernel.run(STATE)
    await kernel.provisioner.save("last")
    kernel.client.execute("import os, signal; train(1); os.kill(os.getpid(), signal.SIGKILL)")
    await asyncio.to_thread(kernel.lifecycle.capsule.wait, 60)
    await kernel.manager.restart_kernel(now=True, stdout=None, stderr=None)  # their files are closed
    await kernel.provisioner.back("last")
    assert await kernel.run(STATE) == state


async def test_a_cell_changes_tensors_before_they_are_on_the_disk_and_the_save_point_has_what_was_there(
    kernel, monkeypatch
):
    """The disk gets nothing before the cell has run."""
    await kernel.run(SETUP)
    await kernel.run("train(5); big = torch.randn(1 << 28, device='cuda')")
    state, total = await kernel.run(STATE), await kernel.run("print(big.double().sum().item())")
    begun, changed, write = threading.Event(), threading.Event(), direct_io.write

    def wait(*arguments, **options) -> None:
        begun.set()
        assert changed.wait(60)
        write(*arguments, **options)

    monkeypatch.setattr(direct_io, "write", wait)
    saved = asyncio.ensure_future(kernel.provisioner.save("one"))
    await asyncio.to_thread(begun.wait, 60)
    await kernel.run("train(5); big.zero_(); more = torch.ones(1 << 26, device='cuda'); torch.cuda.synchronize()")
    changed.set()
    kernel.lifecycle.engine.store.check(await saved)
    assert await kernel.run("print(big.double().sum().item())") == "0.0"
    await kernel.provisioner.back("one")
    assert await kernel.run(STATE) == state
    assert await kernel.run("print(big.double().sum().item(), 'more' in dir())") == f"{total} False"
