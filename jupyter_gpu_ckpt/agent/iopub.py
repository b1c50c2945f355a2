"""ipykernel's IOPub thread: wait until it has sent everything, and take its TCP listener away and back.

ipykernel listens on ``tcp://127.0.0.1:<random>`` for the output of forked children (``IOPubThread._setup_pipe_in``),
whatever the transport of the kernel is.  On another node, or later on this one, that port may be taken, and then the
restore fails.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from . import probes

#: Seconds for one errand on the IOPub thread; it only ever does short non-blocking work.
_DEADLINE = 10.0


class IOPub:
    """The IOPub thread of one kernel.

    zmq sockets belong to the thread that polls them, so everything is done there, by its own ``schedule``.
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

    def drain(self) -> None:
        """Return when everything handed to the thread before has been given to zmq."""
        if self._thread is not None:
            self._errand(lambda: None)

    def unbind(self) -> bool:
        """Close the listener and wait until it is gone; ``True`` if that was done.

        The socket object stays, with its handler and the key that authenticates the children's messages.  While a
        living child holds the listener, too (every forked one does), it stays: it could not be bound again, and the
        child's output would go nowhere.

        After failure: call `bind`.
        """
        port = self.port
        if port is None or any(_listener(str(child["pid"]), port) for child in probes.children()):
            return False
        self._errand(lambda: self._thread._pipe_in.socket.unbind(f"tcp://127.0.0.1:{port}"))
        self._unbound_port = port
        # libzmq's own I/O thread closes the descriptor, some time after unbind has returned.
        deadline = time.monotonic() + _DEADLINE
        while _listener("self", port):
            if time.monotonic() > deadline:
                raise TimeoutError("the listener for children's output did not close")
            time.sleep(0.002)
        return True

    def bind(self) -> None:
        """Listen again: on the same port where possible (children know it), on a new one otherwise."""
        port = self._unbound_port
        if port is None:
            return

        def rebind() -> int:
            import zmq

            socket = self._thread._pipe_in.socket
            try:
                socket.bind(f"tcp://127.0.0.1:{port}")
            except zmq.ZMQError:
                socket.bind("tcp://127.0.0.1:*")
            return int(socket.getsockopt(zmq.LAST_ENDPOINT).decode().rpartition(":")[2].rstrip("\0"))

        self._thread._pipe_port = self._errand(rebind)
        self._unbound_port = None

    def _errand(self, work: Callable[[], Any]) -> Any:
        """Do ``work`` on the IOPub thread and hand back what it returned or raised."""
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


def _listener(pid: str, port: int) -> bool:
    """Whether a process has a socket open that listens on ``port`` (proc_pid_net(5): state 0A is LISTEN)."""
    try:
        with open(f"/proc/{pid}/net/tcp", encoding="ascii") as table:
            rows = [row.split() for row in table.readlines()[1:]]
        listening = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
        names = os.listdir(f"/proc/{pid}/fd") if listening else []
    except OSError:
        return False  # it ended meanwhile
    for name in names:
        with contextlib.suppress(OSError):  # a descriptor that was closed meanwhile
            if os.readlink(f"/proc/{pid}/fd/{name}") in listening:
                return True
    return False
