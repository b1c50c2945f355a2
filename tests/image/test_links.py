"""Names that a dump made go with the image that needs them, and nothing else does, whatever a manifest says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from images import FACTS, publish

from jupyter_gpu_ckpt.image.links import remove_abandoned
from jupyter_gpu_ckpt.node.facts import file_facts


@pytest.fixture
def link(tmp_path) -> Path:
    (tmp_path / "kept").write_text("kept")
    path = tmp_path / "link_remap.7"
    path.hardlink_to(tmp_path / "kept")
    return path


def noted(path: Path, **more: Any) -> dict[str, Any]:
    """A fingerprint with the name of a link in it."""
    return {"files": {str(path): {**(file_facts(str(path)) or {}), "made": True, **more}}}


def test_the_link_goes_with_its_image_and_the_file_stays(store, link):
    store.remove(publish(store, fingerprint=noted(link)))
    assert not link.exists()
    assert (link.parent / "kept").read_text() == "kept"


def test_a_link_that_was_linked_once_more_is_still_the_images(store, link):
    image = publish(store, fingerprint=noted(link))
    (link.parent / "another").hardlink_to(link)
    store.remove(image)
    assert not link.exists()


def test_of_an_image_that_its_kernel_came_back_from_only_an_untouched_link_goes(store, link):
    image = publish(store, fingerprint=noted(link))
    store.generations.record_restored(FACTS.kernel_id, FACTS.generation)
    link.unlink()
    link.hardlink_to(link.parent / "kept")  # as the next dump would
    store.remove(image)
    assert link.exists()


@pytest.mark.parametrize("put", ["another file", "symbolic link", "directory"])
def test_what_is_no_link_of_the_dump_stays(store, link, put):
    image = publish(store, fingerprint=noted(link))
    link.unlink()
    if put == "directory":
        link.mkdir()
    elif put == "symbolic link":
        link.symlink_to(link.parent / "kept")
    else:
        link.write_text("of the user")
    store.remove(image)
    assert os.path.lexists(link)
    assert (link.parent / "kept").exists()


def test_only_names_that_a_dump_created_are_removed(store, link):
    """A manifest is not proved before its image is removed."""
    kept = link.parent / "kept"
    store.remove(publish(store, fingerprint=noted(kept)))
    store.remove(publish(store, fingerprint=noted(link, made=False)))
    assert kept.exists()
    assert link.exists()


@pytest.mark.parametrize("files", [None, 3, [], "x", {"/a/link_remap.1": 3}, {"/a/link_remap.1": {"made": True}}])
def test_an_image_with_nonsense_in_its_fingerprint_can_be_removed(store, files):
    store.remove(publish(store, fingerprint={"files": files}))
    assert store.images() == []


@pytest.mark.parametrize("journal", ["", "3", "[]", '{"/": 3}', '{"/": {}}', '{"/": {"inodes": 3, "there": []}}', None])
def test_a_journal_with_nonsense_removes_nothing(tmp_path, link, journal):
    path = tmp_path / "journal"
    if journal is not None:
        path.write_text(journal)
    remove_abandoned(path, [path], ())
    assert link.exists()


def test_a_file_that_another_dump_may_have_linked_keeps_its_links(tmp_path, link):
    noted = {str(tmp_path): {"inodes": [link.stat().st_ino], "there": []}}
    ours, others = tmp_path / "ours", tmp_path / "others"
    for journal in (ours, others):
        journal.write_text(json.dumps(noted))
    remove_abandoned(ours, [others], ())
    assert link.exists()
    remove_abandoned(ours, [], {str(link)})
    assert link.exists(), "an image needs it"
    remove_abandoned(ours, [], ())
    assert not link.exists()
