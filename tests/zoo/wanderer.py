"""The owner of one kernel with kinds of state: starts or attaches to it, obeys its stdin, and can be killed.

    python wanderer.py DIRECTORY RUNTIME_BASE [truths]

With ``truths`` it owns nothing: it prints how many kernels live without an owner, and how many images can be restored.
Else it obeys: ``make KEYS``, ``show KEYS``, ``checkpoint`` and ``restore``, one line of JSON each; ``end`` shuts the
kernel down.  At the end of stdin it goes and the kernel stays, as when a server is ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Notebook
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from keeper import KernelEnded, Zoo
from traitlets.config import Config

from jupyter_gpu_ckpt.errors import GpuCkptError, ImageError
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.kernel.orphans import find_orphans

ZOO = Path(__file__).resolve().parent
KERNEL_ID = "0dead000-0000-4000-8000-000000000002"


def truths(directory: Path, base: Path) -> tuple[int, int]:
    """Kernels that live without an owner, and images that can be restored."""
    store = Store(directory / "images")
    living = sum(one.directory is not None for one in find_orphans(base, store).orphans)
    restorable = 0
    for image in store.images():
        if image.retired:  # an earlier state of a kernel that has died since
            continue
        try:
            with image.lease():
                store.check(image)
        except ImageError:
            continue
        restorable += 1
    return living, restorable


async def main(directory: Path, base: Path) -> None:
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
    assert kernel.lifecycle is not None, "started plainly"
    zoo = Zoo(kernel)

    def tell(**more: Any) -> None:
        image = kernel.lifecycle.image
        print(json.dumps({"state": kernel.state, "image": image and image.id, **more}), flush=True)

    async def obey(verb: str, keys: list[str]) -> dict[str, Any]:
        if verb == "make":
            await zoo.run(f"import sys; sys.path.insert(0, {str(ZOO)!r}); from kinds import inside")
            shown, failed = await zoo.made(keys)
            return {"shown": shown, "failed": {outcome.key: outcome.text for outcome in failed}}
        if verb == "show":
            answers = await zoo.ask("show", keys)
            return {"shown": {key: answer.get("value") or answer["error"] for key, answer in answers.items()}}
        await getattr(kernel.provisioner, verb)()
        return {}

    tell()
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        verb, *keys = line.split()
        if verb == "end":
            await manager.shutdown_kernel(now=True)
            break
        try:
            tell(**await obey(verb, keys))
        except GpuCkptError as error:
            tell(error=error.code, message=str(error))
        except (KernelEnded, RuntimeError) as error:
            tell(error=type(error).__name__, message=str(error))
    client.stop_channels()


if __name__ == "__main__":
    places = Path(sys.argv[1]), Path(sys.argv[2])
    if sys.argv[3:] == ["truths"]:
        print(json.dumps(truths(*places)), flush=True)
    else:
        asyncio.run(main(*places))
    os._exit(0)  # as a server that was ended: a kernel that is left runs on
