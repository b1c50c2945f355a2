"""Images pushed and pulled: to a directory, through a real OpenSSH server, through the S3 protocol."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import getpass
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.registry import register_implementation
from images import FACTS
from places import s3_server, sftp_server

from jupyter_gpu_ckpt.errors import (
    ImageBusy,
    ImageDamaged,
    ImageForged,
    ImageFormat,
    ImageNotFound,
    ImageStale,
    NoSpace,
    QuotaExceeded,
    RemoteFailed,
    RemoteUnsupported,
    StoreUnwritable,
)
from jupyter_gpu_ckpt.image import layout
from jupyter_gpu_ckpt.image.encryption import Vault
from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.quota import Quota, QuotaReservation
from jupyter_gpu_ckpt.image.store import Image, Store
from jupyter_gpu_ckpt.transfer import remote as remote_module
from jupyter_gpu_ckpt.transfer import remote_hashes
from jupyter_gpu_ckpt.transfer import storage as storage_module
from jupyter_gpu_ckpt.transfer.remote import Remote

pytestmark = pytest.mark.slow  # starts servers of S3 and SFTP

PART = 1 << 16


@pytest.fixture(scope="session")
def sftp(tmp_path_factory):
    with sftp_server(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(scope="session")
def s3(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@dataclass
class Place:
    """A URL images can be pushed to, and what it takes to get there."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)

    def remote(self) -> Remote:
        return Remote(self.url, workers=4, **self.options)


@pytest.fixture(params=["directory", "sftp", "s3"])
def place(request, tmp_path) -> Place:
    if request.param == "directory":
        return Place(f"file://{tmp_path}/shared")
    server = request.getfixturevalue(request.param)
    if request.param == "sftp":
        return Place(f"sftp://{getpass.getuser()}@127.0.0.1:{server['port']}{tmp_path}/far", server["options"])
    bucket = f"bucket-{os.urandom(6).hex()}"
    import s3fs

    s3fs.S3FileSystem(**server["options"]).mkdir(bucket)
    return Place(f"s3://{bucket}/images", server["options"])


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(remote_module, "PART", PART)


@pytest.fixture
def near(tmp_path) -> Store:
    """A store on one node; `far` is on another node of the same user, who has taken the keys along."""
    return Store(tmp_path / "near", Keyring(tmp_path / "keys"))


@pytest.fixture
def far(tmp_path, near) -> Store:
    return Store(tmp_path / "other", near.keys)


def publish(store: Store, kernel_id: str = "0123456789ab", generation: int = 1) -> Image:
    draft = store.begin(kernel_id)
    pages = random.Random(7).randbytes(5 * PART + 7)
    (draft.criu_directory / "pages-1.img").write_bytes(pages[: 2 * PART] + bytes(3 * PART) + pages)
    (draft.criu_directory / "core-1.img").write_bytes(b"core")
    (draft.criu_directory / "empty.img").write_bytes(b"")
    return draft.publish(replace(FACTS, kernel_id=kernel_id, generation=generation))


def content(image: Image) -> dict[str, bytes]:
    return {str(path.relative_to(image.path)): path.read_bytes() for path in image.path.rglob("*") if path.is_file()}


def test_there_and_back_again(place, near, far):
    image = publish(near)
    before, sizes = content(image), []
    remote = place.remote()
    assert remote.images() == []
    remote.push(image, remove_from=near, progress=sizes.append)
    assert sum(sizes) == image.manifest.bytes
    assert near.images() == [], "an image is in one place"
    assert remote.images() == [image.manifest]

    sizes.clear()
    arrived = place.remote().pull(image.id, far, progress=sizes.append)
    assert sum(sizes) == image.manifest.bytes
    assert content(arrived) == before
    far.check(arrived)
    assert {oct(path.stat().st_mode & 0o077) for path in [arrived.path, *arrived.path.rglob("*")]} == {"0o0"}
    assert remote.images() == [], "an image is in one place"
    assert list((far.root / layout.INCOMING).iterdir()) == []


