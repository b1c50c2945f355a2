"""A server with one real kernel that shares GPUs with those of other servers, run as a program.

``python sharing_program.py '{"directory": ..., "base": ..., "library": ..., "doubles": ..., "gpus": {...}, ...}'``.
The driver is a double; how much each kernel has of the GPUs is in a file, which the drivers of all servers read.  The
kernel begins off the GPU.  Then each line of stdin is a cell, ``name seconds`` (with ``stop`` the server stops as soon
as its kernel's memory is to come); lines of stdout are ``ready``, ``said name text`` for what a cell says that waits,
and ``ended name intact``.  ``PYTHONPATH`` has the directories of tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from harness import alive, notebook
from library_accounting import Accounting
from sharing_kernels import CELL, MIB, RULES

from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.cuda.cuda import OUT_OF_MEMORY
from jupyter_gpu_ckpt.cuda.held_memory import HeldMemory
from jupyter_gpu_ckpt.kernel import engine
from jupyter_gpu_ckpt.lifecycle import context, resume
from jupyter_gpu_ckpt.testing.fake_cuda import FakeCuda, FakeDriver, FakeGpus
from jupyter_gpu_ckpt.testing.fake_host import use_engine


def occupied(directory: Path, but: str = "") -> dict[str, int]:
    """Return the bytes of each GPU that kernels of the servers have whose processes live; but for one server's."""
    found: dict[str, int] = {}
    for path in directory.glob("*.json"):
        if path.name != but:
            for pid, memory in json.loads(path.read_text()).items():
                for gpu, bytes in memory.items() if alive([int(pid)]) else ():
                    found[gpu] = found.get(gpu, 0) + bytes
    return found


class SharedDriver(FakeDriver):
    """A driver whose GPUs other servers' kernels use, too."""

    def __init__(self, gpus: dict[str, int], directory: Path) -> None:
        super().__init__(gpus)
        self._directory, self._file = directory, f"{os.getpid()}.json"
        self._publishing = threading.Lock()

    def free(self, uuid: str) -> int:
        return max(0, super().free(uuid) - occupied(self._directory, self._file).get(uuid, 0))

    def call(self, op: str, *, lane: int | None = None, timeout_s: float, **args: Any) -> Any:
        result = super().call(op, lane=lane, timeout_s=timeout_s, **args)
        if op.startswith("cuda."):
            self.publish()
        return result

    def publish(self) -> None:
        """Write what this server's kernels have."""
        with self._publishing:
            memory = {pid: each.there for pid, each in self.processes.items() if each.on_gpu}
            draft = self._directory / f"{self._file}.draft"
            draft.write_text(json.dumps(memory))
            draft.rename(self._directory / self._file)

    def allocate(self, pid: int) -> bool:
        """Have a kernel's memory on its GPU again, if that has room for it, for one server after the other."""
        with open(self._directory / "allocating", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            process = self.processes[pid]
            if any(self.free(gpu) < process.moved for gpu in process.there):
                return False
            process.moved = 0  # from the first byte on: the library continues although its server is stopped
            self.publish()
            return True


class Published(Accounting):
    """A fast path whose moves other servers see, to a GPU that refuses memory which it does not have."""

    #: Whether the next kernel that has its place on the GPU, but not its memory, is to stop its server.
    stops = False

    def swap_out(self, **how: Any) -> int:
        moved = super().swap_out(**how)
        self._cuda.driver.publish()  # type: ignore[attr-defined]
        return moved

    def _request_swap_in(self, verb: str, timeout_s: float, held: HeldMemory | None = None) -> None:
        driver: SharedDriver = self._cuda.driver  # type: ignore[attr-defined]
        if Published.stops:
            Published.stops = False
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread goes no further either
        if not driver.allocate(self._pid):
            raise fastpath._Refused("no memory", OUT_OF_MEMORY)
        super()._request_swap_in(verb, timeout_s, held)


def say(*words: object) -> None:
    print(*words, flush=True)


async def run(kernel, name: str, seconds: float) -> None:
    """Run a cell, and print what it says and how it ends."""
    printed = []

    def hook(message) -> None:
        content = message["content"]
        if message["msg_type"] == "stream" and content["name"] == "stdout":
            printed.append(content["text"])
        elif message["msg_type"] == "stream":
            say("said", name, json.dumps(content["text"]))

    reply = await kernel.client.execute_interactive(
        f"n = compute({seconds}); print(intact())", timeout=120, output_hook=hook, allow_stdin=False
    )
    say("ended", name, "".join(printed).strip() or reply["content"].get("evalue"))


async def main() -> None:
    plan = json.loads(sys.argv[1])
    directory, gpus = Path(plan["directory"]), plan["gpus"]
    own = directory / plan["name"]
    own.mkdir()
    driver = SharedDriver(gpus, directory / "memory")
    cards = FakeGpus(driver, directory / "locks")
    images = own / "images"
    made = engine.shared_engine(images)
    made.cuda, made.gpus = FakeCuda(driver), cards
    use_engine(made)
    context.FastPath = Published  # type: ignore[misc]
    fastpath.has_driver = lambda: True
    fastpath.preload = lambda built_in=None: fastpath.Preload(Path(plan["library"]))  # type: ignore[assignment]
    os.environ["LD_LIBRARY_PATH"] = plan["doubles"]
    # Each process of the double has a device of its own, so that none waits for what another one frees bit by bit.
    resume._drivers_part = lambda kernel, needs: None
    engine.shared_exchange(cards).rules = RULES
    async with notebook(own, Path(plan["base"]), gpu_sharing="turns", image_dir=str(images)) as kernel:
        (gpu,) = gpus
        await kernel.run(CELL.format(bytes=plan["mib"] * MIB, value=plan["value"]))
        driver.start({gpu: (plan["mib"] + 8) * MIB}, pid=kernel.lifecycle.capsule.host_pid)
        await asyncio.to_thread(kernel.lifecycle.yield_gpu)
        say("ready")
        cells = []
        while line := await asyncio.to_thread(sys.stdin.readline):
            name, seconds = line.split()
            if name == "stop":
                Published.stops = True
                continue
            cells.append(asyncio.create_task(run(kernel, name, float(seconds))))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*cells)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")
    asyncio.run(main())
