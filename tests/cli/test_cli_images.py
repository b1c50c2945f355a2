"""verify, check, seal, keys, prune, break-claim: their documents and exit statuses (`tests/cli` has their texts)."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from images import publish

from jupyter_gpu_ckpt import cli
from jupyter_gpu_ckpt.cli.images import _AGES, _SIZES, amount
from jupyter_gpu_ckpt.errors import ImageBusy
from jupyter_gpu_ckpt.image import layout
from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.server import models


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_GPU_CKPT_IMAGES", str(tmp_path / "images"))
    monkeypatch.setenv("JUPYTER_GPU_CKPT_KEYS", str(tmp_path / "keys"))
    return Store(tmp_path / "images", Keyring(tmp_path / "keys"))


@pytest.fixture
def run(capsys):
    def run(*arguments: str) -> tuple[int, dict, str]:
        """Exit status and document with ``--json``; then what people read."""
        status = cli.main([*arguments, "--json"])
        printed = capsys.readouterr()
        document = json.loads(printed.out)
        assert printed.err == ""
        if arguments[0] not in ("seal", "prune", "break-claim") and "--rotate" not in arguments:
            assert cli.main(list(arguments)) == status
            printed = capsys.readouterr()
        return status, document, printed.out + printed.err

    return run


def damage(image) -> None:
    (image.criu_directory / "core-1.img").write_bytes(b"CORE")


def test_verify(store, run):
    image = publish(store)
    status, document, _ = run("verify", image.id)
    assert (status, document["files"], document["bytes"]) == (0, 4, image.manifest.bytes)
    damage(image)
    status, document, _ = run("verify", image.id)
    assert (status, document["error"]["code"]) == (66, "IMAGE_DAMAGED")
    assert document["error"]["details"]["files"] == ["criu/core-1.img"]
    assert run("verify", "nothing")[:2][1]["error"]["code"] == "IMAGE_NOT_FOUND"


def test_check_names_every_image_and_what_is_wrong_with_it(store, run):
    assert run("check")[:2] == (0, {"images": [], "refused": None})
    good, damaged, unreadable = (publish(store, kernel_id=name) for name in ("a", "b", "c"))
    assert run("check")[0] == 0
    damage(damaged)
    (unreadable.path / "manifest.json").write_text("{")
    status, document, _ = run("check")
    assert status == 66
    found = {one["id"]: one["error"]["code"] if "error" in one else "ok" for one in document["images"]}
    assert found == {good.id: "ok", damaged.id: "IMAGE_DAMAGED", unreadable.id: "IMAGE_FORMAT"}


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o1777])
def test_a_directory_that_others_can_enter_is_named_and_nothing_is_done_with_it(store, run, mode):
    image = publish(store)
    store.root.chmod(mode)
    status, document, text = run("check")
    if mode & 0o1000:  # each user's own is below such a directory
        assert (status, document["images"], document["refused"]) == (0, [], None)
        return
    assert (status, document["refused"]["code"]) == (73, "STORE_SHARED")
    assert document["images"] == [{"id": image.id, "ok": True}]
    assert f"No kernel wakes from {store.root}" in text
    status, document, text = run("list")
    assert (status, document["refused"]["code"]) == (0, "STORE_SHARED")
    assert f"No kernel wakes from {store.root}" in text
    for command in ("match", "seal"):
        status, document, _ = run(command, image.id)
        assert (status, document["error"]["code"]) == (73, "STORE_SHARED")


def test_seal_vouches_for_what_is_there(store, run):
    image = publish(store)
    damage(image)
    assert run("seal", image.id)[:2] == (0, {"sealed": image.id})
    assert run("verify", image.id)[0] == 0


def test_keys_are_listed_and_rotated_without_losing_images(store, run):
    image = publish(store)
    first = store.keys.ids()
    _, document, text = run("keys")
    assert document == {"directory": str(store.keys.directory), "keys": first}
    assert store.keys.current().secret.hex() not in text
    assert run("keys", "--rotate")[0] == 0
    assert store.keys.ids()[0] == first[0]
    assert len(store.keys.ids()) == 2
    assert run("verify", image.id)[0] == 0


def test_prune_keeps_the_only_copy_of_a_sleeping_kernel(store, run):
    """One that no server has shut down is the kernel, however old it is."""
    session = {"session.json": json.dumps(SESSION).encode()}
    sleeping = publish(store, {"core-1.img": b"1", **session}, kernel_id=SESSION["kernel_id"], created=1.0)
    kept = [publish(store, {"core-1.img": b"12"}, kernel_id="k", created=time.time() - age) for age in (9000, 600, 0)]
    ids = [image.id for image in kept]
    assert run("prune", "--max-age", "2h", "--dry-run")[1] == {"removed": {ids[0]: 2}, "dry_run": True}
    assert run("prune", "--max-age", "2h")[1]["removed"] == {ids[0]: 2}
    assert run("prune", "--keep-last", "1")[1]["removed"] == {ids[1]: 2}
    assert run("prune", "--max-bytes", "0")[1]["removed"] == {ids[2]: 2}
    assert [image.id for image in store.images()] == [sleeping.id]
    sleeping.retire()
    assert list(run("prune", "--keep-last", "0")[1]["removed"]) == [sleeping.id]


def template_of(image, data) -> Path:
    """The file of a kernelspec that is a template of the image."""
    provisioner = {"provisioner_name": "gpu-ckpt-provisioner", "config": {"template": image.id}}
    spec = {"argv": ["python"], "display_name": "torch", "metadata": {"kernel_provisioner": provisioner}}
    directory = data / "kernels" / "torch"
    directory.mkdir(parents=True)
    (directory / "kernel.json").write_text(json.dumps(spec))
    return directory / "kernel.json"


def test_prune_keeps_the_image_of_a_template(store, run, tmp_path, monkeypatch):
    """Its kernelspec would show in every launcher, and start kernels without what they are to have."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    image = publish(store, {"core-1.img": b"1"}, kernel_id="template", created=1.0)
    other = publish(store, {"core-1.img": b"12"}, kernel_id="other", created=2.0)
    kernelspec = template_of(image, tmp_path / "data")
    assert list(run("prune", "--max-age", "1s")[1]["removed"]) == [other.id]
    for limit in (["--keep-last", "0"], ["--max-bytes", "0"]):
        assert run("prune", *limit)[1]["removed"] == {}
    kernelspec.unlink()
    assert list(run("prune", "--max-age", "1s")[1]["removed"]) == [image.id]


