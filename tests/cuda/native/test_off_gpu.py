"""A kernel that yields its GPU in the middle of its work: it runs on, and its calls of CUDA wait at the launch gate."""

from __future__ import annotations

import pytest
from harness import alive
from test_frozen import attach_again
from test_launch_gate_lifecycle import continues, launching, waits
from waiting import until

from jupyter_gpu_ckpt.errors import CriuError, CudaError, GpuCkptError, UnsupportedCuda
from jupyter_gpu_ckpt.image.save_point import SavePoint
from jupyter_gpu_ckpt.lifecycle import dump, plans, resume
from jupyter_gpu_ckpt.lifecycle.plans import Move, State
from jupyter_gpu_ckpt.testing.fake_cuda import CHECKPOINTED


def runs_without_gpu(kernel) -> None:
    """Assert that the kernel has nothing on the GPU, that clients reach it, and that threads without CUDA compute."""
    assert kernel.lifecycle.state is State.OFF_GPU
    assert kernel.fake.state == CHECKPOINTED
    assert kernel.held() == 0
    assert kernel.gate.serves
    turns = kernel.program.ask("turns[0]")
    until(lambda: kernel.program.ask("turns[0]") > turns, "a thread without CUDA computes")


@pytest.fixture
def kernel(fast_kernel):
    return launching(fast_kernel())


def test_it_yields_and_comes_back_and_nobody_asks_anything_of_the_kernel(kernel):
    for _ in range(3):
        kernel.gate.calls.clear()
        kernel.lifecycle.yield_gpu()
        runs_without_gpu(kernel)
        waits(kernel)
        kernel.lifecycle.resume()
        assert kernel.gate.calls == [], "a cell runs: a request would wait for its end"
        continues(kernel)


def test_where_it_cannot_it_keeps_the_gpu_and_runs_on(kernel):
    for refuse in ("cuda.lock", "cuda.checkpoint"):
        kernel.driver.refuse[refuse] = 999
        with pytest.raises(CudaError) as failure:
            kernel.lifecycle.yield_gpu()
        assert failure.value.left == "the kernel runs on"
        del kernel.driver.refuse[refuse]
        continues(kernel)


@pytest.mark.parametrize("trait", ["no library", "a profiler", "a child with CUDA"])
def test_a_kernel_whose_calls_could_not_wait_outside_the_driver_keeps_the_gpu(fast_kernel, trait):
    kernel = fast_kernel(preload=trait != "no library")
    if trait == "a profiler":
        kernel.fake.profiled = True
    elif trait == "a child with CUDA":
        kernel.program.ask('exec(\'import subprocess; child = subprocess.Popen(["sleep", "1000"])\', globals())')
        until(lambda: len(kernel.lifecycle.capsule.other_processes()) == 1, "the child is there")
        (child,) = kernel.lifecycle.capsule.other_processes()
        kernel.driver.start({next(iter(kernel.driver.gpus)): 1 << 20}, pid=child)
    with pytest.raises(UnsupportedCuda) as failure:
        kernel.lifecycle.yield_gpu()
    assert failure.value.left == "the kernel runs on"
    kernel.runs_on()
    kernel.lifecycle.suspend()
    kernel.lifecycle.wake()


def test_without_free_memory_it_runs_on_off_the_gpu_and_waits(kernel):
    kernel.lifecycle.yield_gpu()
    hog = kernel.driver.start({next(iter(kernel.driver.gpus)): 60 << 20})
    with pytest.raises(CudaError) as failure:
        kernel.lifecycle.resume()
    assert failure.value.code == "GPU_FULL"
    assert "runs on" in failure.value.left
    runs_without_gpu(kernel)
    waits(kernel)
    kernel.driver.remove(hog)
    kernel.lifecycle.resume()
    continues(kernel)


