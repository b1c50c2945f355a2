"""Device memory moved by the library on a real GPU: every bit, every address, under concurrent work."""

from __future__ import annotations

import json
import time

import pytest
from harness import notebook

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.cuda.cuda import CudaState
from jupyter_gpu_ckpt.errors import UnsupportedCuda
from jupyter_gpu_ckpt.lifecycle import compatibility, host_memory, preflight, resume
from jupyter_gpu_ckpt.lifecycle.plans import State

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

#: Tensors of every kind, and what is made of them by work that continues after.
KINDS = """
import hashlib, torch
torch.manual_seed(0)
gen = dict(device='cuda')
big = torch.randn(1 << 24, **gen)
t = {
    'view': big[1000:5000:3], 'whole': big, 'shared': big.view(torch.int32),
    'channels_last': torch.randn(8, 32, 64, 64, **gen).to(memory_format=torch.channels_last),
    'coo': torch.randn(2000, 2000, **gen).relu().to_sparse(), 'csr': torch.eye(3000, **gen).to_sparse_csr(),
    'quantised': torch.quantize_per_tensor(torch.randn(4 << 20, **gen), 0.1, 10, torch.qint8),
    'complex': torch.randn(3 << 20, dtype=torch.complex64, **gen), 'half': torch.randn(5 << 20, **gen).bfloat16(),
    'empty': torch.empty(0, **gen), 'bool': torch.rand(3 << 20, **gen) > 0.5,
}
small = [torch.randn(257, **gen) for _ in range(10_000)]
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
batch = torch.randn(64, 1024, **gen)
model(batch).square().mean().backward(); optimiser.step(); optimiser.zero_grad()
waiting = model(batch).square().mean()  # its backward comes after
static_in, stream = torch.randn(1 << 20, **gen), torch.cuda.Stream()
with torch.cuda.stream(stream):
    for _ in range(3): warm = (static_in * 2 + 1).sin()
torch.cuda.current_stream().wait_stream(stream)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph): static_out = (static_in * 2 + 1).sin()
other_stream = torch.cuda.Stream()
pinned = torch.arange(1 << 20).pin_memory()

def raw(x):
    if x.is_sparse: return raw(x.coalesce().indices()) + raw(x.coalesce().values())
    if x.layout is torch.sparse_csr: return raw(x.crow_indices()) + raw(x.col_indices()) + raw(x.values())
    if x.is_quantized: x = x.int_repr()
    return x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b''

def state():
    facts = {name: hashlib.sha256(raw(x)).hexdigest() for name, x in t.items()}
    facts['small'] = hashlib.sha256(b''.join(raw(x) for x in small[::7])).hexdigest()
    facts['model'] = hashlib.sha256(b''.join(raw(p) for p in model.parameters())).hexdigest()
    facts['adam'] = hashlib.sha256(b''.join(raw(s['exp_avg']) for s in optimiser.state.values())).hexdigest()
    facts['addresses'] = [big.data_ptr(), small[-1].data_ptr(), static_in.data_ptr(), t['half'].data_ptr()]
    facts['strides'] = [t['channels_last'].stride(), t['view'].stride()]
    facts['aliases'] = t['shared'].data_ptr() == big.data_ptr()
    return facts

import json
"""
AFTER = """
waiting.backward(); optimiser.step()
graph.replay(); torch.cuda.synchronize()
assert torch.equal(static_out, (static_in * 2 + 1).sin())
with torch.cuda.stream(other_stream): there = pinned.to('cuda', non_blocking=True)
other_stream.synchronize(); assert int(there.sum()) == int(pinned.sum())
big[0] = 7.0; assert float(t['whole'][0]) == 7.0 and t['shared'].view(torch.float32)[0] == 7.0
print(hashlib.sha256(b''.join(raw(p) for p in model.parameters())).hexdigest())
"""
HAMMER = """
import threading, torch
errors, counts, stop = [], [0, 0, 0], threading.Event()
def guarded(work):
    def run():
        try:
            while not stop.is_set(): work()
        except BaseException as error: errors.append(repr(error)[:300])
    thread = threading.Thread(target=run, daemon=True); thread.start(); return thread
counter = torch.zeros(1 << 22, device='cuda')
def launches():
    for _ in range(100): counter.add_(1)
    counts[0] += 100
    assert float(counter[12345]) == counts[0], 'an addition was lost'
net = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
def backward():
    net(torch.randn(128, 1024, device='cuda')).sum().backward(); net.zero_grad(); counts[1] += 1
def allocations():
    y = torch.empty(30 << 20, dtype=torch.uint8, device='cuda'); y.fill_(3); assert int(y[77]) == 3
    del y; torch.cuda.empty_cache(); counts[2] += 1
held = torch.arange(1 << 27, device='cuda'); total = int(held.sum())
threads = [guarded(work) for work in (launches, backward, allocations)]
"""


