"""The driver's checkpoint functions on real processes: what survives, what is refused, what destroys.

Tests whose outcome is the driver's business record it (`record`) and assert only what the project relies on.
"""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.cuda.checkpoint_api import DriverRefused
from jupyter_gpu_ckpt.cuda.cuda import Cuda, CudaState
from jupyter_gpu_ckpt.cuda.gpus import gpu_mapping
from jupyter_gpu_ckpt.cuda.helper_client import Helper
from jupyter_gpu_ckpt.errors import CudaError, GpuCkptError, GpuFull, HelperGone

pytestmark = pytest.mark.gpu

GIB = 2**30

# A little of everything a notebook keeps on the GPU.  `numbers` draws from the GPU's random generator as it goes, so a
# half-consumed one ties Python's, the CPU's and the GPU's state together.
EVERYTHING = """
import hashlib, torch
torch.use_deterministic_algorithms(True)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(64, 512, device="cuda")).square().mean().backward()
        optimizer.step()

def numbers():
    for n in range(1000):
        yield torch.rand(4, device="cuda") * n + torch.rand(4).cuda()

big = torch.arange(1 << 27, dtype=torch.int32, device="cuda")
pinned = torch.randn(1 << 20).pin_memory()
stream = torch.cuda.Stream()
static = torch.ones(1024, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    static.mul_(1.5).add_(0.25)
generator = numbers()
drawn = [next(generator) for _ in range(500)]
train(3)
graph.replay()

def digest(*more):
    torch.cuda.synchronize()
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    tensors = [big, pinned, static, *drawn, *model.parameters(), *state, *more]
    tensors += [torch.get_rng_state(), torch.cuda.get_rng_state()]
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().cpu().numpy().tobytes())
    return whole.hexdigest()
"""
CONTINUE = """
train(2)
graph.replay()
with torch.cuda.stream(stream):
    aside = pinned.to("cuda", non_blocking=True) * 2
rest = list(generator)
result = digest(aside, *rest)
"""
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def filled(count):
    return f"import torch; x = torch.full(({count},), 7, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize()"


INTACT = "result = bool((x == 7).all())"


def rss(pid):
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def suspend(cuda, pid):
    cuda.lock(pid, 30)
    cuda.checkpoint(pid)


def timed(function, *args, **kwargs):
    began = time.monotonic()
    function(*args, **kwargs)
    return round(time.monotonic() - began, 3)


def raw_state(helper, pid):
    """The driver's own answer to a question for the state."""
    try:
        return helper.call("cuda.state", lane=pid, timeout_s=30, pid=pid)
    except DriverRefused as refusal:
        return refusal.name


class TestWhatSurvives:
    @pytest.mark.alone
    def test_everything_comes_back_bit_for_bit(self, cuda, gpus, subject, record):
        process = subject(EVERYTHING, DETERMINISTIC)
        twin = subject(EVERYTHING, DETERMINISTIC)
        before = process.run("result = digest()")
        needs = gpus.used_by(process.pid)
        (uuid,) = needs
        free = gpus.free(uuid)

        seconds = {"lock": timed(cuda.lock, process.pid, 30), "checkpoint": timed(cuda.checkpoint, process.pid)}
        freed = gpus.free(uuid) - free
        assert process.pid not in gpus.processes(uuid)
        assert freed >= 512 * 2**20
        with gpus.reservation(needs, 5):
            seconds["restore"] = timed(cuda.restore, process.pid)
        seconds["unlock"] = timed(cuda.unlock, process.pid)
        record(seconds=seconds, used=needs[uuid], freed=freed)

        assert process.run("result = digest()") == before
        assert process.run("result = pinned.is_pinned()")
        assert process.run(CONTINUE) == twin.run(CONTINUE)

    def test_ten_times(self, cuda, subject):
        process = subject(filled(64 * 2**20))
        for _ in range(10):
            suspend(cuda, process.pid)
            cuda.restore(process.pid)
            cuda.unlock(process.pid)
        assert process.run(INTACT)

    def test_a_lock_waits_for_submitted_work(self, cuda, subject, record):
        process = subject("import torch; x = torch.zeros(1, device='cuda')")
        process.run("[torch.cuda._sleep(1_000_000_000) for _ in range(2)]; x += 1")
        record(seconds=timed(cuda.lock, process.pid, 30))
        cuda.unlock(process.pid)
        assert process.run("result = x.item()") == 1

    def test_a_locked_process_hangs_in_its_next_cuda_call_only(self, cuda, subject):
        process = subject("import torch; x = torch.zeros(1, device='cuda')")
        cuda.lock(process.pid, 30)
        assert process.run("result = 6 * 7") == 42
        process.send("x += 1; result = x.item()")
        with pytest.raises(TimeoutError):
            process.receive(0.5)
        cuda.unlock(process.pid)
        assert process.receive() == 1


