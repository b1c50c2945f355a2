"""SIGKILL before and after every traced step: of the server, the CUDA helper, the kernel.  (CRIU: test_leaving.py.)

Afterwards exactly one is true: the kernel lives, or an image of it restores.  A kernel that is itself killed has an
image from the moment on in which the image was published, and before that is lost, which is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faulty import Subject
from waiting import until

from jupyter_gpu_ckpt import machine
from jupyter_gpu_ckpt.engine.capsule import Capsule
from jupyter_gpu_ckpt.errors import CudaUnavailable, GpuCkptError, ImageError
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.kernel.adoption import orphans
from jupyter_gpu_ckpt.machine import State

VICTIM = Path(__file__).with_name("victim.py")
PLANS = {
    "checkpoint": machine.PLANS[State.RUNNING, machine.Checkpoint],
    "restore": machine.PLANS[State.CHECKPOINTED, machine.Restore],
}
POINTS = [
    (verb, step.value, edge) for verb, plan in PLANS.items() for step in plan.steps for edge in ("started", "completed")
]
SEED = 20


def test_every_step_of_both_verbs_is_a_point():
    assert len(POINTS) == 36


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
        living = sum(one.directory is not None for one in orphans(self.base, self.store))
        restorable = 0
        for image in self.store.images():
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
            lambda: sum(truths := self.truths()) == 1 and list(self.truths()) == list(truths),
            "the kernel lives or its image can be restored, and not both",
            30,
        )


@pytest.fixture
def chain(tmp_path, runtime_base, criu_binary):
    chain = Chain(tmp_path, runtime_base)
    yield chain
    for one in orphans(chain.base, chain.store):
        if one.directory is not None:
            Capsule.attach(one.directory).close()


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(random.Random(SEED).sample(POINTS, 6), id="six", marks=pytest.mark.timeout(300)),
        pytest.param(POINTS, id="all", marks=[pytest.mark.torture, pytest.mark.timeout(1800)]),
    ],
)
def test_the_server_killed_at_any_step(chain, points):
    """Each server adopts what the one before it left: the retry.  A counter in the kernel proves that none was lost."""
    for point in points:
        assert chain.victim(*point) == (-signal.SIGKILL, "dying"), point
        chain.exactly_one()
    assert chain.victim()[0] == 0
    chain.exactly_one()
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


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("verb", "step", "edge"), POINTS)
async def test_the_helper_killed_at_any_step(shared, verb, step, edge):
    """It is started anew by the next call.  For a kernel with CUDA state: test_lifecycle_fake_cuda.py and tests/gpu."""
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


KERNEL_POINTS = [point for point in POINTS if point[0] == "checkpoint"]


@pytest.mark.parametrize(
    ("verb", "step", "edge"),
    [
        pytest.param(*point, marks=() if point in random.Random(SEED).sample(KERNEL_POINTS, 3) else pytest.mark.torture)
        for point in KERNEL_POINTS
    ],
)
async def test_the_kernel_killed_at_any_step(subject, verb, step, edge):
    """Who kills the kernel kills the agent in it.  Published or lost: nothing in between, and never silent."""
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
