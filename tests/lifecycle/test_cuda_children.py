"""Kernels whose child processes have CUDA contexts of their own, when the CUDA driver refuses, hangs, or they end.

The processes, their capsule, CRIU and the images are real; the driver is the fake of `test_lifecycle_fake_cuda`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from gate_double import GateDouble
from harness import alive
from test_lifecycle_fake_cuda import A, B, Lost, Rig, states
from waiting import until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.cuda.checkpoint_api import DriverRefused
from jupyter_gpu_ckpt.cuda.cuda import INVALID_VALUE
from jupyter_gpu_ckpt.cuda.fastpath import Amounts, FastPath
from jupyter_gpu_ckpt.errors import CriuError, GpuCkptError, HelperGone
from jupyter_gpu_ckpt.image.draft import Draft
from jupyter_gpu_ckpt.lifecycle import cuda_processes, dump, host_memory, suspend
from jupyter_gpu_ckpt.lifecycle.lifecycle import Lifecycle
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.testing.fake_cuda import CHECKPOINTED, LOCKED, OPERATING_SYSTEM, RUNNING, FakeCuda, FakeProcess
from jupyter_gpu_ckpt.testing.fake_helper import FakeHelper
from jupyter_gpu_ckpt.trace import StepEvent, Trace

pytestmark = pytest.mark.sweep(1 / 2, of="file")

COMMANDS = ("sleep", "1001"), ("sleep", "1002"), ("sleep", "1003")
SHELL = ["sh", "-c", f"{' & '.join(map(' '.join, COMMANDS))} & wait; sleep 1000"]
MIB = 1 << 20


class Family(Rig):
    """A kernel with 60 MiB on GPU A, and children with 20 there, 30 on GPU B, and none: `COMMANDS`."""

    def __init__(self, criu_binary, directory: Path, base: Path) -> None:
        super().__init__(criu_binary, directory, base, SHELL)
        until(lambda: set(self.pids()) == set(COMMANDS), "the children are there")
        memory = [{A: 20 * MIB}, {B: 30 * MIB}, None]
        self.fakes = dict(
            zip(COMMANDS, (self._start(*each) for each in zip(COMMANDS, memory, strict=True)), strict=True)
        )

    def _start(self, command: tuple[str, ...], memory: dict[str, int] | None) -> FakeProcess:
        return self.driver.processes[self.driver.start(memory, pid=self.pids()[command])]

    def pids(self) -> dict[tuple[str, ...], int]:
        assert self.lifecycle.capsule is not None
        found: dict[tuple[str, ...], int] = {}
        for pid in self.lifecycle.capsule.other_processes():
            with contextlib.suppress(*procfs.GONE):
                found[procfs.arguments(pid)] = pid  # of a zombie there are none
        return {command: pid for command, pid in found.items() if command}

    @property
    def children(self) -> list[int]:
        """The children that use CUDA."""
        return [pid for command, pid in sorted(self.pids().items()) if self.fakes[command].cuda]

    def begin(self, command: tuple[str, ...], memory: dict[str, int]) -> None:
        """Have a child begin to use CUDA."""
        fake = self.fakes[command]
        fake.cuda, fake.memory = True, memory

    @staticmethod
    def use_no_cuda(*fakes: FakeProcess) -> None:
        for fake in fakes:
            fake.cuda, fake.memory = False, {}

    def kill(self, command: tuple[str, ...]) -> None:
        pid = self.pids()[command]
        os.kill(pid, signal.SIGKILL)
        self.driver.processes.pop(pid, None)
        until(lambda: not alive([pid]), "it has ended")

    def _follow(self, event: StepEvent) -> None:
        if (event.kind, event.step) == ("completed", "end_process"):
            own = (self.fake, *self.fakes.values())
            for pid in [pid for pid, each in self.driver.processes.items() if any(each is mine for mine in own)]:
                self.driver.remove(pid)
        elif (event.kind, event.step) == ("completed", "criu_restore"):
            self.driver.add(self.fake, self.pid)
            for command, pid in self.pids().items():
                self.driver.add(self.fakes[command], pid)

    def in_state(self, *expected: int) -> None:
        assert [self.fake.state, *(fake.state for fake in self.fakes.values() if fake.cuda)] == [*expected]

    def runs_on(self) -> None:
        super().runs_on()
        for pid in self.children:
            assert self.driver.processes[pid].state == RUNNING
        assert "t" not in set().union(*(states(pid) for pid in (self.pid, *self.pids().values())))


@pytest.fixture
def family(criu_binary, tmp_path):
    base = Path(tempfile.mkdtemp(prefix="gc-"))
    family = Family(criu_binary, tmp_path, base)
    yield family
    family.lifecycle.terminate()
    shutil.rmtree(base)


def test_the_kernel_and_its_children_leave_the_gpus_together_and_come_back(family):
    free = {uuid: family.driver.free(uuid) for uuid in (A, B)}
    assert host_memory.device_bytes(family.lifecycle.kernel) == {A: 80 * MIB, B: 30 * MIB}
    assert [each for each in suspend.findings(family.lifecycle.kernel, writes=False) if each.blocks] == []
    for _ in range(2):
        family.lifecycle.suspend()
        family.sleeps(State.SUSPENDED)
        family.in_state(CHECKPOINTED, CHECKPOINTED, CHECKPOINTED)
        assert (family.driver.free(A), family.driver.free(B)) == (100 * MIB, 100 * MIB)
        assert host_memory.device_bytes(family.lifecycle.kernel) == {}
        family.lifecycle.resume()
        family.runs_on()
        assert free == {uuid: family.driver.free(uuid) for uuid in (A, B)}


@pytest.mark.parametrize("suspended", [False, True])
def test_a_checkpoint_takes_them_all_and_a_wake_brings_them_back(family, suspended):
    if suspended:
        family.lifecycle.suspend()
    image = family.lifecycle.checkpoint()
    family.sleeps(State.CHECKPOINTED)
    assert image.manifest.device_bytes == {A: 80 * MIB, B: 30 * MIB}
    family.lifecycle.wake()
    assert set(family.pids()) == set(COMMANDS)
    family.runs_on()
    family.cycle()


def test_none_of_the_restored_processes_runs_before_the_driver_is_done_with_all(family, monkeypatch):
    family.lifecycle.checkpoint()
    call, seen = family.driver.call, []

    def watched(op: str, **args):
        if op in ("cuda.restore", "cuda.unlock"):
            seen.append((op, [states(pid) for pid in (family.pid, *family.pids().values())]))
        return call(op, **args)

    monkeypatch.setattr(family.driver, "call", watched)
    family.lifecycle.wake()
    assert sorted(op for op, _ in seen) == ["cuda.restore"] * 3 + ["cuda.unlock"] * 3
    assert all(each == [{"t"}] * 4 for _, each in seen)
    family.runs_on()


@pytest.mark.parametrize("verb", ["suspend", "checkpoint"])
def test_a_kernel_that_uses_cuda_in_its_children_only(family, verb):
    family.fake.cuda, family.fake.memory = False, {}
    getattr(family.lifecycle, verb)()
    assert all(fake.state == CHECKPOINTED for fake in family.fakes.values() if fake.cuda)
    assert (family.driver.free(A), family.driver.free(B)) == (100 * MIB, 100 * MIB)
    family.lifecycle.wake()
    family.runs_on()


@pytest.mark.parametrize("fault", ["busy", "unsupported", "profiled"])
@pytest.mark.parametrize("verb", ["suspend", "checkpoint"])
def test_a_child_that_the_driver_refuses_keeps_all_of_them_where_they_are(family, verb, fault):
    codes = {"busy": "CUDA_TIMEOUT", "unsupported": "CUDA_UNSUPPORTED", "profiled": "PROFILER_USED"}
    pid = family.pids()[COMMANDS[1]]
    setattr(family.fakes[COMMANDS[1]], fault, True)
    error = family.fails(verb, codes[fault])
    assert error.message.startswith(f"Of the kernel's child sleep 1002 (pid {pid}): ")
    assert (error.details["pid"], error.details["command"]) == (pid, "sleep 1002")
    assert error.left == "the kernel runs on"
    family.runs_on()
    setattr(family.fakes[COMMANDS[1]], fault, False)
    family.cycle()


def test_a_child_that_begins_to_use_cuda_between_preflight_and_lock_goes_along(family):
    call = family.driver.call

    def begins(op: str, **args):
        if op == "cuda.lock" and not family.fakes[COMMANDS[2]].cuda:
            family.begin(COMMANDS[2], {B: 5 * MIB})
        return call(op, **args)

    family.driver.call = begins
    family.lifecycle.suspend()
    family.in_state(*[CHECKPOINTED] * 4)
    assert family.lifecycle.kernel.saved.device_bytes == {A: 80 * MIB, B: 35 * MIB}
    family.lifecycle.checkpoint()
    family.lifecycle.wake()
    family.runs_on()


def test_a_child_that_begins_to_use_cuda_after_the_suspend_goes_along(family):
    family.lifecycle.suspend()
    family.begin(COMMANDS[2], {B: 5 * MIB})
    family.lifecycle.checkpoint()
    assert family.lifecycle.kernel.saved.device_bytes == {A: 80 * MIB, B: 35 * MIB}
    family.lifecycle.wake()
    family.runs_on()
    family.cycle()


def test_a_child_that_begins_to_use_cuda_after_the_connections_are_closed_goes_along(family, monkeypatch):
    real = dump._require_fit

    def begins(kernel):
        real(kernel)
        if not family.fakes[COMMANDS[2]].cuda:
            family.begin(COMMANDS[2], {B: 5 * MIB})

    monkeypatch.setattr(dump, "_require_fit", begins)
    family.lifecycle.checkpoint()
    assert family.lifecycle.kernel.saved.device_bytes == {A: 80 * MIB, B: 35 * MIB}
    family.lifecycle.wake()
    family.runs_on()


def test_a_child_begins_to_use_cuda_just_before_the_dump_of_a_kernel_without(family):
    """The kernel comes back with it, and where the dump fails, too."""
    family.use_no_cuda(family.fake, *map(family.fakes.get, COMMANDS))
    family.lifecycle.suspend()
    family.begin(COMMANDS[2], {B: 5 * MIB})
    family.driver.refuse["cuda.checkpoint"] = INVALID_VALUE
    family.fails("checkpoint", "CUDA_FAILED")
    del family.driver.refuse["cuda.checkpoint"]
    assert family.fakes[COMMANDS[2]].state == RUNNING
    family.lifecycle.checkpoint()
    assert family.lifecycle.kernel.saved.device_bytes == {B: 5 * MIB}
    family.lifecycle.wake()
    family.runs_on()


@pytest.mark.parametrize("step", ["preflight", "disconnect"])
@pytest.mark.parametrize("becomes", ["a user of CUDA", "none", "nothing"])
def test_a_child_that_is_beginning_to_use_cuda_is_waited_for(family, monkeypatch, step, becomes):
    """torch's compile worker imports torch for seconds before it calls the driver."""
    monkeypatch.setattr(suspend, "_BEGINS", 0.5)
    fake = family.fakes[COMMANDS[2]]
    began = threading.Event()

    def end() -> None:
        time.sleep(0.1)
        if becomes == "none":
            fake.cuda = False
        if becomes != "nothing":
            fake.beginning = False

    def begin() -> None:
        if not began.is_set():
            began.set()
            fake.cuda, fake.memory, fake.beginning = True, {B: 5 * MIB}, True
            threading.Thread(target=end).start()

    module, name = (suspend, "why_not") if step == "preflight" else (dump, "suspend_late")
    real = getattr(module, name)

    def begins(*args, **named):
        begin()
        return real(*args, **named)

    monkeypatch.setattr(module, name, begins)
    if becomes == "nothing":
        assert "sleep 1003" in family.fails("checkpoint", "CHILD_PROCESSES").message
        if step == "preflight":
            monkeypatch.setattr(suspend, "_has_begun", None)  # it is not waited for again
            assert "sleep 1003" in family.fails("checkpoint", "CHILD_PROCESSES").message
            monkeypatch.undo()
        fake.cuda = fake.beginning = False
    else:
        family.lifecycle.checkpoint()
        family.lifecycle.wake()
    family.runs_on()
    family.cycle()


