"""Fixtures of the tests of what lies outside."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.criu.criu import Criu


@pytest.fixture
def directory():
    """One with a short path; it cannot be removed while anything is mounted in it."""
    path = Path(tempfile.mkdtemp(prefix="gc-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def home(directory):
    """The capsule's directory, with a place for an image in it."""
    (directory / "image").mkdir(0o700)
    return directory


@pytest.fixture
def capsule(directory):
    with Capsule.create(directory) as capsule:
        yield capsule


@pytest.fixture
def criu(criu_binary):
    return Criu(criu_binary.argv)


@pytest.fixture(scope="module")
def public_directory():
    """Unlike pytest's own, one that apt's download user and ordinary users can enter."""
    directory = Path(tempfile.mkdtemp(prefix="gpu-ckpt-test-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)
