"""Jupyter's data directory is found by one rule, with and without Jupyter installed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from jupyter_core.paths import jupyter_data_dir

from jupyter_gpu_ckpt.criu import install
from jupyter_gpu_ckpt.image.keys import default_key_dir
from jupyter_gpu_ckpt.kernel.directories import default_image_dir
from jupyter_gpu_ckpt.paths import data_directory

PACKAGE = Path(__file__).resolve().parents[1] / "jupyter_gpu_ckpt"
VARIABLES = ("JUPYTER_DATA_DIR", "XDG_DATA_HOME", "JUPYTER_PLATFORM_DIRS", "HOME")


@pytest.fixture(
    params=[
        {"JUPYTER_DATA_DIR": "/a", "XDG_DATA_HOME": "/b"},
        {"XDG_DATA_HOME": "/b"},
        {"HOME": "link"},
        {"HOME": "."},
        {"JUPYTER_DATA_DIR": "", "XDG_DATA_HOME": "", "HOME": "real"},
        {},
    ],
    ids=str,
)
def environment(request, monkeypatch, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    for name in (*VARIABLES, "JUPYTER_GPU_CKPT_IMAGES", "JUPYTER_GPU_CKPT_KEYS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in request.param.items():
        monkeypatch.setenv(name, str(tmp_path / value) if name == "HOME" and value != "." else value)


def test_all_lies_below_the_directory_that_jupyter_names(environment):
    ours = Path(jupyter_data_dir()) / "gpu-ckpt"
    assert data_directory() == ours
    assert install.default_prefix() == ours / "criu"
    assert default_image_dir() == ours / "images"
    assert default_key_dir() == ours / "keys"


def test_it_is_the_same_before_jupyter_is_installed(environment, monkeypatch):
    named = data_directory()
    monkeypatch.setitem(sys.modules, "jupyter_core.paths", None)
    assert data_directory() == named


def test_nobody_else_derives_it():
    for path in PACKAGE.rglob("*.py"):
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        words = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        if path != PACKAGE / "paths.py":
            assert "jupyter_data_dir" not in names and not words & {"JUPYTER_DATA_DIR", "XDG_DATA_HOME"}, path