def test_the_image_of_a_template_is_neither_removed_nor_moved_by_the_way(store, run, tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    image = publish(store, {"core-1.img": b"1"}, kernel_id="template")
    template_of(image, tmp_path / "data")
    status, document, _ = run("rm", image.id)
    assert (status, document["error"]["code"]) == (66, "IMAGE_BUSY")
    assert "`jupyter gpu-ckpt template remove torch`" in document["error"]["hint"]
    assert "--force" in document["error"]["hint"]
    with pytest.raises(ImageBusy, match="template 'torch'"):
        models.remove(store, image, force=False)
    status, document, _ = run("push", image.id, str(tmp_path / "depot"))
    assert (status, document["error"]["code"]) == (66, "IMAGE_BUSY")
    assert cli.main(["push", image.id, str(tmp_path / "depot"), "--keep"]) == 0
    assert [each.id for each in store.images()] == [image.id]
    assert cli.main(["rm", "--force", image.id]) == 0
    assert store.images() == []


SESSION = {
    "kernel_id": "sleeper",
    "kernel_name": "python3",
    "runtime_dir": "/nowhere/kernel",
    "has_agent": True,
    "path": "/",
    "front": {},
}


def test_prune_passes_over_what_it_cannot_judge(store, run):
    """The directory of its kernel would be one that others can write to: whether it is the only copy, nobody knows."""
    image = publish(store, {"core-1.img": b"1"}, runtime_dir="/tmp/kernel")
    assert run("prune", "--keep-last", "0")[1]["removed"] == {}
    assert store.get(image.id)


def test_prune_passes_over_an_image_in_use(store, run):
    image = publish(store, {"core-1.img": b"1"})
    with image.lease():
        assert run("prune", "--keep-last", "0")[1]["removed"] == {}
    assert run("prune", "--keep-last", "0")[1]["removed"] == {image.id: 1}


@pytest.mark.parametrize(
    "arguments", [[], ["--max-age", "soon"], ["--max-bytes", "-1"], ["--max-bytes", "3 lots"], ["--keep-last", "-1"]]
)
def test_prune_refuses_limits_that_it_does_not_understand(store, run, arguments):
    status, document, _ = run("prune", *arguments)
    assert (status, document["error"]["code"]) == (64, "BAD_REQUEST")


AMOUNTS = [("0", 0), ("12", 12), ("2k", 2048), ("1.5G", 1.5 * 2**30), ("2GiB", 2**31), ("10 MB", 10 << 20)]


@pytest.mark.parametrize(("text", "number"), AMOUNTS)
def test_sizes_as_people_write_them(text, number):
    assert amount(text, _SIZES) == number
    assert amount("30d", _AGES) == 30 * 86400


def test_a_claim_can_be_broken(store, run):
    image = publish(store)
    with image.lease() as lease:
        lease.claim(os.getpid())
    assert run("break-claim", image.id)[1] == {"broken": True}
    assert run("break-claim", image.id)[1] == {"broken": False}
    assert not (image.path / layout.CLAIM).exists()
