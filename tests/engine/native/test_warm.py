"""A kernel that is suspended warm: its blocks leave, its context stays, and the driver's lock keeps it from CUDA.

The kernel's process, its library and its capsule, CRIU and the images are real; both drivers are doubles, and the one
that suspends is told what the library moves.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from fast_program import MIB, Program
from gate_double import GateDouble

from jupyter_gpu_ckpt import returning, steps
from jupyter_gpu_ckpt.engine import fastpath
from jupyter_gpu_ckpt.engine.capsule import Capsule
from jupyter_gpu_ckpt.engine.criu import Criu
from jupyter_gpu_ckpt.engine.criu_install import dotted
from jupyter_gpu_ckpt.errors import CudaError, DeviceHeld, GpuFull
from jupyter_gpu_ckpt.image import absences
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.lifecycle import Engine, Home, Lifecycle, Settings
from jupyter_gpu_ckpt.machine import State
from jupyter_gpu_ckpt.testing.fake_cuda import CHECKPOINTED, LOCKED, RUNNING, FakeCuda, FakeDriver, FakeGpus
from jupyter_gpu_ckpt.trace import StepEvent, Trace

A = "GPU-00000000-0000-0000-0000-00000000000a"
CONTEXT = 8 * MIB


class Warm:
    """A kernel of 71 MiB of blocks beside its context, on a GPU of 100 MiB."""

    def __init__(self, criu_binary, directory: Path, base: Path, programs, doubles, warm: bool = True) -> None:
        self.driver, self.gate = FakeDriver({A: 100 * MIB}), GateDouble()
        self.program = Program(base, programs.library, doubles)
        gpus = FakeGpus(self.driver, directory / "locks")
        store = Store(directory / "images")
        engine = Engine(Criu(criu_binary.argv), dotted(criu_binary.version), FakeCuda(self.driver), gpus, store)
        home = Home("k", "python3", base, has_agent=True)
        self.lifecycle = Lifecycle(
            home, engine, self.gate, settings=Settings(room=0.2, warm=warm), trace=Trace("k", [self._follow])
        )
        self.lifecycle.launch(self.program.argv, self.program.env, "/")
        self.program.holds_its_memory()
        self.blocks = self.path().amounts().bytes
        self.fake = self.driver.processes[self.driver.start({A: self.blocks + CONTEXT}, pid=self.pid)]

    @property
    def pid(self) -> int:
        return self.lifecycle.capsule.host_pid

    def path(self) -> fastpath.FastPath:
        return fastpath.FastPath(self.lifecycle.capsule, self.lifecycle.engine.cuda)

    def held(self) -> int:
        """What the driver counts for it, by what its library says; of one in the driver's hands that is nothing."""
        if self.fake.on_gpu and self.lifecycle.capsule is not None:
            self.fake.memory = {A: self.blocks + CONTEXT - self.path().amounts().away}
        return self.fake.memory[A] if self.fake.on_gpu else 0

    def _follow(self, event: StepEvent) -> None:
        """The fake driver's process comes and goes with the real one."""
        if (event.kind, event.step) == ("completed", "end_process"):
            self.driver.processes.clear()
        elif (event.kind, event.step) == ("completed", "criu_restore"):
            self.fake.state, self.fake.memory = CHECKPOINTED, {A: CONTEXT}
            self.driver.come_back(self.fake, self.pid)

    def runs_on(self) -> None:
        assert self.lifecycle.state is State.RUNNING
        assert self.fake.state == RUNNING
        assert self.path().amounts().away == 0
        assert self.held() == self.blocks + CONTEXT
        assert self.gate.serves
        self.program.goes_on()


@pytest.fixture
def made(criu_binary, tmp_path, programs, doubles, monkeypatch):
    """Makes it, warm or not; what moves between the kernel and the GPU is told to the driver that suspends."""
    kernels = []

    class Told(fastpath.FastPath):
        def leave(self, **limits):
            moved = super().leave(**limits)
            kernels[0].held()
            return moved

        def come_back(self, **limits):
            try:
                super().come_back(**limits)
            finally:
                kernels[0].held()

    monkeypatch.setattr(steps, "FastPath", Told)
    monkeypatch.setattr(returning, "FastPath", Told)
    base = Path(tempfile.mkdtemp(prefix="gc-"))
    base.chmod(0o700)

    def make(warm: bool = True) -> Warm:
        kernels.append(Warm(criu_binary, tmp_path, base, programs, doubles, warm))
        return kernels[0]

    yield make
    for kernel in kernels:
        kernel.lifecycle.terminate()
    shutil.rmtree(base)


@pytest.fixture
def kernel(made):
    return made()


def test_only_the_blocks_leave_and_come_back(kernel):
    for _ in range(2):
        kernel.lifecycle.suspend()
        assert kernel.lifecycle.state is State.SUSPENDED
        assert (kernel.fake.state, kernel.held()) == (LOCKED, CONTEXT)
        assert kernel.path().amounts().away == kernel.blocks
        assert not kernel.gate.serves
        kernel.lifecycle.wake()
        kernel.runs_on()


def test_gpu_time_given_back_is_that_of_the_blocks(kernel):
    kernel.lifecycle.suspend()
    kernel.lifecycle.wake()
    record = kernel.lifecycle.engine.store.root / absences.RECORD
    (absence,) = absences.read(record.read_bytes())
    assert absence.device_bytes == kernel.blocks


def test_without_the_trait_the_context_leaves_too(made):
    kernel = made(warm=False)
    kernel.lifecycle.suspend()
    assert (kernel.fake.state, kernel.held()) == (CHECKPOINTED, 0)
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_without_a_library_that_moves_blocks_it_is_suspended_as_ever(kernel):
    kernel.program.ask("open('/proc/self/comm', 'w').write('cuda-of-a-user')")
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


def test_room_is_proved_for_what_is_away_and_for_no_more(kernel):
    kernel.lifecycle.suspend()
    other = kernel.driver.start({A: 100 * MIB - CONTEXT - kernel.blocks + MIB})
    with pytest.raises(GpuFull):
        kernel.lifecycle.wake()
    assert (kernel.lifecycle.state, kernel.fake.state) == (State.SUSPENDED, LOCKED)
    kernel.driver.leave(other)
    kernel.driver.start({A: 100 * MIB - CONTEXT - kernel.blocks})  # the rest, to the last byte
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_the_next_owner_finds_it_suspended(kernel):
    kernel.lifecycle.suspend()
    kernel.lifecycle.leave()
    last = kernel.lifecycle
    kernel.lifecycle = Lifecycle(last.home, last.engine, kernel.gate, settings=last.settings, trace=last.trace)
    kernel.lifecycle.adopt(capsule=Capsule.attach(last.home.runtime_dir))
    assert (kernel.lifecycle.state, kernel.fake.state) == (State.SUSPENDED, LOCKED)
    kernel.lifecycle.wake()
    kernel.runs_on()
