"""Device memory goes to the image, and comes from it, beside CRIU."""

from __future__ import annotations

import errno
import functools
import os
import signal
import tempfile
import threading
from pathlib import Path

import pytest
from fast_kernel import CONTEXT, A, chunks
from fast_program import SIZES
from waiting import until

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.errors import CapsuleError, CriuError, GpuCkptError, ImageDamaged, NoSpace
from jupyter_gpu_ckpt.files import direct_io
from jupyter_gpu_ckpt.image import chunk_cache, device_memory
from jupyter_gpu_ckpt.image.encryption import PlainDirectory, Vault
from jupyter_gpu_ckpt.image.save_point import SavePoint
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.image.verify import verify
from jupyter_gpu_ckpt.lifecycle import compatibility, host_memory, preflight, suspend
from jupyter_gpu_ckpt.lifecycle.context import Reason
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.testing.fake_cuda import CHECKPOINTED
from jupyter_gpu_ckpt.transfer import archive
from jupyter_gpu_ckpt.transfer.remote import Remote

pytestmark = pytest.mark.sweep(1 / 2, of="file")


@pytest.fixture
def kernel(fast_kernel):
    return fast_kernel()


def test_criu_sees_none_of_it(kernel):
    for _ in range(2):
        image = kernel.lifecycle.checkpoint()
        assert image.manifest.swapped_bytes == kernel.blocks
        assert sum(path.stat().st_size for path in chunks(image)) == kernel.blocks
        assert image.manifest.bytes - kernel.blocks < min(kernel.blocks, 32 << 20)
        verify(image.path, kernel.store.keys)
        kernel.lifecycle.wake()
        kernel.runs_on()


def test_suspended_first(kernel):
    kernel.lifecycle.suspend()
    image = kernel.lifecycle.checkpoint()
    assert chunks(image)
    kernel.lifecycle.wake()
    kernel.runs_on()


@pytest.mark.parametrize("way", ["terminate", "detach"])
@pytest.mark.parametrize("verb", ["checkpoint", "wake", "save"])
def test_what_is_under_way_is_broken_off(kernel, monkeypatch, verb, way):
    pid = kernel.pid
    if verb == "wake":
        kernel.lifecycle.checkpoint()
    met, calls = threading.Event(), []

    def slow(work, *arguments, **options):
        calls.append(arguments)
        met.set()
        until(lambda: kernel.lifecycle.kernel.cancellation.wait(0, Reason.DETACH), "it is broken off")
        return work(*arguments, **options)

    for name in ("read", "write"):
        monkeypatch.setattr(direct_io, name, functools.partial(slow, getattr(direct_io, name)))
    for depth in ("_DEPTH", "_MOST_READERS"):
        monkeypatch.setattr(device_memory, depth, 1)
    failed = []

    def verb_of_another_thread() -> None:
        try:
            getattr(kernel.lifecycle, verb)(*([SavePoint("point")] if verb == "save" else []))
        except GpuCkptError as error:
            failed.append(error.code)

    thread = threading.Thread(target=verb_of_another_thread)
    thread.start()
    assert met.wait(60)
    getattr(kernel.lifecycle, way)()
    thread.join(60)
    if verb != "wake" and way == "detach":  # it lives on, for another owner
        os.kill(pid, signal.SIGKILL)
    assert failed in ([["KERNEL_LOST"]] if way == "terminate" else [["CRIU_FAILED"], ["CRIU_TIMEOUT"]])
    assert len({place.name for place, *_ in calls}) == 1, "of several chunks"
    assert len(kernel.store.images()) == (verb == "wake")
    assert not list(kernel.store.root.glob(".draft*"))


