"""Files that were sent are compared by hash with those that lie there, in any kind of directory."""

from __future__ import annotations

import getpass
import os
import tempfile
from typing import Any

import pytest
from images import publish
from places import s3_server, sftp_server

from jupyter_gpu_ckpt.errors import RemoteFailed
from jupyter_gpu_ckpt.image.layout import CLAIM
from jupyter_gpu_ckpt.transfer import remote as remote_module
from jupyter_gpu_ckpt.transfer.remote import Remote
from jupyter_gpu_ckpt.transfer.remote_hashes import RemoteHashes

pytestmark = pytest.mark.slow  # starts servers of S3 and SFTP

#: A server that runs commands, one that is made for files alone, one that runs commands of its own, and the others.
KINDS = ("directory", "sftp", "sftp only", "sftp chatty", "s3")
FORCED = {
    "sftp": "",
    "sftp only": "ForceCommand internal-sftp",
    "sftp chatty": (
        'ForceCommand case "$SSH_ORIGINAL_COMMAND" in '
        "internal-sftp) exec /usr/lib/openssh/sftp-server;; *) echo no;; esac"
    ),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(remote_module, "PART", 1000)


@pytest.fixture(scope="session")
def servers(tmp_path_factory):
    """The options of each kind of server, started on its first use."""
    from contextlib import ExitStack

    started: dict[str, Any] = {}
    with ExitStack() as stack:

        def server(kind: str) -> dict[str, Any]:
            if kind not in started:
                place = tmp_path_factory.mktemp(kind.replace(" ", "-"))
                made = s3_server(place) if kind == "s3" else sftp_server(place, FORCED[kind])
                started[kind] = stack.enter_context(made)
            return started[kind]

        yield server


@pytest.fixture
def elsewhere(monkeypatch):
    """Every directory is one on a network, whatever the tests run on."""
    monkeypatch.setattr(RemoteHashes, "trusts_writes", lambda _: False)


@pytest.fixture(params=KINDS)
def remote(request, servers, tmp_path) -> Remote:
    if request.param == "directory":
        request.getfixturevalue("elsewhere")
        return Remote(f"file://{tmp_path}/far")
    server = servers(request.param)
    if request.param == "s3":
        import s3fs

        bucket = f"bucket-{os.urandom(6).hex()}"
        s3fs.S3FileSystem(**server["options"]).mkdir(bucket)
        return Remote(f"s3://{bucket}/images", **server["options"])
    url = f"sftp://{getpass.getuser()}@127.0.0.1:{server['port']}{tmp_path}/far"
    return Remote(url, **server["options"])


def test_a_bit_that_is_lost_on_the_way_is_noticed_at_once_and_sent_again(remote, store, monkeypatch):
    image = publish(store)
    put, spoiled = remote.storage.write, []

    def spoil(id: str, name: str, data: bytes, **options: bool) -> None:
        if not spoiled and name.endswith("000002"):
            spoiled.append(name)
            data = bytes([data[0] ^ 1]) + data[1:]
        put(id, name, data, **options)

    monkeypatch.setattr(remote.storage, "write", spoil)
    with pytest.raises(RemoteFailed, match="1 parts") as caught:
        remote.push(image, remove_from=store)
    assert caught.value.details["parts"] == spoiled
    assert remote.images() == []
    store.check(image)
    assert remote.push(image, remove_from=store) == 1000, "the others are there"
    remote.pull(image.id, store)
    store.check(image)


def test_a_part_of_the_right_size_with_other_content_is_sent_again(remote, store):
    image = publish(store)
    remote.storage.make_directory(image.id)
    remote.storage.write(image.id, "0001-000001", b"q" * 1000)
    remote.push(image, remove_from=store)
    store.check(remote.pull(image.id, store))


@pytest.mark.parametrize("remote", ["sftp", "s3"], indirect=True)
def test_nothing_is_read_back_from_a_server_that_reports_its_hashes(remote, store, monkeypatch):
    image, read = publish(store), remote.storage.fs.cat_file

    def refuse(path, **options):
        assert path.endswith(CLAIM), f"{path} is read back"
        return read(path, **options)

    monkeypatch.setattr(remote.storage.fs, "cat_file", refuse)
    remote.push(image)
    remote.push(image)


def test_only_a_directory_on_a_disk_of_this_machine_is_not_read_back(store, tmp_path, monkeypatch):
    image = publish(store)
    read_back: list[str] = []

    real = RemoteHashes._read_back

    def record(self, name: str) -> bytes:
        read_back.append(name)
        return real(self, name)

    monkeypatch.setattr(RemoteHashes, "_read_back", record)
    with monkeypatch.context() as on_disk:
        on_disk.setattr(RemoteHashes, "trusts_writes", lambda _: True)
        Remote(f"file://{tmp_path}/disk").push(image)
        assert read_back == []
        Remote(f"file://{tmp_path}/disk").push(image)
    compared, read_back[:] = len(read_back), []
    assert compared, "what is there already is compared"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        Remote(f"file://{memory}/far").push(image)
    assert len(read_back) == compared, "a file system without a device is not on a disk here"