def path_of(kernel) -> fastpath.FastPath:
    return fastpath.FastPath(kernel.lifecycle.capsule, kernel.lifecycle.engine.cuda)


async def test_every_kind_of_tensor_is_the_same_after_both_tiers_and_works_on(tmp_path, runtime_base, record):
    async with (
        notebook(tmp_path, runtime_base, fast_path="auto") as kernel,
        notebook_beside(tmp_path, runtime_base) as never_away,
    ):
        for each in (kernel, never_away):
            await each.run(KINDS, 120)
        before = json.loads(await kernel.run("print(json.dumps(state()))"))
        served = path_of(kernel).amounts()
        assert served.allocations and served.swapped_out == 0
        await kernel.provisioner.suspend()
        away = path_of(kernel).amounts()
        record(served=served.bytes, swapped_out=away.swapped_out)
        assert away.swapped_out > 0.9 * sum((1 << 26, 4 * 8 * 32 * 64 * 64)), "the library swapped the tensors out"
        assert json.loads(await kernel.run("print(json.dumps(state()))")) == before
        await kernel.settled("running")
        assert path_of(kernel).amounts().swapped_out == 0
        await kernel.provisioner.checkpoint()
        assert json.loads(await kernel.run("print(json.dumps(state()))", 120)) == before
        assert await kernel.run(AFTER) == await never_away.run(AFTER)


def notebook_beside(tmp_path, runtime_base):
    place = tmp_path / "beside"
    place.mkdir()
    return notebook(place, runtime_base, fast_path="off")


async def test_threads_that_hammer_the_gpu_lose_nothing(tmp_path, runtime_base, record):
    async with notebook(tmp_path, runtime_base, fast_path="auto") as kernel:
        await kernel.run(HAMMER, 120)
        for _ in range(8):
            await kernel.provisioner.suspend()
            assert path_of(kernel).amounts().swapped_out >= 1 << 30
            assert await kernel.run("print(int(held.sum()) == total, errors)", 60) == "True []"
            await kernel.settled("running")
        await kernel.provisioner.checkpoint()
        assert await kernel.run("print(int(held.sum()) == total, errors)", 120) == "True []"
        counted = json.loads(await kernel.run("print(counts)"))
        await until_more(kernel, counted)
        done = await kernel.run("stop.set(); [thread.join() for thread in threads]; print(errors, counts)")
        record(counts=done)
        assert done.startswith("[] ")


async def until_more(kernel, counted):
    for _ in range(100):
        now = json.loads(await kernel.run("import time; time.sleep(0.05); print(counts)"))
        if all(later > before for before, later in zip(counted, now, strict=True)):
            return
    raise AssertionError(f"a thread does not continue: {counted}, {now}")


async def test_a_warm_kernel_frees_its_memory_for_others_and_is_resumed_or_checkpointed(tmp_path, runtime_base, record):
    async with notebook(tmp_path, runtime_base, fast_path="auto", warm_suspend=True) as kernel:
        await kernel.run("import torch; x = torch.arange(1 << 29, device='cuda'); total = int(x.sum())", 120)
        lifecycle = kernel.lifecycle
        pid, gpus = lifecycle.capsule.host_pid, lifecycle.engine.gpus
        for _ in range(3):
            held = sum(gpus.used_by(pid).values())
            await kernel.provisioner.suspend()
            stays = sum(gpus.used_by(pid).values())
            record(held=held, stays=stays)
            assert lifecycle.engine.cuda.state(pid) is CudaState.LOCKED
            away = path_of(kernel).amounts().swapped_out
            assert away >= 1 << 32
            assert stays <= held - away + (32 << 20), "but for what the context grows by (15 MB, seen)"
            assert await kernel.run("print(int(x.sum()) == total)", 60) == "True"
            await kernel.settled("running")
        await kernel.provisioner.suspend()
        await kernel.provisioner.checkpoint()
        assert await kernel.run("print(int(x.sum()) == total)", 120) == "True"


