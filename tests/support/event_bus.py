"""The page's connection to the server's event bus, in the hands of a test."""

from __future__ import annotations

import json
from typing import Any

SCHEMAS = "https://events.jupyter.org/jupyter_gpu_ckpt/"


class EventBus:
    """Passes events on, until it is cut; says events of its own."""

    def __init__(self, context: Any) -> None:
        """``context`` is the browser's; its pages must not be open yet."""
        self.is_cut = False
        self._sockets: list[Any] = []
        context.route_web_socket(lambda url: "/api/events/subscribe" in url, self._connected)

    def _connected(self, socket: Any) -> None:
        if self.is_cut:
            socket.close()
            return
        server = socket.connect_to_server()
        server.on_message(lambda message: None if self.is_cut else socket.send(message))
        self._sockets.append(socket)

    def cut(self) -> None:
        """Drop all events; the connection stays open."""
        self.is_cut = True

    def reconnect(self) -> None:
        """Pass events on again."""
        self.is_cut = False

    def say(self, schema: str, kernel_id: str, **content: Any) -> None:
        """Tell the page an event of the kernel; ``schema`` is its name and version."""
        for socket in self._sockets:
            socket.send(json.dumps({"schema_id": SCHEMAS + schema, "kernel_id": kernel_id, **content}))

    def state(self, kernel_id: str, state: str, previous: str) -> None:
        """Tell the page that the kernel came from ``previous`` into ``state``."""
        content = {"state": state, "previous": previous, "seconds": 1.0, "image": None, "device_bytes": 0}
        self.say("kernel_state/v1", kernel_id, **content)
