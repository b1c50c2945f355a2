"""The manifest's format: what is written follows the schema, what is read is checked whatever it says of itself."""

from __future__ import annotations

import importlib.resources
import json

import jsonschema_rs
import pytest
from images import FACTS, publish

from jupyter_gpu_ckpt.errors import ImageForged, ImageFormat
from jupyter_gpu_ckpt.image import manifest as manifest_module
from jupyter_gpu_ckpt.image import verify
from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.manifest import VERSION, Manifest, safe_name
from jupyter_gpu_ckpt.image.store import Store

SCHEMA = json.loads(importlib.resources.files("jupyter_gpu_ckpt").joinpath("image/manifest.schema.json").read_text())
HASH = "0" * 64
STORED = {"bytes": 1, "blake3": HASH}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "images", Keyring(tmp_path / "keys"))


def written(store) -> dict:
    return json.loads((publish(store).path / "manifest.json").read_text())


def test_what_is_written_follows_the_schema(store):
    jsonschema_rs.validator_for(SCHEMA).validate(written(store))
    assert SCHEMA["properties"]["version"]["const"] == VERSION == 1
    assert set(SCHEMA["properties"]) == set(written(store))


HOSTILE = {
    "no object": "[]",
    "nothing": "",
    "half": '{"version": 1',
    "a name twice": '{"version": 1, "version": 1}',
    "deep": "[" * 100_000,
    "a version that is true": {"version": True},
    "no id": {"id": ...},
    "an id that is no text": {"id": 1},
    "a pid below zero": {"pid": -1},
    "a pid that is true": {"pid": True},
    "a pid beyond all bounds": {"pid": 2**63},
    "pipes of text": {"pipes": ["1"]},
    "a time that is none": {"created": float("nan")},
    "a time without end": {"created": float("inf")},
    "memory below zero": {"device_bytes": {"GPU-1": -1}},
    "files in a list": {"files": []},
    "a file above": {"files": {"../x": {"bytes": 1, "blake3": HASH}}},
    "a file above, later": {"files": {"criu/../../x": {"bytes": 1, "blake3": HASH}}},
    "an absolute file": {"files": {"/etc/passwd": {"bytes": 1, "blake3": HASH}}},
    "a hidden file": {"files": {".ssh": {"bytes": 1, "blake3": HASH}}},
    "a file of two spellings": {"files": {"criu//x": {"bytes": 1, "blake3": HASH}}},
    "a file that is a directory": {"files": {"criu/": {"bytes": 1, "blake3": HASH}}},
    "a file without a name": {"files": {"": {"bytes": 1, "blake3": HASH}}},
    "a file with a zero": {"files": {"a\0b": {"bytes": 1, "blake3": HASH}}},
    "a file with a line end": {"files": {"a\nb": {"bytes": 1, "blake3": HASH}}},
    "a file with a backslash": {"files": {"..\\x": {"bytes": 1, "blake3": HASH}}},
    "a long name": {"files": {"x" * 256: {"bytes": 1, "blake3": HASH}}},
    "a deep name": {"files": {"a/" * 5 + "x": {"bytes": 1, "blake3": HASH}}},
    "a name half a character": {"files": {"\ud800" * 300: {"bytes": 1, "blake3": HASH}}},
    "the manifest itself": {"files": {"manifest.json": {"bytes": 1, "blake3": HASH}}},
    "the seal": {"files": {"manifest.mac": {"bytes": 1, "blake3": HASH}}},
    "a claim": {"files": {"claim.json": {"bytes": 1, "blake3": HASH}}},
    "a lease": {"files": {"lease/1": {"bytes": 1, "blake3": HASH}}},
    "a size below zero": {"files": {"x": {"bytes": -1, "blake3": HASH}}},
    "a size that is none": {"files": {"x": {"bytes": 1.5, "blake3": HASH}}},
    "a size beyond all bounds": {"files": {"x": {"bytes": 10**400, "blake3": HASH}}},
    "a size alone": {"files": {"x": 1}},
    "no hash": {"files": {"x": {"bytes": 1}}},
    "an empty hash": {"files": {"x": {"bytes": 1, "blake3": ""}}},
    "a hash of another kind": {"files": {"x": {"bytes": 1, "blake3": "zz" * 32}}},
    "content in a version that has none": {"version": 3, "files": {"x": {**STORED, "raw": STORED}}},
    "content without a hash": {"version": 4, "files": {"x": {**STORED, "raw": {"bytes": 1}}}},
    "content that is none": {"version": 4, "files": {"x": {**STORED, "raw": None}}},
    "content of content": {"version": 4, "files": {"x": {**STORED, "raw": {**STORED, "raw": STORED}}}},
    "content without what is stored": {"version": 4, "files": {"x": {"raw": STORED}}},
    "more than a hash": {"files": {"x": {"bytes": 1, "blake3": HASH, "path": "/etc/passwd"}}},
}


