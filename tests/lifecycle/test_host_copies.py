"""Bounds of the host memory that copies of device memory have by default, and their end when others need it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jupyter_gpu_ckpt.cuda.fastpath import Amounts
from jupyter_gpu_ckpt.errors import CapsuleGone, CudaError
from jupyter_gpu_ckpt.lifecycle import host_copies, preflight
from jupyter_gpu_ckpt.lifecycle.plans import State

GIB = 1 << 30


class World:
    """A machine with one GPU, and the kernels of a server; numbers are GiB."""

    def __init__(self, memory: int, reserved: int | None = None) -> None:
        self.memory, self.reserved = memory * GIB, (memory // 8 if reserved is None else reserved) * GIB
        self.kernels: dict[str, SimpleNamespace] = {}
        self.elsewhere = 0  #: bytes on the GPU of other servers

    def available(self) -> int:
        return self.memory - sum(each.copied for each in self.kernels.values())

    def start(self, name: str, gib: int, *, copied: int = 0, limit: int | None = None, state: State = State.RUNNING):
        kernel = SimpleNamespace(home=SimpleNamespace(kernel_id=name), attempt=None, refuses=False, begun=0)
        kernel.uses_cuda = True
        kernel.bytes, kernel.copied = gib * GIB, copied * GIB
        kernel.settings, kernel.machine = SimpleNamespace(host_copy_bytes=limit), SimpleNamespace(state=state)
        kernel.require_capsule = lambda: SimpleNamespace(host_pid=kernel)
        path = SimpleNamespace(kept_bytes=lambda: kernel.copied, begin_mirror=lambda: self._begin(kernel))
        path.give_up_copy = lambda: self._give_up(kernel)
        kernel.fast_path = lambda: path
        kernel.engine = SimpleNamespace(kernels=self.kernels, gpus=self)
        self.kernels[name] = kernel
        return kernel

    def _begin(self, kernel) -> Amounts:
        kernel.begun += 1
        return Amounts(1, kernel.bytes, mirrors=1)

    def _give_up(self, kernel) -> None:
        if kernel.refuses:
            raise CudaError("It is busy.")
        kernel.copied = 0

    def list(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(used=sum(each.bytes for each in self.kernels.values()) + self.elsewhere * GIB)]

    def used_by(self, kernel) -> dict[str, int]:
        return {"GPU": kernel.bytes}


@pytest.fixture
def world(monkeypatch):
    def make(*numbers: int) -> World:
        world = World(*numbers)
        monkeypatch.setattr(host_copies, "available_memory", world.available)
        monkeypatch.setattr(host_copies, "reserved_memory", lambda: world.reserved)
        processes = host_copies.cuda_processes
        monkeypatch.setattr(processes, "candidates", lambda kernel: [kernel] if kernel.uses_cuda else [])
        amounts = lambda kernel: Amounts(bool(kernel.bytes), kernel.bytes, kept=kernel.copied)  # noqa: E731
        monkeypatch.setattr(processes, "amounts", amounts)
        return world

    return make


def test_a_kernel_is_mirrored_where_memory_has_room_for_all_that_is_on_the_gpus(world):
    machine = world(128)
    one, other = machine.start("one", 48), machine.start("other", 20)
    assert host_copies.begin_mirror(one)
    one.copied = one.bytes
    assert host_copies.begin_mirror(other), "the first one needs no more memory than its copy has"
    machine.elsewhere = 128 - 16 - 48 - 20
    assert host_copies.begin_mirror(other)
    machine.elsewhere += 1
    assert not host_copies.begin_mirror(other), "somebody else's memory could not be suspended any more"
    assert (one.begun, other.begun) == (1, 2)


def test_a_copy_that_is_not_allowed_any_more_is_given_up(world):
    machine = world(64)
    kernel = machine.start("one", 30, copied=30)
    assert host_copies.begin_mirror(kernel)
    machine.elsewhere = 27
    assert not host_copies.begin_mirror(kernel)
    assert kernel.copied == 0


def test_a_kernel_without_memory_costs_nothing(world, monkeypatch):
    kernel = world(128).start("one", 0)
    monkeypatch.setattr(host_copies, "available_memory", lambda: pytest.fail("it was inspected"))
    assert not host_copies.begin_mirror(kernel)
    kernel.uses_cuda = False
    monkeypatch.setattr(host_copies.cuda_processes, "amounts", lambda kernel: pytest.fail("its library was reached"))
    assert not host_copies.begin_mirror(kernel)
    assert kernel.begun == 0


def test_a_limit_of_the_administrator_is_used_as_it_is(world):
    machine = world(64)
    kernel = machine.start("one", 60, limit=1 << 50)
    machine.elsewhere = 1000
    assert host_copies.begin_mirror(kernel)
    kernel.bytes = 64 * GIB
    assert not host_copies.begin_mirror(kernel)


def test_small_machines_and_containers_have_no_copies(monkeypatch):
    """An eighth of their memory is allocated before a copy is given up, which takes a quarter of a second."""
    monkeypatch.setattr(preflight, "all_memory", lambda: 16 << 30)
    assert preflight.reserved_memory() == 2 << 30
    monkeypatch.setattr(preflight, "all_memory", lambda: (16 << 30) - 8)
    assert preflight.reserved_memory() == 0


def test_copies_are_given_up_for_a_kernel_that_needs_the_memory_and_no_more_than_it_needs(world):
    machine = world(64)
    needs, first = machine.start("needs", 30), machine.start("1", 20, copied=20)
    second = machine.start("2", 9, copied=9)
    host_copies.release_copies(needs, 35 * GIB)
    assert (first.copied, second.copied) == (20 * GIB, 9 * GIB), "there was enough"
    host_copies.release_copies(needs, 40 * GIB)
    assert (first.copied, second.copied) == (0, 9 * GIB)
    host_copies.release_copies(needs, 100 * GIB)
    assert second.copied == 0


def test_kernels_that_are_busy_or_gone_keep_what_they_have(world):
    machine = world(64)
    needs, refuses = machine.start("needs", 30, copied=5), machine.start("refuses", 1, copied=1)
    refuses.refuses = True
    suspended = machine.start("suspended", 10, copied=10, state=State.SUSPENDED)
    moving = machine.start("moving", 10, copied=10)
    moving.attempt = object()
    gone = machine.start("gone", 0)
    gone.require_capsule = lambda: (_ for _ in ()).throw(CapsuleGone("It has ended."))
    host_copies.release_copies(needs, 100 * GIB)
    assert [each.copied // GIB for each in (needs, refuses, suspended, moving)] == [5, 1, 10, 10]
