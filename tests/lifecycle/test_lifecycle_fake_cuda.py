"""A kernel when the CUDA driver refuses, hangs or loses its helper.

The process, its capsule, CRIU and the images are real; the driver is the fake that the contract suite holds to the real
one's ways, among them the two that destroy a process for ever.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from gate_double import GateDouble
from harness import alive
from waiting import until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.criu.criu import Criu
from jupyter_gpu_ckpt.criu.install import dotted
from jupyter_gpu_ckpt.cuda.fastpath import FastPath
from jupyter_gpu_ckpt.errors import (
    AgentError,
    CudaError,
    CudaTimeout,
    GpuCkptError,
    GpuFull,
    HelperGone,
    KernelLost,
    KernelSilent,
    KeyUnusable,
    NoMemory,
    NoSpace,
)
from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.quota import Quota
from jupyter_gpu_ckpt.image.save_point import SavePoint
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.lifecycle import cuda_processes, suspend
from jupyter_gpu_ckpt.lifecycle.context import Engine, Home
from jupyter_gpu_ckpt.lifecycle.lifecycle import Lifecycle
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.lifecycle.settings import LifecycleSettings
from jupyter_gpu_ckpt.testing.fake_cuda import (
    CHECKPOINTED,
    LOCKED,
    OPERATING_SYSTEM,
    RUNNING,
    FakeCuda,
    FakeDriver,
    FakeGpus,
)
from jupyter_gpu_ckpt.trace import StepEvent, Trace

A = "GPU-00000000-0000-0000-0000-00000000000a"
B = "GPU-00000000-0000-0000-0000-00000000000b"


class Rig:
    """A tiny process that "holds" 60 of GPU A's 100 MiB, and the lifecycle that moves it."""

    MEMORY = 60 << 20

    def __init__(self, criu_binary, directory: Path, base: Path, argv: Sequence[str] = ("sleep", "1000")) -> None:
        self.driver = FakeDriver({A: 100 << 20, B: 100 << 20})
        self.gate = GateDouble()
        criu = Criu(criu_binary.argv)
        gpus = FakeGpus(self.driver, directory / "locks")
        engine = Engine(criu, dotted(criu_binary.version), FakeCuda(self.driver), gpus, Store(directory / "images"))
        home = Home("k", "python3", base, has_agent=True)
        settings = LifecycleSettings(reservation=0.2)
        self.lifecycle = Lifecycle(home, engine, self.gate, settings=settings, trace=Trace("k", [self._follow]))
        self.lifecycle.launch(argv, {"PATH": os.environ["PATH"]}, "/")
        self.fake = self.driver.processes[self.driver.start({A: self.MEMORY}, pid=self.pid)]

    @property
    def pid(self) -> int:
        assert self.lifecycle.capsule is not None
        return self.lifecycle.capsule.host_pid

    def _follow(self, event: StepEvent) -> None:
        """The fake driver's process comes and goes with the real one."""
        if event.kind == "completed" and event.step == "end_process":
            for pid, process in list(self.driver.processes.items()):
                if process is self.fake:
                    self.driver.remove(pid)
        elif event.kind == "completed" and event.step == "criu_restore":
            # What CRIU restores is the process as it was dumped: suspended.
            self.fake.state, self.fake.ruined, self.fake.memory = CHECKPOINTED, False, {A: self.MEMORY}
            self.driver.add(self.fake, self.pid)

    def fails(self, verb: str, code: str) -> GpuCkptError:
        with pytest.raises(GpuCkptError) as caught:
            getattr(self.lifecycle, verb)()
        assert caught.value.code == code, caught.value
        assert caught.value.hint
        assert caught.value.left
        return caught.value

    def runs_on(self) -> None:
        """The process lives, on the GPU, unlocked, and clients reach it; no image is there, no lock is held."""
        assert self.lifecycle.state is State.RUNNING
        assert alive([self.pid]) == [self.pid]
        assert (self.fake.state, self.fake.ruined) == (RUNNING, False)
        assert self.gate.serves
        assert self.lifecycle.engine.store.images() == []
        with self.lifecycle.engine.gpus.reservation(dict.fromkeys(self.driver.gpus, 0), 0.1):
            pass

    def sleeps(self, state: State) -> None:
        """Assert that the kernel is away, unharmed, and that the next message wakes it."""
        assert self.lifecycle.state is state
        assert not self.gate.serves
        assert not self.fake.ruined
        assert len(self.lifecycle.engine.store.images()) == (state is State.CHECKPOINTED)

    def cycle(self) -> None:
        self.lifecycle.checkpoint()
        self.sleeps(State.CHECKPOINTED)
        self.lifecycle.wake()
        self.runs_on()


