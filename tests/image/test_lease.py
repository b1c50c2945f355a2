"""One restorer at a time and one living kernel for ever: on one host, between hosts, and after each has died."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from images import FACTS, publish
from waiting import until

from jupyter_gpu_ckpt.errors import ImageBusy, ImageNotFound, NoSpace
from jupyter_gpu_ckpt.image import layout
from jupyter_gpu_ckpt.image import lease as leases

ELSEWHERE = {"boot": "0" * 36, "machine": "another", "hostname": "elsewhere", "pids": "pid:[1]", "pid": 1, "started": 1}

RACER = """
import sys
from pathlib import Path
from jupyter_gpu_ckpt.errors import ImageError
from jupyter_gpu_ckpt.image import lease as leases
import os
for line in sys.stdin:
    path = Path(line.strip())
    try:
        lease = leases.acquire(path)
        lease.claim(os.getpid())
        print("won", flush=True)
        lease.release()
    except ImageError as error:
        print(error.code, flush=True)
"""


NO_LOCKS = """
from jupyter_gpu_ckpt.image import lease as leases
class Nothing:
    def __init__(self, path, **options): self.lock_file = str(path)
    def acquire(self): pass
    def release(self): pass
leases.FileLock = Nothing
"""


@pytest.fixture
def another_process():
    """A process that lives until the test ends."""
    process = subprocess.Popen(["sleep", "1000"])
    yield process
    process.kill()
    process.wait(60)


def racers(count: int) -> list[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", RACER]
    return [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)]


def race(both: list[subprocess.Popen[str]], path: Path) -> list[str]:
    for one in both:
        one.stdin.write(f"{path}\n")
        one.stdin.flush()
    return sorted(one.stdout.readline().strip() for one in both)


def test_two_restorers_race_a_hundred_times_and_one_wins(store):
    both = racers(2)
    try:
        for _ in range(100):
            assert race(both, publish(store, {}).path) == ["IMAGE_BUSY", "won"]
    finally:
        for one in both:
            one.stdin.close()
            assert one.wait(60) == 0


def test_the_race_has_one_winner_where_locks_mean_nothing(store):
    """A file system without working locks: the exclusive links alone decide."""
    both = [
        subprocess.Popen(
            [sys.executable, "-c", NO_LOCKS + RACER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        for _ in range(100):
            assert race(both, publish(store, {}).path).count("won") == 1
    finally:
        for one in both:
            one.stdin.close()
            assert one.wait(60) == 0


def test_a_lease_goes_with_its_process(store, image):
    program = (
        "import sys, time; from pathlib import Path; from jupyter_gpu_ckpt.image import lease as leases\n"
        "lease = leases.acquire(Path(sys.argv[1])); print('held', flush=True); time.sleep(1000)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(image.path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ImageBusy), image.lease():
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait(60)
    with image.lease():
        pass
    assert not (image.path / layout.LEASES).exists()


def from_elsewhere(image, **record) -> Path:
    """A lease that a restorer on another host has."""
    (image.path / layout.LEASES).mkdir()
    file = image.path / layout.LEASES / "1"
    file.write_text(json.dumps({**ELSEWHERE, **record}))
    return file


def test_a_lease_of_another_host_holds_while_it_is_touched(image):
    file = from_elsewhere(image)
    with pytest.raises(ImageBusy, match="elsewhere"), image.lease():
        pass
    os.utime(file, (time.time() - leases.EXPIRY + 5, time.time() - leases.EXPIRY + 5))
    with pytest.raises(ImageBusy), image.lease():
        pass
    os.utime(file, (time.time() - leases.EXPIRY - 5, time.time() - leases.EXPIRY - 5))
    with image.lease() as lease:
        assert [path.name for path in (image.path / layout.LEASES).iterdir()] == ["2"]
        lease.claim(os.getpid())


def test_a_lease_is_touched_while_it_is_held(image, monkeypatch):
    monkeypatch.setattr(leases, "EXPIRY", 0.1)
    with image.lease():
        (file,) = (image.path / layout.LEASES).iterdir()
        os.utime(file, (0, 0))
        until(lambda: file.stat().st_mtime != 0, "the touch", 60)


def test_who_was_overtaken_gets_no_kernel(image, another_process):
    """Cut off in the middle of a restore: another host takes over, and the first one's kernel must not live."""
    lease = leases.acquire(image.path)
    lease._lock.release()  # as a file server does with the locks of a client that it does not hear from
    file = image.path / layout.LEASES / "1"
    file.write_text(json.dumps(ELSEWHERE))
    os.utime(file, (0, 0))
    with image.lease() as other:
        other.claim(another_process.pid)
        with pytest.raises(ImageBusy, match="restored elsewhere"):
            lease.claim(os.getpid())
    lease.withdraw_claim()
    left = json.loads((image.path / layout.CLAIM).read_text())["pid"]
    assert left == another_process.pid, "it is not ours to withdraw"
    lease.release()


