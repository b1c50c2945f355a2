"""Typed readers of ``/proc`` (proc(5)), shared by several modules.

A process may end while it is read: opening a file then raises `FileNotFoundError`, reading it `ProcessLookupError`.
Readers of one process raise one of these (`GONE`), unless they say otherwise, and `PermissionError` without the rights.
A zombie has ``stat`` and ``status``; its mappings and arguments are empty.

Standard library only, without psutil: a capsule's init, which has no site-packages (``python -I -S``), imports this
module.  The agent in a kernel has readers of its own: its environment may have an older Python and lack this package.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

#: Raised by readers when the process has ended.
GONE = (FileNotFoundError, ProcessLookupError)

Pid = int | Literal["self"]

#: include/linux/sched.h
_PF_EXITING = 0x4
#: Characters that are shown of a command line.
_SHOWN = 100
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_OCTAL = re.compile(r"\\([0-7]{3})")
#: Characters of a line of proc_pid_maps(5) that have the addresses and the permissions, and nothing of a name.
_FIELDS = 40
_LINE_BREAK, _DELETED = "\\012", " (deleted)"
#: How a row of ``/proc/net/unix`` begins: an address, which Linux hides, and the count of references.
_UNIX_ROW = re.compile(r"[0-9a-f]{8,16}: [0-9A-F]{8} ", re.IGNORECASE)


class Stat(NamedTuple):
    """A process or thread by proc_pid_stat(5)."""

    #: At most 15 bytes.
    name: str
    #: One letter; ``Z`` and ``X``: it has ended.
    state: str
    parent: int
    #: Device number of the controlling terminal (0: none), and the process group in its foreground.
    terminal: int
    foreground: int
    flags: int
    #: CPU time of its own and of the children that it has waited for, in clock ticks (``SC_CLK_TCK``).
    cpu_ticks: int
    #: When it was started, in clock ticks since the boot.
    started: int
    #: As from waitpid(2); 0 where the caller lacks the rights.
    exit_code: int

    @property
    def has_ended(self) -> bool:
        """Return whether the process is a zombie, or dead."""
        return self.state in "ZX"

    @property
    def is_ending(self) -> bool:
        """Return whether the process has ended or is ending: even its user cannot read its memory and descriptors."""
        return self.has_ended or bool(self.flags & _PF_EXITING)


class MemoryMapping(NamedTuple):
    """A line of proc_pid_maps(5); ``name``: a path, ``[vdso]`` and the like, or empty."""

    start: int
    end: int
    #: ``r-xp``
    permissions: str
    name: str
    inode: int = 0
    #: Of the file: ``00:1b``, and where the mapping begins in it.
    device: str = ""
    offset: int = 0

    def contains(self, address: int) -> bool:
        """Return whether ``address`` lies in the mapping."""
        return self.start <= address < self.end


class Mount(NamedTuple):
    """A line of proc_pid_mountinfo(5).  ``arrived``: it came from another mount namespace (a slave)."""

    number: str
    parent: str
    device: str
    #: The directory of the file system that is mounted, and the mount point.
    root: str
    point: str
    filesystem: str
    #: Options of the file system, not of this mount.
    options: tuple[str, ...]
    arrived: bool


def read(path: str) -> str:
    """Return the content of a file; invalid UTF-8 as surrogates."""
    with open(path, "rb", buffering=0) as file:
        return file.readall().decode(errors="surrogateescape")


def lines(text: str) -> list[str]:
    """Return the non-empty lines.  Not ``str.splitlines``, which also splits at characters that names may contain."""
    return [line for line in text.split("\n") if line]


def fields(text: str) -> dict[str, str]:
    """Parse lines of ``NAME: VALUE``; of a repeated name, the last."""
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines(text))}


def _directory(pid: Pid, tid: int | None) -> str:
    return f"/proc/{pid}" if tid is None else f"/proc/{pid}/task/{tid}"


# -- one process ------------------------------------------------------------------------------------------------------


def stat(pid: Pid, tid: int | None = None) -> Stat:
    """Return state, parent and times of a process, or of one thread of it."""
    head, _, tail = read(f"{_directory(pid, tid)}/stat").rpartition(")")
    words = tail.split()
    return Stat(
        name=head.partition("(")[2],
        state=words[0],
        parent=int(words[1]),
        terminal=int(words[4]),
        foreground=int(words[5]),
        flags=int(words[6]),
        cpu_ticks=sum(map(int, words[11:15])),
        started=int(words[19]),
        exit_code=int(words[-1]),
    )


def is_ending(pid: int) -> bool:
    """Return whether the process is ending, or gone."""
    with contextlib.suppress(*GONE):
        return stat(pid).is_ending
    return True


def limits(pid: int) -> dict[str, tuple[int, int]]:
    """Return the soft and hard limits of a process by name (``RLIMIT_NOFILE``), as `resource.getrlimit`.

    From ``/proc/PID/limits``, whose lines are in the order of their numbers: prlimit(2) denies those of another user's
    process to a root that lacks CAP_SYS_RESOURCE.
    """
    known = [name for name in dir(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"]  # of BSD
    names = {getattr(resource, name): name for name in known}
    lines = read(f"/proc/{pid}/limits").splitlines()[1:]
    values = [tuple(map(_limit, line[26:].split()[:2])) for line in lines]
    return {names[number]: (soft, hard) for number, (soft, hard) in enumerate(values) if number in names}


def _limit(word: str) -> int:
    return resource.RLIM_INFINITY if word == "unlimited" else int(word)


def status(pid: Pid = "self", tid: int | None = None) -> dict[str, str]:
    """Return the fields of proc_pid_status(5) of a process, or of one thread of it."""
    return fields(read(f"{_directory(pid, tid)}/status"))


def arguments(pid: int) -> tuple[str, ...]:
    """Return the command line; empty for a zombie and for a kernel thread."""
    line = os.fsencode(read(f"/proc/{pid}/cmdline")).decode(errors="replace")
    return tuple(line.rstrip("\0").split("\0")) if line else ()


def shown_command(words: tuple[str, ...], name: str) -> str:
    """Return a command line for people: only last directories; beginning and end, where workers of a pool differ.

    ``name``: of the process, for one without a command line.
    """
    shown = [f".../{'/'.join(word.split('/')[-2:])}" if word.count("/") > 2 else word for word in words]
    shown[:1] = [word.rpartition("/")[2] for word in words[:1]]
    lines = (_CONTROL.sub(" ", line).strip() for line in (" ".join(shown), name))
    text = next(filter(None, lines), "")
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


def described(pid: int) -> str:
    """Return a process for people: ``process 7 (sleep 60)``.  Never raises."""
    with contextlib.suppress(OSError):
        return f"process {pid} ({shown_command(arguments(pid), stat(pid).name)})"
    return f"process {pid}"


def maps(
    pid: int, *, named: str = "", program: bool = False, matching: re.Pattern[str] | None = None
) -> list[MemoryMapping]:
    """Return the mappings in ascending order, of the thousands that there may be only those that are wanted.

    ``named``: those with this in their names.  ``matching``: those whose lines in proc_pid_maps(5) match somewhere;
    ``program``: and all those that may be executed.
    """
    wanted = [line for line in lines(read(f"/proc/{pid}/maps")) if named in line]
    if matching is not None:  # no field before the name can have an x but the permissions
        search = matching.search
        wanted = [line for line in wanted if (program and line.find("x", 0, _FIELDS) >= 0) or search(line)]
    found = []
    for line in wanted:
        words = line.split(None, 5)
        start, _, end = words[0].partition("-")
        addresses = int(start, 16), int(end, 16)
        name = _unescaped(pid, *addresses, words[5]) if len(words) > 5 else ""
        found.append(MemoryMapping(*addresses, words[1], name, int(words[4]), words[3], int(words[2], 16)))
    return found


def published(pid: int, mappings: Iterable[MemoryMapping], mark: bytes, size: int) -> bytes | None:
    """Return the bytes behind a mark in some of a process's mappings, or None where it is not.  Raises `OSError`."""
    at = address_of(pid, mappings, mark, size)
    return None if at is None else published_at(pid, at, mark, size)


