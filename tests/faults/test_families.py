"""Faults that only a kernel with children has: they are killed, end, fork and exec at every moment of a checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from family import with_family
from faulty import Subject
from harness import alive, descendants, until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.lifecycle import plans
from jupyter_gpu_ckpt.lifecycle.plans import State

CHECKPOINT = plans.PLANS[State.RUNNING, plans.Move.CHECKPOINT]
POINTS = [(step.value, edge) for step in CHECKPOINT.steps for edge in ("started", "completed")]
PUBLISHED = ("publish", "end_process", "sleep")


async def brought_to_run(subject: Subject) -> None:
    if subject.kernel.state == "checkpointed":
        await subject.provisioner.restore()


async def victim(subject: Subject, expression: str = "family.victim()") -> int:
    """The pid, outside the capsule, of the child that ``expression`` in the kernel names."""
    inner = await subject.run(f"print({expression})")
    (pid,) = [pid for pid in subject.capsule.processes() if procfs.status(pid)["NSpid"].split()[-1] == inner]
    return pid


@contextlib.contextmanager
def at_point(subject: Subject, step: str, edge: str, work: Callable[[], object]):
    """Do ``work`` once as ``step`` starts or has ended; the names of what was done."""
    done: list[str] = []

    def sink(event) -> None:
        if not done and (event.kind, event.step) == (edge, step):
            done.append(step)
            work()

    subject.provisioner.sinks.append(sink)
    try:
        yield done
    finally:
        subject.provisioner.sinks.remove(sink)


def killed(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended with its capsule
        os.kill(pid, signal.SIGKILL)


@pytest.mark.sweep(1 / 4)
@pytest.mark.asyncio(loop_scope="module")
@with_family("shared")
@pytest.mark.parametrize(("step", "edge"), POINTS)
async def test_a_child_killed_at_any_step(shared, step, edge):
    """The child is dead in the kernel, or lives again in the image; no other process is harmed."""
    await brought_to_run(shared)
    pid = await victim(shared)
    with at_point(shared, step, edge, lambda: killed(pid)) as done:
        await shared.provisioner.checkpoint()
    assert done
    await shared.wakes()
    lives = await shared.run("print(family.lost.poll() is None)") == "True"
    assert lives is (step in PUBLISHED or (step, edge) == ("dump", "completed"))


@with_family("shared")
@pytest.mark.parametrize("times", [1, 100])
@pytest.mark.asyncio(loop_scope="module")
async def test_children_killed_between_the_dump_and_the_inspection(shared, monkeypatch, times):
    """The dump is tried again without them; where that does not help, the kernel runs on."""
    await brought_to_run(shared)
    await shared.run("more = [family.filter() for _ in range(10)]")
    pids = [await victim(shared, f"more[{number}].pid") for number in range(10)]
    inspect, killings = Capsule.inspect, []

    def late(capsule: Capsule, **options: bool):
        if capsule is shared.kernel.lifecycle.capsule and len(killings) < times and pids:
            killings.append(pids.pop())
            killed(killings[-1])
            asyncio.run(until(lambda: not alive(killings)))
        return inspect(capsule, **options)

    monkeypatch.setattr(Capsule, "inspect", late)
    if times == 1:
        await shared.provisioner.checkpoint()
    else:
        error = await shared.fails(shared.provisioner.checkpoint, "PROCESS_ENDED")
        assert "ended during the checkpoint" in error.message
        monkeypatch.undo()
        await shared.runs_on(error)
        await shared.provisioner.checkpoint()
    monkeypatch.undo()
    await shared.wakes()
    assert await shared.run("print(sum(one.poll() is None for one in more))") == str(10 - len(killings))
    await shared.run("for one in more: one.kill(); one.communicate()")


@pytest.mark.sweep(1 / 6)
@with_family("subject")
@pytest.mark.parametrize(("step", "edge"), POINTS)
async def test_the_capsules_init_killed_at_any_step(subject, step, edge):
    """All children end with it.  The image is published, or all of it is lost, and an error says so."""
    init = subject.capsule._init_pid
    everybody = [init, *descendants(init)]
    with at_point(subject, step, edge, lambda: killed(init)) as done:
        try:
            await asyncio.wait_for(subject.provisioner.checkpoint(), 60)
            error = None
        except GpuCkptError as raised:
            error = raised
    assert done
    await until(lambda: not alive(everybody))
    assert subject.drafts() == []
    while error is not None and subject.shared_memory:  # who knew of it was killed, too: as with any kernel
        Path("/dev/shm", subject.shared_memory.pop()).unlink(missing_ok=True)
    if error is None:
        assert step in PUBLISHED or (step, edge) == ("dump", "completed"), "that is when publish begins"
        await subject.wakes()
        return
    assert error.code in ("KERNEL_LOST", "CAPSULE_GONE"), error
    assert step not in PUBLISHED[1:]
    assert subject.kernel.state == "dead"


FORKING = """
import time
beside = subprocess.Popen([sys.executable, "-S", "-c", '''
import os, time
while True:
    if not (child := os.fork()):
        time.sleep(0.03)
        os._exit(0)
    if os.fork() == 0:
        os._exit(0)
    time.sleep(0.02)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass
'''])
"""
BECOMING = """
beside = subprocess.Popen(["sh", "-c", 'exec sh -c "$0" "$0"', 'sleep 0.01; exec sh -c "$0" "$0"'])
"""


@with_family("subject")
@pytest.mark.parametrize("code", [FORKING, BECOMING], ids=["forks", "execs"])
@pytest.mark.parametrize("cycles", [2, pytest.param(60, marks=pytest.mark.torture)])
async def test_a_child_that_never_rests(subject, code, cycles):
    """A hundred processes a second that begin and end, or a program that becomes another one all the time."""
    await subject.run(code)
    for _ in range(cycles):
        await subject.leaves_and_wakes()
        assert await subject.run("print(beside.poll())") == "None"
    await subject.run("beside.kill(); _ = beside.wait()")


ENDING = """
import threading
def end_all():
    for one in ending:
        one.stdin.close()
        threading.Event().wait(0.02)
