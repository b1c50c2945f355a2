"""System calls the standard library has no function for: namespaces, mounts, capabilities, descriptors of others.

Names and numbers are the kernel's own (``include/uapi/linux/{sched,mount,prctl,capability}.h``), so that a reader can
look them up in the manual pages ``unshare(2)``, ``mount(2)``, ``pidfd_getfd(2)``, ``prctl(2)``, ``capset(2)``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator

CLONE_NEWTIME = 0x00000080
CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000

#: The same on all architectures, as all numbers above 423.
SYS_PIDFD_GETFD = 438

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_SLAVE = 0x80000
_MNT_DETACH = 0x2

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_RAISE = 2
PR_CAP_AMBIENT_CLEAR_ALL = 4

_LINUX_CAPABILITY_VERSION_3 = 0x20080522

#: What CRIU needs inside a capsule's user namespace.  CAP_SETUID and CAP_SETGID are left out on purpose: with them CRIU
#: calls setuid(0), and uid 0 is not mapped.
#: They are CAP_CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, KILL, SETPCAP, NET_ADMIN, SYS_CHROOT, SYS_PTRACE,
#: SYS_ADMIN, SYS_RESOURCE, CHECKPOINT_RESTORE.
CAPABILITIES_FOR_CRIU = (0, 1, 2, 3, 4, 5, 8, 12, 18, 19, 21, 24, 40)

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def check(result: int, what: str) -> int:
    """Return the result of a call of `libc`; raise `OSError` with the call's name if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Enter new namespaces of the kinds in ``flags`` (``os.unshare`` exists from Python 3.12 only)."""
    check(libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def mount(source: str | None, target: str, fstype: str | None, flags: int, options: str | None = None) -> None:
    """``mount(2)``; ``options``: the file system's own."""
    arguments = [None if text is None else os.fsencode(text) for text in (source, target, fstype)]
    data = None if options is None else os.fsencode(options)
    check(libc.mount(*arguments, ctypes.c_ulong(flags), data), f"mount {fstype or 'flags'} on {target}")


def umount(target: str) -> None:
    """``umount2(2)``; a file system in use is unmounted when its last use ends."""
    check(libc.umount2(os.fsencode(target), _MNT_DETACH), f"umount {target}")


def pidfd_getfd(pidfd: int, number: int) -> int:
    """A copy of another process's descriptor ``number``, close-on-exec.  Needs the right to trace that process."""
    return check(
        libc.syscall(ctypes.c_long(SYS_PIDFD_GETFD), ctypes.c_int(pidfd), ctypes.c_int(number), ctypes.c_uint(0)),
        "pidfd_getfd",
    )


@contextlib.contextmanager
def pidfd_of(pid: int) -> Iterator[int]:
    """A pidfd of the process ``pid``, open for as long as the body lasts."""
    pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def prctl(option: int, arg2: int = 0, arg3: int = 0, arg4: int = 0, arg5: int = 0) -> int:
    """``prctl(2)`` with integer arguments."""
    return check(libc.prctl(option, *(ctypes.c_ulong(a) for a in (arg2, arg3, arg4, arg5))), f"prctl({option})")


def set_name(name: str) -> None:
    """Name the calling thread, as ``ps`` shows it (15 bytes at most)."""
    check(libc.prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0), "prctl(PR_SET_NAME)")


def raise_ambient() -> None:
    """Let programs started by this process keep `CAPABILITIES_FOR_CRIU`: into the inheritable, then the ambient set."""
    header = struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    buffer = ctypes.create_string_buffer(24)
    check(libc.capget(ctypes.c_char_p(header), buffer), "capget")
    words = list(struct.unpack("=6I", buffer.raw))  # effective, permitted, inheritable of the low, then the high 32
    for number in CAPABILITIES_FOR_CRIU:
        words[2 + 3 * (number // 32)] |= 1 << (number % 32)
    check(libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(struct.pack("=6I", *words))), "capset")
    for number in CAPABILITIES_FOR_CRIU:
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, number)


def drop_capabilities() -> None:
    """Drop every capability of the calling thread."""
    header = struct.pack("=Ii", _LINUX_CAPABILITY_VERSION_3, 0)
    check(libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(bytes(24))), "capset")


def clear_ambient() -> None:
    """Let programs started from here on have no capability: a notebook's kernel is an ordinary process."""
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