def address_of(pid: int, mappings: Iterable[MemoryMapping], mark: bytes, size: int) -> int | None:
    """Return the address of a mark with so many bytes behind it in some of a process's mappings, or None.

    Raises `OSError`.
    """
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for mapping in mappings:
            content = os.pread(memory.fileno(), mapping.end - mapping.start, mapping.start)
            if 0 <= (at := content.find(mark)) <= len(content) - len(mark) - size:
                return mapping.start + at
    return None


def published_at(pid: int, address: int, mark: bytes, size: int) -> bytes | None:
    """Return the bytes behind the mark at an address, or None where it is not.  Raises `OSError`."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        content = os.pread(memory.fileno(), len(mark) + size, address)
    return content[len(mark) :] if content.startswith(mark) and len(content) == len(mark) + size else None


def _unescaped(pid: int, start: int, end: int, name: str) -> str:
    """Return the name of a mapping.  Linux writes a line break in it as it writes these four characters themselves."""
    if _LINE_BREAK not in name:
        return name
    with contextlib.suppress(OSError):  # unmapped meanwhile
        return os.readlink(f"/proc/{pid}/map_files/{start:x}-{end:x}")
    return name.replace(_LINE_BREAK, "\n")


def is_there(path: str, inode: int) -> bool:
    """Return whether the path is that of the file with this inode; its device other tables may show differently."""
    with contextlib.suppress(OSError):
        return os.lstat(path).st_ino == inode
    return False


def path_of_deleted(name: str, inode: int, is_there: Callable[[str, int], bool] = is_there) -> str:
    """Return the path that a deleted file had; empty if the file is there.

    ``name``: as the links and tables of a process show it.  An existing file's name may end like that, too, also beside
    a deleted one: ``is_there`` is called with such a name.
    """
    if not name.startswith("/") or not name.endswith(_DELETED) or is_there(name, inode):
        return ""
    return name.removesuffix(_DELETED)


def proportional_bytes(pid: Pid) -> int:
    """Return the bytes of memory, with each page divided by the number of processes that have it (PSS).

    Linux goes through all pages for that: 0.25 s for 10 GiB (measured beside other work).  0 for a zombie.
    """
    return int(fields(read(f"/proc/{pid}/smaps_rollup")).get("Pss", "0 kB").split()[0]) * 1024


def threads(pid: int) -> list[int]:
    """Return the ids of the threads, sorted."""
    return sorted(map(int, os.listdir(f"/proc/{pid}/task")))


def children(pid: int) -> list[int]:
    """Return the children of all threads, zombies included; empty once the process is gone.  Never raises `GONE`."""
    found: list[int] = []
    with contextlib.suppress(*GONE), _opened(f"/proc/{pid}/task", os.O_DIRECTORY) as tasks:
        for tid in sorted(map(int, os.listdir(tasks))):
            with contextlib.suppress(*GONE), _opened(f"{tid}/children", directory=tasks) as file:
                text = b""
                while part := os.read(file, 1 << 16):
                    text += part
                found += map(int, text.split())
    return found


@contextlib.contextmanager
def _opened(path: str, flags: int = 0, *, directory: int | None = None) -> Iterator[int]:
    """Open for the body, in half the time of a file object: a process may have hundreds of threads."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=directory)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _ending_is_gone(pid: int) -> Iterator[None]:
    """Raise `ProcessLookupError` where an ordinary user is denied the descriptors because their process is ending."""
    try:
        yield
    except PermissionError as error:
        if is_ending(pid):
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), error.filename) from error
        raise


