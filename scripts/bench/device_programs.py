"""Programs that give a kernel device memory by each framework, for `device_memory.py`.

Each program defines ``begin()``, which makes a context; ``fill(mib)``, which makes ``x``, random arrays of 64-bit
integers or floats, of 128 MiB at most; ``check()``, which returns a sum for each array in which every bit counts, with
its position, modulo 2 ** 64; ``touch()``, which uses little of the memory; and ``drop()``, which frees all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Program:
    """A framework's program: its source, the environment and the modules that it needs, and its loop of allocations.

    ``preallocates``: it takes a part of the GPU as it begins, and its memory from that.
    """

    title: str
    code: str
    modules: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    loop: str = ""
    preallocates: bool = False


_SIZES = """
def sizes(mib):
    "Numbers of 64-bit elements in arrays of so many MiB together."
    return [min(128, mib - at) << 17 for at in range(0, mib, 128)]
"""
_TORCH = (
    _SIZES
    + """
import torch
device = 'cuda'
x = []
def settle():
    if device != 'cpu':
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
def begin():
    torch.arange(1 << 17, device=device).sum().item()
    settle()
def fill(mib):
    x[:] = [torch.randint(-1 << 62, 1 << 62, (size,), device=device) for size in sizes(mib)]
    settle()
def check():
    weights = torch.arange(1, 2 * x[0].numel(), 2, device=device)
    sums = [int((each * weights[:each.numel()]).sum()) for each in x]
    del weights
    settle()
    return sums
def touch():
    return int(x[0].sum())
def change():
    "Change a tenth."
    for each in x[::10]:
        each += 1
    settle()
def drop():
    x.clear()
    settle()
"""
)
TORCH_LOOP = """
import random, time, torch
def loop(seed):
    chosen = random.Random(seed)
    for turn in range(40):
        held = [torch.empty(chosen.randrange(1 << 20, 96 << 20), dtype=torch.uint8, device='cuda') for _ in range(30)]
        for each in held: each[:1024].zero_()
        del held, each
        if turn % 8 == 7: torch.cuda.empty_cache()
loop(0); torch.cuda.synchronize(); began = time.perf_counter()
for seed in range(1, 4): loop(seed)
torch.cuda.synchronize(); print(time.perf_counter() - began)
"""
_JAX = (
    _SIZES
    + """
import jax, jax.numpy as jnp
jax.config.update('jax_enable_x64', True)
key = jax.random.PRNGKey(7)
x = []
weighed = jax.jit(lambda each: (each * (2 * jnp.arange(each.size, dtype='int64') + 1)).sum())
def begin():
    jnp.arange(1 << 17).sum().block_until_ready()
def fill(mib):
    x[:] = [jax.random.randint(jax.random.fold_in(key, number), (size,), -1 << 62, 1 << 62, 'int64')
            for number, size in enumerate(sizes(mib))]
    jax.block_until_ready(x)
def check():
    return [int(weighed(each)) for each in x]
def touch():
    return int(x[0][:1024].sum())
def drop():
    x.clear()
"""
)
_CUPY = (
    _SIZES
    + """
import cupy
pool = {pool}
cupy.cuda.set_allocator(pool.malloc)
x = []
def settle():
    cupy.cuda.Device().synchronize()
    pool.free_all_blocks()
def begin():
    cupy.arange(1 << 17).sum().item()
    settle()
def fill(mib):
    rng = cupy.random.default_rng(7)
    x[:] = [rng.random(size) for size in sizes(mib)]
    settle()
def check():
    weights = 2 * cupy.arange(x[0].size, dtype='int64') + 1
    sums = [int((each.view('int64') * weights[:each.size]).sum()) for each in x]
    del weights
    settle()
    return sums
def touch():
    return float(x[0].sum())
def drop():
    x.clear()
    settle()
