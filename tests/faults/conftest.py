"""One kernel with state, and the guarantees that hold after every fault."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
from faulty import Subject
from harness import alive, descendants, notebook, until


def has_family(request) -> bool:
    """Return whether the test asks for children: see `family.alone_and_with_family`."""
    return getattr(request, "param", False)


@asynccontextmanager
async def subject_of(request, directory, base, code="", **traits):
    """A `Subject` that leaves nothing behind but its images: no process, no mount, no shared memory."""
    mounts, processes = Path("/proc/self/mountinfo").read_text(), descendants(os.getpid())
    async with notebook(directory, base, **traits) as kernel:
        assert kernel.lifecycle is not None, "started plainly"
        subject = await Subject.of(kernel, directory, code, family=has_family(request))
        yield subject
        subject.close()
    await until(lambda: not alive(list(set(descendants(os.getpid())) - set(processes))))
    left = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if line not in mounts]
    assert not [line for line in left if str(directory) in line or str(base) in line]
    assert not [name for name in subject.shared_memory if Path("/dev/shm", name).exists()]


@pytest.fixture
async def subject(request, tmp_path, runtime_base, criu_binary):
    """A running kernel in which ``x`` is 41."""
    async with subject_of(request, tmp_path, runtime_base, drain_timeout=5.0) as subject:
        yield subject


@pytest.fixture
async def heavy(request, tmp_path, runtime_base, criu_binary):
    """The same with 400 MB in it, so that CRIU can be met in the middle of its work."""
    ballast = "ballast = bytearray(b'x') * 400_000_000"
    async with subject_of(request, tmp_path, runtime_base, ballast, drain_timeout=5.0) as subject:
        yield subject


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(request, tmp_path_factory, criu_binary):
    """One kernel for all faults of a module: what one of them leaves behind, the next one meets."""
    directory, base = tmp_path_factory.mktemp("shared"), Path(tempfile.mkdtemp(prefix="gc-"))
    async with subject_of(request, directory, base) as subject:
        yield subject
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def strace():
    found = shutil.which("strace")
    if found is None:
        pytest.skip(reason="strace, which makes a chosen write fail, is not installed")
    return found
