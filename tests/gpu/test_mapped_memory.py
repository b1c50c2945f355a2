"""Memory that frameworks map themselves (PyTorch's expandable segments, JAX), moved by the library on a real GPU."""

from __future__ import annotations

import json

import pytest
from harness import notebook
from test_fastpath import path_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GIB = 1 << 30
#: Segments that grow, lose memory in the middle and grow again, tensors across them, and a captured graph.
EXPANDABLE = """
import hashlib, json, torch
torch.manual_seed(0)
x = [torch.randint(-1 << 62, 1 << 62, (1 << 24,), device='cuda') for _ in range(20)]  # of 128 MiB
del x[3:9]
torch.cuda.empty_cache()
x += [torch.randint(-1 << 62, 1 << 62, ((1 << 23) + 777,), device='cuda') for _ in range(9)]
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    beside = torch.arange(1 << 24, device='cuda')
static, graph = torch.arange(1 << 20, device='cuda'), torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    out = static * 3 + 1
def state():
    graph.replay()
    torch.cuda.synchronize()
    digest = hashlib.sha256(b''.join(each.cpu().numpy().tobytes() for each in [*x, beside, out]))
    return [digest.hexdigest(), [each.data_ptr() for each in x], torch.cuda.memory_allocated()]
"""
STATE = "print(json.dumps(state()))"
#: The segments work on: they grow, shrink, and are used by another stream.
AFTER = """
more = [torch.full((1 << 24,), n, device='cuda') for n in range(6)]
assert [int(each.sum()) for each in more] == [n << 24 for n in range(6)]
del x[::2], more[1:]
torch.cuda.empty_cache()
with torch.cuda.stream(stream): assert int(more[0].sum() + beside.sum()) == sum(range(1 << 24))
print('good')
"""
JAX = """
import hashlib, json, jax, jax.numpy as jnp
key = jax.random.PRNGKey(7)
x = [jax.random.normal(jax.random.fold_in(key, n), (32, 1024, 1024)).block_until_ready() for n in range(12)]  # 128 MiB
step = jax.jit(lambda x: jnp.tanh(x * 2))
y = step(x[0]).block_until_ready()
def state():
    again = step(x[0]).block_until_ready()
    digest = hashlib.sha256(b''.join(bytes(memoryview(each.__array__()).cast('B')) for each in [*x, y, again]))
    return [digest.hexdigest(), [each.unsafe_buffer_pointer() for each in x]]
"""


async def both_tiers(kernel, least: int, record) -> None:
    """Suspend and resume twice, then checkpoint and wake: every bit is the same, and at least so many bytes move."""
    before = json.loads(await kernel.run(STATE, 120))
    for _ in range(2):
        await kernel.provisioner.suspend()
        moved = path_of(kernel).amounts()
        record(moved=moved.swapped_out, known=moved.bytes)
        assert moved.swapped_out >= 0.95 * least
        assert json.loads(await kernel.run(STATE, 120)) == before
        await kernel.settled("running")
    await kernel.provisioner.checkpoint()
    assert json.loads(await kernel.run(STATE, 120)) == before


async def test_expandable_segments(tmp_path, runtime_base, monkeypatch, record):
    pytest.importorskip("torch", reason="PyTorch is not installed on this machine")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    async with notebook(tmp_path, runtime_base, fast_path="auto") as kernel:
        await kernel.run(EXPANDABLE, 120)
        allocated = int(await kernel.run("print(torch.cuda.memory_allocated())"))
        await both_tiers(kernel, allocated, record)
        assert await kernel.run(AFTER, 120) == "good"


@pytest.mark.parametrize("preallocated", [True, False], ids=["preallocated", "as-needed"])
async def test_jax(tmp_path, runtime_base, monkeypatch, gpus, preallocated, record):
    pytest.importorskip("jax", reason="JAX is not installed on this machine")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true" if preallocated else "false")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", str(4 * GIB / gpus.list()[0].total))
    async with notebook(tmp_path, runtime_base, fast_path="auto") as kernel:
        await kernel.run(JAX, 120)
        await both_tiers(kernel, 4 * GIB if preallocated else 12 << 27, record)
