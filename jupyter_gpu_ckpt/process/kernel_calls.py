"""System calls about other processes that the standard library has no function for, by their names in Linux.

Source: ``kcmp(2)``, ``ioprio_set(2)``, ``sched_setattr(2)``, ``pidfd_getfd(2)`` and the system call tables of
``arch/*/include/generated``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable, Iterator

from jupyter_gpu_ckpt.process.syscalls import check, libc, pidfd_getfd, pidfd_of

KCMP_FILES, KCMP_FS = 2, 3
_SEM_GETPID = 11
IOPRIO_WHO_PROCESS = 1
#: ``struct sched_attr`` with its last two fields, of uclamp.
_SCHED_ATTR_BYTES = 56
#: ioctl(2): how an epoll instance polls busily, 8 bytes, zeros by default; since Linux 6.9.
EPIOCSPARAMS, EPIOCGPARAMS = 0x40088A01, 0x80088A02
_TFD_IOC_SET_TICKS = 0x40085400

#: Numbers of system calls on x86_64 and aarch64.
_BY_MACHINE = {
    "kcmp": (312, 272),
    "ioprio_get": (252, 31),
    "ioprio_set": (251, 30),
    "sched_getattr": (315, 275),
    "sched_setattr": (314, 274),
    "personality": (135, 92),
    "prctl": (157, 167),
    "keyctl": (250, 219),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "eventfd2": (290, 19),
    "dup3": (292, 24),
    "close": (3, 57),
    "epoll_ctl": (233, 21),
    "mlock2": (325, 284),
    "mlockall": (151, 230),
    "mmap": (9, 222),
    "munmap": (11, 215),
    "waitid": (247, 95),
    "mprotect": (10, 226),
    "rt_sigaction": (13, 134),
    "getpid": (39, 172),
    "read": (0, 63),
    "futex": (202, 98),
}
_MACHINES = ("x86_64", "aarch64")
#: The numbers of this host; without those of `_BY_MACHINE` on another machine, which a capsule's init refuses.
NUMBERS = {"openat2": 437, "landlock_create_ruleset": 444, "mseal": 462}  # the same on all machines
if os.uname().machine in _MACHINES:
    NUMBERS |= {name: numbers[_MACHINES.index(os.uname().machine)] for name, numbers in _BY_MACHINE.items()}
if os.uname().machine == "x86_64":
    NUMBERS |= {"modify_ldt": 154, "arch_prctl": 158}

#: ``struct itimerspec``: interval and time until it goes off, each in seconds and nanoseconds.
_TIMER = struct.Struct("=4q")


def call(name: str, *arguments: int) -> int:
    """Make a system call; raises `OSError`.  A negative argument is sent as the kernel reads it."""
    words = [ctypes.c_ulong(argument) for argument in (*arguments, *[0] * (5 - len(arguments)))]
    return check(libc.syscall(ctypes.c_long(NUMBERS[name]), *words), name)


def forbidden() -> set[str]:
    """Those of the calls about other processes that the caller may not even make about itself.

    The host forbids them to all (a seccomp filter of a container), or this Linux was built without them.
    """
    pid = os.getpid()
    found: set[str] = set()
    with open("/dev/null") as file, pidfd_of(pid) as pidfd:
        trials: dict[str, Callable[[], object]] = {
            "kcmp": lambda: call("kcmp", pid, pid, KCMP_FILES, 0, 0),
            "ioprio_get": lambda: call("ioprio_get", IOPRIO_WHO_PROCESS, pid),
            "pidfd_getfd": lambda: os.close(pidfd_getfd(pidfd, file.fileno())),
        }
        for name, trial in trials.items():
            try:
                trial()
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
                    raise
                found.add(name)
    return found


@contextlib.contextmanager
def borrowed(pidfd: int, number: int) -> Iterator[int]:
    """Duplicate descriptor ``number`` of another process, for as long as the body lasts."""
    descriptor = pidfd_getfd(pidfd, number)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def socket_of(pidfd: int, number: int) -> socket.socket:
    """The socket behind descriptor ``number`` of another process, as an object that must be closed."""
    descriptor = pidfd_getfd(pidfd, number)
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise


def scheduling(tid: int) -> bytes:
    """``struct sched_attr`` of a thread."""
    buffer = ctypes.create_string_buffer(_SCHED_ATTR_BYTES)
    call("sched_getattr", tid, ctypes.addressof(buffer), _SCHED_ATTR_BYTES, 0)
    return buffer.raw


def set_scheduling(tid: int, attributes: bytes) -> None:
    """Set what `scheduling` returns."""
    buffer = ctypes.create_string_buffer(attributes, _SCHED_ATTR_BYTES)
    call("sched_setattr", tid, ctypes.addressof(buffer), 0)


def file_system(path: str) -> int:
    """The magic number of the file system a file lies on (``statfs(2)``); raises `OSError`."""
    buffer = ctypes.create_string_buffer(256)
    check(libc.statfs(os.fsencode(path), buffer), "statfs")
    return int(ctypes.c_long.from_buffer(buffer).value)


def semaphore_users() -> Iterator[int]:
    """The process that was the last to change each System V semaphore the caller may read (``semctl(2)``)."""
    try:
        with open("/proc/sysvipc/sem") as file:
            rows = [line.split() for line in file][1:]
    except OSError:  # a Linux without them
        return
    for row in rows:
        for number in range(int(row[3])):
            pid = int(libc.semctl(int(row[1]), number, _SEM_GETPID))
            if pid > 0:
                yield pid


def readable_bytes(fd: int) -> int:
    """Bytes that can be read now (``FIONREAD``)."""
    (count,) = struct.unpack("=i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
    return int(count)


def rearm_timer(fd: int) -> None:
    """Rearm a periodic timerfd that went off and was not read; its reader notices nothing.

    Linux stops such a timer until a process reads it or its time (``fs/timerfd.c: do_timerfd_gettime``), and
    then adds the times that it would have gone off.
    """
    check(libc.timerfd_gettime(fd, ctypes.create_string_buffer(_TIMER.size)), "timerfd_gettime")


def set_timer(fd: int, flags: int, value: int, interval: int, ticks: int) -> None:
    """Set a timerfd (``timerfd_settime(2)``), times in nanoseconds, and how often it has gone off unread."""
    buffer = ctypes.create_string_buffer(_TIMER.pack(*divmod(interval, 10**9), *divmod(value, 10**9)), _TIMER.size)
    check(libc.timerfd_settime(fd, flags, buffer, None), "timerfd_settime")
    if ticks:
        fcntl.ioctl(fd, _TFD_IOC_SET_TICKS, struct.pack("=Q", ticks))
