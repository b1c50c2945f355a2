"""Fifty times away and back: nothing grows, neither in the server nor in the kernel nor on disk."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import tempfile
import threading
from pathlib import Path

import pytest
from harness import notebook

CYCLES = 50
#: Bytes by which the server may grow in all cycles together; pools and caches fill, and 400 KB a cycle would be a leak.
SLACK = 20 << 20

KERNEL = """
import gc, json, os, threading
gc.collect()
print(json.dumps({
    "descriptors": len(os.listdir("/proc/self/fd")),
    "threads": threading.active_count(),
    "tasks": len(os.listdir("/proc/self/task")),
    "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
}))
"""


def descendants() -> int:
    """How many processes come from this one: CRIU's, capsules', kernels'."""
    found, fresh = 0, [os.getpid()]
    while fresh:
        children = []
        for pid in fresh:
            with contextlib.suppress(OSError):  # it ends while it is looked at
                for task in os.listdir(f"/proc/{pid}/task"):
                    children += [int(word) for word in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
        found, fresh = found + len(children), children
    return found


def facts(directories: list[Path]) -> dict[str, object]:
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(os.listdir("/proc/self/task")),
        "processes": descendants(),
        "mounts": Path("/proc/self/mountinfo").read_text(),
        "files": sorted(str(path) for directory in directories for path in directory.rglob("*")),
    }


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("cycles", [CYCLES, pytest.param(1000, marks=pytest.mark.torture)])
async def test_nothing_grows(tmp_path, runtime_base, criu_binary, monkeypatch, cycles):
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("TMPDIR", str(scratch))
    async with notebook(tmp_path, runtime_base) as kernel:
        kernel.provisioner.sinks.remove(kernel.steps)  # it keeps what it hears

        async def cycle(number: int) -> None:
            await kernel.provisioner.checkpoint()
            assert await kernel.run(f"print({number})") == str(number)
            await kernel.settled("running")

        for number in range(5):  # pools and caches fill, logs come into being
            await cycle(number)
        directories = [tmp_path / "images", runtime_base, scratch]
        before, inside, size = facts(directories), await kernel.run(KERNEL), rss()
        for number in range(cycles):
            await cycle(number)
        assert facts(directories) == before
        # A descriptor or thread more or less for a moment is none that is left behind.
        for _ in range(10):
            after, first = json.loads(await kernel.run(KERNEL)), json.loads(inside)
            if all(after[name] <= first[name] for name in first):
                break
        else:
            raise AssertionError((after, first))
        assert rss() - size < SLACK
        logs = sum(path.stat().st_size for path in runtime_base.rglob("*") if path.is_file())
        assert logs < 1 << 20, "logs are of the last run only"


async def test_failures_leave_nothing_either(tmp_path, runtime_base, criu_binary):
    """The same for checkpoints and wakes that fail: half of a capsule is as easily forgotten as a whole one."""
    async with notebook(tmp_path, runtime_base) as kernel:
        kernel.provisioner.sinks.remove(kernel.steps)

        async def fail(step: str) -> None:
            def fault(event) -> None:
                if (event.kind, event.step) == ("started", step):
                    raise RuntimeError("injected")

            kernel.provisioner.sinks.append(fault)
            verb = kernel.provisioner.checkpoint if kernel.state == "running" else kernel.provisioner.restore
            with pytest.raises(Exception, match="injected"):
                await verb()
            kernel.provisioner.sinks.remove(fault)

        async def round_of_failures() -> None:
            await fail("dump")
            await fail("publish")
            await kernel.provisioner.checkpoint()
            await fail("criu_restore")
            await fail("connect")
            assert await kernel.run("print(1)") == "1"
            await kernel.settled("running")

        directories = [tmp_path / "images", runtime_base]
        await round_of_failures()
        before = facts(directories)
        for _ in range(5):
            await round_of_failures()
        assert facts(directories) == before
