"""The channel from this kernel to its server, which can suspend and checkpoint it.

The kernel sends messages of its own on iopub, which the gate swallows: no URL, no token, no connection that a
checkpoint would have to save.  Replies come on the control channel, which ipykernel serves on a thread of its own, so
that a cell can wait for them.

``gpu_ckpt_request`` (iopub, to the gate)  {"verb": ..., "now": true, "id": ...} or {"verb": "suspend" | "checkpoint"}
    With ``now`` the server replies at once; without, the verb is run once this cell has ended.
``gpu_ckpt_answer_request`` (control)  {"id": ..., "answer": {...}} or {"id": ..., "error": {...}}
``gpu_ckpt_failed_request`` (control)  {"error": {"code": ..., "message": ..., "hint": ..., "left": ...}}
    A verb that this kernel had requested failed.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable
from typing import Any

#: Seconds to wait for a reply; the server measures this host's memory and disk meanwhile.
DEADLINE = 30.0


class RequestRefused(Exception):
    """A request that was refused; ``code`` and ``hint`` are those of `jupyter_gpu_ckpt.errors`.

    A notebook shows it in a few lines, without a traceback, which would only contain this project's own code.
    """

    def __init__(self, message: str, code: str = "GATE_FAILED", hint: str = "", left: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.hint, self.left = code, message, hint, left

    @classmethod
    def from_reply(cls, error: dict[str, Any]) -> RequestRefused:
        """Return the exception for the JSON form of an error."""
        return cls(*(str(error.get(name, "")) for name in ("message", "code", "hint", "left")))

    def lines(self) -> list[str]:
        """Return the lines to show to the user."""
        left = [f"Left behind: {self.left}."] if self.left else []
        return [f"{self.code}: {self.message}", *left, *([f"Hint: {self.hint}"] if self.hint else [])]

    def _render_traceback_(self) -> list[str]:
        """Called from IPython instead of making a traceback."""
        return self.lines()


class ServerChannel:
    """The channel of one kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        reason = os.environ.pop("JUPYTER_GPU_CKPT_PLAIN", "")  # not for the programs that this kernel starts
        #: The error for every request in a kernel that was started plainly, without a gate.
        self._plain = json.loads(reason) if reason else None
        #: The id by which clients and images name this kernel; known after the first reply.
        self.kernel_id = ""
        self._waiting: dict[str, tuple[threading.Event, dict[str, Any]]] = {}
        #: Why the last scheduled verb failed.
        self.failure: RequestRefused | None = None
        #: Called without arguments, on the control thread, when there is a new `failure`.
        self.on_failure: list[Callable[[], None]] = []
        self._handlers: dict[str, Callable[[dict[str, Any]], None]] = {
            "gpu_ckpt_answer_request": self._answered,
            "gpu_ckpt_failed_request": self._failed,
        }

    def register(self) -> None:
        """Called from the agent when it is loaded."""
        for msg_type, handle in self._handlers.items():
            self._kernel.control_handlers[msg_type] = self._replying(msg_type, handle)

    def unregister(self) -> None:
        """Called from the agent when it is unloaded."""
        for msg_type in self._handlers:
            self._kernel.control_handlers.pop(msg_type, None)

    def schedule(self, verb: str, **content: Any) -> None:
        """Have ``verb`` (``suspend``, ``checkpoint``) run when the current cell has ended; see `failure`."""
        self.failure = None
        self._send({"verb": verb, **content})

    def request(self, verb: str, **content: Any) -> dict[str, Any]:
        """Return the server's reply to ``verb`` (``status``, ``list``, ``protect``, ``watch``).

        Raises `RequestRefused`: by the server, or because it did not reply before `DEADLINE`.
        """
        identity, answered = uuid.uuid4().hex, threading.Event()
        reply: dict[str, Any] = {}
        self._waiting[identity] = answered, reply
        try:
            self._send({"verb": verb, "now": True, "id": identity, **content})
            if not answered.wait(DEADLINE):
                message = f"The server of this kernel did not reply within {DEADLINE:g} s."
                hint = "Check that the Jupyter server that started this kernel still runs."
                raise RequestRefused(message, "KERNEL_SILENT", hint)
        finally:
            del self._waiting[identity]
        if "error" in reply:
            raise RequestRefused.from_reply(reply["error"])
        self.kernel_id = str(reply.get("kernel_id", ""))
        return dict(reply.get("answer") or {})

    def _send(self, content: dict[str, Any]) -> None:
        if self._plain is not None:
            raise RequestRefused.from_reply(self._plain)
        kernel = self._kernel
        # The parent is the request under way: a scheduled verb runs after its idle.
        kernel.session.send(
            kernel.iopub_socket, "gpu_ckpt_request", content, kernel.get_parent(), ident=b"gpu_ckpt_request"
        )

    def _replying(self, msg_type: str, handle: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
        async def handler(stream: Any, ident: Any, parent: dict[str, Any]) -> None:
            handle(parent["content"])
            self._kernel.session.send(stream, msg_type.replace("_request", "_reply"), {"status": "ok"}, parent, ident)

        return handler

    def _answered(self, content: dict[str, Any]) -> None:
        waiting = self._waiting.get(str(content.get("id")))
        if waiting is not None:  # else the cell was interrupted, or its deadline has passed
            waiting[1].update(content)
            waiting[0].set()

    def _failed(self, content: dict[str, Any]) -> None:
        self.failure = RequestRefused.from_reply(content.get("error") or {})
        for callback in tuple(self.on_failure):
            callback()
