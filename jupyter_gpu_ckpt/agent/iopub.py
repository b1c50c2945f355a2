"""ipykernel's IOPub thread: flush its messages, and close and reopen its TCP listener.

ipykernel listens on ``tcp://127.0.0.1:<random>`` for the output of forked children (``IOPubThread._setup_pipe_in``),
for every transport of the kernel.  At a restore that port may be taken, on this node or another, and the restore would
fail.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from . import limits, probes

#: Seconds for a call on the IOPub thread, which only does short non-blocking work.
_DEADLINE = 10.0


class IOPub:
    """The IOPub thread of one kernel.

    zmq sockets belong to the thread that polls them, so all calls run there, by its own ``schedule``.
    """

    def __init__(self, kernel: Any) -> None:
        self._thread: Any = getattr(kernel, "iopub_thread", None)
        self._unbound_port: int | None = None

    @property
    def port(self) -> int | None:
        """The listener's TCP port; ``None`` where there is no listener."""
        if self._thread is None or not getattr(self._thread, "_pipe_flag", False) or self._unbound_port is not None:
            return None
        port = getattr(self._thread, "_pipe_port", None)
        return port if isinstance(port, int) and getattr(self._thread, "_pipe_in", None) is not None else None

    def flush(self) -> None:
        """Wait until zmq has all messages that were passed to the thread."""
        if self._thread is not None:
            self._call(lambda: None)

    def unbind(self) -> bool:
        """Close the listener and wait for its end; return whether it was closed.

        The socket object stays, with its handler and the key that authenticates the children's messages.  The listener
        stays open while a living child has it open, too (every forked one): it could not be bound again, and the
        child's output would be lost.  After failure: call `bind`.
        """
        port = self.port
        listeners = _listeners(port) if port is not None else set[str]()
        if port is None or any(_has(str(child["pid"]), listeners) for child in probes.children()):
            return False
        self._call(lambda: self._thread._pipe_in.socket.unbind(f"tcp://127.0.0.1:{port}"))
        self._unbound_port = port
        # libzmq's I/O thread closes the descriptor some time after unbind has returned.
        deadline = time.monotonic() + _DEADLINE
        while _has("self", listeners):
            if time.monotonic() > deadline:
                raise TimeoutError("the listener for children's output did not close")
            time.sleep(0.0002)
        return True

    @property
    def complete(self) -> bool:
        """Return whether the listener is open, where there was one."""
        return self._unbound_port is None

    def bind(self) -> None:
        """Listen again: on the same port if possible (children know it), else on a new one.

        *After failure* (a limit of the kernel is reached) call it again.
        """
        if (port := self._unbound_port) is None:
            return
        limits.require_headroom(descriptors=1)

        def rebind() -> int:
            import zmq

            socket = self._thread._pipe_in.socket
            try:
                socket.bind(f"tcp://127.0.0.1:{port}")
            except zmq.ZMQError:
                socket.bind("tcp://127.0.0.1:*")
            return int(socket.getsockopt(zmq.LAST_ENDPOINT).decode().rpartition(":")[2].rstrip("\0"))

        self._thread._pipe_port = self._call(rebind)
        self._unbound_port = None

    def listen_at(self, ports: Mapping[str, int]) -> None:
        """Note that the listener, if it is open, has another port since a restore: children that are forked connect.

        ``ports``: new ones by those before.
        """
        if (port := self.port) is not None and str(port) in ports:
            self._thread._pipe_port = ports[str(port)]

    def _call(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on the IOPub thread; return its result or raise its error."""
        done = threading.Event()
        outcome: dict[str, Any] = {}

        def run() -> None:
            try:
                outcome["value"] = work()
            except Exception as error:
                outcome["error"] = error
            finally:
                done.set()

        self._thread.schedule(run)
        if not done.wait(_DEADLINE):
            raise TimeoutError("the IOPub thread does not answer")
        if "error" in outcome:
            raise outcome["error"]
        return outcome.get("value")


def _listeners(port: int) -> set[str]:
    """Return the sockets of this process that listen on ``port``, as descriptors link to them."""
    sockets = [(number, target) for number, target in probes.links() if target.startswith("socket:[")]
    return {target for number, target in sockets if probes.listens_on(number, port)}


def _has(pid: str, sockets: set[str]) -> bool:
    """Return whether a process has one of the ``sockets`` open."""
    try:
        return any(target in sockets for _, target in probes.links(pid))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False  # the process has ended, or is another user's
