"""A kernel whose device memory is compressed on its way to the disk: there and back, and by what it is known again."""

from __future__ import annotations

import os

import pytest
from fast_kernel import chunks, kept
from fast_program import SIZES

from jupyter_gpu_ckpt.errors import ImageDamaged
from jupyter_gpu_ckpt.image import archive, compression, device, direct
from jupyter_gpu_ckpt.image.encryption import Vault
from jupyter_gpu_ckpt.image.integrity import verify
from jupyter_gpu_ckpt.image.remote import Remote
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.machine import State

#: Half of the largest block is what no codec makes smaller; and whether it is there.
_NOISE = "__import__('random').Random(1).randbytes(32 << 20)"
_SCRAMBLE = f"ctypes.memmove(held[2][0].value, {_NOISE}, 32 << 20)"
_SCRAMBLED = f"ctypes.string_at(held[2][0].value, 32 << 20) == {_NOISE}"
_MEND = "ctypes.memset(held[2][0].value, 3, 32 << 20)"


@pytest.fixture
def kernel(fast_kernel):
    return fast_kernel(disk_rate=1.0)


@pytest.fixture
def written(monkeypatch):
    """The names of the chunks that were written, not taken."""
    found, write = [], direct.write

    def told(path, *arguments, **options):
        found.append(path.name)
        write(path, *arguments, **options)

    monkeypatch.setattr(direct, "write", told)
    return found


def frames(image) -> list[bool]:
    """Of each chunk that an image has, whether it is compressed."""
    return [entry.raw is not None for _, entry in sorted(device.entries(image.manifest).items())]


def test_there_and_back(kernel):
    for _ in range(2):
        image = kernel.lifecycle.checkpoint()
        assert all(frames(image))
        assert (image.manifest.version, image.manifest.arena) == (4, kernel.blocks)
        assert sum(path.stat().st_size for path in chunks(image)) < kernel.blocks // 100
        assert sum(entry.content.bytes for entry in device.entries(image.manifest).values()) == kernel.blocks
        verify(image.path, kernel.store.keys)
        kernel.lifecycle.wake()
        kernel.runs_on()


def test_both_kinds_in_one_image(kernel, written):
    kernel.program.ask(_SCRAMBLE)
    image = kernel.lifecycle.checkpoint()
    assert {True, False} == set(frames(image))
    names, size = [path.name for path in chunks(image)], sum(path.stat().st_size for path in chunks(image))
    assert 16 << 20 < size < kernel.blocks - (16 << 20)
    kernel.lifecycle.wake()
    assert kernel.program.ask(_SCRAMBLED) is True
    written.clear()
    image = kernel.lifecycle.checkpoint()
    assert (written, [path.name for path in chunks(image)]) == ([], names), "each was known again"
    verify(image.path, kernel.store.keys)
    kernel.lifecycle.wake()
    assert kernel.program.ask(_SCRAMBLED) is True
    kernel.program.ask(_MEND)
    kernel.runs_on()


def test_what_has_not_changed_is_neither_written_nor_compressed_again(kernel, written, monkeypatch):
    first = kernel.lifecycle.checkpoint()
    kernel.lifecycle.wake()
    middle = f"held[2][0].value + {SIZES[2] // 2}"
    kernel.program.ask(f"ctypes.memset({middle}, 77, 4096)")
    compress, compressed = compression.compress, []

    def told(*arguments):
        compressed.append(arguments)
        return compress(*arguments)

    monkeypatch.setattr(compression, "compress", told)
    written.clear()
    second = kernel.lifecycle.checkpoint()
    assert (len(written), len(compressed)) == (1, 1)
    before, after = device.entries(first.manifest), device.entries(second.manifest)
    assert [name for name in before if before[name] != after[name]] == written
    assert all(frames(second))
    verify(second.path, kernel.store.keys)
    kernel.lifecycle.wake()
    assert kernel.program.ask(f"ctypes.string_at({middle}, 4096) == bytes([77]) * 4096") is True
    kernel.program.ask(f"ctypes.memset({middle}, 3, 4096)")
    kernel.runs_on()


