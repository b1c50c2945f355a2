"""The steps around the driver's lock: real capsule, real library, really stopped threads; the drivers are fakes.

One double is the driver that the kernel calls (`driver_double.c`), another the one that suspends it (`FakeDriver`).
"""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
from fast_program import MIB, SIZES, A, frozen
from waiting import until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.cuda.cuda import OUT_OF_MEMORY
from jupyter_gpu_ckpt.cuda.fastpath import Amounts, FastPath
from jupyter_gpu_ckpt.errors import CudaError, GpuFull
from jupyter_gpu_ckpt.lifecycle import suspend
from jupyter_gpu_ckpt.process import descriptors
from jupyter_gpu_ckpt.testing.fake_cuda import CHECKPOINTED, LOCKED, RUNNING, FakeCuda, FakeDriver


def test_swap_out_and_in(kernel):
    total = kernel.path.amounts().bytes
    assert total >= sum(SIZES)
    for _ in range(3):
        kernel.lock()
        assert kernel.swap_out() == total
        assert kernel.state == LOCKED
        assert kernel.path.amounts() == Amounts(len(SIZES), total, total)
        kernel.cuda.checkpoint(kernel.pid)
        kernel.cuda.restore(kernel.pid)
        kernel.swap_in()
        kernel.runs_on()


def test_what_has_no_library_is_left_to_the_driver(tmp_path):
    with Capsule.create(Path(tempfile.mkdtemp(prefix="gc-"))) as capsule:
        capsule.spawn(["sleep", "100"], dict(os.environ), "/")
        driver = FakeDriver({A: 100 * MIB})
        driver.start({A: MIB}, pid=capsule.host_pid)
        path = FastPath(capsule, FakeCuda(driver))
        path._cuda.lock(capsule.host_pid, 5)
        assert path.swap_out(lock_s=5, timeout_s=5) == 0
        path.swap_in(lock_s=5, timeout_s=5)
        assert driver.processes[capsule.host_pid].state == RUNNING
    shutil.rmtree(capsule.directory)


def test_the_reason_of_a_slow_transfer_is_reported(kernel):
    total = kernel.path.amounts().bytes
    assert kernel.path.why_slow(total + (1 << 30)) == "", "the context is always the driver's"
    assert kernel.path.why_slow(total + (40 << 30)).startswith("40.0 GiB")
    with Capsule.create(Path(tempfile.mkdtemp(prefix="gc-"))) as capsule:
        capsule.spawn(["sleep", "100"], dict(os.environ), "/")
        assert "off" in FastPath(capsule, kernel.cuda).why_slow(1 << 30)
    shutil.rmtree(capsule.directory)


def test_preflight_reports_it(fast_kernel):
    kernel = fast_kernel()
    assert "DRIVERS_RATE" not in [finding.code for finding in suspend.findings(kernel.lifecycle.kernel)]
    kernel.fake.memory = {A: 50 << 30}
    (warning,) = [finding for finding in suspend.findings(kernel.lifecycle.kernel) if finding.code == "DRIVERS_RATE"]
    assert not warning.blocks
    kernel.held()


def test_with_threads_that_cannot_be_stopped_the_driver_moves_the_memory(kernel):
    kernel.ask("begin_thread('cuda-of-a-user')")
    kernel.lock()
    assert kernel.swap_out() == 0
    assert kernel.state == LOCKED
    kernel.swap_in()
    kernel.runs_on()


def test_a_program_that_has_opened_all_files_it_may_comes_back(kernel):
    """A program that waits for its memory can close none."""
    limit = resource.prlimit(kernel.pid, resource.RLIMIT_NOFILE)
    kernel.lock()
    assert kernel.swap_out() > 0

    def full() -> bool:  # its library may be closing its last connection
        resource.prlimit(kernel.pid, resource.RLIMIT_NOFILE, (len(procfs.descriptors(kernel.pid)), limit[1]))
        return descriptors.free(kernel.pid) <= 0

    until(full, "no number is free")
    kernel.swap_in()
    assert kernel.path.amounts().swapped_out == 0
    resource.prlimit(kernel.pid, resource.RLIMIT_NOFILE, limit)
    kernel.runs_on()


