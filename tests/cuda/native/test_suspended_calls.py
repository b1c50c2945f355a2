"""Calls that do not wait at the driver's lock, of kernels and their children that are suspended: none is made.

The real driver ends a process that makes one (an H100, driver 580.159.04: JAX asks by `cuStreamQuery` every few
seconds); the double reads memory that is away meanwhile.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
from fast_kernel import CONTEXT, A, FastKernel
from fast_program import MIB, Program
from harness import alive
from suspending import QUERIES, SuspendingDriver, thread_states
from test_frozen import attach_again, refused
from waiting import until

from jupyter_gpu_ckpt import errors
from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.lifecycle import cuda_processes, dump
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.process.ptrace import Tracee
from jupyter_gpu_ckpt.testing.fake_cuda import CHECKPOINTED, LOCKED, RUNNING, FakeProcess
from jupyter_gpu_ckpt.trace import StepEvent

pytestmark = pytest.mark.sweep(1 / 2, of="file")

#: Seconds in which a thread that runs makes 30 such calls.
WHILE = 0.3
CHILD = """
import subprocess
child = subprocess.Popen({argv!r}, env=dict(os.environ, LD_LIBRARY_PATH={doubles!r}))
"""
#: A thread that waits at a word of the C library for ever: as far as can be seen, for a lock that others need.
NEVER_SAFE = """
libc = ctypes.CDLL(None)
word = ctypes.c_int.in_dll(libc, "opterr")
threading.Thread(target=lambda: libc.syscall(202, ctypes.byref(word), 0, word.value, None), daemon=True).start()
"""
SIGNALS = """
for number in (signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, _: heard.append(number))
    signal.siginterrupt(number, True)
