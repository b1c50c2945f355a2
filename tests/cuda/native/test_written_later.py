"""Device memory of a save point is written when its kernel runs again: the kernel does not wait for the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable

import pytest
from fast_kernel import CONTEXT, FastKernel, chunks
from fast_program import SIZES
from test_frozen import attach_again
from waiting import until

from jupyter_gpu_ckpt.criu.criu import Criu
from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.errors import CriuError, GpuCkptError, KernelLost, KernelSilent, NoMemory, NoSpace
from jupyter_gpu_ckpt.files import direct_io
from jupyter_gpu_ckpt.image import device_memory, verify
from jupyter_gpu_ckpt.image.draft import Draft
from jupyter_gpu_ckpt.image.image import Image
from jupyter_gpu_ckpt.image.save_point import SavePoint
from jupyter_gpu_ckpt.lifecycle import host_memory
from jupyter_gpu_ckpt.lifecycle.plans import State

#: The largest allocation.
AT, SIZE = "held[2][0].value", SIZES[2]


@pytest.fixture(autouse=True)
def memory_is_not_short(monkeypatch):
    monkeypatch.setattr(host_memory, "all_memory", lambda: 0)


@pytest.fixture
def kernel(fast_kernel):
    return fast_kernel()


class Write:
    """The writes of device memory: each waits until it may be done, and may fail then."""

    def __init__(self, monkeypatch) -> None:
        self.begun, self.permitted = threading.Event(), threading.Event()
        self.fail: Callable[[], object] = lambda: None
        self._write = direct_io.write
        monkeypatch.setattr(direct_io, "write", self)

    def __call__(self, *arguments, **options) -> None:
        self.begun.set()
        assert self.permitted.wait(60)
        self.fail()
        self._write(*arguments, **options)


@pytest.fixture
def write(monkeypatch):
    write = Write(monkeypatch)
    yield write
    write.permitted.set()


class Save(threading.Thread):
    """A save on a thread of its own, until its device memory begins to be written; what came of it."""

    def __init__(self, kernel: FastKernel, write: Write, name: str = "point") -> None:
        super().__init__()
        self._kernel, self._name = kernel, name
        self.image: Image | None = None
        self.error: GpuCkptError | None = None
        write.begun.clear()
        write.permitted.clear()
        self.start()
        assert write.begun.wait(60)

    def run(self) -> None:
        try:
            self.image = self._kernel.lifecycle.save(SavePoint(self._name))
        except GpuCkptError as error:
            self.error = error


def names(kernel: FastKernel, name: str = "") -> list[str]:
    """Return the names in a directory of the capsule's host memory."""
    memory = kernel.lifecycle.capsule.host_memory()
    try:
        return os.listdir(f"/proc/self/fd/{memory}/{name}")
    finally:
        os.close(memory)


def nothing_is_left(kernel: FastKernel) -> None:
    assert fastpath.LINKED not in names(kernel)
    assert not list(kernel.store.root.glob(".draft*"))


def change(kernel: FastKernel, value: int) -> None:
    """Write to the whole of the largest allocation, which has 3 in each byte where it is intact."""
    kernel.program.ask(f"ctypes.memset({AT}, {value}, {SIZE})")


def has(kernel: FastKernel, value: int) -> bool:
    return kernel.program.ask(f"ctypes.string_at({AT}, {SIZE}) == bytes([{value}]) * {SIZE}") is True


@pytest.mark.parametrize("answers", [True, False])
def test_garbage_is_collected_before_a_save_pauses_the_kernel(kernel, answers):
    """And a kernel that does not do so in time is saved all the same; a checkpoint has no pause."""
    if not answers:
        kernel.gate.fails["gpu_ckpt_collect_request"] = KernelSilent("It is busy.")
    kernel.gate.calls.clear()
    kernel.store.check(kernel.lifecycle.save(SavePoint("point")))
    calls = kernel.gate.calls
    order = ["gpu_ckpt_collect_request", "drain", "gpu_ckpt_quiesce_request"]
    assert [call for call in calls if call in order] == order
    kernel.runs_on()
    calls.clear()
    kernel.lifecycle.checkpoint()
    assert "gpu_ckpt_collect_request" not in calls


@pytest.mark.parametrize("host_copy_bytes", [0, 1 << 30])
def test_the_kernel_runs_before_the_disk_has_what_the_save_point_has_of_the_moment_before(
    fast_kernel, write, host_copy_bytes
):
    kernel = fast_kernel(host_copy_bytes=host_copy_bytes)
    for count, (name, value) in enumerate((("one", 3), ("two", 4))):
        change(kernel, value)
        save = Save(kernel, write, name)
        assert kernel.gate.serves
        assert kernel.lifecycle.kernel.publishes_save_point
        assert kernel.held() == kernel.blocks + CONTEXT
        change(kernel, 77)
        assert names(kernel, fastpath.LINKED)
        assert len(kernel.store.images()) == count, "it is not complete"
        write.permitted.set()
        save.join(60)
        assert save.error is None
        nothing_is_left(kernel)
        verify.verify(save.image.path, kernel.store.keys)
        assert sum(path.stat().st_size for path in chunks(save.image)) == kernel.blocks
        assert (kernel.path().amounts().kept > 0) is (host_copy_bytes > 0)
        assert has(kernel, 77)
    kernel.lifecycle.back("two")
    assert has(kernel, 4)
    kernel.lifecycle.back("one")
    kernel.runs_on()


