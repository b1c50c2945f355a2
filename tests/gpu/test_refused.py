"""Kernels that the driver does not suspend: the library swaps out their allocations all the same."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from harness import notebook, until

from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.lifecycle.plans import State

# What is free on the GPU is measured.
pytestmark = [pytest.mark.gpu, pytest.mark.alone]

SETUP = """
import torch
torch.manual_seed(7)
tensors = [torch.rand(64 << 20, device="cuda") for _ in range(8)]
torch.cuda.synchronize()
"""
DIGEST = "print([float(tensor.double().sum()) for tensor in tensors])"
PROFILER = """
from torch.profiler import ProfilerActivity, profile
with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
    (tensors[0] * 2).sum().item()
del profiled
"""
MANAGED = """
import ctypes
managed, size = ctypes.c_void_p(), 64 << 20
assert ctypes.CDLL("libcuda.so.1").cuMemAllocManaged(ctypes.byref(managed), ctypes.c_size_t(size), 1) == 0
ctypes.memset(managed, 7, size)
"""
MANAGED_INTACT = "print(ctypes.string_at(managed, size) == bytes([7]) * size)"
#: Bytes of the tensors: those that must leave the GPU.
BYTES = 8 * (64 << 20) * 4


@pytest.fixture
async def multi_process_service(runtime_base, monkeypatch):
    """The multi-process service (MPS), for programs with this environment only."""
    if (control := shutil.which("nvidia-cuda-mps-control")) is None:
        pytest.skip("the multi-process service is not on this machine")
    pipes = runtime_base / "mps"
    pipes.mkdir()
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        monkeypatch.setenv(name, str(pipes))
    subprocess.run([control, "-d"], check=True, timeout=60)
    yield
    subprocess.run([control], input=b"quit -t 20\n", check=True, timeout=60)
    await until(lambda: not (pipes / "nvidia-cuda-mps-control.pid").exists())


@pytest.mark.timeout(600)
async def test_a_kernel_of_the_multi_process_service_is_suspended(
    multi_process_service, tmp_path, runtime_base, gpus, record
):
    await test_what_the_driver_refuses_is_suspended(tmp_path, runtime_base, gpus, record, "MPS")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("reason", ["profiler", "managed memory"])
async def test_what_the_driver_refuses_is_suspended(tmp_path, runtime_base, gpus, record, reason):
    pytest.importorskip("torch", reason="PyTorch is not installed on this machine")
    async with notebook(tmp_path, runtime_base) as kernel:
        await kernel.run(SETUP)
        await kernel.run({"profiler": PROFILER, "managed memory": MANAGED, "MPS": ""}[reason])
        digest = await kernel.run(DIGEST)
        uuid = next(iter(gpus.used_by(kernel.lifecycle.capsule.host_pid)))
        with pytest.raises(GpuCkptError) as refused:
            await kernel.provisioner.checkpoint()
        record(code=refused.value.code, **{"refused " + name: value for name, value in refused.value.details.items()})
        assert kernel.lifecycle.state is State.RUNNING
        assert await kernel.run(DIGEST) == digest
        codes = {"profiler": "PROFILER_USED", "managed memory": "MANAGED_MEMORY", "MPS": "MPS"}
        assert refused.value.code == codes[reason]
        for _ in range(3):
            before = gpus.free(uuid)
            await kernel.provisioner.suspend()
            freed = gpus.free(uuid) - before
            record(freed=freed, frozen=kernel.lifecycle.kernel.fast_path().is_frozen(), out=kernel.steps.seconds())
            assert freed >= BYTES, "the memory is others' to use"
            assert await kernel.run(DIGEST) == digest
            assert kernel.lifecycle.state is State.RUNNING
            if reason == "managed memory":
                assert await kernel.run(MANAGED_INTACT) == "True"
