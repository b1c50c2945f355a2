"""TCP sockets of a kernel that is about to end: what is left of its connections must not keep its own ports from it.

A connection that a process leaves lingers in the system for a minute (TIME_WAIT, FIN_WAIT_2; tcp(7)), and a port is not
bound again meanwhile unless the listener and all connections there had SO_REUSEADDR (socket(7)).  Connections have what
their listener had as it accepted them, so a kernel without the option could not come back for a minute.  It is set on
the sockets of the stopped processes themselves, once the dump is done: the image, and the program in it, know nothing
of it, and what was sent still arrives before the connection closes.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable

from .. import procfs
from . import syscalls


def let_ports_be_rebound(pids: Iterable[int]) -> None:
    """Set SO_REUSEADDR on all TCP sockets of processes of this user.  Never raises: what cannot be set just lingers."""
    for pid in pids:
        with contextlib.suppress(OSError):
            pidfd = os.pidfd_open(pid)
            try:
                for number, target in procfs.links(pid):
                    if target.startswith("socket:"):
                        with contextlib.suppress(OSError):  # closed meanwhile, or not to be had
                            _set(syscalls.pidfd_getfd(pidfd, number))
            finally:
                os.close(pidfd)


def _set(fd: int) -> None:
    with socket.socket(fileno=fd) as found:  # closes our copy
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
