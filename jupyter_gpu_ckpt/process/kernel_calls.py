"""System calls about other processes that the standard library has no function for, by their numbers in Linux.

Source: ``kcmp(2)``, ``ioprio_set(2)``, ``sched_setattr(2)``, ``pidfd_getfd(2)`` and the system call tables of
``arch/*/include/generated``.  Standard library only, as `ptrace`: a capsule's init imports this module.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jupyter_gpu_ckpt.process import syscalls

KCMP_FILES, KCMP_FS = 2, 3
_SEM_GETPID = 11
IOPRIO_WHO_PROCESS = 1
#: ``struct sched_attr`` with its last two fields, of uclamp.
SCHED_ATTR_BYTES = 56

_EPIOCSPARAMS, _EPIOCGPARAMS = 0x40088A01, 0x80088A02
_TFD_IOC_SET_TICKS = 0x40085400


@dataclass(frozen=True)
class Numbers:
    """System call numbers of one architecture."""

    kcmp: int
    ioprio_get: int
    ioprio_set: int
    sched_getattr: int
    sched_setattr: int
    personality: int
    prctl: int
    keyctl: int
    mbind: int
    set_mempolicy: int
    eventfd2: int
    dup3: int
    close: int
    epoll_ctl: int
    mlock2: int
    mlockall: int
    mmap: int
    waitid: int
    mseal: int = 462
    #: Only x86 has these.
    modify_ldt: int | None = None
    arch_prctl: int | None = None


_TABLES = {
    "x86_64": Numbers(
        kcmp=312,
        ioprio_get=252,
        ioprio_set=251,
        sched_getattr=315,
        sched_setattr=314,
        personality=135,
        prctl=157,
        keyctl=250,
        mbind=237,
        set_mempolicy=238,
        eventfd2=290,
        dup3=292,
        close=3,
        epoll_ctl=233,
        mlock2=325,
        mlockall=151,
        mmap=9,
        waitid=247,
        modify_ldt=154,
        arch_prctl=158,
    ),
    "aarch64": Numbers(
        kcmp=272,
        ioprio_get=31,
        ioprio_set=30,
        sched_getattr=275,
        sched_setattr=274,
        personality=92,
        prctl=167,
        keyctl=219,
        mbind=235,
        set_mempolicy=237,
        eventfd2=19,
        dup3=24,
        close=57,
        epoll_ctl=21,
        mlock2=284,
        mlockall=230,
        mmap=222,
        waitid=95,
    ),
}
#: Of this host, or None where nobody wrote them down.
NUMBERS = _TABLES.get(os.uname().machine)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_libc.syscall.argtypes = [ctypes.c_long, *[ctypes.c_ulong] * 5]
#: ``struct itimerspec``: interval and time until it goes off, each in seconds and nanoseconds.
_TIMER = struct.Struct("=4q")


def call(number: int, *arguments: int) -> int:
    """Run system call ``number``; raises `OSError`.  A negative argument is sent as the kernel reads it."""
    words = [argument & (1 << 64) - 1 for argument in arguments]
    result = int(_libc.syscall(number, *words, *[0] * (5 - len(words))))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{_name_of(number)}: {os.strerror(error)}")
    return result


def _name_of(number: int) -> str:
    """A system call's name, where it is one of `Numbers`."""
    names = {own: name for name, own in vars(NUMBERS).items()} if NUMBERS is not None else {}
    return names.get(number, f"system call {number}")


def forbidden() -> set[str]:
    """Those of the calls about other processes that the caller may not even make about itself.

    The host forbids them to all (a seccomp filter of a container), or this Linux was built without them.
    """
    if (numbers := NUMBERS) is None:
        return set()
    pid = os.getpid()
    found: set[str] = set()
    pidfd = os.pidfd_open(pid)
    try:
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            questions: dict[str, Callable[[], object]] = {
                "kcmp": lambda: call(numbers.kcmp, pid, pid, KCMP_FILES, 0, 0),
                "ioprio_get": lambda: io_priority(numbers, pid),
                "pidfd_getfd": lambda: os.close(syscalls.pidfd_getfd(pidfd, reading)),
            }
            for name, ask in questions.items():
                try:
                    ask()
                except OSError as error:
                    if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
                        raise
                    found.add(name)
        finally:
            os.close(reading)
            os.close(writing)
    finally:
        os.close(pidfd)
    return found


