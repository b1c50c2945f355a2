"""Device memory that is on the disk before an image is: kept of the last one, and written ahead while suspended."""

from __future__ import annotations

import errno
import functools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from fast_kernel import chunks, kept
from fast_program import SIZES
from waiting import until

from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.errors import CriuError
from jupyter_gpu_ckpt.files import direct_io
from jupyter_gpu_ckpt.image import device_memory, layout
from jupyter_gpu_ckpt.image.chunk_cache import ChunkCache, evict
from jupyter_gpu_ckpt.image.encryption import Vault
from jupyter_gpu_ckpt.image.manifest import FileEntry
from jupyter_gpu_ckpt.image.quota import Quota
from jupyter_gpu_ckpt.image.save_point import SavePoint
from jupyter_gpu_ckpt.image.shared_chunks import bytes_alone
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.image.verify import verify
from jupyter_gpu_ckpt.lifecycle import dump, preflight

pytestmark = pytest.mark.sweep(1 / 2, of="file")


@pytest.fixture
def kernel(fast_kernel):
    return fast_kernel()


@pytest.fixture
def written(monkeypatch):
    """The names of the chunks that were written, not taken."""
    found = []
    write = direct_io.write

    def recorded(path, *arguments, **options):
        found.append(path.name)
        write(path, *arguments, **options)

    monkeypatch.setattr(direct_io, "write", recorded)
    return found


def test_what_has_not_changed_is_not_written_again(kernel, written):
    first = kernel.lifecycle.checkpoint()
    names = [path.name for path in chunks(first)]
    assert sorted(written) == names
    kernel.lifecycle.wake()
    assert [path.name for path in kept(kernel)] == names
    at, size = "held[2]", SIZES[2]
    kernel.program.ask(f"ctypes.memset({at}[0].value + {size // 2}, 77, 4096)")
    written.clear()
    second = kernel.lifecycle.checkpoint()
    assert len(written) == 1
    assert [path.name for path in chunks(second)] == names
    assert kept(kernel) == []
    verify(second.path, kernel.store.keys)
    kernel.lifecycle.wake()
    assert kernel.program.ask(f"ctypes.string_at({at}[0].value + {size // 2}, 4096) == bytes([77]) * 4096") is True
    kernel.program.ask(f"ctypes.memset({at}[0].value + {size // 2}, 3, 4096)")
    kernel.runs_on()


def test_a_checkpoint_that_fails_costs_no_more_than_what_was_kept(kernel, written, monkeypatch):
    count = len(chunks(kernel.lifecycle.checkpoint()))
    kernel.lifecycle.wake()

    def dump(_, directory, **__):
        until(lambda: len(list((directory / layout.DEVICE).glob("*"))) == count, "all was taken")
        raise CriuError("no")

    with monkeypatch.context() as patch:
        patch.setattr(kernel.lifecycle.engine.criu, "dump", dump)
        with pytest.raises(CriuError):
            kernel.lifecycle.checkpoint()
    kernel.runs_on()
    written.clear()
    image = kernel.lifecycle.checkpoint()
    assert sorted(written) == [path.name for path in chunks(image)], "they went with the draft"
    verify(image.path, kernel.store.keys)
    kernel.lifecycle.wake()
    kernel.runs_on()


@pytest.mark.parametrize("way", ["terminated", "ended by itself", "switched off", "swept"])
def test_what_was_kept_goes(fast_kernel, way):
    kernel = fast_kernel(**({"keep_chunks": False} if way == "switched off" else {}))
    kernel.lifecycle.checkpoint()
    kernel.lifecycle.wake()
    kernel.runs_on()
    assert bool(kept(kernel)) is (way != "switched off")
    if way == "terminated":
        kernel.lifecycle.terminate()
    elif way == "ended by itself":
        os.kill(kernel.pid, signal.SIGKILL)
        until(lambda: kernel.lifecycle.poll() is not None, "its end is noticed")
    elif way == "swept":
        assert kernel.store.sweep() == 0, "its owner is there"
        kernel.lifecycle.kernel.chunks._lock.release()  # as the end of its process does
        assert kernel.store.sweep() == 1
        kernel.lifecycle.checkpoint()
        kernel.lifecycle.wake()
        kernel.runs_on()
        return
    until(lambda: not list(kernel.store.root.glob(".draft*")), "it is removed")


def test_a_suspended_kernel_is_written_ahead(kernel, written):
    kernel.lifecycle.suspend()
    until(lambda: sum(path.stat().st_size for path in kept(kernel)) == kernel.blocks, "all of it is on the disk")
    kernel.lifecycle.kernel.chunks._written.result()
    names = sorted(written)
    written.clear()
    image = kernel.lifecycle.checkpoint()
    assert (written, [path.name for path in chunks(image)]) == ([], names)
    verify(image.path, kernel.store.keys)
    assert kept(kernel) == []
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_only_what_has_changed_is_written_ahead(kernel, written):
    kernel.lifecycle.suspend()
    until(lambda: sum(path.stat().st_size for path in kept(kernel)) == kernel.blocks, "all of it is on the disk")
    kernel.lifecycle.wake()
    kernel.program.ask(f"ctypes.memset(held[2][0].value + {SIZES[2] // 2}, 77, 4096)")
    written.clear()
    kernel.lifecycle.suspend()
    assert kernel.lifecycle.kernel.chunks._written.result() is True
    assert len(written) == 1
    kernel.lifecycle.checkpoint()
    assert len(written) == 1
    kernel.lifecycle.wake()
    kernel.program.ask(f"ctypes.memset(held[2][0].value + {SIZES[2] // 2}, 3, 4096)")
    kernel.runs_on()


