"""Fixtures: a server that the tests of a module share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import Server, server


@pytest.fixture(scope="module")
def module_runtime_base() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="gc-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, module_runtime_base: Path, criu_binary) -> Iterator[Server]:
    """A server with the extension, shared by a module's tests, which do not wait long for a round of its policy."""
    config = "c.IdlePolicy.interval = 0.5"
    with server(tmp_path_factory.mktemp("server"), module_runtime_base, config=config) as running:
        yield running


@pytest.fixture
def kernel_id(live: Server) -> Iterator[str]:
    """A fresh kernel on the shared server."""
    id = live.start_kernel()
    live.run(id, "pass")
    yield id
    live.ask("DELETE", f"api/kernels/{id}")


@pytest.fixture(scope="module")
def untouched_kernel(live: Server) -> Iterator[str]:
    """A kernel on the shared server for requests that are refused: when all of them have been, it is as it was."""
    id = live.start_kernel()
    live.run(id, "x = 41")
    yield id
    assert live.run(id, "print(x)") == "41"
    live.ask("DELETE", f"api/kernels/{id}")