def test_zeros_are_not_sent_and_not_stored(place, near, far):
    image = publish(near)
    zeros = 3 * PART
    sent = place.remote().push(image)
    assert sent == image.manifest.bytes - zeros
    arrived = place.remote().pull(image.id, far)
    pages = (arrived.criu_directory / "pages-1.img").stat()
    # The end of its last block, and one of a list of extents, which are more where it was flushed in between.
    assert pages.st_blocks * 512 <= pages.st_size - zeros + 2 * 4096


@contextlib.contextmanager
def failing(remote: Remote, sending: bool, after: int) -> Iterator[list[str]]:
    """The ``after``-th transfer of a part fails, and so does every later one, as when a network goes; those tried."""
    verb = "write" if sending else "read"
    real, tried = getattr(remote.storage, verb), []

    def fail(id, name, *args, **options):
        if re.fullmatch(r"\d{4}-\d{6}", name):
            tried.append(name)
            if len(tried) > after:
                raise OSError(104, "Connection reset by peer")
        return real(id, name, *args, **options)

    with mock.patch.object(remote.storage, verb, fail):
        yield tried


def test_an_interrupted_push_is_never_visible_and_resumes_where_it_was(place, near, far):
    image = publish(near)
    broken = place.remote()
    with failing(broken, True, 4), pytest.raises(RemoteFailed):
        broken.push(image, remove_from=near)
    assert near.images() == [image]
    assert place.remote().images() == []
    with pytest.raises(ImageNotFound):
        place.remote().pull(image.id, far)
    sent = place.remote().push(image, remove_from=near)
    assert 0 < sent <= image.manifest.bytes - 3 * PART - 3 * PART
    far.check(place.remote().pull(image.id, far))


def test_an_interrupted_pull_is_never_visible_and_resumes_where_it_was(place, near, far):
    image = publish(near)
    place.remote().push(image, remove_from=near)
    broken = place.remote()
    with failing(broken, False, 4), pytest.raises(RemoteFailed):
        broken.pull(image.id, far)
    assert far.images() == []
    assert far.damaged() == {}
    assert place.remote().images() == [image.manifest]

    again = place.remote()
    with failing(again, False, 1000) as fetched:
        far.check(again.pull(image.id, far))
    assert 0 < len(fetched) <= 10 - 4


def test_what_a_pull_fetched_that_broke_off_is_kept_for_a_week(near, far, tmp_path):
    image, _, remote = directory_with(near, tmp_path)
    with failing(remote, False, 4), pytest.raises(RemoteFailed):
        remote.pull(image.id, far)
    incoming = far.root / layout.INCOMING
    assert far.sweep() == 0
    fetched = [incoming / image.id, *(incoming / image.id).rglob("*")]
    assert len(fetched) > 2
    for path in fetched:
        os.utime(path, (0, 0))
    with remote.fetched(image.id, far):
        assert far.sweep() == 0, "one that continues is not swept"
    with failing(remote, False, 4), pytest.raises(RemoteFailed):
        remote.pull(image.id, far)
    for path in [incoming / image.id, *(incoming / image.id).rglob("*")]:
        os.utime(path, (0, 0))
    assert far.sweep() == 1
    assert list(incoming.iterdir()) == []


def test_two_hosts_that_pull_one_image(place, near, far, tmp_path, monkeypatch):
    """One gets it, however the other came by the idea; also while the first one is at it, and after it broke off."""
    image = publish(near)
    place.remote().push(image, remove_from=near)
    first = place.remote()
    with failing(first, False, 2), pytest.raises(RemoteFailed):
        first.pull(image.id, far)
    third = Store(tmp_path / "third", near.keys)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(remote_module.socket, "gethostname", lambda: "another")
        with pytest.raises(ImageBusy) as caught:
            place.remote().pull(image.id, third)
    assert caught.value.details["hostname"] == remote_module.socket.gethostname()
    assert third.images() == []
    assert place.remote().claimed(image.id)
    place.remote().pull(image.id, far)
    with pytest.raises(ImageNotFound):
        place.remote().pull(image.id, third)


def test_a_copy_is_made_only_by_request(place, near, far):
    image = publish(near)
    place.remote().push(image)
    assert near.images() == [image]
    place.remote().pull(image.id, far, keep=True)
    assert [one.id for one in far.images()] == [image.id]
    assert place.remote().images() == [image.manifest]
    assert place.remote().claimed(image.id) == ""
    place.remote().remove(image.id)
    assert place.remote().images() == []


