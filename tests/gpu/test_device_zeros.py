"""Parts of device memory that hold only zeros, on a real GPU: the kernel's answers, and that nothing is copied."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import zero_scan
from harness import notebook
from test_fastpath import path_of

from jupyter_gpu_ckpt.cuda import fastpath

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

GIB = 1 << 30
#: Zeros, zeros with one other byte at an edge, and other bytes.
MIXED = """
import hashlib, json, torch
torch.manual_seed(0)
zeros = torch.zeros(1 << 31, dtype=torch.uint8, device='cuda')
edges = [torch.zeros(64 << 20, dtype=torch.uint8, device='cuda') for _ in range(4)]
for each, at in zip(edges, (0, -1, 1 << 22, (1 << 22) - 1)): each[at] = 1
full = torch.randint(-1 << 62, 1 << 62, (1 << 25,), device='cuda')  # 256 MiB
def state():
    sums = [int(zeros.view(torch.int64).count_nonzero()), *(hashlib.sha256(e.cpu().numpy()).hexdigest() for e in edges)]
    return [*sums, hashlib.sha256(full.cpu().numpy()).hexdigest(), zeros.data_ptr()]
"""
STATE = "print(json.dumps(state()))"
#: Other kernels leave their bytes in the memory that is free meanwhile.
FOREIGN = """
import torch
torch.full((int(torch.cuda.mem_get_info()[0] * 0.8),), 0xA5, dtype=torch.uint8, device='cuda')
torch.cuda.synchronize()
"""


def test_the_kernel_answers_as_the_double_does():
    """The same as `tests/cuda/native/test_zero_parts.py` runs on the double."""
    library = fastpath.built()
    assert library is not None
    command = [sys.executable, zero_scan.__file__, str(library), "200"]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.alone
async def test_zeros_take_no_host_memory_and_come_back_as_zeros(tmp_path, runtime_base, record):
    """Although another program has written to the memory that the kernel gets back."""
    pytest.importorskip("torch", reason="PyTorch is not installed on this machine")
    async with notebook(tmp_path, runtime_base, fast_path="auto") as kernel:
        await kernel.run(MIXED, 100)
        before = json.loads(await kernel.run(STATE, 100))
        for _ in range(2):
            await kernel.provisioner.suspend()
            moved, taken = path_of(kernel).amounts().swapped_out, path_of(kernel).host_memory_bytes()
            record(moved=moved, host_memory=taken)
            assert moved >= 5 * GIB // 2
            assert taken <= (256 + 4 * 4 + 64) << 20, "one part of each of the edges, and huge pages"
            subprocess.run([sys.executable, "-c", FOREIGN], check=True, timeout=100)
            assert json.loads(await kernel.run(STATE, 100)) == before
            await kernel.settled("running")
        await kernel.provisioner.checkpoint()
        assert json.loads(await kernel.run(STATE, 100)) == before
