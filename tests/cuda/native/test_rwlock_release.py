"""Threads that wait at the driver's lock when they are frozen: it admits readers that have not noticed."""

from __future__ import annotations

import pytest
from fast_program import frozen
from waiting import until

from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.cuda.cuda import OUT_OF_MEMORY
from jupyter_gpu_ckpt.errors import CudaError, GpuFull
from jupyter_gpu_ckpt.testing.fake_cuda import RUNNING

pytestmark = pytest.mark.slow  # a process for each arrangement of locks

#: Threads that call the driver all the time; ``double_lock_file`` begins to lock it by a file.
CALLERS = '''exec("""
driver, calls = ctypes.CDLL("libcuda.so.1"), {{}}
driver.double_lock_file({driver_lock!r}.encode())
def call(number, function, *arguments):
    while True: function(*arguments); calls[number] += 1
for number, (function, *arguments) in enumerate({callers}):
    calls[number] = 0
    threading.Thread(target=call, args=(number, getattr(driver, function), *arguments), daemon=True).start()
""", globals())'''
READER, WRITER = ("double_read",), ("double_write",)


@pytest.fixture
def driver_lock(kernel, monkeypatch):
    """The file that locks the driver the kernel calls; it is locked with the one that suspends."""
    file, said = kernel.directory / "driver_lock", kernel.directory / "driver_lock-is-locked"
    lock, unlock = kernel.cuda.lock, kernel.cuda.unlock

    def lock_both(pid, timeout_s):
        file.touch()
        until(said.exists, "the driver is locked")
        lock(pid, timeout_s)

    def unlock_both(pid):
        unlock(pid)
        file.unlink()
        until(lambda: not said.exists(), "the driver is unlocked")

    monkeypatch.setattr(kernel.cuda, "lock", lock_both)
    monkeypatch.setattr(kernel.cuda, "unlock", unlock_both)
    return file


def start(kernel, driver_lock, *callers) -> None:
    kernel.ask(CALLERS.format(driver_lock=str(driver_lock), callers=callers))


def continues(kernel) -> None:
    kernel.runs_on()
    before = kernel.ask("dict(calls)")
    until(lambda: all(n > before[at] for at, n in kernel.ask("dict(calls)").items()), "all callers continue")


@pytest.mark.parametrize(("readers", "writers"), [(1, 0), (3, 0), (0, 2), (4, 3)])
def test_callers_that_wait_at_the_lock(kernel, driver_lock, readers, writers):
    start(kernel, driver_lock, *[READER] * readers, *[WRITER] * writers)
    total = kernel.path.amounts().bytes
    for _ in range(5):
        kernel.lock()
        assert kernel.swap_out() == total
        assert not frozen(kernel), "the driver's lock is enough"
        kernel.cuda.checkpoint(kernel.pid)
        kernel.cuda.restore(kernel.pid)
        kernel.swap_in()
        continues(kernel)


def test_callers_of_a_kernel_that_finds_too_little_memory(kernel, driver_lock):
    start(kernel, driver_lock, READER, READER, WRITER)
    kernel.ask(f"fail('cuMemCreate', 2, {OUT_OF_MEMORY})")
    kernel.lock()
    total = kernel.swap_out()
    kernel.cuda.checkpoint(kernel.pid)
    kernel.cuda.restore(kernel.pid)
    with pytest.raises(GpuFull):
        kernel.swap_in()
    assert kernel.path.amounts().swapped_out == total
    kernel.cuda.restore(kernel.pid)
    kernel.swap_in()
    continues(kernel)


def test_a_lock_that_our_calls_need_leaves_the_swap_to_the_driver(kernel, driver_lock):
    """No thread of ours waits for that, nor for ever, and none of theirs for ours."""
    start(kernel, driver_lock, READER, READER, READER, ("double_hold", 200_000))
    for _ in range(2):
        kernel.lock()
        assert kernel.swap_out() == 0
        kernel.swap_in()
        continues(kernel)


def test_a_transfer_that_takes_too_long_among_callers(kernel, driver_lock):
    """The transfer continues and has the driver's lock: no caller continues before all are readers of it again."""
    kernel.ask("slow(100_000)")
    start(kernel, driver_lock, READER, READER, READER, WRITER)
    kernel.lock()
    with pytest.raises(CudaError):
        kernel.swap_out(timeout_s=0.4)
    assert kernel.state == RUNNING
    assert kernel.path._state() is not fastpath._State.READERS_DROPPED or frozen(kernel)
    kernel.swap_in()
    kernel.ask("slow(0)")
    continues(kernel)
