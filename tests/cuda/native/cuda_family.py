"""A kernel whose device memory is moved by the library, with children that have such memory, too."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping

from fast_kernel import CONTEXT, FastKernel
from fast_program import MIB, A, Program
from harness import alive
from waiting import until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.cuda.fastpath import FastPath
from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.testing.fake_cuda import CHECKPOINTED, RUNNING, FakeProcess
from jupyter_gpu_ckpt.trace import StepEvent

SIZES = (2 * MIB, 4 * MIB)


class Child:
    """A child of the kernel; ``blocks``: bytes that its library serves, 0 without one."""

    def __init__(self, family: Family, name: str, env: Mapping[str, str] | None) -> None:
        directory = family.program.directory / name
        directory.mkdir()
        self._family, self.program = family, Program(directory, None, family.doubles, SIZES)
        given = None if env is None else {"LD_LIBRARY_PATH": str(family.doubles), **env}
        started = f"__import__('subprocess').Popen({self.program.argv}, env={given})"
        family.program.ask(f"globals().setdefault('started', []).append({started})")
        self.program.holds_its_memory()
        self.blocks = self.path().amounts().bytes
        memory = {A: (self.blocks or sum(SIZES)) + CONTEXT}
        self.fake: FakeProcess = family.driver.processes[family.driver.start(memory, pid=self.pid)]

    @property
    def pid(self) -> int:
        capsule = self._family.lifecycle.capsule
        found = {procfs.arguments(pid): pid for pid in capsule.other_processes() if alive([pid])}
        return found[tuple(self.program.argv)]

    def path(self) -> FastPath:
        return self._family.lifecycle.kernel.fast_path(pid=self.pid)

    def held(self) -> None:
        known = any(self.fake is each for each in self._family.driver.processes.values())
        if self.blocks and self.fake.on_gpu and known:
            with contextlib.suppress(GpuCkptError, KeyError):  # it is killed
                self.fake.memory = {A: self.blocks + CONTEXT - self.path().amounts().swapped_out}

    def kill(self) -> None:
        """Kill it; the kernel waits for it."""
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        self._family.forget(self, pid)
        until(lambda: not alive([pid]), "it has ended")

    def runs_on(self) -> None:
        assert self.fake.state == RUNNING
        assert self.path().amounts().swapped_out == 0
        assert not self.path().launch_gate_is_closed()
        self.program.continues()


class Family(FastKernel):
    """`FastKernel` and the children that `start` begins."""

    def __init__(self, criu_binary, directory, base, programs, doubles, **options) -> None:
        self.children: list[Child] = []
        self.doubles = doubles
        super().__init__(criu_binary, directory, base, programs, doubles, **options)

    def start(self, name: str, env: Mapping[str, str] | None = None) -> Child:
        """Start a child, with the kernel's environment or ``env``."""
        child = Child(self, name, env)
        self.children.append(child)
        return child

    def forget(self, child: Child, pid: int) -> None:
        self.children.remove(child)
        self.driver.processes.pop(pid, None)

    def held(self) -> int:
        for child in [*self.children]:
            child.held()
        return super().held()

    def _follow(self, event: StepEvent) -> None:
        super()._follow(event)
        if (event.kind, event.step) == ("completed", "criu_restore"):
            for child in self.children:
                child.fake.state = CHECKPOINTED
                self.driver.add(child.fake, child.pid)

    def runs_on(self) -> None:
        super().runs_on()
        for child in self.children:
            child.runs_on()