@pytest.mark.parametrize("linked", [True, False])
def test_by_whatever_path(fast_kernel, linked):
    """CRIU knows the file by the path that leads through no link; the directory may be known by another one."""
    place = Path(tempfile.mkdtemp(prefix="gc-"))
    link = place.with_name(f"{place.name}-link")
    if linked:
        link.symlink_to(place)
    kernel = fast_kernel(base=link if linked else place)
    for _ in range(2):
        image = kernel.lifecycle.checkpoint()
        assert image.manifest.swapped_bytes == kernel.blocks
        assert not [path for path in image.manifest.fingerprint["files"] if fastpath.EXTENTS in path]
        kernel.lifecycle.wake()
        kernel.runs_on()


def test_zeros_take_no_space(kernel):
    kernel.program.ask("[ctypes.memset(at, 0, size) for at, size in held]")
    image = kernel.lifecycle.checkpoint()
    assert len(chunks(image)) == 0 or sum(path.stat().st_size for path in chunks(image)) <= device_memory.CHUNK
    kernel.lifecycle.wake()
    assert kernel.program.ask("all(ctypes.string_at(at, size) == bytes(size) for at, size in held)")


def test_the_driver_restores_while_device_memory_is_read(kernel, monkeypatch):
    kernel.lifecycle.checkpoint()
    write, seen = direct_io.write, []

    def late(*arguments, **options):
        seen.append(until(lambda: kernel.fake.state != CHECKPOINTED, "the driver has restored the process"))
        assert kernel.path().swapped_out()
        write(*arguments, **options)

    monkeypatch.setattr(direct_io, "write", late)
    kernel.lifecycle.wake()
    assert seen
    kernel.runs_on()