@pytest.fixture
def rig(criu_binary, tmp_path):
    base = Path(tempfile.mkdtemp(prefix="gc-"))
    rig = Rig(criu_binary, tmp_path, base)
    yield rig
    rig.lifecycle.terminate()
    shutil.rmtree(base)


@pytest.fixture
def parent(criu_binary, tmp_path):
    """A rig whose process has a child, which has not used CUDA."""
    base = Path(tempfile.mkdtemp(prefix="gc-"))
    rig = Rig(criu_binary, tmp_path, base, ["sh", "-c", "sleep 1000 & wait"])
    children = rig.lifecycle.capsule.other_processes
    until(lambda: [procfs.arguments(pid) for pid in children()] == [("sleep", "1000")], "the child is there")
    rig.driver.start(pid=rig.lifecycle.capsule.other_processes()[0])
    yield rig
    rig.lifecycle.terminate()
    shutil.rmtree(base)


@pytest.fixture
def hog(rig):
    """Another process that takes what the kernel left free on A."""
    return lambda: rig.driver.start({A: 50 << 20})


def test_a_cycle_frees_the_gpu_and_brings_it_back(rig):
    before = rig.driver.free(A)
    rig.lifecycle.checkpoint()
    assert rig.driver.free(A) == 100 << 20
    assert rig.lifecycle.image.manifest.device_bytes == {A: rig.MEMORY}
    assert rig.lifecycle.image.manifest.node_gpus == [A, B]
    rig.lifecycle.wake()
    assert rig.driver.free(A) == before
    rig.runs_on()


def states(pid: int) -> set[str]:
    """The letters of proc(5) of all its threads; t: held by a tracer."""
    stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return {stat.rpartition(")")[2].split()[0] for stat in stats}


def test_a_child_with_device_files_does_not_matter_to_a_suspend(parent):
    (child,) = parent.lifecycle.capsule.other_processes()
    parent.driver.processes[child].nvml = True
    assert [each.code for each in suspend.findings(parent.lifecycle.kernel) if each.blocks] == ["CHILD_PROCESSES"]
    assert [each.code for each in suspend.findings(parent.lifecycle.kernel, writes=False) if each.blocks] == []
    assert "it has open device files of the GPU" in parent.fails("checkpoint", "CHILD_PROCESSES").message
    parent.runs_on()
    parent.lifecycle.suspend()
    parent.sleeps(State.SUSPENDED)
    assert parent.driver.free(A) == 100 << 20
    error = parent.fails("checkpoint", "CHILD_PROCESSES")
    assert error.details["pids"] == [child]
    parent.sleeps(State.SUSPENDED)
    parent.lifecycle.resume()
    parent.runs_on()
    assert alive([child]) == [child]


def test_nothing_of_a_restored_process_runs_before_the_driver_is_done(rig, monkeypatch):
    """A thread that waited in the driver's code would look at pages that are not there yet."""
    rig.lifecycle.checkpoint()
    call, seen = rig.driver.call, []

    def watched(op: str, **args):
        if op in ("cuda.restore", "cuda.unlock"):
            seen.append((op, states(rig.pid)))
        return call(op, **args)

    monkeypatch.setattr(rig.driver, "call", watched)
    rig.lifecycle.wake()
    assert seen == [("cuda.restore", {"t"}), ("cuda.unlock", {"t"})]
    assert states(rig.pid) == {"S"}
    rig.runs_on()


def test_a_kernel_runs_on_after_a_checkpoint_that_fails(rig, monkeypatch):
    monkeypatch.setattr(rig.lifecycle.engine.store, "begin", lambda *_: 1 / 0)
    rig.fails("checkpoint", "INTERNAL")
    rig.runs_on()


