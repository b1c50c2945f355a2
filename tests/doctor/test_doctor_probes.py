"""The probes of a host, each on the real one."""

import json
import shutil
import subprocess
import sys
import zipfile
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
    with pytest.raises(probes.NoIpykernel, match="No module named ipykernel") as caught:
        probes.default_kernel()
    assert caught.value.python == str(python)


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


@pytest.fixture
def no_configuration(monkeypatch, tmp_path):
    """A directory for the only files of configuration that Jupyter finds."""
    monkeypatch.setattr("jupyter_core.paths.jupyter_config_path", lambda: [str(tmp_path)])
    return tmp_path / "jupyter_server_config.d"


def enable(directory, enabled):
    directory.mkdir()
    content = {"ServerApp": {"jpserver_extensions": {"jupyter_gpu_ckpt": enabled}}}
    (directory / "jupyter_gpu_ckpt.json").write_text(json.dumps(content))


def test_a_server_extension_that_nothing_enables(no_configuration):
    assert probes.server_extension({}) == probes.ServerExtension(False)
    assert probes.server_extension({"jupyter_gpu_ckpt": True}) == probes.ServerExtension(True)


@pytest.mark.parametrize("enabled", [True, False])
def test_a_server_extension_as_a_file_and_the_configuration_have_it(no_configuration, enabled):
    enable(no_configuration, enabled)
    assert probes.server_extension({}) == probes.ServerExtension(enabled)
    assert probes.server_extension({"jupyter_gpu_ckpt": not enabled}) == probes.ServerExtension(not enabled)


def test_a_server_extension_that_cannot_be_loaded(no_configuration, monkeypatch):
    enable(no_configuration, True)
    monkeypatch.setitem(sys.modules, "jupyter_gpu_ckpt.server.app", None)
    found = probes.server_extension({})
    assert found.enabled and "jupyter_gpu_ckpt.server.app" in found.problem


def test_no_server_no_server_extension(monkeypatch):
    monkeypatch.setitem(sys.modules, "jupyter_server.extension.config", None)
    assert probes.server_extension({}) is None


def test_an_editable_install_enables_the_server_extension(tmp_path):
    """Setuptools leaves data files out of it by itself."""
    source, repository = tmp_path / "source", Path(__file__).parents[2]
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(repository / name, source)
    for name in ("jupyter_gpu_ckpt", "notebooks"):
        shutil.copytree(repository / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    code = f"from setuptools import build_meta; print('made', build_meta.build_editable({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith("jupyter_server_config.d/jupyter_gpu_ckpt.json"))
        assert path.split(".data/")[1].startswith("data/etc/jupyter/")
        assert json.loads(wheel.read(path))["ServerApp"]["jpserver_extensions"] == {"jupyter_gpu_ckpt": True}