def test_written_ahead(kernel, written):
    kernel.lifecycle.suspend()
    assert kernel.lifecycle._chunks._written.result() is True
    names = sorted(written)
    assert sum(path.stat().st_size for path in kept(kernel)) == kernel.lifecycle._chunks.bytes < kernel.blocks // 100
    assert kernel.lifecycle._chunks.settle() == kernel.lifecycle._chunks.content == kernel.blocks
    written.clear()
    image = kernel.lifecycle.checkpoint()
    assert (written, [path.name for path in chunks(image)]) == ([], names)
    assert all(frames(image))
    verify(image.path, kernel.store.keys)
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_only_what_has_changed_is_written_ahead(kernel, written):
    kernel.lifecycle.checkpoint()
    kernel.lifecycle.wake()
    kernel.program.ask(_SCRAMBLE)
    written.clear()
    kernel.lifecycle.suspend()
    assert kernel.lifecycle._chunks._written.result() is True
    assert 0 < len(written) < len(kept(kernel))
    written.clear()
    image = kernel.lifecycle.checkpoint()
    assert written == []
    assert {True, False} == set(frames(image))
    kernel.lifecycle.wake()
    assert kernel.program.ask(_SCRAMBLED) is True
    kernel.program.ask(_MEND)
    kernel.runs_on()


def test_as_much_room_is_asked_for_as_may_be_written(kernel, monkeypatch):
    """What is there already is counted as what it holds, not as what it takes."""
    kernel.lifecycle.checkpoint()
    kernel.lifecycle.wake()
    monkeypatch.setattr(Store, "free", lambda _: 0)
    kernel.lifecycle.suspend()
    assert kernel.lifecycle._chunks._written.result() is True
    monkeypatch.undo()
    kernel.lifecycle.wake()
    kernel.runs_on()


@pytest.mark.parametrize("damage", ["a bit", "its end"])
def test_a_damaged_frame_is_not_brought_to_life(kernel, damage):
    image = kernel.lifecycle.checkpoint()
    victim = chunks(image)[1]
    content = victim.read_bytes()
    at = len(content) // 2
    victim.write_bytes(content[:at] + (bytes([content[at] ^ 1]) + content[at + 1 :] if damage == "a bit" else b""))
    with pytest.raises(ImageDamaged):
        kernel.lifecycle.wake()
    assert kernel.lifecycle.state is State.CHECKPOINTED
    with pytest.raises(ImageDamaged):
        verify(image.path, kernel.store.keys)
    victim.write_bytes(content)
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_elsewhere(fast_kernel, tmp_path):
    url = f"file://{tmp_path}/cold"
    kernel = fast_kernel(disk_rate=1.0, archive_url=url)
    image = kernel.lifecycle.checkpoint()
    assert archive.archive(image, kernel.store, Remote(url)) < kernel.blocks
    kernel.lifecycle.wake()
    kernel.runs_on()
    image = kernel.lifecycle.checkpoint()
    remote = Remote(f"file://{tmp_path}/there")
    remote.push(image, take_from=kernel.store)
    assert all(frames(remote.pull(image.id, kernel.store)))
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_what_is_encrypted_is_not_compressed(fast_kernel, tmp_path, monkeypatch):
    """Its length would tell what is in it."""
    monkeypatch.setenv("KEY_OF_IMAGES", "0f" * 32)
    kernel = fast_kernel(disk_rate=1.0, store=Store(tmp_path / "images", vault=Vault("env:KEY_OF_IMAGES")))
    image = kernel.lifecycle.checkpoint()
    assert not any(frames(image))
    assert sum(path.stat().st_size for path in chunks(image)) > kernel.blocks
    kernel.lifecycle.wake()
    kernel.runs_on()


def test_frames_do_not_get_into_an_encrypted_image(kernel, monkeypatch):
    """Encryption is switched on while the last image's are there, and its plain files lie on the same file system."""
    kernel.lifecycle.checkpoint()
    kernel.lifecycle.wake()
    assert kept(kernel)
    monkeypatch.setenv("KEY_OF_IMAGES", "0f" * 32)
    base = kernel.store.root.parent / "plain"
    base.mkdir()
    kernel.store.vault = Vault("env:KEY_OF_IMAGES", base)
    assert os.stat(base).st_dev == os.stat(kernel.store.root).st_dev
    image = kernel.lifecycle.checkpoint()
    assert not any(frames(image))
    kernel.lifecycle.wake()
    kernel.runs_on()