ending = [family.filter() for _ in range(60)]
threading.Thread(target=end_all).start()
"""


@with_family("subject")
@pytest.mark.parametrize("cycles", [1, pytest.param(40, marks=pytest.mark.torture)])
async def test_children_that_end_one_after_the_other(subject, cycles):
    """Fifty a second, by themselves; each has ended once and with its own status, before the checkpoint or after it."""
    for _ in range(cycles):
        await subject.run(ENDING)
        await subject.leaves_and_wakes()
        assert await subject.run("print([one.wait(20) for one in ending] == [0] * 60)") == "True"
        await subject.run("for one in ending: one.stdout.close()")


@pytest.mark.skipif(os.geteuid() == 0, reason="root's CRIU saves shared memory itself: run by tests/test_rootless.py")
@with_family("subject")
async def test_every_write_of_shared_memory_fails_once(subject, strace):
    """The memory is full, or the image's disk: that is said, and nobody is left with a lock of its own."""
    evidence, codes = subject.directory / "strace", []
    for number in range(1, 100):
        rule = f"inject=ftruncate:error=ENOSPC:when={number}"
        tracer = subprocess.Popen(
            [strace, "-o", str(evidence), "-e", rule, "-p", str(subject.capsule._init_pid)],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert "attached" in tracer.stderr.readline()
        try:
            await subject.provisioner.checkpoint()
        except GpuCkptError as error:
            codes.append(error.code)
            tracer.terminate()
            tracer.communicate(timeout=60)
            await subject.runs_on(error)
        else:
            tracer.communicate(timeout=60)
            await subject.wakes()
            break
    assert "INJECTED" not in evidence.read_text()
    assert set(codes) == {"DELETED_MAPPING", "NO_SPACE"}


@with_family("heavy")
@pytest.mark.parametrize("kills", [3, pytest.param(150, marks=pytest.mark.torture)])
async def test_a_child_killed_at_any_moment_of_a_dump(heavy, kills):
    """A dump that CRIU gives up because of it is tried again."""
    chance = random.Random(kills)
    for _ in range(kills):
        pid, delay = await victim(heavy), chance.uniform(0.0, 0.4)
        async with heavy.at("dump") as dumping:
            leaving = asyncio.create_task(heavy.provisioner.checkpoint())
            await dumping.wait()
            await asyncio.sleep(delay)  # the moment is the point of this test
            killed(pid)
            await leaving
        await heavy.wakes()
