"""The start of a capsule: makes the namespaces, and becomes PID 1 in them and the process outside that waits for it.

Run by `capsule.Capsule` (``python -I -S run_init.py '<json>'``); never imported by the server.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import signal
import socket

from jupyter_gpu_ckpt.capsule import namespaces
from jupyter_gpu_ckpt.capsule.private_directories import PrivateDirectories
from jupyter_gpu_ckpt.capsule.protocol import SOCKET
from jupyter_gpu_ckpt.process import syscalls
from jupyter_gpu_ckpt.process.ptrace import IS_KNOWN


def close_inherited(keep: int) -> None:
    """Close all inherited descriptors but 0-2 and ``keep``: no other of the owner's may enter the capsule."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != keep:
            with contextlib.suppress(OSError):
                os.close(int(name))


def main(argument: str) -> int:
    """Make the capsule of ``argument``, as JSON, and serve it; its descriptor ``report`` gets the outcome as JSON.

    The outcome comes before most of the init is imported: the owner prepares its first request meanwhile.
    """
    options = json.loads(argument)
    report = options["report"]
    close_inherited(report)
    os.set_inheritable(report, False)
    rootless = os.geteuid() != 0
    at = "namespaces"
    try:
        if not IS_KNOWN:
            raise OSError(errno.ENOTSUP, f"{os.uname().machine} is not supported")
        directory = os.open(options["directory"], os.O_DIRECTORY | os.O_CLOEXEC)
        host_mounts = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        namespaces.enter_namespaces(rootless, options["monotonic_ns"], options["boottime_ns"])
        pid = os.fork()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if pid:
            for fd in (directory, host_mounts, report):
                os.close(fd)
            return wait_for_init(pid)
        at = "init"
        os.setsid()
        syscalls.set_name("gpu-ckpt-init")
        namespaces.mount_proc()
        with contextlib.suppress(OSError):
            namespaces.mount_terminals(rootless)
        if paths := [path for path in (options.get("known_as"), options.get("sockets")) if path]:
            at = "directory"
            # Opened again: the source of a bind mount must be in this mount namespace.
            reopened = os.open(options["directory"], os.O_DIRECTORY | os.O_CLOEXEC)
            for path in paths:
                namespaces.mount_under_old_path(reopened, path)
            os.close(reopened)
        private = PrivateDirectories(options["directory"], options["private"])
        private.clear()
        private.mount()
        # Through the directory's descriptor: the path of a unix socket may have 107 bytes, ours may be longer.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"/proc/self/fd/{directory}/{SOCKET}")
        listener.listen(4)
        os.close(directory)
        os.chdir("/")
    except OSError as error:
        _report(report, {"error": str(error), "errno": error.errno, "at": at})
        return 1
    if not _report(report, {}):
        return 1
    from jupyter_gpu_ckpt.capsule.init import Init  # see above

    gc.freeze()
    gc.enable()
    return Init(listener, rootless, options.get("known_as") or options["directory"], host_mounts, private).serve()


def _report(report: int, outcome: dict[str, object]) -> bool:
    """Write the outcome, and close the descriptor; return False if the owner, who alone could use it, has gone."""
    try:
        os.write(report, json.dumps(outcome).encode())
    except BrokenPipeError:
        return False
    os.close(report)
    return True


def wait_for_init(pid: int) -> int:
    """Wait for PID 1, in the outer process, which the owner waits for in turn.  Return its exit status."""
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    syscalls.set_name("gpu-ckpt-outer")
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF
