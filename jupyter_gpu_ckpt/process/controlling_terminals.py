"""Open files of /dev/tty in stopped processes: opened by the terminal's own name for a dump, and put back after it.

/dev/tty stands for the controlling terminal of its opener.  CRIU saves it only of the process that has the
terminal itself open, and only while the session's leader is in the foreground.  That leaves out what shells, pagers and
password prompts do on a terminal whose master the kernel has open (pexpect).  The terminal's own name opens the same
terminal, and CRIU saves that.

Processes that shared such a file have one each from then on: of a terminal they share all but O_NONBLOCK.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import syscalls
from jupyter_gpu_ckpt.process.injection import Injection
from jupyter_gpu_ckpt.process.terminals import UnsavableTerminal

#: The open files of one process, as JSON: descriptors with their flags, and the name to open the file by.
Files = list[dict[str, Any]]

_NAME = "/dev/tty"
_DEVICE = os.makedev(5, 0)
#: ioctl(2): the number of the terminal behind a descriptor.
_GET_DEVICE = 0x80045432
_SLAVES = range(136, 144)
_AT_FDCWD = -100


class _Registration(NamedTuple):
    """A descriptor that an epoll instance watches."""

    epoll: int
    fd: int
    events: int
    data: int


def reopen(pids: Iterable[int]) -> dict[int, Files]:
    """Open each file of /dev/tty by the terminal's own name.  Return what `put_back` needs, by process.

    Raises `UnsavableTerminal`, `OSError`; *after failure* the processes have their files, or new ones of the same.
    """
    found = {pid: files for pid in pids if (files := list(_files(pid)))}
    done: dict[int, Files] = {}
    try:
        with contextlib.ExitStack() as stack:  # a file that processes share is closed with its last descriptor
            inside = {pid: stack.enter_context(_watched(pid)) for pid in found}
            for pid, files in found.items():
                done[pid] = [{**file, "path": _NAME} for file in files if file.pop("is_own")]
                _open(inside[pid], files)
    except BaseException:
        with contextlib.suppress(OSError):
            put_back(done)
        raise
    return {pid: files for pid, files in done.items() if files}


def put_back(processes: dict[int, Files]) -> None:
    """Open /dev/tty again in stopped processes.  Raises `OSError`: they have the terminal by its own name then."""
    failed: OSError | None = None
    for pid, files in processes.items():
        try:
            with _watched(pid) as inside:
                _open(inside, files)
        except procfs.GONE:  # it ended
            pass
        except OSError as error:  # the others get theirs all the same
            failed = failed or error
    if failed is not None:
        raise failed


def _files(pid: int) -> Iterator[dict[str, Any]]:
    """Yield the files of /dev/tty that a process has open, each once."""
    known: list[dict[str, Any]] = []
    with contextlib.suppress(*procfs.GONE):
        terminal = procfs.stat(pid).terminal
        numbers = [number for number, target in procfs.links(pid) if target == _NAME]
        for number in numbers:
            if os.stat(f"/proc/{pid}/fd/{number}").st_rdev != _DEVICE:
                continue
            same = next((file for file in known if _is_same(pid, int(next(iter(file["descriptors"]))), number)), None)
            flags = int(procfs.fdinfo(pid, number)["flags"], 8)
            if same is not None:
                same["descriptors"][str(number)] = flags
            elif (device := _terminal(pid, number)) is not None:
                path = f"/dev/pts/{os.minor(device) + 256 * (os.major(device) - _SLAVES[0])}"
                # In a process that has left the session since it opened the file, /dev/tty is none or another.
                known.append({"descriptors": {str(number): flags}, "path": path, "is_own": device == terminal})
    yield from known


def _is_same(pid: int, first: int, second: int) -> bool:
    with contextlib.suppress(OSError):  # the host forbids the call
        return syscalls.call("kcmp", pid, pid, syscalls.KCMP_FILE, first, second) == 0
    return False


def _terminal(pid: int, number: int) -> int | None:
    """Return the device of the pseudo-terminal behind a descriptor; None where there is none any more."""
    with syscalls.pidfd_of(pid) as pidfd, syscalls.borrowed(pidfd, number) as descriptor:
        try:
            (device,) = struct.unpack("=I", fcntl.ioctl(descriptor, _GET_DEVICE, bytes(4)))
        except OSError:  # it was hung up
            return None
    return int(device) if os.major(device) in _SLAVES else None


def _open(inside: Injection, files: Files) -> None:
    """Open each file by its path in the process, in place of the descriptors."""
    for file in files:
        flags = next(iter(file["descriptors"].values())) & ~os.O_CLOEXEC | os.O_NOCTTY
        with inside.on_stack(os.fsencode(file["path"]) + b"\0") as address:
            made = inside.call("openat", _AT_FDCWD, address, flags | os.O_CLOEXEC)
        if made < 0:
            raise UnsavableTerminal(-made, f"{file['path']}, which process {inside.pid} has open: {os.strerror(-made)}")
        try:
            for number, own in file["descriptors"].items():
                if (done := inside.call("dup3", made, int(number), own & os.O_CLOEXEC)) < 0:
                    raise OSError(-done, f"descriptor {number} of process {inside.pid}: {os.strerror(-done)}")
        finally:
            inside.call("close", made)


@contextlib.contextmanager
def _watched(pid: int) -> Iterator[Injection]:
    """Yield the stopped process; what its epoll instances watch by number, they watch again after the body."""
    with Injection.into(pid) as inside:
        before = _registrations(pid)
        yield inside
        for epoll, fd, events, data in before - _registrations(pid):
            if (done := inside.register(epoll, fd, events, data)) not in (0, -errno.EEXIST):
                raise OSError(-done, f"descriptor {fd} in epoll instance {epoll}: {os.strerror(-done)}")


def _registrations(pid: int) -> set[_Registration]:
    return {
        _Registration(number, *entry)
        for number, target in procfs.links(pid)
        if target == "anon_inode:[eventpoll]"
        for entry in procfs.epoll_entries(procfs.read(f"/proc/{pid}/fdinfo/{number}"))
    }
