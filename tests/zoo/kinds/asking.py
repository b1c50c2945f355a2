"""Queries of a kind to the system: descriptors, /proc, system calls that Python has no name for."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import select
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)

#: x86-64 system calls that neither Python nor the C library of Debian 12 names.
SYSCALLS = {
    "shmget": 29,
    "shmat": 30,
    "shmctl": 31,
    "gettid": 186,
    "tkill": 200,
    "timer_create": 222,
    "timer_settime": 223,
    "timer_gettime": 224,
    "timer_getoverrun": 225,
    "mbind": 237,
    "set_mempolicy": 238,
    "get_mempolicy": 239,
    "mq_open": 240,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "ioprio_set": 251,
    "ioprio_get": 252,
    "get_robust_list": 274,
    "perf_event_open": 298,
    "fanotify_init": 300,
    "sched_setattr": 314,
    "sched_getattr": 315,
    "seccomp": 317,
    "bpf": 321,
    "userfaultfd": 323,
    "io_uring_setup": 425,
    "landlock_create_ruleset": 444,
    "landlock_restrict_self": 446,
    "memfd_secret": 447,
    "mseal": 462,
}


def libc(name: str, *arguments: Any) -> int:
    """Call a function of the C library.  Raises `OSError` where it returns -1."""
    function = getattr(_libc, name)
    ctypes.set_errno(0)
    function.restype = ctypes.c_long if name in ("syscall", "mmap", "shmat", "sbrk") else ctypes.c_int
    result = function(*arguments)
    if result == -1 and (number := ctypes.get_errno()):
        raise OSError(number, os.strerror(number), name)
    return result


def system(name: str, *arguments: Any) -> int:
    """Make a system call of `SYSCALLS`; whole numbers are passed as 64 bits.  Raises `OSError`."""
    wide = [ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return libc("syscall", ctypes.c_long(SYSCALLS[name]), *wide)


def prctl(option: int, *arguments: int) -> int:
    """prctl(2).  Raises `OSError`."""
    return libc("prctl", option, *(ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]))


def fdinfo(fd: int) -> dict[str, str]:
    """Return /proc's lines about a descriptor, without mount, inode and eventfd number; these change in a restore."""
    lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    pairs = (line.partition(":") for line in lines)
    return {
        name: re.sub(r"ino:\w+ sdev:\w+", "", value.strip())
        for name, _, value in pairs
        if name not in ("mnt_id", "ino", "eventfd-id")
    }


def flags(fd: int) -> tuple[int, int]:
    """Of the open file, and of the descriptor."""
    return fcntl.fcntl(fd, fcntl.F_GETFL), fcntl.fcntl(fd, fcntl.F_GETFD)


def status(*names: str, tid: int | None = None) -> dict[str, str]:
    """Lines of /proc/self/status, or of a thread's."""
    place = Path("/proc/self/status" if tid is None else f"/proc/self/task/{tid}/status")
    found = dict(line.partition(":")[::2] for line in place.read_text().splitlines())
    return {name: found[name].strip() for name in names}


def smaps(address: int) -> dict[str, str]:
    """Return from /proc/self/smaps the mapping at ``address``: permissions, size, name, flags."""
    inside = False
    found: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) (\S+) \S+ \S+\s*(.*)", line):
            low, high = int(match[1], 16), int(match[2], 16)
            inside = low <= address < high
            if inside:
                found = {"permissions": match[3], "offset": match[4], "name": match[5]}
        elif inside and line.startswith(("VmFlags", "Locked", "KernelPageSize", "ProtectionKey")):
            name, _, value = line.partition(":")
            # "sd" (soft-dirty) is what CRIU itself tracks pages with.
            found[name] = " ".join(word for word in value.split() if word != "sd")
            if name == "Locked":  # pages that are shared with a child for a moment count in parts
                found[name] = str(value.split()[0] != "0")
    return found


def readable(*fds: int, within: float = 5.0) -> list[int]:
    """Those of ``fds`` that can be read, as soon as there is one."""
    return select.select(fds, [], [], within)[0]


def eventually(true: Callable[[], Any], within: float = 20.0) -> bool:
    """Return whether ``true()`` becomes so in time; seconds."""
    deadline = time.monotonic() + within
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def moves(number: Callable[[], Any], within: float = 20.0) -> bool:
    """Return whether something that counts still does."""
    before = number()
    return eventually(lambda: number() != before, within)


def error_of(act: Callable[[], Any]) -> str:
    """The name of what ``act`` raises; "none"."""
    try:
        act()
    except Exception as error:
        return type(error).__name__
    return "none"


def place(name: str) -> Path:
    """A fresh directory of this kind's own, below the kernel's working directory."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=Path.cwd()))