def descriptors(pid: int) -> list[int]:
    """Return the open descriptors, sorted."""
    with _ending_is_gone(pid):
        return sorted(map(int, os.listdir(f"/proc/{pid}/fd")))


def links(pid: int) -> Iterator[tuple[int, str]]:
    """Yield open descriptors and their targets (``socket:[7]``, a path), without those closed meanwhile."""
    for number in descriptors(pid):
        with contextlib.suppress(*GONE), _ending_is_gone(pid):
            yield number, os.readlink(f"/proc/{pid}/fd/{number}")


def fdinfo(pid: Pid, number: int) -> dict[str, str]:
    """Return the fields of proc_pid_fdinfo(5) of one descriptor."""
    return fields(read(f"/proc/{pid}/fdinfo/{number}"))


def epoll_entries(text: str) -> list[tuple[int, int, int]]:
    """Parse what an epoll instance watches, from the text of its fdinfo: descriptor, events, data."""
    words = [line.split() for line in lines(text) if line.startswith("tfd:")]
    return [(int(line[1]), int(line[3], 16), int(line[5], 16)) for line in words]


# -- namespaces of a process ------------------------------------------------------------------------------------------


def mounts(pid: Pid = "self") -> list[Mount]:
    """Return the mounts in the mount namespace of a process, in the order of mounting."""
    return parse_mounts(read(f"/proc/{pid}/mountinfo"))


