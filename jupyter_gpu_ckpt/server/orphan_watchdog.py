"""The watchdog of one server: checkpoints and ends kernels that run on after the server died.

Its standard input is a pipe from the server (`persistence.KernelPersistence`): a line of JSON with its options, and its
end is the end of the server.
After ``timeout`` seconds it attaches every kernel that still has no owner and checkpoints it, which ends its process; a
later server attaches it from its image.  Busy kernels are tried again.
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
    from ..kernel.orphans import Session

#: Seconds between two checks whether the kernels still have no owner.
_INTERVAL = 5.0


def main() -> None:
    """Wait for the server's end, then checkpoint its kernels until none is left."""
    options = json.loads(sys.stdin.buffer.readline())
    sys.stdin.buffer.read()
    asyncio.run(_checkpoint_orphans(options["provisioner"], options["timeout"]))


async def _checkpoint_orphans(provisioner: dict[str, Any], timeout: float) -> None:
    # Imported now: as long as the server lives this process only waits, and should be small.
    from ..image.store import Store
    from ..kernel.orphans import find_orphans

    base, store = Path(provisioner["runtime_base"]), Store(Path(provisioner["image_dir"]))
    due = time.monotonic() + timeout
    while any(orphan.directory for orphan in find_orphans(base, store).orphans):
        await asyncio.sleep(min(timeout, _INTERVAL))
        if time.monotonic() < due:
            continue
        for orphan in find_orphans(base, store).orphans:
            if orphan.directory is not None:
                await _checkpoint(orphan.session, provisioner)
        # Wait as long again for busy kernels, whose cells still compute.
        due = time.monotonic() + timeout


async def _checkpoint(session: Session, provisioner: dict[str, Any]) -> None:
    """Attach one kernel, checkpoint it as its server would have (encrypted, within the quota) and detach."""
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_client.provisioning.factory import KernelProvisionerFactory
    from traitlets.config import Config

    from ..kernel import kernelspecs
    from ..kernel.agent_injection import PROVISIONER
    from ..kernel.provisioner import GpuCkptProvisioner

    config = Config()
    config.KernelProvisionerFactory.default_provisioner_name = PROVISIONER
    config.GpuCkptProvisioner = Config(provisioner)
    KernelProvisionerFactory.clear_instance()
    KernelProvisionerFactory.instance(config=config)
    with tempfile.TemporaryDirectory() as scratch:
        manager: Any = AsyncKernelManager(config=config, connection_file=f"{scratch}/connection.json")
        try:
            manager.kernel_name = kernelspecs.choose(
                manager.kernel_spec_manager, session.kernel_name, session.fallback_name
            )
            await manager.start_kernel(kernel_id=session.kernel_id)
        except Exception:
            return  # another owner was faster, or its kernelspec is not here
        if isinstance(manager.provisioner, GpuCkptProvisioner):
            await manager.provisioner.detach()
            await manager.cleanup_resources()


if __name__ == "__main__":
    main()
