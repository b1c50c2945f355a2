"""SIGKILL of a kernel's process, its capsule's init, or CRIU, at a step of a verb: which there are, and the kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from faulty import Subject, under_way
from harness import Notebook, alive, descendants, until
from waiting import until as wait_until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.image import layout, save_point
from jupyter_gpu_ckpt.image.image import Image
from jupyter_gpu_ckpt.lifecycle import plans
from jupyter_gpu_ckpt.lifecycle.plans import Step
from jupyter_gpu_ckpt.trace import Sink, StepEvent

#: Errors of a verb under which something was killed.
CODES = {"KERNEL_LOST", "CAPSULE_GONE", "CRIU_KILLED"}
#: A thread that counts, and what a kernel prints in which it counts on: its ``x``.
COUNTS = """
import threading, time
count = [0]
def counting():
    while True:
        count[0] += 1
        time.sleep(0.001)
threading.Thread(target=counting, daemon=True).start()
"""
VALUES = """
before, deadline = count[0], time.monotonic() + 60
while count[0] == before and time.monotonic() < deadline:
    time.sleep(0.001)
print(x if count[0] > before else "it does not count")
"""

CHECKPOINT = plans.PLANS[plans.State.RUNNING, plans.Move.CHECKPOINT].steps
RESTORE = plans.PLANS[plans.State.CHECKPOINTED, plans.Move.RESTORE].steps
SAVE = plans.PLANS[plans.State.RUNNING, plans.Move.SAVE].steps
#: Of a restore: when its capsule is made, when its processes are there, and the step in which CRIU makes them.
RESTORED = ("match", "completed"), ("criu_restore", "completed"), "criu_restore"

#: A step, and its start or end (``started``, ``completed``), or what CRIU is at then (`of_criu`).
Moment = tuple[str, str]
#: A moment, and a process of the ``present`` capsule, which the kernel is in as the verb begins, or of a ``new`` one.
Point = tuple[str, str, str, str]


def moments(steps: Sequence[Step]) -> list[Moment]:
    """Return the start and the end of each step."""
    return [(step.value, edge) for step in steps for edge in ("started", "completed")]


def of_criu(*, dump: str = "", restore: str = "") -> list[Moment]:
    """Return moments of CRIU's dump and restore, which begin in these steps, or behind their start."""
    dumps = [(dump, "criu begins"), (dump, "criu writes")]
    restores = [(restore, "criu begins"), (restore, "criu restores")]
    return [*(dumps if dump else ()), *(restores if restore else ())]


def present(steps: Sequence[Moment]) -> list[Point]:
    """Return the points at which something of the capsule is killed that the kernel is dumped in."""
    ends = [(*moment, "present", who) for moment in steps for who in ("kernel", "init")]
    return ends + [(*moment, "present", who) for moment in of_criu(dump="dump") for who in ("kernel", "init", "criu")]


def new(steps: Sequence[Moment], made: Moment, restored: Moment, restore: str) -> list[Point]:
    """Return the same of the capsule that it is restored in.

    ``made``, ``restored``: when it is there, and its processes are; ``restore``: the step in which CRIU begins.
    """
    inits = [(*moment, "new", "init") for moment in steps[steps.index(made) :]]
    kernels = [(*moment, "new", "kernel") for moment in steps[steps.index(restored) :]]
    begins, restores = of_criu(restore=restore)
    of = [(begins, "init"), (begins, "criu"), (restores, "kernel"), (restores, "init"), (restores, "criu")]
    return [*inits, *kernels, *((*moment, "new", who) for moment, who in of)]


