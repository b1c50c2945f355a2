"""Images in memory: device memory is not copied from them to host memory, but read where it is."""

from __future__ import annotations

import contextlib
import os

import pytest
from fast_kernel import CONTEXT, FastKernel, chunks
from test_written_later import change, has
from waiting import until

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.criu.criu import Criu
from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.errors import CapsuleError, CriuError, GpuCkptError, ImageDamaged
from jupyter_gpu_ckpt.files import direct_io
from jupyter_gpu_ckpt.image import device_memory, save_point, verify
from jupyter_gpu_ckpt.image.encryption import Vault
from jupyter_gpu_ckpt.image.image import Image
from jupyter_gpu_ckpt.image.save_point import SavePoint
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.lifecycle import context, going_back, host_memory, preflight, restore
from jupyter_gpu_ckpt.lifecycle.capsule_ahead import CapsuleAhead
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.process import syscalls

THEN, NOW = 3, 9


@pytest.fixture(autouse=True)
def in_memory(tmp_path, monkeypatch):
    """The disk of the tests stands for a file system in memory, which not every machine has space for."""
    monkeypatch.setattr(device_memory, "_IN_MEMORY", {syscalls.file_system(str(tmp_path))})


@pytest.fixture
def kernel(fast_kernel) -> FastKernel:
    return fast_kernel()


def files_of(paths) -> dict[str, int]:
    """Return the inodes of files by their names."""
    return {path.name: path.stat().st_ino for path in paths}


def spilled(kernel: FastKernel):
    return sorted(kernel.store.root.glob(".draft-spill-*/*.img"))


@pytest.fixture
def swapped_in(kernel, monkeypatch) -> list[tuple[dict[str, int], int]]:
    """Note what each swap in has: the files of allocations beside the images, and their bytes in host memory."""
    seen, swap_in = [], context.FastPath._request_swap_in

    def noted(path, *arguments, **options) -> None:
        seen.append((files_of(spilled(kernel)), path.host_memory_bytes()))
        swap_in(path, *arguments, **options)

    monkeypatch.setattr(context.FastPath, "_request_swap_in", noted)
    return seen


def copies(monkeypatch) -> list[str]:
    """Return a list of the files that are written from now on."""
    written, write = [], direct_io.write

    def noted(path, *arguments, **options) -> None:
        written.append(path.name)
        write(path, *arguments, **options)

    monkeypatch.setattr(direct_io, "write", noted)
    return written


def at_a_point(kernel: FastKernel) -> Image:
    change(kernel, THEN)
    point = kernel.lifecycle.save(SavePoint("point"))
    change(kernel, NOW)
    return point


def runs(kernel: FastKernel, value: int) -> None:
    """The kernel runs, and its largest allocation has this value."""
    assert has(kernel, value)
    assert kernel.lifecycle.state is State.RUNNING
    assert kernel.path().amounts().swapped_out == 0
    assert kernel.gate.serves


def assert_nothing_left(kernel: FastKernel) -> None:
    assert list(kernel.store.root.glob(".draft*spill*")) == []
    assert kernel.lifecycle.kernel.spill_directory is None


