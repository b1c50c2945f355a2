"""Going back does not wait for the present state's device memory: that is written when the kernel is back."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from pathlib import Path

import pytest
import small_disk
from fast_kernel import FastKernel, chunks
from test_written_later import _die_at, change, has
from waiting import until

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.criu.criu import Criu
from jupyter_gpu_ckpt.errors import CriuError, GpuCkptError, KernelLost, NoSpace, QuotaExceeded
from jupyter_gpu_ckpt.image import completion, device_memory, save_point, verify
from jupyter_gpu_ckpt.image.completion import Completion
from jupyter_gpu_ckpt.image.encryption import Vault
from jupyter_gpu_ckpt.image.image import Image
from jupyter_gpu_ckpt.image.manifest import Manifest
from jupyter_gpu_ckpt.image.quota import Quota
from jupyter_gpu_ckpt.image.save_point import SavePoint
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.lifecycle import dump, host_memory
from jupyter_gpu_ckpt.lifecycle.lifecycle import Lifecycle
from jupyter_gpu_ckpt.lifecycle.plans import State

#: What the largest allocation has in each byte: at the save point, and now.
THEN, NOW = 3, 9


@pytest.fixture(autouse=True)
def memory_is_not_short(monkeypatch):
    monkeypatch.setattr(host_memory, "all_memory", lambda: 0)


def at_a_point(kernel: FastKernel) -> FastKernel:
    """Make a save point of a kernel, and then another state."""
    kernel.lifecycle.save(SavePoint("point"))
    change(kernel, NOW)
    return kernel


@pytest.fixture
def kernel(fast_kernel):
    return at_a_point(fast_kernel())


class Back(threading.Thread):
    """A kernel that goes back on a thread of its own; what came of it."""

    def __init__(self, kernel: FastKernel) -> None:
        super().__init__()
        self._kernel = kernel
        self.present: Image | None = None
        self.error: GpuCkptError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.present = self._kernel.lifecycle.back("point")
        except GpuCkptError as error:
            self.error = error


@pytest.fixture
def held(monkeypatch):
    """Keep processes from completing an image until the event is set; they wait for it while their servers live."""
    permitted, begin = threading.Event(), Completion.begin

    def held_begin(self: Completion) -> None:
        if permitted.is_set():
            begin(self)

    def held_wait(self: Completion, *arguments, **options) -> Image:
        permitted.wait(60)
        return wait(self, *arguments, **options)

    wait = Completion.wait
    monkeypatch.setattr(Completion, "begin", held_begin)
    monkeypatch.setattr(Completion, "wait", held_wait)
    yield permitted
    permitted.set()


def drafts(kernel: FastKernel) -> list[Path]:
    return list(kernel.store.root.glob(".draft*"))


def presents(kernel: FastKernel) -> list[Image]:
    """Return the save points of states that the kernel has gone back from."""
    return [image for image in kernel.store.images() if save_point.of_image(image).automatic]


def is_whole(kernel: FastKernel, present: Image) -> None:
    kernel.store.check(present)
    assert sum(path.stat().st_size for path in chunks(present)) == kernel.blocks
    assert drafts(kernel) == []


def back_beside_its_state(kernel: FastKernel) -> Image:
    """Go back; return the one save point of the state from before, which is whole and in which nothing sleeps."""
    [present] = presents(kernel)
    is_whole(kernel, present)
    assert present.retired
    kernel.lifecycle.back("point")
    assert has(kernel, THEN)
    return present


def goes_there(kernel: FastKernel, present: Image) -> None:
    """Undo the going back."""
    kernel.lifecycle.back(save_point.of_image(present).name)
    assert has(kernel, NOW)


def is_back_before_its_image(kernel: FastKernel) -> bool:
    return kernel.lifecycle.state is State.RUNNING and kernel.lifecycle.kernel.publishes_save_point


def test_the_kernel_is_back_before_the_disk_has_its_state_from_before(kernel, held):
    back = Back(kernel)
    until(lambda: is_back_before_its_image(kernel), "it is back")
    assert kernel.gate.serves
    kernel.runs_on()
    assert has(kernel, THEN)
    assert presents(kernel) == []
    assert not list(kernel.store.root.glob(".draft-*/criu/device/*"))
    kernel.store.sweep()
    change(kernel, 77)
    held.set()
    back.join(60)
    assert back.error is None
    is_whole(kernel, back.present)
    assert back.present.retired
    assert not kernel.lifecycle.kernel.publishes_save_point
    goes_there(kernel, back.present)


def test_the_save_point_s_processes_and_its_device_memory_are_there_when_the_present_state_ends(kernel):
    seen = []

    def inspect(event) -> None:
        ahead = kernel.lifecycle.kernel.ahead
        if (event.kind, event.step) == ("started", "end_process"):
            until(lambda: ahead.restored, "the processes are restored")
            assert ahead.reading.task.wait()
            seen.append(ahead._capsule)
            assert kernel.path().host_memory_bytes() >= kernel.blocks, "the present state is there as well"

    kernel.lifecycle.trace.faults.append(inspect)
    kernel.lifecycle.back("point")
    assert seen == [kernel.lifecycle.capsule]
    kernel.runs_on()
    assert has(kernel, THEN)


@pytest.mark.parametrize(
    "why", ["memory is short", "the disk is small", "it is encrypted", "no process can be started"]
)
def test_where_it_cannot_wait_it_is_written_first(fast_kernel, monkeypatch, tmp_path, why):
    def refused(*_, **__):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def no_more_is_free(*arguments) -> int:
        bytes = needed(*arguments)
        monkeypatch.setattr(Store, "free", lambda _: bytes + kernel.blocks - 1)
        return bytes

    monkeypatch.setenv("A_KEY", "ab" * 32)
    vault = Vault("env:A_KEY", tmp_path)
    kernel = at_a_point(fast_kernel(**({"store": Store(tmp_path / "images", vault=vault)} if "encr" in why else {})))
    if why == "memory is short":
        monkeypatch.setattr(host_memory, "all_memory", lambda: 1 << 60)
    elif why == "the disk is small":
        needed = dump._needed
        monkeypatch.setattr(dump, "_needed", no_more_is_free)
    elif why == "no process can be started":
        monkeypatch.setattr(Completion, "_start", refused)
    monkeypatch.setattr(Completion, "hand_over", lambda *_: pytest.fail("it was handed over"))
    present = kernel.lifecycle.back("point")
    assert has(kernel, THEN)
    kernel.runs_on()
    kernel.store.check(present)
    monkeypatch.undo()
    if why != "it is encrypted":
        goes_there(kernel, present)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_process_that_does_not_accept_it(kernel, monkeypatch, how):
    """A pipe does not take a large manifest while nobody reads it."""
    hand_over, to_json = Completion.hand_over, Manifest.to_json

    def unread(self: Completion, manifest: Manifest) -> None:
        self._process.send_signal(how)
        with monkeypatch.context() as patch:
            patch.setattr(completion, "_ACCEPT", 0.5)
            patch.setattr(Manifest, "to_json", lambda manifest: to_json(manifest) + " " * (2 << 20))
            hand_over(self, manifest)

    monkeypatch.setattr(Completion, "hand_over", unread)
    present = kernel.lifecycle.back("point")
    assert has(kernel, THEN)
    kernel.runs_on()
    is_whole(kernel, present)


def test_a_process_that_is_killed_is_replaced(kernel, monkeypatch):
    """One before it has written anything, and one that the disk keeps in the middle of it."""
    wait, killed = Completion.wait, []

    def killing(self: Completion, *arguments, **options) -> Image:
        self._process.kill()
        killed.append(self._process.pid)
        return wait(self, *arguments, **options)

    monkeypatch.setattr(Completion, "wait", killing)
    present = kernel.lifecycle.back("point")
    assert killed
    is_whole(kernel, present)
    kernel.runs_on()
    goes_there(kernel, present)


def test_the_next_process_continues_where_one_was_killed(kernel, tmp_path, monkeypatch):
    kernel.lifecycle.suspend()
    extents = kernel.path().link_extents()
    size, directory = device_memory.size(extents), tmp_path / "device"
    whole = device_memory.write(extents, tmp_path / "whole", device_memory.Codec(), lambda: None)

    def killed() -> None:
        if len(list(directory.glob("*"))) == 3:
            raise InterruptedError

    monkeypatch.setattr(device_memory, "_DEPTH", 1)
    with pytest.raises(InterruptedError):
        device_memory.write(extents, directory, device_memory.Codec(), killed, removes=True)
    (directory / min(os.listdir(extents))).write_bytes(b"half")
    assert device_memory.size(extents) < size
    options = {"removes": True, "continues": size}
    assert device_memory.write(extents, directory, device_memory.Codec(), lambda: None, **options) == whole
    assert os.listdir(extents) == []
    for name in whole:
        assert (directory / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    os.close(extents)
    kernel.lifecycle.resume()


def test_a_restore_that_fails_waits_for_the_present_state_and_wakes_it(kernel, monkeypatch):
    restore, tries = Criu.restore_stopped, []

    def fails(self, *arguments, **options):
        tries.append(presents(kernel))
        if len(tries) <= 3:  # it is tried beside the present state, and twice when that has ended
            raise CriuError("It failed.")
        return restore(self, *arguments, **options)

    monkeypatch.setattr(Criu, "restore_stopped", fails)
    with pytest.raises(CriuError) as failed:
        kernel.lifecycle.back("point")
    assert failed.value.left == "the kernel runs on"
    assert [len(each) for each in tries] == [0, 0, 0, 1]
    kernel.driver.processes[kernel.pid] = kernel.fake
    assert has(kernel, NOW)
    back_beside_its_state(kernel)


# -- a disk that is filled by others once the old process has ended


@pytest.fixture
def disk(tmp_path):
    with small_disk.mounted(tmp_path / "images") as resize:
        yield resize


def becomes_full(kernel: FastKernel, disk, step: str, free: int) -> None:
    """Have the disk no more than so many bytes free from a step on."""

    def fill(event) -> None:
        if (event.kind, event.step) == ("completed", step):
            kernel.lifecycle.trace.sinks.remove(fill)
            facts = os.statvfs(kernel.store.root)
            disk((facts.f_blocks - facts.f_bfree) * facts.f_frsize + free)

    kernel.lifecycle.trace.sinks.append(fill)


def test_a_disk_that_is_full_for_a_while(disk, kernel):
    becomes_full(kernel, disk, "end_process", kernel.blocks // 2)
    back = Back(kernel)
    until(lambda: is_back_before_its_image(kernel), "it is back")
    until(lambda: len(list(kernel.store.root.glob(".draft-*/criu/device/*"))) > 1, "the disk fills up")
    until(lambda: os.statvfs(kernel.store.root).f_bfree * 4096 < device_memory.CHUNK, "it is full")
    back.join(2 * completion._AGAIN)
    assert back.is_alive(), "it waits for space"
    kernel.runs_on()
    disk(1 << 30)
    back.join(60)
    assert back.error is None
    is_whole(kernel, back.present)
    assert has(kernel, THEN)
    goes_there(kernel, back.present)


def test_a_disk_that_stays_full(disk, kernel, monkeypatch):
    monkeypatch.setattr(completion, "PATIENCE", 1.0)
    becomes_full(kernel, disk, "end_process", kernel.blocks // 2)
    with pytest.raises(NoSpace, match="its state from before could not be kept"):
        kernel.lifecycle.back("point")
    assert kernel.lifecycle.state is State.RUNNING
    assert kernel.gate.serves
    kernel.runs_on()
    assert has(kernel, THEN)
    assert presents(kernel) == []
    assert drafts(kernel) == []
    disk(1 << 30)
    change(kernel, NOW)
    goes_there(kernel, kernel.lifecycle.back("point"))


def test_a_disk_that_is_full_as_the_restore_fails(disk, kernel, monkeypatch):
    """The kernel sleeps in what has no space yet, and wakes when it has: each wake tries again."""
    monkeypatch.setattr(completion, "PATIENCE", 1.0)
    becomes_full(kernel, disk, "end_process", kernel.blocks // 2)
    restore = Criu.restore_stopped
    monkeypatch.setattr(Criu, "restore_stopped", fails)
    with pytest.raises(CriuError):
        kernel.lifecycle.back("point")
    assert kernel.lifecycle.state is State.CHECKPOINTED
    with pytest.raises(NoSpace):
        kernel.lifecycle.wake()
    assert kernel.lifecycle.state is State.CHECKPOINTED
    monkeypatch.setattr(Criu, "restore_stopped", restore)
    disk(1 << 30)
    kernel.lifecycle.wake()
    assert has(kernel, NOW)
    [present] = presents(kernel)
    is_whole(kernel, present)
    goes_there(kernel, kernel.lifecycle.back("point"))


@pytest.mark.parametrize("ends", ["detach", "terminate"])
def test_a_server_that_ends_while_the_disk_is_full(disk, kernel, monkeypatch, ends):
    monkeypatch.setattr(completion, "PATIENCE", 0.5)
    becomes_full(kernel, disk, "end_process", kernel.blocks // 2)
    monkeypatch.setattr(Criu, "restore_stopped", fails)
    with pytest.raises(CriuError):
        kernel.lifecycle.back("point")
    getattr(kernel.lifecycle, ends)()
    assert kernel.lifecycle.kernel.completion is None
    disk(1 << 30)
    until(lambda: presents(kernel) and not drafts(kernel), "it was completed alone")
    [present] = presents(kernel)
    is_whole(kernel, present)
    assert present.retired is (ends == "terminate")


def fails(*_, **__):
    raise CriuError("It failed.")


# -- failures, and ends


@pytest.mark.parametrize("step", ["end_process", "sleep"])
def test_a_fault_before_the_old_process_has_ended_leaves_the_kernel_and_a_whole_save_point(kernel, step):
    class Injected(Exception):
        """The fault."""

    def fault(event) -> None:
        if (event.kind, event.step) == ("started", step):
            kernel.lifecycle.trace.faults.clear()
            raise Injected

    kernel.lifecycle.trace.faults.append(fault)
    if step == "end_process":
        with pytest.raises(GpuCkptError):
            kernel.lifecycle.back("point")
        assert has(kernel, NOW)
    else:
        kernel.lifecycle.back("point")
        assert has(kernel, THEN)
    goes_there(kernel, back_beside_its_state(kernel))


def test_a_quota_is_known_before_the_old_process_ends(kernel):
    in_use = sum(image.manifest.bytes for image in kernel.store.images())
    kernel.lifecycle.engine.store.quota = Quota(bytes=in_use + kernel.blocks // 2)
    with pytest.raises(QuotaExceeded):
        kernel.lifecycle.back("point")
    assert has(kernel, NOW)
    assert presents(kernel) == []
    assert drafts(kernel) == []


def test_a_kernel_that_is_ended_meanwhile_leaves_its_state_from_before(kernel, held):
    back = Back(kernel)
    until(lambda: is_back_before_its_image(kernel), "it is back")
    ended = threading.Thread(target=kernel.lifecycle.terminate)
    ended.start()
    until(lambda: kernel.lifecycle.kernel.is_being_ended, "it is being ended")
    held.set()
    back.join(60)
    ended.join(60)
    assert type(back.error) is KernelLost
    until(lambda: presents(kernel) and not drafts(kernel), "it was completed alone")
    [present] = presents(kernel)
    is_whole(kernel, present)
    assert present.retired


#: What a server is about to do when it is killed, and whether the kernel has its present state afterwards.
MOMENTS = {
    "make the other capsule": (Capsule, "create", 0, True),
    "have CRIU restore": (Criu, "restore_stopped", 0, True),
    "have CRIU dump": (Criu, "dump", 0, True),
    "hand the draft over": (Completion, "hand_over", 0, True),
    "end the old process": (Capsule, "close", 0, True),
    "withdraw its claim": (Completion, "withdraw_claim", 0, True),
    "let the restored processes run": (Criu, "run_restored", 0, True),
    "link to the other capsule": (Capsule, "replace_other", 0, True),
    "claim both images": (Completion, "claim", 0, True),
    "have device memory written": (Completion, "begin", 0, None),
    "wait for that": (Completion, "wait", 0, False),
    "see that it is done": (Completion, "_done", 0, False),
}


@pytest.mark.sweep(1 / 2)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_server_that_is_killed_leaves_the_present_state_or_the_other(fast_kernel, monkeypatch, moment):
    kernel = fast_kernel()
    kernel.lifecycle.home.outlive = True
    kernel.lifecycle.capsule.outlive()
    at_a_point(kernel)
    owner, name, calls, is_now = MOMENTS[moment]
    kernel.store.hashes.settle()  # the other process would wait for a thread of this one
    server = os.fork()
    if server == 0:
        monkeypatch.setattr(verify, "_hashing_threads", lambda: 1)  # the parent's threads are not here
        with contextlib.suppress(BaseException):
            _die_at(monkeypatch, owner, name, calls)
            kernel.lifecycle.back("point")
        os._exit(1)
    _, status = os.waitpid(server, 0)
    assert os.WIFSIGNALED(status)
    completion.await_abandoned(kernel.store.root)
    kernel.store.sweep()
    assert drafts(kernel) == []
    living = came_back(kernel)
    value = NOW if has(kernel, NOW) else THEN
    assert is_now is None or value == (NOW if is_now else THEN)
    if value == THEN:
        assert living
        [present] = presents(kernel)
        is_whole(kernel, present)
        assert present.retired
        goes_there(kernel, present)
    kernel.lifecycle.back("point")
    assert has(kernel, THEN)
    [*_, present] = presents(kernel)
    goes_there(kernel, present)
    directory = kernel.lifecycle.home.runtime_dir
    assert [*directory.parent.glob(f"{directory.name}.*")] == [kernel.lifecycle.capsule.directory]


def came_back(kernel: FastKernel) -> bool:
    """Have the next server find the kernel, alive or in the image that it sleeps in; return whether it lives."""
    last = kernel.lifecycle
    asleep = [image for image in kernel.store.images() if not image.retired]
    last.detach()
    kernel.lifecycle = Lifecycle(last.home, last.engine, kernel.gate, settings=last.kernel.settings, trace=last.trace)
    try:
        capsule = Capsule.attach(last.home.runtime_dir)
    except GpuCkptError:
        [image] = asleep
        kernel.driver.processes.clear()
        kernel.lifecycle.attach(image=image)
        kernel.lifecycle.wake()
        return False
    kernel.driver.processes.clear()
    kernel.driver.add(kernel.fake, capsule.host_pid)
    kernel.lifecycle.attach(capsule=capsule)
    if kernel.lifecycle.state is not State.RUNNING:
        kernel.lifecycle.wake()
    return True
