"""Real kernels with the agent inside, started plainly by jupyter_client (no capsule, no gate)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client import BlockingKernelClient, KernelManager
from jupyter_client.kernelspec import KernelSpec

from jupyter_gpu_ckpt.kernel.agent_injection import rewrite

DEADLINE = 60.0


class Kernel:
    """One running kernel and a client of it."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager, self.client = manager, client

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def ask(self, msg_type: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send any shell request; the content of its reply."""
        message = self.client.session.msg(msg_type, content or {})
        self.client.shell_channel.send(message)
        deadline = time.monotonic() + DEADLINE
        while True:
            reply = self.client.get_shell_msg(timeout=max(0.0, deadline - time.monotonic()))
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return dict(reply["content"])

    def report(self, verb: str, content: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask the agent; the report of its reply, which must be ok."""
        reply = self.ask(f"gpu_ckpt_{verb}_request", content)
        assert reply["status"] == "ok", reply
        return dict(reply["report"])

    def run(self, code: str) -> str:
        """Run a cell; what it printed on stdout.  Its errors are ours."""
        printed: list[str] = []

        def output(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
                printed.append(message["content"]["text"])

        reply = self.client.execute_interactive(code, timeout=DEADLINE, output_hook=output)["content"]
        assert reply["status"] == "ok", reply
        return "".join(printed).strip()

    def maps(self) -> str:
        return Path(f"/proc/{self.pid}/maps").read_text()

    def descriptors(self) -> list[str]:
        """Return the targets of the process's descriptors."""
        found = []
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            try:
                found.append(str(entry.readlink()))
            except FileNotFoundError:
                continue
        return found

    def tcp_sockets(self) -> list[str]:
        """Local addresses of the process's TCP sockets."""
        own = {target[8:-1] for target in self.descriptors() if target.startswith("socket:[")}
        rows = [row.split() for row in Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]]
        return [row[1] for row in rows if row[9] in own]


@pytest.fixture
def ipython_dir(tmp_path: Path) -> Path:
    """The profile all kernels of one test share."""
    return tmp_path / "ipython"


@pytest.fixture
def start(tmp_path: Path, ipython_dir: Path) -> Iterator[Callable[..., Kernel]]:
    """Start kernels: ``start(python=..., module=..., arguments=[...], argv=[...], cwd=..., env={...})``."""
    kernels: list[Kernel] = []
    # Unix socket paths are bounded to 107 bytes, and pytest's own folders are long.
    sockets = tempfile.TemporaryDirectory(prefix="gpu-ckpt-")

    def start(
        python: str = sys.executable,
        module: str = "ipykernel_launcher",
        arguments: list[str] | None = None,
        argv: list[str] | None = None,
        **popen: Any,
    ) -> Kernel:
        plain = [python, "-Xfrozen_modules=off", "-m", module, "-f", "{connection_file}", *(arguments or [])]
        # With transport ipc, and an absolute path, as the provisioner does: no TCP but ipykernel's own listener.
        manager = KernelManager(transport="ipc", connection_file=f"{sockets.name}/{len(kernels)}.json")
        manager._kernel_spec = KernelSpec(argv=argv or rewrite(plain), language="python", display_name="test")
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environ = {**inherited, "IPYTHONDIR": str(ipython_dir), **popen.pop("env", {})}
        # Not this process's stdout: pytest's capture files would be in the kernel's report.
        null = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        manager.start_kernel(**{"cwd": str(tmp_path), "env": environ, **null, **popen})
        client = manager.blocking_client()
        kernels.append(Kernel(manager, client))
        client.start_channels()
        client.wait_for_ready(timeout=DEADLINE)
        return kernels[-1]

    yield start
    for kernel in kernels:
        kernel.client.stop_channels()
        kernel.manager.shutdown_kernel(now=True)
    sockets.cleanup()
