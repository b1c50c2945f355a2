"""``jupyter gpu-ckpt demo``: a notebook, a checkpoint in its middle, and a comparison of every value.

The cell tagged ``checkpoint`` divides the notebook.  The cells tagged ``fingerprint``, one in each half, must print
the same. Nothing here touches the kernel but an ordinary client; the second half wakes it by its first message.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import NoSuchKernel
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_core.paths import jupyter_path
from traitlets import Float, Unicode

from ..errors import BadRequest, GpuCkptError, KernelSilent
from ..kernel.agent_injection import PROVISIONER
from ..kernel.provisioner import GpuCkptProvisioner
from ..lifecycle.preflight import read_process
from ..trace import StepEvent
from ..units import size
from .command import ImageCommand, Result
from .terminal import Part

#: Seconds a kernel may take until it answers; importing on a cold disk is slow.
_START = 60.0


class DemoCommand(ImageCommand):
    description = (
        "Run a notebook, checkpoint its kernel at the cell tagged `checkpoint`, and compare what the two cells tagged "
        "`fingerprint` print before and after. The kernel is configured as a server's kernels are."
    )
    arguments = ("[NOTEBOOK]",)
    examples = """
    jupyter gpu-ckpt demo
    jupyter gpu-ckpt demo analysis.ipynb --timeout 1000
    """

    kernel = Unicode("python3", help="The kernelspec to use (default: python3).").tag(option="NAME")
    timeout = Float(300.0, help="The seconds that a cell may take (default: 300).").tag(option="SECONDS")

    def run(self) -> Result:
        logging.getLogger("traitlets").addHandler(logging.StreamHandler(sys.stderr))
        self.halves = _read(Path(self.extra_args[0]) if self.extra_args else quickstart())
        self.kernel_config = deepcopy(self.config)
        self.kernel_config.KernelProvisionerFactory.default_provisioner_name = PROVISIONER
        self.kernel_config.GpuCkptProvisioner.image_dir = self.configured.image_dir
        self.fingerprints: list[str] = []
        self.failed: list[str] = []
        self.client: Any = None
        facts = asyncio.run(self.demonstrate())
        return facts, 0 if facts["intact"] else 1

    def print(self, *parts: Part) -> None:
        if not self.as_json:
            self.terminal.line(*parts)
            sys.stdout.flush()

    def title(self, text: str) -> None:
        self.print((text, "bold"))
        self.print(("-" * len(text), "bold"))

    async def demonstrate(self) -> dict[str, Any]:
        KernelProvisionerFactory.instance(config=self.kernel_config)
        manager = AsyncKernelManager(kernel_name=self.kernel, config=self.kernel_config)
        try:
            manager.kernel_spec_manager.get_kernel_spec(self.kernel)
        except NoSuchKernel as error:
            raise BadRequest(f"{error}.", hint="`jupyter kernelspec list` shows those there are.") from error
        await manager.start_kernel()
        try:
            provisioner = manager.provisioner
            if not isinstance(provisioner, GpuCkptProvisioner):
                raise BadRequest(f"The kernelspec {self.kernel!r} names a provisioner of its own.")
            self.client = manager.client()
            self.client.start_channels()
            try:
                await self.client.wait_for_ready(timeout=_START)
            except RuntimeError as error:  # jupyter_client's only way to say either
                raise KernelSilent(f"The kernel did not start: {error}.") from error
            return await self._cycle(provisioner)
        finally:
            if self.client is not None:
                self.client.stop_channels()
            await manager.shutdown_kernel(now=True)  # also while a cell runs

    async def _cycle(self, provisioner: GpuCkptProvisioner) -> dict[str, Any]:
        self.title("First half")
        await self._execute(self.halves[0])
        lifecycle = provisioner.lifecycle
        processes = lifecycle.capsule.processes() if lifecycle and lifecycle.capsule else []
        on_gpu = _gpu_bytes(provisioner, processes)

        steps: list[StepEvent] = []
        provisioner.sinks.append(lambda event: steps.append(event) if event.kind == "completed" else None)
        image = await provisioner.checkpoint()
        checkpoint, steps[:] = [*steps], []
        remaining = [pid for pid in processes if read_process(pid)]
        still_on_gpu = _gpu_bytes(provisioner, processes)
        self.print()
        self.title("Checkpoint")
        self._table(checkpoint)
        self.print()
        self.print(f"processes: {len(processes)} before, {len(remaining)} now")
        self.print(f"on the GPU: {size(on_gpu)} before, {size(still_on_gpu)} now")
        self.print(f"image {image.id}: {size(image.manifest.bytes)} in {len(image.manifest.files)} files")
        if remaining or still_on_gpu:
            raise GpuCkptError("Processes or device memory remain after the checkpoint.", pids=remaining)

        self.print()
        self.title("Second half, on the same connection")
        await self._execute(self.halves[1])
        await provisioner.restore()  # waits for the end of the wake that runs
        wake = [*steps]
        self.print()
        self.title("Wake")
        self._table(wake)
        before, after = self.fingerprints
        intact = before == after and not self.failed
        self.print()
        if intact:
            self.print(("Every value is intact.", "green"))
        else:
            self.print(("NOT INTACT", "red"), f": {'; '.join(self.failed) or 'the fingerprints differ'}")
        return {
            "intact": intact,
            "failed": self.failed,
            "fingerprints": self.fingerprints,
            "image_bytes": image.manifest.bytes,
            "device_bytes": on_gpu,
            "checkpoint": [_row(event) for event in checkpoint],
            "restore": [_row(event) for event in wake],
            "uid": os.geteuid(),
        }

    async def _execute(self, cells: list[dict[str, Any]]) -> None:
        for cell in cells:
            if cell["cell_type"] != "code":
                continue
            messages: list[dict[str, Any]] = []
            source = "".join(cell["source"])
            try:
                reply = await self.client.execute_interactive(
                    source, timeout=self.timeout, output_hook=messages.append, allow_stdin=False
                )
            except TimeoutError as error:
                first = source.strip().partition("\n")[0]
                raise KernelSilent(
                    f"A cell did not end within {self.timeout:g} s: {first}",
                    hint="Give cells more time by --timeout, or use a notebook with shorter ones.",
                    left="the demo's kernel is ended",
                ) from error
            streams = [message["content"] for message in messages if message["msg_type"] == "stream"]
            text = "".join(stream["text"] for stream in streams if stream["name"] == "stdout")
            for line in text.splitlines():
                self.print(f"  {line.expandtabs()}")
            if "fingerprint" in _tags(cell):
                self.fingerprints.append(text)
                if not text:
                    self.failed.append("a cell tagged `fingerprint` printed nothing")
            if reply["content"]["status"] != "ok":
                self.failed.append(f"{reply['content'].get('ename')}: {reply['content'].get('evalue')}")
                self.print("  ", ("FAILED", "red"), f" {self.failed[-1]}")

    def _table(self, events: list[StepEvent]) -> None:
        self.print(f"  {'step':16} {'seconds':>9} {'MiB':>10} {'GB/s':>7}")
        for event in events:
            seconds, count = event.seconds or 0.0, event.bytes
            rate = f"{count / seconds / 1e9:7.2f}" if count and seconds else ""
            self.print(f"  {event.step:16} {seconds:9.3f} {count / 2**20 if count else 0:10.1f} {rate}".rstrip())
        self.print(f"  {'together':16} {sum(event.seconds or 0.0 for event in events):9.3f}")


def quickstart() -> Path:
    """Return the quickstart notebook of this checkout, or the one that the wheel installed."""
    checkout = Path(__file__).resolve().parents[2] / "notebooks"
    for directory in (checkout, *map(Path, jupyter_path("gpu-ckpt", "notebooks"))):
        if (directory / "quickstart.ipynb").is_file():
            return directory / "quickstart.ipynb"
    raise BadRequest("The quickstart notebook is not installed.", hint="Name a notebook.")


def _read(path: Path) -> list[list[dict[str, Any]]]:
    """Return the cells of the notebook's halves.  Raises `BadRequest` if nothing can be compared."""
    try:
        cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadRequest(f"{path} is not a notebook: {error}.") from error
    middle = next((i for i, cell in enumerate(cells) if "checkpoint" in _tags(cell)), None)
    if middle is None:
        raise BadRequest("No cell of the notebook is tagged `checkpoint`.", hint="Tag the cell that divides it.")
    halves = [cells[:middle], cells[middle:]]
    for half in halves:
        if sum("fingerprint" in _tags(cell) for cell in half) != 1:
            raise BadRequest(
                "Nothing can be compared: each half of the notebook needs one cell tagged `fingerprint`.",
                hint="Tag the two cells that must print the same.",
            )
    return halves


def _tags(cell: dict[str, Any]) -> list[str]:
    tags: list[str] = cell.get("metadata", {}).get("tags", [])
    return tags


def _row(event: StepEvent) -> dict[str, Any]:
    return {"step": event.step, "seconds": event.seconds, "bytes": event.bytes}


def _gpu_bytes(provisioner: GpuCkptProvisioner, pids: list[int]) -> int:
    """Return the bytes of device memory of ``pids``; 0 on a host without NVIDIA driver or bindings."""
    lifecycle = provisioner.lifecycle
    if lifecycle is None:
        return 0
    gpus = lifecycle.engine.gpus
    try:
        return sum(gpus.processes(gpu.uuid).get(pid) or 0 for gpu in gpus.list() for pid in pids)
    except GpuCkptError:
        return 0
