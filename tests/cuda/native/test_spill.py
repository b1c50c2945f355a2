"""Device memory that host memory is too small for goes to the disk, and comes from it, without a stay."""

from __future__ import annotations

import errno
import json
import resource
import shutil
from pathlib import Path

import pytest
from fast_kernel import CONTEXT, A, FastKernel, chunks, kept
from fast_program import MIB

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.errors import CapsuleError, CudaError, ImageDamaged, NodeUnfit, NoMemory, NoSpace, QuotaExceeded
from jupyter_gpu_ckpt.image import device_memory, lease, spill
from jupyter_gpu_ckpt.image.encryption import Vault
from jupyter_gpu_ckpt.image.quota import Quota
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.image.verify import verify
from jupyter_gpu_ckpt.lifecycle import compatibility, context, host_memory, preflight, suspend
from jupyter_gpu_ckpt.lifecycle.lifecycle import Lifecycle
from jupyter_gpu_ckpt.lifecycle.plans import State, Step
from jupyter_gpu_ckpt.lifecycle.steps import STEPS

#: Enough for the context and for what else a verb needs, and not for the blocks.
SMALL = CONTEXT + preflight.MARGIN


def free_memory(monkeypatch, bytes: int) -> None:
    for module in (compatibility, preflight, host_memory):
        monkeypatch.setattr(module, "available_memory", lambda: bytes)


@pytest.fixture
def kernel(fast_kernel, monkeypatch) -> FastKernel:
    kernel = fast_kernel(host_copy_bytes=0)  # a copy would be memory that it has
    assert kernel.blocks + preflight.MARGIN > SMALL
    free_memory(monkeypatch, SMALL)
    return kernel


def spilled(kernel: FastKernel) -> list[Path]:
    return sorted(kernel.store.root.glob(".draft-spill-*/*.img"))


def leftovers(kernel: FastKernel) -> list[Path]:
    return list(kernel.store.root.glob(".draft*"))


def test_a_suspended_kernel_has_its_blocks_on_the_disk(kernel):
    for _ in range(2):
        kernel.lifecycle.suspend()
        assert sum(path.stat().st_size for path in spilled(kernel)) == kernel.blocks
        assert kernel.path().host_memory_bytes() == 0
        assert kernel.driver.free(A) == 100 * MIB
        assert not kept(kernel), "they are on the disk already"
        kernel.lifecycle.wake()
        kernel.runs_on()
        assert leftovers(kernel) == []


@pytest.mark.parametrize("before", ["running", "suspended"])
def test_an_image_has_the_very_files(kernel, monkeypatch, before):
    if before == "suspended":
        kernel.lifecycle.suspend()
    written = []
    monkeypatch.setattr(device_memory.direct_io, "write", lambda path, *rest, **options: written.append(path))
    image = kernel.lifecycle.checkpoint()
    assert written == []
    assert sum(path.stat().st_size for path in chunks(image)) == kernel.blocks == image.manifest.swapped_bytes
    assert leftovers(kernel) == []
    verify(image.path, kernel.store.keys)
    assert {path.stat().st_nlink for path in chunks(image)} == {1}, "the kernel's own names are gone"
    monkeypatch.undo()
    free_memory(monkeypatch, SMALL)
    kernel.lifecycle.wake()
    kernel.runs_on()
    assert [path for path in leftovers(kernel) if "blocks" in path.name] == []


def test_zeros_have_no_file_in_the_image(kernel):
    kernel.program.ask("[ctypes.memset(at, 0, size) for at, size in held]")
    image = kernel.lifecycle.checkpoint()
    assert sum(path.stat().st_size for path in chunks(image)) <= device_memory.CHUNK
    kernel.lifecycle.wake()
    assert kernel.program.ask("all(ctypes.string_at(at, size) == bytes(size) for at, size in held)")


def test_a_copy_that_is_kept_is_memory_that_the_next_suspend_has(fast_kernel, monkeypatch):
    kernel = fast_kernel(host_copy_bytes=1 << 40)
    kernel.lifecycle.suspend()
    kernel.lifecycle.wake()
    assert kernel.path().amounts().kept == host_memory.copied(kernel.lifecycle.kernel) == kernel.blocks
    free_memory(monkeypatch, SMALL)
    kernel.lifecycle.suspend()
    assert (spilled(kernel), kernel.path().host_memory_bytes()) == ([], kernel.blocks)
    kernel.lifecycle.wake()
    kernel.runs_on()
    free_memory(monkeypatch, SMALL - 1)
    kernel.lifecycle.suspend()
    assert sum(path.stat().st_size for path in spilled(kernel)) == kernel.blocks
    assert kernel.path().host_memory_bytes() == 0
    kernel.lifecycle.wake()
    kernel.runs_on()
    assert (kernel.path().amounts().kept, spilled(kernel)) == (0, [])


