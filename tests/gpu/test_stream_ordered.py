"""Stream-ordered allocations of frameworks (PyTorch's cudaMallocAsync, CuPy's pools), moved by the library on a GPU."""

from __future__ import annotations

import pytest
from harness import notebook
from test_mapped_memory import both_tiers

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

#: Tensors of several streams, freed out of order, and a graph whose capture allocates.
TORCH = """
import hashlib, json, torch
torch.manual_seed(0)
assert torch.cuda.get_allocator_backend() == 'cudaMallocAsync'
x = [torch.randint(-1 << 62, 1 << 62, (1 << 24,), device='cuda') for _ in range(16)]  # of 128 MiB
streams = [torch.cuda.Stream() for _ in range(3)]
for stream in streams:
    with torch.cuda.stream(stream):
        x += [torch.randint(-1 << 62, 1 << 62, ((1 << 22) + 777,), device='cuda') for _ in range(5)]
torch.cuda.synchronize()
del x[2:20:3]
static, graph = torch.arange(1 << 20, device='cuda'), torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    out = static * 3 + 1
def state():
    graph.replay()
    torch.cuda.synchronize()
    digest = hashlib.sha256(b''.join(each.cpu().numpy().tobytes() for each in [*x, out]))
    return [digest.hexdigest(), [each.data_ptr() for each in x]]
"""
#: Blocks that are given from stream to stream lose nothing.
TURNS = """
kept = []
for turn in range(200):
    with torch.cuda.stream(streams[turn % 3]):
        one = torch.full((1 << 20,), turn, device='cuda')
        two = one * 2
        kept = [*kept[-5:], (turn, two)]
        del one
torch.cuda.synchronize()
print(all(bool((two == 2 * turn).all()) for turn, two in kept))
"""
CUPY = """
import hashlib, json, cupy
{setup}
rng = cupy.random.default_rng(7)
x = [rng.random(1 << 24) for _ in range(12)]  # of 128 MiB
stream = cupy.cuda.Stream(non_blocking=True)
with stream:
    x += [rng.random((1 << 21) + 77) for _ in range(7)]
stream.synchronize()
del x[1:9:3]
def state():
    digest = hashlib.sha256(b''.join(cupy.asnumpy(each).tobytes() for each in x))
    return [digest.hexdigest(), [each.data.ptr for each in x]]
"""
POOLS = {
    "default": "",
    "async": "cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)",
}


async def test_torch_s_backend(tmp_path, runtime_base, monkeypatch, record):
    pytest.importorskip("torch", reason="PyTorch is not installed on this machine")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    async with notebook(tmp_path, runtime_base, fast_path="auto") as kernel:
        await kernel.run(TORCH, 120)
        least = int(await kernel.run("print(sum(each.nbytes for each in x))"))
        await both_tiers(kernel, least, record)
        assert await kernel.run(TURNS, 120) == "True"


@pytest.mark.parametrize("pool", POOLS)
async def test_cupy_s_pools(tmp_path, runtime_base, pool, record):
    pytest.importorskip("cupy", reason="CuPy is not installed on this machine")
    async with notebook(tmp_path, runtime_base, fast_path="auto") as kernel:
        await kernel.run(CUPY.format(setup=POOLS[pool]), 120)
        least = int(await kernel.run("print(sum(each.nbytes for each in x))"))
        await both_tiers(kernel, least, record)
