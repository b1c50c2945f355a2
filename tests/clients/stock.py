"""Kernels for clients that know nothing of us: a kernelspec names our provisioner, and stock managers start it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Any

from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_core.utils import run_sync
from waiting import until

from jupyter_gpu_ckpt.image.store import Image
from jupyter_gpu_ckpt.kernel.provisioner import GpuCkptProvisioner

#: The kernelspec that names our provisioner, and the same without it.
OURS, PLAIN = "checkpointable", "plain"


def write_kernelspecs(directory: Path, runtime_base: Path) -> Path:
    """The two kernelspecs below ``directory``, images in ``directory/images``; returns what belongs on JUPYTER_PATH.

    ipykernel is started the same way by both, so that whatever differs is ours.
    """
    config = {"image_dir": str(directory / "images"), "runtime_base": str(runtime_base)}
    provisioner = {"provisioner_name": "gpu-ckpt-provisioner", "config": config}
    for name, metadata in ((OURS, {"kernel_provisioner": provisioner}), (PLAIN, {})):
        spec = {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": name,
            "language": "python",
            "metadata": {"debugger": True, **metadata},
        }
        place = directory / "jupyter" / "kernels" / name
        place.mkdir(parents=True)
        (place / "kernel.json").write_text(json.dumps(spec))
    return directory / "jupyter"


def environment(directory: Path) -> dict[str, str]:
    """A kernel's environment: no history of other runs, and nothing by which ipykernel could tell a test."""
    env = dict(os.environ, IPYTHONDIR=str(directory / "ipython"))
    env.pop("PYTEST_CURRENT_TEST", None)
    return env


class Blocking:
    """One kernel under the synchronous `KernelManager`: between two calls no event loop of this process runs."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.clients: list[BlockingKernelClient] = []

    @property
    def provisioner(self) -> GpuCkptProvisioner:
        provisioner = self.manager.provisioner
        assert isinstance(provisioner, GpuCkptProvisioner)
        return provisioner

    @property
    def state(self) -> str:
        return self.provisioner.state.value

    def connect(self) -> BlockingKernelClient:
        """One more client, ready."""
        client = self.manager.blocking_client()
        client.start_channels()
        self.clients.append(client)
        client.wait_for_ready(timeout=60)
        return client

    def checkpoint(self) -> Image:
        image = run_sync(self.provisioner.checkpoint)()
        assert self.state == "checkpointed"
        return image

    def restore(self) -> None:
        run_sync(self.provisioner.restore)()

    def settled(self, state: str, timeout: float = 60) -> None:
        """Wait for ``state``; a wake continues tidying up after the cell that caused it was answered."""
        until(lambda: self.state == state, f"the kernel is {state}", timeout)


@contextmanager
def blocking(directory: Path, kernel_name: str = OURS) -> Iterator[Blocking]:
    """A running kernel of a kernelspec that `write_kernelspecs` wrote below ``directory``."""
    manager = KernelManager(kernel_name=kernel_name, connection_file=str(directory / "connection.json"))
    manager.start_kernel(env=environment(directory), cwd=str(directory))
    made = Blocking(manager)
    try:
        assert kernel_name != OURS or made.provisioner.lifecycle is not None, "it was started plainly"
        yield made
    finally:
        for client in made.clients:
            client.stop_channels()
        manager.shutdown_kernel(now=True)


def printed(client: BlockingKernelClient, code: str, timeout: float = 60) -> str:
    """Return the text that the cell prints to stdout.  Fails if the cell raises."""
    reply, outputs = executed(client, code, timeout)
    assert reply["status"] == "ok", reply
    return "".join(m["content"]["text"] for m in outputs if m["msg_type"] == "stream").strip()


def executed(
    client: BlockingKernelClient, code: str, timeout: float = 60
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A cell's reply and its outputs."""
    outputs: list[dict[str, Any]] = []
    reply = client.execute_interactive(code, timeout=timeout, output_hook=outputs.append, allow_stdin=False)
    return reply["content"], outputs


def replies(client: BlockingKernelClient, count: int, timeout: float = 60) -> list[dict[str, Any]]:
    """The next ``count`` messages of the shell channel.

    But for answers to ``kernel_info``: `wait_for_ready` asks once a second, and reads the first answer only.
    """
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + timeout
    while len(found) < count:
        message = client.get_shell_msg(timeout=deadline - time.monotonic())
        if message["msg_type"] != "kernel_info_reply":
            found.append(message)
    return found


def heard(client: BlockingKernelClient, sent: Iterable[str], timeout: float = 60) -> list[dict[str, Any]]:
    """Return the messages over iopub until each request in ``sent`` has its idle, and those of a moment after."""
    messages, running, deadline = [], set(sent), time.monotonic() + timeout
    while running:
        message = client.get_iopub_msg(timeout=deadline - time.monotonic())
        messages.append(message)
        if message["content"].get("execution_state") == "idle":
            running.discard(message["parent_header"].get("msg_id"))
    return messages + drained(client.get_iopub_msg)


def drained(get: Callable[..., dict[str, Any]], timeout: float = 0.2) -> list[dict[str, Any]]:
    """Return all messages of a channel, up to a pause of ``timeout`` seconds.

    For messages that must not come: only time shows that.
    """
    messages = []
    while True:
        try:
            messages.append(get(timeout=timeout))
        except Empty:
            return messages
