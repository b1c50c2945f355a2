"""The idle policy on a real GPU: computing kernels are detected, idle ones with device memory are suspended."""

from __future__ import annotations

import time

import pytest
import waiting
from harness import notebook, until

from jupyter_gpu_ckpt.server.idle.loop import IdlePolicy
from jupyter_gpu_ckpt.server.idle.probe import computing

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LOOP = """
import torch
a = torch.randn(4096, 4096, device='cuda')
until = __import__('time').monotonic() + {seconds}
while __import__('time').monotonic() < until:
    a = (a @ a).clamp(-1, 1)
    torch.cuda.synchronize()
"""
HOLD = "import torch; held = torch.ones(1 << 28, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize()"
BEHIND = """
import threading, torch
stop = threading.Event()
def work():
    a = torch.randn(4096, 4096, device='cuda')
    while not stop.is_set():
        a = (a @ a).clamp(-1, 1)
        torch.cuda.synchronize()
worker = threading.Thread(target=work, daemon=True)
worker.start()
"""


@pytest.mark.alone
def test_nvml_names_the_computing_processes(subject, gpus, record):
    busy, idle = subject(), subject(HOLD)
    began = time.time()
    busy.run(LOOP.format(seconds=3))
    shares = {gpu.uuid: gpus.process_utilisation(gpu.uuid, began) for gpu in gpus.list()}
    record(
        shares=shares,
        busy=busy.pid,
        idle=idle.pid,
        listed={gpu.uuid: sorted(gpus.processes(gpu.uuid)) for gpu in gpus.list()},
        utilisation={gpu.uuid: gpus.utilisation(gpu.uuid) for gpu in gpus.list()},
    )
    assert "busy" in computing(gpus, {"busy": [busy.pid], "idle": [idle.pid]}, began)
    kernels = {"busy": [busy.pid], "idle": [idle.pid]}
    waiting.until(lambda: not computing(gpus, kernels, time.time() - 0.5), "nobody computes any more")


async def test_an_idle_kernel_with_device_memory_is_suspended_and_one_that_computes_in_a_thread_is_not(
    tmp_path, runtime_base, record
):
    for name in ("holder", "worker"):
        (tmp_path / name).mkdir()
    async with (
        notebook(tmp_path / "holder", runtime_base) as holder,
        notebook(tmp_path / "worker", runtime_base) as worker,
    ):
        await holder.run(HOLD, 120)
        await worker.run(BEHIND, 120)
        kernels = {"holder": holder.provisioner, "worker": worker.provisioner}
        policy = IdlePolicy(lambda: kernels, suspend_after=5, checkpoint_after=0, interval=0.5)
        policy.start()
        try:
            await holder.settled("suspended", 60)
            idle = policy.outlook("worker")["idle_s"]
            record(idle_of_the_one_that_computes=idle)
            assert worker.state == "running"
            assert idle < 5
            assert await holder.run("print(int(held.sum()))", 120) == str(1 << 28)
            await worker.run("stop.set(); worker.join()", 60)
            await until(lambda: worker.state == "suspended" and holder.state == "suspended", 60)
        finally:
            await policy.stop()