@pytest.mark.parametrize("name", ["gpu-ckpt-out", "gpu-ckpt-files", "gpu-ckpt-lock"])
def test_a_program_that_renames_its_threads_says_nothing_of_its_memory(kernel, name):
    kernel.ask(f"open('/proc/self/comm', 'w').write({name!r})")
    assert not kernel.path.swapped_out()
    assert kernel.path.open_extents() is None
    kernel.lock()
    assert kernel.swap_out() > 0
    assert kernel.path.swapped_out()
    kernel.swap_in()
    assert not kernel.path.swapped_out()
    kernel.runs_on()


@pytest.mark.parametrize("name", ["gpu-ckpt-fast", "gpu-ckpt-copy"])
def test_a_program_s_thread_that_is_called_as_the_library_s_is_frozen(kernel, name):
    kernel.ask(f"begin_thread({name!r})")
    kernel.ask("slow(100_000)")
    kernel.lock()
    kernel.swap_out()
    with pytest.raises(CudaError):
        kernel.path.swap_in(lock_s=5, timeout_s=0.05)
    assert frozen(kernel)
    tasks = [(task / "stat").read_text().rpartition(")") for task in Path(f"/proc/{kernel.pid}/task").iterdir()]
    states = [rest.split()[0] for before, _, rest in tasks if before.endswith(f"({name}")]
    assert states.count("t") == 1, "and the library's own run"
    kernel.swap_in()
    kernel.ask("slow(0)")
    kernel.runs_on()


def test_a_program_that_renames_the_librarys_thread_hides_nothing(kernel):
    kernel.lock()
    assert kernel.swap_out() > 0
    (library,) = (
        task for task in Path(f"/proc/{kernel.pid}/task").iterdir() if (task / "comm").read_text() == "gpu-ckpt-fast\n"
    )
    threads = "os.listdir('/proc/self/task')"
    inside = kernel.ask(f"[t for t in {threads} if 'ckpt-fast' in open(f'/proc/self/task/{{t}}/comm').read()][0]")
    for name in ("python", "gpu-ckpt-fast"):  # by the latter it is known when all other threads are frozen
        kernel.ask(f"open('/proc/self/task/{inside}/comm', 'w').write({name!r})")
        assert (library / "comm").read_text() == f"{name}\n"
        assert kernel.path.swapped_out()
    kernel.swap_in()
    kernel.runs_on()


@pytest.mark.parametrize("function", ["cuMemcpyDtoHAsync_v2", "cuMemHostRegister_v2", "cuMemUnmap"])
def test_a_driver_that_refuses_the_transfer_gets_to_do_it_itself(kernel, function):
    kernel.ask(f"fail({function!r}, 2 if {function!r} == 'cuMemUnmap' else 1, 999)")
    kernel.lock()
    assert kernel.swap_out() == 0
    assert kernel.state == LOCKED
    kernel.swap_in()
    kernel.runs_on()


def test_a_transfer_that_takes_too_long_is_given_up(kernel):
    """Not locked meanwhile: the library, still at it, would wait at the driver's lock, and never answer."""
    kernel.ask("slow(100_000)")
    kernel.lock()
    with pytest.raises(CudaError):
        kernel.swap_out(timeout_s=0.05)
    assert kernel.state == RUNNING
    assert frozen(kernel), "a thread that continues could touch what is away"
    kernel.swap_in()
    assert not kernel.path.swapped_out()
    assert not frozen(kernel)
    kernel.ask("slow(0)")
    kernel.runs_on()
    kernel.lock()
    assert kernel.swap_out() > 0
    kernel.swap_in()
    kernel.runs_on()


def test_a_return_that_takes_too_long_continues_and_so_does_the_next_one(kernel):
    kernel.ask("slow(100_000)")
    kernel.lock()
    total = kernel.swap_out()
    kernel.cuda.checkpoint(kernel.pid)
    kernel.cuda.restore(kernel.pid)
    with pytest.raises(CudaError):
        kernel.path.swap_in(lock_s=5, timeout_s=0.05)
    assert kernel.state == RUNNING
    assert frozen(kernel), "a thread that continues could touch what is away"
    assert total == kernel.path.amounts().bytes
    kernel.swap_in()
    kernel.ask("slow(0)")
    kernel.runs_on()