def test_what_was_sent_with_a_token_is_given_up_with_it_alone(place, near, far):
    image = publish(near)
    broken = place.remote()
    with failing(broken, True, 4), pytest.raises(RemoteFailed):
        broken.send(image, token="mine")
    place.remote().discard(image.id, "another")
    assert place.remote().claimed(image.id), "another's parts stay"
    place.remote().discard(image.id, "mine")
    assert place.remote().storage.sizes(image.id) == {}
    place.remote().discard(image.id, "mine")

    place.remote().send(image, token="mine")
    place.remote().complete(image, token="mine")
    with pytest.raises(ImageBusy):
        place.remote().pull(image.id, far)
    place.remote().push(image)
    place.remote().discard(image.id, "mine")
    far.check(place.remote().pull(image.id, far))


def test_a_push_that_another_one_of_the_same_image_has_overtaken_keeps_its_own(place, near, far, tmp_path):
    """Else it completes an image whose parts the other's has taken along, and deletes its own."""
    image, third = publish(near), Store(tmp_path / "third", near.keys)
    place.remote().push(image)
    copy = place.remote().pull(image.id, far, keep=True)
    place.remote().remove(image.id)
    slow = place.remote()

    def overtake(*arguments):
        place.remote().push(copy, remove_from=far)
        place.remote().pull(image.id, third)
        Remote.complete(slow, *arguments)

    with mock.patch.object(slow, "complete", overtake), pytest.raises(RemoteFailed):
        slow.push(image, remove_from=near)
    near.check(image)
    assert place.remote().images() == []


