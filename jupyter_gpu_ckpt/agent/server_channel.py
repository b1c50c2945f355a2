"""What is outside of this kernel, as seen from a cell: the server that can suspend and checkpoint it.

The kernel asks by a message of its own on iopub, which the gate swallows: no URL, no token, no connection that a
checkpoint would have to carry.  A question is answered on the control channel, which ipykernel serves on a thread of
its own, so the answer comes while the cell that asks is still running.

``gpu_ckpt_request`` (iopub, to the gate)  {"verb": ..., "now": true, "id": ...} or {"verb": "suspend" | "checkpoint"}
    With ``now`` a question; without, what is to be done once this cell has ended.
``gpu_ckpt_answer_request`` (control)  {"id": ..., "answer": {...}} or {"id": ..., "error": {...}}
``gpu_ckpt_failed_request`` (control)  {"error": {"code": ..., "message": ..., "hint": ..., "left": ...}}
    What this kernel had asked for could not be done.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable
from typing import Any

#: Seconds a question waits for its answer; the server measures this host's memory and disk meanwhile.
DEADLINE = 30.0

#: What comes back, and the method that takes it.
_TYPES = {"gpu_ckpt_answer_request": "_answered", "gpu_ckpt_failed_request": "_failed"}


class RequestRefused(Exception):
    """What was asked for cannot be done; ``code`` and ``hint`` are those of `jupyter_gpu_ckpt.errors`.

    A notebook shows it in two lines: the stack below it is this project's own and says nothing to its reader.
    """

    def __init__(self, message: str, code: str = "GATE_FAILED", hint: str = "", left: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.hint, self.left = code, message, hint, left

    @classmethod
    def from_reply(cls, error: dict[str, Any]) -> RequestRefused:
        """From the JSON form of an error."""
        return cls(*(str(error.get(name, "")) for name in ("message", "code", "hint", "left")))

    def lines(self) -> list[str]:
        """For people."""
        left = [f"Left behind: {self.left}."] if self.left else []
        return [f"{self.code}: {self.message}", *left, *([f"Hint: {self.hint}"] if self.hint else [])]

    def _render_traceback_(self) -> list[str]:
        """Called from IPython instead of making a traceback."""
        return self.lines()


class Outside:
    """The way from this kernel to its gate and back."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        reason = os.environ.pop("JUPYTER_GPU_CKPT_PLAIN", "")  # what this kernel starts is not meant
        #: Why there is no gate to ask: the host cannot checkpoint, and this kernel was started plainly.
        self._plain = json.loads(reason) if reason else None
        #: The id that clients and images know this kernel by; learnt with the first answer.
        self.kernel_id = ""
        self._waiting: dict[str, tuple[threading.Event, dict[str, Any]]] = {}
        #: Why the last request could not be done.
        self.failure: RequestRefused | None = None
        #: Called without arguments, on the control thread, when there is a new `failure`.
        self.on_failure: list[Callable[[], None]] = []

    def register(self) -> None:
        """Called from the agent when it is loaded."""
        for msg_type, name in _TYPES.items():
            self._kernel.control_handlers[msg_type] = self._handler(msg_type, getattr(self, name))

    def unregister(self) -> None:
        """Called from the agent when it is unloaded."""
        for msg_type in _TYPES:
            self._kernel.control_handlers.pop(msg_type, None)

    def request(self, verb: str, **content: Any) -> None:
        """Have ``verb`` (``suspend``, ``checkpoint``) done when the cell that runs now has ended.

        Whether it could be done shows later: `failure`.
        """
        self.failure = None
        self._send({"verb": verb, **content})

    def ask(self, verb: str, **content: Any) -> dict[str, Any]:
        """The server's answer to ``verb`` (``status``, ``list``, ``protect``, ``watch``), now.

        Raises `RequestRefused`: by the server, or because none answered before `DEADLINE`.
        """
        identity, answered = uuid.uuid4().hex, threading.Event()
        found: dict[str, Any] = {}
        self._waiting[identity] = answered, found
        try:
            self._send({"verb": verb, "now": True, "id": identity, **content})
            if not answered.wait(DEADLINE):
                raise RequestRefused(
                    f"The server of this kernel did not answer within {DEADLINE:g} s.",
                    "KERNEL_SILENT",
                    "Is the Jupyter server that started this kernel still there, and of the same release?",
                )
        finally:
            del self._waiting[identity]
        if "error" in found:
            raise RequestRefused.from_reply(found["error"])
        self.kernel_id = str(found.get("kernel_id", ""))
        return dict(found.get("answer") or {})

    def _send(self, content: dict[str, Any]) -> None:
        if self._plain is not None:
            raise RequestRefused.from_reply(self._plain)
        kernel = self._kernel
        # The parent is the request under way: what is asked without `now` is done after its idle.
        kernel.session.send(
            kernel.iopub_socket, "gpu_ckpt_request", content, kernel.get_parent(), ident=b"gpu_ckpt_request"
        )

    def _handler(self, msg_type: str, take: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
        reply = msg_type.replace("_request", "_reply")

        async def handler(stream: Any, ident: Any, parent: dict[str, Any]) -> None:
            take(parent["content"])
            self._kernel.session.send(stream, reply, {"status": "ok"}, parent, ident)

        return handler

    def _answered(self, content: dict[str, Any]) -> None:
        waiting = self._waiting.get(str(content.get("id")))
        if waiting is not None:  # else the cell was interrupted, or has given up
            waiting[1].update(content)
            waiting[0].set()

    def _failed(self, content: dict[str, Any]) -> None:
        self.failure = RequestRefused.from_reply(content.get("error") or {})
        for tell in tuple(self.on_failure):
            tell()