def test_a_child_that_has_begun_between_two_looks_is_among_the_late_ones(family, monkeypatch):
    fake = family.fakes[COMMANDS[2]]
    family.lifecycle.suspend()
    fake.cuda, fake.memory, fake.beginning = True, {B: 5 * MIB}, True
    real = cuda_processes.states

    def begins(*args, **named):
        found = real(*args, **named)
        fake.beginning = False
        return found

    monkeypatch.setattr(cuda_processes, "states", begins)
    family.lifecycle.checkpoint()
    family.lifecycle.wake()
    family.runs_on()


def test_a_fork_of_a_child_that_is_beginning_is_known_by_what_it_has_inherited(family, monkeypatch):
    parent, fork = family.fakes[COMMANDS[1]], family.fakes[COMMANDS[2]]
    parent.beginning = True
    fork.device_files, fork.inherited, fork.parent = {"/dev/nvidiactl", "/dev/nvidia0"}, True, parent
    threading.Timer(0.2, lambda: setattr(parent, "beginning", False)).start()
    family.lifecycle.checkpoint()
    fork.device_files = set()
    family.lifecycle.wake()
    family.runs_on()


def test_what_a_noted_child_has_opened_itself_is_not_taken_from_it_for_a_late_one(family):
    late, noted = family.fakes[COMMANDS[0]], family.fakes[COMMANDS[2]]
    late.cuda, late.memory = False, {}
    noted.device_files, noted.inherited = {"/dev/nvidiactl"}, True
    family.lifecycle.suspend()
    noted.device_files = {"/dev/nvidiactl", "/dev/nvidia-caps/own"}
    assert "sleep 1003" in family.fails("checkpoint", "CHILD_PROCESSES").message
    late.cuda, late.memory = True, {A: 20 * MIB}
    assert "sleep 1003" in family.fails("checkpoint", "CHILD_PROCESSES").message
    assert [*family.lifecycle.kernel.inherited.values()] == [["/dev/nvidiactl"]]


