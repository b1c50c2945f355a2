"""A server in small on one of two hosts: owns one kernel at a time, obeys its stdin, one JSON array a line.

Each answer is one line of JSON; ``error`` in it is the code of what went wrong.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from client import connected
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory
from jupyter_core.utils import run_sync
from traitlets.config import Config

from jupyter_gpu_ckpt.errors import GpuCkptError


class Server:
    def __init__(self, shared: Path, base: Path) -> None:
        self.shared = shared
        config = Config()
        config.KernelProvisionerFactory.default_provisioner_name = "gpu-ckpt-provisioner"
        config.GpuCkptProvisioner.image_dir = str(shared / "images")
        config.GpuCkptProvisioner.runtime_base = str(base)
        # Deadlines are not what is tested here, and the machine may be busy.
        for deadline in ("drain_timeout", "wake_timeout", "start_timeout"):
            setattr(config.GpuCkptProvisioner, deadline, 60.0)
        KernelProvisionerFactory.instance(config=config)
        self.config = config
        self.manager: Any = None
        self.held: list[socket.socket] = []
        self.stall = threading.Event()
        self.stalled = threading.Event()

    @property
    def provisioner(self) -> Any:
        return self.manager.provisioner

    def do_start(self, kernel_id: str, transport: str) -> None:
        """Attach the kernel of this id if there is one, else start a fresh one."""
        file = self.shared / f"connection-{socket.gethostname()}.json"
        self.manager = KernelManager(
            kernel_name="python3", config=self.config, connection_file=str(file), transport=transport
        )
        if transport == "ipc":
            self.manager.ip = str(self.shared / "front")
        run_sync(self.manager._async_start_kernel)(kernel_id=kernel_id, cwd=str(self.shared))

    def do_checkpoint(self) -> None:
        run_sync(self.provisioner.checkpoint)()

    def do_restore(self) -> None:
        run_sync(self.provisioner.restore)()

    def do_detach(self) -> None:
        """Checkpoint the kernel for the next server to attach, as a server does when it stops."""
        run_sync(self.provisioner.detach)()
        self.manager = None

    def do_occupy(self, *ports: int) -> None:
        for port in ports:
            other = socket.socket()
            other.bind(("127.0.0.1", port))
            other.listen()
            self.held.append(other)

    def do_evaluate(self, expression: str, code: str = "") -> dict[str, Any]:
        with connected(self.facts()["info"]) as client:
            return {"value": client.evaluate(expression, code)}

    def do_stall(self, step: str) -> None:
        """The next restore stops at the beginning of ``step``, in a thread of its own, until `do_proceed`."""

        def sink(event: Any) -> None:
            if (event.kind, event.step) == ("started", step):
                self.stalled.set()
                assert self.stall.wait(120)

        self.provisioner.faults.append(sink)
        self.outcome: list[str] = []

        def restore() -> None:
            try:
                self.do_restore()
                self.outcome.append("restored")
            except GpuCkptError as error:
                self.outcome.append(error.code)

        self.restoring = threading.Thread(target=restore, daemon=True)
        self.restoring.start()
        assert self.stalled.wait(60)

    def do_proceed(self) -> dict[str, Any]:
        self.stall.set()
        self.restoring.join(90)
        return {"outcome": self.outcome}

    def do_state(self) -> None:
        pass

    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = {"hostname": socket.gethostname(), "monotonic": time.monotonic(), "server": os.getpid()}
        if self.manager is not None:
            lifecycle = self.provisioner.lifecycle
            found |= {
                "state": self.provisioner.state.value,
                "pid": self.provisioner.pid,
                "image": lifecycle.image.id if lifecycle and lifecycle.image else None,
                "info": {**self.manager.get_connection_info(), "key": self.manager.session.key.decode()},
            }
        return found

    def obey(self, command: str, *arguments: Any) -> dict[str, Any]:
        try:
            more = getattr(self, f"do_{command}")(*arguments) or {}
        except GpuCkptError as error:
            more = {"error": error.code, "message": error.message, "hint": error.hint}
        return {**self.facts(), **more}


def main(shared: str, base: str) -> None:
    server = Server(Path(shared), Path(base))
    try:
        for line in sys.stdin:
            print(json.dumps(server.obey(*json.loads(line))), flush=True)
    finally:
        if server.manager is not None:
            server.manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