def test_where_the_library_publishes_is_looked_for_again_in_another_process(kernel, monkeypatch):
    at = fastpath._find_mark(kernel.pid)
    for wrong in (at - 8, 4096):
        monkeypatch.setitem(fastpath._marks, kernel.pid, wrong)
        assert not kernel.path.swapped_out()
        assert fastpath._marks[kernel.pid] == at


def test_swapped_out_bytes_are_known_without_the_library(kernel):
    """Its socket may be gone, or no descriptor left for an answer: a kernel whose blocks are away must not run on."""
    socket, aside = kernel.directory / fastpath.SOCKET, kernel.directory / "aside"
    kernel.lock()
    kernel.swap_out()
    assert kernel.path.swapped_out()
    socket.rename(aside)
    with pytest.raises(CudaError, match="cannot be reached"):
        kernel.swap_in()
    assert kernel.path.swapped_out()
    assert frozen(kernel)
    aside.rename(socket)
    kernel.swap_in()
    kernel.runs_on()
    assert not kernel.path.swapped_out()


def test_a_kernel_that_cannot_answer_with_nothing_swapped_out_is_unlocked(kernel):
    socket, aside = kernel.directory / fastpath.SOCKET, kernel.directory / "aside"
    socket.rename(aside)
    kernel.lock()
    assert kernel.swap_out() == 0
    kernel.cuda.checkpoint(kernel.pid)
    kernel.cuda.restore(kernel.pid)
    kernel.swap_in()
    assert kernel.state == RUNNING
    aside.rename(socket)
    kernel.runs_on()


def test_an_owner_without_descriptors_takes_nothing_for_granted(kernel, monkeypatch):
    kernel.lock()
    kernel.swap_out()
    monkeypatch.setattr(fastpath.os, "open", lambda *_: (_ for _ in ()).throw(OSError(24, "Too many open files")))
    with pytest.raises(CudaError, match="Too many open files"):
        kernel.swap_in()
    monkeypatch.undo()
    kernel.swap_in()
    kernel.runs_on()


def test_a_driver_that_does_not_lock_again(kernel):
    """The program's threads are stopped while memory is swapped out."""
    kernel.lock()
    unlock = kernel.driver._cuda_unlock

    def unlock_once(pid: int) -> None:
        unlock(pid)
        kernel.driver.refuse["cuda.lock"] = 999

    kernel.driver._cuda_unlock = unlock_once
    with pytest.raises(CudaError):
        kernel.swap_out()
    assert kernel.state == RUNNING
    assert kernel.path.amounts().swapped_out > 0
    assert frozen(kernel), "a thread that continues could touch what is away"
    del kernel.driver.refuse["cuda.lock"], kernel.driver._cuda_unlock
    kernel.swap_in()
    kernel.runs_on()


def test_too_little_gpu_memory_at_a_swap_in_can_be_tried_again(kernel):
    kernel.ask(f"fail('cuMemCreate', 2, {OUT_OF_MEMORY})")
    kernel.lock()
    total = kernel.swap_out()
    kernel.cuda.checkpoint(kernel.pid)
    kernel.cuda.restore(kernel.pid)
    with pytest.raises(GpuFull) as caught:
        kernel.swap_in()
    assert "host memory" in caught.value.left
    assert kernel.state == CHECKPOINTED
    assert kernel.path.amounts().swapped_out == total
    kernel.cuda.restore(kernel.pid)
    kernel.swap_in()
    kernel.runs_on()


def test_another_owner_swaps_in_while_nothing_is_locked(kernel):
    kernel.lock()
    kernel.capsule.freeze_threads(5)
    kernel.cuda.unlock(kernel.pid)
    with kernel.path._library(60) as library:
        library.request("copy_out")
        library.request("free")
    kernel.capsule.outlive()
    kernel.capsule.detach()
    kernel.capsule = Capsule.attach(kernel.directory)
    kernel.path = FastPath(kernel.capsule, kernel.cuda)
    kernel.swap_in()
    kernel.runs_on()
