"""End ipykernel's debugger after it was turned off: debugpy's adapter, and pydevd in this process.

The adapter is a process beside the kernel that cannot be saved.  ipykernel starts it with its debugger and never ends
it (ipykernel 7.4, debugpy 1.8); after `close`, turning the debugger on starts another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Any

#: Seconds for the adapter to end by itself, as it does when its debuggee is gone; then for SIGTERM.
_TIMEOUT = 3.0


def close(kernel: Any) -> bool:
    """End the debugger of a kernel if it was turned off; return whether there was one.  Called on the main thread.

    The caller has checked that no client is attached (`probes.debugger_in_use`).
    """
    debugger = getattr(kernel, "debugger", None)
    server: Any = sys.modules.get("debugpy.server.api")
    if debugger is None or server is None or not getattr(debugger, "debugpy_initialized", False):
        return False
    sys.modules["pydevd"].stoptrace()  # type: ignore[attr-defined]
    # Else the debugger is injected into programs that this thread starts, and into the next adapter, which hangs then.
    monkey: Any = sys.modules["_pydev_bundle.pydev_monkey"]
    monkey._arg_patch.apply_arg_patching = False
    server.listen.called = False
    debugger.debugpy_initialized = False
    debugger.debugpy_client.debugpy_port = -1  # choose another next time: this one may be taken after a restore
    _end(list(server._adapter_process.args))
    return True


def _end(command: list[str]) -> None:
    """Wait until no process has this command, which contains a unique token; then kill it."""
    deadline, number = time.monotonic() + _TIMEOUT, 0
    while found := _running(command):
        if time.monotonic() > deadline:
            deadline, number = time.monotonic() + _TIMEOUT, signal.SIGKILL if number else signal.SIGTERM
            for pid in found:
                os.kill(pid, number)
        time.sleep(0.01)


def _running(command: list[str]) -> list[int]:
    wanted = b"".join(os.fsencode(word) + b"\0" for word in command)
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:  # OSError: it has ended
            if file.read() == wanted:
                found.append(int(name))
    return found
