"""Detect work of a kernel's processes while no cell runs: by their CPU time, and by connections they accept.

A thread that computes, a web server in a notebook, a bot must not be suspended as idle.  Read from /proc, for every
process in the kernel's capsule; the kernel itself is not involved.
"""

from __future__ import annotations

import functools
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


class SocketTables:
    """The sockets of this process's network namespace, which its kernels share: each table is read once, when needed.

    For one round over all kernels.  Linux goes through its whole table of TCP for a reader: 4.5 ms where it has 262,144
    entries.
    """

    @functools.cached_property
    def _unix(self) -> list[list[str]]:
        return procfs.sockets("unix")

    @functools.cached_property
    def _tcp(self) -> list[tuple[str, list[str]]]:
        return [(name, row) for name in ("tcp", "tcp6") for row in procfs.sockets(name)]

    @functools.cached_property
    def _unix_inodes(self) -> frozenset[str]:
        return frozenset(row[6] for row in self._unix if len(row) > 6)

    @functools.cached_property
    def _unix_listeners(self) -> dict[str, str]:
        """Paths by inode."""
        return {row[6]: row[7] for row in self._unix if len(row) > 7 and int(row[3], 16) & _UNIX_ACCEPTS}

    @functools.cached_property
    def _unix_connections(self) -> dict[str, list[str]]:
        """Inodes by path: an accepted socket has that of its listener."""
        found: dict[str, list[str]] = {}
        for row in self._unix:
            if len(row) > 7 and row[5] == _UNIX_CONNECTED:
                found.setdefault(row[7], []).append(row[6])
        return found

    @functools.cached_property
    def _tcp_listeners(self) -> dict[str, tuple[str, str]]:
        """Table and port by inode."""
        return {row[9]: (name, row[1].rpartition(":")[2]) for name, row in self._tcp if row[3] == _LISTEN}

    def accepted(self, inodes: set[str], own: tuple[str, ...]) -> frozenset[str]:
        """Return the connections that these listeners have accepted, each by a unique name.

        Not those of unix sockets whose paths begin with one of ``own``.
        """
        found: set[str] = set()
        if not inodes:
            return frozenset()
        if not inodes <= self._unix_inodes:
            ports = {self._tcp_listeners[inode] for inode in inodes if inode in self._tcp_listeners}
            for name, row in self._tcp if ports else ():
                if _was_accepted(row, {port for table, port in ports if table == name}):
                    found.add(f"{name} {row[1]} {row[2]}")
        paths = {self._unix_listeners[inode] for inode in inodes if inode in self._unix_listeners}
        for path in paths:
            if not path.startswith(own):
                found |= {f"unix {inode}" for inode in self._unix_connections.get(path, ())}
        return frozenset(found)


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
        self,
        kernel_id: str,
        pids: Iterable[int],
        *,
        now: float,
        queries: int,
        own: Iterable[Path] = (),
        tables: SocketTables | None = None,
    ) -> bool:
        """Return whether a kernel's processes ``pids`` worked since the last call; False at the first one.

        ``now``: monotonic seconds.  ``queries``: how many requests that are no use of the kernel it had so far.
        ``own``: directories of the unix sockets of the kernel's own channels, whose connections do not count.
        ``tables``: of a round over several kernels.
        """
        times = {pid: spent for pid in pids if (spent := cpu_seconds(pid)) is not None}
        inodes = {inode for pid in times for inode in _sockets(pid)}
        connections = (tables or SocketTables()).accepted(inodes, tuple(f"{directory}/" for directory in own))
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


def cpu_seconds(pid: int) -> float | None:
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


def _was_accepted(row: list[str], ports: set[str]) -> bool:
    """Return whether a row of /proc/net/tcp is a connection to one of these ports, or the remains of one."""
    (here, port), (there, their_port) = (row[column].rsplit(":", 1) for column in (1, 2))
    if port in ports:
        return row[3] != _LISTEN
    return row[3] == _TIME_WAIT and here == there and their_port in ports  # the end of a client on this host
