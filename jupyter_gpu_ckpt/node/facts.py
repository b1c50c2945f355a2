"""Facts about this node that a process depends on, also when it is restored elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from .. import procfs
from ..process import sqlite_wal
from ..process.file_facts import birth_ns

#: CPU features that programs choose their code by.  The others in /proc/cpuinfo are Linux's own business.
_USED_BY_PROGRAMS = re.compile(
    r"(sse|ssse|avx|amx|bmi|sha|vaes|vpclmul)\w*"
    r"|xsave(opt|c)?|xop|tbm|rdrand|rdseed|fma4?|f16c|aes|pclmulqdq|popcnt|abm|movbe|adx|gfni|cx16|rtm|clflushopt|clwb|movdiri|movdir64b|serialize|fsgsbase"
)

_NT_GNU_BUILD_ID = 3
_PT_NOTE = 4
#: Bytes of an ELF file's tables that are read; a damaged header may promise any number.
_ENOUGH = 1 << 16
#: File systems that processes of other hosts may use as well.
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "lustre", "ceph", "beegfs", "gpfs")
#: File systems whose files Linux generates when they are read, without a content or times of their own.
_PSEUDO = frozenset(
    ("proc", "sysfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "configfs", "bpf", "pstore", "efivarfs")
    + ("binfmt_misc", "fusectl", "selinuxfs", "mqueue", "devpts", "nsfs", "resctrl", "rpc_pipefs")
)
#: Prefixes of file systems on which a directory's inode number may change (overlayfs.rst: "xino"; FUSE and CIFS make
#: numbers up).
_RENUMBERED = ("overlay", "fuse", "cifs", "smb3", "9p", "aufs")
_STAMPING = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "nfs", "nfs4"))
_DISTRIBUTION = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)\.(dist|egg)-info")


def cpu() -> list[str]:
    """The CPU's features, as Linux names them; sorted."""
    with Path("/proc/cpuinfo").open() as file:  # the first CPU's; Linux asks each one for its speed as it writes them
        for line in file:
            name, _, words = line.partition(":")
            if name.strip() == "Features":  # Arm's list has nothing but what programs may use
                return sorted(words.split())
            if name.strip() == "flags":
                return sorted(word for word in words.split() if _USED_BY_PROGRAMS.fullmatch(word))
    return []


def glibc() -> str:
    """The version of the C library, ``2.36``; empty with another one."""
    with contextlib.suppress(ValueError, OSError):
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2]
    return ""


_MACHINE_ID = Path("/etc/machine-id")

Facts = Mapping[str, Any]


def machine() -> str:
    """Return an identifier of this machine: its machine-id(5) and host name.

    Containers may all have those of their image, and keep their names on another host: where the root is an overlay, or
    there is no id, the identifier changes with each boot.
    """
    id, root = "", mounts().get("/", "")
    with contextlib.suppress(OSError):
        id = _MACHINE_ID.read_text().strip()
    if not id or root == "overlay":
        id += " " + procfs.boot_id()
    return f"{id} {socket.gethostname()}"


def file_facts(path: str) -> dict[str, Any] | None:
    """Return facts of a file by stat(2), times in ns; None without one.  Not opened: it may be a pipe by now."""
    with contextlib.suppress(OSError, ValueError):
        status = os.stat(path)
        device, inode, size, mtime, ctime = identity(status)
        return {"size": size, "mode": status.st_mode, "device": device, "inode": inode, "mtime": mtime, "ctime": ctime}
    return None


def unreachable(paths: Iterable[str]) -> Iterator[str]:
    """Yield those of ``paths`` that this process may not look up, whatever is there: a directory denies it."""
    for path in paths:
        try:
            os.stat(path)
        except PermissionError:
            yield path
        except (OSError, ValueError):
            pass


def identity(status: os.stat_result) -> tuple[int, int, int, int, int]:
    """Device, inode, size, mtime and ctime (ns): a file is another one, or was changed, when one of them differs.

    Linux sets ctime itself at every change.  One exception: writes of other processes through a shared mapping of a
    file in a tmpfs leave no trace.
    """
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def same_file(was: Facts, now: Facts) -> bool:
    """Return whether ``now`` is the file of ``was``, unchanged, going by their identities alone.

    A device may have another number when it is mounted again (Btrfs, NFS, overlay, after a boot).  That is ignored if
    Linux stamped the file: ctime has a fraction of a second then.  In an image of a file system (squashfs) the times
    are arbitrary, and those of two images may agree.  Of an ``unstamped`` file the identity proves nothing.
    """
    if was.get("unstamped") or "inode" not in was:
        return False
    if any(was[name] != now[name] for name in ("inode", "size", "mtime", "ctime")):
        return False
    return bool(was["device"] == now["device"] or was["ctime"] % 1_000_000_000)


def keeps_content(kind: str) -> bool:
    """Return whether files on a file system of this type have a content and times of their own."""
    return kind not in _PSEUDO


def stamps_stores(kind: str) -> bool:
    """Return whether a file system of this type changes a file's times at stores to clean pages of a shared mapping.

    Those in memory do not (tmpfs, hugetlbfs), FUSE does so when it likes, and an overlay is what is below it.
    """
    return kind in _STAMPING


def keeps_inodes(kind: str) -> bool:
    """Return whether directories on a file system of this type keep their inode numbers for good."""
    return keeps_content(kind) and not kind.startswith(_RENUMBERED)