SSH_SERVER = """
import asyncio, asyncssh, sys
from pathlib import Path

async def serve():
    home, key = Path(sys.argv[1]), asyncssh.generate_private_key("ssh-ed25519")
    made = await asyncssh.listen("127.0.0.1", 0, server_host_keys=[key], authorized_client_keys=str(home / "user.pub"),
                                 sftp_factory=True)
    (home / "known_hosts").write_text(f"[127.0.0.1]:{made.get_port()} {key.export_public_key().decode()}")
    print(made.get_port(), flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


def test_a_server_that_stops_in_the_middle_of_a_pull_is_given_up(near, far, tmp_path, monkeypatch):
    """Its host keeps the connection: no error of TCP ends the wait for the claim, which has no deadline."""
    image = publish(near)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "user")], check=True)
    argv = [sys.executable, "-c", SSH_SERVER, str(tmp_path)]
    monkeypatch.setattr(storage_module, "KEEPALIVE", 1)
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        try:
            url = f"sftp://ada@127.0.0.1:{int(server.stdout.readline())}{tmp_path}/far"
            keys = {"client_keys": [str(tmp_path / "user")], "known_hosts": str(tmp_path / "known_hosts")}
            remote = Remote(url, **keys)
            remote.push(image)
            create = remote.storage.create

            def stop(*arguments):
                server.send_signal(signal.SIGSTOP)
                create(*arguments)

            monkeypatch.setattr(remote.storage, "create", stop)
            ended = []
            pull = threading.Thread(
                target=lambda: ended.append(raised(lambda: remote.pull(image.id, far))), daemon=True
            )
            pull.start()
            pull.join(60)
            assert [type(error) for error in ended] == [RemoteFailed]
        finally:
            server.kill()
    near.check(image)


def raised(work: Callable[[], object]) -> BaseException | None:
    try:
        work()
    except BaseException as error:
        return error
    return None


# -- what is there may be anything


def directory_with(near: Store, tmp_path: Path) -> tuple[Image, Path, Remote]:
    image = publish(near)
    remote = Remote(f"file://{tmp_path}/shared")
    remote.push(image)
    return image, tmp_path / "shared" / image.id, remote


def test_a_flipped_bit_is_noticed_and_the_next_try_starts_afresh(near, far, tmp_path):
    image, there, remote = directory_with(near, tmp_path)
    part = max(there.iterdir(), key=lambda path: path.stat().st_size)
    good = part.read_bytes()
    part.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    with pytest.raises(ImageDamaged):
        remote.pull(image.id, far)
    assert far.images() == []
    part.write_bytes(good)
    far.check(remote.pull(image.id, far))


@pytest.mark.parametrize("change", [b"", b"x"])
def test_a_part_of_another_size(near, far, tmp_path, change):
    image, there, remote = directory_with(near, tmp_path)
    part = max(there.iterdir(), key=lambda path: path.stat().st_size)
    part.write_bytes(change)
    with pytest.raises(RemoteFailed):
        remote.pull(image.id, far)
    assert far.images() == []


def test_a_part_that_is_gone_is_not_taken_for_zeros(near, far, tmp_path):
    image, there, remote = directory_with(near, tmp_path)
    max(there.iterdir(), key=lambda path: path.stat().st_size).unlink()
    with pytest.raises(ImageDamaged):
        remote.pull(image.id, far)


def test_a_manifest_nobody_of_us_sealed_is_not_even_read(near, far, tmp_path, monkeypatch):
    image, there, remote = directory_with(near, tmp_path)
    facts = json.loads((there / "manifest.json").read_text())
    facts["files"]["../../evil"] = {"bytes": 1, "blake3": "0" * 64}
    (there / "manifest.json").write_text(json.dumps(facts))
    with pytest.raises(ImageForged):
        remote.pull(image.id, far)
    assert not list(tmp_path.rglob("evil"))
    assert list(far.root.glob("[!.]*")) == []


def test_an_older_image_of_the_kernel_is_stale(near, far, tmp_path):
    image, _, remote = directory_with(near, tmp_path)
    publish(near, generation=2)
    with pytest.raises(ImageStale):
        remote.pull(image.id, far)


@pytest.mark.parametrize("id", ["..", "../x", "a/b", "", ".hidden"])
def test_a_name_that_leads_elsewhere(far, tmp_path, id):
    with pytest.raises(ImageNotFound):
        Remote(f"file://{tmp_path}/shared").pull(id, far)


def test_other_things_in_the_place_are_no_images(tmp_path):
    shared = tmp_path / "shared"
    (shared / "20260101T000000-aa-bb").mkdir(parents=True)
    (shared / "a file").write_text("x")
    assert Remote(f"file://{shared}").images() == []


@pytest.mark.parametrize("kind", ["pipe", "endless", "of another", "a directory"])
def test_what_others_plant_in_a_shared_place_does_not_stop_a_listing(near, tmp_path, kind):
    image, there, remote = directory_with(near, tmp_path)
    planted = there.parent / "20260101T000000-aaaaaaaa-bbbbbb"
    planted.mkdir()
    if kind == "pipe":
        os.mkfifo(planted / "manifest.json")
    elif kind == "endless":
        (planted / "manifest.json").symlink_to("/dev/zero")
    elif kind == "a directory":
        (planted / "manifest.json").mkdir()
    else:
        (planted / "manifest.json").write_text((there / "manifest.json").read_text())
    assert remote.images() == [image.manifest]
    with pytest.raises(ImageFormat):
        remote.manifest(planted.name)


@pytest.mark.parametrize("kind", ["pipe", "link", "large"])
def test_a_part_that_is_no_plain_file_of_its_size_is_not_read(near, far, tmp_path, kind, monkeypatch):
    image, there, remote = directory_with(near, tmp_path)
    part = max(there.iterdir(), key=lambda path: path.stat().st_size)
    content = part.read_bytes()
    part.unlink()
    if kind == "pipe":
        os.mkfifo(part)
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        part.symlink_to(tmp_path / "elsewhere")
    else:
        part.touch()
        os.truncate(part, 1 << 40)
    with pytest.raises(ImageFormat if kind == "link" else RemoteFailed):
        remote.pull(image.id, far)
    part.unlink()
    part.write_bytes(content)
    far.check(remote.pull(image.id, far))


# All is imported by root: Python itself may lie where the user cannot read.
LISTING = """
import os, sys
import fsspec.implementations.local
from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.transfer.remote import Remote
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(54321); os.setuid(54321)
remote = Remote(f"file://{sys.argv[1]}")
print([manifest.id for manifest in remote.images()])
try:
    remote.manifest(sys.argv[2])