def descriptor_of(pidfd: int, number: int) -> int:
    """Duplicate descriptor ``number`` of another process: a descriptor of the caller's own, closed on exec."""
    return syscalls.pidfd_getfd(pidfd, number)


def socket_of(pidfd: int, number: int) -> socket.socket:
    """The socket behind descriptor ``number`` of another process, as an object that must be closed."""
    descriptor = syscalls.pidfd_getfd(pidfd, number)
    try:
        return socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise


def io_priority(numbers: Numbers, tid: int) -> int:
    """The I/O priority of a thread; 0 where none was set."""
    return call(numbers.ioprio_get, IOPRIO_WHO_PROCESS, tid)


def scheduling(numbers: Numbers, tid: int) -> bytes:
    """``struct sched_attr`` of a thread."""
    buffer = ctypes.create_string_buffer(SCHED_ATTR_BYTES)
    call(numbers.sched_getattr, tid, ctypes.addressof(buffer), SCHED_ATTR_BYTES, 0)
    return buffer.raw


def set_scheduling(numbers: Numbers, tid: int, attributes: bytes) -> None:
    """Write what `scheduling` gave."""
    buffer = ctypes.create_string_buffer(attributes, SCHED_ATTR_BYTES)
    call(numbers.sched_setattr, tid, ctypes.addressof(buffer), 0)


def file_system(fd: int | str) -> int:
    """The magic number of the file system a file lies on (``statfs(2)``); raises `OSError`."""
    buffer = ctypes.create_string_buffer(256)
    done = _libc.fstatfs(fd, buffer) if isinstance(fd, int) else _libc.statfs(os.fsencode(fd), buffer)
    if done:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
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
            pid = int(_libc.semctl(int(row[1]), number, _SEM_GETPID))
            if pid > 0:
                yield pid


def readable_bytes(fd: int) -> int:
    """How many bytes can be read now (``FIONREAD``)."""
    (count,) = struct.unpack("=i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))
    return int(count)


def epoll_parameters(fd: int) -> bytes:
    """How an epoll instance polls busily (``EPIOCGPARAMS``), zeros by default.  Raises `OSError` before Linux 6.9."""
    return fcntl.ioctl(fd, _EPIOCGPARAMS, bytes(8))


def set_epoll_parameters(fd: int, parameters: bytes) -> None:
    """Write what `epoll_parameters` gave."""
    fcntl.ioctl(fd, _EPIOCSPARAMS, parameters)


def rearm_timer(fd: int) -> None:
    """Have a periodic timerfd that went off and was not read count on; its reader sees the same as otherwise.

    Linux stops such a timer until somebody reads it or asks for its time (``fs/timerfd.c: do_timerfd_gettime``), and
    then adds the times that it would have gone off.
    """
    if _libc.timerfd_gettime(fd, ctypes.create_string_buffer(_TIMER.size)):
        raise OSError(ctypes.get_errno(), "timerfd_gettime")


def set_timer(fd: int, flags: int, value: int, interval: int, ticks: int) -> None:
    """Set a timerfd (``timerfd_settime(2)``), times in nanoseconds, and how often it has gone off unread."""
    buffer = ctypes.create_string_buffer(_TIMER.pack(*divmod(interval, 10**9), *divmod(value, 10**9)), _TIMER.size)
    if _libc.timerfd_settime(fd, flags, buffer, None):
        raise OSError(ctypes.get_errno(), "timerfd_settime")
    if ticks:
        fcntl.ioctl(fd, _TFD_IOC_SET_TICKS, struct.pack("=Q", ticks))
