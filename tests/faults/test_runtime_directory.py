"""The directory of a kernel's sockets is full, gone or read-only: no verb stops half-way, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from faulty import Subject
from harness import CellFailed, notebook

from jupyter_gpu_ckpt.errors import GpuCkptError


class Place:
    """The runtime directory of all kernels, on a small file system of its own."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.covered = False

    def spoil(self, how: str) -> None:
        if how != "gone" and os.geteuid() != 0:
            pytest.skip("only root can mount a small file system")
        getattr(self, how)()

    def full(self) -> None:
        """Neither a byte nor a name more."""
        fill = os.open(self.base / "fill", os.O_CREAT | os.O_WRONLY, 0o600)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            while True:
                os.write(fill, bytes(4096))
        os.close(fill)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            for number in range(1000):
                (self.base / f"name-{number}").touch()

    def gone(self) -> None:
        for path in self.base.iterdir():
            shutil.rmtree(path)

    def read_only(self) -> None:
        # Over itself: a file system with a file that is open for writing, the owner's lock, cannot be remounted.
        subprocess.run(["mount", "--bind", self.base, self.base], check=True, timeout=30)
        subprocess.run(["mount", "-o", "remount,bind,ro", self.base], check=True, timeout=30)
        self.covered = True

    def repair(self) -> None:
        if self.covered:
            subprocess.run(["umount", "--lazy", self.base], check=True, timeout=30)
            self.covered = False
        for path in [self.base / "fill", *self.base.glob("name-*")]:
            path.unlink(missing_ok=True)


@pytest.fixture
def place(runtime_base) -> Iterator[Place]:
    if os.geteuid() != 0:
        yield Place(runtime_base)
        return
    options = ["-o", "size=1m,nr_inodes=100,mode=0700"]
    subprocess.run(["mount", "-t", "tmpfs", *options, "small", runtime_base], check=True, timeout=30)
    place = Place(runtime_base)
    yield place
    place.repair()
    subprocess.run(["umount", "--lazy", runtime_base], check=True, timeout=30)


@pytest.fixture
async def subject(tmp_path, place, criu_binary):
    async with notebook(tmp_path, place.base, drain_timeout=5.0) as kernel:
        subject = await Subject.of(kernel, tmp_path)
        yield subject
        subject.close()


SPOILT = ["full", "gone", "read_only"]
STATES = {"running": "restore", "suspended": "suspend", "checkpointed": "checkpoint"}


@pytest.mark.sweep
@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("verb", ["checkpoint", "suspend"])
async def test_a_running_kernel_is_checkpointed_or_the_reason_is_given(subject, place, how, verb):
    place.spoil(how)
    try:
        await asyncio.wait_for(getattr(subject.provisioner, verb)(), 60)
    except GpuCkptError as error:
        assert (verb, how) == ("checkpoint", "gone")
        assert error.code == "RUNTIME_DIRECTORY", error
        await subject.runs_on(error)
        return
    place.repair()
    await subject.wakes()


@pytest.mark.sweep
@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("state", ["suspended", "checkpointed"])
async def test_a_sleeping_kernel_wakes_or_the_reason_is_given(subject, place, how, state):
    await getattr(subject.provisioner, STATES[state])()
    place.spoil(how)
    try:
        assert await subject.run("print(x)") == "41"
    except CellFailed as error:
        assert state == "checkpointed"
        assert how != "gone"
        assert "RUNTIME_DIRECTORY" in str(error)
        assert "the image is kept" in str(error)
        await subject.stays_away()
    place.repair()
    await subject.wakes()
    if (state, how) != ("suspended", "gone"):
        await subject.leaves_and_wakes()


@pytest.mark.sweep
@pytest.mark.parametrize("how", SPOILT)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("ending", ["restart", "shutdown"])
async def test_a_kernel_can_be_ended_whatever_its_directory_is_like(subject, place, how, state, ending):
    await getattr(subject.provisioner, STATES[state])()
    place.spoil(how)
    manager = subject.kernel.manager
    await asyncio.wait_for(manager.interrupt_kernel(), 20)
    if ending == "shutdown":
        await asyncio.wait_for(manager.shutdown_kernel(), 60)
        assert not await manager.is_alive()
        return
    await asyncio.wait_for(manager.restart_kernel(), 60)
    await subject.kernel.client.wait_for_ready(timeout=60)
    assert await subject.run("print('x' in globals())") == "False"
    place.repair()
    if subject.kernel.lifecycle is None:
        assert how != "gone", "it could be made again"
    else:
        await subject.run("x, ran = 41, []")
        await subject.leaves_and_wakes()


async def test_a_listener_that_raises_stops_no_plan(subject):
    """The verb goes through, for each kind of listener to a kernel's states and steps."""

    def broken(_) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    subject.provisioner.on_state.append(broken)
    subject.provisioner.sinks.append(broken)
    subject.kernel.lifecycle.on_state.insert(0, broken)
    await subject.leaves_and_wakes()
    await subject.provisioner.suspend()
    await subject.wakes()