@pytest.mark.parametrize("damage", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_refused_though_it_is_sealed(store, damage):
    """Forty and more: what a parser must not believe even from somebody who holds the key."""
    image = publish(store)
    if isinstance(damage, dict):
        document = {**json.loads(FACTS.to_json()), "id": image.id, **damage}
        damage = json.dumps({name: value for name, value in document.items() if value is not ...})
    (image.path / "manifest.json").write_text(damage)
    verify.seal(image.path, store.keys.current())
    with pytest.raises(ImageFormat):
        store.get(image.id)
    with pytest.raises(ImageFormat):
        store.check(image)
    assert store.images() == []
    assert set(store.damaged()) == {image.id}


def test_more_files_than_any_image_has(monkeypatch):
    document = json.loads(FACTS.to_json())
    monkeypatch.setattr(manifest_module, "MOST_FILES", 10)
    document["files"] = {str(number): {"bytes": 1, "blake3": HASH} for number in range(11)}
    with pytest.raises(ImageFormat, match="too many"):
        Manifest.from_json(json.dumps(document), FACTS.id)


def test_the_same_text_is_parsed_once(monkeypatch):
    """Not one that is refused, and not a large one, which would stay in memory."""
    text = FACTS.to_json().encode()
    assert Manifest.from_json(text, FACTS.id) is Manifest.from_json(bytes(bytearray(text)), FACTS.id)
    for _ in range(2):
        with pytest.raises(ImageFormat) as refused:
            Manifest.from_json(text[:-1], "another")
        assert refused.value.details["image"] == "another"
    monkeypatch.setattr(manifest_module, "_CACHED_BYTES", len(text) - 1)
    large = Manifest.from_json(text, FACTS.id)
    assert large == FACTS
    assert large is not Manifest.from_json(text, FACTS.id)


def test_a_manifest_larger_than_any(store, monkeypatch):
    image = publish(store)
    with (image.path / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: nobody may read it all
    with pytest.raises(ImageFormat):
        store.get(image.id)
    monkeypatch.setattr(manifest_module, "MOST_BYTES", 10)
    with pytest.raises(ImageFormat, match="too large"):
        Manifest.from_json(FACTS.to_json(), FACTS.id)


@pytest.mark.parametrize("version", [0, 2, 3, 4, 99, -1, 1.0, "1", None, "x" * 1000])
def test_an_image_of_another_version_is_refused_by_name(store, version):
    image = publish(store)
    facts = json.loads((image.path / "manifest.json").read_text())
    (image.path / "manifest.json").write_text(json.dumps({**facts, "version": version}))
    verify.seal(image.path, store.keys.current())
    for refused in (lambda: store.get(image.id), lambda: store.check(image)):
        with pytest.raises(ImageFormat) as caught:
            refused()
        assert caught.value.code == "IMAGE_FORMAT"
        assert f"format {str(version)[:40]}; this release reads format 1" in caught.value.message
        assert "release that made it" in caught.value.hint
        assert caught.value.details["version"] == version
    assert store.images() == []


def test_an_image_without_a_seal_can_be_vouched_for(store):
    image = publish(store)
    (image.path / "manifest.mac").unlink()
    with pytest.raises(ImageForged) as caught:
        store.check(image)
    assert "gpu-ckpt seal" in caught.value.hint
    assert store.seal(image) == image
    store.check(store.get(image.id))


@pytest.mark.parametrize("name", ["pages-1.img", "criu/pages-1.img", "criu/fs/ghost-file-1.img", "session.json", "ä b"])
def test_names_that_can_be(name):
    assert safe_name(name)
