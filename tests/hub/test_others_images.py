"""One user can neither see nor restore nor delete another's image, by whatever way."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from hub_user import HubUser


@pytest.fixture(scope="module")
def victim(ann: HubUser) -> tuple[HubUser, str, str]:
    """Ann, culled: her kernel sleeps in an image; its id and the kernel's."""
    ann.start()
    kernel_id = ann.open("secret.ipynb")["kernel"]["id"]
    ann.run(kernel_id, "secret = 'abracadabra'")
    ann.stop()
    (image,) = ann.images()
    return ann, image, kernel_id


@pytest.fixture(scope="module")
def intruder(bob: HubUser, victim) -> HubUser:
    """Bob, at work while ann sleeps."""
    bob.start()
    return bob


def contents(ann: HubUser) -> dict[str, tuple[int, int]]:
    """Every file of ann's images, its size and when it was changed."""
    files = (path for path in ann.account.images.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}


@pytest.fixture
def attack(victim, intruder):
    """The intruder, the victim and her image, which is as it was when the test ends."""
    ann, image, kernel_id = victim
    before = contents(ann)
    assert any(image in name for name in before)
    yield intruder, ann, image, kernel_id
    assert contents(ann) == before


def gpu_ckpt(user: HubUser, *arguments: str):
    """The intruder's command line."""
    return user.hub.run_as(user.account, [sys.executable, "-m", "jupyter_gpu_ckpt", *arguments])


def refused(reply) -> bool:
    """Not allowed, not there, or sent to the hub's own pages."""
    return reply.status_code in (403, 404, 424) or (
        reply.status_code == 302 and reply.headers["Location"].startswith("/hub/")
    )


def shell(user: HubUser, command: str):
    return user.hub.run_as(user.account, ["sh", "-c", command])


# -- by REST of the intruder's own server


def test_his_server_lists_none_of_hers(attack):
    bob, _, image, kernel_id = attack
    assert bob.get("gpu-ckpt/images") == []
    assert kernel_id not in bob.ask("GET", "api/kernels").text
    assert bob.ask("GET", f"gpu-ckpt/images/{image}").status_code == 404


@pytest.mark.parametrize(("method", "end"), [("DELETE", "?force=true"), ("POST", "/attach")])
def test_his_server_neither_deletes_nor_attaches_by_id(attack, method, end):
    bob, _, image, _ = attack
    assert bob.ask(method, f"gpu-ckpt/images/{image}{end}").status_code == 404


