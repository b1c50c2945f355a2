"""The cold tier of a server: it sends old images away, and nobody waits for it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys

import psutil
import pytest
from images import publish

from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.server.cold import ColdTier
from jupyter_gpu_ckpt.transfer.remote import Remote

pytestmark = pytest.mark.slow  # starts a server of S3

LOG = logging.getLogger(__name__)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "images", Keyring(tmp_path / "keys"))


@pytest.fixture
def tar_pit(monkeypatch):
    """An object store that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        monkeypatch.setenv("FSSPEC_S3_ENDPOINT_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("FSSPEC_S3_KEY", "key")
        monkeypatch.setenv("FSSPEC_S3_SECRET", "secret")
        yield listener


def senders() -> list[int]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended a moment ago
            if "jupyter_gpu_ckpt.server.cold" in child.cmdline():
                found.append(child.pid)
    return found


async def until(true, seconds: float = 60) -> None:
    async def wait() -> None:
        while not true():
            await asyncio.sleep(0.02)

    await asyncio.wait_for(wait(), seconds)


async def test_old_images_go_and_fresh_ones_stay(store, tmp_path, caplog):
    old = publish(store)  # of the year 1970
    fresh = publish(store, kernel_id="another", created=4e9)
    url = f"file://{tmp_path}/cold"
    cold = ColdTier(store, url, 60.0, LOG)
    with caplog.at_level(logging.INFO):
        cold.start()
        await until(lambda: f"Image {old.id} was archived: 5004 bytes freed." in caplog.messages)
        await cold.stop()
    assert [one.id for one in Remote(url).images()] == [old.id]
    assert old.archived
    store.check(fresh)
    assert senders() == []


async def test_neither_a_stop_nor_a_wake_waits_for_what_is_being_sent(store, tar_pit):
    image = publish(store)
    cold = ColdTier(store, "s3://bucket/cold", 60.0, LOG)
    cold.start()
    connection, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(tar_pit), 60)
    with connection, image.lease():
        store.check(image)
        assert len(senders()) == 1, "it is still at it"
        await asyncio.wait_for(cold.stop(), 60)
    assert senders() == []
    store.check(image)


async def test_what_a_killed_sender_had_sent_goes_when_the_kernel_is_back(store, tmp_path, caplog):
    image = publish(store)
    remote = Remote(f"file://{tmp_path}/cold")
    token = image.mark_sent()
    remote.send(image, token=token)
    store.remove(image)  # as a wake does
    cold = ColdTier(store, f"file://{tmp_path}/cold", 60.0, LOG)
    with caplog.at_level(logging.INFO):
        cold.start()
        await until(lambda: any(image.id in message for message in caplog.messages))
        await cold.stop()
    assert "was removed" in caplog.text
    assert list((tmp_path / "cold").iterdir()) == []
    assert not list(store.root.glob(f".{image.id}*"))


async def test_content_that_could_not_be_sent_is_reported_and_tried_again(store, caplog):
    publish(store)
    cold = ColdTier(store, "nonsense://place", 0.4, LOG)
    cold.start()
    await until(lambda: caplog.text.count("REMOTE_UNSUPPORTED") >= 2)
    await cold.stop()


SERVER = """
import asyncio, logging, sys
from pathlib import Path
from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.server.cold import ColdTier

async def main():
    store = Store(Path(sys.argv[1]), Keyring(Path(sys.argv[2])))
    ColdTier(store, "s3://bucket/cold", 60.0, logging.getLogger()).start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_server_that_is_killed_leaves_no_sender(store, tar_pit):
    publish(store)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(store.root), str(store.keys.directory)], env=os.environ
    )
    try:
        connection, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(tar_pit), 60)
        (sender,) = psutil.Process(server.pid).children()
    finally:
        server.kill()
        server.wait(60)
    with connection:
        await until(lambda: not sender.is_running() or sender.status() == psutil.STATUS_ZOMBIE)


async def test_one_of_two_servers_sends(store, tar_pit):
    publish(store)
    both = [ColdTier(store, "s3://bucket/cold", 0.4, LOG) for _ in range(2)]
    for cold in both:
        cold.start()
    connection, _ = await asyncio.wait_for(asyncio.get_running_loop().sock_accept(tar_pit), 60)
    with connection:
        # The other one looks again and again, and finds it busy.
        for _ in range(2):
            await until(lambda: len(senders()) == 2)
            await until(lambda: len(senders()) == 1)
        for cold in both:
            await cold.stop()