@pytest.mark.parametrize("checkpoints", [True, False])
def test_memory_of_a_late_child_is_not_taken_for_that_which_the_kernel_needs(family, checkpoints):
    """Else the restore of a process finds too little, which destroys it."""
    family.lifecycle.suspend()
    family.begin(COMMANDS[2], {B: 5 * MIB})
    if checkpoints:
        family.driver.refuse["cuda.checkpoint"] = INVALID_VALUE
        family.fails("checkpoint", "CUDA_FAILED")
        del family.driver.refuse["cuda.checkpoint"]
    other = family.driver.start({B: family.driver.free(B) - 27 * MIB})
    family.fails("resume", "GPU_FULL")
    family.driver.remove(other)
    family.lifecycle.resume()
    family.runs_on()


def test_memory_of_one_late_child_is_not_taken_for_that_of_another(family):
    """The kernel itself has none, one of them is suspended, and the driver refuses the other."""
    family.use_no_cuda(family.fake, *map(family.fakes.get, COMMANDS))
    family.lifecycle.suspend()
    family.begin(COMMANDS[1], {B: 30 * MIB})
    family.begin(COMMANDS[2], {B: 5 * MIB})
    family.fakes[COMMANDS[2]].unsupported = True
    with pytest.raises(GpuCkptError):
        family.lifecycle.checkpoint()
    assert [family.fakes[command].state for command in COMMANDS[1:]] == [CHECKPOINTED, RUNNING]
    other = family.driver.start({B: family.driver.free(B) - 27 * MIB})
    family.fails("resume", "GPU_FULL")
    family.driver.remove(other)
    family.lifecycle.resume()
    assert [family.fakes[command].state for command in COMMANDS[1:]] == [RUNNING, RUNNING]


