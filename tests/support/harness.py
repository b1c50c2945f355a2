"""A kernel of ours with a stock client on it, for the tests that run the real thing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning import KernelProvisionerFactory
from recorder import Recorder
from traitlets.config import Config

from jupyter_gpu_ckpt.kernel.host import BranchPoint
from jupyter_gpu_ckpt.kernel.provisioner import GpuCkptProvisioner

#: In a test's directory, where ``$OUT`` is set: what a kernel of `notebook` writes to its stdout and stderr itself.
RAW_OUTPUT = "raw-output.log"
#: Starts a program that leaves the kernel's tree of processes, which prevents a checkpoint where the kernel has no root
#: process any more; and ends it.
DAEMON = """
import os, subprocess
if os.getppid() != 1: os.kill(os.getppid(), 9)
while os.getppid() != 1: pass
_line = "setsid sleep 600 >/dev/null 2>&1 & echo $!"
daemon = int(subprocess.run(["sh", "-c", _line], capture_output=True, text=True, check=True).stdout)
while b"sleep" not in open(f"/proc/{daemon}/cmdline", "rb").read(): pass
"""
END_DAEMON = """
os.kill(daemon, 9)
while os.path.exists(f"/proc/{daemon}"): pass
"""


class CellFailed(AssertionError):
    """A cell raised; the text is its traceback."""


class Notebook:
    """One kernel, one client, and what it printed."""

    def __init__(self, manager: AsyncKernelManager, client) -> None:
        self.manager = manager
        self.client = client
        self.steps = Recorder()
        self.provisioner.sinks.append(self.steps)

    @property
    def provisioner(self) -> GpuCkptProvisioner:
        return self.manager.provisioner

    @property
    def lifecycle(self):
        return self.provisioner.lifecycle

    @property
    def state(self) -> str:
        return self.provisioner.state.value

    async def run(self, code: str, timeout: float = 60, stream: str = "stdout") -> str:
        """Execute a cell; its stdout, or another stream.  Raises `CellFailed`."""
        printed = []

        def collect(message) -> None:
            if message["msg_type"] == "stream" and message["content"]["name"] == stream:
                printed.append(message["content"]["text"])

        reply = await self.client.execute_interactive(code, timeout=timeout, output_hook=collect, allow_stdin=False)
        content = reply["content"]
        if content["status"] != "ok":
            raise CellFailed("\n".join(content.get("traceback", [])) or str(content))
        return "".join(printed).strip()

    async def settled(self, state: str, timeout: float = 60) -> None:
        """Wait until the kernel is in ``state`` (a wake tidies up after the first output was seen)."""
        await until(lambda: self.state == state, timeout)


@asynccontextmanager
async def notebook(
    tmp_path: Path,
    runtime_base: Path,
    *,
    kernel_name: str = "python3",
    raw_output: Path | None = None,
    kernel_id: str | None = None,
    **traits,
):
    """A running kernel whose images lie in ``tmp_path/images``; that of this id, if it has no owner.

    ``raw_output``: the file of its own stdout and stderr, which is closed on our side once the kernel was started; by
    default these are ours.
    """
    config = Config()
    config.KernelProvisionerFactory.default_provisioner_name = "gpu-ckpt-provisioner"
    config.GpuCkptProvisioner.image_dir = str(tmp_path / "images")
    config.GpuCkptProvisioner.runtime_base = str(runtime_base)
    for name, value in traits.items():
        setattr(config.GpuCkptProvisioner, name, value)
    KernelProvisionerFactory.clear_instance()
    KernelProvisionerFactory.instance(config=config)
    manager = AsyncKernelManager(
        kernel_name=kernel_name, config=config, connection_file=str(tmp_path / "connection.json")
    )
    environment = dict(os.environ, IPYTHONDIR=str(tmp_path / "ipython"))
    environment.pop("PYTEST_CURRENT_TEST", None)  # ipykernel behaves differently where it sees this
    if raw_output is None and os.environ.get("OUT"):  # on a GPU machine: the report of a failed test has it
        raw_output = tmp_path / RAW_OUTPUT
    with open(raw_output, "ab") if raw_output is not None else contextlib.nullcontext() as output:
        named = {"kernel_id": kernel_id} if kernel_id is not None else {}
        await manager.start_kernel(env=environment, cwd=str(tmp_path), stdout=output, stderr=output, **named)
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=60)
        yield Notebook(manager, client)
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)
        KernelProvisionerFactory.clear_instance()


@asynccontextmanager
async def branch_of(image: str, of: Notebook, directory: Path, **how):
    """A kernel that starts from an image of another one, and its client; its images are in the same directory."""
    directory.mkdir(exist_ok=True)
    manager = AsyncKernelManager(
        kernel_name="python3", config=of.manager.config, connection_file=str(directory / "connection.json")
    )
    await manager.start_kernel(cwd=str(directory), branch_of=BranchPoint(image, **how))
    client = manager.client()
    client.start_channels(hb=False)  # as in `live.Server.client`
    try:
        # Not `wait_for_ready`: IPython draws the tip of its banner from the user's random numbers.
        while (await client.get_iopub_msg(timeout=60))["msg_type"] != "iopub_welcome":
            pass
        yield Notebook(manager, client)
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


async def until(true: Callable[[], bool], timeout: float = 60) -> None:
    """Poll for a condition that has no event; fail after ``timeout``.  `waiting.until` is for plain functions."""
    deadline = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.005)


def descendants(pid: int) -> list[int]:
    """All processes below ``pid``: capsules' inits, their kernels, CRIU's, helpers."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it ends while it is looked at
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found


def alive(pids: list[int]) -> list[int]:
    """Those of ``pids`` that exist and are no zombies."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state not in "ZX":
            found.append(pid)
    return found
