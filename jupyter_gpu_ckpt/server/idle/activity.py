"""Detect work of a kernel's processes while no cell runs: by their CPU time, and by connections they accept.

A thread that computes, a web server in a notebook, a bot must not be suspended as idle.  Read from /proc, for every
process in the kernel's capsule; the kernel itself is not involved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ... import procfs

#: The share of one processor that counts as work.  An unused ipykernel takes 0.00002, with clients whose heartbeats it
#: echoes 0.0001 (ipykernel 7.4: history thread, heartbeat, event loop; measured on 2026-11-22).
SHARE = 0.01

#: Seconds of CPU time allowed beside that: Linux counts in ticks of 0.01 s.
FLOOR = 0.02

#: Seconds of CPU time allowed for each request that is not a use of the kernel, as when a notebook is only viewed
#: (measured: ``kernel_info_request`` 0.0035, ``history_request`` 0.0025).
QUERY = 0.005

#: Seconds over which CPU time is summed up.
WINDOW = 5.0

_TICKS = os.sysconf("SC_CLK_TCK")

# States of /proc/net/tcp (linux/tcp_states.h); a closed connection waits for a minute at the side that closed first.
_LISTEN, _TIME_WAIT = "0A", "06"
_UNIX_CONNECTED, _UNIX_ACCEPTS = "03", 0x10000


@dataclass
class _Known:
    """Counters of one kernel at the beginning of its window, and its connections at the last call."""

    at: float
    cpu: float
    queries: int
    processes: frozenset[int]
    connections: frozenset[str]


class Activity:
    """The counters of each kernel from one call to the next."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def keep(self, kernel_ids: Iterable[str]) -> None:
        """Forget all other kernels."""
        wanted = set(kernel_ids)
        self._known = {kernel_id: known for kernel_id, known in self._known.items() if kernel_id in wanted}

    def forget(self, kernel_id: str) -> None:
        """Start anew: CPU time spent by a verb is not the kernel's own work."""
        self._known.pop(kernel_id, None)

    def worked(
        self, kernel_id: str, pids: Iterable[int], *, now: float, queries: int, own: Iterable[Path] = ()
    ) -> bool:
        """Return whether a kernel's processes ``pids`` worked since the last call; False at the first one.

        ``now``: monotonic seconds.  ``queries``: how many requests that are no use of the kernel it had so far.
        ``own``: directories of the unix sockets of the kernel's own channels, whose connections do not count.
        """
        times = {pid: spent for pid in pids if (spent := _cpu(pid)) is not None}
        connections = _connections(times, tuple(f"{directory}/" for directory in own))
        fresh = _Known(now, sum(times.values()), queries, frozenset(times), connections)
        known = self._known.setdefault(kernel_id, fresh)
        if known is fresh:
            return False
        if known.processes - fresh.processes:
            # The CPU time of an ended process may be lost to its parent: compare the others' alone from here on.
            known = self._known[kernel_id] = fresh
            return True
        spent = fresh.cpu - known.cpu
        allowed = FLOOR + SHARE * (now - known.at) + QUERY * (queries - known.queries)
        accepted = bool(fresh.connections - known.connections)
        if spent > allowed or accepted or now - known.at >= WINDOW:
            self._known[kernel_id] = fresh
        else:
            known.connections, known.processes = fresh.connections, fresh.processes
        return spent > allowed or accepted


def _cpu(pid: int) -> float | None:
    """Return the seconds of CPU time of a process and the children it has waited for; None when it is gone."""
    try:
        return procfs.stat(pid).cpu_ticks / _TICKS
    except OSError:
        return None


def _sockets(pid: int) -> set[str]:
    """Return the inodes of a process's sockets; none when it is gone."""
    try:
        return {match[1] for _, target in procfs.links(pid) if (match := re.fullmatch(r"socket:\[(\d+)\]", target))}
    except OSError:
        return set()


def _connections(pids: Iterable[int], own: tuple[str, ...]) -> frozenset[str]:
    """Return the connections that listeners of these processes have accepted, each by a unique name."""
    # A kernel shares this process's network namespace.
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    if not inodes:
        return frozenset()
    found: set[str] = set()
    for name in ("tcp", "tcp6"):
        rows = procfs.sockets(name)
        ports = {row[1].rpartition(":")[2] for row in rows if row[3] == _LISTEN and row[9] in inodes}
        if ports:
            found |= {f"{name} {row[1]} {row[2]}" for row in rows if _was_accepted(row, ports)}
    rows = [row for row in procfs.sockets("unix") if len(row) > 7 and not row[7].startswith(own)]
    paths = {row[7] for row in rows if int(row[3], 16) & _UNIX_ACCEPTS and row[6] in inodes}
    found |= {f"unix {row[6]}" for row in rows if row[5] == _UNIX_CONNECTED and row[7] in paths}
    return frozenset(found)


def _was_accepted(row: list[str], ports: set[str]) -> bool:
    """Return whether a row of /proc/net/tcp is a connection to one of these ports, or the remains of one."""
    (here, port), (there, their_port) = (row[column].rsplit(":", 1) for column in (1, 2))
    if port in ports:
        return row[3] != _LISTEN
    return row[3] == _TIME_WAIT and here == there and their_port in ports  # the end of a client on this host
