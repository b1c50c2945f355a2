"""Common parts of the fault tests: a kernel with something to lose, and the promise that each fault must keep."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import waiting
from family import FAMILY, STOPPED
from harness import Notebook, alive
from jupyter_client.asynchronous import AsyncKernelClient

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.lifecycle.preflight import read_process
from jupyter_gpu_ckpt.trace import StepEvent


class Subject:
    """A kernel in which ``x`` is 41, and the messages that clients send it while a fault is under way.

    Of a `family` ``x`` prints as 41 while all children are well.
    """

    def __init__(self, kernel: Notebook, directory: Path) -> None:
        self.kernel = kernel
        self.images = directory / "images"
        self.directory = directory
        # Not `manager.client()`: that one shares the first one's session, hence its identity.
        self._other_tab = AsyncKernelClient(connection_file=kernel.manager.connection_file)
        self._other_tab.load_connection_file()
        self._sent: list[str] = []
        #: Processes that are stopped all the time.
        self.stopped = 0
        #: Names in /dev/shm that end with the kernel.
        self.shared_memory: list[str] = []

    @classmethod
    async def of(cls, kernel: Notebook, directory: Path, code: str = "", *, family: bool = False) -> Subject:
        await kernel.run("import os, socket, subprocess, sys\nx, ran = 41, []")
        subject = cls(kernel, directory)
        if family:
            await kernel.run(f"{FAMILY}\nx = family")
            subject.stopped = STOPPED
            subject.shared_memory.append(await kernel.run("print(family.memory.name)"))
        await kernel.run(code)
        subject._other_tab.start_channels(hb=False)
        # Not `wait_for_ready`, which asks once more every second: a later reply would be one too many.
        await subject._other_tab.kernel_info(reply=True, timeout=60)
        return subject

    def close(self) -> None:
        self._other_tab.stop_channels()

    @property
    def provisioner(self):
        return self.kernel.provisioner

    @property
    def capsule(self) -> Capsule:
        capsule = self.kernel.lifecycle.capsule
        assert capsule is not None
        return capsule

    async def run(self, code: str) -> str:
        return await self.kernel.run(code)

    def send(self) -> None:
        """A cell of a client that does not care what the kernel is going through."""
        self._sent.append(self._other_tab.execute(f"ran.append({len(self._sent)})"))

    async def fails(self, verb: Callable[[], Awaitable[object]], *codes: str) -> GpuCkptError:
        """``verb`` fails with one of ``codes``, an error that says what to do and what is left."""
        try:
            await asyncio.wait_for(verb(), 60)
        except GpuCkptError as error:
            assert error.code in codes, (error, error.details)
            assert error.message
            assert error.hint
            assert error.left
            return error
        raise AssertionError(f"{codes} did not come")

    async def runs_on(self, error: GpuCkptError) -> None:
        """The kernel runs as if nothing had been: state, variables, messages, and nothing left over."""
        assert error.left == "the kernel runs on"
        assert self.kernel.state == "running"
        assert await self.provisioner.poll() is None
        assert await self.kernel.run("print(x)") == "41"
        await self.everything_sent_ran_once()
        assert self.drafts() == []
        stopped = [pid for pid in self.capsule.processes() if (process := read_process(pid)) and process.state in "Tt"]
        assert len(stopped) == self.stopped
        assert alive(self.criu()) == []

    async def stays_away(self, error: GpuCkptError | None = None) -> None:
        """The image is kept, whole, and there is no process."""
        image = self.kernel.lifecycle.image
        assert error is None or error.left == f"the image is kept as {image.id}"
        assert self.kernel.state == "checkpointed"
        assert self.kernel.lifecycle.capsule is None
        self.kernel.lifecycle.engine.store.check(image)
        assert self.drafts() == []
        assert await self.provisioner.poll() is None

    async def leaves_and_wakes(self) -> None:
        """Once the cause is gone, a whole cycle works."""
        await self.provisioner.checkpoint()
        await self.wakes()

    async def wakes(self) -> None:
        """A client's cell brings the kernel back with everything in it."""
        assert await self.kernel.run("print(x)") == "41"
        await self.kernel.settled("running")
        await self.everything_sent_ran_once(may_fail=True)
        assert self.drafts() == []
        assert not self.images.exists() or [path.name for path in self.images.iterdir() if path.is_dir()] == []

    async def everything_sent_ran_once(self, may_fail: bool = False) -> None:
        """Every cell sent has one reply; those that say ok ran, once and in order, those that say error did not."""
        ran = []
        for number, message in enumerate(self._sent):
            reply = await self._other_tab.get_shell_msg(timeout=60)
            assert reply["parent_header"]["msg_id"] == message
            if reply["content"]["status"] == "ok":
                ran.append(number)
            else:
                assert may_fail, reply["content"]
        assert await self.kernel.run("print(ran); ran.clear()") == str(ran)
        assert not await self._other_tab.shell_channel.msg_ready()
        self._sent.clear()

    async def reply(self) -> dict[str, Any]:
        """The reply to the only cell sent."""
        (message,) = self._sent
        reply = await self._other_tab.get_shell_msg(timeout=60)
        assert reply["parent_header"]["msg_id"] == message
        self._sent.clear()
        return reply["content"]

    async def printed(self, stream: str) -> str:
        """The text that cells printed to ``stream``, as far as the client that does not care has not read it yet."""
        text = ""
        while await self._other_tab.iopub_channel.msg_ready():
            message = await self._other_tab.get_iopub_msg(timeout=1)
            if message["msg_type"] == "stream" and message["content"]["name"] == stream:
                text += message["content"]["text"]
        return text

    def drafts(self) -> list[str]:
        return [path.name for path in self.images.glob(".draft-*")] if self.images.exists() else []

    def criu(self) -> list[int]:
        """Pids of CRIU's processes in the kernel's capsule."""
        companions = self.capsule.other_processes()
        return [pid for pid in companions if (process := read_process(pid)) and "--images-dir" in process.command]

    @asynccontextmanager
    async def at(self, step: str, edge: str = "started") -> AsyncIterator[asyncio.Event]:
        """An event that is set when ``step`` starts (or ends); the verb continues meanwhile."""
        loop, reached = asyncio.get_running_loop(), asyncio.Event()

        def sink(event: StepEvent) -> None:
            if (event.kind, event.step) == (edge, step):
                loop.call_soon_threadsafe(reached.set)

        self.provisioner.sinks.append(sink)
        try:
            yield reached
        finally:
            self.provisioner.sinks.remove(sink)

    async def kill_when(self, pids: Callable[[], list[int]], ready: Callable[[], bool] = lambda: True) -> int:
        """SIGKILL the first of ``pids`` as soon as there is one and all is ``ready``."""
        return await asyncio.to_thread(send_when, signal.SIGKILL, pids, ready)


def send_when(number: int, pids: Callable[[], list[int]], ready: Callable[[], bool] = lambda: True) -> int:
    """Send a signal to the first of ``pids`` as soon as there is one and all is ``ready``; return it.

    On a thread, which a busy event loop does not keep from looking: what it waits for may last 0.1 s.
    """
    waiting.until(ready, longest=0.002)
    pid = waiting.until(pids, longest=0.002)[0]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return pid


def under_way(directory: Path, enough: int) -> bool:
    """Return whether an image below ``directory`` has grown to ``enough`` bytes."""
    total = 0
    for path in directory.rglob("*.img"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size
    return total >= enough