async def test_an_image_takes_device_memory_past_criu_and_only_what_has_changed(tmp_path, runtime_base, record):
    async with notebook(tmp_path, runtime_base, fast_path="auto") as kernel:
        await kernel.run("import torch; x = torch.randn(1 << 28, device='cuda'); bits = int(x.view(torch.int32).sum())")
        for change in ("None", "x[:1000].mul_(2)"):
            await kernel.run(f"{change}; bits = int(x.view(torch.int32).sum())")
            await kernel.provisioner.checkpoint()
            image = kernel.lifecycle.image
            record(swapped=image.manifest.swapped_bytes, bytes=image.manifest.bytes, steps=image.manifest.steps)
            assert image.manifest.swapped_bytes >= 1 << 30
            assert image.manifest.bytes - image.manifest.swapped_bytes < 3 << 30, "the process itself"
            assert await kernel.run("print(int(x.view(torch.int32).sum()) == bits)", 120) == "True"
        await kernel.provisioner.suspend()  # and its memory is on its way to the disk
        await kernel.provisioner.checkpoint()
        assert await kernel.run("print(int(x.view(torch.int32).sum()) == bits)", 120) == "True"


async def test_device_memory_that_host_memory_is_too_small_for(tmp_path, runtime_base, record, monkeypatch):
    """The memory goes to the disk and comes from it; host memory takes the context alone."""
    async with notebook(tmp_path, runtime_base, fast_path="auto") as kernel:
        await kernel.run(
            "import torch; x = torch.randn(1 << 30, device='cuda'); bits = int(x.view(torch.int32).sum())", 120
        )
        lifecycle = kernel.lifecycle
        for module in (compatibility, preflight, host_memory):
            monkeypatch.setattr(module, "available_memory", lambda: 3 << 30)
        for verb in ("suspend", "checkpoint", "suspend"):
            began = time.monotonic()
            await getattr(kernel.provisioner, verb)()
            record(**{f"{verb}, seconds": time.monotonic() - began})
            if verb == "suspend":
                there = list(lifecycle.engine.store.root.glob(".draft-spill-*/*.img"))
                assert sum(path.stat().st_size for path in there) == path_of(kernel).amounts().swapped_out >= 4 << 30
                assert host_memory.resident(lifecycle.kernel) < 4 << 30
            began = time.monotonic()
            assert await kernel.run("print(int(x.view(torch.int32).sum()) == bits)", 120) == "True"
            record(**{f"back from {verb}, seconds": time.monotonic() - began})
            await kernel.settled("running")


@pytest.mark.two_gpus
@pytest.mark.parametrize(
    ("allocator", "kept"),
    [("", 0), ("", 8 << 30), ("expandable_segments:True", 8 << 30)],
    ids=["default", "default-kept", "expandable-kept"],
)
async def test_blocks_of_two_gpus_that_work_together(tmp_path, runtime_base, monkeypatch, record, allocator, kept):
    """Each may use the other's memory, where it could before."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", allocator)
    async with notebook(tmp_path, runtime_base, fast_path="auto", host_copy_bytes=kept) as kernel:
        await kernel.run(
            "import torch\n"
            "x = torch.randn(1 << 28, device='cuda:0'); y = x.to('cuda:1') * 2\n"
            "peers = torch.cuda.can_device_access_peer(0, 1)\n"
            "def same(): return bool((x.to('cuda:1') * 2 == y).all()) and bool((y.to('cuda:0') == x * 2).all())"
        )
        for verb in ("suspend", "checkpoint", "suspend"):
            await getattr(kernel.provisioner, verb)()
            if verb == "suspend":
                assert path_of(kernel).amounts().swapped_out >= 2 << 30
            assert await kernel.run("print(same())", 120) == "True"
            await kernel.settled("running")
        record(peers=await kernel.run("print(peers)"))


@pytest.mark.two_gpus
@pytest.mark.parametrize("fast_path", ["auto", "off"])
async def test_pools_of_two_gpus_are_refused(tmp_path, runtime_base, monkeypatch, fast_path):
    """The driver 580.159 allocates no more from a pool that another GPU may use, once it was suspended."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    async with notebook(tmp_path, runtime_base, fast_path=fast_path) as kernel:
        await kernel.run("import torch\nx = torch.ones(1 << 20, device='cuda:0'); y = x.to('cuda:1') * 2")
        for verb in ("suspend", "checkpoint"):
            with pytest.raises(UnsupportedCuda, match="cudaMallocAsync"):
                await getattr(kernel.provisioner, verb)()
        assert await kernel.run("print(float((x.to('cuda:1') + y).sum()))") == str(3.0 * (1 << 20))


