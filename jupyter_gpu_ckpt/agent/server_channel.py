"""The channel from this kernel to its server, which can suspend and checkpoint it.

The kernel sends messages of its own on iopub, which the gate swallows: no URL, no token, no connection that a
checkpoint would have to save.  Replies come on the control channel, which ipykernel serves on a thread of its own, so
that a cell can wait for them.

``gpu_ckpt_request`` (iopub, to the gate)  {"verb": ..., "now": true, "id": ...} or
{"verb": "suspend" | "checkpoint" | "branch"}, {"verb": "save", "name": ...},
{"verb": "back", "name": ..., "files": null | "then" | "now" | {path: "then" | "now"}}
    With ``now`` the server replies at once; without, the verb is run once this cell has ended.
``gpu_ckpt_answer_request`` (control)  {"id": ..., "answer": {...}} or {"id": ..., "error": {...}}
``gpu_ckpt_failed_request`` (control)  {"error": {"code": ..., "message": ..., "hint": ..., "left": ...}}
    A verb that this kernel had requested failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from . import limits, messages

#: Seconds to wait for a reply; the server measures this host's memory and disk meanwhile.
DEADLINE = 30.0
#: Characters of each part of an error: no user reads more, and a longer output is sent without a copy (`messages`).
_LONGEST = 2500
#: As `jupyter_gpu_ckpt.errors.LimitReached` has it.
LIMIT_HINT = (
    "Close files, end threads or child processes, or free memory in the kernel, or have its limits raised (ulimit, "
    "resource.setrlimit, its control group), and try again."
)


class RequestRefused(Exception):
    """A request that was refused; ``code`` and ``hint`` are those of `jupyter_gpu_ckpt.errors`.

    A notebook shows it in a few lines, without a traceback, which would only contain this project's own code.
    """

    def __init__(self, message: str, code: str = "GATE_FAILED", hint: str = "", left: str = "") -> None:
        message, code, hint, left = (text[:_LONGEST] for text in (message, code, hint, left))
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


@contextlib.contextmanager
def limits_explained() -> Iterator[None]:
    """Raise `RequestRefused` in place of an error that too few threads, descriptors or too little memory caused."""
    try:
        yield
    except RequestRefused:
        raise
    except Exception as error:
        if not (lacking := limits.shortage(error)):
            raise
        message = f"The kernel has reached a limit: it gets no more {lacking}."
        raise RequestRefused(message, "LIMIT_REACHED", LIMIT_HINT, "the kernel runs on") from error


class ServerChannel:
    """The channel of one kernel."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        reason = os.environ.pop("JUPYTER_GPU_CKPT_PLAIN", "")  # not for the programs that this kernel starts
        #: The error for every request in a kernel that was started plainly, without a gate.
        self._plain = json.loads(reason) if reason else None
        #: The id by which clients and images name this kernel; known after the first reply.
        self.kernel_id = ""
        #: What to do with a reply, by the id of its request; called on the control thread.
        self._waiting: dict[str, Callable[[dict[str, Any]], None]] = {}
        #: The verb that was scheduled last.
        self.scheduled = ""
        #: Why it failed.
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
        # The control thread publishes its status by a socket of its own, made when it first does.  Without a descriptor
        # for that it would not handle the message: the first one may be the reply to a cell that waits for it.
        control = getattr(getattr(self._kernel, "control_thread", None), "io_loop", None)
        iopub = getattr(self._kernel, "iopub_thread", None)
        if control is not None and iopub is not None:
            control.add_callback(iopub.schedule, lambda: None)

    def unregister(self) -> None:
        """Called from the agent when it is unloaded."""
        for msg_type in self._handlers:
            self._kernel.control_handlers.pop(msg_type, None)

    def schedule(self, verb: str, **content: Any) -> None:
        """Have ``verb`` (one without ``now``) run when the current cell has ended; see `failure`."""
        self.failure, self.scheduled = None, verb
        self._send({"verb": verb, **content})

    def request(self, verb: str, **content: Any) -> dict[str, Any]:
        """Return the server's reply to ``verb`` (``status``, ``list``, ``saves``, ``protect`` ...).

        Raises `RequestRefused`: by the server, or because it did not reply before `DEADLINE`.
        """
        identity, answered = uuid.uuid4().hex, threading.Event()
        reply: dict[str, Any] = {}

        def keep(content: dict[str, Any]) -> None:
            reply.update(content)
            answered.set()

        self._waiting[identity] = keep
        try:
            self._send({"verb": verb, "now": True, "id": identity, **content})
            if not answered.wait(DEADLINE):
                message = f"The server of this kernel did not reply within {DEADLINE:g} s."
                hint = "Check that the Jupyter server that started this kernel still runs."
                raise RequestRefused(message, "KERNEL_SILENT", hint)
        finally:
            self._waiting.pop(identity, None)
        if "error" in reply:
            raise RequestRefused.from_reply(reply["error"])
        self.kernel_id = str(reply.get("kernel_id", ""))
        return dict(reply.get("answer") or {})

    def notify(self, verb: str, on_refused: Callable[[RequestRefused], None], **content: Any) -> None:
        """Send the server ``verb`` and return; ``on_refused`` is called on the control thread if it is refused.

        Needs no thread that waits for the reply.  A later request of the same verb takes the place of an earlier one.
        """

        def judge(reply: dict[str, Any]) -> None:
            if "error" in reply:
                on_refused(RequestRefused.from_reply(reply["error"]))

        self._waiting[verb] = judge
        self._send({"verb": verb, "now": True, "id": verb, **content})

    def _send(self, content: dict[str, Any]) -> None:
        if self._plain is not None:
            raise RequestRefused.from_reply(self._plain)
        kernel = self._kernel
        if os.getpid() != kernel.session.pid:
            message = "This process was forked from the kernel, and has no connection to its server."
            raise RequestRefused(message, "WRONG_STATE", "Use the magic in the kernel itself.")
        # The parent is the request under way: a scheduled verb runs after its idle.
        parent, topic = kernel.get_parent(), b"gpu_ckpt_request"
        with limits_explained():
            frames = messages.frames(kernel.session, "gpu_ckpt_request", content, parent, topic)
            kernel.iopub_socket.send_multipart(frames)

    def _replying(self, msg_type: str, handle: Callable[[dict[str, Any]], None]) -> Callable[..., Any]:
        async def handler(stream: Any, ident: Any, parent: dict[str, Any]) -> None:
            handle(parent["content"])
            reply = msg_type.replace("_request", "_reply")
            stream.send_multipart(messages.frames(self._kernel.session, reply, {"status": "ok"}, parent, ident))

        return handler

    def _answered(self, content: dict[str, Any]) -> None:
        handle = self._waiting.pop(str(content.get("id")), None)
        if handle is not None:  # else the cell was interrupted, or its deadline has passed
            handle(content)

    def _failed(self, content: dict[str, Any]) -> None:
        self.failure = RequestRefused.from_reply(content.get("error") or {})
        for callback in tuple(self.on_failure):
            callback()
