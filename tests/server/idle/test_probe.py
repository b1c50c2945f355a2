"""The idle policy's view of kernels and GPUs; the driver and NVML are the fakes of the contract suite."""

from __future__ import annotations

import logging
import os
import socket
from types import SimpleNamespace

import pytest

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.lifecycle import host_memory
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.server.idle.policy import KernelSnapshot
from jupyter_gpu_ckpt.server.idle.probe import KernelProbe, computing, inspect
from jupyter_gpu_ckpt.testing.fake_cuda import LOCKED, FakeCuda, FakeDriver, FakeGpus

GIB = 2**30
A, B = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"


@pytest.fixture
def driver():
    return FakeDriver({A: 10 * GIB, B: 10 * GIB})


@pytest.fixture
def gpus(driver, tmp_path):
    return FakeGpus(driver, tmp_path / "locks")


class TestComputing:
    def test_only_the_one_that_does(self, driver, gpus):
        busy, idle = driver.start({A: GIB}, computing=7), driver.start({A: GIB})
        assert computing(gpus, {"busy": [busy], "idle": [idle]}, 0.0) == {"busy"}

    def test_a_child_counts_for_its_kernel(self, driver, gpus):
        kernel, child = driver.start({A: GIB}), driver.start({B: GIB}, computing=7)
        assert computing(gpus, {"k": [kernel, child]}, 0.0) == {"k"}

    def test_where_nvml_hides_the_computing_processes_all_on_that_gpu_may_compute(self, driver, gpus):
        driver.hides_processes = True
        driver.start({A: GIB}, computing=7)
        near, far = driver.start({A: GIB}), driver.start({B: GIB})
        assert computing(gpus, {"near": [near], "far": [far]}, 0.0) == {"near"}

    def test_a_process_that_nvml_does_not_know_may_be_any_of_those_that_compute(self, driver, gpus):
        """In a container NVML may count in process ids of the host."""
        foreign = driver.start({A: GIB}, computing=7)
        assert computing(gpus, {"k": [4711]}, 0.0) == {"k"}
        driver.remove(foreign)
        assert computing(gpus, {"k": [4711]}, 0.0) == set()


class TestCloser:
    def look(self, driver, monkeypatch, state, cuda_state=None, working=False):
        pid = os.getpid()
        process = driver.processes[driver.start({A: GIB}, pid=pid)]
        process.state = process.state if cuda_state is None else cuda_state
        capsule = SimpleNamespace(host_pid=pid, processes=lambda: [pid], other_processes=list)
        kernel = SimpleNamespace(engine=SimpleNamespace(cuda=FakeCuda(driver)), require_capsule=lambda: capsule)
        lifecycle = SimpleNamespace(capsule=capsule, engine=kernel.engine, kernel=kernel)
        monkeypatch.setattr(host_memory, "resident", lambda kernel: 2 << 20)
        gate = SimpleNamespace(working=working)
        return inspect(KernelSnapshot("k", "python3", state, 0.0), lifecycle, gate)

    def test_one_that_runs(self, driver, monkeypatch):
        look, pids = self.look(driver, monkeypatch, State.RUNNING, working=True)
        assert (look.on_gpu, look.working, look.process, look.resident) == (True, True, os.getpid(), 0)
        assert pids == [os.getpid()]

    def test_one_that_is_suspended_costs_host_memory(self, driver, monkeypatch):
        look, _ = self.look(driver, monkeypatch, State.SUSPENDED)
        assert not look.on_gpu
        assert look.resident == 2 << 20

    def test_one_in_the_middle_of_something_is_not_disturbed(self, driver, monkeypatch):
        driver.calls.clear()
        look, pids = self.look(driver, monkeypatch, State.RESUMING, LOCKED)
        assert (look.on_gpu, pids, driver.calls) == (False, [], [])


def test_the_tables_of_sockets_are_read_once_for_all_kernels(monkeypatch):
    read = []

    def sockets(table, pid="self", original=procfs.sockets):
        read.append(table)
        return original(table, pid)

    monkeypatch.setattr(procfs, "sockets", sockets)
    capsule = SimpleNamespace(host_pid=os.getpid(), processes=lambda: [os.getpid()], other_processes=list)
    home = SimpleNamespace(kernel_name="python3", runtime_dir=None, known_as=None, sockets=None)
    monkeypatch.setattr(host_memory, "resident", lambda kernel: 0)
    lifecycle = SimpleNamespace(capsule=capsule, home=home, state=State.SUSPENDED, kernel=None)
    gate = SimpleNamespace(last_activity=0.0, queries=0)
    requests = SimpleNamespace(protection=lambda: None)
    provisioner = SimpleNamespace(lifecycle=lifecycle, gate=gate, agent_requests=requests)
    probe = KernelProbe(logging.getLogger(__name__))
    with socket.create_server(("127.0.0.1", 0)):
        for _ in range(2):
            assert len(probe.snapshots({str(number): provisioner for number in range(20)})) == 20
            assert sorted(read) == ["tcp", "tcp6", "unix"]
            read.clear()
