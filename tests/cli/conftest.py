"""A user with a configuration directory, images, and a command line that runs in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jupyter_gpu_ckpt import cli
from jupyter_gpu_ckpt.image.store import Store


class Done(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The document of ``--json``, which must be the whole of stdout."""
        return json.loads(self.out)


@pytest.fixture
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jupyter's configuration directory of this user, empty; and no environment variable that says something else."""
    directory = tmp_path / "config"
    directory.mkdir()
    for name in ("JUPYTER_GPU_CKPT_IMAGES", "JUPYTER_CONFIG_PATH", "JUPYTER_NO_CONFIG", "NO_COLOR", "_ARGCOMPLETE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(directory))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return directory


@pytest.fixture
def store(configuration: Path, tmp_path: Path) -> Store:
    """The images in the directory that ``jupyter_server_config.py`` sets."""
    directory = tmp_path / "configured"
    (configuration / "jupyter_server_config.py").write_text(f"c.GpuCkptProvisioner.image_dir = {str(directory)!r}\n")
    return Store(directory)


@pytest.fixture
def run(configuration: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    def run(*arguments: str) -> Done:
        capsys.readouterr()
        status = cli.main(list(arguments))
        return Done(status, *capsys.readouterr())

    return run