@dataclass
class Killing:
    """The processes that a verb of a kernel has and makes, and the kill of one of them, or of this one.

    ``images``: the image directory; ``inner_pid``: the kernel's pid as it sees it itself; ``init``: its capsule's init.
    """

    images: Path
    inner_pid: int
    init: int = 0
    killed: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, kernel: Notebook) -> Killing:
        lifecycle = kernel.lifecycle
        images, capsule = lifecycle.engine.store.root, lifecycle.capsule
        if capsule is None:
            return cls(images, lifecycle.image.manifest.pid)
        return cls(images, capsule.inner_pid, capsule._init_pid)

    def pids(self, which: str, who: str) -> list[int]:
        """Return those that are there now, of the kernel's capsule from before (``present``) or another (``new``)."""
        if who == "server":
            return [os.getpid()]
        of = [self.init] if which == "present" else [pid for pid in inits() if pid != self.init]
        if who == "init":
            return of
        if who == "criu":
            return [pid for init in of for pid in procfs.children(init) if "--images-dir" in _arguments(pid)]
        return [pid for init in of for pid in descendants(init) if _inner_pid(pid) == self.inner_pid]

    def kill(self, which: str, who: str) -> None:
        """SIGKILL one of them, as soon as there is one.  Says so before the server's end."""
        pid = wait_until(lambda: self.pids(which, who), f"there is a {which} {who}")[0]
        if who == "server":
            print("dying", flush=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.killed.append(pid)

    def kill_during(self, moment: str, which: str, who: str) -> None:
        """The same, at a moment of CRIU's."""
        wait_until(lambda: self.pids(which, "criu"), f"a {which} CRIU runs", longest=0.001)
        if moment == "criu writes":
            wait_until(lambda: any(under_way(path, 1) for path in self.images.glob(f"{layout.DRAFT}*")), longest=0.001)
        if moment == "criu restores":
            wait_until(lambda: self.pids(which, "kernel"), longest=0.001)
        self.kill(which, who)

    async def done(self, kernel: Notebook) -> None:
        """Wait for the end of who was killed, and until ``kernel`` is known to have ended by that, if it has.

        A server looks for that every few seconds.
        """
        await until(lambda: not alive(self.killed))
        if (capsule := kernel.lifecycle.capsule) is not None and {capsule.host_pid, capsule._init_pid} & {*self.killed}:
            while await kernel.provisioner.poll() is None:
                await asyncio.sleep(0.05)

    @contextmanager
    def at(self, sinks: list[Sink], point: Point, of: Callable[[StepEvent], bool] = lambda _: True) -> Iterator[None]:
        """Kill at a point of the verb in the body.  ``of``: which events are of that verb."""
        step, edge, which, who = point
        threads: list[threading.Thread] = []

        def sink(event: StepEvent) -> None:
            begins = edge if edge in ("started", "completed") else "started"
            if self.killed or threads or (event.kind, event.step) != (begins, step) or not of(event):
                return
            if edge == begins:
                self.kill(which, who)
            else:
                threads.append(threading.Thread(target=self.kill_during, args=(edge, which, who)))
                threads[0].start()

        sinks.append(sink)
        try:
            yield
        finally:
            sinks.remove(sink)
            for thread in threads:
                thread.join()
        assert self.killed, "the moment did not come"


async def failing(verb: Awaitable[object]) -> GpuCkptError | None:
    """Return the error of a verb that may fail: one that says what to do, and what is left."""
    try:
        await asyncio.wait_for(verb, 120)
    except GpuCkptError as error:
        assert error.code in CODES, (error, error.details)
        assert error.hint
        assert error.left
        return error
    return None


class Remains:
    """Remains of a verb besides the kernel's capsule: what is there before it is none of them."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._processes = set(descendants(os.getpid())) - set(self._capsule())

    def _capsule(self) -> list[int]:
        """Return the processes of the kernel's capsule."""
        if (capsule := self._subject.kernel.lifecycle.capsule) is None:
            return []
        outer = procfs.stat(capsule._init_pid).parent
        return [outer, *descendants(outer)]

    async def save_points(self) -> dict[str, Image]:
        """Return the save points, by name, which can be restored; there is nothing else but what the kernel needs."""
        lifecycle = self._subject.kernel.lifecycle
        await until(lambda: not self.too_many(), 30)
        own, capsule, images = lifecycle.home.runtime_dir, lifecycle.capsule, self._subject.images
        assert not [mount for mount in procfs.mounts() if mount.point.startswith((str(own.parent), str(images)))]
        assert self._subject.drafts() == []
        beside = {*own.parent.glob(f"{own.name}.capsule-*")}
        assert beside <= ({capsule.directory} if capsule is not None else set())
        for image in (found := lifecycle.engine.store.images()):
            assert image.is_save_point or image.id == lifecycle.image.id
            lifecycle.engine.store.check(image)
            with image.lease():
                pass
        return save_point.of_kernel(found, lifecycle.home.kernel_id)

    def too_many(self) -> list[int]:
        """Return processes that came since, and are not of the kernel's capsule."""
        return alive(list({*descendants(os.getpid())} - self._processes - {*self._capsule()}))


def inits() -> list[int]:
    """Return the host pids of the inits of capsules below this process."""
    return [pid for pid in descendants(os.getpid()) if _inner_pid(pid) == 1]


def capsules(base: Path) -> list[int]:
    """Return the inits of all capsules with a directory below ``base``, of any server."""
    below = (pid for pid in procfs.pids() if any(str(base) in word for word in _arguments(pid)))
    return [pid for pid in below if _inner_pid(pid) == 1]


def _arguments(pid: int) -> Sequence[str]:
    with contextlib.suppress(*procfs.GONE):
        return procfs.arguments(pid)
    return ()


def _inner_pid(pid: int) -> int:
    """Return the pid that a process has in its own namespace; 0 for one of ours, or that has ended."""
    with contextlib.suppress(*procfs.GONE):
        pids = procfs.status(pid)["NSpid"].split()
        return 0 if len(pids) == 1 or procfs.stat(pid).has_ended else int(pids[-1])
    return 0
