"""Fixtures that every test may use."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from harness import notebook

from jupyter_gpu_ckpt.engine.criu_install import find


@pytest.fixture(scope="session")
def criu_binary():
    """The CRIU of this host; without one the tests that need it fail: it is a requirement, not an option."""
    return find()


@pytest.fixture
def runtime_base():
    """A short-pathed directory for sockets: pytest's own are too long for the path of a unix socket."""
    directory = Path(tempfile.mkdtemp(prefix="gc-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
async def kernel(tmp_path, runtime_base, criu_binary):
    """A running kernel in a capsule behind a gate."""
    async with notebook(tmp_path, runtime_base) as running:
        assert running.lifecycle is not None, "started plainly"
        yield running