@pytest.mark.parametrize("memory", ["enough for both", "short"])
def test_a_save_point_is_read_while_the_present_state_is_written(kernel, monkeypatch, memory):
    """Only with the space for both in host memory, of which what is used for that is not missing at the match."""
    lifecycle = kernel.lifecycle
    monkeypatch.setattr(host_memory, "all_memory", lambda: 0 if memory != "short" else 1 << 60)
    point = lifecycle.save(SavePoint("one"))
    count, wanted = len(chunks(point)), point.manifest.fingerprint["memory"]
    kernel.program.ask("[ctypes.memset(at, 77, size) for at, size in held]")
    write, order = direct_io.write, []

    def recorded(path, data, length, *, offset=0, size):
        is_present = kernel.store.root in path.parents
        if is_present and memory != "short":
            until(lambda: order.count("read") == count, "all of the save point is read")
        write(path, data, length, offset=offset, size=size)
        if offset + length == size:  # of a chunk that is read in pieces, the last one
            order.append("written" if is_present else "read")

    def available() -> int:
        return (wanted - kernel.blocks // 2) if lifecycle.kernel.ahead is not None and memory != "short" else 1 << 60

    monkeypatch.setattr(direct_io, "write", recorded)
    monkeypatch.setattr(Store, "may_write_plain", lambda *_: False)  # the disk has nothing that memory has no space for
    monkeypatch.setattr(compatibility, "available_memory", available)
    present = lifecycle.back("one")
    kernel.runs_on()
    assert order.count("read") == order.count("written") == count
    assert order == sorted(order, reverse=memory == "short")
    kernel.store.check(present)
    monkeypatch.undo()
    lifecycle.back(present.manifest.save_point["name"])
    assert kernel.program.ask("all(ctypes.string_at(at, size) == bytes([77]) * size for at, size in held)") is True


@pytest.mark.parametrize("memory", ["enough for both", "short"])
def test_a_save_point_is_read_while_the_kernel_is_suspended(kernel, monkeypatch, memory):
    """The memory that is still on the GPU must have its space in host memory, too."""
    point, seen = kernel.lifecycle.save(SavePoint("one")), {}
    both = point.manifest.swapped_bytes + kernel.held()
    monkeypatch.setattr(host_memory, "all_memory", lambda: 8)
    more = 1 if memory != "short" else 0
    decided = ("started", "cuda_suspend")
    monkeypatch.setattr(host_memory, "available_memory", lambda: 1 << 60 if decided in seen else both + more)

    def inspect(event) -> None:
        seen[event.kind, event.step] = kernel.lifecycle.kernel.ahead is not None

    kernel.lifecycle.trace.faults.append(inspect)
    kernel.lifecycle.back("one")
    kernel.runs_on()
    assert seen[decided] is (memory != "short")
    assert seen["completed", "dump"]


def test_a_kernel_that_cannot_go_back_reads_no_more_of_the_save_point(kernel, monkeypatch):
    def fails(*_, **__):
        until(lambda: kernel.lifecycle.kernel.ahead.reading is not None, "it is being read")
        raise CriuError("It failed.")

    monkeypatch.setattr(host_memory, "all_memory", lambda: 0)
    kernel.lifecycle.save(SavePoint("one"))
    monkeypatch.setattr(kernel.lifecycle.engine.criu, "dump", fails)
    with pytest.raises(CriuError):
        kernel.lifecycle.back("one")
    kernel.runs_on()
    assert kernel.lifecycle.kernel.ahead is None
    reads = ("gpu-ckpt-capsule", "gpu-ckpt-device")
    assert not [each.name for each in threading.enumerate() if each.name.startswith(reads)]


def test_a_damaged_chunk_is_not_brought_to_life(kernel):
    image = kernel.lifecycle.checkpoint()
    victim = chunks(image)[1]
    content = bytearray(victim.read_bytes())
    content[12345] ^= 1
    victim.write_bytes(content)
    with pytest.raises(ImageDamaged):
        kernel.lifecycle.wake()
    assert kernel.lifecycle.state is State.CHECKPOINTED
    with pytest.raises(ImageDamaged):
        verify(image.path, kernel.store.keys)
    content[12345] ^= 1
    victim.write_bytes(content)
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_zeros_need_no_space_and_what_does_is_known_when_it_is_off_the_gpu(kernel, monkeypatch):
    """JAX has three quarters of a GPU, most of it zeros."""
    largest, at_most = max(SIZES), preflight.image_bytes
    kernel.lifecycle.suspend()
    free = host_memory.resident(kernel.lifecycle.kernel) + preflight.MARGIN - largest // 2
    kernel.lifecycle.wake()
    monkeypatch.setattr(Store, "free", lambda _: free)
    # The double's device memory is also in the process.
    monkeypatch.setattr(preflight, "image_bytes", lambda *of: at_most(*of) - kernel.blocks)

    def finding():
        (found,) = (each for each in suspend.findings(kernel.lifecycle.kernel) if each.code == "NO_SPACE")
        return found

    kernel.program.ask("ctypes.memset(held[-1][0], 0, held[-1][1])")
    kernel.program.ask("intact.__globals__.update(intact=lambda: len({*ctypes.string_at(*held[-1])}) == 1)")
    assert not finding().blocks
    image = kernel.lifecycle.checkpoint()
    assert sum(path.stat().st_size for path in chunks(image)) < largest // 2
    kernel.lifecycle.wake()
    kernel.runs_on()
    kernel.program.ask("ctypes.memset(held[-1][0], 7, held[-1][1])")
    with pytest.raises(NoSpace):
        kernel.lifecycle.checkpoint()
    kernel.runs_on()
    assert finding().blocks, "it is known now, and the kernel need not wait for that again"
    monkeypatch.setattr(Store, "free", lambda _: 1 << 40)
    kernel.lifecycle.checkpoint()
    kernel.lifecycle.wake()
    cached = chunk_cache.evictable_bytes(kernel.store.root)
    monkeypatch.setattr(Store, "free", lambda _: free - cached)
    assert not finding().blocks, "of another process nothing is known"
    monkeypatch.setattr(Store, "free", lambda _: free - cached - kernel.blocks)
    assert finding().blocks, "whatever is zeros"


@pytest.mark.parametrize("nth", [0, 2])
def test_a_full_disk(kernel, monkeypatch, nth):
    write, calls = direct_io.write, []

    def full(*arguments, **options):
        calls.append(arguments)
        if len(calls) > nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments, **options)

    monkeypatch.setattr(direct_io, "write", full)
    with pytest.raises(NoSpace):
        kernel.lifecycle.checkpoint()
    kernel.runs_on()
    assert kernel.store.images() == []
    assert not list(kernel.store.root.glob(".draft*"))
    monkeypatch.undo()
    kernel.lifecycle.checkpoint()
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_criu_fails_after_it_was_written(kernel, monkeypatch):
    def fails(*_, **__):
        raise CriuError("It failed.")

    monkeypatch.setattr(kernel.lifecycle.engine.criu, "dump", fails)
    with pytest.raises(CriuError):
        kernel.lifecycle.checkpoint()
    kernel.runs_on()
    kernel.lifecycle.suspend()
    with pytest.raises(CriuError):
        kernel.lifecycle.checkpoint()
    assert kernel.lifecycle.state is State.SUSPENDED
    assert kernel.fake.state == CHECKPOINTED
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_from_the_cold_tier(fast_kernel, tmp_path):
    url = f"file://{tmp_path}/cold"
    kernel = fast_kernel(archive_url=url)
    image = kernel.lifecycle.checkpoint()
    assert archive.archive(image, kernel.store, Remote(url)) > kernel.blocks
    assert chunks(image) == []
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_pushed_and_pulled(kernel, tmp_path):
    image = kernel.lifecycle.checkpoint()
    remote = Remote(f"file://{tmp_path}/there")
    remote.push(image, remove_from=kernel.store)
    assert not image.path.exists()
    pulled = remote.pull(image.id, kernel.store)
    assert [path.name for path in chunks(pulled)] == [f"{number:06d}.img" for number in range(len(chunks(pulled)))]
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_encrypted(fast_kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_IMAGES", "0f" * 32)
    store = Store(tmp_path / "images", vault=Vault("env:KEY_OF_IMAGES"))
    kernel = fast_kernel(store=store)
    image = kernel.lifecycle.checkpoint()
    assert chunks(image)
    for path in chunks(image):
        assert bytes([3]) * 64 not in path.read_bytes()
    kernel.lifecycle.wake()
    kernel.runs_on()
    kernel.lifecycle.suspend()
    assert kernel.lifecycle.kernel.chunks is None, "nothing is written ahead in the clear"


def test_encryption_needs_no_second_place_for_device_memory(fast_kernel, tmp_path, monkeypatch):
    """Only what CRIU writes lies in the directory in memory; device memory goes straight to the image and back."""
    monkeypatch.setenv("KEY_OF_IMAGES", "0f" * 32)
    vault = Vault("env:KEY_OF_IMAGES", tmp_path)
    kernel = fast_kernel(store=Store(tmp_path / "images", vault=vault))
    space = host_memory.resident(kernel.lifecycle.kernel) + CONTEXT + (32 << 20)
    assert kernel.blocks > 64 << 20
    monkeypatch.setattr(Vault, "free", lambda _: preflight.MARGIN + space)
    plain, close = [], PlainDirectory.close

    def closed(files):
        plain.extend(path.stat().st_size for path in files.path.rglob("*.img"))
        close(files)

    monkeypatch.setattr(PlainDirectory, "close", closed)
    image = kernel.lifecycle.checkpoint()
    assert sum(path.stat().st_size for path in chunks(image)) > kernel.blocks
    kernel.lifecycle.wake()
    kernel.runs_on()
    assert 0 < sum(plain) < kernel.blocks


@pytest.mark.parametrize("damage", ["a bit", "its end", "another chunk"])
def test_a_damaged_chunk_of_an_encrypted_image_is_not_brought_to_life(fast_kernel, tmp_path, monkeypatch, damage):
    monkeypatch.setenv("KEY_OF_IMAGES", "0f" * 32)
    kernel = fast_kernel(store=Store(tmp_path / "images", vault=Vault("env:KEY_OF_IMAGES")))
    image = kernel.lifecycle.checkpoint()
    victim, other = chunks(image)[:2]
    content = victim.read_bytes()
    changed = {"a bit": bytes([content[0] ^ 1]) + content[1:], "its end": content[:-1]}
    victim.write_bytes(changed.get(damage, other.read_bytes()))
    with pytest.raises(ImageDamaged):
        kernel.lifecycle.wake()
    assert kernel.lifecycle.state is State.CHECKPOINTED
    victim.write_bytes(content)
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_memory_is_given_back(fast_kernel):
    kernel = fast_kernel(host_copy_bytes=0)
    kernel.lifecycle.suspend()
    blocks = kernel.path().open_extents()
    assert device_memory.size(blocks) == kernel.blocks == kernel.path().host_memory_bytes() >= sum(SIZES)
    kernel.lifecycle.wake()
    assert device_memory.size(blocks) == kernel.path().host_memory_bytes() == 0
    os.close(blocks)
    assert kernel.path().open_extents() is None
    assert kernel.held() == kernel.blocks + CONTEXT
    assert kernel.driver.free(A) > 0


def test_without_a_file_system_in_memory_criu_has_it_all(fast_kernel, monkeypatch):
    def refused(_) -> int:
        raise CapsuleError("tmpfs cannot be mounted")

    monkeypatch.setattr(Capsule, "host_memory", refused)
    kernel = fast_kernel()
    kernel.lifecycle.suspend()
    kernel.lifecycle.wake()
    kernel.runs_on()
    image = kernel.lifecycle.checkpoint()
    assert (image.manifest.swapped_bytes, chunks(image)) == (0, [])
    kernel.lifecycle.wake()
    kernel.runs_on()
    monkeypatch.undo()
    image = kernel.lifecycle.checkpoint()
    assert image.manifest.swapped_bytes == kernel.blocks
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_a_mount_that_fails_where_the_runtime_directory_is_in_memory(fast_kernel, monkeypatch):
    """The directory is a tmpfs, too: the host's, and nothing that ends with the capsule."""
    place = Path(tempfile.mkdtemp(prefix="gc-", dir="/dev/shm"))

    def refused(_) -> int:
        (place / "host-memory").mkdir(exist_ok=True)
        raise CapsuleError("tmpfs cannot be mounted")

    monkeypatch.setattr(Capsule, "host_memory", refused)
    kernel = fast_kernel(base=place)
    kernel.lifecycle.suspend()
    assert list((place / "host-memory").iterdir()) == []
    assert kernel.lifecycle.checkpoint().manifest.swapped_bytes == 0
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_a_capsule_that_does_not_answer_loses_nothing(kernel, monkeypatch):
    """The blocks are in its file: an image without them would be no image."""
    kernel.lifecycle.suspend()

    def silent(_) -> int:
        raise CapsuleError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(Capsule, "host_memory", silent)
        with pytest.raises(CapsuleError):
            kernel.lifecycle.checkpoint()
    assert kernel.store.images() == []
    assert kernel.lifecycle.state is State.SUSPENDED
    assert kernel.lifecycle.checkpoint().manifest.swapped_bytes == kernel.blocks
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_a_chunk_that_is_missing_is_no_zeros(kernel, monkeypatch):
    """One that goes between the look at the image and the reading of it."""
    image = kernel.lifecycle.checkpoint()
    victim = chunks(image)[1]
    aside = image.path.parent.parent / "aside"
    fill = device_memory.begin_read

    def late(*arguments, **options):
        if victim.exists():
            victim.rename(aside)
        return fill(*arguments, **options)

    monkeypatch.setattr("jupyter_gpu_ckpt.image.device_memory.begin_read", late)
    with pytest.raises(GpuCkptError):
        kernel.lifecycle.wake()
    assert kernel.lifecycle.state is State.CHECKPOINTED
    monkeypatch.undo()
    aside.rename(victim)
    kernel.lifecycle.wake()
    kernel.runs_on()