class AdmissionDouble:
    """Admits a kernel at once, also to memory that is not free yet."""

    def __init__(self) -> None:
        self.freed: list[bool] = []
        self.early: list[bool] = []

    def admit(self, needs, present, *, elsewhere, early):
        self.early.append(early)
        return {uuid: uuid for uuid in needs}

    def renew(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def frees(self, begun: bool) -> None:
        self.freed.append(begun)


def test_admitted_to_memory_that_nobody_leaves_it_is_not_touched(kernel, monkeypatch):
    kernel.lifecycle.kernel.admission = admission = AdmissionDouble()
    kernel.lifecycle.yield_gpu()
    assert admission.freed == [True], "once: its driver has locked it, and the library moves it"
    hog = kernel.driver.start({next(iter(kernel.driver.gpus)): 90 << 20})
    with monkeypatch.context() as patch:
        patch.setattr(resume, "_NEXT_MEMORY_S", 0.1)
        kernel.driver.calls.clear()
        with pytest.raises(CudaError, match="has not freed its memory") as failure:
            kernel.lifecycle.resume()
    assert failure.value.code == "GPU_FULL"
    assert "cuda.restore" not in [call for call, _ in kernel.driver.calls], "with too little it ends the process"
    runs_without_gpu(kernel)
    waits(kernel)
    kernel.driver.remove(hog)
    kernel.lifecycle.resume()
    continues(kernel)
    assert admission.early == [True, True]


def test_where_the_driver_has_to_move_it_nobody_is_admitted_early(kernel):
    kernel.lifecycle.kernel.admission = admission = AdmissionDouble()
    kernel.program.ask("fail('cuMemHostRegister_v2', 1, 999)")
    kernel.lifecycle.yield_gpu()
    assert admission.freed == [True, False]
    kernel.lifecycle.resume()
    continues(kernel)
    assert admission.early == [False]


def test_it_continues_to_host_memory_and_to_the_disk_and_comes_back(kernel):
    for verb in ("suspend", "checkpoint"):
        kernel.lifecycle.yield_gpu()
        getattr(kernel.lifecycle, verb)()
        assert not kernel.gate.serves
        assert kernel.lifecycle.state is (State.SUSPENDED if verb == "suspend" else State.CHECKPOINTED)
        kernel.lifecycle.wake()
        continues(kernel)


#: As in `test_steps`.
STEPS = [
    pytest.param(start, request, step, edge, id=f"{start.value}-{request.value}-{step.value}-{edge}")
    for (start, request), plan in plans.PLANS.items()
    if plan is not None and request is not Move.WAKE and State.OFF_GPU in (start, plan.to)
    for step in plan.steps
    for edge in ("started", "completed")
]


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize(("start", "request_", "step", "edge"), STEPS)
def test_whatever_step_fails_it_runs_on(kernel, start, request_, step, edge):
    lifecycle, plan, pending = kernel.lifecycle, plans.PLANS[start, request_], [True]
    if start is State.OFF_GPU:
        lifecycle.yield_gpu()

    def fault(event) -> None:
        if pending and (event.kind, event.step) == (edge, step.value):
            pending.clear()
            raise RuntimeError("injected")

    verbs = {Move.YIELD: lifecycle.yield_gpu, Move.SAVE: lambda: lifecycle.save(SavePoint("point"))}
    lifecycle.trace.faults.append(fault)
    try:
        verbs.get(request_, getattr(lifecycle, request_.value, None))()
        reached = True
    except GpuCkptError as error:
        reached = False
        assert error.left
    finally:
        lifecycle.trace.faults.remove(fault)
    assert not pending, "the step was not run"
    committed = plan.commit is not None and plan.steps.index(step) > plan.steps.index(plan.commit)
    assert lifecycle.state is (plan.to if reached or committed else plan.back)
    for point in lifecycle.engine.store.images() if request_ is Move.SAVE else ():
        assert reached, "it is there although the save failed"
        lifecycle.engine.store.check(point)
    lifecycle.wake()
    continues(kernel)


def test_a_checkpoint_that_fails_leaves_it_running_off_the_gpu(kernel, monkeypatch):
    def fail(*_: object) -> None:
        raise CriuError("Not proven.")

    kernel.lifecycle.yield_gpu()
    with monkeypatch.context() as patch:
        patch.setattr(dump, "_require_proven", fail)
        with pytest.raises(CriuError):
            kernel.lifecycle.checkpoint()
    runs_without_gpu(kernel)
    waits(kernel)
    kernel.lifecycle.resume()
    continues(kernel)


def test_the_next_owner_finds_it_suspended_and_brings_it_back(kernel):
    kernel.lifecycle.yield_gpu()
    attach_again(kernel)
    assert kernel.lifecycle.state is State.SUSPENDED
    kernel.lifecycle.wake()
    continues(kernel)


def test_it_is_ended_like_any_other(kernel):
    kernel.lifecycle.yield_gpu()
    pid = kernel.pid
    kernel.lifecycle.terminate()
    assert kernel.lifecycle.state is State.DEAD
    assert alive([pid]) == []