def test_who_was_overtaken_and_comes_back_after_the_image_was_used_gets_no_kernel(store, image):
    lease = leases.acquire(image.path)
    store.remove(image, leased=True)
    with pytest.raises(ImageBusy, match="went away"):
        lease.claim(os.getpid())
    lease.release()


def test_an_image_whose_kernel_lives_cannot_be_restored(image, another_process):
    with image.lease() as lease:
        lease.claim(another_process.pid)
    with pytest.raises(ImageBusy, match="runs on") as caught, image.lease():
        pass
    assert "break-claim" in caught.value.hint
    another_process.kill()
    another_process.wait(60)
    with image.lease():
        assert not (image.path / layout.CLAIM).exists()


def test_a_published_image_belongs_to_the_process_until_it_has_ended(store, another_process):
    draft = store.begin("kernel")
    image = draft.publish(FACTS, claim_pid=another_process.pid)
    with pytest.raises(ImageBusy), image.lease():
        pass
    image.withdraw_claim()
    with image.lease():
        pass


def test_a_pid_that_is_another_process_now_claims_nothing(image, another_process):
    with image.lease() as lease:
        lease.claim(another_process.pid)
    claim = image.path / layout.CLAIM
    claim.write_text(json.dumps({**json.loads(claim.read_text()), "started": 1}))
    with image.lease():
        pass


CONTAINER = """
import os, sys
from pathlib import Path
from jupyter_gpu_ckpt.image import lease as leases
path, kept = Path(sys.argv[1]), []
holder = {"held": lambda fd: kept.append(os.dup(fd)), "not held": None}[sys.argv[2]]
with leases.acquire(path) as lease:
    lease.claim(os.getpid(), holder)
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def in_a_container():
    """Starts a process with ids of its own that claims an image; what returns it ends it."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("another pid namespace needs root and unshare: apt-get install util-linux")
    started = []

    def start(path: Path, how: str) -> subprocess.Popen[str]:
        argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", CONTAINER]
        argv += [str(path), how]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "claimed\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=60)


def test_a_claim_of_a_container_that_was_killed_is_void(image, in_a_container):
    """The claim's process cannot be looked for from here; the lock on the claim went with it."""
    container = in_a_container(image.path, "held")
    for _ in range(2):
        with pytest.raises(ImageBusy, match="runs on"), image.lease():
            pass
    container.kill()
    container.communicate(timeout=60)
    with image.lease():
        assert not (image.path / layout.CLAIM).exists()


def test_a_claim_without_a_locked_file_is_not_void(image, in_a_container):
    container = in_a_container(image.path, "not held")
    container.kill()
    container.communicate(timeout=60)
    with pytest.raises(ImageBusy, match="runs on"), image.lease():
        pass


@pytest.mark.parametrize(
    ("change", "void"),
    [
        ({}, True),
        ({"boot": "0" * 36, "machine": "another"}, False),
        ({"locked": [0, 0]}, False),
        ({"locked": "x"}, False),
        ({"locked": None}, False),
    ],
)
def test_a_lock_says_something_of_this_boot_and_this_file_only(image, change, void):
    """The file may be seen through another mount, which has locks of its own."""
    claim = image.path / layout.CLAIM
    claim.touch()
    locked = [claim.stat().st_dev, claim.stat().st_ino]
    claim.write_text(json.dumps({**leases._this_host(), "pids": "pid:[1]", "pid": 1, "locked": locked, **change}))
    if void:
        with image.lease():
            return
    with pytest.raises(ImageBusy), image.lease():
        pass


