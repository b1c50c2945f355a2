"""Host memory that keeps a copy of device memory, on a real GPU: the kernel's digests, and what is copied again."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import page_digest
import pytest
from harness import notebook, until
from test_fastpath import path_of

from jupyter_gpu_ckpt.cuda import fastpath

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GIB = 1 << 30
FILL = """
import hashlib, json, torch
torch.manual_seed(0)
x = [torch.randint(-1 << 62, 1 << 62, (1 << 24,), device='cuda') for _ in range(32)]  # 4 GiB
def state():
    sums = [hashlib.sha256(t.cpu().numpy()).hexdigest() for t in x]
    return [hashlib.sha256(''.join(sums).encode()).hexdigest(), len(x)]
"""
STATE = "print(json.dumps(state()))"
#: One element, a whole tensor, zeros, memory that is given back and taken again, and nothing.
CHANGES = (
    "x[3][12345] += 1",
    "x[5].random_()",
    "x[7].zero_()",
    "del x[9]; torch.cuda.empty_cache(); x.append(torch.randint(0, 1 << 62, (1 << 24,), device='cuda'))",
    "pass",
)


def test_the_kernel_answers_as_the_double_does():
    """The same as `tests/cuda/native/test_kept.py` runs on the double."""
    library = fastpath.built()
    assert library is not None
    command = [sys.executable, page_digest.__file__, str(library), "50", "7"]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.alone
@pytest.mark.parametrize("allocator", ["native", "expandable_segments:True", "backend:cudaMallocAsync"])
async def test_only_what_has_changed_is_copied(tmp_path, runtime_base, record, monkeypatch, allocator):
    """And every byte comes back, from host memory and from an image."""
    pytest.importorskip("torch", reason="PyTorch is not installed on this machine")
    if allocator != "native":
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    async with notebook(tmp_path, runtime_base, fast_path="auto", host_copy_bytes=64 * GIB) as kernel:
        await kernel.run(FILL, 100)
        for turn, change in enumerate(CHANGES):
            await kernel.run(change, 100)
            before = json.loads(await kernel.run(STATE, 100))
            await kernel.provisioner.suspend()
            record(change=change, seconds=kernel.steps.completed()[-1].seconds)
            if turn % 2:
                await kernel.provisioner.checkpoint()
            assert json.loads(await kernel.run(STATE, 100)) == before
            await kernel.settled("running")
            assert path_of(kernel).amounts().kept >= 3 * GIB
        await kernel.run("del x; torch.cuda.empty_cache()", 100)


#: A cell that writes, launches, frees and allocates, and checks its own results.
CELL = """
for turn in range(20):
    y = torch.full((1 << 24,), turn, device='cuda')
    x[turn % 32] += y
    assert int(y[-1]) == turn
    del y
    if turn % 5 == 0: torch.cuda.empty_cache()
torch.cuda.synchronize()
"""


@pytest.mark.alone
async def test_cells_that_begin_while_the_memory_is_mirrored(tmp_path, runtime_base, record):
    """100 rounds: a mirror begins, a cell ends it, and what a suspend finds is what the cell has left."""
    pytest.importorskip("torch", reason="PyTorch is not installed on this machine")
    async with notebook(tmp_path, runtime_base, fast_path="auto", host_copy_bytes=64 * GIB) as kernel:
        await kernel.run(FILL, 100)
        path = path_of(kernel)
        assert await kernel.provisioner.mirror()
        await until(lambda: not path.amounts().mirrors)
        record(kept=path.amounts().kept)
        assert path.amounts().kept >= 3 * GIB
        await kernel.provisioner.suspend()
        record(seconds=kernel.steps.completed()[-1].seconds)
        assert not await kernel.provisioner.mirror(), "a kernel that is off the GPU has nothing to mirror"
        await kernel.run("pass")
        for turn in range(100):
            await kernel.settled("running")
            assert await kernel.provisioner.mirror()
            await asyncio.sleep(turn / 200)
            await kernel.run(CELL, 100)
            if turn % 10 == 9:
                before = json.loads(await kernel.run(STATE, 100))
                assert await kernel.provisioner.mirror()
                await kernel.provisioner.suspend()
                assert json.loads(await kernel.run(STATE, 100)) == before
                await kernel.settled("running")
