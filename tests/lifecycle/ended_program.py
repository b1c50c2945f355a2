"""Start kernels, end them, and print the files that each has left in directories for files of a session.

Run with the variables of `VARIABLES` naming directories that do not exist yet, side by side, and in a mount namespace
whose ``/dev/shm`` is empty: every file there is of one of these kernels.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from contextlib import asynccontextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from harness import Notebook, notebook
from jupyter_client.manager import AsyncKernelManager

VARIABLES = ("TMPDIR", "XDG_RUNTIME_DIR", "JUPYTER_RUNTIME_DIR")
DIRECTORIES = {"/dev/shm": "memory", **{os.environ[name]: name for name in VARIABLES}}
#: For files of these programs themselves.
WORK = Path(os.environ["TMPDIR"]).with_name("work")
#: Files that a kernel's end removes, by trackers and children that notice it, and one that stays.  Those of finalizers
#: (``exit-``) are not compared: whether Python exits before jupyter_client kills a kernel with children is chance.
CELL = """
import multiprocessing, os, tempfile
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=1 << 20)
context = multiprocessing.get_context("spawn")
event = context.Event()
manager = multiprocessing.get_context("fork").Manager()
shared = manager.list([1])
temporary, directory = tempfile.NamedTemporaryFile(prefix="exit-"), tempfile.TemporaryDirectory(prefix="exit-")
kept = open(os.path.join(tempfile.gettempdir(), "kept"), "w")
print(block.name, len(shared))
"""


class StockNotebook(Notebook):
    def __init__(self, manager, client) -> None:
        self.manager, self.client = manager, client


@asynccontextmanager
async def stock():
    manager = AsyncKernelManager(kernel_name="python3")
    await manager.start_kernel(cwd=str(WORK))
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=60)
        yield StockNotebook(manager, client)
    finally:
        client.stop_channels()


def left() -> list[str]:
    """The files by their directory and name, without the part of a name that is another each time."""
    found = []
    for directory, name in DIRECTORIES.items():
        for path in Path(directory).rglob("*"):
            shape = re.sub(r"(?<=pymp-)\w{8}|(?<=listener-)\w{8}|(?<=tmp)\w{8}", "#", str(path.relative_to(directory)))
            found += [] if shape.startswith("exit-") else [f"{name}: {shape}"]
    return sorted(found)


def clear() -> None:
    for directory in DIRECTORIES:
        for path in sorted(Path(directory).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


async def main() -> dict[str, list[str]]:
    results = {}
    for kind in ("stock", "awake", "woken", "asleep"):
        started = stock() if kind == "stock" else notebook(WORK, Path(os.environ["XDG_RUNTIME_DIR"], "gpu-ckpt"))
        async with started as kernel:
            await kernel.run(CELL)
            if kind in ("woken", "asleep"):
                await kernel.provisioner.checkpoint()
            if kind == "woken":
                assert await kernel.run("print(shared[0], bytes(block.buf[:1]))") == "1 b'\\x00'"
                await kernel.settled("running")
            await kernel.manager.shutdown_kernel()
        results[kind] = left()
        clear()
    return results


if __name__ == "__main__":
    for path in (WORK, *[os.environ[name] for name in VARIABLES]):
        os.mkdir(path, 0o700)
    print(json.dumps(asyncio.run(main())))
