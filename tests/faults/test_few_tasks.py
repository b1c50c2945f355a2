"""A control group with few tasks left, in which the server and its kernel are (TasksMax, podPidsLimit)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.errors import GpuCkptError

PIDS = Path("/sys/fs/cgroup/pids")
#: Arguments: the folder of the helpers, a control group, a directory for files and one for sockets.
MAIN = """
import asyncio, json, os, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
group, place, base = map(Path, sys.argv[2:])
(group / "cgroup.procs").write_text(str(os.getpid()))
from harness import notebook, until
from kernel_limits import FILES, LIMITS

async def limited(free, act):
    (group / "pids.max").write_text(str(int((group / "pids.current").read_text()) + free))
    try:
        await act()
        return ""
    except Exception as error:
        return str(error)
    finally:
        (group / "pids.max").write_text("max")

async def main():
    async with notebook(place, base) as kernel:
        async def status():
            await kernel.run("%gpu_checkpoint --status")
        await kernel.run(f"x = 5\\n{LIMITS}{FILES}")
        for free in (0, 1, 2, 3, 5, 7, 9, 11, 14, 20):
            for name, act in (("status", status), ("checkpoint", kernel.provisioner.checkpoint)):
                error = await limited(free, act)
                print(json.dumps([name, free, error, await kernel.run("print(x)"), kernel.state]))
                await kernel.settled("running")
            await kernel.provisioner.checkpoint()
            error = await limited(free, kernel.provisioner.restore)
            print(json.dumps(["wake", free, error, await kernel.run("print(x)"), kernel.state]))
            await kernel.settled("running")

asyncio.run(main())
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group for the number of tasks."""
    path = PIDS / f"gpu-ckpt-{os.getpid()}"
    try:
        path.mkdir()
    except OSError:
        pytest.skip(reason="the number of tasks cannot be limited here: that takes root and cgroups of version 1")
    yield path
    path.rmdir()


def test_a_verb_succeeds_or_says_that_there_are_too_few_and_the_kernel_is_kept(group, tmp_path, criu_binary):
    with tempfile.TemporaryDirectory(prefix="gc-") as base:
        support = str(Path(__file__).resolve().parents[1] / "support")
        argv = [sys.executable, "-c", MAIN, support, str(group), str(tmp_path), base]
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr[-4000:]
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    assert len(rows) == 30
    for name, free, error, x, _ in rows:
        assert x == "5", (name, free)
        assert not error or "LIMIT_REACHED" in error, (name, free, error)
        assert not error or name != "status", (free, error)
    assert [name for name, free, error, *_ in rows if free == 20 and error] == []


async def test_a_panic_of_a_library_is_a_failure_like_any_other(kernel):
    """BLAKE3 panics where it gets no threads: that is an exception, but no `Exception`."""

    class PanicException(BaseException):
        pass

    def panic(event) -> None:
        if (event.kind, event.step) == ("started", "publish"):
            raise PanicException("no threads")

    await kernel.run("x = 5")
    kernel.provisioner.faults.append(panic)
    with pytest.raises(GpuCkptError, match="PanicException: no threads"):
        await kernel.provisioner.checkpoint()
    assert await kernel.run("print(x)") == "5"
