"""A server that is killed while it starts a branch: attaches to its predecessor's kernel, verifies it, and dies.

    python branching_victim.py DIRECTORY RUNTIME_BASE STEP EDGE

``STEP`` is one of the branch's restore, or ``copy`` for a moment in the middle of the copies of the image.  The last
line it prints is ``dying``, just before the signal.  Without a step it serves all branches.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from harness import Notebook
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from killing import Killing
from traitlets.config import Config

from jupyter_gpu_ckpt import trace
from jupyter_gpu_ckpt.errors import SavePointNotFound
from jupyter_gpu_ckpt.files import clone
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.kernel.host import BranchPoint
from jupyter_gpu_ckpt.kernel.orphans import find_orphans
from jupyter_gpu_ckpt.kernel.provisioner import GpuCkptProvisioner

KERNEL_ID = "0dead000-0000-4000-8000-000000000002"
POINT = "point"
SESSION = "print(x, get_ipython().kernel.session.session)"


async def started(config: Config, directory: Path, name: str, **how) -> Notebook:
    """A kernel and its client; attached if one of this id sleeps or lives."""
    manager = AsyncKernelManager(
        kernel_name="python3", config=config, connection_file=str(directory / f"{name}-{os.getpid()}.json")
    )
    environment = dict(os.environ, IPYTHONDIR=str(directory / "ipython"))
    await manager.start_kernel(env=environment, cwd=str(directory), **how)
    client = manager.client()
    client.start_channels()
    await client.wait_for_ready(timeout=60)
    return Notebook(manager, client)


async def main(directory: Path, base: Path, step: str = "", edge: str = "") -> None:
    config = Config()
    config.KernelProvisionerFactory.default_provisioner_name = "gpu-ckpt-provisioner"
    config.GpuCkptProvisioner.image_dir = str(directory / "images")
    config.GpuCkptProvisioner.runtime_base = str(base)
    config.GpuCkptProvisioner.outlive_server = True
    KernelProvisionerFactory.instance(config=config)
    store = Store(directory / "images")
    found = {each.session.kernel_id for each in find_orphans(base, store).orphans}
    branches = sorted(found - {KERNEL_ID})
    kernel = await started(config, directory, "kernel", kernel_id=KERNEL_ID)
    if await kernel.run("print('x' in globals())") == "False":
        await kernel.run("x = 41")
    assert await kernel.run("print(x)") == "41"
    try:
        point = await kernel.provisioner.branch_image(POINT)
    except SavePointNotFound:
        point = await kernel.provisioner.save(POINT)
    if step:
        sinks, copy, copied = [], clone.copy, []

        def step_traced(provisioner, event) -> None:
            if provisioner.kernel_id != KERNEL_ID:
                trace.notify(sinks, event)

        killing = Killing.of(kernel)

        def copy_and_die(*arguments, **named):
            copied.append(arguments)
            if step == "copy" and len(copied) == 10:
                killing.kill("new", "server")
            return copy(*arguments, **named)

        GpuCkptProvisioner.step_traced, clone.copy = step_traced, copy_and_die
        with killing.at(sinks, (step, edge, "new", "server")):
            await started(config, directory, "branch", branch_of=BranchPoint(point.id))
    sessions = {await kernel.run(SESSION)}
    for kernel_id in branches:
        branch = await started(config, directory, kernel_id, kernel_id=kernel_id)
        sessions.add(await branch.run(SESSION))
        await branch.manager.shutdown_kernel(now=True)
    assert len(sessions) == len(branches) + 1
    assert all(session.startswith("41 ") for session in sessions), sessions
    print(f"{len(branches)} branches continue", flush=True)
    await kernel.manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:5]))
    os._exit(0)
