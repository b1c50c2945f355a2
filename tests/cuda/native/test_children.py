"""Children of a kernel that use CUDA: each has the library and a socket of its own, and leaves the GPU with the kernel.

The processes, their library, the capsule and CRIU are real, the drivers are doubles (see `fast_kernel`).
"""

from __future__ import annotations

import functools
import itertools
import shutil
import socket
import struct
import tempfile
from pathlib import Path

import pytest
from cuda_family import SIZES, Child, Family
from fast_kernel import CONTEXT
from fast_program import MIB, A
from programs import build_library, built
from suspending import thread_states
from test_frozen import attach_again

from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.cuda.checkpoint_api import DriverRefused
from jupyter_gpu_ckpt.cuda.cuda import INVALID_VALUE, OUT_OF_MEMORY
from jupyter_gpu_ckpt.errors import GpuFull, SharedDeviceMemory, UnsupportedCuda
from jupyter_gpu_ckpt.lifecycle import context, cuda_processes, suspend
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.testing.fake_cuda import CHECKPOINTED, FakeDriver


@pytest.fixture
def family(criu_binary, tmp_path, programs, doubles, monkeypatch):
    """A kernel with a child ``one``; the driver that suspends counts what moves between them and the GPU."""
    base = Path(tempfile.mkdtemp(prefix="gc-"))
    family = Family(criu_binary, tmp_path, base, programs, doubles, driver=FakeDriver({A: 200 * MIB}))

    class Accounting(fastpath.FastPath):
        def freeze_for_driver(self, **how):
            family.held()
            super().freeze_for_driver(**how)

        def swap_in(self, **limits):
            try:
                super().swap_in(**limits)
            finally:
                family.held()

    monkeypatch.setattr(context, "FastPath", Accounting)
    family.start("one")
    yield family
    family.lifecycle.terminate()
    shutil.rmtree(base)


def test_a_child_is_swapped_out_by_its_own_library_and_comes_back(family):
    (child,) = family.children
    assert child.blocks >= sum(SIZES)
    for _ in range(2):
        family.lifecycle.suspend()
        assert family.lifecycle.state is State.SUSPENDED
        assert (child.fake.state, child.fake.memory) == (CHECKPOINTED, {A: CONTEXT})
        assert child.path().amounts().swapped_out == child.blocks
        assert family.driver.free(A) == 200 * MIB
        family.lifecycle.resume()
        family.runs_on()


@pytest.mark.parametrize("suspended", [False, True])
def test_a_checkpoint_has_the_memory_of_a_child_and_a_wake_brings_it_back(family, suspended):
    (child,) = family.children
    for _ in range(2):
        if suspended:
            family.lifecycle.suspend()
        image = family.lifecycle.checkpoint()
        assert image.manifest.swapped_bytes == family.blocks, "the child's are among CRIU's pages"
        family.lifecycle.wake()
        family.runs_on()
        assert child.path().amounts().bytes == child.blocks


