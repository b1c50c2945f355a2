"""The launch gate of a kernel that is suspended, checkpointed and woken, and whose owners end in the middle."""

from __future__ import annotations

import time

import pytest
from fast_kernel import CONTEXT
from test_frozen import attach_again, refused
from waiting import until

from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.errors import CudaError
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.testing.fake_cuda import CHECKPOINTED, LOCKED, RUNNING

#: A thread that waits for the GPU all the time, and counts how often; a negative number: an error.
LAUNCHES = """
calls = [0]
def launch():
    runtime.cudaFree(None)
    driver = ctypes.CDLL("libcuda.so.1")
    while calls[0] >= 0:
        result = driver.cuCtxSynchronize()
        calls[0] = calls[0] + 1 if result == 0 else -result
        time.sleep(0.001)
threading.Thread(target=launch, daemon=True).start()
"""
CLOSED, LEASED = 2, 4


def launching(kernel):
    kernel.program.ask(f"exec({LAUNCHES!r}, globals())")
    return kernel


@pytest.fixture
def kernel(fast_kernel):
    return launching(fast_kernel())


def gate(kernel) -> int:
    return kernel.path()._published().launch_gate & (CLOSED | LEASED)


def waits(kernel) -> None:
    """The thread has been seen at the gate, and is there."""
    until(lambda: kernel.path().touches() == 1, "the thread is seen")
    assert gate(kernel) == CLOSED
    calls = kernel.program.ask("calls[0]")
    time.sleep(0.05)
    assert kernel.program.ask("calls[0]") == calls


def continues(kernel) -> None:
    kernel.runs_on()
    assert gate(kernel) == 0
    calls = kernel.program.ask("calls[0]")
    assert calls >= 0, "an error"
    until(lambda: kernel.program.ask("calls[0]") > calls, "the thread continues")


@pytest.mark.parametrize("warm", [False, True])
def test_a_thread_waits_at_the_gate_while_the_kernel_is_suspended(fast_kernel, warm):
    kernel = launching(fast_kernel(warm=warm))
    for _ in range(2):
        kernel.lifecycle.suspend()
        assert kernel.fake.state == (LOCKED if warm else CHECKPOINTED)
        waits(kernel)
        assert kernel.path().amounts().touches == 1
        kernel.lifecycle.wake()
        continues(kernel)


def test_the_first_touch_is_seen(fast_kernel):
    kernel = fast_kernel()
    kernel.lifecycle.suspend()
    path = kernel.path()
    assert path.touches() == 0
    lines = "(driver := ctypes.CDLL('libcuda.so.1')) and threading.Thread(target=lambda: (runtime.cudaFree(None), "
    lines += "driver.cuCtxSynchronize()), daemon=True).start()"
    assert kernel.program.ask(lines) is None
    until(lambda: path.touches() > 0, "it is seen")
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_a_thread_waits_there_in_an_image_too(kernel):
    for _ in range(2):
        kernel.lifecycle.suspend()
        waits(kernel)
        kernel.lifecycle.checkpoint()
        kernel.lifecycle.wake()
        continues(kernel)


def test_the_gate_opens_where_the_driver_has_moved_everything(fast_kernel):
    kernel = launching(fast_kernel())
    kernel.program.ask("begin_thread('cuda-of-a-user')")  # cannot be frozen
    for verb in ("suspend", "checkpoint"):
        getattr(kernel.lifecycle, verb)()
        if verb == "suspend":
            assert (kernel.fake.state, kernel.path().amounts().swapped_out) == (CHECKPOINTED, 0)
            waits(kernel)
        kernel.lifecycle.wake()
        continues(kernel)


def test_threads_that_wait_are_frozen_where_the_driver_does_not_lock(kernel):
    kernel.fake.profiled = True
    kernel.lifecycle.suspend()
    assert kernel.path().is_frozen()
    assert gate(kernel) & CLOSED
    attach_again(kernel)
    assert kernel.lifecycle.state is State.SUSPENDED
    kernel.lifecycle.wake()
    continues(kernel)


@pytest.mark.parametrize("verb", ["cuda.lock", "cuda.checkpoint"])
def test_a_suspend_that_fails_opens_the_gate(kernel, verb):
    kernel.driver.refuse[verb] = 999
    with pytest.raises(CudaError):
        kernel.lifecycle.suspend()
    continues(kernel)
    del kernel.driver.refuse[verb]
    kernel.lifecycle.suspend()
    waits(kernel)
    kernel.lifecycle.wake()
    continues(kernel)


def test_a_wake_that_fails_leaves_it_closed(kernel):
    kernel.program.ask("fail('cuMemMap', 2, 2)")
    kernel.lifecycle.suspend()
    refused(kernel, "wake", "GPU_FULL")
    waits(kernel)
    kernel.lifecycle.wake()
    continues(kernel)


def test_the_next_owner_finds_it_closed_and_opens_it(kernel):
    kernel.lifecycle.suspend()
    attach_again(kernel)
    waits(kernel)
    kernel.lifecycle.wake()
    continues(kernel)


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize("lease", [0.0, 60.0])
def test_the_next_owner_opens_it_if_the_last_one_ended_in_the_middle(kernel, locked, lease):
    kernel.path().close_launch_gate(lease)
    if locked:
        kernel.lifecycle.engine.cuda.lock(kernel.pid, 5)
    attach_again(kernel)
    continues(kernel)


def test_without_another_owner_it_opens_by_itself(kernel):
    kernel.path().close_launch_gate(0.3)
    assert gate(kernel) == CLOSED | LEASED
    until(lambda: gate(kernel) == 0, "it opens")
    continues(kernel)


def test_a_library_that_is_busy_or_of_another_release_is_done_without(kernel, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(fastpath, "_VERSION", fastpath._VERSION + 1)
        kernel.path().close_launch_gate()
    continues(kernel)
    monkeypatch.setattr(fastpath, "_SHORT_SECONDS", 0.1)
    with kernel.path()._library(5):  # one connection at a time
        kernel.path().close_launch_gate()
        assert gate(kernel) == 0
    until(lambda: kernel.path().amounts().allocations, "it answers again")
    assert gate(kernel) == 0, "a request that was given up is not done later"
    continues(kernel)


def test_a_wake_without_the_librarys_socket_can_be_tried_again(kernel, monkeypatch):
    monkeypatch.setattr(fastpath.FastPath, "swap_out", lambda *_, **__: 0)  # the driver moves everything
    kernel.lifecycle.suspend()
    waits(kernel)
    socket = kernel.lifecycle.capsule.directory / fastpath.SOCKET
    socket.rename(socket.with_name("aside"))
    assert "does not let calls continue" in refused(kernel, "wake", "CUDA_FAILED").message
    socket.with_name("aside").rename(socket)
    kernel.lifecycle.wake()
    continues(kernel)


def test_a_gate_that_cannot_be_opened_is_an_error_if_it_does_not_open_by_itself(kernel, monkeypatch):
    for seconds in ("_SHORT_SECONDS", "_REPLY_SECONDS"):
        monkeypatch.setattr(fastpath, seconds, 0.3)
    path = kernel.path()
    path.close_launch_gate()
    with path._library(5), pytest.raises(CudaError, match="does not let calls continue"):
        path.open_launch_gate()
    path.close_launch_gate(60)
    with path._library(5):
        path.open_launch_gate()  # it will
    assert gate(kernel) == CLOSED | LEASED
    path.open_launch_gate()
    assert (kernel.fake.state, kernel.held()) == (RUNNING, kernel.blocks + CONTEXT)
    continues(kernel)
