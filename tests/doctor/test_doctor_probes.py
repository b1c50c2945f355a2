"""The probes of a host, each on the real one."""

import json
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.doctor import probes
from jupyter_gpu_ckpt.errors import CudaUnavailable
from jupyter_gpu_ckpt.testing.fake_cuda import FakeCuda, FakeDriver


def test_place_of_a_directory_that_is_not_there_yet(tmp_path):
    place = probes.directory_facts(tmp_path / "a/b")
    assert place.path == tmp_path and place.free > 0 and place.problem == "" and place.filesystem != "unknown"


def test_place_in_a_file_system_that_cannot_be_written():
    assert probes.directory_facts(Path("/proc/nowhere")).problem
    assert probes.directory_facts(Path("/proc/nowhere")).filesystem == "proc"


def test_sysctl():
    assert int(probes.sysctl("kernel.pid_max")) > 0
    assert probes.sysctl("kernel.no_such_setting") is None


def test_default_kernel_of_this_environment():
    import ipykernel

    assert probes.default_kernel() == ipykernel.__version__


def test_default_kernel_without_ipykernel(monkeypatch, tmp_path):
    spec = tmp_path / "kernels/python3"
    spec.mkdir(parents=True)
    python = tmp_path / "python-of-another-environment"
    python.write_text("#!/bin/sh\necho 'No module named ipykernel' >&2; exit 1\n")
    python.chmod(0o755)
    content = {"argv": [str(python), "-m", "ipykernel_launcher"], "display_name": "x", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(content))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    with pytest.raises(LookupError, match="No module named ipykernel"):
        probes.default_kernel()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Mon\nGCC version: 13\n", "580.159.04"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n", "580.95.05"),
        ("something else", "0"),
    ],
)
def test_driver_version_from_the_kernel_module(text, version, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert probes.nvidia_driver() == version


@pytest.fixture
def driver(monkeypatch):
    driver = FakeDriver({})
    monkeypatch.setattr("jupyter_gpu_ckpt.cuda.cuda.Cuda", lambda: FakeCuda(driver))
    return driver


def test_a_driver_that_can_checkpoint_is_found(driver):
    probes.require_cuda()


def test_a_driver_that_cannot_checkpoint_is_one(driver, monkeypatch):
    def unavailable():
        raise CudaUnavailable("No.", reason="driver-too-old")

    monkeypatch.setattr(driver, "_cuda_open", unavailable)
    with pytest.raises(CudaUnavailable):
        probes.require_cuda()
