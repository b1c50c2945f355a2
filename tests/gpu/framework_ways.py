"""One framework at work on the GPU: prints a digest of its results, and the bytes that the library serves meanwhile.

Run as ``python framework_ways.py FRAMEWORK SOCKET``, with and without the library.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections.abc import Callable

COUNT = 1 << 22


def served(path: str) -> int:
    """The bytes that the library of this process serves; 0 without one, or before it has served any."""
    if not os.path.exists(path):
        return 0
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(path)
        control.sendall(b"status\n")
        return json.loads(control.recv(4096))["bytes"]


def with_torch() -> tuple[object, list[bytes]]:
    import torch

    torch.manual_seed(0)
    x = torch.randn(2048, 2048, device="cuda")
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(3)]).cuda()
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()
    static, stream = torch.randn(COUNT, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        static * 2
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = (static * 2 + 1).sin()  # its memory is allocated during the capture
    graph.replay()
    del model, optimiser
    torch.cuda.empty_cache()
    large = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    del large
    torch.cuda.empty_cache()  # given back at once: the capture has ended
    y = torch.empty(COUNT, device="cuda").fill_(3)
    kept = [x @ x, out, y]
    return kept, [each.cpu().numpy().tobytes() for each in kept]


def with_cupy() -> tuple[object, list[bytes]]:
    import cupy

    x = cupy.arange(COUNT, dtype=cupy.float64).reshape(1024, -1)
    kernel = cupy.RawKernel(
        'extern "C" __global__ void twice(double *x) { x[blockIdx.x * blockDim.x + threadIdx.x] *= 2; }', "twice"
    )
    kernel((COUNT // 256,), (256,), (x,))
    y = cupy.sort(cupy.sin(x), axis=1)
    cupy.get_default_memory_pool().free_all_blocks()
    return (x, y), [cupy.asnumpy(x).tobytes(), cupy.asnumpy(y).tobytes()]


def with_numba() -> tuple[object, list[bytes]]:
    import numpy
    from numba import cuda

    if not hasattr(numpy, "row_stack"):  # Numba's CUDA target of 2025 names what NumPy 2.5 has no more.
        numpy.row_stack = numpy.vstack

    @cuda.jit
    def twice(x):
        at = cuda.grid(1)
        if at < x.size:
            x[at] *= 2

    x = cuda.to_device(numpy.arange(COUNT))
    twice[COUNT // 256, 256](x)
    pitched = cuda.device_array((1024, 1024), numpy.float32)
    return (x, pitched), [x.copy_to_host().tobytes()]


def with_triton() -> tuple[object, list[bytes]]:
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def twice(x, n, block: tl.constexpr):
        at = tl.program_id(0) * block + tl.arange(0, block)
        tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

    x = torch.arange(COUNT, device="cuda", dtype=torch.float32)
    twice[(COUNT // 1024,)](x, COUNT, block=1024)
    return x, [x.cpu().numpy().tobytes()]


def with_jax() -> tuple[object, list[bytes]]:
    import jax
    import jax.numpy as jnp
    import numpy

    x = jax.random.normal(jax.random.PRNGKey(7), (2048, 2048))
    y = jax.jit(lambda a: jnp.tanh(a @ a.T / 2048))(x).block_until_ready()
    return (x, y), [numpy.asarray(x).tobytes(), numpy.asarray(y).tobytes()]


FRAMEWORKS: dict[str, Callable[[], tuple[object, list[bytes]]]] = {
    "torch": with_torch,
    "cupy": with_cupy,
    "numba": with_numba,
    "triton": with_triton,
    "jax": with_jax,
}

if __name__ == "__main__":
    kept, results = FRAMEWORKS[sys.argv[1]]()
    digests = [hashlib.sha256(result).hexdigest() for result in results]
    print(json.dumps({"digests": digests, "served": served(sys.argv[2])}), flush=True)