@pytest.mark.parametrize("fails", ["nvml.users", "cuda.checkpoint", "cuda.state", "cuda.lock"])
def test_a_late_child_is_taken_up_again_whatever_failed(family, monkeypatch, fails):
    """The helper ends: after the lock, instead of or right after the suspend, or with the answer of a lock."""
    family.lifecycle.suspend()
    family.begin(COMMANDS[2], {B: 5 * MIB})
    call, failed = family.driver.call, list[str]()

    def breaks(op: str, **args):
        locked = family.fakes[COMMANDS[2]].state != RUNNING
        if op == fails == "cuda.lock" and not failed:
            call(op, **args)
            locked = True
        if (op == fails and locked and not failed) or (op == "cuda.unlock" and failed and fails == "cuda.lock"):
            failed.append(op)
            raise HelperGone("It has ended.")
        return call(op, **args)

    with monkeypatch.context() as patch:
        patch.setattr(family.driver, "call", breaks)
        with pytest.raises(GpuCkptError):
            family.lifecycle.checkpoint()
    assert failed
    family.lifecycle.checkpoint()
    assert family.lifecycle.kernel.saved.device_bytes == {A: 80 * MIB, B: 35 * MIB}
    family.lifecycle.wake()
    family.runs_on()


def test_children_of_a_kernel_that_serves_off_the_gpu_are_left_where_they_are(family, monkeypatch):
    """The kernel runs cells, and nothing would bring them back."""
    monkeypatch.setattr(FastPath, "launch_gate_is_closed", lambda _: True)
    family.use_no_cuda(*map(family.fakes.get, COMMANDS))
    family.lifecycle.yield_gpu()
    family.begin(COMMANDS[2], {B: 5 * MIB})
    family.fails("checkpoint", "CHILD_PROCESSES")
    assert family.lifecycle.state is State.OFF_GPU
    assert family.fakes[COMMANDS[2]].state == RUNNING
    assert "t" not in set().union(*(states(pid) for pid in family.pids().values()))


def test_several_children_without_cuda_are_waited_for_together(family, monkeypatch):
    monkeypatch.setattr(suspend, "_BEGINS", 0.5)
    for command in COMMANDS:
        fake = family.fakes[command]
        fake.memory, fake.beginning = {}, True
        fake.cuda = True
    began = time.monotonic()
    family.fails("checkpoint", "CHILD_PROCESSES")
    assert len(family.lifecycle.kernel.without_cuda) == 3
    assert time.monotonic() - began < 3 * 0.5