class TestWhatIsNotCuda:
    def test_a_process_that_only_uses_nvml(self, cuda, helper, subject, record):
        """NVML may initialise CUDA for its own ends; the driver then saves it like any other.  Else it holds files."""
        pytest.importorskip("pynvml", reason="pynvml is missing: pip install nvidia-ml-py")
        process = subject("import pynvml; pynvml.nvmlInit(); handle = pynvml.nvmlDeviceGetHandleByIndex(0)")
        libraries = "sorted({line.split('/')[-1].strip() for line in open('/proc/self/maps') if '/lib' in line})"
        record(libraries=[name for name in process.run(f"result = {libraries}") if "cuda" in name or "nvidia" in name])
        record(files=cuda.device_files(process.pid), driver_says=raw_state(helper, process.pid))
        if cuda.state(process.pid) is CudaState.NONE:
            assert cuda.device_files(process.pid)
            process.run("pynvml.nvmlShutdown()")
        else:
            suspend(cuda, process.pid)
            assert cuda.device_files(process.pid) == []
            cuda.restore(process.pid)
            cuda.unlock(process.pid)
            assert process.run("result = pynvml.nvmlDeviceGetMemoryInfo(handle).total") > 0
        record(files_at_the_end=cuda.device_files(process.pid))

    def test_nvml_beside_cuda(self, cuda, subject, record):
        pytest.importorskip("pynvml", reason="pynvml is missing: pip install nvidia-ml-py")
        process = subject(filled(2**20) + "; import pynvml; pynvml.nvmlInit(); pynvml.nvmlDeviceGetHandleByIndex(0)")
        suspend(cuda, process.pid)
        record(files_when_suspended=cuda.device_files(process.pid))
        cuda.restore(process.pid)
        cuda.unlock(process.pid)
        assert process.run("result = pynvml.nvmlDeviceGetCount()") >= 1
        assert process.run(INTACT)

    def test_the_library_loaded_and_not_initialised(self, cuda, helper, subject, record):
        process = subject("import ctypes; ctypes.CDLL('libcuda.so.1')")
        assert cuda.uses_cuda(process.pid)
        record(driver_says=raw_state(helper, process.pid))
        assert cuda.state(process.pid) is CudaState.NONE

    def test_torch_imported_and_not_used(self, cuda, subject, record):
        process = subject()
        record(uses_cuda=cuda.uses_cuda(process.pid), files=cuda.device_files(process.pid))
        assert cuda.state(process.pid) is CudaState.NONE


class TestWhatIsRefused:
    @pytest.mark.parametrize(
        ("kind", "code"),
        [
            (
                "managed",
                "import ctypes; cu, p = ctypes.CDLL('libcuda.so.1'), ctypes.c_uint64()\n"
                "result = cu.cuMemAllocManaged(ctypes.byref(p), ctypes.c_size_t(2**20), 1)",
            ),
            ("ipc", "handle = x.untyped_storage()._share_cuda_()"),
        ],
    )
    def test_memory_of_other_kinds(self, cuda, subject, record, kind, code):
        process = subject(filled(2**20))
        assert process.run(code) in (0, None)
        reached = "nothing"
        try:
            cuda.lock(process.pid, 10)
            reached = "lock"
            cuda.checkpoint(process.pid)
            reached = "checkpoint"
            cuda.restore(process.pid)
            reached = "restore"
        except GpuCkptError as error:
            record(refused=error.as_dict())
        record(kind=kind, reached=reached, state=cuda.state(process.pid).value)
        if cuda.state(process.pid) is CudaState.LOCKED:
            cuda.unlock(process.pid)
            assert process.run(INTACT)

    @pytest.mark.alone
    def test_a_full_gpu(self, cuda, gpus, subject):
        """The refusal costs nothing: once memory is free, the process is restored."""
        process = subject(filled(2 * GIB))
        needs = gpus.used_by(process.pid)
        (uuid,) = needs
        suspend(cuda, process.pid)
        hog = subject(filled(1))
        hog.run(f"hog = torch.empty({gpus.free(uuid) - GIB // 2}, dtype=torch.uint8, device='cuda')")
        with pytest.raises(GpuFull) as caught, gpus.reservation(needs, 5):
            pytest.fail("there is no space")
        assert caught.value.details["free"] < needs[uuid]
        assert cuda.state(process.pid) is CudaState.CHECKPOINTED
        hog.close()
        with gpus.reservation(needs, 5):
            cuda.restore(process.pid)
        cuda.unlock(process.pid)
        assert process.run(INTACT)


