"""A real kernel with real CUDA state, through the whole stack: gate, agent, driver, CRIU, and back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import CellFailed, alive, notebook, until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.cuda.cuda import CudaState
from jupyter_gpu_ckpt.errors import CriuKilled, DeviceHeld

pytestmark = pytest.mark.gpu

GIB = 1 << 30
KILLED_CRIU = Path(__file__).parents[1] / "support" / "killed_criu.py"

SETUP = """
import hashlib, json, random
import torch
torch.manual_seed(1); random.seed(1)
x = torch.randn(1 << 24, device="cuda")
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.randn(64, 512, device="cuda")
for _ in range(5):
    optimizer.zero_grad(); model(data).square().mean().backward(); optimizer.step()
pinned = torch.arange(1 << 20, dtype=torch.float32).pin_memory()
static = torch.ones(1 << 16, device="cuda")
graph = torch.cuda.CUDAGraph()
warm = torch.cuda.Stream()
with torch.cuda.stream(warm):
    static.mul(2)
torch.cuda.current_stream().wait_stream(warm)
with torch.cuda.graph(graph):
    result = static * 2 + 1
stream = torch.cuda.Stream()
series = (n * torch.ones((), device="cuda") for n in range(100))
consumed = [next(series).item() for _ in range(7)]
address = x.data_ptr()

def digest():
    tensors = [x, data, pinned, static, result, torch.cuda.get_rng_state(), torch.get_rng_state(), *model.parameters()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]
    tensors = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    digests = [hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for tensor in tensors]
    return json.dumps([*digests, str(random.getstate()[1][-1])])
"""


def used(kernel) -> dict[int, int]:
    """Device memory by pid, all GPUs."""
    gpus = kernel.lifecycle.engine.gpus
    return {pid: count or 0 for gpu in gpus.list() for pid, count in gpus.processes(gpu.uuid).items()}


def free(kernel) -> int:
    return kernel.lifecycle.engine.gpus.list()[0].free


@pytest.mark.alone
async def test_everything_on_the_device_is_bit_equal_after_a_checkpoint_and_the_gpu_was_free(kernel, record):
    empty = free(kernel)
    await kernel.run(SETUP)
    before = json.loads(await kernel.run("print(digest())"))
    pids = kernel.lifecycle.capsule.processes()
    holds = sum(used(kernel).get(pid, 0) for pid in pids)
    assert holds > 256 << 20

    image = await kernel.provisioner.checkpoint()
    assert alive(pids) == []
    assert not set(pids) & set(used(kernel)), "NVML still shows the kernel on a GPU"
    assert abs(free(kernel) - empty) < 64 << 20, "the GPU is not as free as before the kernel came"
    assert image.manifest.cuda
    assert sum(image.manifest.device_bytes.values()) == holds
    record(held_mib=holds >> 20, image_mib=image.manifest.bytes >> 20, checkpoint=kernel.steps.seconds())

    assert json.loads(await kernel.run("print(digest())")) == before
    record(restore=kernel.steps.seconds())
    assert await kernel.run("print(x.data_ptr() == address, [next(series).item() for _ in range(3)])") == (
        "True [7.0, 8.0, 9.0]"
    )
    # A graph captured before replays, on new input; streams, autograd and the optimizer continue.
    replay = "static.fill_(3); graph.replay(); torch.cuda.synchronize(); print(result[0].item())"
    assert await kernel.run(replay) == "7.0"
    assert (
        await kernel.run(
            "with torch.cuda.stream(stream): y = x.sum()\nstream.synchronize()\n"
            "optimizer.zero_grad(); loss = model(data).square().mean(); loss.backward(); optimizer.step()\n"
            "print(bool(loss.isfinite()), pinned.is_pinned())"
        )
        == "True True"
    )


async def test_the_generator_of_the_device_draws_the_same_numbers_as_without_a_checkpoint(kernel):
    draws = "print(json.dumps([torch.rand(3, device='cuda').tolist(), torch.rand(3).tolist(), random.random()]))"
    seed = (
        "import torch, json, random\n"
        "torch.manual_seed(5); random.seed(5); _ = torch.rand(7, device='cuda'); _ = random.random()"
    )
    await kernel.run(seed)
    expected = await kernel.run(draws)
    await kernel.run(seed)
    await kernel.provisioner.checkpoint()
    assert await kernel.run(draws) == expected


@pytest.mark.alone
async def test_suspend_frees_the_gpu_and_the_next_cell_brings_it_back(kernel, record):
    await kernel.run("import torch; x = torch.arange(1 << 28, device='cuda')")
    held = free(kernel)
    pids = kernel.lifecycle.capsule.processes()
    await kernel.provisioner.suspend()
    record(suspend=kernel.steps.seconds())
    assert kernel.state == "suspended"
    assert alive(pids) == pids
    assert not set(pids) & set(used(kernel))
    assert free(kernel) - held > 2 * GIB
    right = "print(x[-1].item() == len(x) - 1, x.sum().item() == len(x) * (len(x) - 1) // 2)"
    assert await kernel.run(right) == "True True"
    await kernel.settled("running")
    # And from host RAM on to the disk, without touching the GPU again.
    await kernel.provisioner.suspend()
    image = await kernel.provisioner.checkpoint()
    assert image.manifest.cuda
    assert await kernel.run("print(x[12345].item())") == "12345"


async def test_blocks_nobody_uses_are_not_saved(kernel, record):
    """8 GiB live and 16 GiB cached by torch's allocator: the image is that of the 8 GiB."""
    disk = shutil.disk_usage(kernel.lifecycle.engine.store.root.parent).free
    live = 8 if disk > 24 * GIB else 1
    await kernel.run(f"import torch; live = torch.full(({live} << 28,), 7, dtype=torch.int32, device='cuda')")
    await kernel.run(f"cached = torch.empty({2 * live} << 30, dtype=torch.uint8, device='cuda'); del cached")
    reserved = int(await kernel.run("print(torch.cuda.memory_reserved())"))
    assert reserved >= 3 * live * GIB
    image = await kernel.provisioner.checkpoint()
    record(live_gib=live, cached_gib=2 * live, image_gib=image.manifest.bytes / GIB, steps=kernel.steps.seconds())
    assert image.manifest.bytes < live * GIB + 2.5 * GIB
    assert await kernel.run("print(bool((live == 7).all()))") == "True"


