"""The watchdog of one server: ends, but never loses, kernels that run on after the server died.

Run as ``python -m jupyter_gpu_ckpt.server.orphan_watchdog '<json>'`` by `shutdown.Comeback`.  Its standard input is a
pipe
from the server; the end of that pipe is the end of the server.  After ``timeout`` seconds every kernel that still has
no owner is adopted, checkpointed, and thereby ended; a later server finds it in its image.  One that is busy is tried
again.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..kernel.adoption import Session

#: Seconds between two looks whether the kernels still have no owner.
_LOOK = 5.0


def main(argument: str) -> None:
    """Wait for the server's end, then see to its kernels until none is left."""
    options = json.loads(argument)
    sys.stdin.buffer.read()
    asyncio.run(_see_to_orphans(Path(options["base"]), Path(options["image_dir"]), options["timeout"]))


async def _see_to_orphans(base: Path, image_dir: Path, timeout: float) -> None:
    # Imported now: for the server's whole life this process only waits, and should be small.
    from ..image.store import Store
    from ..kernel.adoption import find_orphans

    store = Store(image_dir)
    due = time.monotonic() + timeout
    while any(one.directory for one in find_orphans(base, store)):
        await asyncio.sleep(min(timeout, _LOOK))
        if time.monotonic() < due:
            continue
        for one in find_orphans(base, store):
            if one.directory is not None:
                await put_to_sleep(one.session, base, image_dir)
        # The same pause again for those that are busy: somebody's cell is still computing.
        due = time.monotonic() + timeout


async def put_to_sleep(session: Session, base: Path, image_dir: Path) -> bool:
    """Adopt one kernel and leave it again; True when it sleeps in an image now."""
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_client.provisioning.factory import KernelProvisionerFactory
    from traitlets.config import Config

    from ..image.store import Store
    from ..kernel.provisioner import GpuCkptProvisioner

    config = Config()
    config.KernelProvisionerFactory.default_provisioner_name = "gpu-ckpt-provisioner"
    config.GpuCkptProvisioner = Config(runtime_base=str(base), image_dir=str(image_dir))
    KernelProvisionerFactory.clear_instance()
    KernelProvisionerFactory.instance(config=config)
    with tempfile.TemporaryDirectory() as scratch:
        manager: Any = AsyncKernelManager(
            kernel_name=session.kernel_name, config=config, connection_file=f"{scratch}/connection.json"
        )
        try:
            await manager.start_kernel(kernel_id=session.kernel_id)
        except Exception:
            return False  # another owner was quicker
        provisioner = manager.provisioner
        if not isinstance(provisioner, GpuCkptProvisioner):
            return False
        await provisioner.detach()
        await manager.cleanup_resources()
    return any(image.manifest.kernel_id == session.kernel_id for image in Store(image_dir).images())


if __name__ == "__main__":
    main(sys.argv[1])