def occupant(path: str, inode: int, mtime: int) -> str:
    """Return a description of the file at a unix socket's path, if it is not the socket's own; else empty.

    An inode alone is not enough: the next file may get that of a removed one.  A socket that no process has any more is
    as good as none: a restore that was broken off leaves it.
    """
    try:
        status = os.lstat(path)
    except OSError:
        return ""  # removed, or out of reach: a restore makes it again
    if (status.st_ino, status.st_mtime_ns) == (inode, mtime) and stat.S_ISSOCK(status.st_mode):
        return ""
    if not stat.S_ISSOCK(status.st_mode):
        return "another file"
    # Of another host's processes this one knows nothing.
    points = mounts()
    elsewhere = points.get(mount_of(path, points)) in NETWORK_FILESYSTEMS
    return "a socket of another process" if elsewhere or is_bound(path) else ""


def is_bound(path: str) -> bool:
    """Return whether a process has the unix socket at ``path``, or may have it.  Does not connect to a server."""
    # Linux looks for the socket before it compares the types, so a server of streams does not see this.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def open_regular(path: str) -> FileIO:
    """Open a regular file for reading.  Raises `OSError`, also for other kinds: a pipe would wait for a writer."""
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)  # a reference: the file cannot be exchanged from here on
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
        return FileIO(os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb")
    finally:
        os.close(found)


def build_id(path: str) -> str:
    """Return the build-id in a 64-bit ELF file's notes (elf(5), ``NT_GNU_BUILD_ID``), in hex; empty without one."""
    with contextlib.suppress(OSError, ValueError, OverflowError, struct.error), open_regular(path) as file:
        head = file.read(64)
        if head[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian: CRIU and CUDA support nothing else
            return ""
        (start,) = struct.unpack_from("<Q", head, 32)
        size, count = struct.unpack_from("<HH", head, 54)
        file.seek(start)
        table = file.read(min(size * count, _ENOUGH))
        for at in range(0, len(table), size):
            kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", table, at)
            if kind == _PT_NOTE:
                file.seek(offset)
                if found := _build_id_note(file.read(min(length, _ENOUGH))):
                    return found
    return ""


class Database(NamedTuple):
    """A database of SQLite: when its file was made, in ns, 0 if unknown; size of a page in WAL mode, 0 in another."""

    born: int
    wal_page_size: int


def database(path: str) -> Database | None:
    """Return facts of a database of SQLite (its "Database File Format", 1.3); None of another file."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        header = file.read(sqlite_wal.HEADER_BYTES)
        if header.startswith(sqlite_wal.MAGIC):
            return Database(birth_ns(path), sqlite_wal.page_size(header))
    return None


def _build_id_note(notes: bytes) -> str:
    at = 0
    while at + 12 <= len(notes):
        name, content, kind = struct.unpack_from("<III", notes, at)
        begin = at + 12 + (name + 3 & ~3)
        if kind == _NT_GNU_BUILD_ID and notes[at + 12 : at + 16] == b"GNU\0":
            return notes[begin : begin + content].hex()
        at = begin + (content + 3 & ~3)
    return ""


def packages(paths: Iterable[str]) -> dict[str, dict[str, str]]:
    """Versions by distribution, for each site-packages directory that one of ``paths`` lies in."""
    directories = {
        path[: match.end()] for path in paths if (match := re.search(r"/(site|dist)-packages(?=/)", path)) is not None
    }
    return {directory: installed(directory) for directory in sorted(directories)}


def installed(directory: str) -> dict[str, str]:
    """Versions by distribution in one directory (the names of its ``.dist-info``s); empty when it is not there."""
    with contextlib.suppress(OSError):
        matches = [_DISTRIBUTION.fullmatch(path.name) for path in Path(directory).iterdir()]
        return {match["name"]: match["version"] for match in matches if match}
    return {}


def mounts() -> dict[str, str]:
    """The type of file system by mount point (proc_pid_mountinfo(5))."""
    return {mount.point: mount.filesystem for mount in procfs.mounts()}


def mount_of(path: str, points: Mapping[str, str]) -> str:
    """The mount point that ``path`` lies below."""
    above = (point for point in points if path == point or path.startswith(point.rstrip("/") + "/"))
    return max(above, key=len, default="/")


def unbindable(address: str, number: int, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM) -> str:
    """Why a port cannot be bound now; empty when it can."""
    why = _unbindable(address, number, family, kind)
    if why != os.strerror(errno.EADDRINUSE) or kind != socket.SOCK_STREAM:
        return why
    if _lingers(number):
        return LINGERS
    return _unbindable(address, number, family, kind)  # what lingered may have ended in between


def _unbindable(address: str, number: int, family: int, kind: int) -> str:
    try:
        with socket.socket(family, kind) as trial:
            if kind == socket.SOCK_STREAM:  # as CRIU and ZMQ do: lingering connections do not matter to them
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((address, number))
    except OSError as error:
        return error.strerror or "it cannot be bound"
    return ""


#: Why a port that no process has any more cannot be bound for up to a minute (tcp(7)).
LINGERS = "connections that were closed linger there, for a minute at most"

# States of connections that no process has any more (include/net/tcp_states.h).
_CLOSING = frozenset({"04", "05", "06", "07", "09", "0B"})


def _lingers(number: int) -> bool:
    """Return whether a TCP port of this host has only closed connections."""
    rows = [*procfs.sockets("tcp"), *procfs.sockets("tcp6")]
    states = {row[3] for row in rows if int(row[1].rpartition(":")[2], 16) == number}
    return bool(states) and states <= _CLOSING
