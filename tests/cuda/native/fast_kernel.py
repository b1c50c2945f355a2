"""The lifecycle of a kernel whose device memory is moved by the library.

The kernel's process, its library and its capsule, CRIU and the images are real; both drivers are doubles, and the one
that suspends is given the library's numbers.
"""

from __future__ import annotations

import glob
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from fast_program import MIB, Program
from gate_double import GateDouble

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.criu.criu import Criu, Restored
from jupyter_gpu_ckpt.criu.install import dotted
from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.image import layout
from jupyter_gpu_ckpt.image.store import Image, Store
from jupyter_gpu_ckpt.lifecycle.context import Engine, Home
from jupyter_gpu_ckpt.lifecycle.lifecycle import Lifecycle
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.lifecycle.settings import LifecycleSettings
from jupyter_gpu_ckpt.testing.fake_cuda import CHECKPOINTED, RUNNING, FakeCuda, FakeDriver, FakeGpus
from jupyter_gpu_ckpt.trace import StepEvent, Trace

A = "GPU-00000000-0000-0000-0000-00000000000a"
CONTEXT = 8 * MIB


class _Watched(Criu):
    """CRIU that says which process it has let run, before the driver is asked about that."""

    def __init__(self, argv: Sequence[str], restored: Callable[[int], object]) -> None:
        super().__init__(argv)
        self._restored = restored

    def run_restored(self, capsule: Capsule, *arguments, **options) -> Restored:
        done = super().run_restored(capsule, *arguments, **options)
        self._restored(capsule.host_pid)
        return done


class FastKernel:
    """A kernel of 71 MiB of blocks beside its context, on a GPU of 100 MiB.

    ``driver``: the one that suspends.  ``preload``: whether it has the library; without, the driver knows its context.
    """

    def __init__(
        self,
        criu_binary,
        directory: Path,
        base: Path,
        programs,
        doubles,
        store=None,
        driver: FakeDriver | None = None,
        preload: bool = True,
        **settings,
    ) -> None:
        self.driver, self.gate = driver or FakeDriver({A: 100 * MIB}), GateDouble()
        files = Path(tempfile.mkdtemp(prefix="gc-"))  # a capsule to go back in has another directory than the last one
        weakref.finalize(self, shutil.rmtree, files, ignore_errors=True)
        self.program = Program(base, programs.library if preload else None, doubles, files=files)
        gpus = FakeGpus(self.driver, directory / "locks")
        self.store = store = store or Store(directory / "images")
        engine = Engine(
            _Watched(criu_binary.argv, self._restored), dotted(criu_binary.version), FakeCuda(self.driver), gpus, store
        )
        home = Home("k", "python3", base, has_agent=True)
        self.lifecycle = Lifecycle(
            home,
            engine,
            self.gate,
            settings=LifecycleSettings(reservation=0.2, **settings),
            trace=Trace("k", [self._follow]),
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
        """Return the kernel's bytes by the driver's count, from its library's; 0 for one in the driver's hands."""
        if self.fake.on_gpu and self.lifecycle.capsule is not None:
            self.fake.memory = {A: self.blocks + CONTEXT - self.path().amounts().swapped_out}
        return self.fake.memory[A] if self.fake.on_gpu else 0

    def _follow(self, event: StepEvent) -> None:
        """The fake driver's process comes and goes with the real one."""
        if (event.kind, event.step) == ("completed", "end_process"):
            there = self.driver.processes
            self.driver.processes = {pid: there[pid] for pid in there if Path(f"/proc/{pid}").exists()}
        elif (event.kind, event.step) == ("completed", "criu_restore"):
            self.fake = self.driver.processes[self.pid]

    def _restored(self, pid: int) -> None:
        fake = self.fake
        if any(fake is each for each in self.driver.processes.values()):  # of the state that it goes back from
            fake = replace(fake)
        fake.state, fake.memory = CHECKPOINTED, {A: CONTEXT}
        self.driver.add(fake, pid)

    def runs_on(self) -> None:
        assert self.lifecycle.state is State.RUNNING
        assert self.fake.state == RUNNING
        assert self.path().amounts().swapped_out == 0
        assert self.held() == self.blocks + CONTEXT
        assert not self.path().launch_gate_is_closed()
        assert self.gate.serves
        self.program.continues()


def chunks(image: Image) -> list[Path]:
    """Files of device memory in an image."""
    return sorted((image.criu_directory / layout.DEVICE).glob("*"))


def kept(kernel: FastKernel) -> list[Path]:
    """Files of device memory that is on the disk, and in no image."""
    return sorted(map(Path, glob.glob(f"{kernel.store.root}/.draft-chunks-*/*")))  # a directory may go meanwhile
