"""A real ``jupyter server`` process with the extension, for the tests that talk to it from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import requests
import waiting
from jupyter_client.blocking import BlockingKernelClient
from websocket import WebSocket, create_connection

from jupyter_gpu_ckpt.criu.install import find

TOKEN = "a-token-for-tests"
BASE_URL = "/user/ann%20b/"
#: Other packages' server extensions that take their time to load, and that nothing here needs without a front end.
_FRONT_ENDS = ("jupyterlab", "notebook", "notebook_shim", "jupyter_lsp")


class Server:
    """The process, and how to ask it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, home: Path) -> None:
        self.process = process
        self.port = port
        self.home = home
        self.url = f"http://127.0.0.1:{port}{BASE_URL}"

    def ask(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        """A request with the token."""
        headers = {"Authorization": f"token {TOKEN}", **kwargs.pop("headers", {})}
        return requests.request(method, self.url + path, headers=headers, timeout=60, **kwargs)

    def answers(self) -> bool:
        """Return whether the server is up. It writes its port a moment before it listens."""
        try:
            return self.ask("GET", "api").ok
        except requests.exceptions.ConnectionError:
            return False

    def get(self, path: str) -> Any:
        """The document at ``path``."""
        reply = self.ask("GET", path)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def start_kernel(self) -> str:
        """A fresh kernel's id."""
        reply = self.ask("POST", "api/kernels", json={"name": "python3"})
        assert reply.status_code == 201, reply.text
        return reply.json()["id"]

    def do(self, kernel_id: str, verb: str, body: Any = None) -> dict[str, Any]:
        """A verb, waited for: its job when it has ended."""
        reply = self.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/{verb}", json=body)
        assert reply.status_code == 202, reply.text
        return self.ended(reply.json()["id"])

    def ended(self, job: str) -> dict[str, Any]:
        """A job, once it has ended."""
        return until(lambda: (found := self.get(f"gpu-ckpt/jobs/{job}"))["ended"] is not None and found)

    @contextmanager
    def client(self, kernel_id: str) -> Iterator[BlockingKernelClient]:
        """A stock client, by the kernel's own connection file.

        Without a heartbeat: jupyter_client's thread for it that is stopped before it has begun connects for ever, until
        the process has no descriptors for that.
        """
        file = next((self.home / "runtime").glob(f"kernel-{kernel_id}.json"))
        client = BlockingKernelClient(connection_file=str(file))
        client.load_connection_file()
        client.start_channels(hb=False)
        try:
            yield client
        finally:
            client.stop_channels()

    def run(self, kernel_id: str, code: str) -> str:
        """Execute a cell; what it printed."""
        with self.client(kernel_id) as client:
            return _run(client, code)

    def run_until(self, kernel_id: str, code: str, words: str) -> None:
        """Execute a cell again and again until it prints ``words``, which the server adds to one of these outputs.

        All by one client: a new one may subscribe after the words were published.
        """
        with self.client(kernel_id) as client:
            client.wait_for_ready(timeout=60)
            until(lambda: words in _run(client, code))

    @contextmanager
    def busy(self, kernel_id: str) -> Iterator[None]:
        """A cell runs during the body: it waits for a file that appears afterwards."""
        flag = self.home / f"go-{kernel_id}"
        code = f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)"
        with self.client(kernel_id) as client:
            client.wait_for_ready(timeout=60)
            request = client.execute(code)
            while (message := client.get_iopub_msg(timeout=60))["msg_type"] != "execute_input":
                pass
            assert message["parent_header"]["msg_id"] == request
            try:
                yield
            finally:
                flag.touch()
                client.get_shell_msg(timeout=60)

    @contextmanager
    def events(self) -> Iterator[Callable[[], dict[str, Any]]]:
        """Subscribed to the event bus; call it for the next event of ours."""
        socket: WebSocket = create_connection(
            f"ws{self.url[4:]}api/events/subscribe?{urlencode({'token': TOKEN})}", timeout=60
        )

        def next_event() -> dict[str, Any]:
            while True:
                event: dict[str, Any] = json.loads(socket.recv())
                if "/jupyter_gpu_ckpt/" in event["schema_id"]:
                    return event

        try:
            yield next_event
        finally:
            socket.close()

    @property
    def log(self) -> str:
        """The server's log."""
        return (self.home / "server.log").read_text()


def _run(client: BlockingKernelClient, code: str) -> str:
    printed: list[str] = []

    def collect(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    reply = client.execute_interactive(code, timeout=60, output_hook=collect, allow_stdin=False)
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(printed).strip()


def until(true: Callable[[], Any], timeout: float = 60) -> Any:
    """`waiting.until` with the patience that a whole server needs."""
    return waiting.until(true, timeout=timeout)


@contextmanager
def server(
    home: Path,
    runtime_base: Path,
    *,
    config: str = "",
    options: list[str] | None = None,
    module: str = "jupyter_server",
    python: str | Path = sys.executable,
) -> Iterator[Server]:
    """A server whose every file is in ``home``; ``config`` is appended to its configuration file.

    ``module`` is what ``python -m`` starts: ``jupyterlab`` and ``notebook`` bring a front end.  ``python``: of another
    environment, which may have another release of this package.
    """
    directories = {name: home / name for name in ("config", "data", "runtime", "work", "ipython")}
    for directory in directories.values():
        directory.mkdir(parents=True, exist_ok=True)
    others = _FRONT_ENDS if module == "jupyter_server" else ()
    (directories["config"] / "jupyter_server_config.py").write_text(
        f"""
c = get_config()
c.ServerApp.jpserver_extensions = {dict.fromkeys(others, False) | {"jupyter_gpu_ckpt": True}}
c.LanguageServerManager.autodetect = False  # npm would be run twice at each start
c.ServerApp.base_url = {BASE_URL!r}
c.ServerApp.open_browser = False
c.ServerApp.allow_root = True
c.ServerApp.ip = "127.0.0.1"
c.ServerApp.port = 0
c.ServerApp.root_dir = {str(directories["work"])!r}
c.IdentityProvider.token = {TOKEN!r}
c.GpuCkptProvisioner.image_dir = {str(home / "images")!r}
c.GpuCkptProvisioner.runtime_base = {str(runtime_base)!r}
{config}
"""
    )
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(directories["config"]),
        "JUPYTER_DATA_DIR": str(directories["data"]),
        "JUPYTER_RUNTIME_DIR": str(directories["runtime"]),
        "IPYTHONDIR": str(directories["ipython"]),
    }
    environment.pop("PYTEST_CURRENT_TEST", None)
    criu = find()
    if criu.origin == "unpacked":  # below the data directory of the tests' user, which this server does not see
        environment["JUPYTER_GPU_CKPT_CRIU"] = str(Path(criu.argv[-1]).parents[2])
    with (home / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [python, "-m", module, *(options or [])],
            cwd=home, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        info = directories["runtime"] / f"jpserver-{process.pid}.json"

        def port() -> int:
            assert process.poll() is None, (home / "server.log").read_text()
            try:
                return int(json.loads(info.read_text())["port"])
            except (OSError, ValueError):
                return 0

        running = Server(process, until(port, 60), home)
        until(running.answers)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            hung = True
        else:
            hung = False
    assert not hung, f"The server did not stop: {running.log}"
