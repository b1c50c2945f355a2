"""A client that knows one address and reconnects by itself, as a server's connection to a kernel does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from jupyter_client import BlockingKernelClient


class Client:
    """A client that asks and reads answers; it does not look at outputs."""

    def __init__(self, info: dict[str, Any]) -> None:
        self.client = BlockingKernelClient()
        self.client.load_connection_info(info)
        self.client.start_channels(hb=False)

    def evaluate(self, expression: str, code: str = "", timeout: float = 60.0) -> str:
        """Run ``code`` in the kernel, wherever that is; the repr of ``expression`` then."""
        asked = self.client.execute(code, user_expressions={"value": expression}, allow_stdin=False)
        deadline = time.monotonic() + timeout
        while True:
            reply = self.client.get_shell_msg(timeout=max(0.1, deadline - time.monotonic()))
            if reply["parent_header"].get("msg_id") == asked:
                content = reply["content"]
                assert content["status"] == "ok", content
                return str(content["user_expressions"]["value"]["data"]["text/plain"])


@contextlib.contextmanager
def connected(info: dict[str, Any]) -> Iterator[Client]:
    made = Client(info)
    try:
        yield made
    finally:
        made.client.stop_channels()
