"""A disk that fills up at any moment of a checkpoint, and writes that fail one by one: CRIU's and ours."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
from pathlib import Path

import pytest
import small_disk
from family import alone_and_with_family
from faulty import Subject
from harness import notebook

from jupyter_gpu_ckpt.errors import GpuCkptError, NoSpace
from jupyter_gpu_ckpt.image import lease
from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.store import Store

SIZES = 20


@pytest.fixture
def small(tmp_path):
    """Sets the size of the file system that the images lie on."""
    with small_disk.mounted(tmp_path / "images") as resize:
        yield resize


@pytest.mark.parametrize("family", [False, True], ids=["alone", "family"])
async def test_a_disk_of_twenty_sizes(small, tmp_path, runtime_base, criu_binary, monkeypatch, family):
    """Preflight would refuse; here it sees free space, as when others fill the disk meanwhile."""
    monkeypatch.setattr(Store, "free", lambda self: 1 << 40)
    async with notebook(tmp_path, runtime_base, drain_timeout=5.0) as kernel:
        subject = await Subject.of(kernel, tmp_path, family=family)
        image = await kernel.provisioner.checkpoint()
        whole = sum(path.stat().st_blocks * 512 for path in image.path.rglob("*"))
        await subject.wakes()
        refused = 0
        for number in range(SIZES):
            small(max(1 << 16, whole * (number + 1) // SIZES))
            try:
                await kernel.provisioner.checkpoint()
            except NoSpace as error:
                refused += 1
                await subject.runs_on(error)
            else:
                await subject.wakes()
        assert refused >= SIZES - 4
        small(1 << 30)
        await subject.leaves_and_wakes()
        subject.close()


# -- CRIU's writes

QUICK = sorted(random.Random(7).sample(range(1, 120), 6))


@alone_and_with_family("subject")
@pytest.mark.parametrize(
    "numbers",
    [pytest.param(QUICK, id="six"), pytest.param(range(1, 1500), id="all", marks=pytest.mark.torture)],
)
async def test_the_nth_write_of_criu_fails(subject, strace, monkeypatch, numbers):
    criu = subject.kernel.lifecycle.engine.criu
    argv, evidence = criu.argv, subject.directory / "strace"
    fired = failed = 0
    for number in numbers:
        rule = "inject=write,writev,pwrite64,splice,sendmsg:error=ENOSPC:when=" + str(number)
        monkeypatch.setattr(criu, "argv", (strace, "-qq", "-o", str(evidence), "-e", rule, *argv))
        try:
            await subject.provisioner.checkpoint()
        except GpuCkptError as error:
            failed += 1
            monkeypatch.setattr(criu, "argv", argv)
            await subject.runs_on(error)
        else:
            monkeypatch.setattr(criu, "argv", argv)
            await subject.wakes()
        if "INJECTED" not in evidence.read_text():
            break  # CRIU made fewer than that
        fired += 1
        evidence.unlink()
    assert fired >= 4, "the fault did not come"
    assert failed >= 1
    await subject.leaves_and_wakes()


# -- ours

PUBLISHER = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from images import publish
from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.image import lease
from jupyter_gpu_ckpt.image.keys import Keyring
from jupyter_gpu_ckpt.image.store import Store
import images
place = Path(sys.argv[1])
store = Store(place / "images", Keyring(place / "keys"))
draft = store.begin("kernel")
for name in ("pages-1.img", "core-1.img"):
    (draft.criu_directory / name).write_bytes(name.encode() * 1000)
print("ready", flush=True)
sys.stdin.readline()
try:
    draft.publish(images.FACTS, claim_pid=1)
except GpuCkptError as error:
    print(error.code)
    draft.discard()
else:
    print("published")
"""
CALLS = "write,fsync,rename,renameat,mkdir,link,linkat,chmod,fchmod,fchmodat,openat,unlink"


def test_every_call_of_a_publish_fails_once(tmp_path, strace):
    """The Nth call that changes the disk, for each N: an image that is whole, or none and nothing left over."""
    codes = []
    images = Path(__file__).resolve().parents[1] / "support"
    for number in range(1, 200):
        place = tmp_path / str(number)
        place.mkdir()
        evidence = place / "strace"
        process = subprocess.Popen(
            [sys.executable, "-c", PUBLISHER, str(place), str(images)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "ready\n"
        rule = f"inject={CALLS}:error=EIO:when={number}"
        tracer = subprocess.Popen(
            [strace, "-f", "-o", str(evidence), "-e", rule, "-p", str(process.pid)], stderr=subprocess.PIPE, text=True
        )
        assert "attached" in tracer.stderr.readline()
        outcome = process.communicate("\n", timeout=60)[0].split()[-1:]
        tracer.communicate(timeout=60)
        if "INJECTED" not in evidence.read_text():
            break
        codes += outcome or ["crashed"]
        store = Store(place / "images", Keyring(place / "keys"))
        store.sweep()
        assert not [path for path in store.root.iterdir() if path.name.startswith(".draft")]
        published = [path for path in store.root.iterdir() if not path.name.startswith(".")]
        assert bool(published) == (outcome == ["published"]), (number, outcome)
        for path in published:
            store.check(store.get(path.name))
    else:
        raise AssertionError("there is no end of calls")
    assert len(codes) > 20
    assert set(codes) <= {"published", "STORE_UNWRITABLE", "KEY_UNUSABLE", "crashed"}
    assert codes.count("STORE_UNWRITABLE") >= 10


async def test_a_wake_without_disk_space_for_its_claim(subject, monkeypatch):
    """The kernel must not live unclaimed: it is ended again, and its image is kept until the disk has space."""
    await subject.provisioner.checkpoint()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(lease, "_process", full)
        error = await subject.fails(subject.provisioner.restore, "NO_SPACE")
    await subject.stays_away(error)
    await subject.wakes()