"""
)
_CUPY_LOOP = """
import random, time, cupy
pool = {pool}
cupy.cuda.set_allocator(pool.malloc)
def loop(seed):
    chosen = random.Random(seed)
    for turn in range(40):
        held = [cupy.empty(chosen.randrange(1 << 20, 96 << 20), dtype='uint8') for _ in range(30)]
        for each in held: each[:1024].fill(0)
        del held, each
        if turn % 8 == 7: pool.free_all_blocks()
loop(0); cupy.cuda.Device().synchronize(); began = time.perf_counter()
for seed in range(1, 4): loop(seed)
cupy.cuda.Device().synchronize(); print(time.perf_counter() - began)
"""
_RMM_POOL = """
import rmm
from rmm.allocators.cupy import rmm_cupy_allocator
def make(): rmm.reinitialize(pool_allocator=True, initial_pool_size={bytes})
if not isinstance(rmm.mr.get_current_device_resource(), rmm.mr.PoolMemoryResource): make()
class pool:
    malloc = staticmethod(rmm_cupy_allocator)
    free_all_blocks = staticmethod({release})  # a pool gives back nothing as long as it is there
"""
_POOL, _ASYNC_POOL = "cupy.get_default_memory_pool()", "cupy.cuda.MemoryAsyncPool()"
_NUMBA = (
    _SIZES
    + """
import numpy
if not hasattr(numpy, 'row_stack'):  # Numba's CUDA target of 2025 names what NumPy 2.5 has no more
    numpy.row_stack = numpy.vstack
from numba import cuda
x = []
@cuda.jit
def weigh(each, sums):
    at, step = cuda.grid(1), cuda.gridsize(1)
    total = 0
    for number in range(at, each.size, step):
        total += each[number] * (2 * number + 1)
    sums[at] = total
def begin():
    cuda.to_device(numpy.arange(1 << 17))
    cuda.synchronize()
def fill(mib):
    base = numpy.random.default_rng(7).integers(-1 << 62, 1 << 62, sizes(mib)[0], dtype='int64')
    x[:] = [cuda.to_device(base[:size] ^ number) for number, size in enumerate(sizes(mib))]
    cuda.synchronize()
def check():
    sums = cuda.device_array(1 << 16, 'int64')
    found = []
    for each in x:
        weigh[256, 256](each, sums)
        found.append(int(sums.copy_to_host().sum()))
    return found
def touch():
    return int(x[0][:1024].copy_to_host().sum())
def drop():
    x.clear()
    cuda.synchronize()
"""
)

PROGRAMS = {
    "torch": Program("PyTorch", _TORCH, ("torch",), loop=TORCH_LOOP),
    "expandable": Program(
        "PyTorch, expandable_segments",
        _TORCH,
        ("torch",),
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        TORCH_LOOP,
    ),
    "async": Program(
        "PyTorch, cudaMallocAsync",
        _TORCH,
        ("torch",),
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
        TORCH_LOOP,
    ),
    "jax": Program("JAX, memory as needed", _JAX, ("jax",), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
    # Three quarters of the GPU.
    "jax-preallocated": Program("JAX as it comes", _JAX, ("jax",), preallocates=True),
    "cupy": Program(
        "CuPy, its pool", _CUPY.replace("{pool}", _POOL), ("cupy",), loop=_CUPY_LOOP.replace("{pool}", _POOL)
    ),
    "cupy-async": Program(
        "CuPy, MemoryAsyncPool",
        _CUPY.replace("{pool}", _ASYNC_POOL),
        ("cupy",),
        loop=_CUPY_LOOP.replace("{pool}", _ASYNC_POOL),
    ),
    "numba": Program("Numba, arrays", _NUMBA, ("numba", "numba.cuda")),
    "rmm": Program(  # half of the GPU; of the loop, of which two kernels are there, a pool that grows
        "RMM, its pool, by CuPy",
        _CUPY.replace("pool = {pool}", _RMM_POOL.replace("{bytes}", "None").replace("{release}", "lambda: None")),
        ("rmm", "cupy"),
        loop=_CUPY_LOOP.replace("pool = {pool}", _RMM_POOL.replace("{bytes}", "1 << 28").replace("{release}", "make")),
        preallocates=True,
    ),
}