@pytest.mark.parametrize("verb", ["checkpoint", "save"])
def test_a_kernel_runs_on_after_a_dump_whose_manifest_cannot_be_made(rig, tmp_path, verb):
    """The processes are stopped by then."""
    store = rig.lifecycle.engine.store = Store(tmp_path / "images", Keyring(tmp_path / "keys"))
    rig.cycle()
    (record,) = store.generations.directory.glob("*.json")
    good = record.read_text()
    record.write_text("[")
    arguments = [SavePoint("one")] if verb == "save" else []
    with pytest.raises(KeyUnusable) as caught:
        getattr(rig.lifecycle, verb)(*arguments)
    assert caught.value.left == "the kernel runs on"
    rig.runs_on()
    assert not states(rig.pid) & {"t", "T"}
    assert not list(store.root.glob(".draft-*"))
    record.write_text(good)
    rig.cycle()


def test_a_node_that_gives_no_thread_to_hash_files_keeps_no_checkpoint_from_its_end(rig, monkeypatch):
    """The image is there by then: a kernel that ran on would leave it behind as its newest one."""
    start, hashes = threading.Thread.start, rig.lifecycle.engine.store.hashes
    refused: list[str] = []

    def limited(thread: threading.Thread) -> None:
        if thread.name == "gpu-ckpt-hashes":
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(hashes, "_unsaved", True)
    monkeypatch.setattr(threading.Thread, "start", limited)
    rig.lifecycle.checkpoint()
    assert refused
    rig.sleeps(State.CHECKPOINTED)
    monkeypatch.setattr(threading.Thread, "start", start)
    hashes.begin()
    hashes.settle()
    assert not hashes._unsaved
    rig.lifecycle.wake()
    rig.runs_on()


def test_a_suspended_kernel_over_the_quota_stays_suspended(rig):
    """No preflight comes before a dump from host memory: the store itself refuses, before anything is written."""
    rig.lifecycle.suspend()
    rig.lifecycle.engine.store.quota = Quota(bytes=1 << 20)
    error = rig.fails("checkpoint", "QUOTA_EXCEEDED")
    assert error.left == "the kernel is suspended, its device memory is kept in host memory"
    assert rig.lifecycle.engine.store.images() == []
    assert not list(rig.lifecycle.engine.store.root.glob(".draft-*"))
    rig.sleeps(State.SUSPENDED)
    rig.lifecycle.wake()
    rig.runs_on()


def test_too_full_to_restore_keeps_the_image_and_never_calls_the_driver(rig, hog):
    rig.lifecycle.checkpoint()
    other = hog()
    error = rig.fails("wake", "GPU_FULL")
    assert error.left == f"the image is kept as {rig.lifecycle.image.id}"
    assert rig.gate.errors_seen == [error]
    assert all(op != "cuda.restore" for op, _ in rig.driver.calls)
    rig.sleeps(State.CHECKPOINTED)
    rig.driver.remove(other)
    rig.lifecycle.wake()
    rig.runs_on()


@pytest.mark.parametrize("step", ["criu_restore", "cuda_resume", "connect", "thaw"])
def test_a_wake_that_its_owner_ends_says_so(rig, step):
    """Not that a capsule was lost: that was the owner's doing, and no hint about a dead kernel helps."""
    rig.lifecycle.checkpoint()
    ended = []

    def end(event: StepEvent) -> None:
        if (event.kind, event.step) == ("completed", step):
            ended.append(threading.Thread(target=rig.lifecycle.terminate))
            ended[0].start()
            until(lambda: rig.lifecycle.capsule.poll() is not None)

    rig.lifecycle.trace.sinks.append(end)
    with pytest.raises(KernelLost, match="ended by its owner") as caught:
        rig.lifecycle.wake()
    ended[0].join()
    image = rig.lifecycle.engine.store.images()[0].id
    assert f"the image is kept as {image}" in caught.value.left
    assert "The image is an earlier state of it" in caught.value.hint
    assert rig.lifecycle.state is State.DEAD
    assert len(rig.lifecycle.engine.store.images()) == 1


def test_a_kernel_that_is_lost_without_an_image_names_none(rig):
    os.kill(rig.pid, signal.SIGKILL)
    until(lambda: rig.lifecycle.capsule.poll() is not None)
    error = rig.fails("suspend", "KERNEL_LOST")
    assert error.left == "the kernel is gone"
    assert "image" not in f"{error}"


