"""SIGKILL before and after every traced step: of the server, the CUDA helper, the kernel.  (CRIU: test_leaving.py.)

Afterwards exactly one is true: the kernel lives, or an image of it restores.  A kernel that is itself killed has an
image from the moment on in which the image was published, and before that is lost, and an error says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import pytest_asyncio
from family import alone_and_with_family
from faulty import Subject
from harness import notebook
from killing import CHECKPOINT, RESTORE, SAVE, capsules, moments, of_criu
from waiting import until

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.errors import CudaUnavailable, GpuCkptError, ImageError
from jupyter_gpu_ckpt.image import layout
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.kernel import engine
from jupyter_gpu_ckpt.kernel.orphans import find_orphans
from jupyter_gpu_ckpt.lifecycle import host_memory
from jupyter_gpu_ckpt.testing.fake_helper import FakeHelper
from jupyter_gpu_ckpt.testing.fake_host import FakeHost, allocation_cell, install

VICTIM = Path(__file__).with_name("victim.py")
POINTS = [
    (verb, *moment)
    for verb, steps in {"checkpoint": CHECKPOINT, "restore": RESTORE}.items()
    for moment in moments(steps)
]
#: The same of save points: a kernel that goes back is checkpointed, unless it sleeps, and restored from another image.
SAVE_POINTS = [
    *(("save", *moment) for moment in (*moments(SAVE), *of_criu(dump="dump"))),
    *(("back", *moment) for moment in (*moments((*CHECKPOINT, *RESTORE)), *of_criu(dump="dump", restore="quiesce"))),
    *(("back asleep", *moment) for moment in (*moments(RESTORE), *of_criu(restore="criu_restore"))),
]
#: The server is killed while CRIU runs, too.
SERVER_POINTS = [
    *POINTS,
    *(("checkpoint", *moment) for moment in of_criu(dump="dump")),
    *(("restore", *moment) for moment in of_criu(restore="criu_restore")),
]
#: Moments at which a kernel that goes back has a second capsule.
TWO_CAPSULES = [("back", "publish", "completed"), ("back", "match", "completed")]
#: Moments at which the image that it slept in is a save point.
ASLEEP = [("back asleep", "match", "started"), ("back asleep", "criu_restore", "completed")]
SEED = 20


def test_every_step_of_each_verb_is_a_point():
    assert len(POINTS) == 36
    assert len(SAVE_POINTS) == 28 + 2 + 36 + 4 + 18 + 2


class Chain:
    """One kernel, and the servers that come and go over it."""

    def __init__(self, directory: Path, base: Path) -> None:
        self.directory, self.base = directory, base
        self.store = Store(directory / "images")

    def victim(self, *point: str) -> tuple[int, str]:
        """Exit status and last line of a server for which ``point`` was set."""
        argv = [sys.executable, str(VICTIM), str(self.directory), str(self.base), *(point or ("", "", ""))]
        log = self.directory / "victim.log"
        with log.open("w") as file:
            # Files, not pipes: the kernel that outlives its server would hold them open.
            status = subprocess.run(argv, stdout=file, stderr=subprocess.STDOUT, timeout=120).returncode
        lines = [line for line in log.read_text().splitlines() if line in ("dying", "alive")]
        assert lines or status == 0, log.read_text()
        return status, lines[-1] if lines else ""

    def truths(self) -> tuple[int, int]:
        """Kernels that live, and images that can be restored."""
        living = sum(one.directory is not None for one in find_orphans(self.base, self.store).orphans)
        restorable = 0
        for image in self.store.images():
            if image.is_save_point:
                self.store.check(image)
            if image.retired:
                continue
            try:
                with image.lease():
                    self.store.check(image)
            except ImageError:
                continue
            restorable += 1
        return living, restorable

    def exactly_one(self) -> None:
        """Once what the dead server held has been let go of."""
        until(
            lambda: (
                sum(truths := self.truths()) == 1
                and list(self.truths()) == list(truths)
                and len(capsules(self.base)) == truths[0]
            ),
            "the kernel lives or its image can be restored, and not both, and no other capsule is left",
            30,
        )


@pytest.fixture
def chain(tmp_path, runtime_base, criu_binary):
    chain = Chain(tmp_path, runtime_base)
    yield chain
    for one in find_orphans(chain.base, chain.store).orphans:
        if one.directory is not None:
            Capsule.attach(one.directory).end()
    for image in chain.store.images():
        chain.store.remove(image)  # with its links in /dev/shm


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(random.Random(SEED).sample(SERVER_POINTS, 6), id="six", marks=pytest.mark.timeout(300)),
        pytest.param(
            [*random.Random(SEED).sample(SAVE_POINTS, 3), *TWO_CAPSULES, *ASLEEP],
            id="save points",
            marks=pytest.mark.timeout(300),
        ),
        pytest.param(SERVER_POINTS, id="all", marks=[pytest.mark.torture, pytest.mark.timeout(1800)]),
        pytest.param(SAVE_POINTS, id="all save points", marks=[pytest.mark.torture, pytest.mark.timeout(3600)]),
    ],
)
def test_the_server_killed_at_any_step(chain, points):
    """Each server attaches the kernel that the last one left.  A counter in the kernel proves that no cell was lost."""
    for point in points:
        assert chain.victim(*point) == (-signal.SIGKILL, "dying"), point
        chain.exactly_one()
    assert chain.victim()[0] == 0
    chain.exactly_one()
    assert not [*chain.store.root.glob(f"{layout.DRAFT}*")]
    assert len([*chain.base.glob("*.capsule-*")]) <= 1
    assert len((chain.directory / "story").read_text().splitlines()) == len(points) + 1


# -- the helper and the kernel, in one process


async def brought_to(subject: Subject, verb: str) -> None:
    state = "running" if verb == "checkpoint" else "checkpointed"
    if subject.kernel.state != state:
        await (subject.provisioner.restore if state == "running" else subject.provisioner.checkpoint)()


def killing(subject: Subject, pids, step: str, edge: str) -> list[int]:
    """SIGKILL ``pids()`` at a point of the next verb; who was killed."""
    killed: list[int] = []

    def sink(event) -> None:
        if not killed and (event.kind, event.step) == (edge, step):
            for pid in pids():
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            killed.append(0)

    subject.provisioner.sinks.append(sink)
    return killed


@pytest.mark.sweep
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("verb", "step", "edge"), POINTS)
async def test_the_helper_killed_at_any_step(shared, verb, step, edge):
    """The next call starts the helper anew.  With device memory: below, test_lifecycle_fake_cuda.py and tests/gpu."""
    cuda = shared.kernel.lifecycle.engine.cuda

    def pids() -> list[int]:
        return [pid] if (pid := cuda._helper.pid) is not None else []

    await brought_to(shared, verb)
    with contextlib.suppress(CudaUnavailable):  # the helper runs all the same
        cuda.available()
    assert pids()
    killed = killing(shared, pids, step, edge)
    sink = shared.provisioner.sinks[-1]
    try:
        await getattr(shared.provisioner, verb)()
    except GpuCkptError as error:
        assert error.code == "HELPER_GONE"
        assert error.left
    finally:
        shared.provisioner.sinks.remove(sink)
    assert killed[:1] != [0], "there was no helper to kill"
    images = [path for path in shared.images.iterdir() if path.is_dir()]
    assert bool(shared.kernel.lifecycle.capsule) != bool(images)
    await getattr(shared.provisioner, verb)()
    assert await shared.run("print(x)") == "41"
    await shared.kernel.settled("running")


# -- the helper of a kernel that holds device memory

GPU, HELD = "GPU-00000000-0000-0000-0000-00000000000a", 60 << 20
CALLS = {"checkpoint": ("cuda.lock", "cuda.checkpoint"), "restore": ("nvml.free", "cuda.restore", "cuda.unlock")}
#: Before and after every step, and in the middle of each call that changes something: not yet done, or done unheard.
HELPER_POINTS = POINTS + [(verb, op, when) for verb, ops in CALLS.items() for op in ops for when in ("before", "after")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def on_gpu(tmp_path_factory, criu_binary):
    """A kernel with device memory: driver and GPU are fakes, helper, kernel, CRIU and images are real."""
    directory, base = tmp_path_factory.mktemp("on-gpu"), Path(tempfile.mkdtemp(prefix="gc-"))
    helpers: list[FakeHelper] = []

    def before(driver: FakeHost) -> FakeHelper:
        helpers.append(FakeHelper(driver))
        return helpers[0]

    with mock.patch.dict(engine._engines, clear=True):
        host = install({GPU: 100 << 20}, directory / "images", before)
        async with notebook(directory, base) as kernel:
            subject = await Subject.of(kernel, directory, allocation_cell({GPU: HELD}))
            yield subject, host, helpers[0]
            subject.close()
    helpers[0].close()
    shutil.rmtree(base, ignore_errors=True)


def on_the_gpu(subject: Subject, host: FakeHost) -> int:
    """Bytes that are taken there."""
    if subject.kernel.lifecycle.capsule is not None:
        host_memory.device_bytes(subject.kernel.lifecycle.kernel)  # the fake learns of a process as it is asked for it
    host.call("nvml.gpus", timeout_s=60)  # and of its end
    return host.gpus[GPU] - host.free(GPU)


@pytest.mark.sweep(1 / 8)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("verb", "step", "edge"), HELPER_POINTS)
async def test_the_helper_of_a_kernel_on_the_gpu_killed_at_any_step(on_gpu, monkeypatch, verb, step, edge):
    """The kernel is where it was, with its device memory, or where it was to go; and the next try goes there."""
    subject, host, helper = on_gpu
    await brought_to(subject, verb)
    assert on_the_gpu(subject, host) == (HELD if verb == "checkpoint" else 0)
    helper.call("cuda.open", timeout_s=60)
    killed: list[int] = []

    def kill() -> None:
        if not killed and helper.pid is not None:
            killed.append(helper.pid)
            os.kill(killed[0], signal.SIGKILL)

    def sink(event) -> None:
        if (event.kind, event.step) == (edge, step):
            kill()

    call = host.call

    def called(op: str, **args):
        if op == step and edge == "before":
            kill()
        done = call(op, **args)
        if op == step and edge == "after":
            kill()
        return done

    monkeypatch.setattr(host, "call", called)
    subject.provisioner.sinks.append(sink)
    try:
        await getattr(subject.provisioner, verb)()
    except GpuCkptError as error:
        assert error.code == "HELPER_GONE"
        assert error.left
        assert subject.kernel.state == ("running" if verb == "checkpoint" else "checkpointed")
    finally:
        subject.provisioner.sinks.remove(sink)
    assert killed, "there was no helper to kill, or the moment did not come"
    until(lambda: helper.pid != killed[0], "the end of the helper was seen: our own look at the GPU asks the next one")
    lives = subject.kernel.lifecycle.capsule is not None
    assert lives != any(path.is_dir() for path in subject.images.iterdir())
    assert on_the_gpu(subject, host) == (HELD if lives else 0)
    await getattr(subject.provisioner, verb)()
    assert await subject.run("print(x)") == "41"
    await subject.kernel.settled("running")
    assert on_the_gpu(subject, host) == HELD
    assert not any(process.ruined for process in host.processes.values())


KERNEL_POINTS = [point for point in POINTS if point[0] == "checkpoint"]


@pytest.mark.sweep(1 / 15)
@alone_and_with_family("subject")
@pytest.mark.parametrize(("verb", "step", "edge"), KERNEL_POINTS)
async def test_the_kernel_killed_at_any_step(subject, verb, step, edge):
    """The agent in the kernel dies with it.  Published or lost: nothing in between, and never silent."""
    pid = subject.capsule.host_pid
    killing(subject, lambda: [pid] if subject.kernel.lifecycle.capsule else [], step, edge)
    try:
        await asyncio.wait_for(subject.provisioner.checkpoint(), 60)
    except GpuCkptError as error:
        assert error.code == "KERNEL_LOST"
        assert step not in ("publish", "end_process", "sleep")
        assert subject.kernel.state == "dead"
        assert subject.drafts() == []
        return
    # What CRIU has written is the kernel, whatever becomes of the process afterwards.
    assert step in ("publish", "end_process", "sleep") or (step, edge) == ("dump", "completed")
    assert await subject.run("print(x)") == "41"
    await subject.kernel.settled("running")
