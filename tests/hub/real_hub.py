"""A real JupyterHub with its proxy, its idle culler and Linux users created for the tests.

The hub runs as root, as on bare metal, and starts each user's server as that user.  Hub and proxy are processes of
their own, so that either can be restarted while the other and the users' servers continue.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import waiting
from everybody import needed, opened, readable_criu

from jupyter_gpu_ckpt.criu.install import VARIABLE, CriuBinary

PROXY = Path(sys.prefix) / "proxy" / "node_modules" / ".bin" / "configurable-http-proxy"
CULLER = "gpu-ckpt-culler"
#: Seconds for whatever a hub on a busy machine has to do.
PATIENCE = 90
#: Seconds between two looks at what takes some: the hub answers each from its database.
LOOK = 0.3

_CONFIG = """
import sys
from jupyterhub.spawner import LocalProcessSpawner
from jupyter_gpu_ckpt.hub.roles import culler_role
from jupyter_gpu_ckpt.hub.spawner import CheckpointMixin


class Spawner(CheckpointMixin, LocalProcessSpawner):
    pass


c = get_config()
c.JupyterHub.spawner_class = Spawner
c.JupyterHub.authenticator_class = "dummy"
c.DummyAuthenticator.password = {password!r}
c.Authenticator.allow_all = True
c.JupyterHub.bind_url = {url!r}
c.JupyterHub.hub_port = {hub_port}
c.JupyterHub.db_url = "sqlite:///{place}/hub/hub.sqlite"
c.JupyterHub.cookie_secret_file = "{place}/hub/cookie_secret"
c.JupyterHub.cleanup_servers = False
c.JupyterHub.allow_named_servers = True
c.JupyterHub.last_activity_interval = 1
c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{api_port}"
c.ConfigurableHTTPProxy.auth_token = {proxy_token!r}
c.Spawner.cmd = [sys.executable, "-m", "jupyterhub.singleuser"]
c.Spawner.start_timeout = c.Spawner.http_timeout = {patience}
c.Spawner.environment = {environment!r}
c.JupyterHub.services = [
    {{"name": {culler!r}, "api_token": {culler_token!r}}},
    {{"name": "tests", "api_token": {admin_token!r}}},
]
c.JupyterHub.load_roles = [
    culler_role({culler!r}),
    {{"name": "tests", "scopes": ["admin:users", "admin:servers", "tokens"], "services": ["tests"]}},
]
c.JupyterHub.tornado_settings = {{"slow_spawn_timeout": 0}}  # replies at once, and the spawn page can be read
{more}
"""

_CULLER_CONFIG = """
from jupyter_gpu_ckpt.hub.cull_arbiter import Arbiter
c = get_config()
c.IdleCuller.cull_arbiter_hook = Arbiter({url!r})
"""

_SERVER_CONFIG = """
c = get_config()
# Ours, and none that only takes its time to load.
others = ("jupyterlab", "notebook", "notebook_shim", "jupyter_lsp", "jupyter_server_terminals")
c.ServerApp.jpserver_extensions = {"jupyter_gpu_ckpt": True, **({} if LAB else dict.fromkeys(others, False))}
c.LanguageServerManager.autodetect = False  # npm would be run twice at each start
"""


@dataclass(frozen=True)
class Account:
    """A Linux user."""

    name: str
    uid: int
    home: Path

    @property
    def images(self) -> Path:
        return self.home / ".local" / "share" / "jupyter" / "gpu-ckpt" / "images"

    @property
    def runtime(self) -> Path:
        return Path(tempfile.gettempdir()) / f"gpu-ckpt-{self.uid}"


class RealHub:
    """The hub, the proxy and the users."""

    def __init__(self, place: Path, criu: str, more: str, lab: bool) -> None:
        self.place = place
        self.accounts: dict[str, Account] = {}
        self.admin_token, self._culler_token, self._proxy_token = (secrets.token_hex(16) for _ in range(3))
        self.password = secrets.token_hex(8)
        port, self._api_port, self._hub_port = free_ports(3)
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("hub", "culler"):
            (place / name).mkdir(mode=0o700)
        (place / "etc").mkdir(mode=0o755)
        (place / "homes").mkdir(mode=0o755)
        (place / "etc" / "jupyter_server_config.py").write_text(f"LAB = {lab}\n{_SERVER_CONFIG}")
        environment = {
            "JUPYTER_CONFIG_PATH": str(place / "etc"),
            "PYTHONDONTWRITEBYTECODE": "1",
            VARIABLE: criu,
        }
        (place / "hub" / "jupyterhub_config.py").write_text(
            _CONFIG.format(
                password=self.password, url=self.url, hub_port=self._hub_port, place=place, api_port=self._api_port,
                proxy_token=self._proxy_token, patience=PATIENCE, environment=environment, culler=CULLER,
                culler_token=self._culler_token, admin_token=self.admin_token, more=more,
            )
        )  # fmt: skip
        (place / "culler" / "idle_culler_config.py").write_text(_CULLER_CONFIG.format(url=self.url))

    # -- accounts

    def add_account(self, name: str) -> Account:
        """Create a Linux user with ``name`` in its name."""
        login = f"{name}-{secrets.token_hex(3)}"
        home = self.place / "homes" / login
        made = subprocess.run(
            ["useradd", "--create-home", "--home-dir", home, "--shell", "/bin/bash", login],
            capture_output=True, text=True,
        )  # fmt: skip
        assert made.returncode == 0, made.stderr
        home.chmod(0o700)
        account = self.accounts[name] = Account(login, pwd.getpwnam(login).pw_uid, home)
        return account

    def remove_accounts(self) -> None:
        """Remove the Linux users: their processes, their accounts and their files outside their homes."""
        for account in self.accounts.values():
            for process in processes(account.uid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            waiting.until(lambda account=account: not processes(account.uid), timeout=60)
            subprocess.run(["userdel", account.name], check=True, capture_output=True)
            shutil.rmtree(account.runtime, ignore_errors=True)

    def run_as(self, account: Account, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run a command as that user, in the user's home."""
        drop = ["setpriv", f"--reuid={account.uid}", f"--regid={account.uid}", "--clear-groups", "--", *argv]
        environment = {"HOME": str(account.home), "PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            self._in_readable_mounts(f"cd {account.home}\nexec {shlex.join(drop)}"),
            env=environment, capture_output=True, text=True, timeout=PATIENCE, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    # -- processes

    def _in_readable_mounts(self, script: str) -> list[str]:
        """Return the command of a shell that runs ``script`` where every user can read the tested package."""
        commands = opened(needed(), self.place / "stage")
        private = ["unshare", "--mount", "--propagation", "private"] if commands else []
        return [*private, "sh", "-c", f"set -e\n{commands}\n{script}"]

    def _start(self, name: str, argv: list[str], **environment: str) -> subprocess.Popen[bytes]:
        with (self.place / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                argv, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        self._processes[name] = process
        return process

    def stop(self, name: str, how: int = signal.SIGTERM) -> None:
        """End the proxy, the hub or the culler; users' servers continue."""
        process = self._processes.pop(name, None)
        if process is not None:
            process.send_signal(how)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start_proxy(self) -> None:
        """Start the proxy; a running hub gives it its routes again."""
        self._start(
            "proxy",
            [
                str(PROXY), "--ip=127.0.0.1", f"--port={self._port}", "--api-ip=127.0.0.1",
                f"--api-port={self._api_port}", f"--default-target=http://127.0.0.1:{self._hub_port}",
                f"--error-target=http://127.0.0.1:{self._hub_port}/hub/error",
            ],
            CONFIGPROXY_AUTH_TOKEN=self._proxy_token,
        )  # fmt: skip
        waiting.until(lambda: listens(self._api_port) and listens(self._port), timeout=PATIENCE)

    def start_hub(self) -> None:
        """Start the hub with its database of before."""
        command = shlex.join([sys.executable, "-m", "jupyterhub", "-f", str(self.place / "hub/jupyterhub_config.py")])
        self._start("hub", self._in_readable_mounts(f"cd {self.place}/hub\nexec {command}"))
        waiting.until(self.answers, timeout=PATIENCE, longest=LOOK)

    def answers(self) -> bool:
        """Return whether hub and proxy are up and connected."""
        with contextlib.suppress(requests.RequestException):
            return requests.get(f"{self.url}/hub/api/", timeout=5).ok
        return False

    @contextlib.contextmanager
    def culler(self, *options: str) -> Iterator[None]:
        """Run the idle culler during the body, once a second; by default it culls servers idle for one second."""
        config = str(self.place / "culler" / "idle_culler_config.py")
        settings = ["--cull-every=1", f"--config={config}", *(options or ["--timeout=1"])]
        self._start(
            "culler", [sys.executable, "-m", "jupyterhub_idle_culler", *settings],
            JUPYTERHUB_API_URL=f"{self.url}/hub/api", JUPYTERHUB_API_TOKEN=self._culler_token,
        )  # fmt: skip
        try:
            yield
        finally:
            self.stop("culler")

    def log(self, name: str) -> str:
        return (self.place / f"{name}.log").read_text()

    # -- the hub's API

    def ask(self, method: str, path: str, token: str = "", **kwargs: Any) -> requests.Response:
        """Send a request to the hub's API; by default with all rights."""
        headers = {"Authorization": f"token {token or self.admin_token}"}
        return requests.request(method, f"{self.url}/hub/api/{path}", headers=headers, timeout=PATIENCE, **kwargs)

    def servers(self, account: Account) -> dict[str, Any]:
        """Return the user's servers by name."""
        reply = self.ask("GET", f"users/{account.name}")
        assert reply.ok, reply.text
        return reply.json()["servers"]


def free_ports(count: int) -> list[int]:
    """Return ports that are free."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def processes(uid: int) -> list[int]:
    """Return the pids of a user."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                found.append(int(entry.name))
    return found


@contextlib.contextmanager
def running_hub(criu: CriuBinary, more: str = "", *, lab: bool = False) -> Iterator[RealHub]:
    """Run a hub without users.  ``lab``: their servers have a front end."""
    place = Path(tempfile.mkdtemp(prefix="gc-hub-"))
    place.chmod(0o711)
    running = RealHub(place, readable_criu(criu, place), more, lab)
    try:
        running.start_proxy()
        running.start_hub()
        yield running
    finally:
        for name in ("culler", "hub", "proxy"):
            running.stop(name)
        running.remove_accounts()
        shutil.rmtree(place)
