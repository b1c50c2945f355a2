"""Identity and namespaces: ids, users, groups, capabilities, the host name."""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import sys
import tempfile
import uuid
from pathlib import Path

from . import IMPOSSIBLE, kind, refused
from .asking import status

WHOLE = "changes the whole process"


@kind("ids: process, parent, group, session, threads")
def numbers():
    return lambda: (os.getpid(), os.getppid(), os.getpgrp(), os.getsid(0), os.readlink("/proc/self"))


@kind("user and groups")
def users():
    return lambda: (os.getresuid(), os.getresgid(), os.getgroups(), status("Uid", "Gid", "Groups"))


@kind("capabilities")
def capabilities():
    return lambda: status("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


@kind("dropped capabilities (root)", user=IMPOSSIBLE, alone="cannot be undone")
def fewer_capabilities():
    import ctypes

    from .asking import prctl

    if os.getuid() != 0:
        raise PermissionError("it has none")
    prctl(24, 22)  # CAP_SYS_BOOT leaves the bounding set
    header, data = (0x20080522, 0), ctypes.create_string_buffer(24)
    words = (ctypes.c_uint * 2)(*header)
    ctypes.CDLL(None).capget(words, data)
    masks = (ctypes.c_uint * 6).from_buffer(data)
    masks[0] &= ~(1 << 22)
    masks[1] &= ~(1 << 22)
    ctypes.CDLL(None).capset(words, data)
    return lambda: status("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")


@kind(
    "a changed user (root: setresuid)",
    refused("UNPROVEN_STATE", "setresuid"),
    user=IMPOSSIBLE,
    alone="cannot be undone",
)
def other_user():
    if os.getuid() != 0:
        raise PermissionError("it has no right to")
    os.setresgid(1234, 1234, 0)
    os.setresuid(0, 1234, 0)

    return lambda: (os.getresuid(), os.getresgid(), status("CapEff")), lambda: (
        os.setresuid(0, 0, 0),
        os.setresgid(0, 0, 0),
    )


@kind("supplementary groups (root: setgroups)", user=IMPOSSIBLE, alone=WHOLE)
def groups():
    before = os.getgroups()
    os.setgroups([7, 8, 4242])
    return lambda: os.getgroups(), lambda: os.setgroups(before)


@kind("the host name")
def machine():
    return lambda: (socket.gethostname(), platform.node(), platform.release(), os.uname().version)


@kind("the namespaces that a restore must share with the host")
def namespaces():
    return lambda: [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "ipc", "uts", "cgroup")]


@kind("the cgroup")
def cgroup():
    return lambda: Path("/proc/self/cgroup").read_text()


@kind("identifiers generated at run time: uuid1, id(), hash of a string")
def identifiers():
    made, thing = uuid.uuid1(), object()
    return lambda: (str(made), uuid.getnode(), id(thing), hash("zoo"), sys.flags.hash_randomization)


@kind("its mount table")
def mounts():
    temporary = tempfile.gettempdir() + "/"

    def show():
        lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        # What others mount on the host meanwhile is seen in a kernel as well, and tests do so in this directory.
        return sorted((line[4], line[line.index("-") + 1]) for line in lines if not line[4].startswith(temporary))

    return show


@kind("its processes in /proc, without the host's")
def processes():
    return lambda: sorted(int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) >= os.getpid())


@kind("fifty descriptors at scattered numbers")
def descriptors():
    null = os.open("/dev/null", os.O_RDONLY)
    numbers = [fcntl.fcntl(null, fcntl.F_DUPFD_CLOEXEC, 300 + 7 * n) for n in range(50)]
    return lambda: [(number, os.readlink(f"/proc/self/fd/{number}"), os.get_inheritable(number)) for number in numbers]
