"""``jupyter gpu-ckpt demo``: what it proves on the quickstart, and that it would notice a difference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("criu_binary")]

FINGERPRINT, CHECKPOINT = ["fingerprint"], ["checkpoint"]


def demo(directory: Path, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, IPYTHONDIR=str(directory / "ipython"), **(env or {}))
    environment.pop("PYTEST_CURRENT_TEST", None)
    argv = [sys.executable, "-m", "jupyter_gpu_ckpt", "demo", "--image-dir", str(directory / "images"), *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=200)


def written(directory: Path, *cells: tuple[list[str], str]) -> str:
    """A notebook of code cells, given as tags and source; its path."""
    notebook = nbformat.v4.new_notebook()
    for tags, source in cells:
        cell = nbformat.v4.new_code_cell(source)
        cell.metadata.tags = tags
        notebook.cells.append(cell)
    path = directory / "demo.ipynb"
    nbformat.write(notebook, path)
    return str(path)


def without_torch(directory: Path) -> dict[str, str]:
    """An environment in which the kernel finds no torch and no tqdm, whatever is installed."""
    (directory / "no").mkdir()
    for name in ("torch", "tqdm"):
        (directory / "no" / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(directory / "no"), os.environ.get("PYTHONPATH")]))}


def intact(done: subprocess.CompletedProcess[str], directory: Path) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["intact"] is True
    assert report["failed"] == []
    before, after = report["fingerprints"]
    assert before == after != ""
    steps = {way: [row["step"] for row in report[way]] for way in ("checkpoint", "restore")}
    assert {"quiesce", "dump", "publish", "end_process"} <= set(steps["checkpoint"])
    assert {"match", "criu_restore", "thaw"} <= set(steps["restore"])
    assert all(row["seconds"] >= 0 for way in steps for row in report[way])
    assert report["image_bytes"] > 1_000_000
    left = [path.name for path in (directory / "images").iterdir()] if (directory / "images").exists() else []
    assert [name for name in left if not name.startswith(".")] == [], "the image is gone once the kernel answered"
    return report


def test_the_quickstart_without_torch(tmp_path: Path):
    report = intact(demo(tmp_path, "--json", env=without_torch(tmp_path)), tmp_path)
    assert "tensors    None" in report["fingerprints"][0]


def test_the_quickstart_with_torch(tmp_path: Path):
    pytest.importorskip("torch", reason="torch is missing: make test installs it")
    report = intact(demo(tmp_path, "--json"), tmp_path)
    assert "tensors    None" not in report["fingerprints"][0]


def test_for_people_it_prints_both_halves_both_tables_and_the_verdict(tmp_path: Path):
    notebook = written(
        tmp_path,
        (FINGERPRINT, "x = 41; print('fingerprint', x)"),
        (CHECKPOINT, "pass"),
        (FINGERPRINT, "print('fingerprint', x)"),
    )
    done = demo(tmp_path, notebook)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fingerprint 41") == 2
    order = [done.stdout.index(word) for word in ("First half", "Checkpoint", "Second half", "Wake", "intact")]
    assert order == sorted(order)


def test_a_value_that_differs_is_noticed(tmp_path: Path):
    tick = "import time; print(time.monotonic_ns())"
    notebook = written(tmp_path, (FINGERPRINT, tick), (CHECKPOINT, "pass"), (FINGERPRINT, tick))
    done = demo(tmp_path, notebook, "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["intact"] is False
    assert len(set(report["fingerprints"])) == 2
    assert "NOT INTACT" in demo(tmp_path, notebook).stdout


def test_a_cell_that_fails_is_noticed(tmp_path: Path):
    notebook = written(
        tmp_path, (FINGERPRINT, "print(1)"), (CHECKPOINT, "assert False, 'as asked'"), (FINGERPRINT, "print(1)")
    )
    done = demo(tmp_path, notebook, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["failed"] == ["AssertionError: as asked"]


def test_a_fingerprint_of_nothing_proves_nothing(tmp_path: Path):
    notebook = written(tmp_path, (FINGERPRINT, "x = 1"), (CHECKPOINT, "pass"), (FINGERPRINT, "x"))
    done = demo(tmp_path, notebook, "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["intact"] is False


@pytest.mark.parametrize(
    "cells",
    [
        [(FINGERPRINT, "print(1)"), (FINGERPRINT, "print(1)")],
        [(FINGERPRINT, "print(1)"), (CHECKPOINT, "pass")],
        [(CHECKPOINT, "pass"), (FINGERPRINT, "print(1)"), (FINGERPRINT, "print(1)")],
    ],
    ids=["no checkpoint", "one fingerprint", "both in one half"],
)
def test_a_notebook_that_can_show_nothing_is_a_bad_request(tmp_path: Path, cells: list[tuple[list[str], str]]):
    done = demo(tmp_path, written(tmp_path, *cells), "--json")
    assert (done.returncode, done.stderr) == (64, "")
    assert json.loads(done.stdout)["error"]["code"] == "BAD_REQUEST"


@pytest.mark.parametrize("text", ["", "[]", "{}", "no json"])
def test_a_file_that_is_no_notebook_is_a_bad_request(tmp_path: Path, text: str):
    (tmp_path / "demo.ipynb").write_text(text)
    done = demo(tmp_path, str(tmp_path / "demo.ipynb"), "--json")
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (64, "BAD_REQUEST")


def test_a_cell_that_does_not_end_is_an_error_and_no_traceback(tmp_path: Path):
    notebook = written(
        tmp_path,
        (FINGERPRINT, "print(1)"),
        ([], "import time\nwhile True: time.sleep(0.05)"),
        (CHECKPOINT, "pass"),
        (FINGERPRINT, "print(1)"),
    )
    done = demo(tmp_path, notebook, "--json", "--timeout", "2")
    assert done.returncode == 70
    report = json.loads(done.stdout)["error"]
    assert report["code"] == "KERNEL_SILENT"
    assert "within 2 s: import time" in report["message"]
    assert "--timeout" in report["hint"]
    assert "Traceback" not in done.stderr


def test_a_kernel_that_there_is_not_is_a_bad_request(tmp_path: Path):
    done = demo(tmp_path, "--json", "--kernel", "no-such-kernel")
    assert done.returncode == 64
    assert json.loads(done.stdout)["error"]["code"] == "BAD_REQUEST"
    assert "Traceback" not in done.stderr
