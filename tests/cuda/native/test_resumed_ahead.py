"""Going back: the save point's CUDA state moves to the GPU while the present state is written."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fast_kernel import CONTEXT, A, FastKernel
from test_written_later import change, has
from waiting import until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.cuda.cuda import Cuda
from jupyter_gpu_ckpt.errors import CriuError, CudaError, GpuCkptError
from jupyter_gpu_ckpt.image.save_point import SavePoint
from jupyter_gpu_ckpt.lifecycle import context, host_memory, restore
from jupyter_gpu_ckpt.lifecycle.context import Reason
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.testing.fake_cuda import CHECKPOINTED, RUNNING

THEN, NOW = 3, 9


@pytest.fixture
def kernel(fast_kernel, monkeypatch) -> FastKernel:
    monkeypatch.setattr(host_memory, "all_memory", lambda: 0)
    kernel, swap_in = fast_kernel(), context.FastPath.swap_in_frozen

    def counted(path, **options) -> None:
        swap_in(path, **options)
        kernel.driver.processes[path._capsule.host_pid].memory = {A: kernel.blocks + CONTEXT}

    monkeypatch.setattr(context.FastPath, "swap_in_frozen", counted)
    kernel.lifecycle.save(SavePoint("point"))
    change(kernel, NOW)
    return kernel


def driver_calls(kernel: FastKernel, op: str) -> list[int]:
    return [pid for name, pid in kernel.driver.calls if name == op]


def at(kernel: FastKernel, kind: str, step: str, do) -> None:
    def inspect(event) -> None:
        if (event.kind, event.step) == (kind, step):
            kernel.lifecycle.trace.faults.remove(inspect)
            do()

    kernel.lifecycle.trace.faults.append(inspect)


def assert_frozen(capsule: Capsule) -> None:
    """All threads of the process are stopped but the library's, and the driver's, which a double does not have."""
    pid = capsule.host_pid
    found = {procfs.stat(pid, tid).name: procfs.stat(pid, tid).state for tid in procfs.threads(pid)}
    assert {state for name, state in found.items() if not name.startswith("gpu-ckpt")} == {"t"}, found


def runs(kernel: FastKernel, value: int) -> None:
    assert has(kernel, value)
    assert kernel.lifecycle.state is State.RUNNING
    assert kernel.path().amounts().swapped_out == 0
    assert kernel.gate.serves


def test_all_is_on_the_gpu_when_the_present_state_ends(kernel):
    """And its threads do not run before that."""
    present, seen = kernel.pid, []

    def look() -> None:
        ahead, state = kernel.lifecycle.kernel.ahead, kernel.lifecycle.kernel
        [pid] = ahead.on_gpu()
        assert kernel.driver.processes[pid].state == RUNNING
        assert state.fast_path(ahead._capsule).amounts().swapped_out == 0
        assert_frozen(ahead._capsule)
        seen.append(pid)

    at(kernel, "started", "end_process", look)
    kernel.driver.calls.clear()
    kernel.lifecycle.back("point")
    assert seen == [kernel.pid] != [present]
    assert driver_calls(kernel, "cuda.restore") == seen
    runs(kernel, THEN)
    kernel.runs_on()


def test_not_before_the_present_state_has_left_the_gpu(kernel):
    seen = []
    at(kernel, "started", "cuda_suspend", lambda: seen.append(kernel.lifecycle.kernel.ahead.resumed))
    unbroken = Cuda.restore

    def restore(self, pid, *arguments, **options) -> None:
        assert pid != kernel.pid
        seen.append(kernel.driver.processes[kernel.pid].state)
        unbroken(self, pid, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cuda, "restore", restore)
        at(kernel, "started", "end_process", lambda: kernel.lifecycle.kernel.ahead.on_gpu())
        kernel.lifecycle.back("point")
    assert seen == [None, CHECKPOINTED]
    runs(kernel, THEN)


@pytest.mark.parametrize("step", ["disconnect", "dump", "publish"])
def test_a_present_state_that_cannot_be_kept_has_the_gpu_again(kernel, step):
    """The other is suspended before it is ended, and has left the GPU before the present state returns."""
    present, ahead = kernel.pid, []

    def fail() -> None:
        ahead.extend(kernel.lifecycle.kernel.ahead.on_gpu())
        raise CriuError("It failed.")

    at(kernel, "started", step, fail)
    kernel.driver.calls.clear()
    with pytest.raises(CriuError):
        kernel.lifecycle.back("point")
    assert kernel.pid == present
    calls = [(op, pid) for op, pid in kernel.driver.calls if op in ("cuda.checkpoint", "cuda.restore")]
    [other] = ahead
    assert calls == [
        ("cuda.checkpoint", present),
        ("cuda.restore", other),
        ("cuda.checkpoint", other),
        ("cuda.restore", present),
    ]
    runs(kernel, NOW)
    kernel.lifecycle.back("point")
    runs(kernel, THEN)


@pytest.mark.parametrize("step", ["match", "reserve", "criu_restore", "cuda_resume", "connect"])
def test_a_way_back_that_fails_leaves_the_gpu_to_the_present_state(kernel, step):
    """Both do not fit on it at the same time."""
    assert 2 * kernel.blocks > kernel.driver.gpus[A]

    [point] = kernel.store.images()

    def fail(event) -> None:
        if (event.kind, event.step) == ("started", step) and kernel.lifecycle.kernel.image.id == point.id:
            raise CriuError("It failed.")

    at(kernel, "started", "end_process", lambda: kernel.lifecycle.kernel.ahead.on_gpu())
    kernel.lifecycle.trace.faults.append(fail)
    with pytest.raises(CriuError) as failed:
        kernel.lifecycle.back("point")
    assert failed.value.left == "the kernel runs on"
    kernel.lifecycle.trace.faults.remove(fail)
    runs(kernel, NOW)
    kernel.lifecycle.back("point")
    runs(kernel, THEN)


@pytest.mark.parametrize("failing", ["the driver", "too little is free", "the library"])
def test_a_context_that_cannot_be_restored_ahead_is_restored_later(kernel, monkeypatch, failing):
    unbroken, free, failed = Cuda.restore, kernel.lifecycle.engine.gpus.free, []

    def restore(self, pid, *arguments, **options) -> None:
        if failing == "the driver" and not failed:
            failed.append(pid)
            raise CudaError("It failed.")
        unbroken(self, pid, *arguments, **options)

    def free_now(uuid) -> int:
        if failing == "too little is free" and not failed:
            failed.append(0)
            return 0
        return free(uuid)

    def swap_in(path, **options) -> None:
        """Have the memory, and not its content."""
        kernel.driver.processes[path._capsule.host_pid].memory = {A: kernel.blocks + CONTEXT}
        failed.append(path._capsule.host_pid)
        raise CudaError("It failed.")

    if failing == "the library":
        monkeypatch.setattr(context.FastPath, "swap_in_frozen", swap_in)
    monkeypatch.setattr(Cuda, "restore", restore)
    monkeypatch.setattr(kernel.lifecycle.engine.gpus, "free", free_now)
    at(kernel, "started", "disconnect", lambda: until(lambda: failed, "it has failed"))
    kernel.lifecycle.back("point")
    assert failed
    assert kernel.pid not in failed
    runs(kernel, THEN)


class Admission:
    """A kernel that shares GPUs; ``alone``: with nobody at the moment."""

    def __init__(self, alone: bool) -> None:
        self._alone, self.elsewhere = alone, []

    def admit(self, needs, present, *, elsewhere, early) -> dict[str, str]:
        self.elsewhere.append(elsewhere)
        return {uuid: uuid for uuid in needs}

    def is_alone(self) -> bool:
        return self._alone

    def renew(self) -> None:
        pass

    settle = renew


@pytest.mark.parametrize("alone", [True, False])
def test_a_kernel_that_shares_its_gpu_takes_nothing_before_it_is_admitted(kernel, alone):
    kernel.lifecycle.kernel.admission = admission = Admission(alone)
    seen = []
    at(kernel, "started", "end_process", lambda: seen.append(kernel.lifecycle.kernel.ahead.on_gpu()))
    kernel.lifecycle.back("point")
    runs(kernel, THEN)
    assert seen == [[kernel.pid] if alone else []]
    assert admission.elsewhere == [not alone], "where it is already it stays"


@pytest.mark.parametrize(
    "change", [{"node_gpus": ["another"]}, {"swapped_bytes": 0}, {"device_bytes": {A: 1, "another": 1}}], ids=str
)
def test_what_is_not_restored_ahead(kernel, change):
    """Not to another GPU, which the driver has to know; not without the library; not to several GPUs."""
    [point] = kernel.store.images()
    state = kernel.lifecycle.kernel
    assert restore._may_resume_ahead(state, point.manifest)
    assert not restore._may_resume_ahead(state, replace(point.manifest, **change))


@pytest.mark.parametrize("how", ["ended", "detached"])
def test_a_kernel_that_goes_meanwhile_leaves_no_process(kernel, how):
    """Ended when it is on the GPU again, or given up by its server before that."""
    capsules, going = [], []

    def goes() -> None:
        ahead = kernel.lifecycle.kernel.ahead
        if how == "ended":
            ahead.on_gpu()
        until(lambda: ahead.restored, "the processes are restored")
        capsules.append(ahead._capsule)
        going.append(threading.Thread(target=kernel.lifecycle.terminate if how == "ended" else kernel.lifecycle.detach))
        going[0].start()
        until(lambda: kernel.lifecycle.kernel.cancellation.reason is not Reason.NONE, "it is requested")

    at(kernel, "started", "dump" if how == "ended" else "cuda_suspend", goes)
    with pytest.raises(GpuCkptError):
        kernel.lifecycle.back("point")
    going[0].join(60)
    if how == "detached":  # its next owner ends it
        Capsule.attach(kernel.lifecycle.home.runtime_dir).close()
    [capsule] = capsules
    until(lambda: not capsule.processes() or not Path(f"/proc/{capsule.processes()[0]}").exists(), "it has ended")
    assert kernel.lifecycle.kernel.ahead is None
    assert not [each.name for each in threading.enumerate() if each.name.startswith("gpu-ckpt-capsule")]
