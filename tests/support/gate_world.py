"""A real ipykernel behind a gate, real clients in front of it, and what the tests say to both."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_client import BlockingKernelClient
from jupyter_client.connect import write_connection_file

from jupyter_gpu_ckpt.gate.gate import Gate

KEY = "0123456789abcdef"
DEADLINE = 60.0


class Kernel:
    """An ipykernel on unix sockets, started as a capsule would start it but without the capsule.

    ``program``: what Python runs, if not ipykernel's launcher.
    """

    def __init__(self, *program: str) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="gate-"))  # short: a unix socket's path has 107 characters
        self.info = {
            "transport": "ipc",
            "ip": str(self.directory / "k"),
            "key": KEY,
            "signature_scheme": "hmac-sha256",
            **{f"{name}_port": n for n, name in enumerate(("shell", "iopub", "stdin", "control", "hb"), 1)},
        }
        file = self.directory / "connection.json"
        file.write_text(json.dumps(self.info))
        self.process = subprocess.Popen(
            [
                sys.executable,
                *(program or ("-m", "ipykernel_launcher")),
                "-f",
                str(file),
                "--HistoryManager.hist_file=:memory:",
            ],
            env={**os.environ, "JPY_PARENT_PID": "1", "IPYTHONDIR": str(self.directory / "ipython")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE)

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)


class World:
    """A gate with its callbacks recorded."""

    def __init__(self, kernel: Kernel, directory: Path, *, stable_name: bool = True, **front: str) -> None:
        self.kernel = kernel
        _, self.front = write_connection_file(str(directory / "front.json"), key=KEY.encode())
        self.front.update(front)
        self.woken: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.clients: list[BlockingKernelClient] = []
        self.gate = self.new_gate(stable_name=stable_name)

    def new_gate(self, **options: Any) -> Gate:
        return Gate(
            self.front,
            self.kernel.info,
            on_wake=self.woken.append,
            on_agent_request=self.asked.append,
            kernel_id="under-test",
            **options,
        )

    def up(self) -> None:
        self.gate.start()
        self.gate.open(DEADLINE)
        self.gate.release()

    def to_sleep(self) -> None:
        self.gate.drain(DEADLINE)
        self.gate.close()
        self.gate.sleep()

    def wake(self) -> None:
        self.gate.open(DEADLINE)
        self.gate.release()

    def client(self, *, ready: bool = True, hb: bool = True, **connection: str) -> BlockingKernelClient:
        client = BlockingKernelClient()
        client.load_connection_info({**self.front, **connection})
        client.start_channels(hb=hb)
        self.clients.append(client)
        if ready:
            client.wait_for_ready(timeout=DEADLINE)
            if self.gate.state == "open":
                settle(client)
        return client

    def in_thread(self, what: Callable[[], Any]) -> InThread:
        return InThread(what)


class InThread:
    """Runs something on another thread and keeps what became of it."""

    def __init__(self, what: Callable[[], Any]) -> None:
        self.error: BaseException | None = None
        self.result: Any = None
        self._what = what
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._what()
        except BaseException as error:
            self.error = error

    def join(self) -> Any:
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive(), "hangs"
        if self.error is not None:
            raise self.error
        return self.result


def settle(client: BlockingKernelClient) -> None:
    """Read all that came for `wait_for_ready`, which asks once a second and reads the first answer only."""
    last = client.comm_info()
    while client.get_shell_msg(timeout=DEADLINE)["parent_header"]["msg_id"] != last:
        pass
    outputs(client, last)


def send(
    client: BlockingKernelClient, msg_type: str, content: dict[str, Any], channel: str = "shell", **header: Any
) -> str:
    """Send a message that jupyter_client has no method for; return its msg_id."""
    message = client.session.msg(msg_type, content)
    message["header"].update(header)
    getattr(client, f"{channel}_channel").send(message)
    return str(message["header"]["msg_id"])


def reply(client: BlockingKernelClient, msg_id: str, channel: str = "shell") -> dict[str, Any]:
    """The next reply on ``channel``, which must be that to ``msg_id``."""
    got: dict[str, Any] = getattr(client, f"get_{channel}_msg")(timeout=DEADLINE)
    assert got["parent_header"]["msg_id"] == msg_id, got["msg_type"]
    return got


def outputs(client: BlockingKernelClient, msg_id: str) -> list[dict[str, Any]]:
    """Return the messages over iopub for ``msg_id``, up to and with its idle."""
    mine: list[dict[str, Any]] = []
    while True:
        got = client.get_iopub_msg(timeout=DEADLINE)
        if got["parent_header"].get("msg_id") == msg_id:
            mine.append(got)
            if got["content"].get("execution_state") == "idle":
                return mine


def kinds(messages: list[dict[str, Any]]) -> list[str]:
    """Message types, a status as its state."""
    return [m["content"].get("execution_state", m["msg_type"]) for m in messages]
