"""The store: atomic publishing, one holder at a time, clear errors."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from jupyter_gpu_ckpt.errors import ImageBusy, ImageFormat, ImageNotFound, NoSpace, StoreUnwritable
from jupyter_gpu_ckpt.image import store as store_module
from jupyter_gpu_ckpt.image.manifest import Manifest
from jupyter_gpu_ckpt.image.store import MANIFEST, Store

FACTS = Manifest(
    id="",
    kernel_id="0123456789ab",
    created=1.0,
    kernel_name="python3",
    uid=os.geteuid(),
    hostname="here",
    pid=8192,
    pipes=[1, 2],
    monotonic=1,
    boottime=2,
    runtime_dir="/nowhere",
    criu_version="4.2.1",
    device_bytes={"GPU-1": 3},
)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "images")


def publish(store: Store, content: bytes = b"pages"):
    draft = store.begin(FACTS.kernel_id)
    (draft.criu_directory / "pages-1.img").write_bytes(content)
    (draft.criu_directory / "pages-1.img").chmod(0o644)
    return draft.publish(FACTS)


def test_a_published_image_is_found_whole_and_private(store):
    image = publish(store)
    (found,) = store.images()
    assert found == image
    assert found.manifest.files == {"criu/pages-1.img": 5}
    assert found.manifest.bytes == 5
    store.check(found)
    assert store.root.stat().st_mode & 0o777 == 0o700
    for path in [image.path, *image.path.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_draft_is_no_image_and_leaves_nothing_when_discarded(store):
    draft = store.begin("kernel")
    assert store.images() == []
    draft.discard()
    draft.discard()
    assert list(store.root.iterdir()) == []


def test_the_manifest_survives_json_and_refuses_what_it_does_not_know(store):
    manifest = publish(store).manifest
    assert Manifest.from_json(manifest.to_json()) == manifest
    data = json.loads(manifest.to_json())
    with pytest.raises(ImageFormat, match="format 99") as caught:
        Manifest.from_json(json.dumps({**data, "version": 99}))
    assert caught.value.details["version"] == 99
    for damaged in ("", "[]", "{}", manifest.to_json()[:-20], json.dumps({"version": manifest.version})):
        with pytest.raises(ImageFormat):
            Manifest.from_json(damaged)
    assert Manifest.from_json(json.dumps({**data, "later": 1})) == manifest


@pytest.mark.parametrize("id", ["", ".", "..", "a/b", "/etc", ".draft-x", "no-such-image"])
def test_names_that_are_no_images(store, id):
    with pytest.raises(ImageNotFound):
        store.get(id)


@pytest.mark.parametrize("damage", ["shorter", "gone", "more"])
def test_a_damaged_image_is_named(store, damage):
    image = publish(store)
    pages = image.criu_directory / "pages-1.img"
    if damage == "shorter":
        pages.write_bytes(b"pag")
    elif damage == "gone":
        pages.unlink()
    else:
        (image.criu_directory / "extra.img").touch()
    with pytest.raises(ImageFormat) as caught:
        store.check(image)
    assert len(caught.value.details["files"]) == 1


def test_a_renamed_manifest_is_refused(store):
    one, other = publish(store), publish(store)
    other.path.joinpath(MANIFEST).write_text(one.manifest.to_json())
    with pytest.raises(ImageFormat):
        store.get(other.id)


def test_only_one_holds_a_lease_also_across_processes(store):
    image = publish(store)
    program = (
        "import sys; from pathlib import Path; from jupyter_gpu_ckpt.image.store import Store\n"
        "from jupyter_gpu_ckpt.errors import ImageBusy\n"
        "image = Store(Path(sys.argv[1])).get(sys.argv[2])\n"
        "try:\n  with image.lease(): print('held')\n"
        "except ImageBusy: print('busy')\n"
    )

    def other() -> str:
        command = [sys.executable, "-c", program, str(store.root), image.id]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()

    with image.lease():
        with pytest.raises(ImageBusy), image.lease():
            pass
        with pytest.raises(ImageBusy):
            store.remove(image)
        assert other() == "busy"
    assert other() == "held"
    assert store.remove(image) == 5
    assert [path for path in store.root.iterdir() if not path.name.startswith(".")] == []


def test_a_sweep_removes_the_drafts_of_the_dead_and_no_others(store):
    living = store.begin("living")
    dead = store.root / ".draft-dead"
    (dead / "criu").mkdir(parents=True)
    assert store.sweep() == 1
    assert not dead.exists()
    assert living.path.exists()
    living.discard()


def test_a_crash_between_writing_and_renaming_leaves_no_image(store, monkeypatch):
    """The manifest is written before the rename; whatever fails after it, there is a draft and not an image."""
    draft = store.begin("kernel")
    flush = store_module._flush
    monkeypatch.setattr(store_module, "_flush", lambda path: flush(path) if path.is_file() else _full())
    with pytest.raises(NoSpace):
        draft.publish(FACTS)
    assert store.images() == []
    draft.discard()


def _full():
    raise OSError(28, "No space left on device")


def test_a_place_that_cannot_be_a_store(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnwritable) as caught:
        Store(tmp_path / "file" / "images").begin("kernel")
    assert caught.value.code == "STORE_UNWRITABLE"


def test_free_space_is_told_before_the_directory_exists(tmp_path):
    assert Store(tmp_path / "not" / "yet").free() > 0


def test_facts_are_immutable(store):
    with pytest.raises(dataclasses.FrozenInstanceError):
        FACTS.pid = 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_image_of_another_user_is_not_ours(store):
    image = publish(store)
    os.chown(image.path, 54321, 54321)
    with pytest.raises(ImageNotFound, match="another user"):
        store.get(image.id)
    assert store.images() == []
