"""An image that cannot be trusted runs nothing; put right, it wakes with everything in it."""

from __future__ import annotations

import contextlib
import json
import shutil

import pytest
from faulty import Subject
from harness import branch_of, notebook, until

from jupyter_gpu_ckpt.criu.criu import Criu
from jupyter_gpu_ckpt.errors import ImageError, StoreShared
from jupyter_gpu_ckpt.image import layout, lease


@contextlib.contextmanager
def edited_manifest(image, subject):
    path = image.path / "manifest.json"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"cuda": false', b'"cuda": true '))
    yield
    path.write_bytes(whole)


@contextlib.contextmanager
def missing_seal(image, subject):
    path = image.path / "manifest.mac"
    whole = path.read_bytes()
    path.unlink()
    yield
    path.write_bytes(whole)


@contextlib.contextmanager
def flipped_bit(image, subject, name="core-*.img"):
    path = next(image.criu_directory.glob(name))
    with path.open("r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 1]))
    yield
    with path.open("r+b") as file:
        file.write(bytes([byte]))


@contextlib.contextmanager
def deleted_key(image, subject):
    keys = subject.kernel.lifecycle.engine.store.keys
    path = keys.directory / json.loads((image.path / "manifest.mac").read_text())["key"]
    whole = path.read_bytes()
    path.unlink()
    yield
    path.touch(0o600)
    path.write_bytes(whole)


@contextlib.contextmanager
def newer_generation(image, subject):
    generations = subject.kernel.lifecycle.engine.store.generations
    path = generations.directory / f"{image.manifest.kernel_id}.json"
    whole = path.read_bytes()
    path.write_text(json.dumps({"published": image.manifest.generation + 1, "spent": 0}))
    yield
    path.write_bytes(whole)


@contextlib.contextmanager
def living_elsewhere(image, subject):
    claim = {"boot": "0" * 36, "machine": "another", "hostname": "elsewhere", "pid": 7}
    (image.path / layout.CLAIM).write_text(json.dumps(claim))
    yield
    assert lease.break_claim(image.path)


@contextlib.contextmanager
def opened_to_others(image, subject, mode=0o770):
    subject.images.chmod(mode)
    yield
    subject.images.chmod(0o700)


CASES = {
    opened_to_others: "STORE_SHARED",
    edited_manifest: "IMAGE_FORGED",
    missing_seal: "IMAGE_FORGED",
    deleted_key: "IMAGE_FORGED",
    flipped_bit: "IMAGE_DAMAGED",
    newer_generation: "IMAGE_STALE",
    living_elsewhere: "IMAGE_BUSY",
}


async def test_nothing_that_is_not_trusted_reaches_criu(subject, monkeypatch):
    started = []
    restore = Criu.restore
    monkeypatch.setattr(Criu, "restore", lambda *given, **more: started.append(1) or restore(*given, **more))
    image = await subject.provisioner.checkpoint()
    for damage, code in CASES.items():
        with damage(image, subject):
            error = await subject.fails(subject.provisioner.restore, code)
            assert error.left == f"the image is kept as {image.id}"
    assert started == []
    await subject.stays_away()
    await subject.wakes()
    assert started == [1]


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o711])
async def test_a_directory_that_others_can_enter_runs_nothing_until_it_is_private(
    subject, tmp_path, runtime_base, monkeypatch, mode
):
    """They could replace files of an image between its verification and CRIU's reading of them."""
    started = []
    # Below a sticky directory other servers look for a directory of the user's own.
    codes = ("STORE_SHARED", "IMAGE_NOT_FOUND") if mode & 0o1000 else ("STORE_SHARED",)
    restore = Criu.restore
    monkeypatch.setattr(Criu, "restore", lambda *given, **more: started.append(1) or restore(*given, **more))
    provisioner = subject.provisioner
    point = await provisioner.save("point")
    with opened_to_others(point, subject, mode):
        with pytest.raises(StoreShared):
            await provisioner.back("point")
        assert await subject.run("print(x)") == "41"
        with pytest.raises(ImageError) as refused:
            async with branch_of(point.id, subject.kernel, tmp_path / "branch"):
                pass
        assert refused.value.code in codes
    image = await provisioner.checkpoint()
    with opened_to_others(image, subject, mode):
        subject.send()
        assert (await subject.reply())["ename"] == "STORE_SHARED"
        with pytest.raises(ImageError) as refused:
            async with branch_of(image.id, subject.kernel, tmp_path / "branch"):
                pass
        assert refused.value.code in codes
        error = await subject.fails(provisioner.restore, "STORE_SHARED")
        assert error.left == f"the image is kept as {image.id}"
    assert started == []
    assert await subject.run("print(x)") == "41"


async def test_memory_that_is_not_what_was_saved_runs_not_one_instruction(subject, tmp_path):
    """The memory is still being verified while CRIU copies it: the processes are there, stopped, until then."""
    ticks = tmp_path / "ticks"
    await subject.run(
        "import threading, time\n"
        "def tick():\n"
        f"    while True: open({str(ticks)!r}, 'ab', buffering=0).write(b'.'); time.sleep(0.001)\n"
        "threading.Thread(target=tick, daemon=True).start()"
    )
    image = await subject.provisioner.checkpoint()
    written = ticks.stat().st_size
    with flipped_bit(image, subject, "pages-1.img"):
        error = await subject.fails(subject.provisioner.restore, "IMAGE_DAMAGED")
        assert error.left == f"the image is kept as {image.id}"
    assert ticks.stat().st_size == written
    await subject.wakes()
    await until(lambda: ticks.stat().st_size > written)


async def test_an_image_put_back_after_its_kernel_woke(subject, tmp_path):
    """A kept copy cannot bring the kernel back twice: a later image is another generation."""
    first = await subject.provisioner.checkpoint()
    shutil.copytree(first.path, tmp_path / "copy")
    await subject.wakes()
    shutil.copytree(tmp_path / "copy", first.path)
    store = subject.kernel.lifecycle.engine.store
    with pytest.raises(Exception, match="IMAGE_STALE"):
        store.check(store.get(first.id))
    second = await subject.provisioner.checkpoint()
    assert second.manifest.generation == first.manifest.generation + 1
    store.remove(store.get(first.id))
    await subject.wakes()


@pytest.mark.parametrize("lost", ["the key", "the space in memory"])
async def test_an_encrypted_image_waits_for_what_it_needs(tmp_path, runtime_base, criu_binary, monkeypatch, lost):
    monkeypatch.setenv("KEY_OF_IMAGES", "0f" * 32)
    memory = tmp_path / "memory"
    memory.mkdir()
    async with notebook(tmp_path, runtime_base, encryption_key="env:KEY_OF_IMAGES", memory_dir=str(memory)) as kernel:
        subject = await Subject.of(kernel, tmp_path)
        await subject.provisioner.checkpoint()
        if lost == "the key":
            monkeypatch.setenv("KEY_OF_IMAGES", "1f" * 32)
            await subject.fails(subject.provisioner.restore, "KEY_UNUSABLE")
            monkeypatch.setenv("KEY_OF_IMAGES", "0f" * 32)
        else:
            memory.rename(tmp_path / "away")
            await subject.fails(subject.provisioner.restore, "NO_MEMORY")
            (tmp_path / "away").rename(memory)
        await subject.stays_away()
        await subject.wakes()
        assert [path for path in memory.rglob("*") if path.is_file()] == []
        subject.close()
