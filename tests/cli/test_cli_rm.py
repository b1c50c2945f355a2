"""``jupyter gpu-ckpt rm`` of images that cannot be read: they are listed, and can be removed."""

from __future__ import annotations

import fcntl
import json
import os

import pytest
from test_cli import Owner, Site, site  # noqa: F401 - the fixture

from jupyter_gpu_ckpt.image.layout import MANIFEST

pytestmark = pytest.mark.timeout(180)


def asleep(site: Site) -> tuple[str, Owner]:  # noqa: F811
    """The image of a kernel that sleeps, and its owner."""
    owner = site.owner()
    return owner.ask("checkpoint")["image"], owner


def test_a_damaged_image_is_listed_and_removed(site: Site):  # noqa: F811
    id, owner = asleep(site)
    owner.end()
    (site.images / id / MANIFEST).write_text("{")
    assert [(image["id"], image["code"]) for image in site.json("list")["damaged"]] == [(id, "IMAGE_FORMAT")]
    assert f"{id} " in site.command("list").stdout
    assert site.error("inspect", id)[1]["code"] == "IMAGE_FORMAT"
    with (site.images / f".{id}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert site.error("rm", id)[1]["code"] == "IMAGE_BUSY", "somebody is restoring or removing it"
    removed = site.json("rm", id)["removed"]
    assert removed[id] > 1_000_000
    assert not (site.images / id).exists()
    assert site.json("list")["damaged"] == []


def test_a_damaged_image_that_a_kernel_sleeps_on_needs_force(site: Site):  # noqa: F811
    id, _ = asleep(site)
    (site.images / id / MANIFEST).unlink()
    status, error = site.error("rm", id)
    assert (status, error["code"]) == (66, "IMAGE_BUSY")
    assert "--force" in error["hint"]
    assert set(site.json("rm", "--force", id)["removed"]) == {id}


def test_an_image_of_a_newer_release_needs_force(site: Site):  # noqa: F811
    id, owner = asleep(site)
    owner.end()
    manifest = site.images / id / MANIFEST
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 99}))
    status, error = site.error("rm", id)
    assert (status, error["code"]) == (66, "IMAGE_BUSY")
    assert "format 99" in error["message"]
    assert set(site.json("rm", "--force", id)["removed"]) == {id}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_damaged_image_of_another_user_stays(site: Site):  # noqa: F811
    id, owner = asleep(site)
    owner.end()
    (site.images / id / MANIFEST).write_text("{")
    os.chown(site.images / id, 54321, 54321)
    for force in ([], ["--force"]):
        status, error = site.error("rm", id, *force)
        assert (status, error["code"]) == (66, "IMAGE_NOT_FOUND")
    assert (site.images / id).is_dir()
