"""Fifty times away and back: nothing grows, neither in the server nor in the kernel nor on disk."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import json
import os
import re
import tempfile
import threading
from pathlib import Path

import pytest
from harness import Notebook, descendants, notebook, until

CYCLES = 50
TEMPORARY = tempfile.gettempdir() + "/"
#: Bytes by which the server may grow in all cycles together; pools and caches fill, and 400 KB a cycle would be a leak.
SLACK = 20 << 20

# IPython saves its history on a thread after each cell, and has a journal open while it does.
KERNEL = r"""
import collections, contextlib, gc, json, os, re, threading
gc.collect()
descriptors = collections.Counter()
for fd in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):  # the listing's own
        descriptors[re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{fd}"))] += 1
descriptors = {name: count for name, count in descriptors.items() if not name.endswith("history.sqlite-journal")}
print(json.dumps({
    "descriptors": descriptors,
    "threads": sorted(thread.name for thread in threading.enumerate()),
    "tasks": len(os.listdir("/proc/self/task")),
    "processes": len([name for name in os.listdir("/proc") if name.isdigit()]),
}))
"""


def mounts(directories: list[Path]) -> list[str]:
    """Return the mount points, without the temporary directories of others on this machine."""
    ours = tuple(map(str, directories))
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return sorted(point for point in points if point.startswith(ours) or not point.startswith(TEMPORARY))


def descriptors() -> dict[str, int]:
    """Return the count of this process's descriptors, by name, numbers left out."""
    found: collections.Counter[str] = collections.Counter()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{fd}"))] += 1
    return dict(found)


def facts(directories: list[Path]) -> dict[str, object]:
    gc.collect()
    return {
        "descriptors": descriptors(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(os.listdir("/proc/self/task")),
        "processes": len(descendants(os.getpid())),
        "mounts": mounts(directories),
        "files": sorted(str(path) for directory in directories for path in directory.rglob("*")),
    }


async def at_rest(directories: list[Path]) -> dict[str, object]:
    """The facts, once they stay: what a step has left behind may end a moment after it (a closed socket, a thread)."""
    measured = [facts(directories)]
    while len(measured) < 5 or any(one != measured[-1] for one in measured[-5:]):
        assert len(measured) < 200, f"never comes to rest: {measured[-5:]}"
        await asyncio.sleep(0.05)
        measured.append(facts(directories))
    return measured[-1]


async def comes_back_to(before: dict[str, object], directories: list[Path]) -> None:
    """Wait for the old figure: a leak stays for good, while a closing descriptor does not."""
    with contextlib.suppress(AssertionError):
        await until(lambda: facts(directories) == before)
    assert facts(directories) == before


async def settled_facts(kernel: Notebook) -> dict[str, object]:
    """The kernel's own facts, once they stay: while ipykernel works, a thread or a descriptor may live for a moment."""
    measured = [await kernel.run(KERNEL)]
    while len(measured) < 3 or len(set(measured[-3:])) > 1:
        assert len(measured) < 50, f"never comes to rest: {measured[-5:]}"
        measured.append(await kernel.run(KERNEL))
    return json.loads(measured[-1])


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
        before, inside, size = await at_rest(directories), await settled_facts(kernel), rss()
        for number in range(cycles):
            await cycle(number)
        await comes_back_to(before, directories)
        assert await settled_facts(kernel) == inside
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

            kernel.provisioner.faults.append(fault)
            verb = kernel.provisioner.checkpoint if kernel.state == "running" else kernel.provisioner.restore
            with pytest.raises(Exception, match="injected"):
                await verb()
            kernel.provisioner.faults.remove(fault)

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
        before = await at_rest(directories)
        for _ in range(5):
            await round_of_failures()
        await comes_back_to(before, directories)
