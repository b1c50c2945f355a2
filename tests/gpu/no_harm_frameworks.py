"""Uses of frameworks in notebooks that the library must not disturb; print all that they see.

Run as ``python no_harm_frameworks.py PROGRAM ...``, with and without the library; the output must be the same.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable


def digest(tensor: object) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()[:16]


def torch_memory() -> None:
    """Print what PyTorch's allocator counts, and how it meets the end of the memory."""
    import torch

    tensors = [torch.zeros(size, device="cuda") for size in (10, 1 << 18, 1 << 20, 5 << 20, (7 << 20) + 77)]
    print([torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), torch.cuda.max_memory_allocated()])
    print(sorted((each["total_size"], each["segment_type"]) for each in torch.cuda.memory_snapshot()))
    del tensors[1::2]
    torch.cuda.empty_cache()
    print([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
    for size in (1 << 45, 1 << 60):
        try:
            torch.empty(size, dtype=torch.uint8, device="cuda")
        except (torch.OutOfMemoryError, RuntimeError) as error:
            print(type(error).__name__)
    print(digest(torch.ones(1 << 20, device="cuda")), torch.cuda.memory_stats()["num_ooms"])


def torch_host_memory() -> None:
    import torch

    host = torch.arange(1 << 20)
    there = host.pin_memory().to("cuda", non_blocking=True)
    print(digest(there), host.is_pinned(), there.is_cuda)
    print(int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel() * 8, 0)), host.is_pinned())
    print(int(torch.cuda.cudart().cudaHostUnregister(host.data_ptr())), host.is_pinned())


def torch_streams_and_graphs() -> None:
    import torch

    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 8)).cuda()
    shown, stream = torch.randn(64, 1024, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        print(digest(model(shown)))
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = model(shown)
    for _ in range(3):
        graph.replay()
    print(digest(out), torch.cuda.is_current_stream_capturing())
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    shown.add_(1)
    after.record()
    after.synchronize()
    print(before.elapsed_time(after) > 0, digest(shown))


def torch_errors() -> None:
    """Print the texts of errors."""
    import torch

    for attempt in (
        lambda: torch.zeros(3, device="cuda:99"),
        lambda: torch.zeros(3, device="cuda") @ torch.zeros(4, device="cuda"),
        lambda: torch.cuda.get_device_properties(99),
        lambda: torch.cuda.caching_allocator_delete(12345),
    ):
        try:
            attempt()
        except Exception as error:
            print(type(error).__name__, str(error).splitlines()[0])


def programs_of_torch() -> None:
    """Start another program that uses the GPU, as a notebook's ``!python`` does."""
    code = "import torch; print(torch.arange(3 << 20, device='cuda').sum().item(), torch.cuda.memory_reserved())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    print(done.returncode, done.stdout, [name for name in os.environ if "PRELOAD" in name])


def transformers_model() -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=256, vocab_size=1000)).cuda().eval()
    shown = torch.arange(20, device="cuda")[None]
    with torch.no_grad():
        print(digest(model(shown).logits), model.generate(shown, max_new_tokens=8, do_sample=False).tolist())


def accelerate_training() -> None:
    import torch
    from accelerate import Accelerator

    torch.manual_seed(7)
    accelerator = Accelerator()
    model = torch.nn.Linear(512, 512)
    model, optimiser = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    for _ in range(3):
        optimiser.zero_grad()
        accelerator.backward(model(torch.ones(4, 512, device=accelerator.device)).square().mean())
        optimiser.step()
    print(accelerator.device, digest(model.weight))


def _worked(at: int) -> int:
    return sum(range(at * 1000))


def joblib_workers() -> None:
    import torch
    from joblib import Parallel, delayed

    kept = torch.ones(4 << 20, device="cuda")
    print(Parallel(n_jobs=2)(delayed(_worked)(at) for at in range(8)), kept.sum().item())


def cupy_memory() -> None:
    import cupy

    x = cupy.arange(3 << 20)
    pool = cupy.get_default_memory_pool()
    print(int(x.sum()), pool.used_bytes(), pool.total_bytes(), x.data.mem.size)
    attributes = cupy.cuda.runtime.pointerGetAttributes(x.data.ptr)
    print(attributes.type, attributes.device, attributes.devicePointer == x.data.ptr)
    try:
        cupy.cuda.runtime.malloc(1 << 50)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        print(error)
    texture = cupy.cuda.texture.CUDAarray(
        cupy.cuda.texture.ChannelFormatDescriptor(32, 0, 0, 0, cupy.cuda.runtime.cudaChannelFormatKindFloat), 64
    )
    texture.copy_from(cupy.arange(64, dtype=cupy.float32))
    back = cupy.zeros(64, cupy.float32)
    texture.copy_to(back)
    print(float(back.sum()))
    del x
    pool.free_all_blocks()
    print(pool.used_bytes(), pool.total_bytes())


def jax_memory() -> None:
    import jax

    x = jax.numpy.arange(3 << 20, dtype=jax.numpy.float32)
    print(float(jax.jit(lambda a: (a * 2).sum())(x)), [each.device_kind for each in jax.devices()])
    print(jax.devices()[0].memory_stats()["bytes_in_use"])


#: What each needs; in one process, since their import takes most of the time.
PROGRAMS: dict[str, tuple[tuple[str, ...], tuple[Callable[[], None], ...]]] = {
    "torch": (
        ("torch",),
        (torch_memory, torch_host_memory, torch_streams_and_graphs, torch_errors, programs_of_torch),
    ),
    "transformers": (("torch", "transformers"), (transformers_model,)),
    "accelerate": (("torch", "accelerate"), (accelerate_training,)),
    "joblib": (("torch", "joblib"), (joblib_workers,)),
    "cupy": (("cupy",), (cupy_memory,)),
    "jax": (("jax",), (jax_memory,)),
}


def missing(name: str) -> list[str]:
    """Return what is not installed of all that the programs need."""
    return [each for each in PROGRAMS[name][0] if importlib.util.find_spec(each) is None]


if __name__ == "__main__":
    for program in (each for name in sys.argv[1:] for each in PROGRAMS[name][1]):
        print(f"-- {program.__name__}", flush=True)
        program()
