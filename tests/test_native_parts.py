"""An installation without the programs in C says so, in doctor and when a server starts; elsewhere none is built."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from live import server

import jupyter_gpu_ckpt
from jupyter_gpu_ckpt.doctor import checks, probes

PACKAGE = Path(jupyter_gpu_ckpt.__file__).resolve().parent
ROOT = PACKAGE.parent


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A copy of the package without its programs in C, which programs that the test starts import."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(PACKAGE, tmp_path / "site" / PACKAGE.name, ignore=ignored)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)  # `python -m` imports from here first


def finding() -> dict[str, object]:
    """The doctor's finding, by the package that a new process imports."""
    command = [sys.executable, "-m", "jupyter_gpu_ckpt", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return next(one for one in json.loads(done.stdout)["findings"] if one["check"] == "native-parts")


def test_the_doctor_names_the_missing_programs_and_what_they_are_for(bare):
    found = finding()
    assert (found["ok"], found["level"]) == (False, "warning")
    for name, effect in checks.NATIVE_PARTS.items():
        assert f"{name}: {effect}" in str(found["message"])
    assert "compiler" in str(found["fix"])


def test_each_program_is_looked_for_by_itself(tmp_path, monkeypatch):
    names = {"fastpath": "jupyter_gpu_ckpt.cuda.fastpath.built", "root": "jupyter_gpu_ckpt.capsule.root_program.built"}
    assert set(names) == set(checks.NATIVE_PARTS)
    for name, built in names.items():
        with monkeypatch.context() as patch:
            for other in names.values():
                patch.setattr(other, lambda: tmp_path)
            assert probes.missing_native_parts() == []
            patch.setattr(built, lambda: None)
            assert probes.missing_native_parts() == [name]


def test_a_server_says_so_at_its_start(bare, tmp_path, runtime_base, criu_binary):
    with server(tmp_path / "server", runtime_base) as running:
        assert "lacks programs in C" in running.log and "gcc" in running.log


#: What a build on another machine sees, as a program that is run before setup.py.
OTHERS = {
    "aarch64": "import platform; platform.machine = lambda: 'aarch64'",
    "another C library": "import os\ndef confstr(name): raise ValueError(name)\nos.confstr = confstr",
    "darwin": "import sys; sys.platform = 'darwin'",
}


@pytest.mark.parametrize("other", OTHERS)
def test_the_programs_are_built_on_no_other_machine(other, tmp_path):
    built = f"build_ext --build-lib {tmp_path} --build-temp {tmp_path}".split()
    code = (
        f"import runpy, sys, setuptools\n{OTHERS[other]}\nsys.argv = ['setup.py', *{built}]\nrunpy.run_path('setup.py')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "runs on Linux on x86_64 with glibc" in done.stderr and other in done.stderr
    assert list(tmp_path.rglob("*.so")) == []


def test_an_sdist_can_be_made_on_any_machine(tmp_path):
    """Building the programs is refused, not packing their source."""
    other = OTHERS["aarch64"]
    code = f"import runpy, sys, setuptools\n{other}\nsys.argv = ['setup.py', '--version']\nrunpy.run_path('setup.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[-1] == jupyter_gpu_ckpt.__version__, done.stderr
