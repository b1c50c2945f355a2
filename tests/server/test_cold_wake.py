"""A server that ends in the middle of a wake from the cold tier: the kernel sleeps on, and the next server wakes it."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from live import Server, server, until

from jupyter_gpu_ckpt.errors import ImageNotFound
from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.transfer import remote as remote_module
from jupyter_gpu_ckpt.transfer.archive import archive
from jupyter_gpu_ckpt.transfer.remote import Remote

PART = 1 << 14
#: The content comes part by part, as the test lets it.
SLOW = f"""
import itertools, pathlib, time
from jupyter_gpu_ckpt.transfer import remote as remote_module
from jupyter_gpu_ckpt.transfer.storage import Storage

remote_module.PART = {PART}
home, numbers, get = pathlib.Path(__file__).parents[1], itertools.count(), Storage.read

def slowly(self, id, name, most):
    if "-" not in name:
        return get(self, id, name, most)
    number = next(numbers)
    (home / "fetching").touch()
    while not (home / "go").exists() or int((home / "go").read_text() or 0) < number:
        time.sleep(0.005)
    return get(self, id, name, most)

Storage.read = slowly
"""


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


class Asleep:
    """A kernel whose content is in the cold tier."""

    def __init__(self, home: Path, kernel_id: str) -> None:
        self.home, self.kernel_id = home, kernel_id
        self.remote = Remote(f"file://{home}/cold")
        self.store = Store(home / "images", Keyring())
        (self.image,) = self.store.images()
        archive(self.image, self.store, self.remote)
        self.config = f"c.GpuCkptProvisioner.archive_url = 'file://{home}/cold'\n"

    def comes_slowly_until(self, true: Callable[[], bool]) -> None:
        """One more piece arrives with each look: all of them would take far longer than the deadline."""
        numbers = itertools.count()

        def look() -> bool:
            (self.home / "go.new").write_text(str(next(numbers)))
            (self.home / "go.new").replace(self.home / "go")
            return true()

        until(look, 60)

    def is_archived(self) -> bool:
        """Return whether the cold tier has the whole content."""
        try:
            self.remote.manifest(self.image.id)
        except ImageNotFound:
            return False
        return True

    def is_asleep_and_free(self) -> None:
        """Whole there, by its name here, and nobody's."""
        assert self.image.archived
        assert self.is_archived()
        self.image.lease().release()
        assert not (self.image.path / "claim.json").exists()


@pytest.fixture
def asleep(home, runtime_base, criu_binary, monkeypatch) -> Asleep:
    monkeypatch.setattr(remote_module, "PART", PART)
    with server(home, runtime_base) as first:
        kernel_id = first.start_kernel()
        first.run(kernel_id, "x = 41")
    return Asleep(home, kernel_id)


@contextmanager
def waking(asleep: Asleep, runtime_base: Path) -> Iterator[Server]:
    """A server in which a cell waits for the kernel, whose first parts are on their way."""
    with server(asleep.home, runtime_base, config=asleep.config + SLOW) as second:
        until(lambda: second.get("api/kernels"))
        with second.client(asleep.kernel_id) as client:
            client.execute("x += 1")
            until((asleep.home / "fetching").exists)
        yield second


def wakes_on_the_next_server(asleep: Asleep, runtime_base: Path) -> None:
    with server(
        asleep.home,
        runtime_base,
        config=f"{asleep.config}from jupyter_gpu_ckpt.transfer import remote\nremote.PART = {PART}\n",
    ) as third:
        until(lambda: third.get("api/kernels"))
        assert third.run(asleep.kernel_id, "print(x)") == "41"
        until(lambda: not asleep.is_archived())


def test_a_server_that_is_stopped_does_not_wait_for_the_content(asleep, runtime_base):
    with waking(asleep, runtime_base) as second:
        second.process.send_signal(signal.SIGTERM)
        asleep.comes_slowly_until(lambda: second.process.poll() is not None)
        assert "was not checkpointed within" not in second.log
        assert "Traceback" not in second.log
    asleep.is_asleep_and_free()
    wakes_on_the_next_server(asleep, runtime_base)


def test_a_server_that_is_killed_leaves_the_content_where_it_was(asleep, runtime_base):
    with waking(asleep, runtime_base) as second:
        second.process.kill()
        second.process.wait(60)
    asleep.is_asleep_and_free()
    wakes_on_the_next_server(asleep, runtime_base)


def test_a_kernel_that_is_shut_down_does_not_wait_for_its_content(asleep, runtime_base):
    asleep.config += "c.GpuCkptProvisioner.keep_image_on_shutdown = True\n"
    with waking(asleep, runtime_base) as second:
        with ThreadPoolExecutor(1) as asking:
            ended = asking.submit(second.ask, "DELETE", f"api/kernels/{asleep.kernel_id}")
            asleep.comes_slowly_until(ended.done)
        assert ended.result().status_code == 204
        assert second.get("api/kernels") == []
    assert asleep.image.retired
    asleep.is_asleep_and_free()