@pytest.mark.parametrize("error", [NoSpace, NoMemory])
def test_too_little_memory_in_the_middle_says_what_is_left(rig, error):
    """Both come as well when a dump, or a wake, is half done."""

    def fault(event: StepEvent) -> None:
        if (event.kind, event.step) in (("completed", "dump"), ("completed", "criu_restore")):
            raise error("as it went")

    rig.lifecycle.trace.faults.append(fault)
    assert rig.fails("checkpoint", error.code).left == "the kernel runs on"
    rig.runs_on()
    rig.lifecycle.trace.faults.clear()
    rig.lifecycle.checkpoint()
    rig.lifecycle.trace.faults.append(fault)
    left = rig.fails("wake", error.code).left
    assert left == f"the image is kept as {rig.lifecycle.image.id}"
    rig.sleeps(State.CHECKPOINTED)


def test_too_full_to_resume_stays_suspended_and_can_still_go_to_disk(rig, hog):
    rig.lifecycle.suspend()
    other = hog()
    error = rig.fails("wake", "GPU_FULL")
    assert "suspended" in error.left
    rig.sleeps(State.SUSPENDED)
    assert rig.fake.state == CHECKPOINTED
    rig.lifecycle.checkpoint()
    rig.fails("restore", "GPU_FULL")
    rig.driver.remove(other)
    rig.lifecycle.restore()
    rig.runs_on()