def test_a_wake_does_not_wait_for_the_disk(kernel, monkeypatch):
    """And what was written of a chunk that was under way then is never taken for more than it is."""
    hangs, continues, write = threading.Event(), threading.Event(), direct_io.write

    def slow(path, *arguments, **options):
        hangs.set()
        assert continues.wait(60)
        write(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(direct_io, "write", slow)
        kernel.lifecycle.suspend()
        assert hangs.wait(60)
        kernel.lifecycle.wake()
        kernel.runs_on()
        kernel.program.ask("[ctypes.memset(at, 9, size) for at, size in held]")
        continues.set()
    image = kernel.lifecycle.checkpoint()
    verify(image.path, kernel.store.keys)
    kernel.lifecycle.wake()
    assert kernel.program.ask("all(ctypes.string_at(at, size) == bytes([9]) * size for at, size in held)")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_what_cannot_be_written_ahead_costs_nothing(kernel, monkeypatch, number):
    write, calls = direct_io.write, []

    def refused(*arguments, **options):
        calls.append(arguments)
        if len(calls) > 1:
            raise OSError(number, os.strerror(number))
        write(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(direct_io, "write", refused)
        kernel.lifecycle.suspend()
        assert kernel.lifecycle.kernel.chunks._written.result() is False
        assert len(calls) > 1
    if number == errno.ENOSPC:
        assert kept(kernel) == [], "others need the space"
    verify(kernel.lifecycle.checkpoint().path, kernel.store.keys)
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_nothing_is_written_ahead_that_could_be_no_image(fast_kernel, tmp_path):
    kernel = fast_kernel(store=Store(tmp_path / "images", quota=Quota(bytes=1 << 20)))
    kernel.lifecycle.suspend()
    assert kernel.lifecycle.kernel.chunks._written.result() is False
    assert kept(kernel) == []
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_nothing_is_written_ahead_where_space_is_short(kernel, monkeypatch):
    monkeypatch.setattr(Store, "free", lambda _: 2 * kernel.blocks - 1)
    kernel.lifecycle.suspend()
    assert kernel.lifecycle.kernel.chunks._written.result() is False
    assert kept(kernel) == []
    monkeypatch.setattr(Store, "free", lambda _: 2 * kernel.blocks)
    kernel.lifecycle.wake()
    kernel.lifecycle.suspend()
    assert kernel.lifecycle.kernel.chunks._written.result() is True


@pytest.mark.parametrize("whose", ["its own", "another's"])
def test_the_chunk_cache_is_evicted_for_an_image(kernel, monkeypatch, whose):
    """The disk has as much space as the kernel's image needs once the chunk cache is gone."""
    root = kernel.store.root
    if whose == "its own":
        kernel.lifecycle.checkpoint()
        kernel.lifecycle.wake()
    else:
        other = ChunkCache(root)
        kernel.store.prepare()
        full = root / "full"
        full.mkdir()
        (full / "000000.img").write_bytes(bytes(kernel.blocks))
        other.reuse(full, {"000000.img": FileEntry(kernel.blocks, "")})
    assert kept(kernel)
    space = kernel.blocks * 2
    monkeypatch.setattr(Store, "free", lambda _: space - sum(path.stat().st_size for path in kept(kernel)))
    monkeypatch.setattr(preflight, "image_bytes", lambda *_: space)
    kernel.lifecycle.checkpoint()
    assert kept(kernel) == []
    kernel.lifecycle.wake()
    kernel.runs_on()


@pytest.mark.parametrize("options", [{"keep_chunks": False}, {"write_ahead": False}], ids=str)
def test_neither_is_done_unless_configured(fast_kernel, options):
    kernel = fast_kernel(**options)
    kernel.lifecycle.suspend()
    if "write_ahead" in options:
        assert kernel.lifecycle.kernel.chunks is None
    else:
        assert kernel.lifecycle.kernel.chunks._written.result() is True
    kernel.lifecycle.wake()
    until(lambda: kept(kernel) == [], "it is removed")
    kernel.runs_on()


def test_what_a_checkpoint_counts_on_is_not_taken_from_it(kernel, monkeypatch):
    """Another kernel of the same server needs disk space meanwhile."""
    kernel.lifecycle.suspend()
    kernel.lifecycle.kernel.chunks._written.result()
    there, written = len(kept(kernel)), dump.device_memory_written

    def before_it(*arguments):
        evict(kernel.store.root)
        assert len(kept(kernel)) == there
        return written(*arguments)

    monkeypatch.setattr(dump, "device_memory_written", before_it)
    kernel.lifecycle.checkpoint()
    kernel.lifecycle.wake()
    kernel.runs_on()
    evict(kernel.store.root)
    assert kept(kernel) == []


def test_a_disk_that_is_full_all_the_same_is_tried_again_without_what_is_kept(kernel, monkeypatch):
    """Two checkpoints saw the same free space."""
    other = ChunkCache(kernel.store.root)
    kernel.store.prepare()
    full = kernel.store.root / "full"
    full.mkdir()
    (full / "000000.img").write_bytes(bytes(8 << 20))
    other.reuse(full, {"000000.img": FileEntry(8 << 20, "")})
    write, failed = direct_io.write, []

    def full_once(*arguments, **options):
        if kept(kernel):
            failed.append(arguments)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*arguments, **options)

    monkeypatch.setattr(direct_io, "write", full_once)
    kernel.lifecycle.checkpoint()
    assert failed
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_the_quota_counts_all_of_it(kernel, monkeypatch):
    """Also of what is there already: an image counts it."""
    asked = []
    kernel.lifecycle.suspend()
    kernel.lifecycle.kernel.chunks._written.result()
    kernel.lifecycle.wake()
    monkeypatch.setattr(Store, "over_quota", lambda _, kernel_id, bytes: asked.append(bytes))
    kernel.lifecycle.suspend()
    kernel.lifecycle.kernel.chunks._written.result()
    assert asked[-1] == kernel.blocks


def test_no_thread_can_be_had(kernel, monkeypatch):
    def refused(*_) -> None:
        raise RuntimeError("can't start new thread")

    kernel.lifecycle.checkpoint()
    kernel.lifecycle.wake()
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "_adjust_thread_count", refused)
        kernel.lifecycle.suspend()
        kernel.lifecycle.wake()
    kernel.runs_on()
    kernel.lifecycle.checkpoint()
    kernel.lifecycle.wake()
    kernel.runs_on()


