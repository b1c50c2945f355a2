"""A server in small, as a process of its own: owns one kernel, obeys its stdin, and can be killed.

``run CODE``, ``checkpoint``, ``state`` and, at the end of stdin, an orderly end.  Each answer is one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_core.utils import run_sync
from traitlets.config import Config


def main(connection_file: str) -> None:
    config = Config()
    config.KernelProvisionerFactory.default_provisioner_name = "gpu-ckpt-provisioner"
    config.GpuCkptProvisioner.keep_image_on_shutdown = True
    KernelProvisionerFactory.instance(config=config)
    manager = KernelManager(kernel_name="python3", config=config, connection_file=connection_file)
    manager.start_kernel(cwd=os.path.dirname(connection_file))
    provisioner: Any = manager.provisioner
    client = manager.blocking_client()
    client.start_channels()

    def facts() -> dict[str, Any]:
        lifecycle = provisioner.lifecycle
        return {
            "kernel_id": provisioner.kernel_id,
            "state": provisioner.state.value,
            "pid": provisioner.pid,
            "image": lifecycle.image.id if lifecycle.image else None,
            "directory": str(lifecycle.home.runtime_dir),
        }

    def tell(**more: Any) -> None:
        print(json.dumps({**facts(), **more}), flush=True)

    try:
        client.wait_for_ready(timeout=60)
        tell()
        for line in sys.stdin:
            verb, _, code = line.strip().partition(" ")
            if verb == "checkpoint":
                run_sync(provisioner.checkpoint)()
                tell()
            elif verb == "run":
                texts: list[str] = []
                client.execute_interactive(
                    code, timeout=60, output_hook=lambda m, texts=texts: texts.append(m["content"].get("text", ""))
                )
                tell(printed="".join(texts).strip())
            else:
                tell()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    main(sys.argv[1])
