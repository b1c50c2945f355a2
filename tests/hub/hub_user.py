"""A user of the hub: starts and stops a server, opens a notebook, runs cells; by HTTP, through the proxy."""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import quote, urlencode

import requests
import waiting
from real_hub import LOOK, PATIENCE, Account, RealHub
from tab import Tab
from websocket import create_connection


class HubUser:
    """A user with a token of the user's own, and one server, by default the one without a name."""

    def __init__(self, hub: RealHub, account: Account, server: str = "") -> None:
        self.hub, self.account, self.server = hub, account, server
        if account.name not in [user["name"] for user in hub.ask("GET", "users").json()]:
            assert hub.ask("POST", f"users/{account.name}").status_code == 201
        reply = hub.ask("POST", f"users/{account.name}/tokens", json={"note": "tests"})
        assert reply.status_code == 201, reply.text
        self.token: str = reply.json()["token"]
        self.path = f"/user/{account.name}/" + (f"{quote(server)}/" if server else "")

    # -- the server

    @property
    def _api(self) -> str:
        return (
            f"users/{self.account.name}/servers/{quote(self.server)}"
            if self.server
            else (f"users/{self.account.name}/server")
        )

    def start(self) -> None:
        """Start the server and wait until it answers."""
        reply = self.hub.ask("POST", self._api, token=self.token)
        assert reply.status_code in (201, 202), reply.text
        waiting.until(self.ready, timeout=PATIENCE, longest=LOOK)

    def come(self) -> None:
        """Start the server, unless it runs."""
        if self._model().get("pending") == "stop":
            self.gone()
        if not self.there():
            self.start()

    def ready(self) -> bool:
        return bool(self._model().get("ready")) and self.ask("GET", "api/status").ok

    def stop(self, token: str = "") -> None:
        """Stop the server and wait until the hub has none."""
        reply = self.hub.ask("DELETE", self._api, token=token or self.token)
        assert reply.status_code in (202, 204), reply.text
        self.gone()

    def gone(self) -> None:
        """Wait until the hub says that there is no such server any more."""
        waiting.until(lambda: not self.there(), timeout=PATIENCE, longest=LOOK)

    def there(self) -> bool:
        found = self._model()
        return bool(found) and not found.get("stopped", False)

    def _model(self) -> dict[str, Any]:
        """The hub's document of the server; empty when there is none."""
        found: dict[str, Any] = self.hub.servers(self.account).get(self.server, {})
        return found

    def culled(self, *options: str) -> None:
        """Run the idle culler until it has stopped the server."""
        with self.hub.culler(*options):
            self.gone()

    # -- requests to the server

    def ask(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        """Send a request to the server, through the proxy."""
        url = self.hub.url + kwargs.pop("to", self.path) + path
        headers = {"Authorization": f"token {self.token}"}
        return requests.request(method, url, headers=headers, timeout=PATIENCE, allow_redirects=False, **kwargs)

    def get(self, path: str) -> Any:
        reply = self.ask("GET", path)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def open(self, notebook: str) -> dict[str, Any]:
        """Return a notebook's session as a browser gets it: the existing one, or a new one with a new kernel."""
        body = {"path": notebook, "name": notebook, "type": "notebook", "kernel": {"name": "python3"}}
        reply = self.ask("POST", "api/sessions", json=body)
        assert reply.status_code == 201, reply.text
        return reply.json()

    def run(self, kernel_id: str, code: str) -> str:
        """Execute a cell and return what it printed, once the server has attached the kernel."""
        waiting.until(lambda: kernel_id in [kernel["id"] for kernel in self.get("api/kernels")], timeout=PATIENCE)
        session = uuid.uuid4().hex
        query = urlencode({"session_id": session})
        url = f"ws{self.hub.url[4:]}{self.path}api/kernels/{kernel_id}/channels?{query}"
        socket = create_connection(url, timeout=PATIENCE, header=[f"Authorization: token {self.token}"])
        try:
            return Tab(socket, session).run(code)
        finally:
            socket.close()

    def images(self) -> list[str]:
        """Return the ids of the user's images."""
        return sorted(path.name for path in self.account.images.glob("[0-9]*")) if self.account.images.is_dir() else []
