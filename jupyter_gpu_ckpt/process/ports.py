"""TCP sockets of a kernel that is about to end: its lingering connections must not keep its own ports from it.

A connection of a process that has ended lingers in the system for a minute (TIME_WAIT, FIN_WAIT_2; tcp(7)), and a port
is not bound again meanwhile unless the listener and all connections there had SO_REUSEADDR (socket(7)).  Connections
inherit the option from their listener, so a kernel without it could not come back for a minute.  It is set on the
sockets of the stopped processes themselves, once the dump is done: the image, and the program in it, are unchanged, and
what was sent still arrives before the connection closes.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable

from .. import procfs
from . import kernel_calls, syscalls


def let_ports_be_rebound(pids: Iterable[int]) -> None:
    """Set SO_REUSEADDR on all TCP sockets of processes of this user.  Never raises: where it fails, ports linger."""
    for pid in pids:
        with contextlib.suppress(OSError), syscalls.pidfd_of(pid) as pidfd:
            for number, target in procfs.links(pid):
                if target.startswith("socket:"):
                    with contextlib.suppress(OSError):  # closed meanwhile, or not ours to reach
                        _set_reuse(pidfd, number)


def _set_reuse(pidfd: int, number: int) -> None:
    with kernel_calls.socket_of(pidfd, number) as found:
        if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