"""


class Stormy(FastKernel):
    """A kernel with such a thread; after `spawn` with a child that has one, too, and no library."""

    driver: SuspendingDriver

    def __init__(self, criu_binary, directory: Path, base: Path, programs, doubles, **options) -> None:
        self.child: Program | None = None
        self.child_fake: FakeProcess | None = None
        self._doubles = doubles
        driver = SuspendingDriver({A: 200 * MIB})
        super().__init__(criu_binary, directory, base, programs, doubles, driver=driver, **options)
        self._query(self.program, self.pid)

    def _query(self, program: Program, pid: int) -> None:
        path = program.directory / "suspended"
        self.driver.add_double(pid, path)
        program.ask(f"exec({QUERIES!r}, globals())")
        program.ask(f"query({str(path)!r})")
        until(lambda: program.ask("queries[0]") > 1, "it asks")

    def spawn(self) -> None:
        directory = self.program.directory / "child"
        directory.mkdir()
        self.child = Program(directory, None, self._doubles, ())
        source = CHILD.format(argv=self.child.argv, doubles=str(self._doubles))
        self.program.ask(f"exec({source!r}, globals())")
        self.child.holds_its_memory()
        self.child_fake = self.driver.processes[self.driver.start({A: 5 * MIB}, pid=self.child_pid)]
        self._query(self.child, self.child_pid)

    @property
    def child_pid(self) -> int:
        assert self.lifecycle.capsule is not None
        (pid,) = self.lifecycle.capsule.other_processes()
        return pid

    def _follow(self, event: StepEvent) -> None:
        super()._follow(event)
        if self.child_fake is not None and (event.kind, event.step) == ("completed", "criu_restore"):
            self.driver.add(self.child_fake, self.child_pid)

    def stays(self) -> None:
        """All its processes live on while they are suspended."""
        assert self.lifecycle.state is State.SUSPENDED
        assert self.fake.state == CHECKPOINTED
        assert self.lifecycle.capsule is not None
        pids = [self.pid, *self.lifecycle.capsule.other_processes()]
        assert len(pids) == (1 if self.child is None else 2)
        time.sleep(WHILE)
        assert alive(pids) == pids
        assert not self.gate.serves

    def runs_on(self) -> None:
        super().runs_on()
        for program in filter(None, (self.program, self.child)):
            before = program.ask("queries[0]")
            until(lambda program=program, before=before: program.ask("queries[0]") > before, "it asks again")
            assert program.ask("errors") == []
        if self.child_fake is not None:
            assert self.child_fake.state == RUNNING
        assert self.lifecycle.capsule is not None
        for pid in self.lifecycle.capsule.processes():
            assert "t" not in set().union(*thread_states(pid).values())


@pytest.fixture
def stormy(criu_binary, tmp_path, runtime_base, programs, doubles):
    kernels = []

    def make(**options) -> Stormy:
        kernels.append(Stormy(criu_binary, tmp_path, runtime_base, programs, doubles, **options))
        return kernels[0]

    yield make
    for kernel in kernels:
        kernel.lifecycle.terminate()


@pytest.fixture(params=["with the library", "without it"])
def kernel(request, stormy):
    return stormy(preload=request.param == "with the library")


@pytest.fixture(params=["alone", "with a child"])
def bare(request, stormy):
    """A kernel without the library."""
    kernel = stormy(preload=False)
    if request.param == "with a child":
        kernel.spawn()
    return kernel


@pytest.mark.parametrize("child", [False, True])
def test_a_suspended_kernel_lives_on_and_comes_back(kernel, child):
    if child:
        kernel.spawn()
    for _ in range(2):
        kernel.lifecycle.suspend()
        kernel.stays()
        kernel.lifecycle.resume()
        kernel.runs_on()


@pytest.mark.parametrize("suspended", [False, True])
def test_it_continues_to_the_disk_and_comes_back(kernel, suspended):
    kernel.spawn()
    for _ in range(2):
        if suspended:
            kernel.lifecycle.suspend()
            kernel.stays()
        kernel.lifecycle.checkpoint()
        kernel.lifecycle.wake()
        kernel.runs_on()


def test_the_launch_gate_is_closed_for_good_before_the_driver_suspends(stormy, monkeypatch):
    """A suspend that takes long outlasts the time for which it is closed first."""
    kernel, call, seen = stormy(), SuspendingDriver.call, []

    def watched(driver: SuspendingDriver, op: str, **arguments: object) -> object:
        if op == "cuda.checkpoint":
            seen.append(kernel.path()._published().launch_gate & (fastpath._GATE_CLOSED | fastpath._GATE_LEASED))
        return call(driver, op, **arguments)

    monkeypatch.setattr(SuspendingDriver, "call", watched)
    kernel.lifecycle.suspend()
    assert seen == [fastpath._GATE_CLOSED]
    assert "t" not in set().union(*thread_states(kernel.pid).values()), "nobody has to be frozen"
    kernel.stays()
    kernel.lifecycle.resume()
    kernel.runs_on()


def test_a_warm_kernel_s_children_are_kept_from_the_driver(stormy):
    kernel = stormy(warm=True)
    kernel.spawn()
    kernel.lifecycle.suspend()
    assert (kernel.fake.state, kernel.child_fake.state) == (LOCKED, CHECKPOINTED)
    time.sleep(WHILE)
    assert alive([kernel.pid, kernel.child_pid])
    assert "t" not in set().union(*thread_states(kernel.pid).values())
    kernel.lifecycle.checkpoint()
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_a_library_that_is_busy_is_done_without(stormy, monkeypatch):
    kernel = stormy()
    monkeypatch.setattr(fastpath.FastPath, "close_launch_gate", lambda *_: None)  # it logs why
    for _ in range(2):
        kernel.lifecycle.suspend()
        kernel.stays()
        kernel.lifecycle.wake()
        kernel.runs_on()


def send(pid: int, number: int) -> None:
    """tgkill(2), by its number on x86-64, to all threads."""
    for task in os.listdir(f"/proc/{pid}/task"):
        ctypes.CDLL(None).syscall(234, pid, int(task), number)


def test_a_suspended_kernel_is_sent_signals_and_stopped(kernel):
    """They wait for its threads, which get them when they run again."""
    kernel.spawn()
    for program in (kernel.program, kernel.child):
        program.ask(f"exec({SIGNALS!r}, globals())")
    kernel.lifecycle.suspend()
    for pid in (kernel.pid, kernel.child_pid):
        for _ in range(3):
            os.kill(pid, signal.SIGINT)
            send(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGSTOP)
            until(lambda pid=pid: set().union(*thread_states(pid).values()) <= {"T", "t"}, "it is stopped")
            os.kill(pid, signal.SIGCONT)
            until(lambda pid=pid: "T" not in set().union(*thread_states(pid).values()), "it continues")
    kernel.lifecycle.capsule.signal(signal.SIGINT)  # an interrupt, to the process group
    kernel.stays()
    kernel.lifecycle.wake()
    for program in (kernel.program, kernel.child):
        until(lambda program=program: {2, 10} <= set(program.ask("heard")), "it hears them")
        program.ask("errors.clear()")  # a call that waits at the launch gate can be interrupted
    kernel.runs_on()


def fail(*_: object) -> None:
    raise errors.CriuError("Not proven.")


def test_a_dump_that_fails_leaves_it_suspended(bare, monkeypatch):
    bare.lifecycle.suspend()
    with monkeypatch.context() as patch:
        for _ in range(2):
            patch.setattr(dump, "_require_proven", fail)
            assert "suspended" in refused(bare, "checkpoint", "CRIU_FAILED").left
            bare.stays()
    bare.gate.calls.clear()
    bare.lifecycle.wake()
    bare.runs_on()
    assert bare.gate.calls[:2] == ["open", "gpu_ckpt_thaw_request"], "it can be connected to once it runs"
    bare.lifecycle.suspend()
    bare.stays()
    bare.lifecycle.checkpoint()
    bare.lifecycle.wake()
    bare.runs_on()


def test_a_checkpoint_that_fails_leaves_it_running(bare, monkeypatch):
    monkeypatch.setattr(dump, "_require_proven", fail)
    refused(bare, "checkpoint", "CRIU_FAILED")
    bare.runs_on()
    undo = bare.gate.calls[bare.gate.calls.index("close") :]
    assert undo[:4] == ["close", "open", "gpu_ckpt_thaw_request", "release"]


@pytest.mark.parametrize("op", ["cuda.checkpoint", "cuda.restore", "cuda.unlock"])
def test_a_verb_that_fails_in_the_middle_can_be_tried_again(bare, op):
    if op == "cuda.checkpoint":
        bare.driver.crash_in.add(op)
        refused(bare, "suspend", "HELPER_GONE")
        bare.runs_on()
    bare.lifecycle.suspend()
    if op != "cuda.checkpoint":
        bare.driver.crash_in.add(op)
        refused(bare, "resume", "HELPER_GONE")
        time.sleep(WHILE)
        assert bare.lifecycle.state is State.SUSPENDED
    bare.lifecycle.resume()
    bare.runs_on()


def test_the_next_owner_finds_it_suspended_and_wakes_it(bare):
    bare.lifecycle.suspend()
    attach_again(bare)
    bare.stays()
    bare.driver.gpus = {A: 1 << 40}  # how much it had is not known any more
    bare.gate.calls.clear()
    bare.lifecycle.wake()
    bare.runs_on()
    assert bare.gate.calls[:2] == ["open", "gpu_ckpt_thaw_request"]
    bare.lifecycle.suspend()
    attach_again(bare)
    bare.lifecycle.checkpoint()
    bare.lifecycle.wake()
    bare.runs_on()


def test_the_next_owner_of_a_kernel_that_was_about_to_be_suspended_lets_it_run(bare):
    bare.lifecycle.engine.cuda.lock(bare.pid, 5)
    cuda_processes.keep_from_driver(bare.lifecycle.kernel, [bare.pid])
    assert "t" in set().union(*thread_states(bare.pid).values())
    attach_again(bare)
    bare.runs_on()


@pytest.mark.parametrize("end", ["killed", "shut down"])
def test_the_end_of_a_suspended_kernel(bare, end):
    bare.lifecycle.suspend()
    pids = [bare.pid, *bare.lifecycle.capsule.other_processes()]
    if end == "killed":
        os.kill(bare.pid, signal.SIGKILL)
        until(lambda: bare.lifecycle.poll() is not None, "its end is seen")
        assert bare.lifecycle.poll() == -signal.SIGKILL
    else:
        bare.lifecycle.terminate()
    assert alive(pids) == []


def test_a_child_that_is_killed_meanwhile_is_gone_and_its_parent_sees_that(kernel):
    kernel.spawn()
    kernel.lifecycle.suspend()
    os.kill(kernel.child_pid, signal.SIGKILL)
    until(lambda: kernel.lifecycle.capsule.other_processes() == [] or not alive([kernel.child_pid]), "it has ended")
    kernel.child = kernel.child_fake = None
    kernel.lifecycle.resume()
    assert kernel.program.ask("child.wait(60)") == -signal.SIGKILL
    kernel.runs_on()


def never_safe(kernel: Stormy, of: str, monkeypatch) -> None:
    program = kernel.program if of == "kernel" else kernel.child
    freeze = fastpath.FastPath.freeze_for_driver

    def freeze_for_driver(path: fastpath.FastPath, **how: bool) -> None:
        is_its = (path._child is None) is (of == "kernel")
        with monkeypatch.context() as patch:  # the other one's threads are frozen on a busy machine, too
            patch.setattr(fastpath, "FREEZE_SECONDS", 0.5 if is_its else 60)
            freeze(path, **how)

    monkeypatch.setattr(fastpath.FastPath, "freeze_for_driver", freeze_for_driver)
    program.ask(f"exec({NEVER_SAFE!r}, globals())")


@pytest.mark.parametrize("of", ["kernel", "child"])
@pytest.mark.parametrize("verb", ["suspend", "checkpoint"])
def test_a_thread_that_cannot_be_frozen_refuses_the_verb_and_all_run_on(stormy, monkeypatch, of, verb):
    kernel = stormy(preload=False)
    kernel.spawn()
    never_safe(kernel, of, monkeypatch)
    error = refused(kernel, verb, "KERNEL_BUSY")
    assert error.left == "the kernel runs on"
    assert (str(kernel.child_pid) in error.message) is (of == "child")
    assert "cuda.checkpoint" not in {op for op, _ in kernel.driver.calls}, "nobody was suspended"
    kernel.runs_on()


def test_a_thread_that_is_traced_refuses_a_suspend(stormy):
    kernel = stormy(preload=False)
    with Tracee(kernel.pid, running=True):
        assert "debugger" in refused(kernel, "suspend", "KERNEL_BUSY").hint
    kernel.runs_on()
    kernel.lifecycle.suspend()
    kernel.stays()
    kernel.lifecycle.resume()
    assert kernel.held() == kernel.blocks + CONTEXT
    kernel.runs_on()