def test_memory_is_given_back_as_it_is_written(kernel, write, monkeypatch):
    left: list[int] = []
    write.fail = lambda: left.append(len(names(kernel, fastpath.LINKED)))
    monkeypatch.setattr(device_memory, "_DEPTH", 1)
    save = Save(kernel, write)
    write.permitted.set()
    save.join(60)
    assert left[-1] < left[0] == len(chunks(save.image))


@pytest.mark.parametrize("why", ["the disk is full", "memory became short"])
def test_a_save_point_that_cannot_be_completed_is_given_up_and_the_kernel_runs_on(kernel, write, monkeypatch, why):
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(device_memory, "_DEPTH", 1)
    save = Save(kernel, write)
    if why == "the disk is full":
        write.fail = full
    else:
        monkeypatch.setattr(host_memory, "available_memory", lambda: 0)
    write.permitted.set()
    save.join(60)
    assert type(save.error) is (NoSpace if why == "the disk is full" else NoMemory)
    assert save.error.left == "the kernel runs on"
    kernel.runs_on()
    assert kernel.store.images() == []
    nothing_is_left(kernel)
    assert kernel.path().host_memory_bytes() == 0
    write.fail = lambda: None
    monkeypatch.undo()
    kernel.store.check(kernel.lifecycle.save(SavePoint("point")))
    kernel.runs_on()


@pytest.mark.parametrize("why", ["memory is short", "no links can be made"])
def test_where_it_cannot_wait_in_host_memory_the_kernel_waits_for_the_disk(kernel, write, monkeypatch, why):
    if why == "memory is short":
        monkeypatch.setattr(host_memory, "all_memory", lambda: 1 << 60)
    else:
        memory = kernel.lifecycle.capsule.host_memory()
        os.close(os.open(fastpath.LINKED, os.O_CREAT, dir_fd=memory))
        os.close(memory)
    save = Save(kernel, write)
    assert not kernel.gate.serves
    write.permitted.set()
    save.join(60)
    kernel.store.check(save.image)
    kernel.runs_on()


def test_a_kernel_that_is_killed_meanwhile_leaves_the_whole_save_point(kernel, write):
    save = Save(kernel, write)
    os.kill(kernel.pid, signal.SIGKILL)
    until(lambda: kernel.lifecycle.capsule.poll() is not None, "it has ended")
    write.permitted.set()
    save.join(60)
    assert type(save.error) is KernelLost
    [point] = kernel.store.images()
    kernel.store.check(point)
    assert sum(path.stat().st_size for path in chunks(point)) == kernel.blocks
    assert not list(kernel.store.root.glob(".draft*"))


def test_a_save_point_whose_dump_fails_leaves_no_links(kernel, monkeypatch):
    def fails(*_, **__) -> None:
        until(lambda: fastpath.LINKED in names(kernel), "it is linked beside the dump")
        raise CriuError("It failed.")

    monkeypatch.setattr(kernel.lifecycle.engine.criu, "dump", fails)
    with pytest.raises(CriuError):
        kernel.lifecycle.save(SavePoint("point"))
    nothing_is_left(kernel)
    kernel.runs_on()


#: What a server is about to do when it is killed.
MOMENTS = {
    "have CRIU dump": (Criu, "dump", 0),
    "write device memory": (Draft, "write_device", 0),
    "write the third chunk": (direct_io, "write", 2),
    "hash what CRIU has written": (verify, "entries", 0),
}


def test_a_server_that_is_killed_at_any_moment_leaves_the_kernel_and_no_half_of_a_save_point(kernel, monkeypatch):
    for owner, name, calls in MOMENTS.values():
        kernel.store.hashes.settle()  # the other process would wait for a thread of this one
        server = os.fork()
        if server == 0:
            with contextlib.suppress(BaseException):
                _die_at(monkeypatch, owner, name, calls)
                kernel.lifecycle.save(SavePoint("point"))
            os._exit(1)
        _, status = os.waitpid(server, 0)
        assert os.WIFSIGNALED(status), name
        if name != "dump":  # beside which it is linked
            assert (fastpath.LINKED in names(kernel)) is (name != "entries"), name
        attach_again(kernel)
        if kernel.lifecycle.state is State.SUSPENDED:
            kernel.lifecycle.wake()
        kernel.store.sweep()
        assert kernel.store.images() == [], name
        nothing_is_left(kernel)
        kernel.program.continues()
    kernel.store.check(kernel.lifecycle.save(SavePoint("point")))


def _die_at(monkeypatch, owner: object, name: str, calls: int) -> None:
    """Have this process kill itself at a call of a function, after so many."""
    made: list[None] = []
    function = getattr(owner, name)

    def die(*arguments: object, **options: object) -> object:
        if len(made) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        made.append(None)
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, die)