def test_from_memory_to_the_disk_and_back(kernel, monkeypatch):
    """Each direction uses the memory or disk that has space at that moment."""
    free_memory(monkeypatch, 1 << 40)
    kernel.lifecycle.checkpoint()
    free_memory(monkeypatch, SMALL)
    kernel.lifecycle.wake()
    kernel.runs_on()
    kernel.lifecycle.suspend()
    assert spilled(kernel)
    kernel.lifecycle.wake()
    free_memory(monkeypatch, 1 << 40)
    kernel.lifecycle.suspend()
    assert not spilled(kernel)
    assert kernel.path().host_memory_bytes() == kernel.blocks
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_files_of_a_living_kernel_are_not_swept_and_are_found_by_its_next_owner(kernel):
    kernel.lifecycle.suspend()
    there = spilled(kernel)
    kernel.lifecycle.detach()
    assert Store(kernel.store.named).sweep() == 0
    last = kernel.lifecycle
    kernel.lifecycle = Lifecycle(last.home, last.engine, kernel.gate, settings=last.kernel.settings, trace=last.trace)
    kernel.lifecycle.attach(capsule=Capsule.attach(last.home.runtime_dir))
    assert spilled(kernel) == there
    kernel.lifecycle.wake()
    kernel.runs_on()
    assert leftovers(kernel) == []


def test_it_goes_with_the_kernel(kernel):
    kernel.lifecycle.suspend()
    assert spilled(kernel)
    kernel.lifecycle.terminate()
    assert leftovers(kernel) == []


def test_a_sweep_removes_what_a_kernel_left_whose_owner_was_gone(kernel):
    kernel.lifecycle.suspend()
    kernel.lifecycle.detach()
    Capsule.attach(kernel.lifecycle.home.runtime_dir).close()
    assert Store(kernel.store.named).sweep() == 1
    assert leftovers(kernel) == []


@pytest.mark.parametrize("why", ["the disk is full", "images are encrypted"])
def test_without_space_elsewhere_it_is_refused_and_the_kernel_runs_on(kernel, monkeypatch, why):
    if why == "the disk is full":
        monkeypatch.setattr(Store, "free", lambda _: kernel.blocks + preflight.MARGIN - 1)
    else:
        monkeypatch.setenv("KEY_OF_IMAGES", "0f" * 32)
        kernel.store.vault = Vault("env:KEY_OF_IMAGES")
    with pytest.raises(NoMemory):
        kernel.lifecycle.suspend()
    kernel.runs_on()
    assert leftovers(kernel) == []


def test_a_node_without_memory_or_disk_space_refuses_the_image(kernel, monkeypatch):
    kernel.lifecycle.checkpoint()
    free = Store.free
    monkeypatch.setattr(Store, "free", lambda store: min(free(store), kernel.blocks - 1))
    free_memory(monkeypatch, kernel.blocks)
    with pytest.raises(NodeUnfit):
        kernel.lifecycle.wake()
    assert kernel.lifecycle.state is State.CHECKPOINTED
    monkeypatch.setattr(Store, "free", free)
    free_memory(monkeypatch, SMALL)
    kernel.lifecycle.wake()
    kernel.runs_on()


@pytest.mark.parametrize("failing", ["keep_fd", "directory", "host_memory", "freeze_threads"])
def test_a_directory_that_cannot_be_had_is_no_reason_to_fill_the_memory(kernel, monkeypatch, failing):
    """Neither by the library nor by the driver: there is none."""

    def refused(*_, **__) -> None:
        raise CapsuleError("no")

    begin, unbroken = spill.begin, Capsule.host_memory

    def gone(root, keep_fd) -> Path:
        directory = begin(root, keep_fd)
        shutil.rmtree(directory)
        return directory

    if failing == "directory":
        monkeypatch.setattr(spill, "begin", gone)
    else:
        monkeypatch.setattr(Capsule, failing, refused)
    with pytest.raises(NoMemory):
        kernel.lifecycle.suspend()
    monkeypatch.setattr(Capsule, "host_memory", unbroken)
    kernel.runs_on()
    assert leftovers(kernel) == []


