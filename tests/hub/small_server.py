"""A user's server as a hub sees it: it answers as one that can be drained, is busy, or says nothing would.

Its hub is there as well, for the tokens that the culler requests.
"""

from __future__ import annotations

import json
import ssl
from datetime import datetime, timedelta, timezone

from tornado import httpserver, testing, web

DRAINED = {"drained": True, "kernels": [{"kernel_id": "k", "image": "i", "bytes": 1, "code": None, "hint": ""}]}
BUSY = {
    "drained": False,
    "kernels": [{"kernel_id": "k", "image": None, "bytes": 0, "code": "KERNEL_BUSY", "hint": "Wait."}],
}


class Double:
    """A user's server: what it answers, and what it was asked."""

    def __init__(self, certificates: ssl.SSLContext | None = None) -> None:
        self.result: dict | None = DRAINED
        self.status = 200
        self.seconds = 30.0
        self.last_activity = datetime.now(timezone.utc) - timedelta(hours=2)
        self.asked: list[str] = []
        #: The authorizations that were sent to the server and to its hub; the requests for tokens.
        self.sent: dict[str, set[str | None]] = {"server": set(), "hub": set()}
        self.made: list[dict] = []
        self.hub_status = 201
        #: What it answers instead, as text, by the path.
        self.instead: dict[str, str] = {}
        double = self

        class Hub(web.RequestHandler):
            def post(self, user: str) -> None:
                double.sent["hub"].add(self.request.headers.get("Authorization"))
                double.made.append({"user": user, **json.loads(self.request.body)})
                self.set_status(double.hub_status)
                self.finish({"token": f"of-a-server-of-{user}"})

        class Any(web.RequestHandler):
            def answer(self) -> None:
                double.sent["server"].add(self.request.headers.get("Authorization"))
                path = self.request.path.removeprefix("/user/ann/")
                double.asked.append(f"{self.request.method} {path}")
                if double.status != 200:
                    self.set_status(double.status)
                elif path in double.instead and (self.request.method == "POST" or path != "gpu-ckpt/drain"):
                    self.finish(double.instead[path])
                elif path == "api/status":
                    self.finish({"last_activity": double.last_activity.isoformat()})
                elif self.request.method == "GET" and path == "gpu-ckpt/drain":
                    self.finish({"kernels": 1, "bytes": 1, "seconds": double.seconds})
                else:
                    status = "running" if double.result is None else "done"
                    self.finish({"id": "j", "status": status, "result": double.result, "error": None})

            get = post = answer

        application = web.Application([("/hub/api/users/(.*)/tokens", Hub), (".*", Any)])
        self.server = httpserver.HTTPServer(application, ssl_options=certificates)
        socket, port = testing.bind_unused_port()
        self.server.add_socket(socket)
        self.port = port
        self.url = f"{'https' if certificates else 'http'}://127.0.0.1:{port}"

    def posts(self) -> int:
        return self.asked.count("POST gpu-ckpt/drain")