class TestWhatDestroys:
    """Why `Gpus.reservation` and `gpu_mapping` exist.  If one of these fails, the driver has become kinder."""

    @pytest.mark.alone
    def test_a_restore_with_too_little_gpu_memory(self, cuda, gpus, subject, record):
        process = subject(filled(2 * GIB))
        (uuid,) = gpus.used_by(process.pid)
        suspend(cuda, process.pid)
        hog = subject(filled(1))
        hog.run(f"hog = torch.empty({gpus.free(uuid) - GIB // 2}, dtype=torch.uint8, device='cuda')")
        with pytest.raises(CudaError) as first:
            cuda.restore(process.pid)
        record(first=first.value.details, state=cuda.state(process.pid).value)
        hog.close()
        with pytest.raises(GpuCkptError) as second:
            cuda.restore(process.pid)
        record(with_space=second.value.details, state_then=cuda.state(process.pid).value)
        assert first.value.details["cuda_result"] == 2

    @pytest.mark.two_gpus
    def test_a_partial_mapping(self, cuda, gpus, subject, record):
        first, second, *_ = [gpu.uuid for gpu in gpus.list()]
        process = subject(filled(2**20))
        suspend(cuda, process.pid)
        with pytest.raises(CudaError) as caught:
            cuda.restore(process.pid, {first: second})
        record(refused=caught.value.details, state=cuda.state(process.pid).value)


@pytest.mark.two_gpus
@pytest.mark.alone
def test_to_another_gpu_and_back(cuda, gpus, subject, record):
    """With one GPU visible to the process: the mapping covers all of them nevertheless."""
    node = [gpu.uuid for gpu in gpus.list()]
    process = subject(filled(GIB), {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0"})
    (home,) = gpus.used_by(process.pid)
    away = next(uuid for uuid in node if uuid != home)
    suspend(cuda, process.pid)
    seconds = {"there": timed(cuda.restore, process.pid, gpu_mapping(node, node, {home: away}))}
    cuda.unlock(process.pid)
    assert list(gpus.used_by(process.pid)) == [away]
    assert process.run(INTACT)
    suspend(cuda, process.pid)
    seconds["back"] = timed(cuda.restore, process.pid, gpu_mapping(node, node, {away: home}))
    cuda.unlock(process.pid)
    assert list(gpus.used_by(process.pid)) == [home]
    assert process.run(INTACT)
    record(seconds=seconds)


class TestTheHelper:
    def start_checkpoint(self, cuda, pid, pool):
        """A checkpoint of 8 GiB, under way for certain: the process's host memory has begun to grow."""
        cuda.lock(pid, 30)
        before = rss(pid)
        checkpoint = pool.submit(cuda.checkpoint, pid)
        deadline = time.monotonic() + 60
        while rss(pid) < before + GIB // 2 and not checkpoint.done():
            assert time.monotonic() < deadline
            threading.Event().wait(0.005)
        return checkpoint

    def test_a_checkpoint_does_not_keep_others_waiting(self, cuda, gpus, subject, record):
        large, small = subject(filled(8 * GIB)), subject(filled(2**20))
        uuid = gpus.list()[0].uuid
        with ThreadPoolExecutor(1) as pool:
            checkpoint = self.start_checkpoint(cuda, large.pid, pool)
            seconds = {"free": timed(gpus.free, uuid), "state": timed(cuda.state, small.pid)}
            at_that_time = checkpoint.done()
            seconds["suspend"] = timed(suspend, cuda, small.pid)
            seconds["still"] = timed(checkpoint.result, 300)
        record(seconds=seconds, checkpoint_was_done=at_that_time)
        assert seconds["free"] < 1
        for process in (large, small):
            cuda.restore(process.pid)
            cuda.unlock(process.pid)
            assert process.run(INTACT)

    def test_killed_in_the_middle_of_a_checkpoint(self, subject, record):
        process = subject(filled(8 * GIB))
        helper = Helper()
        cuda = Cuda(helper)
        with ThreadPoolExecutor(1) as pool:
            checkpoint = self.start_checkpoint(cuda, process.pid, pool)
            os.kill(helper.pid, signal.SIGKILL)
            try:
                checkpoint.result(60)
                record(helper="the checkpoint had ended before")
            except HelperGone:
                record(helper="gone")
        states = [cuda.state(process.pid).value]
        try:
            if cuda.state(process.pid) is not CudaState.CHECKPOINTED:
                cuda.unlock(process.pid)
                states.append(cuda.state(process.pid).value)
            else:
                cuda.restore(process.pid)
                cuda.unlock(process.pid)
            record(states=states, intact=process.run(INTACT))
        except (GpuCkptError, TimeoutError, EOFError, RuntimeError) as error:
            record(states=states, lost=str(error))
        finally:
            helper.close()

    def test_starting_it(self, record):
        """The cost for every fresh process, which one long-lived helper does not have."""
        with Cuda() as cuda:
            record(seconds={"first": timed(cuda.available), "second": timed(cuda.available)})