class Killer:
    """Kills a child at the ``nth`` event: what is asked of the driver for it or of its library, before or after."""

    def __init__(self, family: Family, monkeypatch) -> None:
        self._family, self._call, self._exchange = family, family.driver.call, fastpath._Library.exchange
        self._child, self._pid, self._left, self.said = None, 0, 0, ""
        self.events: list[str] = []
        monkeypatch.setattr(family.driver, "call", self._called)
        monkeypatch.setattr(
            fastpath._Library, "exchange", lambda library, verb, held=None: self._exchanged(library, verb, held)
        )

    def arm(self, child: Child, nth: int) -> None:
        self._child, self._pid, self._left, self.said = child, child.pid, nth, ""
        self.events = []

    def disarm(self) -> None:
        self._pid = 0

    def _event(self, what: str) -> None:
        self.events.append(what)
        self._left -= 1
        if self._left == 0:
            self.said = what
            self._child.kill()

    def _called(self, op: str, *, lane: int | None = None, **args):
        if lane != self._pid:
            return self._call(op, lane=lane, **args)
        if not self.said:
            self._event(f"before {op}")
        if self.said:
            raise DriverRefused(INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE")
        value = self._call(op, lane=lane, **args)
        self._event(f"after {op}")
        return value

    def _exchanged(self, library, verb: str, held):
        credentials = library._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("3i", credentials)[0] != self._pid or self.said:
            return self._exchange(library, verb, held)
        self._event(f"before {verb}")
        reply = self._exchange(library, verb, held)
        if not self.said:
            self._event(f"after {verb}")
        return reply


@pytest.mark.slow  # a suspend for each step
@pytest.mark.sweep(0.25)
@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_a_child_that_is_killed_at_any_step_makes_neither_a_failure_nor_a_loss(family, monkeypatch, first):
    killer, (other,) = Killer(family, monkeypatch), family.children
    for nth in itertools.count(first, 4):
        child = family.start(f"mortal{nth}")
        killer.arm(child, nth)
        family.lifecycle.suspend()
        assert other.path().amounts().swapped_out == other.blocks
        family.lifecycle.resume()
        killer.disarm()
        family.runs_on()
        if not killer.said:
            child.kill()
            break
    for step in ("close 0", "move_out", "swap_in", "cuda.unlock", "cuda.checkpoint", "cuda.restore"):
        assert {f"before {step}", f"after {step}"} <= {*killer.events}
    family.lifecycle.suspend()
    assert {path.name for path in family.lifecycle.home.runtime_dir.glob("kernel-fast-*")} == {other.path()._socket()}
    family.lifecycle.resume()


def test_a_child_that_begins_between_listing_and_locking_leaves_with_the_others(family, monkeypatch):
    lock = family.driver._cuda_lock

    def begins(pid: int, timeout_ms: int) -> None:
        if len(family.children) == 1 and pid == family.pid:
            lock(pid, timeout_ms)
            family.start("late")
        else:
            lock(pid, timeout_ms)

    monkeypatch.setattr(family.driver, "_cuda_lock", begins)
    family.lifecycle.suspend()
    late = family.children[1]
    assert (late.fake.state, late.path().amounts().swapped_out) == (CHECKPOINTED, late.blocks)
    family.lifecycle.resume()
    family.runs_on()


@pytest.mark.parametrize("refused", ["cuda.checkpoint", "copy_out", "swap_in"])
def test_what_is_refused_to_a_child_keeps_all_of_them_together(family, monkeypatch, refused):
    (child,) = family.children
    if refused == "cuda.checkpoint":
        child.fake.unsupported = True
        with pytest.raises(UnsupportedCuda):
            family.lifecycle.suspend()
        family.runs_on()
        return
    verb = {"copy_out": "cuMemcpyDtoHAsync_v2", "swap_in": "cuMemCreate"}[refused]
    out_of_memory = refused == "swap_in"
    assert child.program.ask(f"fail({verb!r}, 1, {OUT_OF_MEMORY if out_of_memory else 999})") is None
    family.lifecycle.suspend()
    if out_of_memory:
        with pytest.raises(GpuFull):
            family.lifecycle.resume()
        assert family.lifecycle.state is State.SUSPENDED
        assert child.path().amounts().swapped_out == child.blocks
        assert {family.fake.state, child.fake.state} == {CHECKPOINTED}
    else:
        assert child.path().amounts().swapped_out == 0, "the driver moves it"
        assert child.fake.state == CHECKPOINTED
        assert family.path().amounts().swapped_out == family.blocks
    family.lifecycle.resume()
    family.runs_on()


def without(family: Family, programs, tmp_path) -> dict[str, str]:
    return {}


def other_release(family: Family, programs, tmp_path) -> dict[str, str]:
    make = functools.partial(build_library, flags=("-O2", "-DCONTROL_VERSION=99"))
    library = built(make, "other-release") / "_fastpath.so"
    return {
        "LD_PRELOAD": str(library),
        fastpath.CHILDREN_VARIABLE: str(family.lifecycle.home.runtime_dir / fastpath.SOCKET),
    }


@pytest.mark.parametrize("environment", [without, other_release])
def test_a_child_without_this_releases_library_is_frozen_and_moved_by_the_driver(
    family, programs, tmp_path, environment
):
    child = family.start("stranger", environment(family, programs, tmp_path))
    assert child.blocks == 0
    memory = child.fake.memory
    for verb in ("suspend", "checkpoint"):
        getattr(family.lifecycle, verb)()
        assert (child.fake.state, child.fake.memory) == (CHECKPOINTED, memory)
        if verb == "suspend":
            assert thread_states(child.pid)["python"] == {"t"}
        family.lifecycle.wake()
        family.runs_on()


def test_the_next_owner_brings_a_child_back_whose_owner_ended_in_the_middle(family, monkeypatch):
    """The driver has unlocked it then, and frozen threads keep it from its memory."""
    (child,) = family.children

    class Ended(BaseException):
        pass

    def ends(library, verb: str, held=None):
        reply = exchange(library, verb, held)
        credentials = library._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if verb == "move_out" and struct.unpack("3i", credentials)[0] == child.pid:
            raise Ended
        return reply

    exchange = fastpath._Library.exchange
    kernel, pids = family.lifecycle.kernel, [family.pid, child.pid]
    monkeypatch.setattr(fastpath._Library, "exchange", ends)
    cuda_processes.lock(kernel)
    with pytest.raises(Ended):
        cuda_processes.swap_out(kernel, pids, timeout_s=30, choose_directory=lambda _, __: None)
    monkeypatch.undo()
    attach_again(family)
    if family.lifecycle.state is State.SUSPENDED:
        family.lifecycle.wake()
    family.runs_on()


def test_preflight_says_whose_memory_the_driver_has_to_move_and_who_shares_some(family):
    (child,) = family.children
    kernel = family.lifecycle.kernel
    assert [each.code for each in suspend.findings(kernel) if each.code in ("DRIVERS_RATE", "CUDA_IPC")] == []
    before, child.fake.memory = child.fake.memory, {A: 50 << 30}
    (slow,) = [each for each in suspend.findings(kernel) if each.code == "DRIVERS_RATE"]
    assert f"(pid {child.pid})" in slow.text and not slow.blocks
    child.fake.memory = before
    handle = "ctypes.create_string_buffer(64)"
    assert child.program.ask(f"ctypes.CDLL('libcuda.so.1').cuIpcGetMemHandle({handle}, held[0][0])") == 0
    with pytest.raises(SharedDeviceMemory):
        family.lifecycle.suspend()
    family.runs_on()