def test_a_disk_that_takes_no_more_half_way(kernel):
    """A limit on the sizes of files stands for it: the first bytes of each are written."""
    resource.prlimit(kernel.pid, resource.RLIMIT_FSIZE, (device_memory.CHUNK // 2, resource.RLIM_INFINITY))
    with pytest.raises(NoMemory):
        kernel.lifecycle.suspend()
    kernel.runs_on()
    assert leftovers(kernel) == []
    resource.prlimit(kernel.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    kernel.lifecycle.suspend()
    assert spilled(kernel)
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_the_drivers_part_needs_memory_as_well(kernel, monkeypatch):
    """Host memory for the blocks, and not for the rest beside them: then they go to the disk."""
    kernel.fake.memory = {A: 100 * MIB}
    free_memory(monkeypatch, kernel.blocks + preflight.MARGIN)
    kernel.lifecycle.suspend()
    assert sum(path.stat().st_size for path in spilled(kernel)) == kernel.blocks


def test_the_processes_that_criu_restores_need_memory_as_well(kernel, monkeypatch):
    image = kernel.lifecycle.checkpoint()
    free_memory(monkeypatch, image.manifest.swapped_bytes + preflight.MARGIN)
    seen = []
    swap_in = context.FastPath.swap_in

    def looked(path, **limits):
        seen.extend(spilled(kernel))
        swap_in(path, **limits)

    monkeypatch.setattr(context.FastPath, "swap_in", looked)
    kernel.lifecycle.wake()
    kernel.runs_on()
    assert len(seen) == -(-kernel.blocks // device_memory.CHUNK)


def test_a_disk_that_is_full_as_it_comes_back(kernel, monkeypatch):
    kernel.lifecycle.checkpoint()
    write, link = device_memory.direct_io.write, device_memory._link
    monkeypatch.setattr(device_memory, "_link", lambda *_: False)  # a file system without hard links

    def full(path, *rest, **options) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(device_memory.direct_io, "write", full)
    for bytes, error in ((SMALL, NoSpace), (1 << 40, NoMemory)):
        free_memory(monkeypatch, bytes)
        with pytest.raises(error):
            kernel.lifecycle.wake()
        assert kernel.lifecycle.state is State.CHECKPOINTED
    monkeypatch.setattr(device_memory.direct_io, "write", write)
    kernel.lifecycle.wake()
    kernel.runs_on()
    monkeypatch.setattr(device_memory, "_link", link)
    kernel.lifecycle.checkpoint()
    monkeypatch.setattr(device_memory.direct_io, "write", full)
    free_memory(monkeypatch, SMALL)
    kernel.lifecycle.wake()  # the image has it, and nothing is copied
    kernel.runs_on()


def test_what_was_kept_for_the_next_image_gives_way(kernel, monkeypatch):
    free_memory(monkeypatch, 1 << 40)
    kernel.lifecycle.checkpoint()
    kernel.lifecycle.wake()
    cached = sum(path.stat().st_size for path in kept(kernel))
    assert cached
    free_memory(monkeypatch, SMALL)
    space = kernel.blocks + preflight.MARGIN
    monkeypatch.setattr(Store, "free", lambda _: space - sum(path.stat().st_size for path in kept(kernel)))
    kernel.lifecycle.suspend()
    assert spilled(kernel)
    assert not kept(kernel)


def test_another_hosts_is_not_swept(kernel):
    kernel.lifecycle.suspend()
    (directory,) = {path.parent for path in spilled(kernel)}
    kernel.lifecycle.terminate()
    directory.mkdir()
    record = {"boot": "00000000-0000-0000-0000-000000000000", "machine": "another", "hostname": "another"}
    (directory / ".host").write_text(json.dumps(record))
    assert Store(kernel.store.named).sweep() == 0
    lease.write_host(directory / ".host")
    assert Store(kernel.store.named).sweep() == 1


@pytest.mark.parametrize(
    "prove", [Store.check, lambda *of: Store.begin_check(*of).cancel(wait_for_end=True)], ids=["whole", "begun"]
)
def test_an_image_whose_owner_ended_just_after_it_was_made(kernel, monkeypatch, prove):
    """Its files have the kernel's own names, too; nobody may call it damaged."""

    def dies(*_) -> None:
        raise SystemExit

    monkeypatch.setitem(STEPS, Step.END_PROCESS, dies)
    with pytest.raises(SystemExit):
        kernel.lifecycle.checkpoint()
    kernel.lifecycle.capsule.close()
    monkeypatch.setattr(kernel.lifecycle, "terminate", lambda: None)  # there is nothing left of it
    other = Store(kernel.store.named)
    (image,) = other.images()
    assert {path.stat().st_nlink for path in chunks(image)} == {2}
    prove(other, image)


def test_a_busy_library_is_waited_for_only_where_it_matters(kernel, monkeypatch):
    def busy(_) -> None:
        raise CudaError("it does not answer")

    monkeypatch.setattr(context.FastPath, "amounts", busy)
    assert [finding.code for finding in suspend.findings(kernel.lifecycle.kernel)] == ["NO_MEMORY"]
    free_memory(monkeypatch, 1 << 40)
    assert suspend.findings(kernel.lifecycle.kernel) == []


def test_a_damaged_chunk_is_not_brought_to_life(kernel):
    image = kernel.lifecycle.checkpoint()
    victim = chunks(image)[1]
    content = victim.read_bytes()
    victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ImageDamaged):
        kernel.lifecycle.wake()
    assert kernel.lifecycle.state is State.CHECKPOINTED
    assert leftovers(kernel) == []
    victim.write_bytes(content)
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_a_return_that_fails_finds_them_on_the_disk_again(kernel):
    kernel.lifecycle.suspend()
    there = spilled(kernel)
    kernel.driver.refuse["cuda.restore"] = 999
    with pytest.raises(Exception, match="refused to restore"):
        kernel.lifecycle.wake()
    assert spilled(kernel) == there
    del kernel.driver.refuse["cuda.restore"]
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_the_quota_counts_what_is_on_the_disk_already(kernel):
    kernel.lifecycle.suspend()
    kernel.store.quota = Quota(bytes=kernel.blocks)
    with pytest.raises(QuotaExceeded) as caught:
        kernel.lifecycle.checkpoint()
    assert caught.value.left == "the kernel is suspended, its device memory is kept on the disk"
    kernel.lifecycle.wake()
    kernel.runs_on()
