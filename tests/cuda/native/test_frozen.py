"""A suspend that the driver refuses: the library swaps out, and frozen threads or the lock keep the memory unused."""

from __future__ import annotations

import os
import signal

import pytest
from fast_kernel import CONTEXT, A
from fast_program import MIB, frozen
from waiting import until

from jupyter_gpu_ckpt import errors, procfs
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.lifecycle import suspend
from jupyter_gpu_ckpt.lifecycle.lifecycle import Lifecycle
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.process.ptrace import Tracee
from jupyter_gpu_ckpt.testing.fake_cuda import LOCKED, RUNNING

#: A thread that nearly always sleeps with a lock which the library's calls need.
HOLDS = """
holds, released = threading.Event(), threading.Event()
holds.set()
def hold():
    driver = ctypes.CDLL("libcuda.so.1")
    while holds.is_set(): driver.double_hold(2_000_000)
    released.set()
threading.Thread(target=hold, daemon=True).start()
while not ctypes.CDLL("libcuda.so.1").double_is_held() & 1: time.sleep(0.001)
"""


#: In the hint of a refused checkpoint.
POSSIBLE = "A suspend is possible."
#: Codes of the reasons for which the driver does not lock.
NOT_LOCKED = ["PROFILER_USED", "MIG", "MPS", "DRIVER_TOO_OLD"]


@pytest.fixture
def kernel(fast_kernel):
    """A kernel that the driver does not lock."""
    kernel = fast_kernel()
    kernel.fake.profiled = True
    return kernel


def keep_from_lock(kernel, code: str) -> None:
    """Give the driver of a kernel a reason not to lock it."""
    kernel.fake.profiled = code == "PROFILER_USED"
    kernel.fake.mps = code == "MPS"
    kernel.driver.mig = {A} if code == "MIG" else set()
    kernel.driver.too_old = code == "DRIVER_TOO_OLD"


def refused(kernel, verb: str, code: str) -> errors.GpuCkptError:
    with pytest.raises(errors.GpuCkptError) as caught:
        getattr(kernel.lifecycle, verb)()
    assert caught.value.code == code
    return caught.value


def is_frozen(kernel) -> None:
    assert kernel.lifecycle.state is State.SUSPENDED
    assert (kernel.fake.state, kernel.held()) == (RUNNING, CONTEXT)
    assert kernel.path().amounts().swapped_out == kernel.blocks
    assert kernel.path().is_frozen()
    assert frozen(kernel)
    assert not kernel.gate.serves


def attach_again(kernel) -> None:
    kernel.lifecycle.detach()
    last = kernel.lifecycle
    kernel.lifecycle = Lifecycle(last.home, last.engine, kernel.gate, settings=last.kernel.settings, trace=last.trace)
    kernel.lifecycle.attach(capsule=Capsule.attach(last.home.runtime_dir))


@pytest.mark.parametrize("code", NOT_LOCKED)
def test_a_kernel_that_cannot_be_locked_is_frozen_while_its_memory_is_away(fast_kernel, code):
    kernel = fast_kernel()
    keep_from_lock(kernel, code)
    for _ in range(2):
        kernel.lifecycle.suspend()
        is_frozen(kernel)
        error = refused(kernel, "checkpoint", code)
        assert "suspended" in error.left
        assert POSSIBLE not in error.hint
        is_frozen(kernel)
        kernel.lifecycle.wake()
        kernel.runs_on()
        assert not kernel.path().is_frozen()
    found = {finding.code: finding.blocks for finding in suspend.findings(kernel.lifecycle.kernel)}
    assert found[code] is True
    found = {finding.code: finding.blocks for finding in suspend.findings(kernel.lifecycle.kernel, writes=False)}
    assert found[code] is False
    error = refused(kernel, "checkpoint", code)
    assert error.left == "the kernel runs on"
    assert error.hint.count(POSSIBLE) == 1
    kernel.runs_on()


@pytest.mark.parametrize("code", NOT_LOCKED)
def test_a_first_checkpoint_says_that_a_suspend_is_possible(fast_kernel, code):
    kernel = fast_kernel()
    keep_from_lock(kernel, code)
    for _ in range(2):
        error = refused(kernel, "checkpoint", code)
        assert (error.left, error.hint.count(POSSIBLE)) == ("the kernel runs on", 1)
        kernel.runs_on()
    kernel.lifecycle.suspend()
    is_frozen(kernel)
    kernel.lifecycle.wake()
    kernel.runs_on()


@pytest.mark.parametrize("code", ["MIG", "MPS", "DRIVER_TOO_OLD"])
def test_nothing_is_promised_of_a_kernel_without_the_library(fast_kernel, code):
    kernel = fast_kernel(preload=False)
    keep_from_lock(kernel, code)
    for writes, verb in ((True, "checkpoint"), (False, "suspend")):
        found = [each for each in suspend.findings(kernel.lifecycle.kernel, writes=writes) if each.blocks]
        assert [each.code for each in found] == [code]
        error = refused(kernel, verb, code)
        assert (error.left, POSSIBLE in error.hint) == ("the kernel runs on", False)
    kernel.program.continues()


@pytest.mark.parametrize("code", NOT_LOCKED)
def test_the_next_owner_knows_why_it_is_frozen(fast_kernel, code):
    kernel = fast_kernel()
    keep_from_lock(kernel, code)
    kernel.lifecycle.suspend()
    kernel.fake.profiled = code in ("PROFILER_USED", "DRIVER_TOO_OLD")  # PyTorch loads CUPTI in every process
    attach_again(kernel)
    is_frozen(kernel)
    refused(kernel, "checkpoint", code)
    kernel.lifecycle.wake()
    kernel.runs_on()
    attach_again(kernel)
    kernel.runs_on()