@pytest.mark.parametrize("up", ["../", "%2e%2e%2f", "..%2f", "%2f"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_his_server_follows_no_path(attack, method, up):
    bob, ann, image, _ = attack
    place = str(ann.account.images / image).lstrip("/")
    path = up * (1 if up == "%2f" else 9) + (place if up == "../" else place.replace("/", "%2f"))
    reply = bob.ask(method, f"gpu-ckpt/images/{path}?force=true")
    assert refused(reply), reply.text


def test_his_server_does_not_start_her_kernel_by_its_id(attack):
    bob, _, _, kernel_id = attack
    for verb in ("restore", "resume", "checkpoint", "protect"):
        assert bob.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/{verb}").status_code == 404


def test_a_link_in_his_own_directory_is_no_image(attack):
    bob, ann, image, _ = attack
    link = bob.account.images / image
    made = shell(bob, f"mkdir -p -m 700 {link.parent} && ln -s {ann.account.images / image} {link}")
    assert made.returncode == 0, made.stderr
    try:
        assert bob.get("gpu-ckpt/images") == []
        assert bob.ask("GET", f"gpu-ckpt/images/{image}").status_code == 404
        assert bob.ask("POST", f"gpu-ckpt/images/{image}/attach").status_code == 404
        assert bob.ask("DELETE", f"gpu-ckpt/images/{image}?force=true").status_code == 404
        assert gpu_ckpt(bob, "rm", "--force", image).returncode != 0
    finally:
        link.unlink()


def test_a_copy_that_root_made_for_him_is_not_his_to_wake(attack):
    """A backup restored to the wrong place: her seal is not his."""
    bob, ann, image, _ = attack
    copy = bob.account.images / image
    shell(bob, f"mkdir -p -m 700 {copy.parent}")
    shutil.copytree(ann.account.images / image, copy)
    try:
        assert bob.ask("GET", f"gpu-ckpt/images/{image}").status_code == 404, "it is root's still"
        for path in (copy, *copy.rglob("*")):
            os.chown(path, bob.account.uid, bob.account.uid)
        said = gpu_ckpt(bob, "verify", image)
        assert said.returncode != 0
        assert "IMAGE_FORGED" in said.stdout + said.stderr
    finally:
        shutil.rmtree(copy)


# -- by her server and the hub


def test_her_server_is_not_there_for_him(attack):
    bob, ann, image, _ = attack
    for method, path in (("GET", "images"), ("DELETE", f"images/{image}?force=true"), ("POST", "drain")):
        assert refused(bob.ask(method, f"gpu-ckpt/{path}", to=ann.path))


def test_the_hub_starts_her_server_for_him_neither_by_name_nor_by_a_named_one(attack):
    bob, ann, _, _ = attack
    for path in (f"users/{ann.account.name}/server", f"users/{ann.account.name}/servers/side"):
        for method in ("POST", "DELETE"):
            assert bob.hub.ask(method, path, token=bob.token).status_code in (403, 404)
    assert not ann.there()


def test_the_hub_gives_him_no_token_for_hers(attack):
    bob, ann, _, _ = attack
    for owner in (ann, bob):
        body = {"note": "mine", "scopes": [f"access:servers!user={ann.account.name}"]}
        reply = bob.hub.ask("POST", f"users/{owner.account.name}/tokens", token=bob.token, json=body)
        assert reply.status_code in (400, 403, 404), reply.text


def test_his_named_server_with_her_name_shows_his_own_images_alone(attack):
    bob, ann, image, _ = attack
    side = HubUser(bob.hub, bob.account, ann.account.name)
    side.start()
    try:
        assert image not in side.ask("GET", "gpu-ckpt/images").text
        assert side.ask("POST", f"gpu-ckpt/images/{image}/attach").status_code == 404
    finally:
        side.stop()


# -- by files and commands


def test_her_directories_are_closed_to_him(attack):
    bob, ann, image, _ = attack
    for place in (ann.account.home, ann.account.images, ann.account.images / image, ann.account.runtime):
        assert shell(bob, f"ls {place}").returncode != 0, place
    for command in ("cat", "rm -rf", "touch"):
        assert shell(bob, f"{command} {ann.account.images / image}/manifest.json").returncode != 0


def test_her_keys_and_generations_are_closed_to_him(attack):
    bob, ann, _, _ = attack
    keys = ann.account.images.parent / "keys"
    assert any(keys.rglob("*"))
    assert shell(bob, f"ls {keys}").returncode != 0


def test_her_lease_is_not_his_to_take(attack):
    bob, ann, image, _ = attack
    for name in (f".{image}.lock", f".{image}.retired", f".{image}.accepts"):
        assert shell(bob, f"touch {ann.account.images / name}").returncode != 0


@pytest.mark.parametrize("verb", [["verify"], ["inspect"], ["rm", "--force"], ["seal"], ["break-claim"]])
def test_his_command_line_gets_nowhere_with_her_directory(attack, verb):
    bob, ann, image, _ = attack
    command = [sys.executable, "-m", "jupyter_gpu_ckpt", *verb, image]
    said = bob.hub.run_as(bob.account, ["env", f"JUPYTER_GPU_CKPT_IMAGES={ann.account.images}", *command])
    assert said.returncode != 0
    assert "Traceback" not in said.stderr
    assert "abracadabra" not in said.stdout + said.stderr


def test_his_server_with_her_directory_as_its_own_serves_nothing_of_it(attack):
    bob, ann, image, _ = attack
    kernel_id = bob.open("probe.ipynb")["kernel"]["id"]
    code = f"""
import os, subprocess, sys
env = dict(os.environ, JUPYTER_GPU_CKPT_IMAGES={str(ann.account.images)!r})
command = [sys.executable, '-m', 'jupyter_gpu_ckpt', 'list', '--json']
done = subprocess.run(command, env=env, capture_output=True, text=True)
print({image!r} in done.stdout + done.stderr)
"""
    assert bob.run(kernel_id, code) == "False"


def test_her_kernel_is_whole_after_all_that(victim, intruder):
    ann, _, kernel_id = victim
    intruder.stop()
    ann.start()
    assert ann.run(kernel_id, "print(secret)") == "abracadabra"
    ann.stop()
