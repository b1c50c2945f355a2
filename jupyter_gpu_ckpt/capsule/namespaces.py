"""The namespaces and mounts of a capsule, made by its first process (`init`) before it forks PID 1.

A time namespace shifts the clocks, so that they continue in a restored kernel (time_namespaces(7)).
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import syscalls

_TERMINALS, _MULTIPLEXER = "/dev/pts", "/dev/ptmx"


class Clocks(NamedTuple):
    """Readings of CLOCK_MONOTONIC and CLOCK_BOOTTIME in nanoseconds."""

    monotonic: int
    boottime: int

    @classmethod
    def now(cls) -> Clocks:
        """The clocks of the caller's own time namespace."""
        return cls(time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME))

    def __sub__(self, other: Clocks) -> Clocks:
        return Clocks(self.monotonic - other.monotonic, self.boottime - other.boottime)


#: As an offset: the clocks of the host.
UNSHIFTED = Clocks(0, 0)


def enter_namespaces(user: bool, monotonic_ns: int, boottime_ns: int) -> None:
    """Enter new namespaces; the next child is PID 1 of them.

    The uid is kept: only the caller's own uid and gid are mapped, each to itself.  The clock offsets must be written
    before the first process enters the time namespace, hence before that child is made.
    """
    if user:
        uid, gid = os.getuid(), os.getgid()
        syscalls.unshare(syscalls.CLONE_NEWUSER)
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    syscalls.unshare(syscalls.CLONE_NEWNS | syscalls.CLONE_NEWPID | syscalls.CLONE_NEWTIME)
    # Offsets count from the clocks of the host itself, and this process may be in a time namespace already, whose
    # offsets the new one has at first.
    with open("/proc/self/timens_offsets") as file:
        rows = [line.split() for line in file]
    outer = {row[0]: int(row[1]) * 1_000_000_000 + int(row[2]) for row in rows}
    with open("/proc/self/timens_offsets", "w") as file:
        for clock, nanoseconds in (("monotonic", monotonic_ns), ("boottime", boottime_ns)):
            seconds, rest = divmod(outer[clock] + nanoseconds, 1_000_000_000)
            file.write(f"{clock} {seconds} {rest}\n")


def mount_proc() -> None:
    """Mount a ``/proc`` of the capsule.  Mounts of the host still propagate into it: an automounted home works."""
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
    syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)


def mount_terminals(user: bool) -> None:
    """Mount a ``/dev/pts`` of the capsule's own, in which no other process has a pseudo-terminal.

    CRIU can restore a terminal only under its old number, which on the host's ``/dev/pts`` may be taken by then, and
    only with its old owner, which must be mapped in a user namespace: there the group ``tty`` is not.  Here every
    number is free when a kernel is restored, and the files belong to the user (devpts(5)).  Without ``user`` namespace
    the group is that of the host's terminals.

    Raises `OSError` where that fails; the capsule then has the host's terminals (`terminals.obstacle`).
    """
    group = "" if user else _terminal_group()
    options = f"newinstance,ptmxmode=0666,mode=0620{group}"
    syscalls.mount("devpts", _TERMINALS, "devpts", syscalls.MS_NOSUID | syscalls.MS_NOEXEC, options)
    # A link to it, or a device beside it, opens the new file system already; a mount of a container's runtime does not.
    if os.path.lexists(_MULTIPLEXER) and os.path.realpath(_MULTIPLEXER) != f"{_TERMINALS}/ptmx":
        try:
            syscalls.mount(f"{_TERMINALS}/ptmx", _MULTIPLEXER, None, syscalls.MS_BIND)
        except OSError:  # else masters would be the host's, and slaves the capsule's
            syscalls.umount(_TERMINALS)
            raise


def _terminal_group() -> str:
    """The mount option for the group of the host's terminals; empty where it has none."""
    options = [mount.options for mount in procfs.mounts() if (mount.point, mount.filesystem) == (_TERMINALS, "devpts")]
    return next((f",{word}" for word in (options[-1] if options else ()) if word.startswith("gid=")), "")


def mount_at(directory: int, path: str) -> None:
    """Mount a directory (a descriptor) at a path, which is made if it is not there, as `mount_over`."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    mount_over(directory, path)


def mount_over(directory: int, path: str) -> None:
    """Mount a directory (a descriptor) over another one.  Raises `OSError`.

    Not through a symbolic link, which another user may have put there: what it leads to would be covered.
    """
    point = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        syscalls.mount(f"/proc/self/fd/{directory}", f"/proc/self/fd/{point}", None, syscalls.MS_BIND)
    finally:
        os.close(point)


def mount_under_old_path(directory: int, old: str) -> None:
    """Mount the kernel's directory (a descriptor) at its old path: sockets keep their paths for life.

    Where that path cannot be made (another user's directory, ``/run/user/...`` of a session that this host does not
    have), an empty file system covers the nearest directory above it, for this capsule only: the user cannot reach its
    content anyhow.  A directory at the top of the tree is never covered: the kernel needs its other content.
    """
    try:
        os.makedirs(old, mode=0o700, exist_ok=True)
        os.stat(f"{old}/.")
    except OSError:
        above = os.path.dirname(old)
        while not os.path.isdir(above):
            above = os.path.dirname(above)
        if above.count("/") < 2:
            raise
        syscalls.mount("tmpfs", above, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV)
    mount_at(directory, old)


#: In a kernel's directory: memory that is the capsule's own, and none of its processes'.
HOST_MEMORY = "host-memory"


def mount_host_memory(directory: str) -> str:
    """Mount a file system in memory, which CRIU does not save, with huge pages if possible; return its path."""
    path = f"{directory}/{HOST_MEMORY}"
    os.makedirs(path, mode=0o700, exist_ok=True)
    flags, options = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC, "mode=0700,size=100%"
    try:
        syscalls.mount("tmpfs", path, "tmpfs", flags, f"{options},huge=always")
    except OSError:  # a system without them
        try:
            syscalls.mount("tmpfs", path, "tmpfs", flags, options)
        except OSError:
            os.rmdir(path)  # else it would be taken for a mounted one
            raise
    return path