def test_a_process_of_ours_is_judged_by_its_id_and_by_no_lock(image, another_process):
    """Its capsule may have let go of an image that was not removed."""
    kept: list[int] = []
    with image.lease() as lease:
        lease.claim(another_process.pid, lambda fd: kept.append(os.dup(fd)))
    assert json.loads((image.path / layout.CLAIM).read_text())["locked"]
    os.close(kept[0])
    with pytest.raises(ImageBusy), image.lease():
        pass


@pytest.mark.parametrize(
    ("record", "gone"),
    [
        ({}, False),
        ({"machine": "this"}, False),
        ({"hostname": "this"}, False),
        ({"machine": "this", "hostname": "this"}, True),
        ({"machine": "", "hostname": "this"}, False),
        ({"machine": "this", "hostname": "this", "boot": None}, False),
    ],
)
def test_a_claim_of_another_boot_is_void_on_the_same_machine_only(image, monkeypatch, record, gone):
    here = {**leases._this_host(), "machine": "this", "hostname": "this"}
    monkeypatch.setattr(leases, "_this_host", lambda: here)
    (image.path / layout.CLAIM).write_text(json.dumps({**ELSEWHERE, **record}))
    if gone:
        with image.lease():
            return
    with pytest.raises(ImageBusy), image.lease():
        pass
    assert leases.break_claim(image.path)
    assert not leases.break_claim(image.path)
    with image.lease():
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', '{"pid": "x"}', '{"boot": 7}'])
def test_a_claim_that_cannot_be_read_is_one(image, text):
    (image.path / layout.CLAIM).write_text(text)
    with pytest.raises(ImageBusy), image.lease():
        pass


def test_a_machine_without_an_id_is_never_the_same(image, monkeypatch):
    here = {**leases._this_host(), "machine": "", "hostname": "this"}
    monkeypatch.setattr(leases, "_this_host", lambda: here)
    (image.path / layout.CLAIM).write_text(json.dumps({**ELSEWHERE, "machine": "", "hostname": "this"}))
    with pytest.raises(ImageBusy), image.lease():
        pass


def test_an_image_whose_kernel_lives_can_be_removed(store, image, another_process):
    with image.lease() as lease:
        lease.claim(another_process.pid)
    store.remove(image)
    with pytest.raises(ImageNotFound), image.lease():
        pass
    assert not list(store.root.iterdir())


@pytest.fixture(params=[errno.ENOSPC, errno.EDQUOT])
def full(request, monkeypatch):
    """A disk on which no file can be made any more."""

    def fail(path, *_, **__):
        if not path.is_dir():
            raise OSError(request.param, os.strerror(request.param), str(path))

    def fill():
        for name in ("touch", "mkdir"):
            monkeypatch.setattr(Path, name, fail)

    return fill


def test_a_full_disk_refuses_a_restore_and_not_a_removal(store, image, full):
    full()
    with pytest.raises(NoSpace):
        image.lease()
    store.check(image)
    store.remove(image)
    assert store.images() == []


def test_on_a_full_disk_the_lock_and_the_lease_of_another_still_hold(store, image, full):
    with image.lease():
        full()
        with pytest.raises(ImageBusy):
            store.remove(image)
    store.remove(image)


def test_a_full_disk_does_not_hide_the_lease_of_another_host(store, image, full):
    (image.path / layout.LEASES).mkdir()
    (image.path / layout.LEASES / "3").write_text(json.dumps(ELSEWHERE))
    full()
    with pytest.raises(ImageBusy):
        store.remove(image)


def test_a_removal_does_without_a_lock_that_cannot_be_made(store, image, monkeypatch):
    def fail(_):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(leases.FileLock, "acquire", fail)
    with pytest.raises(NoSpace):
        image.lease()
    store.remove(image)
    assert store.images() == []


def test_a_claim_that_cannot_be_written_means_lack_of_space(store, image, full):
    with image.lease() as lease:
        full()
        with pytest.raises(NoSpace):
            lease.claim(os.getpid())
    store.check(image)


@pytest.mark.parametrize("at", ["hardlink_to", "unlink"])
def test_a_process_that_is_killed_as_it_claims_an_image_damages_nothing(store, at):
    image = publish(store)
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom jupyter_gpu_ckpt.image import lease\n"
        f"found = lease.acquire(Path(sys.argv[1]))\nPath.{at} = lambda *_: os._exit(9)\nfound.claim(os.getpid())"
    )
    assert subprocess.run([sys.executable, "-c", program, str(image.path)], check=False).returncode == 9
    with image.lease():
        store.check(image)
