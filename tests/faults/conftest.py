"""One kernel with state, and the guarantees that hold after every fault."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import pytest_asyncio
from faulty import Subject
from harness import notebook


@pytest.fixture
async def subject(tmp_path, runtime_base, criu_binary):
    """A running kernel in which ``x`` is 41."""
    async with notebook(tmp_path, runtime_base, drain_timeout=1.0) as kernel:
        assert kernel.lifecycle is not None, "started plainly"
        subject = await Subject.of(kernel, tmp_path)
        yield subject
        subject.close()


@pytest.fixture
async def heavy(tmp_path, runtime_base, criu_binary):
    """The same with 400 MB in it, so that CRIU can be met in the middle of its work."""
    async with notebook(tmp_path, runtime_base, drain_timeout=1.0) as kernel:
        assert kernel.lifecycle is not None, "started plainly"
        subject = await Subject.of(kernel, tmp_path, "ballast = bytearray(b'x') * 400_000_000")
        yield subject
        subject.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory, criu_binary):
    """One kernel for all faults of a module: what one of them leaves behind, the next one meets."""
    directory, base = tmp_path_factory.mktemp("shared"), Path(tempfile.mkdtemp(prefix="gc-"))
    async with notebook(directory, base) as kernel:
        subject = await Subject.of(kernel, directory)
        yield subject
        subject.close()
    shutil.rmtree(base, ignore_errors=True)