async def continues_after_both_tiers(kernel, step: str) -> None:
    """``step`` works with what was on the GPU, and prints whether it is as it should be."""
    for verb in ("suspend", "checkpoint"):
        await getattr(kernel.provisioner, verb)()
        assert await kernel.run(step, 120) == "True"
        await kernel.settled("running")


async def test_cupy_beside_torch(tmp_path, runtime_base, record):
    pytest.importorskip("cupy", reason="CuPy is not installed on this machine")
    async with notebook(tmp_path, runtime_base, fast_path="auto") as kernel:
        await kernel.run(
            "import cupy, torch\n"
            "a = cupy.arange(1 << 26, dtype=cupy.int64); t = torch.arange(1 << 26, device='cuda')\n"
            "shared = torch.from_dlpack(a)  # one memory, two libraries\n"
            "def same(): return bool((shared == t).all()) and int(a.sum()) == int(t.sum())",
            120,
        )
        record(served=path_of(kernel).amounts().bytes)
        await continues_after_both_tiers(kernel, "a += 1; t += 1; print(same())")


async def test_numba_beside_torch(tmp_path, runtime_base, record):
    pytest.importorskip("numba.cuda", reason="Numba's CUDA target is not installed on this machine")
    async with notebook(tmp_path, runtime_base, fast_path="auto") as kernel:
        await kernel.run(
            "import numpy, torch; from numba import cuda\n"
            # Numba's CUDA target of 2025 names what NumPy 2.5 has no more.
            "if not hasattr(numpy, 'row_stack'): numpy.row_stack = numpy.vstack\n"
            "@cuda.jit\n"
            "def double(x):\n"
            "    at = cuda.grid(1)\n"
            "    if at < x.size: x[at] *= 2\n"
            "a = cuda.to_device(numpy.arange(1 << 22)); t = torch.arange(1 << 22, device='cuda')\n"
            "def step():\n"
            "    double[(1 << 22) // 256, 256](a); t.mul_(2); torch.cuda.synchronize()\n"
            "    return bool((torch.as_tensor(a, device='cuda') == t).all())\n"
            "step()",
            120,
        )
        record(served=path_of(kernel).amounts().bytes)
        await continues_after_both_tiers(kernel, "print(step())")


