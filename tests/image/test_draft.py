"""An image being written: what is hashed meanwhile, and what is left of it."""

from __future__ import annotations

import os
import threading

import pytest
from blake3 import blake3
from images import FACTS, FILES

from jupyter_gpu_ckpt.errors import StoreUnwritable
from jupyter_gpu_ckpt.image import verify
from jupyter_gpu_ckpt.image.encryption import Vault
from jupyter_gpu_ckpt.image.manifest import FileEntry
from jupyter_gpu_ckpt.image.store import Store

PAGES = bytes(range(256)) * (3 * verify.BLOCK // 256) + bytes(1 << 20) + b"the end"


def written(draft, *, fails: bool = False) -> None:
    """Write as CRIU does, while the pages are hashed."""
    with draft.hashing_pages(lambda: None):
        with open(draft.criu_directory / "pages-1.img", "wb", buffering=0) as file:
            for start in range(0, len(PAGES), 1 << 20):
                file.write(PAGES[start : start + (1 << 20)])
        for name, content in FILES.items():
            if name != "pages-1.img":
                (draft.criu_directory / name).write_bytes(content)
        if fails:
            raise KeyError


@pytest.fixture
def read_again(monkeypatch) -> list[str]:
    """The names of files that are hashed when an image is published."""
    names, digest = [], verify._digest

    def noted(path, *arguments, **options):
        names.append(path.name)
        return digest(path, *arguments, **options)

    monkeypatch.setattr(verify, "_digest", noted)
    return names


def test_pages_are_hashed_once_and_the_manifest_is_that_of_the_files(store, read_again):
    draft = store.begin(FACTS.kernel_id)
    written(draft)
    image = draft.publish(FACTS)
    assert "pages-1.img" not in read_again
    assert set(read_again) == FILES.keys() - {"pages-1.img"}
    assert image.manifest.files == verify.entries(image.path)
    assert image.manifest.files["criu/pages-1.img"] == FileEntry(len(PAGES), blake3(PAGES).hexdigest())
    store.check(image)


def test_pages_that_have_grown_since_are_hashed_as_they_are(store, read_again, monkeypatch):
    draft = store.begin(FACTS.kernel_id)
    monkeypatch.setattr(verify._Hashing, "size", lambda self: verify.BLOCK + (self.bytes > 0))
    written(draft)
    image = draft.publish(FACTS)
    assert "pages-1.img" in read_again
    store.check(image)


def test_after_a_dump_that_failed_nothing_is_left_and_the_next_draft_knows_nothing(store, read_again):
    draft = store.begin(FACTS.kernel_id)
    with pytest.raises(KeyError):
        written(draft, fails=True)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpu-ckpt-pages")]
    (draft.criu_directory / "pages-1.img").write_bytes(b"other pages")
    image = draft.publish(FACTS)
    assert "pages-1.img" in read_again
    store.check(image)


def test_an_error_of_the_disk_is_the_store_s(store, monkeypatch):
    def unreadable(*_):
        raise OSError(5, "Input/output error")

    draft = store.begin(FACTS.kernel_id)
    monkeypatch.setattr(verify, "_read_block", unreadable)
    with pytest.raises(StoreUnwritable, match="Input/output error"):
        written(draft)
    draft.discard()
    assert not [name for name in os.listdir(store.root) if FACTS.kernel_id in name]


def test_pages_of_an_encrypted_image_are_hashed_as_they_are_stored(store, tmp_path, monkeypatch, read_again):
    monkeypatch.setenv("KEY_OF_IMAGES", "0f" * 32)
    encrypting = Store(store.root, store.keys, vault=Vault("env:KEY_OF_IMAGES", tmp_path))
    draft = encrypting.begin(FACTS.kernel_id)
    written(draft)
    image = draft.publish(FACTS)
    assert "pages-1.img" in read_again
    encrypting.check(image)
