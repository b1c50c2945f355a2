"""SIGKILL of the server at every step of a branch: the kernel lives on, the save point can be restored."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.errors import ImageStale
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.kernel.orphans import find_orphans
from jupyter_gpu_ckpt.lifecycle import plans
from jupyter_gpu_ckpt.lifecycle.plans import State

VICTIM = Path(__file__).with_name("branching_victim.py")
RESTORE = plans.PLANS[State.CHECKPOINTED, plans.Move.RESTORE]
POINTS = [("copy", "")] + [(step.value, edge) for step in RESTORE.steps for edge in ("started", "completed")]
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
        pytest.param([POINTS[0], *random.Random(SEED).sample(POINTS[1:], 3)], id="four"),
        pytest.param(POINTS, id="all", marks=[pytest.mark.torture, pytest.mark.timeout(1800)]),
    ],
)
def test_the_server_killed_at_any_step_of_a_branch(tmp_path, runtime_base, criu_binary, points):
    """A branch whose image is complete sleeps in it, or lives, for the next server; one before that leaves nothing."""
    store = Store(tmp_path / "images")
    try:
        for point in points:
            assert victim(tmp_path, runtime_base, *point) == (-signal.SIGKILL, "dying"), point
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
        store.sweep()
        assert not [*store.root.glob(".draft-*")]
    finally:
        for one in find_orphans(runtime_base, store).orphans:
            if one.directory is not None:
                Capsule.attach(one.directory).close()
