"""System calls the standard library has no function for: namespaces, mounts, capabilities, state of other processes.

Names and numbers are the kernel's own (``include/uapi/linux/{sched,mount,prctl,capability}.h``, system call tables of
``arch/*/include/generated``), so that a reader can look them up in the manual pages.
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

CLONE_NEWTIME, CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00000080, 0x00020000, 0x10000000, 0x20000000

#: The same on all architectures, as all numbers above 423.
SYS_PIDFD_GETFD = 438

MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x2, 0x4, 0x8
MS_BIND, MS_REC, MS_SLAVE = 0x1000, 0x4000, 0x80000
_MNT_DETACH = 0x2

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, PR_CAP_AMBIENT_CLEAR_ALL = 47, 2, 4

_LINUX_CAPABILITY_VERSION_3 = 0x20080522

#: The capabilities that CRIU needs inside a capsule's user namespace.  CAP_SETUID and CAP_SETGID are left out on
#: purpose: with them CRIU calls setuid(0), and uid 0 is not mapped.
#: They are CAP_CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, KILL, SETPCAP, NET_ADMIN, SYS_CHROOT, SYS_PTRACE,
#: SYS_ADMIN, SYS_RESOURCE, CHECKPOINT_RESTORE.
CAPABILITIES_FOR_CRIU = (0, 1, 2, 3, 4, 5, 8, 12, 18, 19, 21, 24, 40)

KCMP_FILE, KCMP_VM, KCMP_FILES, KCMP_FS, KCMP_EPOLL_TFD = 0, 1, 2, 3, 7
_SEM_GETPID = 11
IOPRIO_WHO_PROCESS = 1
#: ``struct sched_attr`` with its last two fields, of uclamp.
_SCHED_ATTR_BYTES = 56
#: ioctl(2): how an epoll instance polls busily, 8 bytes, zeros by default; since Linux 6.9.
EPIOCSPARAMS, EPIOCGPARAMS = 0x40088A01, 0x80088A02
_TFD_IOC_SET_TICKS = 0x40085400

#: Names of system calls, with their numbers on x86_64 and on aarch64.
_BY_MACHINE = """
    kcmp 312 272  ioprio_get 252 31  ioprio_set 251 30  sched_getattr 315 275  sched_setattr 314 274
    personality 135 92  prctl 157 167  keyctl 250 219  mbind 237 235  set_mempolicy 238 237
    eventfd2 290 19  dup3 292 24  close 3 57  read 0 63  epoll_ctl 233 21  waitid 247 95  futex 202 98
    mlock2 325 284  mlockall 151 230  mmap 9 222  munmap 11 215  mprotect 10 226  rt_sigaction 13 134  getpid 39 172
    mincore 27 232  get_robust_list 274 100  lseek 8 62  openat 257 56  open_by_handle_at 304 265
    rt_sigtimedwait 128 137  rt_sigqueueinfo 129 138  rt_tgsigqueueinfo 297 240  fcntl 72 25  epoll_pwait 281 22
"""
_MACHINES = ("x86_64", "aarch64")
#: The numbers of this host; without those of `_BY_MACHINE` on another machine, which a capsule's init refuses.
NUMBERS = {"openat2": 437, "landlock_create_ruleset": 444, "mseal": 462}  # the same on all machines
if os.uname().machine in _MACHINES:
    _words = _BY_MACHINE.split()
    NUMBERS |= dict(zip(_words[::3], map(int, _words[1 + _MACHINES.index(os.uname().machine) :: 3]), strict=True))
if os.uname().machine == "x86_64":
    NUMBERS |= {"modify_ldt": 154, "arch_prctl": 158}

#: ``struct itimerspec``: interval and time until it goes off, each in seconds and nanoseconds.
_TIMER = struct.Struct("=4q")

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
    arguments = ctypes.c_int(pidfd), ctypes.c_int(number), ctypes.c_uint(0)
    return check(libc.syscall(ctypes.c_long(SYS_PIDFD_GETFD), *arguments), "pidfd_getfd")


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


# -- state of other processes


def call(name: str, *arguments: int) -> int:
    """Make a system call; raises `OSError`.  A negative argument is sent as the kernel reads it."""
    words = [ctypes.c_ulong(argument) for argument in (*arguments, *[0] * (5 - len(arguments)))]
    return check(libc.syscall(ctypes.c_long(NUMBERS[name]), *words), name)


def forbidden() -> set[str]:
    """Return the calls about other processes that the host's seccomp filter forbids, or that this Linux lacks."""
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


def unsent_bytes(fd: int) -> int:
    """Bytes that a socket has not sent, or of a TCP socket: that are not acknowledged (``SIOCOUTQ``)."""
    (count,) = struct.unpack("=i", fcntl.ioctl(fd, termios.TIOCOUTQ, bytes(4)))
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