@pytest.mark.parametrize("first", ["checkpoint", "suspend", "suspend by an owner that is gone"])
@pytest.mark.parametrize("inherited", [True, False])
def test_device_files_that_a_child_has_inherited_are_taken_from_it(family, first, inherited):
    """Those that are its own keep the kernel from the disk, and so do those of which that is not known any more."""
    fake = family.fakes[COMMANDS[2]]
    fake.device_files, fake.inherited = {"/dev/nvidiactl", "/dev/nvidia0"}, inherited
    expected = set() if inherited else {"CHILD_PROCESSES"}
    assert {finding.code for finding in suspend.findings(family.lifecycle.kernel) if finding.blocks} == expected
    assert [each for each in suspend.findings(family.lifecycle.kernel, writes=False) if each.blocks] == []
    if first != "checkpoint":
        family.lifecycle.suspend()
        assert {finding.code for finding in suspend.findings(family.lifecycle.kernel) if finding.blocks} == expected
    if first == "suspend by an owner that is gone":
        family.lifecycle.kernel.inherited = {}
    if not inherited or "gone" in first:
        error = family.fails("checkpoint", "CHILD_PROCESSES")
        assert "sleep 1003" in error.message
        assert "it has open device files of the GPU" in error.message
        if first != "checkpoint":
            family.sleeps(State.SUSPENDED)
            family.lifecycle.resume()  # the driver opens other files: what the child has cannot be compared any more
            family.fails("checkpoint", "CHILD_PROCESSES")
        family.runs_on()
        return
    family.lifecycle.checkpoint()
    fake.device_files = set()
    family.lifecycle.wake()
    family.runs_on()
    family.cycle()


@pytest.mark.parametrize("inherited", [True, False])
def test_a_forked_child_does_not_use_cuda_although_an_old_driver_does_not_say_so(family, inherited):
    family.driver.too_old = True
    fake, kernel = family.fakes[COMMANDS[2]], family.lifecycle.kernel
    own, child = kernel.require_capsule().host_pid, next(p for p, f in family.driver.processes.items() if f is fake)
    fake.cuda, fake.inherited, fake.device_files = True, inherited, {"/dev/nvidiactl", "/dev/nvidia0"}
    assert cuda_processes.uses_cuda_alone(kernel, [own])
    assert cuda_processes.uses_cuda_alone(kernel, [own, child]) is inherited
    assert not cuda_processes.uses_cuda_alone(kernel, [child])


#: A kernel that has a file mapped and open, as a user of CUDA has device files, and a forked child that counts on, and
#: so does what either forks at a SIGUSR1.
FORKS = """
import mmap, os, signal, sys, time
place, path = sys.argv[1:]
def count(path):
    n = 0
    while True:
        n += 1
        with open(path, "w") as file: file.write(str(n))
        time.sleep(0.01)
with open(place, "wb") as file: file.truncate(8192)
fd = os.open(place, os.O_RDWR)
memory = mmap.mmap(fd, 8192)
signal.signal(signal.SIGUSR1, lambda *_: os.fork() or count(path + of))
if os.fork():
    of = "-of-kernel"
    memory.close()
    while True: time.sleep(1000)
of = "-of-fork"
count(path)
"""


