"""A server that is killed at one moment of one verb: attaches to its predecessor's kernel, verifies it, and dies.

    python victim.py DIRECTORY RUNTIME_BASE VERB STEP EDGE

The last line it prints is ``dying``, just before the signal; it fails if the moment does not come.  An empty verb: the
server only attaches the kernel, checks it and stops in order, with the kernel running on.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from family import FAMILY
from harness import Notebook
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from killing import Killing
from traitlets.config import Config

KERNEL_ID = "0dead000-0000-4000-8000-000000000001"


async def main(directory: Path, base: Path, verb: str, step: str, edge: str) -> None:
    config = Config()
    config.KernelProvisionerFactory.default_provisioner_name = "gpu-ckpt-provisioner"
    config.GpuCkptProvisioner.image_dir = str(directory / "images")
    config.GpuCkptProvisioner.runtime_base = str(base)
    config.GpuCkptProvisioner.outlive_server = True
    KernelProvisionerFactory.instance(config=config)
    file = directory / f"connection-{os.getpid()}.json"
    manager = AsyncKernelManager(kernel_name="python3", config=config, connection_file=str(file))
    environment = dict(os.environ, IPYTHONDIR=str(directory / "ipython"))
    await manager.start_kernel(kernel_id=KERNEL_ID, env=environment, cwd=str(directory))
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=60)
    kernel = Notebook(manager, client)

    # The first of all victims starts the kernel; none may ever start a second one.
    seen = await kernel.run("x = globals().get('x', 40) + 1\nprint(x)")
    if seen == "41":
        await kernel.run(FAMILY)
    assert await kernel.run("print(family)") == "41", "a child is not well"
    expected = len((directory / "story").read_text().splitlines()) if (directory / "story").exists() else 0
    assert seen == str(41 + expected), (seen, expected)
    with (directory / "story").open("a") as story:
        story.write(f"{verb} {step} {edge}\n")
    await kernel.settled("running")
    if verb == "restore":
        await kernel.provisioner.checkpoint()

    method = "back" if verb == "back asleep" else verb
    arguments = [f"point {expected}"] if method in ("save", "back") else []
    if method == "back":
        await kernel.provisioner.save(*arguments)
        await kernel.run("present = True")
    if verb == "back asleep":
        await kernel.provisioner.checkpoint()
    if verb:
        # CRIU runs in the capsule that is dumped, or in the one that is made.
        which = "present" if step == "dump" else "new"
        with Killing.of(kernel).at(kernel.provisioner.sinks, (step, edge, which, "server")):
            await getattr(kernel.provisioner, method)(*arguments)
    client.stop_channels()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:6]))
    os._exit(0)  # as a server that was ended: the kernel runs on, for the next one
