"""SIGKILL at every step of a branch: of the server, of the branch's process, of its capsule's init, of CRIU.

The kernel lives on, and the save point can be restored.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import branch_of
from killing import COUNTS, RESTORE, RESTORED, VALUES, Killing, Remains, capsules, failing, moments, new, of_criu
from waiting import until

from jupyter_gpu_ckpt import trace
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.errors import ImageStale
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.kernel.orphans import find_orphans
from jupyter_gpu_ckpt.kernel.provisioner import GpuCkptProvisioner

VICTIM = Path(__file__).with_name("branching_victim.py")
POINTS = [("copy", ""), *moments(RESTORE), *of_criu(restore="criu_restore")]
PROCESSES = new(moments(RESTORE), *RESTORED)
#: A point at which the branch lives, and its image is still there.
CONTINUES = ("release", "completed")
#: Points at which there is no image of the branch.
BEFORE = [("copy", "")]
KERNEL_ID = "0dead000-0000-4000-8000-000000000002"
SEED = 20


def victim(directory: Path, base: Path, *point: str) -> tuple[int, str]:
    """Exit status and last line of a server that is to be killed at ``point``."""
    with (directory / "victim.log").open("w") as file:  # not a pipe: the kernel that outlives its server would have it
        argv = [sys.executable, str(VICTIM), str(directory), str(base), *point]
        status = subprocess.run(argv, stdout=file, stderr=subprocess.STDOUT, timeout=120).returncode
    log = (directory / "victim.log").read_text()
    assert status in (0, -signal.SIGKILL), log
    return status, log.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "points",
    [
        pytest.param([POINTS[0], CONTINUES, *random.Random(SEED).sample(POINTS[1:], 3)], id="five"),
        pytest.param(POINTS, id="all", marks=[pytest.mark.torture, pytest.mark.timeout(1800)]),
    ],
)
def test_the_server_killed_at_any_step_of_a_branch(tmp_path, runtime_base, criu_binary, points):
    """A branch whose image is complete sleeps in it, or lives, for the next server; one before that leaves nothing."""
    store = Store(tmp_path / "images")

    def living() -> int:
        return sum(each.directory is not None for each in find_orphans(runtime_base, store).orphans)

    try:
        for point in points:
            assert victim(tmp_path, runtime_base, *point) == (-signal.SIGKILL, "dying"), point
            until(lambda: len(capsules(runtime_base)) == living(), "nothing else is left")
            found = {each.session.kernel_id: each for each in find_orphans(runtime_base, store).orphans}
            assert found[KERNEL_ID].directory is not None, point
            saved = [image for image in store.images() if image.is_save_point]
            assert len(saved) == 1
            store.check(saved[0])
        branches = len(find_orphans(runtime_base, store).orphans) - 1
        assert branches == sum(point not in BEFORE for point in points)
        assert victim(tmp_path, runtime_base) == (0, f"{branches} branches continue")
        for image in store.images():
            # Of a branch that had come back from it, and has continued; one that was ended at once leaves it retired.
            if not image.is_save_point and not image.retired:
                with pytest.raises(ImageStale):
                    store.check(image)
        assert find_orphans(runtime_base, store).orphans == [], "a kernel that was shut down sleeps"
        until(lambda: not capsules(runtime_base), "the ends of all capsules")
        store.sweep()
        assert not [*store.root.glob(".draft-*")]
    finally:
        for one in find_orphans(runtime_base, store).orphans:
            if one.directory is not None:
                Capsule.attach(one.directory).close()


@pytest.mark.sweep(1 / 12)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("point", PROCESSES, ids=" ".join)
async def test_a_process_of_a_branch_killed_at_any_step(shared, tmp_path, monkeypatch, point):
    """The branch starts all the same, or nothing is left of it; the next one starts."""
    kernel, store, base = shared.kernel, shared.kernel.lifecycle.engine.store, shared.capsule.kernel_directory.parent
    for image in store.images():
        store.remove(image)
    if await shared.run("print('count' in globals())") == "False":
        await shared.run(COUNTS)
    await shared.run("x = 'then'")
    saved = await shared.provisioner.save("then")
    await shared.run("x = 'now'")
    files, directories = [*saved.path.rglob("*")], [*base.iterdir()]
    remains, killing, sinks = Remains(shared), Killing.of(kernel), []

    def step_traced(provisioner, event) -> None:
        trace.notify(sinks, event)

    async def branch() -> None:
        async with branch_of(saved.id, kernel, tmp_path / "branch") as started:
            await killing.done(started)
            assert started.state == "running" or point[:2] == ("discard_image", "completed")
            if started.state == "running":
                assert await started.run(VALUES) == "then"

    with monkeypatch.context() as patch, killing.at(sinks, point):
        patch.setattr(GpuCkptProvisioner, "step_traced", step_traced)
        error = await failing(branch())
    assert error is None or error.left == f"the image is kept as {saved.id}"
    for _ in range(2):
        assert await shared.run(VALUES) == "now"
        assert (kernel.state, list(await remains.save_points())) == ("running", ["then"])
        assert sorted(saved.path.rglob("*")) == sorted(files)
        assert sorted(base.iterdir()) == sorted(directories)
        assert await failing(branch()) is None
    await shared.provisioner.back("then")
    assert await shared.run(VALUES) == "then"
