"""Fixtures: a real browser, and real servers for it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from desktop import Desktop, SharedTab, built_front_end, find_chromium
from live import Server

#: Where the pictures of a run are kept; a directory of its own if the environment names none.
PICTURES = os.environ.get("GPU_CKPT_PICTURES")


@pytest.fixture(scope="session")
def chromium() -> str:
    """The browser's path; without it, or without the built front end, these tests have nothing to look at."""
    pytest.importorskip("playwright", reason="playwright is not installed (the extra `test` has it)")
    pytest.importorskip("jupyterlab", reason="jupyterlab is not installed (the extra `test` has it)")
    path = find_chromium()
    if path is None:
        pytest.skip(reason="no Chromium on this host: `apt-get install chromium`")
    if (reason := built_front_end()) is not None:
        pytest.skip(reason=reason)
    return path


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the screenshots."""
    directory = Path(PICTURES) if PICTURES else tmp_path_factory.mktemp("pictures")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture(scope="module")
def desktop(chromium: str, pictures: Path) -> Iterator[Desktop]:
    """The browser.  Ended with the module: playwright keeps an event loop running that async tests would meet."""
    with Desktop.open(chromium, pictures) as running:
        yield running


@pytest.fixture(scope="module")
def page(desktop: Desktop, jupyter: Server) -> Iterator[SharedTab]:
    """JupyterLab, loaded once for a module, of whose fixture ``jupyter`` it is."""
    with desktop.shared_tab(jupyter) as page:
        yield page


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """A short-pathed directory for the module's sockets."""
    directory = Path(tempfile.mkdtemp(prefix="gc-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