@pytest.mark.parametrize("step", ["cuda_resume", "connect", "thaw"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_step_of_a_wake_that_fails_by_chance_is_tried_once_more(rig, step, times):
    """In a fresh process; after the second failure the image is kept and the error says what to do."""
    rig.lifecycle.checkpoint()
    image, pids = rig.lifecycle.image, []

    def fault(event: StepEvent) -> None:
        if (event.kind, event.step) == ("started", step) and len(pids) < times:
            pids.append(rig.pid)
            raise {"cuda_resume": CudaError, "connect": KernelSilent, "thaw": AgentError}[step]("by chance")

    rig.lifecycle.trace.faults.append(fault)
    if times == 1:
        rig.lifecycle.wake()
    else:
        error = rig.fails(
            "wake", {"cuda_resume": "CUDA_FAILED", "connect": "KERNEL_SILENT", "thaw": "AGENT_FAILED"}[step]
        )
        assert error.left == f"the image is kept as {image.id}"
        assert error.hint.startswith("It was tried twice")
        assert f"match {image.id}" in error.hint
        assert rig.gate.errors_seen == [error], "once, after the second try"
        rig.sleeps(State.CHECKPOINTED)
        rig.lifecycle.wake()
    assert len(set(pids)) == times
    assert alive(pids) == []
    rig.runs_on()


@pytest.mark.parametrize("error", [GpuFull, CudaTimeout, NoSpace, ValueError])
def test_what_is_no_chance_is_not_tried_twice(rig, error):
    rig.lifecycle.checkpoint()
    tries = []

    def fault(event: StepEvent) -> None:
        if (event.kind, event.step) == ("started", "cuda_resume"):
            tries.append(rig.pid)
            raise error("as ever")

    rig.lifecycle.trace.faults.append(fault)
    rig.fails("wake", getattr(error, "code", "INTERNAL"))
    assert len(tries) == 1
    rig.lifecycle.trace.faults.remove(fault)
    rig.lifecycle.wake()
    rig.runs_on()


def test_another_restore_has_the_gpu_locked(rig):
    rig.lifecycle.suspend()
    with rig.lifecycle.engine.gpus.reservation({A: 0}, 1.0):
        assert rig.fails("resume", "GPU_FULL").details["locked"]
    rig.sleeps(State.SUSPENDED)
    rig.lifecycle.resume()
    rig.runs_on()


def test_room_lost_between_the_suspend_and_its_undo_ends_suspended_not_ruined(rig, hog):
    """A dump fails after somebody took the freed memory: the way back is barred, and is not forced."""
    others = []

    def take(event: StepEvent) -> None:
        if (event.kind, event.step) == ("started", "dump"):
            others.append(hog())
            raise KernelSilent("the dump fails")

    rig.lifecycle.trace.faults.append(take)
    error = rig.fails("checkpoint", "KERNEL_SILENT")
    assert "suspended" in error.left
    rig.sleeps(State.SUSPENDED)
    rig.lifecycle.trace.faults.remove(take)
    rig.driver.remove(others[0])
    rig.lifecycle.wake()
    rig.runs_on()


def test_gpu_work_that_does_not_end_is_a_timeout_and_the_kernel_runs_on(rig):
    rig.fake.busy = True
    error = rig.fails("checkpoint", "CUDA_TIMEOUT")
    assert error.left == "the kernel runs on"
    assert error.__cause__.left == "the process runs on", "what the step left, before it was undone"
    rig.fake.busy = False
    rig.runs_on()
    rig.cycle()


def test_memory_of_a_kind_the_driver_cannot_save(rig):
    rig.fake.unsupported = True
    for _ in range(2):  # the second time the driver says only CUDA_ERROR_UNKNOWN
        rig.fails("suspend", "CUDA_UNSUPPORTED")
    rig.fake.unsupported = False
    rig.runs_on()


@pytest.mark.parametrize("seen", [True, False], ids=["before", "at-the-swap"])
@pytest.mark.parametrize("verb", ["suspend", "checkpoint"])
def test_memory_of_jax_on_several_gpus_is_not_left_to_the_driver(rig, monkeypatch, verb, seen):
    """The library that was to move it may be busy, or have no host memory."""
    if not seen:
        monkeypatch.setattr(cuda_processes, "moved_by_driver", lambda *_: False)
    else:
        monkeypatch.setattr(FastPath, "why_slow", lambda *_: "there is no library")
    rig.fake.memory = {A: rig.MEMORY}
    rig.gate.report = {"jax_preallocates": True}
    getattr(rig.lifecycle, verb)()
    rig.lifecycle.wake()
    rig.fake.memory = {A: rig.MEMORY, B: rig.MEMORY}
    assert "JAX" in rig.fails(verb, "CUDA_UNSUPPORTED").message
    assert (rig.lifecycle.state, rig.fake.state) == (State.RUNNING, RUNNING)
    assert rig.gate.serves


def test_a_refusal_of_the_driver_has_its_reason(rig):
    def codes() -> set[str]:
        return {finding.code for finding in suspend.findings(rig.lifecycle.kernel) if finding.blocks}

    assert codes() == set()
    rig.fake.mps = True
    assert codes() == {"MPS"}
    assert rig.fails("checkpoint", "MPS").left == "the kernel runs on"
    rig.fake.mps = False
    rig.driver.mig = {B}
    assert codes() == set(), "that is another GPU"
    rig.driver.mig = {A}
    assert codes() == {"MIG"}
    rig.fails("suspend", "MIG")
    assert ("cuda.lock", rig.pid) not in rig.driver.calls, "found before the kernel was disturbed"
    rig.driver.mig = set()
    rig.fake.profiled = True
    assert codes() == set(), "a loaded library alone is no use of it"
    error = rig.fails("checkpoint", "PROFILER_USED")
    assert error.details["cuda_name"] == "CUDA_ERROR_NOT_SUPPORTED"
    assert codes() == {"PROFILER_USED"}, "it is as long as the process lives"
    rig.runs_on()


@pytest.mark.parametrize("refused", [None, "cuda.lock", "cuda.checkpoint"])
def test_that_there_is_cuda_state_to_resume_is_known_from_how_the_step_ended(rig, monkeypatch, refused):
    """Not from a mark that it makes before it calls the driver, which would outlive its failure."""
    call, before = rig.driver.call, []

    def refusing(op: str, **args):
        if op in ("cuda.lock", "cuda.checkpoint"):
            before.append(rig.lifecycle.kernel.saved.cuda)
            if op == refused:
                raise CudaError("Refused.")
        return call(op, **args)

    monkeypatch.setattr(rig.driver, "call", refusing)
    if refused is None:
        rig.lifecycle.suspend()
    else:
        rig.fails("suspend", "CUDA_FAILED")
    assert before and not any(before)
    assert rig.lifecycle.kernel.saved.cuda is (refused is None)
    rig.lifecycle.wake()
    monkeypatch.undo()
    rig.runs_on()


@pytest.mark.parametrize("op", ["cuda.lock", "cuda.checkpoint"])
def test_a_suspend_that_gets_no_thread_is_undone_as_one_that_the_driver_refuses(rig, monkeypatch, op):
    """A library's own error says nothing about how far the driver came, too."""
    call = rig.driver.call

    def exhausted(asked: str, **args):
        if asked == op:
            raise RuntimeError("can't start new thread")
        return call(asked, **args)

    monkeypatch.setattr(rig.driver, "call", exhausted)
    assert rig.fails("suspend", "LIMIT_REACHED").left == "the kernel runs on"
    monkeypatch.undo()
    rig.runs_on()
    assert not states(rig.pid) & {"t", "T"}
    rig.cycle()


@pytest.mark.parametrize("verb", ["suspend", "checkpoint"])
def test_a_driver_that_is_too_old_is_found_before_the_kernel_is_disturbed(parent, verb):
    """Of a kernel without the library, which alone could swap out its memory."""
    parent.driver.too_old = True
    (child,) = parent.lifecycle.capsule.other_processes()
    parent.driver.processes[child].cuda = True
    for writes in (True, False):
        found = suspend.findings(parent.lifecycle.kernel, writes=writes)
        assert [each.code for each in found if each.blocks] == ["DRIVER_TOO_OLD"]
        assert not any("suspend is possible" in each.error.hint for each in found if each.blocks)
    parent.driver.calls.clear()
    assert parent.fails(verb, "DRIVER_TOO_OLD").left == "the kernel runs on"
    assert {op for op, _ in parent.driver.calls if op.startswith("cuda.")} <= {"cuda.open", "cuda.state"}
    parent.driver.too_old = False
    parent.runs_on()


def test_an_image_does_not_come_back_where_the_driver_is_too_old(rig):
    """Such a driver shows nothing of a process that another one has suspended."""
    rig.lifecycle.checkpoint()
    rig.driver.too_old = True
    assert rig.fails("wake", "DRIVER_TOO_OLD")
    assert rig.lifecycle.state is State.CHECKPOINTED
    rig.driver.too_old = False
    rig.lifecycle.wake()
    rig.runs_on()


@pytest.mark.parametrize("op", ["cuda.lock", "cuda.checkpoint"])
@pytest.mark.parametrize("verb", ["suspend", "checkpoint"])
def test_a_driver_that_refuses(rig, op, verb):
    rig.driver.refuse[op] = 999
    error = rig.fails(verb, "CUDA_FAILED")
    assert error.details["cuda_result"] == 999
    assert error.left == "the kernel runs on"
    del rig.driver.refuse[op]
    rig.runs_on()
    rig.cycle()


def test_a_driver_that_refuses_to_bring_a_suspended_process_back(rig):
    rig.lifecycle.suspend()
    rig.driver.refuse["cuda.restore"] = 999
    rig.fails("resume", "CUDA_FAILED")
    rig.sleeps(State.SUSPENDED)
    del rig.driver.refuse["cuda.restore"]
    rig.lifecycle.resume()
    rig.runs_on()


def test_a_driver_that_refuses_to_bring_a_restored_process_back(rig):
    rig.lifecycle.checkpoint()
    rig.driver.refuse["cuda.restore"] = 999
    rig.fails("wake", "CUDA_FAILED")
    rig.sleeps(State.CHECKPOINTED)
    assert rig.lifecycle.capsule is None
    del rig.driver.refuse["cuda.restore"]
    rig.lifecycle.wake()
    rig.runs_on()


class Lost:
    """The helper ends in the ``nth`` call of ``op``, ``before`` or ``after`` the driver has done its work."""

    def __init__(self, driver: FakeDriver, op: str, when: str) -> None:
        self.call, self.op, self.when, self.happened = driver.call, op, when, False
        driver.call = self

    def __call__(self, op: str, **args):
        if op != self.op or self.happened:
            return self.call(op, **args)
        self.happened = True
        if self.when == "after":
            self.call(op, **args)
        raise HelperGone(f"The CUDA helper ended during {op}.", op=op)


@pytest.mark.parametrize("said", [{"gc": 0.25, "trim": "long", "a path": 1.0}, [0.25], None])
def test_a_quiesce_s_parts_are_in_the_trace_and_not_in_the_image(rig, said):
    """Only numbers of parts that the agent knows of: the kernel's user may have changed it."""
    rig.gate.report, events = {"seconds": said}, []
    rig.lifecycle.trace.sinks.append(events.append)
    rig.lifecycle.checkpoint()
    (parts,) = (event.parts for event in events if (event.kind, event.step) == ("completed", "quiesce"))
    assert parts == ({"gc": 0.25} if isinstance(said, dict) else {})
    assert "seconds" not in rig.lifecycle.image.manifest.report


def test_the_gpus_are_queried_while_the_processes_are_inspected(rig, monkeypatch):
    """Of a kernel with many threads the inspection takes as long as all the rest of a preflight."""
    began, inspect, used_by = threading.Event(), Capsule.inspect, rig.lifecycle.engine.gpus.used_by

    def inspected(capsule, **how):
        began.set()
        return inspect(capsule, **how)

    def queried(*pids):
        assert began.wait(10), "the inspection comes after this"
        return used_by(*pids)

    with monkeypatch.context() as patched:
        patched.setattr(Capsule, "inspect", inspected)
        patched.setattr(rig.lifecycle.engine.gpus, "used_by", queried)
        rig.lifecycle.checkpoint()
    rig.sleeps(State.CHECKPOINTED)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("op", ["cuda.state", "nvml.users", "nvml.gpus", "cuda.lock", "cuda.checkpoint"])
def test_the_helper_is_killed_on_the_way_out(rig, op, when):
    """Also when nobody heard that the driver had locked or suspended the process already."""
    lost = Lost(rig.driver, op, when)
    error = rig.fails("checkpoint", "HELPER_GONE")
    assert lost.happened
    assert error.left == "the kernel runs on"
    rig.runs_on()
    rig.cycle()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("op", ["nvml.free", "cuda.state", "cuda.restore", "cuda.unlock"])
@pytest.mark.parametrize("away", ["suspend", "checkpoint"])
def test_the_helper_is_killed_on_the_way_back(rig, away, op, when):
    """A process that was restored from an image is given up for another one; one that is suspended has to wait."""
    getattr(rig.lifecycle, away)()
    state = rig.lifecycle.state
    lost = Lost(rig.driver, op, when)
    if away == "checkpoint" and op != "nvml.free":
        rig.lifecycle.wake()
        assert lost.happened
        rig.runs_on()
        return
    rig.fails("wake", "HELPER_GONE")
    assert lost.happened
    rig.sleeps(state)
    rig.lifecycle.wake()
    rig.runs_on()


def test_device_files_that_nvml_has_open_are_reported_and_everything_is_undone(rig):
    rig.fake.nvml = True
    error = rig.fails("checkpoint", "DEVICE_HELD")
    assert "/dev/nvidiactl" in error.details["files"]
    rig.runs_on()
    rig.fake.nvml = False
    rig.cycle()


def test_device_files_that_are_open_and_too_little_gpu_memory_for_the_undo(rig, hog):
    """The driver never restores without free memory, not even for an undo."""
    rig.fake.nvml = True
    checkpoint, others = rig.driver._cuda_checkpoint, []
    rig.driver._cuda_checkpoint = lambda pid: (checkpoint(pid), others.append(hog()))[0]
    error = rig.fails("checkpoint", "DEVICE_HELD")
    assert "suspended" in error.left
    rig.sleeps(State.SUSPENDED)
    rig.driver.remove(others[0])
    rig.lifecycle.wake()
    rig.runs_on()


def test_another_gpu(rig, hog):
    rig.lifecycle.checkpoint()
    hog()
    rig.lifecycle.restore({A: B})
    assert rig.fake.memory == {B: rig.MEMORY}
    rig.runs_on()


def test_a_mapping_onto_a_gpu_that_is_not_there_is_refused_before_anything_is_tried(rig):
    rig.lifecycle.checkpoint()
    with pytest.raises(GpuCkptError) as caught:
        rig.lifecycle.restore({A: "GPU-00000000-0000-0000-0000-0000000000ff"})
    assert caught.value.code == "BAD_REQUEST"
    rig.sleeps(State.CHECKPOINTED)
    rig.lifecycle.restore()
    rig.runs_on()


def test_a_node_whose_gpus_have_other_names(rig):
    """The image's GPUs are none of this node's: they follow in order."""
    rig.lifecycle.checkpoint()
    c, d = A[:-1] + "c", A[:-1] + "d"
    rig.driver.gpus = {c: 100 << 20, d: 100 << 20}
    rig.lifecycle.restore()
    assert rig.fake.memory == {c: rig.MEMORY}
    rig.runs_on()


def test_a_gate_that_cannot_be_reconnected_at_once_is_tried_again(rig):
    """The undo of a failed dump finds the kernel silent: it is asked once more before the clients are given up."""
    rig.gate.fails["open"] = KernelSilent("no answer")

    def fault(event: StepEvent) -> None:
        if (event.kind, event.step) == ("started", "dump"):
            raise KernelSilent("the dump fails")

    rig.lifecycle.trace.faults.append(fault)
    rig.fails("checkpoint", "KERNEL_SILENT")
    rig.lifecycle.trace.faults.remove(fault)
    rig.runs_on()
    rig.cycle()


def test_no_plan_calls_the_drivers_restore_outside_a_reservation(rig, hog, monkeypatch):
    """The driver is asked to restore only while the GPU's lock is held, in all cases."""
    locked = []

    def restore(pid: int, pairs: list[tuple[str, str]]) -> None:
        with pytest.raises(GpuFull), rig.lifecycle.engine.gpus.reservation({A: 0}, 0.0):
            pass
        locked.append(pid)
        type(rig.driver)._cuda_restore(rig.driver, pid, pairs)

    monkeypatch.setattr(rig.driver, "_cuda_restore", restore, raising=False)
    rig.cycle()
    rig.lifecycle.suspend()
    rig.lifecycle.resume()
    rig.fake.nvml = True
    rig.fails("suspend", "DEVICE_HELD")
    rig.runs_on()
    assert len(locked) == 3


def test_a_locked_process_is_unlocked_by_the_next_verb_when_its_own_could_not(rig):
    """Unlock fails twice (the driver refuses): the state is suspended, and the next wake needs no free memory."""
    rig.lifecycle.suspend()
    rig.driver.refuse["cuda.unlock"] = 999
    rig.fails("wake", "CUDA_FAILED")
    assert rig.fake.state == LOCKED
    rig.driver.start({A: 40 << 20})  # the GPU is full now, with the kernel's own memory
    del rig.driver.refuse["cuda.unlock"]
    rig.lifecycle.wake()
    rig.runs_on()


# -- the end of a kernel


def asked(rig, pid: int) -> list[str]:
    return [op for op, lane in rig.driver.calls if lane == pid and op in ("cuda.lock", "cuda.checkpoint")]


def test_a_restored_process_is_off_the_gpu_before_it_is_killed(rig):
    rig.cycle()
    pid = rig.pid
    rig.driver.calls.clear()
    rig.lifecycle.terminate()
    assert asked(rig, pid) == ["cuda.lock", "cuda.checkpoint"]
    assert rig.fake.state == CHECKPOINTED
    assert alive([pid]) == []


def test_a_process_that_the_driver_never_restored_is_killed_as_it_is(rig):
    pid = rig.pid
    rig.lifecycle.terminate()
    assert asked(rig, pid) == []
    assert alive([pid]) == []


@pytest.mark.parametrize("op", ["cuda.lock", "cuda.checkpoint"])
def test_a_driver_that_refuses_keeps_nobody_from_ending_a_kernel(rig, op):
    rig.cycle()
    pid, rig.driver.refuse[op] = rig.pid, OPERATING_SYSTEM
    rig.lifecycle.terminate()
    assert alive([pid]) == []
    assert rig.lifecycle.state is State.DEAD


def test_a_driver_that_does_not_answer_delays_the_end_of_a_kernel_for_a_moment_only(rig, monkeypatch):
    rig.cycle()
    pid, answer, over = rig.pid, rig.driver.call, threading.Event()
    monkeypatch.setattr(cuda_processes, "_BEFORE_END", 0.2)
    monkeypatch.setattr(rig.driver, "call", lambda *args, **more: over.wait(60) and answer(*args, **more))
    rig.lifecycle.terminate()
    assert alive([pid]) == []
    over.set()
