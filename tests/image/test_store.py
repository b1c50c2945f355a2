"""The store: atomic publishing, one holder at a time, clear errors."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from blake3 import blake3
from images import FACTS

from jupyter_gpu_ckpt.errors import (
    ImageBusy,
    ImageDamaged,
    ImageFormat,
    ImageNotFound,
    NoSpace,
    StoreShared,
    StoreUnwritable,
)
from jupyter_gpu_ckpt.image import draft as draft_module
from jupyter_gpu_ckpt.image import layout
from jupyter_gpu_ckpt.image import store as store_module
from jupyter_gpu_ckpt.image.layout import MANIFEST, SEAL
from jupyter_gpu_ckpt.image.manifest import FileEntry, Manifest
from jupyter_gpu_ckpt.image.store import Store


def publish(store: Store, content: bytes = b"pages", created: float = FACTS.created):
    draft = store.begin(FACTS.kernel_id)
    (draft.criu_directory / "pages-1.img").write_bytes(content)
    (draft.criu_directory / "pages-1.img").chmod(0o644)
    return draft.publish(dataclasses.replace(FACTS, created=created))


def test_a_published_image_is_found_whole_and_private(store):
    image = publish(store)
    (found,) = store.images()
    assert found == image
    (entry,) = found.manifest.files.items()
    assert entry == ("criu/pages-1.img", FileEntry(5, blake3(b"pages").hexdigest()))
    assert found.manifest.bytes == 5
    store.check(found)
    assert store.root.stat().st_mode & 0o777 == 0o700
    for path in [image.path, *image.path.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_images_of_one_second_are_listed_in_the_order_of_their_creation(store):
    published = [publish(store, created=1 + number / 10).id for number in range(10)]
    assert [image.id for image in store.images()] == published


def test_a_draft_is_no_image_and_leaves_nothing_when_discarded(store):
    draft = store.begin("kernel")
    assert store.images() == []
    draft.discard()
    draft.discard()
    assert list(store.root.iterdir()) == []


def test_the_manifest_survives_json_and_refuses_what_it_does_not_know(store):
    manifest = publish(store).manifest
    assert Manifest.from_json(manifest.to_json(), manifest.id) == manifest
    data = json.loads(manifest.to_json())
    with pytest.raises(ImageFormat, match="format 99") as caught:
        Manifest.from_json(json.dumps({**data, "version": 99}), manifest.id)
    assert caught.value.details["version"] == 99
    for damaged in ("", "[]", "{}", manifest.to_json()[:-20], json.dumps({"version": manifest.version})):
        with pytest.raises(ImageFormat):
            Manifest.from_json(damaged, manifest.id)
    assert Manifest.from_json(json.dumps({**data, "later": 1}), manifest.id) == manifest


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
    with pytest.raises(ImageDamaged) as caught:
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
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()

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
    layout.mark(store.root / "dead", layout.ASLEEP).touch()  # its kernel was to sleep in it, a save point
    assert store.sweep() == 1
    assert [path for path in store.root.iterdir() if "dead" in path.name] == []
    assert living.path.exists()
    living.discard()


def test_a_crash_between_writing_and_renaming_leaves_no_image(store, monkeypatch):
    """The manifest is written before the rename; whatever fails after it, there is a draft and not an image."""
    draft = store.begin("kernel")
    flush = draft_module.flush
    monkeypatch.setattr(draft_module, "flush", lambda path: flush(path) if path.is_file() else _full())
    with pytest.raises(NoSpace):
        draft.publish(FACTS)
    assert store.images() == []
    draft.discard()


def test_a_rename_that_may_not_last_is_withdrawn(store, monkeypatch):
    """The last flush fails: the caller keeps the kernel, so no image of it may be left."""
    draft = store.begin("kernel")
    flush = draft_module.flush
    monkeypatch.setattr(draft_module, "flush", lambda path: _full() if path == store.root else flush(path))
    with pytest.raises(NoSpace):
        draft.publish(FACTS)
    assert store.images() == []
    assert draft.path.is_dir()
    draft.discard()
    assert list(store.root.iterdir()) == []


def test_a_rename_that_can_not_be_withdrawn_is_discarded(store, monkeypatch):
    draft = store.begin("kernel")
    flush, rename = draft_module.flush, type(store.root).rename
    monkeypatch.setattr(draft_module, "flush", lambda path: _full() if path == store.root else flush(path))
    back = draft.path
    monkeypatch.setattr(
        type(store.root), "rename", lambda self, target: _full() if target == back else rename(self, target)
    )
    with pytest.raises(NoSpace):
        draft.publish(FACTS)
    draft.discard()
    assert list(store.root.iterdir()) == []


def _full():
    raise OSError(28, "No space left on device")


def test_a_place_that_cannot_be_a_store(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnwritable) as caught:
        Store(tmp_path / "file" / "images").begin("kernel")
    assert caught.value.code == "STORE_UNWRITABLE"


def test_a_store_that_is_a_file(tmp_path):
    (tmp_path / "images").write_text("mine")
    with pytest.raises(StoreUnwritable, match="it is a file") as caught:
        Store(tmp_path / "images").prepare()
    assert (caught.value.code, bool(caught.value.hint)) == ("STORE_UNWRITABLE", True)
    assert (tmp_path / "images").read_text() == "mine"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_directory_that_others_can_enter_is_refused_and_left_as_it_is(tmp_path, mode):
    shared = tmp_path / "home"
    shared.mkdir()
    shared.chmod(mode)
    (shared / ".draft-of-somebody").mkdir()
    with pytest.raises(StoreShared, match="other users") as caught:
        Store(shared).begin("kernel")
    assert "chmod 700" in caught.value.hint
    assert shared.stat().st_mode & 0o7777 == mode
    assert Store(shared).sweep() == 0
    assert [path.name for path in shared.iterdir()] == [".draft-of-somebody"]
    Store(shared / "images").prepare()


def test_a_private_directory_of_the_user_is_taken_as_it_is(tmp_path):
    (tmp_path / "images").mkdir(mode=0o700)
    publish(Store(tmp_path / "images"))


def test_a_damaged_image_can_be_recognized_and_removed(store):
    image, whole = publish(store, b"12345"), publish(store)
    (image.path / MANIFEST).write_text("{")
    assert [found.id for found in store.images()] == [whole.id]
    assert [(id, error.code) for id, error in store.damaged().items()] == [(image.id, "IMAGE_FORMAT")]
    with image.lease(), pytest.raises(ImageBusy):
        store.remove_damaged(image.id)
    assert store.remove_damaged(image.id) == 5 + 1 + (whole.path / SEAL).stat().st_size
    assert store.damaged() == {}
    with pytest.raises(ImageNotFound):
        store.remove_damaged(image.id)
    (whole.path / MANIFEST).unlink()
    assert set(store.damaged()) == {whole.id}
    (whole.path / SEAL).unlink()
    assert store.remove_damaged(whole.id) == 5
    assert list(store.root.iterdir()) == []


def test_a_removal_under_the_lease_cannot_be_overtaken(store, monkeypatch):
    """The next process with the lease finds no image, and leaves no lock file behind."""
    image = publish(store)
    rmtree, met = store_module.shutil.rmtree, []

    def looked_at(path, **options):
        with pytest.raises(ImageBusy), image.lease():
            pass
        met.append(path)
        rmtree(path, **options)

    monkeypatch.setattr(store_module.shutil, "rmtree", looked_at)
    with image.lease():
        assert store.remove(image, leased=True) == 5
    assert len(met) == 1
    with pytest.raises(ImageNotFound), image.lease():
        pass
    assert not list(store.root.iterdir())


SWEEPER = """
import sys
from pathlib import Path
from jupyter_gpu_ckpt.image.store import Store
sys.stdin.readline()
print(Store(Path(sys.argv[1])).sweep())
"""


def test_a_removal_waits_for_a_restore_that_has_just_been_done(store):
    """A kernel runs cells, and may delete the save point that it went back to, just before its restore has ended."""
    image = publish(store)
    restore = image.lease()
    threading.Timer(0.3, restore.release).start()
    with pytest.raises(ImageBusy):
        store.remove(image)
    store.remove(image, timeout=30.0)
    assert store.images() == []


def test_several_sweeps_at_the_same_moment_remove_each_draft_once(store):
    store.prepare()
    for number in range(300):
        (store.root / f".draft-{number}" / "criu").mkdir(parents=True)
    argv = [sys.executable, "-c", SWEEPER, str(store.root)]
    sweepers = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for sweeper in sweepers:
        sweeper.stdin.write("\n")
        sweeper.stdin.flush()
    counts = [int(sweeper.communicate(timeout=60)[0]) for sweeper in sweepers]
    assert [sweeper.returncode for sweeper in sweepers] == [0, 0, 0]
    assert sum(counts) == 300
    assert list(store.root.iterdir()) == []


def test_a_sweep_that_comes_upon_a_removal_does_not_disturb_it(store, monkeypatch):
    image = publish(store)
    rmtree = store_module.shutil.rmtree

    def swept_first(path, **options):
        monkeypatch.setattr(store_module.shutil, "rmtree", rmtree)
        assert store.sweep() == 1
        rmtree(path, **options)

    monkeypatch.setattr(store_module.shutil, "rmtree", swept_first)
    assert store.remove(image) == 5
    assert not list(store.root.iterdir())


def test_free_space_is_known_before_the_directory_exists(tmp_path):
    assert Store(tmp_path / "not" / "yet").free() > 0


def test_facts_are_immutable(store):
    with pytest.raises(dataclasses.FrozenInstanceError):
        FACTS.pid = 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: run the tests as root too")
def test_the_image_of_another_user_is_not_ours(store):
    image = publish(store)
    os.chown(image.path, 54321, 54321)
    with pytest.raises(ImageNotFound, match="another user"):
        store.get(image.id)
    assert store.images() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere; tests/hub/test_others_images.py has this")
def test_a_link_to_an_unreadable_directory_is_passed_over(store, tmp_path):
    closed = tmp_path / "closed"
    (closed / "inside").mkdir(parents=True)
    store.prepare()
    (store.root / "link").symlink_to(closed / "inside")
    closed.chmod(0)
    try:
        assert store.images() == []
        assert store.damaged() == {}
    finally:
        closed.chmod(0o700)


def test_a_sweep_removes_the_locks_whose_drafts_are_gone(store):
    """Of a writer that was killed just after the rename, or to which the disk refused the removal."""
    published = publish(store)
    left = store.root / f".draft-{published.id}.lock"
    left.touch()
    writing = store.begin("kernel")
    store.sweep()
    assert not left.exists()
    assert sorted(path.name for path in store.root.glob(".draft-*")) == [writing.path.name, f"{writing.path.name}.lock"]
    writing.discard()
    store.check(published)


@pytest.mark.parametrize("broken_off", ["manifest.json", "manifest.mac"])
def test_an_interrupted_seal_can_be_repeated(store, monkeypatch, broken_off):
    image = publish(store)
    replace = Path.replace

    def killed(draft, target):
        if target.name == broken_off:
            raise KeyboardInterrupt
        return replace(draft, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "replace", killed)
        patched.setattr(Path, "unlink", lambda *_, **__: None)  # nobody cleans up after a process that is killed
        store.seal(image)
    assert list(image.path.glob(f".{broken_off}-*"))
    store.check(store.seal(store.get(image.id)))
    assert not list(image.path.glob(".*"))