def test_a_tracer_cannot_attach_to_it_and_wakes_nothing(kernel):
    """strace and gdb would let a thread run that is frozen; each of them is traced already."""
    kernel.lifecycle.suspend()
    pid = kernel.lifecycle.capsule.host_pid
    traced = [tid for tid in map(int, os.listdir(f"/proc/{pid}/task")) if procfs.status(tid)["TracerPid"] != "0"]
    assert pid in traced
    for tid in traced:
        with pytest.raises(PermissionError):
            Tracee(tid, running=True)
    is_frozen(kernel)
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_a_gpu_that_is_full_leaves_it_frozen(kernel):
    kernel.lifecycle.suspend()
    assert kernel.held() == CONTEXT
    other = kernel.driver.start({A: 100 * MIB - CONTEXT - kernel.blocks + MIB})
    assert "suspended" in refused(kernel, "wake", "GPU_FULL").left
    is_frozen(kernel)
    kernel.driver.remove(other)
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_memory_that_others_take_in_the_middle_of_a_wake_leaves_it_frozen(kernel):
    kernel.program.ask("fail('cuMemMap', 2, 2)")
    kernel.lifecycle.suspend()
    refused(kernel, "wake", "GPU_FULL")
    is_frozen(kernel)
    kernel.lifecycle.wake()
    kernel.runs_on()


@pytest.mark.parametrize("call", ["cuMemHostRegister_v2", "cuMemcpyDtoHAsync_v2", "cuMemUnmap"])
def test_a_call_of_the_driver_that_fails_leaves_it_running(kernel, call):
    kernel.program.ask(f"fail({call!r}, 1, 999)")
    refused(kernel, "suspend", "PROFILER_USED")
    kernel.runs_on()
    kernel.lifecycle.suspend()
    is_frozen(kernel)
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_a_thread_that_holds_a_lock_of_the_driver_leaves_it_running(kernel):
    kernel.program.ask(f"exec({HOLDS!r}, globals())")
    refused(kernel, "suspend", "PROFILER_USED")
    kernel.runs_on()
    kernel.program.ask("holds.clear()")
    until(lambda: kernel.program.ask("released.is_set()"), "the thread has released it")
    kernel.lifecycle.suspend()
    is_frozen(kernel)
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_a_thread_that_cannot_be_frozen_leaves_it_running(kernel):
    kernel.program.ask("begin_thread('cuda-of-a-user')")
    refused(kernel, "suspend", "PROFILER_USED")
    kernel.runs_on()


def test_a_frozen_kernel_can_be_ended_and_its_end_is_seen(kernel):
    kernel.lifecycle.suspend()
    os.kill(kernel.pid, signal.SIGKILL)
    until(lambda: kernel.lifecycle.poll() is not None, "its end is seen")
    assert kernel.lifecycle.poll() == -signal.SIGKILL


def test_memory_that_the_driver_does_not_save_stays_and_the_rest_is_kept_by_the_lock(fast_kernel):
    kernel = fast_kernel()
    kernel.fake.unsupported = True
    assert kernel.path().amounts().managed == 0
    kernel.program.ask(f"manage({4 * MIB})")
    assert kernel.path().amounts().managed == 1
    for _ in range(2):
        kernel.lifecycle.suspend()
        assert (kernel.fake.state, kernel.held()) == (LOCKED, CONTEXT)
        assert kernel.path().amounts().swapped_out == kernel.blocks
        assert "MANAGED_MEMORY" in {
            finding.code for finding in suspend.findings(kernel.lifecycle.kernel) if finding.blocks
        }
        error = refused(kernel, "checkpoint", "MANAGED_MEMORY")
        assert "suspended" in error.left
        assert POSSIBLE not in error.hint
        kernel.lifecycle.wake()
        kernel.runs_on()
    error = refused(kernel, "checkpoint", "MANAGED_MEMORY")
    assert (error.left, error.hint.count(POSSIBLE)) == ("the kernel runs on", 1)
    kernel.runs_on()
    kernel.program.ask("fail('cuMemMap', 2, 2)")
    kernel.lifecycle.suspend()
    refused(kernel, "wake", "GPU_FULL")
    assert (kernel.lifecycle.state, kernel.fake.state) == (State.SUSPENDED, LOCKED)
    kernel.lifecycle.wake()
    kernel.runs_on()
    assert kernel.program.ask("unmanage()") == 0
    assert kernel.path().amounts().managed == 0
    refused(kernel, "checkpoint", "CUDA_UNSUPPORTED")
    kernel.runs_on()


def test_managed_memory_alone_cannot_be_suspended_and_nothing_says_so(fast_kernel):
    kernel = fast_kernel()
    kernel.fake.unsupported = True
    kernel.program.ask(f"manage({4 * MIB})")
    assert kernel.program.ask("[runtime.cudaFree(address) for address, _ in held]") == [0, 0, 0]
    assert (kernel.path().amounts().managed, kernel.path().amounts().bytes) == (1, 0)
    for verb in ("suspend", "checkpoint"):
        error = refused(kernel, verb, "MANAGED_MEMORY")
        assert (error.left, POSSIBLE in error.hint) == ("the kernel runs on", False)
