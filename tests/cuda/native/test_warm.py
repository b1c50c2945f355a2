"""A warm suspend: allocations are swapped out, the context stays, and the driver's lock keeps the kernel from CUDA."""

from __future__ import annotations

import pytest
from fast_kernel import CONTEXT, A
from fast_program import MIB

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.errors import CudaError, DeviceHeld, GpuFull
from jupyter_gpu_ckpt.lifecycle.lifecycle import Lifecycle
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.testing.fake_cuda import CHECKPOINTED, LOCKED


@pytest.fixture
def kernel(fast_kernel):
    return fast_kernel(warm=True)


def test_only_the_allocations_are_swapped_out_and_in(kernel):
    for _ in range(2):
        kernel.lifecycle.suspend()
        assert kernel.lifecycle.state is State.SUSPENDED
        assert (kernel.fake.state, kernel.held()) == (LOCKED, CONTEXT)
        assert kernel.path().amounts().swapped_out == kernel.blocks
        assert not kernel.gate.serves
        kernel.lifecycle.wake()
        kernel.runs_on()


def test_without_the_trait_the_context_is_suspended_too(fast_kernel):
    kernel = fast_kernel()
    kernel.lifecycle.suspend()
    assert (kernel.fake.state, kernel.held()) == (CHECKPOINTED, 0)
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_without_a_library_that_moves_blocks_it_is_suspended_as_ever(kernel):
    kernel.program.ask("begin_thread('cuda-of-a-user')")
    kernel.lifecycle.suspend()
    assert kernel.fake.state == CHECKPOINTED
    kernel.lifecycle.wake()
    kernel.runs_on()


@pytest.mark.parametrize("first", ["suspended warm", "running"])
def test_a_checkpoint_takes_the_context_along(kernel, first):
    if first == "suspended warm":
        kernel.lifecycle.suspend()
    image = kernel.lifecycle.checkpoint()
    assert image.manifest.device_bytes == {A: kernel.blocks + CONTEXT}
    assert kernel.driver.free(A) == 100 * MIB
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_a_checkpoint_that_fails_leaves_it_suspended_and_it_wakes(kernel):
    kernel.lifecycle.suspend()
    kernel.driver.refuse["cuda.checkpoint"] = 999
    with pytest.raises(CudaError) as caught:
        kernel.lifecycle.checkpoint()
    assert "suspended" in caught.value.left
    assert kernel.fake.state == LOCKED
    del kernel.driver.refuse["cuda.checkpoint"]
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_device_files_that_are_not_cudas_keep_it_from_the_disk_only(kernel):
    kernel.fake.nvml = True
    kernel.lifecycle.suspend()
    with pytest.raises(DeviceHeld):
        kernel.lifecycle.checkpoint()
    assert kernel.lifecycle.state is State.SUSPENDED
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_gpu_memory_is_reserved_for_swapped_out_bytes_and_no_more(kernel):
    kernel.lifecycle.suspend()
    other = kernel.driver.start({A: 100 * MIB - CONTEXT - kernel.blocks + MIB})
    with pytest.raises(GpuFull):
        kernel.lifecycle.wake()
    assert (kernel.lifecycle.state, kernel.fake.state) == (State.SUSPENDED, LOCKED)
    kernel.driver.remove(other)
    kernel.driver.start({A: 100 * MIB - CONTEXT - kernel.blocks})  # the rest, to the last byte
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_the_next_owner_finds_it_suspended(kernel):
    kernel.lifecycle.suspend()
    kernel.lifecycle.detach()
    last = kernel.lifecycle
    kernel.lifecycle = Lifecycle(last.home, last.engine, kernel.gate, settings=last.kernel.settings, trace=last.trace)
    kernel.lifecycle.attach(capsule=Capsule.attach(last.home.runtime_dir))
    assert (kernel.lifecycle.state, kernel.fake.state) == (State.SUSPENDED, LOCKED)
    kernel.lifecycle.wake()
    kernel.runs_on()
