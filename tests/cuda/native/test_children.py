"""Children of a kernel that use CUDA: each has the library and a socket of its own, and leaves the GPU with the kernel.

The processes, their library, the capsule and CRIU are real, the drivers are doubles (see `fast_kernel`).
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from family import SIZES, Family
from fast_kernel import CONTEXT
from fast_program import MIB, A

from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.lifecycle import context
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.testing.fake_cuda import CHECKPOINTED


@pytest.fixture
def family(criu_binary, tmp_path, programs, doubles, monkeypatch):
    """A kernel with a child ``one``; the driver that suspends counts what moves between them and the GPU."""
    base = Path(tempfile.mkdtemp(prefix="gc-"))
    family = Family(criu_binary, tmp_path, base, programs, doubles)

    class Accounting(fastpath.FastPath):
        def freeze_for_driver(self):
            family.held()
            super().freeze_for_driver()

        def swap_in(self, **limits):
            try:
                super().swap_in(**limits)
            finally:
                family.held()

    monkeypatch.setattr(context, "FastPath", Accounting)
    family.start("one")
    yield family
    family.lifecycle.terminate()
    shutil.rmtree(base)


def test_a_child_is_swapped_out_by_its_own_library_and_comes_back(family):
    (child,) = family.children
    assert child.blocks >= sum(SIZES)
    for _ in range(2):
        family.lifecycle.suspend()
        assert family.lifecycle.state is State.SUSPENDED
        assert (child.fake.state, child.fake.memory) == (CHECKPOINTED, {A: CONTEXT})
        assert child.path().amounts().swapped_out == child.blocks
        assert family.driver.free(A) == 100 * MIB
        family.lifecycle.resume()
        family.runs_on()


@pytest.mark.parametrize("suspended", [False, True])
def test_a_checkpoint_has_the_memory_of_a_child_and_a_wake_brings_it_back(family, suspended):
    (child,) = family.children
    for _ in range(2):
        if suspended:
            family.lifecycle.suspend()
        image = family.lifecycle.checkpoint()
        assert image.manifest.swapped_bytes == family.blocks, "the child's are among CRIU's pages"
        family.lifecycle.wake()
        family.runs_on()
        assert child.path().amounts().bytes == child.blocks
