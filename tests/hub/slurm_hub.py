"""A JupyterHub with batchspawner on the head of a Slurm cluster, and a user who talks to it through its proxy."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import requests
from slurm_cluster import Cluster, User
from tab import Tab
from waiting import until
from websocket import WebSocketBadStatusException, create_connection

from jupyter_gpu_ckpt import server

#: The hub is no root: it may hand in and end its users' jobs, and read what they publish.
ACCOUNT = User("jupyterhub", 54320, Path("/nonexistent"))
_SUDOERS = "jupyterhub ALL=({user}) NOPASSWD:SETENV: /usr/bin/sbatch, /usr/bin/squeue, /usr/bin/scancel\n"

CONFIG = Path(__file__).with_name("slurm_hub_config.py")
BIN = Path(sys.executable).parent
PROXY = Path(sys.prefix) / "proxy" / "node_modules" / ".bin" / "configurable-http-proxy"
#: Seconds for what a loaded machine does in a few: a job's start, a server's, a kernel's.
PATIENCE = 120.0
#: Seconds between two looks at what takes some.
LOOK = 0.3


class Hub:
    """The hub; everything is asked with a service's token."""

    def __init__(self, cluster: Cluster, user: User, place: Path, token: str) -> None:
        self.cluster, self.user, self.place = cluster, user, place
        self.url = f"http://{cluster.head.address}:8000"
        self._token = token
        self.log = cluster.head.own / "jupyterhub.log"

    def ask(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        headers = {"Authorization": f"token {self._token}"}
        return requests.request(method, self.url + path, headers=headers, timeout=60, **kwargs)

    def up(self) -> bool:
        with contextlib.suppress(requests.exceptions.ConnectionError):
            return self.ask("GET", "/hub/api/users").ok
        return False

    @property
    def _server(self) -> str:
        return f"/hub/api/users/{self.user.name}/server"

    def model(self) -> dict[str, Any]:
        """The hub's document of the user's server; empty when there is none."""
        found: dict[str, Any] = self.ask("GET", f"/hub/api/users/{self.user.name}").json()["servers"].get("", {})
        return found

    def start(self, **options: Any) -> list[str]:
        """Start the user's server and wait for it; what the user read on the spawn page meanwhile."""
        reply = self.ask("POST", self._server, json=options)
        assert reply.status_code in (201, 202), reply.text
        messages = []
        with self.ask("GET", f"{self._server}/progress", stream=True) as page:
            for line in page.iter_lines():
                if line.startswith(b"data:"):
                    event = json.loads(line[5:])
                    messages.append(event["message"])
                    assert not event.get("failed"), self.report(event)
                    if event.get("ready"):
                        break
        until(lambda: self.model().get("ready"), "the server is ready", timeout=PATIENCE, longest=LOOK)
        return messages

    def report(self, what: Any) -> str:
        """A failure, with what the machines wrote down."""
        logs = [*self.user.home.glob("jupyterhub_slurmspawner_*.log"), self.log]
        return "\n".join([str(what), *(f"== {log.name}\n{log.read_text()[-3000:]}" for log in logs)])

    def stop(self) -> None:
        """Stop the user's server, and wait until its job has gone from its node too."""
        assert self.ask("DELETE", self._server).status_code in (202, 204)
        until(lambda: not self.model(), "the hub has stopped the server", timeout=PATIENCE, longest=LOOK)
        until(lambda: not self.cluster.jobs(), "its job has ended", timeout=PATIENCE, longest=LOOK)

    def node(self) -> str:
        """Return the node of the user's server."""
        ((_, name),) = self.cluster.jobs()
        return name

    def job(self) -> str:
        """All that Slurm knows of the job of the user's server."""
        return self.cluster.job(self.model()["state"]["job_id"])

    def get(self, path: str) -> Any:
        """A document of the user's server."""
        reply = self.ask("GET", f"/user/{self.user.name}/{path}")
        assert reply.status_code == 200, self.report(reply.text)
        return reply.json()

    def open(self, notebook: str) -> str:
        """Open a notebook as JupyterLab does: a session; its kernel's id."""
        body = {"path": notebook, "name": notebook, "type": "notebook", "kernel": {"name": "python3"}}
        reply = self.ask("POST", f"/user/{self.user.name}/api/sessions", json=body)
        assert reply.status_code == 201, self.report(reply.text)
        return str(reply.json()["kernel"]["id"])

    def serves(self, kernel_id: str) -> bool:
        """Return whether the user's server has the kernel: it answers a moment before all kernels are attached."""
        reply = self.ask("GET", f"/user/{self.user.name}/api/kernels")
        return reply.ok and kernel_id in [one["id"] for one in reply.json()]

    def run(self, kernel_id: str, code: str) -> str:
        """Execute a cell through the proxy; what it printed."""
        until(lambda: self.serves(kernel_id), "the server has the kernel", timeout=PATIENCE, longest=LOOK)
        query = urlencode({"session_id": secrets.token_hex(8)})
        address = f"ws{self.url[4:]}/user/{self.user.name}/api/kernels/{kernel_id}/channels?{query}"
        header = [f"Authorization: token {self._token}"]
        try:
            socket = create_connection(address, timeout=PATIENCE, header=header, suppress_origin=True)
        except WebSocketBadStatusException as error:
            raise AssertionError(self.report(error.status_code)) from error
        try:
            return Tab(socket, secrets.token_hex(8)).run(code)
        finally:
            socket.close()


@contextlib.contextmanager
def hub(cluster: Cluster, user: User, place: Path, criu: str, *, placement: bool = True) -> Iterator[Hub]:
    """The hub and its proxy, ready."""
    token = secrets.token_hex(16)
    own = place / "hub"
    own.mkdir(mode=0o755)
    published = own / "placement" / user.name
    published.mkdir(parents=True)
    os.chown(published, user.uid, ACCOUNT.uid)
    published.chmod(0o2750)  # the two, and nobody else
    os.chown(own, ACCOUNT.uid, ACCOUNT.uid)
    (own / "sudoers").write_text(_SUDOERS.format(user=user.name))
    (own / "sudoers").chmod(0o440)
    cluster.head.run("cp", own / "sudoers", "/etc/sudoers.d/jupyterhub")
    enabled = own / "etc" / "jupyter_server_config.d"
    enabled.mkdir(parents=True)
    # As the wheel enables the extension, whatever the environment that runs the tests has enabled.
    shutil.copy(Path(server.__file__).with_name("jupyter_gpu_ckpt.json"), enabled)
    environment = {
        "PATH": f"{BIN}:{os.defpath}",
        "HOME": str(own),
        "LC_ALL": "C.UTF-8",
        "CONFIGPROXY_AUTH_TOKEN": secrets.token_hex(16),
        "TEST_BIN": str(BIN),
        "TEST_PLACE": str(own),
        "TEST_ADDRESS": cluster.head.address,
        "TEST_PROXY": str(PROXY),
        "TEST_TOKEN": token,
        "TEST_RUNTIME": f"/run/user/{user.uid}",
        "TEST_CRIU": criu,
        "TEST_PLACEMENT": "yes" if placement else "",
    }
    made = Hub(cluster, user, own, token)
    cluster.head.start(BIN / "jupyterhub", "--config", CONFIG, user=ACCOUNT, env=environment, cwd=own)

    def ready() -> bool:
        assert not cluster.head.dead(), made.report("the hub has ended")
        return made.up()

    until(ready, "the hub answers", timeout=PATIENCE, longest=LOOK)
    assert made.ask("POST", f"/hub/api/users/{user.name}").status_code == 201
    yield made