async def test_what_does_not_go_through_the_library_is_the_driver_s(tmp_path, runtime_base):
    async with notebook(tmp_path, runtime_base, fast_path="off") as kernel:
        await kernel.run("import torch; x = torch.arange(1 << 26, device='cuda')", 120)
        assert path_of(kernel).amounts() == fastpath.Amounts()
        await kernel.provisioner.suspend()
        assert await kernel.run("print(int(x.sum()))") == str((1 << 26) * ((1 << 26) - 1) // 2)


async def test_the_driver_moves_the_memory_of_a_kernel_whose_threads_cannot_be_stopped(tmp_path, runtime_base):
    async with notebook(tmp_path, runtime_base, fast_path="auto") as kernel:
        await kernel.run("import torch; x = torch.arange(1 << 26, device='cuda')", 120)
        await kernel.run(
            "import ctypes; libc, thread = ctypes.CDLL(None), ctypes.c_ulong()\n"
            "libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)\n"
            "libc.pthread_setname_np(thread, b'cuda-of-a-user')"
        )
        await kernel.provisioner.suspend()
        assert path_of(kernel).amounts().swapped_out == 0
        assert await kernel.run("print(int(x.sum()))") == str((1 << 26) * ((1 << 26) - 1) // 2)


@pytest.mark.parametrize("fast_path", ["auto", "kernel"])
async def test_what_a_kernel_starts_is_preloaded_unless_only_the_kernel_is_meant(tmp_path, runtime_base, fast_path):
    async with notebook(tmp_path, runtime_base, fast_path=fast_path) as kernel:
        await kernel.run("import torch; x = torch.ones(1 << 24, device='cuda')", 120)
        assert path_of(kernel).amounts().allocations
        said = await kernel.run(
            "import os, subprocess\n"
            "print(subprocess.check_output(['env'], text=True), os.environ.get('LD_PRELOAD'), file=open('said', 'w'))\n"
            "print(open('said').read())"
        )
        assert ("LD_PRELOAD" in said) == (fast_path == "auto")
        assert fastpath.VARIABLE not in said


@pytest.mark.alone
async def test_errors_and_free_memory_are_the_driver_s(tmp_path, runtime_base):
    asked = """
import torch
facts = []
before = torch.cuda.mem_get_info()[0]
x = torch.empty(4 << 30, dtype=torch.uint8, device='cuda')
taken = before - torch.cuda.mem_get_info()[0]
try: torch.empty(1 << 42, dtype=torch.uint8, device='cuda')
except torch.OutOfMemoryError as error: facts.append('OutOfMemoryError')
del x; torch.cuda.empty_cache()
given_back = torch.cuda.mem_get_info()[0] - before + taken
for bytes in (taken, given_back):  # others use the GPU, too
    facts.append(abs(bytes - (4 << 30)) < 256 << 20)
import ctypes, re
path = next(line.split()[-1] for line in open('/proc/self/maps') if 'libcudart' in line)
cudart = ctypes.CDLL(path)
everywhere = ctypes.CDLL(None)
p = ctypes.c_void_p()
malloc = getattr(everywhere, 'cudaMalloc', cudart.cudaMalloc)
free = getattr(everywhere, 'cudaFree', cudart.cudaFree)
for size in (1 << 42, (1 << 64) - 1, 0):
    facts.append(malloc(ctypes.byref(p), ctypes.c_size_t(size)))
    facts.append(cudart.cudaGetLastError())
facts.append(malloc(None, ctypes.c_size_t(4 << 20)))
cudart.cudaGetLastError()
facts.append(free(ctypes.c_void_p(12345)))
cudart.cudaGetLastError()
facts.append(free(None))
print(facts)
"""
    async with (
        notebook(tmp_path, runtime_base, fast_path="auto") as kernel,
        notebook_beside(tmp_path, runtime_base) as plain,
    ):
        await kernel.run("import torch; keep = torch.ones(1 << 24, device='cuda')", 120)
        await plain.run("import torch; keep = torch.ones(1 << 24, device='cuda')", 120)
        ours, theirs = await kernel.run(asked), await plain.run(asked)
        assert ours == theirs


async def test_an_owner_that_ends_while_allocations_are_swapped_out_and_nothing_is_locked(tmp_path, runtime_base):
    """The worst moment: the threads are stopped, and only that keeps them from swapped-out memory."""
    async with notebook(tmp_path, runtime_base, outlive_server=True, fast_path="auto") as kernel:
        await kernel.run(HAMMER, 120)
        lifecycle = kernel.lifecycle
        capsule, cuda = lifecycle.capsule, lifecycle.engine.cuda
        pid = capsule.host_pid
        cuda.lock(pid, 30)
        capsule.freeze_threads(10)
        cuda.unlock(pid)
        with path_of(kernel)._library(60) as library:
            library.request("copy_out")
            library.request("free")
        capsule.outlive()
        capsule.detach()
        lifecycle.kernel.capsule = capsule = Capsule.attach(capsule.directory)
        assert resume.repair(lifecycle.kernel, capsule) is State.RUNNING
        assert path_of(kernel).amounts().swapped_out == 0
        assert await kernel.run("print(int(held.sum()) == total, errors)", 60) == "True []"
