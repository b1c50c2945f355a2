"""One kernel with something to lose, and what every fault must leave behind."""

from __future__ import annotations

import pytest
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