@pytest.mark.parametrize("call", [1, 30, 90, 200, 350, 500, 700])
async def test_criu_killed_while_it_dumps_a_kernel_that_was_on_the_gpu(kernel, record, monkeypatch, call):
    """CRIU enters its ``call``-th ptrace: the driver's threads continue too, and the device has its memory back."""
    await kernel.run("import torch; x = torch.arange(1 << 24, device='cuda'); total = x.sum().item()")
    criu = kernel.lifecycle.engine.criu
    with monkeypatch.context() as patch:
        patch.setattr(criu, "argv", (sys.executable, str(KILLED_CRIU), str(call), *criu.argv))
        try:
            await kernel.provisioner.checkpoint()
        except CriuKilled as error:
            record(killed=call, details={key: error.details.get(key) for key in ("unrepaired", "seconds")})
            assert "unrepaired" not in error.details
            assert kernel.lifecycle.engine.cuda.state(kernel.lifecycle.capsule.host_pid) is CudaState.RUNNING
        else:
            record(killed="never: the dump makes fewer calls")
    assert await kernel.run("print(x.sum().item() == total)") == "True"
    await kernel.settled("running")
    await kernel.provisioner.checkpoint()
    assert await kernel.run("print(x.sum().item() == total, torch.ones(3, device='cuda').sum().item())") == "True 3.0"


@pytest.mark.alone
async def test_too_little_gpu_memory_is_refused_and_nothing_is_lost(kernel, record):
    await kernel.run("import torch; x = torch.full((1 << 30,), 3, dtype=torch.uint8, device='cuda')")
    image = await kernel.provisioner.checkpoint()
    program = (
        "import torch, sys; free, _ = torch.cuda.mem_get_info()\n"
        "hog = torch.empty(free - (600 << 20), dtype=torch.uint8, device='cuda')\n"
        "print('full', flush=True); sys.stdin.read()"
    )
    hog = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert hog.stdout.readline().strip() == "full"
        with pytest.raises(CellFailed, match="GPU_FULL") as caught:
            await kernel.run("print(x[5].item())")
        record(message=str(caught.value)[-400:])
        assert kernel.state == "checkpointed"
        assert image.path.exists()
    finally:
        hog.stdin.close()
        hog.wait(60)
    assert await kernel.run("print(x[5].item())") == "3"


@pytest.fixture
async def nvml(kernel):
    """The kernel has NVML open, and with it /dev/nvidiactl."""
    try:
        await kernel.run("import pynvml; pynvml.nvmlInit()")
    except CellFailed:
        pytest.skip("pynvml is missing: pip install nvidia-ml-py")


async def saved_or_refused(kernel, record) -> bool:
    """Checkpoint with NVML open: saved all the same (True), or refused with the reason and saved without it."""
    try:
        await kernel.provisioner.checkpoint()
    except DeviceHeld as error:
        record(outcome="refused", details=error.details)
        assert error.left == "the kernel runs on"
        await kernel.run("pynvml.nvmlShutdown()")
        await kernel.provisioner.checkpoint()
        return False
    record(outcome="saved")
    return True


async def test_a_kernel_that_opened_nvml_besides_cuda(kernel, nvml, record):
    await kernel.run("import torch; x = torch.ones(5, device='cuda')")
    await saved_or_refused(kernel, record)
    assert await kernel.run("print(x.sum().item())") == "5.0"


async def test_only_nvml_without_cuda(kernel, nvml, record):
    await kernel.run(
        "x = pynvml.nvmlDeviceGetHandleByIndex(0)\n"
        "def total(): return pynvml.nvmlDeviceGetMemoryInfo(x).total\n"
        "before = total()"
    )
    cuda, pid = kernel.lifecycle.engine.cuda, kernel.lifecycle.capsule.host_pid
    record(state=cuda.state(pid).value, files=cuda.device_files(pid))
    if not await saved_or_refused(kernel, record):
        await kernel.run("pynvml.nvmlInit(); x = pynvml.nvmlDeviceGetHandleByIndex(0)")
    assert await kernel.run("print(total() == before)") == "True"


