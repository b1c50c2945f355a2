"""Encrypted images: only the right key opens them, nothing of them is plain, and no chunk can be moved."""

from __future__ import annotations

import contextlib
import os
import random
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from images import publish

from jupyter_gpu_ckpt.errors import ImageBusy, ImageDamaged, KeyUnusable, NoMemory, StoreShared
from jupyter_gpu_ckpt.image import encryption
from jupyter_gpu_ckpt.image.encryption import CHUNK, TAG, Cipher, PlainDirectory, Secret, Vault, secret
from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.store import Store

KEY = "ab" * 32
CANARY = b"canary-" + os.urandom(8).hex().encode()


@pytest.fixture
def vault(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY_OF_IMAGES", KEY)
    (tmp_path / "memory").mkdir()
    return Vault("env:KEY_OF_IMAGES", tmp_path / "memory")


@pytest.fixture
def store(tmp_path, vault):
    return Store(tmp_path / "images", Keyring(tmp_path / "keys"), vault)


@pytest.fixture
def cipher():
    return Cipher(Secret("id", bytes(32)), bytes(32))


def plain_files(vault) -> list[str]:
    return [path.name for path in vault.base.rglob("*") if path.is_file()]


def test_an_encrypted_image_holds_nothing_plain_and_comes_back(store, vault):
    files = {"pages-1.img": CANARY * 300_000, "core-1.img": CANARY, "inventory.img": b""}
    image = publish(store, files)
    for path in image.path.rglob("*"):
        if path.is_file():
            assert CANARY not in path.read_bytes(), path
    assert plain_files(vault) == []
    store.check(image)
    Store(store.root, store.keys).check(image)  # needs no key
    parameters = image.manifest.encryption
    assert parameters["algorithm"] == "aes-256-gcm"
    assert KEY not in image.manifest.to_json()
    with store.readable(store.get(image.id)) as readable:
        directory = readable.criu_directory
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == files
        assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(directory.parent.stat().st_mode) == 0o700
    assert plain_files(vault) == []


def test_one_that_is_not_encrypted_is_used_where_it_is(store):
    image = publish(Store(store.root, store.keys))
    assert image.manifest.encryption is None
    with store.readable(image) as readable:
        assert (readable.criu_directory, readable.encrypted) == (image.criu_directory, False)


def test_without_the_key_or_with_another(store, vault, monkeypatch):
    image = publish(store)
    with pytest.raises(KeyUnusable, match="another key") as caught, Store(store.root, store.keys).readable(image):
        pass
    assert "encryption_key" in caught.value.hint
    monkeypatch.setenv("KEY_OF_IMAGES", "cd" * 32)
    with pytest.raises(KeyUnusable, match="another key"), store.readable(image):
        pass
    for unknown in ({"algorithm": "rot13"}, {"chunk": 1}):
        parameters = {**image.manifest.encryption, **unknown}
        with (
            pytest.raises(KeyUnusable, match="does not know"),
            store.readable(replace(image, manifest=replace(image.manifest, encryption=parameters))),
        ):
            pass
    assert plain_files(vault) == []


def test_two_images_of_the_same_content_share_nothing(store):
    one, other = (publish(store, {"pages-1.img": bytes(1000)}) for _ in range(2))
    contents = {(image.criu_directory / "pages-1.img").read_bytes() for image in (one, other)}
    assert len(contents) == 2


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 9 * CHUNK + 5])
def test_every_size_comes_back(tmp_path, cipher, size):
    content = random.Random(size).randbytes(size)
    (tmp_path / "plain").write_bytes(content)
    cipher.encrypt(tmp_path / "plain", tmp_path / "stored", "name")
    assert (tmp_path / "stored").stat().st_size == size + TAG * max(1, -(-size // CHUNK))
    cipher.decrypt(tmp_path / "stored", tmp_path / "again", "name")
    assert (tmp_path / "again").read_bytes() == content


def _swap(stored: bytes) -> bytes:
    step = CHUNK + TAG
    return stored[step : 2 * step] + stored[:step] + stored[2 * step :]


TAMPER = {
    "a flipped bit": lambda stored: stored[:5] + bytes([stored[5] ^ 1]) + stored[6:],
    "a chunk less": lambda stored: stored[: 2 * (CHUNK + TAG)],
    "the last chunk only": lambda stored: stored[2 * (CHUNK + TAG) :],
    "a byte less": lambda stored: stored[:-1],
    "a byte more": lambda stored: stored + b"x",
    "chunks in another order": _swap,
    "a chunk twice": lambda stored: stored[: CHUNK + TAG] * 3,
    "nothing": lambda stored: b"",
}


@pytest.mark.parametrize("tamper", TAMPER.values(), ids=TAMPER)
def test_what_was_tampered_with_does_not_decrypt(tmp_path, cipher, tamper):
    (tmp_path / "plain").write_bytes(random.Random(1).randbytes(2 * CHUNK + 100))
    cipher.encrypt(tmp_path / "plain", tmp_path / "stored", "name")
    (tmp_path / "stored").write_bytes(tamper((tmp_path / "stored").read_bytes()))
    with pytest.raises(ImageDamaged):
        cipher.decrypt(tmp_path / "stored", tmp_path / "again", "name")


def test_a_file_under_another_name_does_not_decrypt(tmp_path, cipher):
    (tmp_path / "plain").write_bytes(b"x")
    cipher.encrypt(tmp_path / "plain", tmp_path / "stored", "name")
    with pytest.raises(ImageDamaged):
        cipher.decrypt(tmp_path / "stored", tmp_path / "again", "another")


def test_the_three_places_a_key_can_come_from(tmp_path, monkeypatch):
    (tmp_path / "key").write_text(KEY + "\n")
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("KEY_OF_IMAGES", KEY)
    sources = [f"file:{tmp_path / 'key'}", "env:KEY_OF_IMAGES", f"command:cat {tmp_path / 'key'}"]
    assert len({secret(source) for source in sources}) == 1
    assert secret(sources[0]).key == bytes.fromhex(KEY)
    assert KEY not in repr(secret(sources[0]))


@pytest.mark.parametrize(
    "source",
    [
        "",
        "password",
        "file:/nowhere",
        "env:NOT_SET_AT_ALL",
        "env:SHORT",
        "env:WORDS",
        "command:false",
        "command:/nowhere",
        "command:echo no key",
        "file:{shared}",
    ],
)
def test_a_key_that_cannot_be_had(tmp_path, monkeypatch, source):
    monkeypatch.setenv("SHORT", "ab" * 31)
    monkeypatch.setenv("WORDS", "correct horse battery staple")
    (tmp_path / "shared").write_text(KEY)
    (tmp_path / "shared").chmod(0o644)
    with pytest.raises(KeyUnusable) as caught:
        secret(source.format(shared=tmp_path / "shared"))
    assert "correct horse" not in str(caught.value.as_dict())


def test_no_checkpoint_is_begun_without_the_key(store, monkeypatch):
    monkeypatch.delenv("KEY_OF_IMAGES")
    with pytest.raises(KeyUnusable):
        store.begin("kernel")


def test_a_discarded_draft_leaves_nothing_plain(store, vault):
    draft = store.begin("kernel")
    (draft.criu_directory / "pages-1.img").write_bytes(CANARY * 10_000)
    assert vault.base in draft.criu_directory.parents
    assert draft.size() >= len(CANARY) * 10_000
    draft.discard()
    assert plain_files(vault) == []
    assert list(store.root.iterdir()) == []


def test_plain_files_of_the_dead_are_swept_and_no_others(store, vault):
    living = store.begin("kernel")
    (living.criu_directory / "pages-1.img").write_bytes(CANARY)
    dead = PlainDirectory(vault.base, "dead")
    (dead.path / "pages-1.img").write_bytes(CANARY)
    dead._lock.release()
    assert store.sweep() == 1
    assert (living.criu_directory / "pages-1.img").exists()
    assert not dead.path.exists()
    living.discard()


def test_a_place_in_memory_that_others_can_enter(store, vault):
    (vault.base / f"gpu-ckpt-plain-{os.geteuid()}").mkdir(mode=0o755)
    with pytest.raises(StoreShared, match="not this user's alone"):
        store.begin("kernel")
    assert [path for path in store.root.iterdir() if path.name != ".probe"] == []


def test_a_memory_that_is_full(store, monkeypatch, vault):
    image = publish(store)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(encryption.os, "pwrite", full)
    with pytest.raises(NoMemory, match="No space"), store.readable(image):
        pass
    assert plain_files(vault) == []


def test_what_a_dead_process_left_of_the_same_image_is_in_nobodys_way(store, vault):
    """Killed in the middle of a restore; the next one of that image may come before any sweep."""
    image = publish(store)
    dead = PlainDirectory(vault.base, image.id)
    (dead.path / "core-1.img").write_bytes(CANARY)
    dead._lock.release()
    with store.readable(image) as readable:
        assert CANARY not in (readable.criu_directory / "core-1.img").read_bytes()
    assert plain_files(vault) == []


def test_a_directory_that_could_not_be_made_leaves_nothing(store, vault, monkeypatch):
    publish(store)
    chmod = Path.chmod
    with monkeypatch.context() as patched:

        def full(path, mode):
            if path.parent.parent == vault.base:
                raise OSError(28, "No space left on device")
            chmod(path, mode)

        patched.setattr(Path, "chmod", full)
        with pytest.raises(NoMemory, match="No space"):
            PlainDirectory(vault.base, "one")
    assert list((vault.base / f"gpu-ckpt-plain-{os.geteuid()}").iterdir()) == []
    PlainDirectory(vault.base, "one").close()


def test_plain_files_that_another_process_uses_are_no_lack_of_space(vault):
    with contextlib.closing(PlainDirectory(vault.base, "one")) as held:
        with pytest.raises(ImageBusy):
            PlainDirectory(vault.base, "one")
        assert held.path.is_dir()