@pytest.fixture
def hanging(monkeypatch):
    """Writes and reads of chunks hang from `hang` to the end of the test; and whether one does."""

    class Hanging:
        met, over = threading.Event(), threading.Event()

        def hang(self) -> None:
            for name in ("read", "write"):
                monkeypatch.setattr(direct_io, name, functools.partial(self._do, getattr(direct_io, name)))

        def _do(self, work, *arguments, **options):
            self.met.set()
            self.over.wait(60)
            return work(*arguments, **options)

    found = Hanging()
    yield found
    found.over.set()


def test_a_disk_that_hangs_blocks_no_other_kernel(kernel, hanging):
    """But who needs it: a wake, the next suspend and its wake, and the end of the kernel do not."""
    hanging.hang()
    kernel.lifecycle.suspend()
    assert hanging.met.wait(60)
    kernel.lifecycle.wake()
    kernel.lifecycle.suspend()
    kernel.lifecycle.wake()
    kernel.runs_on()
    kernel.lifecycle.suspend()
    os.kill(kernel.pid, signal.SIGKILL)
    until(lambda: kernel.lifecycle.poll() is not None, "its end is noticed")
    assert not hanging.over.is_set()
    hanging.over.set()
    until(lambda: not open_extents(), "none of its memory is held")


def open_extents() -> list[str]:
    """Descriptors of this process that lead to device memory."""
    links = (os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd"))
    return [to for link in links if os.path.islink(link) and fastpath.EXTENTS in (to := os.readlink(link))]


def test_chunks_in_the_clear_do_not_outlive_encryption(kernel, monkeypatch):
    """Switched on while the kernel is away: what its last image had in the clear goes with that image."""
    kernel.lifecycle.checkpoint()
    monkeypatch.setenv("KEY_OF_IMAGES", "0f" * 32)
    kernel.store.vault = Vault("env:KEY_OF_IMAGES")
    kernel.lifecycle.wake()
    assert kernel.lifecycle.kernel.chunks is None
    assert not list(kernel.store.root.glob(".draft*"))
    kernel.runs_on()


def test_save_points_share_chunks_and_any_can_be_deleted(kernel, written):
    lifecycle, at = kernel.lifecycle, "held[2][0].value"
    one = lifecycle.save(SavePoint("one"))
    assert sorted(written) == [path.name for path in chunks(one)]
    kernel.runs_on()
    written.clear()
    kernel.program.ask(f"ctypes.memset({at} + {SIZES[2] // 2}, 77, 4096)")
    two = lifecycle.save(SavePoint("two"))
    assert len(written) == 1
    assert bytes_alone(two) <= two.manifest.bytes - kernel.blocks + device_memory.CHUNK
    kernel.program.ask(f"ctypes.memset({at} + {SIZES[2] // 2}, 78, 4096)")
    kernel.store.remove(one)
    before = lifecycle.back("two")
    assert kernel.program.ask(f"ctypes.string_at({at} + {SIZES[2] // 2}, 4096) == bytes([77]) * 4096")
    kernel.store.remove(two)
    kernel.store.check(before)
    kernel.program.ask(f"ctypes.memset({at}, 3, {SIZES[2]})")
    kernel.runs_on()