async def test_work_that_was_submitted_before_is_finished_first(kernel):
    await kernel.run(
        "import torch; a = torch.eye(8192, device='cuda'); b = torch.full((8192, 8192), 2.0, device='cuda')\n"
        "for _ in range(200): b = a @ b"
    )
    await kernel.provisioner.checkpoint()
    assert await kernel.run("print(bool((b == 2).all()))") == "True"


async def test_dataloader_workers_continue_in_the_middle_of_an_epoch(kernel, record):
    """A checkpoint takes from the workers the device files they have inherited; a suspend does not."""
    await kernel.run(
        "import torch\nx = torch.ones(3, device='cuda')\n"
        "loader = iter(torch.utils.data.DataLoader(range(1000), num_workers=2, persistent_workers=True))\n"
        "first = next(loader).clone()"
    )
    cuda = kernel.lifecycle.engine.cuda
    workers = [pid for pid in kernel.lifecycle.capsule.other_processes() if cuda.device_files(pid)]
    inherited = [each for each in procfs.maps(workers[0]) if each.name.startswith("/dev/nvidia")]
    record(files=cuda.device_files(workers[0]), mappings=sorted({each.permissions for each in inherited}))
    assert len(workers) == 2
    await kernel.provisioner.suspend()
    assert all(cuda.device_files(pid) for pid in workers)
    assert await kernel.run("print(next(loader).item())") == "1"
    await kernel.settled("running")
    for number in (2, 3):
        await kernel.provisioner.checkpoint()
        assert await kernel.run("print(next(loader).item(), x.sum().item())") == f"{number} 3.0"
        await kernel.settled("running")
        others = kernel.lifecycle.capsule.other_processes()
        assert [pid for pid in others if cuda.device_files(pid)] == []
    rest = "print([each.item() for each in loader] == list(range(4, 1000)), (x * 2).sum().item())"
    assert await kernel.run(rest, 120) == "True 6.0"
    await kernel.run("loader._shutdown_workers(); del loader")
    await until(lambda: len(kernel.lifecycle.capsule.other_processes()) <= 2)


@pytest.mark.alone
@pytest.mark.parametrize("method", ["fork", "spawn"])
async def test_dataloader_workers_of_a_large_kernel_continue(kernel, record, method):
    """Of one with 10 GiB on the GPU and 2 GiB of its own memory, which forked workers share."""
    await kernel.run(
        "import torch\nx = [torch.full((1 << 28,), n, dtype=torch.int32, device='cuda') for n in range(10)]\n"
        "own = torch.arange(1 << 28)\n"
        f"loader = iter(torch.utils.data.DataLoader(range(1000), num_workers=2, persistent_workers=True,"
        f" multiprocessing_context={method!r}))\nfirst = next(loader).clone()",
        120,
    )
    for number in (1, 2):
        await kernel.provisioner.suspend()
        seen = "print(next(loader).item(), [each.sum().item() >> 28 for each in x] == list(range(10)), own[-1].item())"
        assert await kernel.run(seen) == f"{2 * number - 1} True {(1 << 28) - 1}"
        await kernel.settled("running")
        image = await kernel.provisioner.checkpoint()
        record(**{f"image {number}": image.manifest.bytes, f"seconds {number}": kernel.steps.seconds()})
        assert await kernel.run(seen, 120) == f"{2 * number} True {(1 << 28) - 1}"
        await kernel.settled("running")
    rest = "print([each.item() for each in loader] == list(range(5, 1000)))"
    assert await kernel.run(rest, 120) == "True"


@pytest.mark.two_gpus
async def test_a_kernel_comes_back_on_the_other_gpu(tmp_path, runtime_base, criu_binary, record):
    async with notebook(tmp_path, runtime_base) as kernel:
        gpus = kernel.lifecycle.engine.gpus
        zero, one = (gpu.uuid for gpu in gpus.list()[:2])
        await kernel.run("import torch; x = torch.arange(1 << 26, device='cuda:0'); total = x.sum().item()")
        image = await kernel.provisioner.checkpoint()
        assert set(image.manifest.device_bytes) == {zero}
        await kernel.provisioner.restore(gpu_map={zero: one, one: zero})
        (pid,) = [pid for pid in kernel.lifecycle.capsule.processes() if pid in used(kernel)]
        assert set(gpus.used_by(pid)) == {one}
        assert await kernel.run("print(x.sum().item() == total)") == "True"
        # And home again.
        image = await kernel.provisioner.checkpoint()
        assert set(image.manifest.device_bytes) == {one}
        await kernel.provisioner.restore(gpu_map={one: zero, zero: one})
        pid = kernel.lifecycle.capsule.host_pid
        record(after={uuid: count >> 20 for uuid, count in gpus.used_by(pid).items()})
        assert set(gpus.used_by(pid)) == {zero}
        assert await kernel.run("print(x.sum().item() == total)") == "True"
