"""A browser's tab: a notebook's websocket to its kernel, as JupyterLab uses it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

from live import TOKEN, Server
from websocket import WebSocket, create_connection

#: What JupyterLab asks by itself when a notebook is opened or reloaded.
OPENING = (
    ("kernel_info_request", {}, "shell"),
    ("comm_info_request", {"target_name": "jupyter.widget"}, "shell"),
    ("history_request", {"hist_access_type": "tail", "n": 500, "output": False, "raw": True}, "shell"),
    ("debug_request", {"type": "request", "seq": 1, "command": "debugInfo", "arguments": {}}, "control"),
)


class Tab:
    """One connection to ``api/kernels/<id>/channels``."""

    def __init__(self, socket: WebSocket, session: str) -> None:
        self._socket, self._session = socket, session

    def send(self, msg_type: str, content: dict[str, Any], channel: str = "shell") -> str:
        """A request; its id."""
        id = uuid.uuid4().hex
        header = {
            "msg_id": id,
            "msg_type": msg_type,
            "session": self._session,
            "username": "ann",
            "date": "2026-11-20T00:00:00Z",
            "version": "5.4",
        }
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": channel}
        self._socket.send(json.dumps({**message, "buffers": []}))
        return id

    def next(self) -> dict[str, Any]:
        """The next message of any channel; raises `websocket.WebSocketTimeoutException` when none comes."""
        message: dict[str, Any] = json.loads(self._socket.recv())
        return message

    def reply(self, id: str) -> dict[str, Any]:
        """The content of the reply to a request."""
        while True:
            message = self.next()
            if message["parent_header"].get("msg_id") == id and message["channel"] != "iopub":
                return message["content"]

    def run(self, code: str) -> str:
        """Execute a cell; what it printed.  Waits for its reply and its idle."""
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False, "stop_on_error": True}
        id = self.send("execute_request", content)
        printed, missing = [], {"reply", "idle"}
        while missing:
            message = self.next()
            if message["parent_header"].get("msg_id") != id:
                continue
            if message["msg_type"] == "stream":
                printed.append(message["content"]["text"])
            elif message["msg_type"] == "execute_reply":
                assert message["content"]["status"] == "ok", message["content"]
                missing.discard("reply")
            elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                missing.discard("idle")
        return "".join(printed).strip()


@contextmanager
def tab(server: Server, kernel_id: str, session: str = "") -> Iterator[Tab]:
    """Open the notebook; ``session`` as in an earlier tab: it was reloaded."""
    session = session or uuid.uuid4().hex
    query = urlencode({"session_id": session, "token": TOKEN})
    socket = create_connection(f"ws{server.url[4:]}api/kernels/{kernel_id}/channels?{query}", timeout=60)
    try:
        yield Tab(socket, session)
    finally:
        socket.close()