class Forking(Rig):
    """A kernel on GPU A whose forked child has inherited what stands for a device file."""

    def __init__(self, criu_binary, directory: Path, base: Path) -> None:
        self.place, self.count = str(directory / "nvidia0"), directory / "count"
        super().__init__(criu_binary, directory, base, [sys.executable, "-c", FORKS, self.place, str(self.count)])
        until(lambda: self.counted() > 0, "the child counts")
        #: The child, and what was forked since, by the end of the name of the file that it counts in.
        self.workers = {"": self._worker()}
        self.driver.add(self.workers[""], self.child_pid)

    def _worker(self) -> FakeProcess:
        return FakeProcess(cuda=False, device_files={self.place}, inherited=True)

    @property
    def child_pid(self) -> int:
        return self.worker_pids()[0]

    def worker_pids(self) -> list[int]:
        """The child's pid and those of its own children, which have higher ones in the capsule."""
        assert self.lifecycle.capsule is not None
        pids = self.lifecycle.capsule.other_processes()
        return sorted(pids, key=lambda pid: int(procfs.status(pid)["NSpid"].split()[-1]))

    def fork(self, of: str = "-of-fork") -> None:
        """Have the child fork, or the kernel."""
        os.kill(self.pid if of == "-of-kernel" else self.child_pid, signal.SIGUSR1)
        until(lambda: self.counted(of) > 0, "the fork counts")
        self.workers[of] = self._worker()
        self.driver.add(self.workers[of], self.worker_pids()[-1])

    def counted(self, of: str = "") -> int:
        path = self.count.with_name(self.count.name + of)
        return int(path.read_text() or 0) if path.exists() else 0

    def has(self, pids: Sequence[int] = ()) -> set[str]:
        """Return the workers' open and mapped files."""
        pids = pids or self.worker_pids()
        names = {name for pid in pids for _, name in procfs.links(pid)}
        return names | {mapping.name for pid in pids for mapping in procfs.maps(pid)}

    def _follow(self, event: StepEvent) -> None:
        super()._follow(event)
        if (event.kind, event.step) == ("completed", "criu_restore"):
            for worker, pid in zip(self.workers.values(), self.worker_pids(), strict=True):
                worker.device_files = set()
                self.driver.add(worker, pid)

    def counts_on(self) -> None:
        for of in self.workers:
            before = self.counted(of)
            until(lambda of=of, before=before: self.counted(of) > before, "the worker counts on")
        found = set().union(*(states(pid) for pid in (self.pid, *self.worker_pids())))
        assert not found & {"t", "T"}


@pytest.fixture
def forking(criu_binary, tmp_path):
    base = Path(tempfile.mkdtemp(prefix="gc-"))
    rig = Forking(criu_binary, tmp_path, base)
    yield rig
    rig.lifecycle.terminate()
    shutil.rmtree(base)


def test_a_forked_child_continues_without_what_it_has_inherited(forking):
    """Also after suspends: when it resumes a process, the driver opens other files than those that were inherited."""
    assert forking.place in forking.has()
    for _ in range(2):
        forking.lifecycle.suspend()
        forking.lifecycle.resume()
        assert [each for each in suspend.findings(forking.lifecycle.kernel) if each.blocks] == []
    forking.lifecycle.suspend()
    assert forking.place in forking.has(), "a suspend does not touch it"
    for _ in range(2):
        forking.lifecycle.checkpoint()
        forking.lifecycle.wake()
        assert forking.place not in forking.has()
        forking.counts_on()


@pytest.mark.parametrize("of", ["a worker", "a worker that has opened its own", "nobody"])
def test_a_worker_that_forks_while_the_kernel_is_suspended(forking, of):
    """Its child has inherited the same files, of a process that is noted since the suspend."""
    forking.lifecycle.suspend()
    forking.fork()
    _, new = forking.workers.values()
    if of == "a worker that has opened its own":
        for worker in forking.workers.values():
            worker.device_files |= {"/dev/nvidia-uvm"}
    elif of == "nobody":
        new.inherited = False
    if of != "a worker":
        error = forking.fails("checkpoint", "CHILD_PROCESSES")
        assert [str(pid) in error.message for pid in forking.worker_pids()] == [new.inherited, True]
        forking.sleeps(State.SUSPENDED)
        forking.lifecycle.resume()
        forking.runs_on()
        forking.counts_on()
        return
    assert [each for each in suspend.findings(forking.lifecycle.kernel) if each.blocks] == []
    for _ in range(2):
        forking.lifecycle.checkpoint()
        forking.lifecycle.wake()
        assert forking.place not in forking.has()
        forking.counts_on()


@pytest.mark.parametrize("during", ["lock", "swap_out", "keep_from_driver"])
def test_a_kernel_that_forks_while_it_is_suspended(forking, monkeypatch, during):
    """torch's compile worker begins its pool when something is to be compiled."""
    forking.workers[""].device_files = set()  # else it is known what its own forks inherit
    real = getattr(cuda_processes, during)

    def forks(*args, **named):
        if "-of-kernel" not in forking.workers:
            forking.fork("-of-kernel")
        return real(*args, **named)

    monkeypatch.setattr(cuda_processes, during, forks)
    for _ in range(2):
        forking.lifecycle.checkpoint()
        forking.lifecycle.wake()
        assert forking.place not in forking.has(forking.worker_pids()[-1:])
        forking.counts_on()


def test_files_noted_for_a_dump_that_was_refused_are_not_taken_at_the_next(forking, monkeypatch):
    """By then they may be a process's own."""

    def refuses(*_: object) -> None:
        raise CriuError("Not fit.")

    with monkeypatch.context() as patch:
        patch.setattr(dump, "_require_fit", refuses)
        forking.fails("checkpoint", "CRIU_FAILED")
    forking.workers[""].device_files = set()
    forking.lifecycle.kernel.inherited = {}
    forking.lifecycle.checkpoint()
    forking.lifecycle.wake()
    assert forking.place in forking.has()
    forking.counts_on()