def test_a_wake_reads_the_image_s_own_files(kernel, swapped_in, monkeypatch):
    for _ in range(2):
        image = kernel.lifecycle.checkpoint()
        its_files, written = files_of(chunks(image)), copies(monkeypatch)
        kernel.lifecycle.wake()
        (found, bytes) = swapped_in[-1]
        assert its_files.items() <= found.items()
        assert len(found) == -(-kernel.blocks // device_memory.CHUNK), "those of zeros, too"
        assert (bytes, written) == (0, [])
        kernel.runs_on()
        assert_nothing_left(kernel)
        assert not image.path.exists()
    kernel.lifecycle.suspend()
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_it_needs_no_host_memory(kernel, monkeypatch):
    """Neither for the allocations nor for reading them while the present state is there."""
    point = at_a_point(kernel)
    enough = CONTEXT + preflight.MARGIN
    monkeypatch.setattr(host_memory, "available_memory", lambda: enough)
    monkeypatch.setattr(host_memory, "all_memory", lambda: 1 << 60)
    assert host_memory.may_read_ahead(kernel.lifecycle.kernel, point)
    monkeypatch.setattr(host_memory, "all_memory", lambda: 0)
    monkeypatch.setattr(host_memory, "available_memory", lambda: point.manifest.fingerprint["memory"] - kernel.blocks)
    assert host_memory.may_restore_ahead(kernel.lifecycle.kernel, point)
    monkeypatch.setattr(host_memory, "available_memory", lambda: enough)
    kernel.lifecycle.checkpoint()
    kernel.lifecycle.wake()
    runs(kernel, NOW)


def test_going_back_leaves_both_states_as_they_are(kernel, swapped_in, monkeypatch):
    """There and back, with other content on the GPU and other copies of it in between."""
    monkeypatch.setattr(host_memory, "all_memory", lambda: 0)
    point = at_a_point(kernel)
    point_files = files_of(chunks(point))
    for _ in range(2):
        present = kernel.lifecycle.back("point")
        assert point_files.items() <= swapped_in[-1][0].items()
        runs(kernel, THEN)
        kernel.runs_on()
        assert_nothing_left(kernel)
        change(kernel, 77)
        kernel.lifecycle.suspend()
        kernel.lifecycle.resume()
        kernel.lifecycle.save(SavePoint(f"77 of {present.id}"))
        for image in (point, present):
            kernel.store.check(image)
        assert files_of(chunks(point)) == point_files
        kernel.lifecycle.back(save_point.of_image(present).name)
        runs(kernel, NOW)


def test_it_is_linked_beside_the_present_state(kernel, monkeypatch):
    monkeypatch.setattr(host_memory, "all_memory", lambda: 0)
    point, seen = at_a_point(kernel), []

    def inspect(event) -> None:
        ahead = kernel.lifecycle.kernel.ahead
        if (event.kind, event.step) == ("started", "cuda_suspend"):
            until(lambda: ahead.reading is not None, "it is being read")
            assert ahead.reading.task.wait()
            seen.append(files_of(ahead.reading.directory.glob("*.img")))

    kernel.lifecycle.trace.faults.append(inspect)
    kernel.lifecycle.back("point")
    assert files_of(chunks(point)).items() <= seen[0].items()
    kernel.runs_on()


@pytest.mark.parametrize("failing", ["the capsule", "the restore", "the claim", "the directory"])
def test_what_was_begun_ahead_is_removed_where_it_is_of_no_use(kernel, monkeypatch, failing):
    def refused(*_, **__) -> None:
        raise CapsuleError("no")

    def fails(*_, **__) -> None:
        raise CriuError("It failed.")

    claim = CapsuleAhead.claim
    monkeypatch.setattr(host_memory, "all_memory", lambda: 0)
    at_a_point(kernel)
    with monkeypatch.context() as patch:
        if failing == "the capsule":
            patch.setattr(Capsule, "require_alive", refused)
        elif failing == "the restore":
            patch.setattr(Criu, "restore_stopped", fails)
        elif failing == "the claim":
            patch.setattr(CapsuleAhead, "claim", lambda ahead, image, as_it_was: claim(ahead, image, as_it_was=False))
        else:
            patch.setattr(Capsule, "keep_fd", refused)
        with contextlib.suppress(GpuCkptError):
            kernel.lifecycle.back("point")
        assert_nothing_left(kernel)
    if kernel.lifecycle.state is State.CHECKPOINTED:
        kernel.lifecycle.wake()
    kernel.driver.processes[kernel.pid] = kernel.fake
    kernel.lifecycle.back("point")
    runs(kernel, THEN)
    assert_nothing_left(kernel)


def test_a_checkpoint_that_fails_takes_it_away(kernel, monkeypatch):
    monkeypatch.setattr(host_memory, "all_memory", lambda: 0)
    at_a_point(kernel)

    def fails(event) -> None:
        if (event.kind, event.step) == ("started", "publish"):
            raise CriuError("It failed.")

    kernel.lifecycle.trace.faults.append(fails)
    with pytest.raises(CriuError):
        kernel.lifecycle.back("point")
    runs(kernel, NOW)
    assert_nothing_left(kernel)


@pytest.mark.parametrize("verb", ["wake", "back"])
def test_a_damaged_chunk_is_not_brought_to_life(kernel, monkeypatch, verb):
    monkeypatch.setattr(host_memory, "all_memory", lambda: 0)
    point = at_a_point(kernel)
    image = kernel.lifecycle.checkpoint() if verb == "wake" else point
    victim = chunks(image)[1]
    content = victim.read_bytes()
    flip(victim)
    with pytest.raises(ImageDamaged):
        kernel.lifecycle.wake() if verb == "wake" else kernel.lifecycle.back("point")
    assert_nothing_left(kernel)
    if verb == "wake":
        victim.write_bytes(content)
        kernel.lifecycle.wake()
    else:
        kernel.driver.processes[kernel.pid] = kernel.fake
    runs(kernel, NOW)


def test_encrypted_chunks_are_decrypted_into_host_memory(fast_kernel, tmp_path, monkeypatch):
    monkeypatch.setenv("A_KEY", "ab" * 32)
    kernel = fast_kernel(store=Store(tmp_path / "images", vault=Vault("env:A_KEY", tmp_path)))
    kernel.lifecycle.checkpoint()
    written = copies(monkeypatch)
    kernel.lifecycle.wake()
    assert len(written) >= 2
    assert kernel.lifecycle.kernel.spill_directory is None
    kernel.runs_on()


def test_a_file_system_without_links_has_them_copied(kernel, swapped_in, monkeypatch):
    image = kernel.lifecycle.checkpoint()
    its_files = files_of(chunks(image))
    monkeypatch.setattr(device_memory, "_link", lambda *_: False)
    kernel.lifecycle.wake()
    assert not its_files.items() & swapped_in[-1][0].items()
    kernel.runs_on()
    assert_nothing_left(kernel)


class Proofs:
    """The ways in which device memory of images came back: files that were read, and the requests of swaps."""

    def __init__(self, monkeypatch) -> None:
        self.read, self.requests = list[str](), list[str]()
        is_chunk, request = device_memory._is, fastpath._Library.request

        def read(path, *arguments) -> bool:
            self.read.append(path.name)
            return is_chunk(path, *arguments)

        def requested(library, verb, *arguments):
            self.requests.append(verb)
            return request(library, verb, *arguments)

        monkeypatch.setattr(device_memory, "_is", read)
        monkeypatch.setattr(fastpath._Library, "request", requested)


@pytest.fixture
def proving(fast_kernel, monkeypatch) -> FastKernel:
    """A kernel whose library has digests of all device memory."""
    monkeypatch.setattr(host_memory, "all_memory", lambda: 0)
    return fast_kernel(host_copy_bytes=1 << 30)


def test_going_back_the_gpu_proves_what_was_not_read(proving, monkeypatch):
    point, proofs = at_a_point(proving), Proofs(monkeypatch)
    assert point.manifest.has_digests
    present = proving.lifecycle.back("point")
    assert (proofs.read, proofs.requests.count("swap_in_checked")) == ([], 1)
    runs(proving, THEN)
    proving.runs_on()
    assert present.manifest.has_digests
    proving.lifecycle.back(save_point.of_image(present).name)
    runs(proving, NOW)
    assert proofs.read == []


def test_a_kernel_that_keeps_no_copy_has_no_digests(fast_kernel, monkeypatch):
    monkeypatch.setattr(host_memory, "all_memory", lambda: 0)
    kernel = fast_kernel(host_copy_bytes=0)
    point, proofs = at_a_point(kernel), Proofs(monkeypatch)
    assert not point.manifest.has_digests
    kernel.lifecycle.back("point")
    assert sorted(proofs.read) == [chunk.name for chunk in chunks(point)]
    assert "swap_in_checked" not in proofs.requests
    runs(kernel, THEN)


@pytest.mark.parametrize("damaged", [False, True])
def test_what_is_not_moved_ahead_is_read_after_all(proving, monkeypatch, damaged):
    """Before anything of it is on the GPU."""
    point, proofs = at_a_point(proving), Proofs(monkeypatch)
    monkeypatch.setattr(restore, "_resume_ahead", lambda *_: None)
    if damaged:
        flip(chunks(point)[1])
        with pytest.raises(ImageDamaged) as failed:
            proving.lifecycle.back("point")
        assert failed.value.details["files"] == [f"criu/device/{chunks(point)[1].name}"]
        proving.driver.processes[proving.pid] = proving.fake
    else:
        proving.lifecycle.back("point")
        assert sorted(proofs.read) == [chunk.name for chunk in chunks(point)]
    assert "swap_in_checked" not in proofs.requests
    runs(proving, NOW if damaged else THEN)
    assert_nothing_left(proving)


@pytest.mark.parametrize("how", ["changed", "shorter"])
def test_a_chunk_that_the_gpu_finds_changed_is_named(proving, monkeypatch, how):
    """The GPU has refused it, and only then it was read; the kernel is as it was."""
    point, proofs = at_a_point(proving), Proofs(monkeypatch)
    victim = chunks(point)[1]
    monkeypatch.setattr(going_back, "check", lambda *_: [])  # it was whole then
    monkeypatch.setattr(verify, "require_tree", lambda *_: None)
    if how == "changed":
        flip(victim)
    else:
        os.chmod(victim, 0o600)
        os.truncate(victim, 1 << 20)
    with pytest.raises(ImageDamaged) as failed:
        proving.lifecycle.back("point")
    assert failed.value.details["files"] == [f"criu/device/{victim.name}"]
    assert proofs.requests.count("swap_in_checked") == 1
    assert victim.name in proofs.read
    proving.driver.processes[proving.pid] = proving.fake
    runs(proving, NOW)
    assert_nothing_left(proving)


def flip(path) -> None:
    os.chmod(path, 0o600)
    with open(path, "r+b") as file:
        [last] = os.pread(file.fileno(), 1, path.stat().st_size - 1)
        os.pwrite(file.fileno(), bytes([last ^ 1]), path.stat().st_size - 1)


def test_what_is_written_in_memory_is_read_once(kernel, monkeypatch):
    """With the first read Linux puts a page on its list of those in use, which a kernel would wait for."""
    read, read_from = list[str](), direct_io.read

    def noted(path, *arguments) -> memoryview:
        read.append(path.parent.name)
        return read_from(path, *arguments)

    monkeypatch.setattr(direct_io, "read", noted)
    image = kernel.lifecycle.checkpoint()
    assert read.count("device") == len(chunks(image))
    kernel.lifecycle.wake()
    kernel.runs_on()
