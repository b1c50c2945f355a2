"""The owner of one kernel with kinds of state: starts or attaches to it, obeys its stdin, and can be killed.

    python wanderer.py DIRECTORY RUNTIME_BASE [rows | truths | move TARGET]

With ``truths`` it owns nothing: it prints how many kernels live without an owner, and how many images can be restored.
With ``move`` it pushes the images to a depot beside DIRECTORY and pulls them into the directory TARGET.
Else it obeys: ``make KEYS``, ``show KEYS``, ``checkpoint``, ``restore``, ``suspend`` and ``resume``, one line of JSON
each; ``end`` shuts the kernel down.  The keys are of kinds, or with ``rows`` of rows in `compatibility`.  At the end of
stdin it goes and the kernel stays, as when a server is ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from compatibility.rows import rows
from harness import Notebook
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from keeper import KernelEnded, Zoo
from traitlets.config import Config

from jupyter_gpu_ckpt.errors import GpuCkptError, ImageError
from jupyter_gpu_ckpt.image.store import Store
from jupyter_gpu_ckpt.kernel.orphans import find_orphans
from jupyter_gpu_ckpt.transfer.remote import Remote

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


def move(directory: Path, target: Path) -> None:
    """Move all images; what an earlier run that was killed had begun is completed."""
    depot, store = Remote(f"file://{directory}-depot"), Store(directory / "images")
    for image in store.images():
        depot.push(image, remove_from=store)
    for manifest in depot.images():
        depot.pull(manifest.id, Store(target / "images"))


class Rows(Zoo):
    """A kernel with rows in it, whose setup is the making and whose check is the showing."""

    async def prepare(self) -> None:
        await self.run(f"import sys; sys.path.insert(0, {str(ZOO)!r}); from compatibility import inside")

    async def ask(self, verb: str, keys: Sequence[str]) -> dict[str, dict[str, str]]:
        known = rows()
        cells = {key: known[key].setup if verb == "make" else known[key].check for key in keys}
        return self.answers(await self.run(f"await inside.run({cells!r})"))


async def main(directory: Path, base: Path, kept: type[Zoo]) -> None:
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
    zoo = kept(kernel)

    def tell(**more: Any) -> None:
        image = kernel.lifecycle.image
        print(json.dumps({"state": kernel.state, "image": image and image.id, **more}), flush=True)

    async def obey(verb: str, keys: list[str]) -> dict[str, Any]:
        if verb == "make":
            await zoo.prepare()
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
    elif sys.argv[3:4] == ["move"]:
        move(places[0], Path(sys.argv[4]))
    else:
        asyncio.run(main(*places, Rows if sys.argv[3:] == ["rows"] else Zoo))
    os._exit(0)  # as a server that was ended: a kernel that is left runs on
