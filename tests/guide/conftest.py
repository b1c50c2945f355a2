"""Fixtures that the tests of a page need beside what lies here."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from desktop import built_front_end, find_chromium
from fresh_machine import FreshMachine, fresh_machine, why_not


@pytest.fixture
def empty_machine() -> Iterator[Callable[[str], FreshMachine]]:
    """Makes a machine of the given name on which nothing is yet; it and its files go at the end."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    pytest.importorskip("playwright", reason="playwright is not installed (the extra `test`)")
    if find_chromium() is None:
        pytest.skip("no Chromium on this host: `apt-get install chromium`")
    with contextlib.ExitStack() as stack:

        def make(name: str) -> FreshMachine:
            place = stack.enter_context(tempfile.TemporaryDirectory(prefix="gc-guide-"))
            return stack.enter_context(fresh_machine(Path(place), name))

        yield make


@pytest.fixture(scope="session")
def release_wheel(tmp_path_factory) -> Path:
    """The wheel of `make release`, or the one that `$GPU_CKPT_WHEEL` names."""
    if given := os.environ.get("GPU_CKPT_WHEEL"):
        return Path(given)
    if why_not := built_front_end():
        pytest.skip(why_not)
    output = tmp_path_factory.mktemp("release") / "dist"
    command = [sys.executable, Path(__file__).parents[2] / "scripts/release", "--output", output, "--no-bill"]
    subprocess.run(command, check=True, timeout=600)
    (made,) = output.glob("*.whl")
    return made
