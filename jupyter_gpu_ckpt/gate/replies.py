"""Messages of the gate to clients in the kernel's name while the kernel is away, signed, with the kernel's session id.

Each answer is as ipykernel would send it: busy on iopub, the reply on the channel of the request, idle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jupyter_client.session import Session, new_id

from ..errors import GpuCkptError, KernelAsleep
from .wire import Request

Send = Callable[[str, list[bytes]], None]

#: Type of a request that was never sent: the parent of a status that answers none.
IDLE_TYPE = "gpu_ckpt_idle"


class Replies:
    """Builds the kernel's messages and passes their frames to ``send(channel, frames)``.

    ``info`` is the content of the kernel's last ``kernel_info_reply``, None until one came.
    """

    def __init__(self, session: Session, kernel_id: str, send: Send) -> None:
        self._session = session
        self._topic = f"kernel.{kernel_id}.".encode()
        self._send = send
        self.info: dict[str, Any] | None = None
        self._kernel_welcomes = False
        self._unwelcomed: set[bytes] = set()  # topics of unanswered subscriptions

    def learn(self, message: Mapping[str, Any]) -> None:
        """Copy ``info`` and the kernel's session id from its ``kernel_info_reply``.

        The id matters: by a change of it jupyter_server detects a restarted kernel.
        """
        self.info = dict(message["content"])
        self._session.session = message["header"]["session"]
        self._session.username = message["header"].get("username", "")

    def follow(self, session: str) -> None:
        """Use the kernel's new session id."""
        self._session.session = session

    def forget(self) -> None:
        """Forget the kernel: another one takes its place."""
        self.info, self._kernel_welcomes = None, False
        self._unwelcomed.clear()

    @property
    def identity(self) -> dict[str, Any] | None:
        """The ``identity`` of a later gate of this kernel; None until the kernel was heard."""
        if self.info is None:
            return None
        header = {"session": self._session.session, "username": self._session.username}
        return {"header": header, "content": self.info, "welcomes": self._kernel_welcomes}

    def welcome(self, topic: bytes) -> None:
        """Answer a subscription by ``iopub_welcome``, as the kernel would (JEP 65; in ipykernel since 7).

        Not for a kernel that was heard and sent none itself: its clients do not know the message.
        """
        if self.info is not None and not self._kernel_welcomes and _version(self.info) < (5, 4):
            self._unwelcomed.add(topic)
        else:
            content = {"subscription": topic.decode("utf-8", "replace")}
            self._send("iopub", self._frames("iopub_welcome", content, None, [topic] if topic else []))

    def kernel_welcomed(self) -> None:
        """Note that the kernel sends welcomes; its first may come after an answer, and after subscriptions."""
        self._kernel_welcomes = True
        while self._unwelcomed:
            self.welcome(self._unwelcomed.pop())

    def publish(self, msg_type: str, content: dict[str, Any]) -> None:
        """Send an output that answers no request, such as a ``comm_msg`` to a widget."""
        self._iopub(msg_type, content, None)

    def status(self, state: str, request: Request) -> None:
        """Send ``busy`` or ``idle`` for ``request``."""
        self._iopub("status", {"execution_state": state}, request.header)

    def idle(self) -> None:
        """Send every client the status idle, in answer to no request.

        A front end that connects learns the status from outputs, and ignores those that belong to a
        ``kernel_info_request`` (jupyter_server's ``untracked_message_types``).  The parent is of a type of its own: a
        status without a parent would count as activity of the kernel.
        """
        self._iopub("status", {"execution_state": "idle"}, self._session.msg_header(IDLE_TYPE))

    def answer(self, request: Request, content: dict[str, Any], error: dict[str, Any] | None = None) -> None:
        """Send busy, the iopub ``error`` if there is one, the reply if the type of ``request`` has one, idle."""
        self.status("busy", request)
        if error is not None:
            self._iopub("error", error, request.header)
        base, _, kind = request.msg_type.rpartition("_")
        if kind == "request":
            # ipykernel repeats an execution's status in the metadata; ipyparallel and old clients read it there.
            metadata = {"status": content["status"]} if "status" in content else {}
            frames = self._frames(f"{base}_reply", content, request.header, request.idents, metadata)
            self._send(request.channel, frames)
        self.status("idle", request)

    def done(self, request: Request) -> None:
        """Answer a shutdown or an interrupt: nothing runs, so there is nothing to do."""
        content: dict[str, Any] = {"status": "ok"}
        if request.msg_type == "shutdown_request":
            content["restart"] = bool(request.content.get("restart", False))
        self.answer(request, content)

    def prompt(self, request: Request, text: str) -> None:
        """Ask the client of ``request`` for a line of text, as ``input()`` in its cell would."""
        content = {"prompt": text, "password": False}
        self._send("stdin", self._frames("input_request", content, request.header, request.idents))

    def notice(self, request: Request, text: str) -> None:
        """Send ``text`` as a line that the cell of ``request`` prints on stderr."""
        self._iopub("stream", {"name": "stderr", "text": f"{text}\n"}, request.header)

    def aborted(self, request: Request) -> None:
        """Answer an execution that was queued behind one that failed."""
        self.answer(request, {"status": "aborted"})

    def failed(self, request: Request, error: GpuCkptError) -> None:
        """Answer an execution by ``error``, as if the cell had raised it."""
        self._raised(request, _for_clients(error))

    def interrupted(self, request: Request) -> None:
        """Answer an execution as a kernel does whose cell was interrupted."""
        why = "interrupted while the kernel was away; the cell did not run"
        error = {"ename": "KeyboardInterrupt", "evalue": why, "traceback": [f"KeyboardInterrupt: {why}"]}
        self._raised(request, error)

    def _raised(self, request: Request, error: dict[str, Any]) -> None:
        # No cell ran, so the kernel's counter stands where it stood; the protocol wants the field.
        reply = {"status": "error", "execution_count": None, "user_expressions": {}, "payload": [], **error}
        self.answer(request, reply, None if request.content.get("silent", False) else error)

    def refused(self, request: Request) -> None:
        """Answer a request that the queue is too full for; by an output if its type has no reply (comm messages)."""
        error = KernelAsleep("The kernel is away, and too many messages wait for it already.")
        if request.msg_type == "execute_request":
            self.failed(request, error)
            return
        content = _for_clients(error)
        output = None if request.msg_type.endswith("_request") else content
        self.answer(request, {"status": "error", **content}, output)

    def _iopub(self, msg_type: str, content: dict[str, Any], parent: dict[str, Any] | None) -> None:
        self._send("iopub", self._frames(msg_type, content, parent, [self._topic + msg_type.encode()]))

    def _frames(
        self,
        msg_type: str,
        content: dict[str, Any],
        parent: dict[str, Any] | None,
        idents: list[bytes],
        metadata: dict[str, Any] | None = None,
    ) -> list[bytes]:
        header = self._session.msg_header(msg_type)
        # `Session` makes ids from the session id and the pid, and so does the kernel, whose pid in its namespace may be
        # that of this process.
        header["msg_id"] = new_id()
        return self._session.serialize(self._session.msg(msg_type, content, parent, header, metadata), idents)


def _for_clients(error: GpuCkptError) -> dict[str, Any]:
    """The content of a reply, or of an output, that reports ``error`` as a kernel would."""
    lines = [f"{error.code}: {error.message}"]
    if error.left:
        lines.append(f"Left behind: {error.left}.")
    if error.hint:
        lines.append(f"Hint: {error.hint}")
    return {"ename": error.code, "evalue": error.message, "traceback": lines}


def _version(info: Mapping[str, Any]) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in str(info.get("protocol_version", "")).split("."))
    except ValueError:
        return ()