def parse_mounts(text: str) -> list[Mount]:
    """Parse the text of a ``mountinfo`` file."""
    found = []
    for line in lines(text):
        head, _, tail = line.partition(" - ")
        number, parent, device, root, point, _, *marks = head.split(" ")
        filesystem, _, options = tail.split(" ", 2)
        # A blank is written as \040, and other bytes likewise.
        root, point, filesystem = (
            _OCTAL.sub(lambda octal: chr(int(octal[1], 8)), word) for word in (root, point, filesystem)
        )
        arrived = any(mark.startswith("master:") for mark in marks)
        found.append(Mount(number, parent, device, root, point, filesystem, tuple(options.split(",")), arrived))
    return found


def sockets(table: str, pid: Pid = "self") -> list[list[str]]:
    """Rows of ``/proc/PID/net/TABLE`` (``tcp``, ``udp6``, ``unix`` ...), split at blanks, without the header.

    The path of a unix socket is one word, also with blanks and line breaks, which any user's socket may have.  Empty
    without this family, or once the process is gone.
    """
    rows: list[str] = []
    with contextlib.suppress(OSError):
        for line in read(f"/proc/{pid}/net/{table}").rstrip("\n").split("\n")[1:]:
            if table != "unix" or _UNIX_ROW.match(line):
                rows.append(line)
            elif rows:
                rows[-1] += f"\n{line}"
    return [row.split(None, 7 if table == "unix" else -1) for row in rows]


def unix_sockets(pid: Pid = "self") -> list[list[str]]:
    """Rows as of `sockets`, of those that a process can have open, for a caller who counts on one that is not there.

    From two readings of the table: one passes over sockets while others beside them are closed.  66 of 85,408 readings
    missed one of 40 connections beside two programs that open and close pairs; of TCP's none of 1,460 did (2026-11-29,
    Linux 6.18).
    """
    return [*{row[6]: row for _ in range(2) for row in sockets("unix", pid)}.values()]


# -- the machine ------------------------------------------------------------------------------------------------------


def pids() -> list[int]:
    """Return the processes that this ``/proc`` shows, sorted."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdigit())


def sysctl(name: str) -> str | None:
    """Return a kernel setting by its dotted name; None where this Linux lacks it or does not show it."""
    try:
        return read(f"/proc/sys/{name.replace('.', '/')}").strip()
    except OSError:
        return None


def boot_id() -> str:
    """Return the id of this boot of the machine."""
    return read("/proc/sys/kernel/random/boot_id").strip()
