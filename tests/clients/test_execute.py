"""``jupyter execute``, ``jupyter run`` and ``jupyter nbconvert --execute`` run cells on kernels that sleep in between.

Neither passes its configuration to provisioners: the variable in the environment names ours, or the kernelspec does.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from stock import OURS, PLAIN, environment, write_kernelspecs

CELLS = ["x = 41", "%gpu_checkpoint", "x += 1; x"]


@pytest.mark.parametrize("by", ["the environment", "the kernelspec"])
@pytest.mark.parametrize("command", ["execute", "nbconvert"])
def test_a_notebook_that_a_command_runs_sleeps_and_wakes(tmp_path: Path, runtime_base: Path, command: str, by: str):
    path = tmp_path / "notebook.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in CELLS]), path)
    name = PLAIN if by == "the environment" else OURS
    env = environment(tmp_path) | {"JUPYTER_PATH": str(write_kernelspecs(tmp_path, runtime_base))}
    env |= {"JUPYTER_GPU_CKPT_IMAGES": str(tmp_path / "images"), "XDG_RUNTIME_DIR": str(runtime_base)}
    if by == "the environment":
        env["JUPYTER_DEFAULT_PROVISIONER_NAME"] = "gpu-ckpt-provisioner"
    options = {
        "execute": ["--inplace", f"--kernel_name={name}"],
        "nbconvert": ["--execute", "--inplace", "--to=notebook", f"--ExecutePreprocessor.kernel_name={name}"],
    }
    argv = [sys.executable, "-m", "jupyter", command, *options[command], str(path)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    _, asked, last = nbformat.read(path, as_version=4).cells
    assert "after this cell" in asked.outputs[0].text
    assert last.outputs[0].data["text/plain"] == "42"
    assert (tmp_path / "images").is_dir(), "it has slept"
    assert list((tmp_path / "images").glob("*/manifest.json")) == [], "and has continued from its image"


@pytest.mark.parametrize("asleep", [False, True])
@pytest.mark.parametrize("source", ["file", "stdin"])
def test_a_script_that_a_command_runs_ends_without_an_error(
    tmp_path: Path, runtime_base: Path, source: str, asleep: bool
):
    """The command ends its kernel as the interpreter ends, when no thread can be started any more."""
    script = "print(41 + 1)\n" + "%gpu_checkpoint\n" * asleep
    (tmp_path / "script.py").write_text(script)
    env = environment(tmp_path) | {"JUPYTER_PATH": str(write_kernelspecs(tmp_path, runtime_base))}
    argv = [sys.executable, "-m", "jupyter", "run", f"--kernel={OURS}"]
    argv += [str(tmp_path / "script.py")] if source == "file" else []
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=120, input=script)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert done.stdout.startswith("42\n")
    assert list((tmp_path / "images").glob("*/manifest.json")) == []
