"""What a user of the hub does: start and stop a server, open a notebook, run cells; by HTTP, through the proxy."""

from __future__ import annotations

import uuid
from typing import Any
from urllib.parse import quote, urlencode

import requests
import waiting
from tab import Tab
from town import PATIENCE, Person, Town
from websocket import create_connection


class Desk:
    """A user with a token of the user's own, and one server, by default the one without a name."""

    def __init__(self, town: Town, person: Person, server: str = "") -> None:
        self.town, self.person, self.server = town, person, server
        if person.name not in [user["name"] for user in town.ask("GET", "users").json()]:
            assert town.ask("POST", f"users/{person.name}").status_code == 201
        reply = town.ask("POST", f"users/{person.name}/tokens", json={"note": "tests"})
        assert reply.status_code == 201, reply.text
        self.token: str = reply.json()["token"]
        self.path = f"/user/{person.name}/" + (f"{quote(server)}/" if server else "")

    # -- the server

    @property
    def _api(self) -> str:
        return (
            f"users/{self.person.name}/servers/{quote(self.server)}"
            if self.server
            else (f"users/{self.person.name}/server")
        )

    def start(self) -> None:
        """Start the server and wait until it answers."""
        reply = self.town.ask("POST", self._api, token=self.token)
        assert reply.status_code in (201, 202), reply.text
        waiting.until(self.ready, timeout=PATIENCE)

    def ready(self) -> bool:
        server = self.town.servers(self.person).get(self.server)
        return bool(server and server["ready"]) and self.ask("GET", "api/status").ok

    def stop(self, token: str = "") -> None:
        """Stop it, and wait until it has gone."""
        reply = self.town.ask("DELETE", self._api, token=token or self.token)
        assert reply.status_code in (202, 204), reply.text
        self.gone()

    def gone(self) -> None:
        """Wait until the hub says that there is no such server any more."""
        waiting.until(lambda: not self.there(), timeout=PATIENCE)

    def there(self) -> bool:
        found = self.town.servers(self.person).get(self.server)
        return bool(found) and not found.get("stopped", False)

    def culled(self, *options: str) -> None:
        """Have the idle culler come by until the server has gone."""
        with self.town.culler(*options):
            self.gone()

    # -- in it

    def ask(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        """A request to the server, through the proxy."""
        url = self.town.url + kwargs.pop("to", self.path) + path
        headers = {"Authorization": f"token {self.token}"}
        return requests.request(method, url, headers=headers, timeout=PATIENCE, allow_redirects=False, **kwargs)

    def get(self, path: str) -> Any:
        reply = self.ask("GET", path)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def open(self, notebook: str) -> dict[str, Any]:
        """A notebook's session, as a browser makes it: the one there is, or a new one with a new kernel."""
        body = {"path": notebook, "name": notebook, "type": "notebook", "kernel": {"name": "python3"}}
        reply = self.ask("POST", "api/sessions", json=body)
        assert reply.status_code == 201, reply.text
        return reply.json()

    def run(self, kernel_id: str, code: str) -> str:
        """Execute a cell and return what it printed, once the server has attached the kernel."""
        waiting.until(lambda: kernel_id in [kernel["id"] for kernel in self.get("api/kernels")], timeout=PATIENCE)
        session = uuid.uuid4().hex
        query = urlencode({"session_id": session})
        url = f"ws{self.town.url[4:]}{self.path}api/kernels/{kernel_id}/channels?{query}"
        socket = create_connection(url, timeout=PATIENCE, header=[f"Authorization: token {self.token}"])
        try:
            return Tab(socket, session).run(code)
        finally:
            socket.close()

    def images(self) -> list[str]:
        """Ids of the user's images."""
        return sorted(path.name for path in self.person.images.glob("[0-9]*")) if self.person.images.is_dir() else []