def test_a_dump_that_fails_leaves_a_forked_child_running(forking, monkeypatch):
    def fails(*_: object) -> None:
        raise CriuError("Not proven.")

    monkeypatch.setattr(dump, "_require_proven", fails)
    forking.fails("checkpoint", "CRIU_FAILED")
    forking.runs_on()
    forking.counts_on()
    monkeypatch.undo()
    forking.cycle()
    forking.counts_on()


@pytest.mark.parametrize("fails", [(dump, "_require_proven"), (Draft, "publish")], ids=["at its end", "after it"])
def test_what_a_dump_that_was_taken_back_has_lost_is_in_its_error(forking, monkeypatch, caplog, fails):
    def fail(*_: object, **__: object) -> None:
        raise CriuError("Not proven.")

    def resumed(capsule: Capsule) -> str:
        assert resume(capsule) == ""
        return "closed: a TCP connection"

    resume = Capsule.resume_processes
    monkeypatch.setattr(*fails, fail)
    monkeypatch.setattr(Capsule, "resume_processes", resumed)
    assert forking.fails("checkpoint", "CRIU_FAILED").details["unrepaired"] == "closed: a TCP connection"
    assert "could not be repaired after its dump: closed: a TCP connection" in caplog.text
    forking.runs_on()
    forking.counts_on()


