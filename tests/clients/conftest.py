"""Fixtures: kernelspecs of ours on JUPYTER_PATH, and a kernel under the synchronous manager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import stock


@pytest.fixture
def kernelspecs(tmp_path: Path, runtime_base: Path, criu_binary: object, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a test whose kernelspecs `stock.OURS` and `stock.PLAIN` can be named by any client."""
    monkeypatch.setenv("JUPYTER_PATH", str(stock.write_kernelspecs(tmp_path, runtime_base)))
    return tmp_path


@pytest.fixture
def blocking(kernelspecs: Path) -> Iterator[stock.Blocking]:
    """A running kernel of ours under the synchronous `KernelManager`."""
    with stock.blocking(kernelspecs) as running:
        yield running
