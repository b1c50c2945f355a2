"""The RAM tier in a whole server: suspended by the policy or the notebook, resumed by a cell.  The GPUs are fakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live import Server, server, until
from tab import OPENING, tab

from jupyter_gpu_ckpt.testing.fake_host import allocation_cell

GPU = "GPU-fake-a"
SUPPORT = str(Path(__file__).resolve().parents[1] / "support")
GIB = 1 << 30
CONFIG = """
import sys
from pathlib import Path
sys.path.append({support!r})
from jupyter_gpu_ckpt.testing.fake_host import install
install({{{gpu!r}: 8 << 30}}, Path(c.GpuCkptProvisioner.image_dir))
c.IdlePolicy.interval = 0.1
{more}
"""


@pytest.fixture
def on_gpu(tmp_path, runtime_base, criu_binary) -> Iterator[Server]:
    """A server with a fake GPU, whose policy suspends after a second."""
    config = CONFIG.format(support=SUPPORT, gpu=GPU, more="c.IdlePolicy.suspend_after = 1.0")
    with server(tmp_path, runtime_base, config=config) as running:
        yield running


@pytest.fixture(scope="module")
def idle_server(tmp_path_factory, module_runtime_base, criu_binary) -> Iterator[Server]:
    """The same with a policy that never does anything."""
    more = "c.IdlePolicy.suspend_after = c.IdlePolicy.checkpoint_after = 0"
    home = tmp_path_factory.mktemp("patient")
    with server(home, module_runtime_base, config=CONFIG.format(support=SUPPORT, gpu=GPU, more=more)) as running:
        yield running


@pytest.fixture
def patient(idle_server: Server) -> Iterator[Server]:
    """The patient server, whose kernels end with the test."""
    yield idle_server
    for kernel in idle_server.get("api/kernels"):
        idle_server.ask("DELETE", f"api/kernels/{kernel['id']}")


def hold(running: Server, kernel_id: str, count: int = GIB) -> None:
    running.run(kernel_id, allocation_cell({GPU: count}))
    running.get(f"gpu-ckpt/kernels/{kernel_id}/preflight")  # the host that is not there learns of it by being asked


def state(running: Server, kernel_id: str) -> str:
    return running.get(f"api/kernels/{kernel_id}")["gpu_ckpt"]["state"]


def free(running: Server) -> int:
    (gpu,) = running.get("gpu-ckpt/status")["gpus"]
    return gpu["free"]


def process(running: Server, kernel_id: str) -> str:
    return running.run(kernel_id, "import os; print(os.getpid(), x)")


def test_an_idle_kernel_with_device_memory_is_suspended_and_its_next_cell_resumes_it(on_gpu):
    holder, other = on_gpu.start_kernel(), on_gpu.start_kernel()
    for kernel_id in (holder, other):
        on_gpu.run(kernel_id, "x = 1")
    hold(on_gpu, holder)
    with tab(on_gpu, holder) as opened:
        until(lambda: state(on_gpu, holder) == "suspended")
        assert (free(on_gpu), state(on_gpu, other)) == (8 * GIB, "running"), "that one holds nothing"
        document = on_gpu.get(f"gpu-ckpt/kernels/{holder}")
        assert (document["device_bytes_swapped_out"], document["image"]) == (GIB, None)
        info, *_ = [opened.send(*request) for request in OPENING]
        assert opened.reply(info)["status"] == "ok"
        assert state(on_gpu, holder) == "suspended", "looking wakes nothing"
        assert opened.run("print(x)") == "1"
        until(lambda: state(on_gpu, holder) == "suspended")


def test_a_rule_of_the_kernelspec_and_the_limit_of_host_memory(tmp_path, runtime_base, criu_binary):
    more = "c.IdlePolicy.kernelspecs = {'python3': {'suspend_after': 0.5}}\nc.IdlePolicy.suspended_memory_limit = 1"
    config = CONFIG.format(support=SUPPORT, gpu=GPU, more=more)
    with server(tmp_path, runtime_base, config=config) as running, running.events() as next_event:
        kernel_id = running.start_kernel()
        running.run(kernel_id, "x = 1")
        hold(running, kernel_id)
        states = []
        while "checkpointed" not in states:
            event = next_event()
            if event["schema_id"].endswith("/kernel_state/v1"):
                states.append(event["state"])
        assert states[-4:] == ["suspending", "suspended", "dumping", "checkpointed"]
        assert running.get("gpu-ckpt/images")[0]["device_bytes"] == {GPU: GIB}
        assert running.run(kernel_id, "print(x)") == "1"


def test_suspend_by_the_notebook_and_resume_by_the_next_cell(patient):
    kernel_id = patient.start_kernel()
    patient.run(kernel_id, "x = 1")
    hold(patient, kernel_id)
    pid = process(patient, kernel_id)
    said = patient.run(kernel_id, "%gpu_checkpoint --suspend")
    assert "Suspend after this cell" in said
    until(lambda: state(patient, kernel_id) == "suspended")
    assert free(patient) == 8 * GIB
    assert process(patient, kernel_id) == pid
    until(lambda: state(patient, kernel_id) == "running")
    assert free(patient) == 7 * GIB


def test_from_ram_to_disk_and_back_with_the_device_memory(patient):
    kernel_id = patient.start_kernel()
    patient.run(kernel_id, "x = 1")
    hold(patient, kernel_id)
    before = process(patient, kernel_id)
    for verb in ("suspend", "checkpoint"):
        assert patient.do(kernel_id, verb)["error"] is None
    assert (free(patient), patient.get("gpu-ckpt/images")[-1]["device_bytes"]) == (8 * GIB, {GPU: GIB})
    assert process(patient, kernel_id) == before
    until(lambda: state(patient, kernel_id) == "running")
    assert free(patient) == 7 * GIB
    metrics = dict(line.rsplit(" ", 1) for line in patient.ask("GET", "metrics").text.splitlines())
    assert float(metrics["gpu_ckpt_device_bytes_freed_total"]) >= GIB
    assert float(metrics["gpu_ckpt_gpu_seconds_freed_total"]) > 0


def test_without_gpu_memory_a_wake_is_refused_and_a_cell_runs_once_there_is_some(patient):
    first, second = patient.start_kernel(), patient.start_kernel()
    for kernel_id in (first, second):
        patient.run(kernel_id, "x = 1")
    hold(patient, first, 6 * GIB)
    assert patient.do(first, "suspend")["error"] is None
    hold(patient, second, 6 * GIB)
    job = patient.do(first, "resume")
    assert (job["error"]["code"], state(patient, first)) == ("GPU_FULL", "suspended")
    assert patient.do(second, "suspend")["error"] is None
    assert patient.run(first, "print(x)") == "1"