@pytest.mark.parametrize("op", ["cuda.state", "cuda.lock", "cuda.checkpoint", "cuda.restore", "cuda.unlock"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("verb", ["suspend", "checkpoint"])
def test_a_child_is_killed_in_the_middle(family, monkeypatch, verb, op, when):
    """The end of a child is no failure: the others continue without it."""
    call, killed = family.driver.call, []

    def kills(asked: str, *, lane: int | None = None, **args):
        if killed or asked != op or lane != family.pids().get(COMMANDS[0]):
            return call(asked, lane=lane, **args)
        killed.append(lane)
        value = call(asked, lane=lane, **args) if when == "after" else None
        family.kill(COMMANDS[0])
        if when == "before":
            raise DriverRefused(INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE")
        return value

    monkeypatch.setattr(family.driver, "call", kills)
    getattr(family.lifecycle, verb)()
    family.lifecycle.wake()
    assert killed
    assert set(family.pids()) == set(COMMANDS[1:])
    family.runs_on()
    family.cycle()


def test_a_child_that_ends_during_preflight_and_is_not_waited_for_prevents_nothing(family, monkeypatch):
    call, child = family.driver.call, family.pids()[COMMANDS[0]]

    def kills(asked: str, *, lane: int | None = None, **args):
        if asked == "cuda.state" and lane == child:
            os.kill(child, signal.SIGKILL)
            until(lambda: procfs.stat(child).state == "Z", "it is a zombie")
            raise DriverRefused(OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM")
        return call(asked, lane=lane, **args)

    os.kill(family.pid, signal.SIGSTOP)  # else it would be waited for
    monkeypatch.setattr(family.driver, "call", kills)
    try:
        assert [finding.code for finding in suspend.findings(family.lifecycle.kernel) if finding.blocks] == []
    finally:
        os.kill(family.pid, signal.SIGCONT)


@pytest.mark.parametrize("suspended", [False, True])
def test_a_suspended_child_that_is_killed_is_gone_and_the_rest_comes_back(family, suspended):
    family.lifecycle.suspend()
    family.kill(COMMANDS[0])
    if suspended:
        family.lifecycle.checkpoint()
    family.lifecycle.wake()
    assert set(family.pids()) == set(COMMANDS[1:])
    family.runs_on()


@pytest.mark.parametrize("nccl", [False, True])
def test_a_driver_that_does_not_answer_for_one_process_while_another_is_locked(family, monkeypatch, nccl):
    """Two NCCL ranks are such processes: the lock of the second ends only when the first is unlocked."""
    shared, call, over = FakeHelper(family.driver), family.driver.call, threading.Event()
    hangs = family.pids()[COMMANDS[1]]

    def held_up(op: str, *, lane: int | None = None, **args):
        if op == "cuda.lock" and lane == hangs:
            over.wait(60)
        if op == "cuda.unlock":
            over.set()
        return call(op, lane=lane, **args)

    monkeypatch.setattr(family.driver, "call", held_up)
    monkeypatch.setattr(cuda_processes, "_GRACE", 0.5)
    monkeypatch.setattr(FakeCuda, "communicates_by_nccl", lambda *_: False)
    for fake in family.fakes.values():
        fake.nccl = nccl
    kernel = family.lifecycle.kernel
    kernel.engine.cuda = FakeCuda(family.driver, shared)
    kernel.settings = dataclasses.replace(kernel.settings, cuda=0.5)
    kernel.engine.cuda.available()
    helper = shared.pid
    try:
        error = family.fails("suspend", "NCCL_PEERS" if nccl else "CUDA_TIMEOUT")
        assert str(hangs) in error.message
        assert shared.pid == helper, "the helper that other kernels use is not the one that was killed"
        family.runs_on()
        over.set()
        family.lifecycle.suspend()
        family.in_state(CHECKPOINTED, CHECKPOINTED, CHECKPOINTED)
        family.lifecycle.wake()
        family.runs_on()
    finally:
        shared.close()


def test_processes_that_communicate_by_nccl_are_refused_before_they_are_disturbed(family):
    family.fakes[COMMANDS[2]].nccl = family.fakes[COMMANDS[0]].nccl = True
    assert [each.code for each in suspend.findings(family.lifecycle.kernel) if each.blocks] == [], (
        "one is a fork without CUDA"
    )
    family.fakes[COMMANDS[1]].nccl = True
    for verb in ("suspend", "checkpoint"):
        assert family.fails(verb, "NCCL_PEERS").details["pids"] == family.children
    assert "cuda.lock" not in {op for op, _ in family.driver.calls}
    family.runs_on()


def test_device_memory_that_the_kernel_shares_with_its_children_is_refused(family, monkeypatch):
    monkeypatch.setattr(FastPath, "amounts", lambda *_: Amounts(allocations=2, bytes=4 * MIB, shared=1))
    for verb in ("suspend", "checkpoint"):
        family.fails(verb, "CUDA_IPC")
    family.runs_on()
    for command in COMMANDS[:2]:
        family.kill(command)
    assert [each.code for each in suspend.findings(family.lifecycle.kernel) if each.blocks] == [], (
        "nobody is left to share it with"
    )


@pytest.mark.parametrize("away", ["suspend", "checkpoint"])
def test_no_driver_call_is_made_without_room_for_all(family, away):
    getattr(family.lifecycle, away)()
    other = family.driver.start({B: 80 * MIB})
    family.fails("wake", "GPU_FULL")
    assert "cuda.restore" not in {op for op, _ in family.driver.calls}
    family.driver.remove(other)
    family.lifecycle.wake()
    family.runs_on()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("op", ["cuda.restore", "cuda.unlock"])
def test_a_resume_that_fails_for_one_is_continued_by_the_next(family, op, when):
    family.lifecycle.suspend()
    Lost(family.driver, op, when)
    assert family.fails("resume", "HELPER_GONE").message.startswith("Of the kernel's child ")
    family.sleeps(State.SUSPENDED)
    family.lifecycle.resume()
    family.runs_on()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("op", ["cuda.lock", "cuda.checkpoint"])
def test_a_helper_that_is_killed_on_the_way_out_leaves_all_running(family, op, when):
    Lost(family.driver, op, when)
    family.fails("checkpoint", "HELPER_GONE")
    family.runs_on()
    family.cycle()


@pytest.mark.parametrize("state", [LOCKED, CHECKPOINTED])
def test_the_next_owner_finds_children_that_were_left_half_way(family, state):
    """Locked ones are unlocked; of suspended ones the kernel is suspended, and wakes with all of them."""
    lifecycle = family.lifecycle
    lifecycle.capsule.outlive()
    lifecycle.detach()
    family.fakes[COMMANDS[0]].state = state
    engine, home = lifecycle.engine, lifecycle.home
    settings = dataclasses.replace(lifecycle.kernel.settings)
    family.gate = GateDouble()
    family.lifecycle = Lifecycle(home, engine, family.gate, settings=settings, trace=Trace("k", [family._follow]))
    family.lifecycle.attach(capsule=Capsule.attach(home.runtime_dir))
    if state == LOCKED:
        assert family.lifecycle.state is State.RUNNING
    else:
        assert family.lifecycle.state is State.SUSPENDED
        family.driver.gpus = {A: 1 << 40, B: 1 << 40}  # how much they had is not known any more
        family.lifecycle.wake()
    family.in_state(RUNNING, RUNNING, RUNNING)


def test_all_restored_processes_are_off_the_gpu_before_they_are_killed(family):
    family.cycle()
    family.driver.calls.clear()
    family.lifecycle.terminate()
    assert sum(op == "cuda.checkpoint" for op, _ in family.driver.calls) == 3