except GpuCkptError as error:
    print(error.code, error.message)
"""


def test_an_image_of_another_user_hides_nothing_else_in_a_shared_place(near, tmp_path):
    """Every user's image lies in a directory that only this user enters."""
    image, there, _ = directory_with(near, tmp_path)
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        shared = Path(name) / "shared"
        shutil.copytree(there, shared / image.id)
        (shared / image.id).chmod(0o755)
        (shared / image.id / "manifest.json").chmod(0o644)
        (shared / "20260101T000000-aaaaaaaa-bbbbbb").mkdir(0o000)
        argv = [sys.executable, "-c", LISTING, str(shared), "20260101T000000-aaaaaaaa-bbbbbb"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        (shared / "20260101T000000-aaaaaaaa-bbbbbb").chmod(0o700)
    assert done.stdout.splitlines() == [
        str([image.id]),
        "IMAGE_NOT_FOUND Image '20260101T000000-aaaaaaaa-bbbbbb' there may not be read by you.",
    ], done.stderr


def test_too_little_space_is_reported_before_anything_is_fetched(near, far, tmp_path, monkeypatch):
    image, _, remote = directory_with(near, tmp_path)
    monkeypatch.setattr(Store, "free", lambda self: 1000)
    with pytest.raises(NoSpace) as caught:
        remote.pull(image.id, far)
    assert caught.value.left == f"the image {image.id} is whole where it is, and was not fetched"
    assert remote.claimed(image.id) == "", "a host with more space may have it"


def test_a_pull_reserves_its_bytes_in_the_quota_until_it_is_an_image(near, far, tmp_path):
    image, _, remote = directory_with(near, tmp_path)
    count = image.manifest.bytes
    with pytest.raises(QuotaExceeded) as caught:
        remote.pull(image.id, Store(far.root, far.keys, quota=Quota(bytes=count - 1)))
    assert caught.value.left == f"the image {image.id} is whole where it is, and was not fetched"
    assert remote.claimed(image.id) == "", "a host with a larger quota may have it"

    bounded = Store(far.root, far.keys, quota=Quota(bytes=count))
    refused = []
    remote.pull(image.id, bounded, progress=lambda _: refused.append(bounded.over_quota("another", 1)))
    assert {error.details["used"] for error in (*refused, bounded.over_quota("another", 1))} == {count}
    assert not list(far.root.rglob("*.reservation"))


def test_images_are_moved_without_the_key_that_encrypts_new_ones(near, far, tmp_path):
    remote, image = Remote(f"file://{tmp_path}/shared"), publish(near)
    remote.push(image, remove_from=near)
    keyless = Store(far.root, far.keys, Vault("env:NOT_SET_HERE"))
    assert remote.pull(image.id, keyless).id == image.id


def test_the_reservation_of_a_pull_that_was_killed_is_free_at_once(near, far, tmp_path):
    image, _, remote = directory_with(near, tmp_path)
    bounded = Store(far.root, far.keys, quota=Quota(bytes=image.manifest.bytes))
    with mock.patch.object(QuotaReservation, "release"), failing(remote, False, 4), pytest.raises(RemoteFailed):
        remote.pull(image.id, bounded)
    assert list(far.root.rglob("*.reservation"))
    assert bounded.over_quota("another", 1) is None
    assert not list(far.root.rglob("*.reservation"))
    remote.pull(image.id, bounded)


def test_a_disk_that_is_full_in_the_middle_of_a_pull_is_named(near, far, tmp_path, monkeypatch):
    image, _, remote = directory_with(near, tmp_path)
    with monkeypatch.context() as patched, pytest.raises(NoSpace):
        patched.setattr(remote_module, "_open_own", lambda path, _: os.open("/dev/full", os.O_WRONLY))
        patched.setattr(remote_module, "_complete", lambda path, size: path.parent.mkdir(exist_ok=True) or 0)
        remote.pull(image.id, far)
    far.check(remote.pull(image.id, far))


@pytest.mark.parametrize("fails", [1, 4, "directory"])
def test_what_could_not_be_flushed_is_fetched_again(near, far, tmp_path, monkeypatch, fails):
    """Linux tells one flush of an error, and takes what it could not write for written."""
    image, _, remote = directory_with(near, tmp_path)
    real, flushed = remote_module.flush, []

    def flush(path: Path) -> None:
        flushed.append(path)
        if len(flushed) == fails or (fails == "directory" and path.is_dir()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(path)

    with monkeypatch.context() as patched, pytest.raises(StoreUnwritable, match="Input/output error"):
        patched.setattr(remote_module, "flush", flush)
        remote.pull(image.id, far)
    assert not flushed[-1].exists()
    assert far.images() == []
    far.check(remote.pull(image.id, far))


def test_what_was_fetched_before_needs_no_space_again(near, far, tmp_path, monkeypatch):
    image, _, remote = directory_with(near, tmp_path)
    with failing(remote, False, 6), pytest.raises(RemoteFailed):
        remote.pull(image.id, far)
    fetched = sum(path.stat().st_size for path in (far.root / layout.INCOMING).rglob("*.img"))
    assert fetched > 3 * PART
    monkeypatch.setattr(Store, "free", lambda self: image.manifest.bytes - fetched)
    far.check(remote.pull(image.id, far))


def test_an_image_that_is_here_already_is_neither_claimed_nor_fetched(near, far, tmp_path):
    image, _, remote = directory_with(near, tmp_path)
    remote.pull(image.id, far, keep=True)
    with pytest.raises(ImageBusy) as refused:
        remote.pull(image.id, far)
    assert f"gpu-ckpt rm {image.id}" in refused.value.hint
    assert remote.claimed(image.id) == ""
    assert list((far.root / layout.INCOMING).iterdir()) == []


@pytest.mark.parametrize("verb", ["delete", "delete_directory"])
def test_a_pull_that_could_not_remove_the_remote_image_is_finished_by_the_next(near, far, tmp_path, verb):
    image, there, remote = directory_with(near, tmp_path)
    failure = mock.patch.object(remote.storage, verb, side_effect=OSError(5, "Input/output error"))
    with failure, pytest.raises(RemoteFailed) as caught:
        remote.pull(image.id, far)
    assert caught.value.left.startswith(f"the image {image.id} is here")
    assert [one.id for one in far.images()] == [image.id]
    with pytest.raises(ImageBusy):
        remote.pull(image.id, far, keep=True)
    far.check(remote.pull(image.id, far))
    assert not there.exists()


def test_parts_with_a_claim_that_may_not_be_read_are_anothers(near, tmp_path, monkeypatch):
    image, remote = publish(near), Remote(f"file://{tmp_path}/shared")
    remote.send(image, token="another's")
    sent = remote.storage.sizes(image.id)
    refused = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    with monkeypatch.context() as patch, pytest.raises(RemoteFailed):
        patch.setattr(storage_module, "_read_plain", refused)
        remote.discard(image.id, "mine")
    assert remote.storage.sizes(image.id) == sent


def test_a_claim_that_a_full_disk_cut_off_is_none(near, far, tmp_path, monkeypatch):
    image, _, remote = directory_with(near, tmp_path)
    real = remote.storage.fs.open

    def full(*args, **options):
        file = real(*args, **options)
        file.write = mock.Mock(side_effect=OSError(28, "No space left on device"))
        return file

    with monkeypatch.context() as full_disk, pytest.raises(RemoteFailed):
        full_disk.setattr(remote.storage.fs, "open", full)
        remote.pull(image.id, far)
    assert remote.claimed(image.id) == ""
    far.check(remote.pull(image.id, far))


def test_an_image_that_is_being_restored_is_not_pushed(near, tmp_path):
    image = publish(near)
    with image.lease(), pytest.raises(ImageBusy):
        Remote(f"file://{tmp_path}/shared").push(image, remove_from=near)
    assert near.images() == [image]


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_pull_does_not_write_through_a_foreign_file_in_its_place(near, far, tmp_path, kind):
    image = publish(near)
    before, remote, victim = content(image), Remote(f"file://{tmp_path}/shared"), tmp_path / "victim"
    remote.push(image)
    victim.write_bytes(b"precious")
    planted = far.root / layout.INCOMING / image.id / "criu" / "pages-1.img"
    far.prepare()
    planted.parent.mkdir(parents=True)
    if kind == "link":
        planted.symlink_to(victim)
    else:
        os.mkfifo(planted)
    assert content(remote.pull(image.id, far)) == before
    assert victim.read_bytes() == b"precious"


def test_a_directory_is_private_whatever_the_umask(near, tmp_path):
    before = os.umask(0)
    try:
        _, there, _ = directory_with(near, tmp_path)
    finally:
        os.umask(before)
    assert there.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["link", "directory"])
def test_nothing_is_moved_into_what_another_user_has_prepared(near, tmp_path, kind):
    """Another user may know an image's name from its last visit to a shared directory."""
    image, elsewhere = publish(near), tmp_path / "elsewhere"
    (tmp_path / "shared").mkdir()
    planted = tmp_path / "shared" / image.id
    if kind == "link":
        elsewhere.mkdir()
        planted.symlink_to(elsewhere)
    else:
        planted.mkdir()
        if os.geteuid() != 0:
            pytest.skip("only root can make a directory of another user")
        os.chown(planted, 54321, 54321)
    with pytest.raises(RemoteFailed, match="another user"):
        Remote(f"file://{tmp_path}/shared").push(image, remove_from=near)
    assert near.images() == [image]
    assert list((elsewhere if kind == "link" else planted).iterdir()) == []


class Silent(AsyncFileSystem):
    """A server that answers nothing from now on, as one behind a firewall that forgets connections."""

    protocol = "silent"

    async def _silence(self, *_, **__) -> None:
        await asyncio.Event().wait()

    _ls = _info = _cat_file = _pipe_file = _rm_file = _rm = _makedirs = _exists = _mv = _silence


def test_a_server_that_falls_silent_is_given_up(near, monkeypatch):
    register_implementation("silent", Silent, clobber=True)
    monkeypatch.setattr(remote_hashes, "REQUEST", 0.1)
    for module in (storage_module, remote_hashes):
        monkeypatch.setattr(module, "TRANSFER", 0.1)
    monkeypatch.setattr(storage_module, "REMOVAL", 0.1)
    remote, image = Remote("silent://host/images"), publish(near)
    storage = remote.storage
    for request in (
        remote.images,
        lambda: remote.manifest(image.id),
        lambda: remote.push(image, remove_from=near),
        lambda: remote.remove(image.id),
    ):
        with pytest.raises(RemoteFailed, match="does not answer"):
            request()
    for request in (
        lambda: storage.write(image.id, "0000-000000", b"x"),
        lambda: storage.read(image.id, "0000-000000", 1),
        lambda: storage.delete_directory(image.id),
        lambda: storage.hashes(image.id).matches("0000-000000", "x"),
    ):
        with pytest.raises(asyncio.TimeoutError):
            request()
    assert near.images() == [image]


def test_an_unknown_kind_of_url():
    with pytest.raises(RemoteUnsupported):
        Remote("nonsense://place")


def test_a_host_whose_key_is_not_known_gets_nothing(sftp, near, tmp_path):
    """sshfs itself would ask no host who it is."""
    options = {**sftp["options"], "known_hosts": str(tmp_path / "nobody")}
    (tmp_path / "nobody").write_text("")
    url = f"sftp://{getpass.getuser()}@127.0.0.1:{sftp['port']}{tmp_path}/far"
    with pytest.raises(RemoteFailed) as caught:
        Remote(url, **options).push(publish(near))
    assert "sftp://" not in str(caught.value)
    assert not (tmp_path / "far").exists()


def test_no_host_is_trusted_that_is_not_in_known_hosts(sftp, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    options = {key: value for key, value in sftp["options"].items() if key != "known_hosts"}
    with contextlib.suppress(FileNotFoundError), pytest.raises((RemoteFailed, RemoteUnsupported)):
        Remote(f"sftp://{getpass.getuser()}@127.0.0.1:{sftp['port']}{tmp_path}/far", **options).images()
