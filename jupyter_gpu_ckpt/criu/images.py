"""CRIU's image files about a kernel's files, and changes to them: the size a file must have, a device's owner.

CRIU refuses to restore a process whose open or mapped file has another size or mode than at the dump
(``validate_file`` in its files-reg.c; no option turns that off).  Both are optional fields of the record in
``files.img``: a missing field is not compared.  So a restore that accepts a changed file gets a *view* of the image:
links to all files but ``files.img``, which it has of its own.  The image itself is never written to.

The format (CRIU's wiki, "Images"; its criu/include/magic.h and images/*.proto): two magic numbers, then records, each a
length and a protobuf message.  Only the wire format of protobuf is needed here, and a few fields of seven messages.
"""

from __future__ import annotations

import functools
import mmap
import os
import re
import socket
import stat
import struct
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ImageFormat
from ..files.atomic import write_atomically

COMMON_MAGIC = 0x54564319
FILES_MAGIC = 0x56303138
FDINFO_MAGIC = 0x56213732
_REMAP_MAGIC = 0x59133954
_TTY_INFO_MAGIC = 0x59453036
FILE_LOCKS_MAGIC = 0x54323616
_IDS_MAGIC = 0x54432030
MM_MAGIC = 0x57492820
FILES = "files.img"
_TTY_INFO = "tty-info.img"

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# message file_entry
_ENTRY_REG, ENTRY_INET = 3, 4
# message inet_sk_entry
INET_FAMILY, INET_TYPE, INET_STATE, INET_PORT, INET_ADDRESS = 3, 4, 6, 7, 11
INET_PEERS_PORT, _INET_V6ONLY = 8, 15
#: How an address of IPv6 begins that stands for one of IPv4.
_MAPPED = b"\0" * 10 + b"\xff" * 2
_TCP_LISTEN = 10
# message reg_file_entry
_REG_ID, _REG_FLAGS, _REG_NAME, _REG_SIZE, _REG_MODE = 1, 2, 6, 8, 10
# message tty_info_entry, and its type of pseudo-terminals
_TTY_TYPE, _TTY_UID, _TTY_GID = 2, 14, 15
_PTY = 1
# messages task_kobj_ids_entry, fdinfo_entry, file_lock_entry and remap_file_path_entry
_IDS_FILES = 2
_FDINFO_ID, FDINFO_FD = 1, 4
LOCK_FLAGS, LOCK_TYPE, LOCK_PID, _LOCK_FD, LOCK_START, LOCK_LENGTH = 1, 2, 3, 4, 5, 6
#: Kinds of locks in CRIU's file-lock.h.
FL_POSIX, FL_FLOCK, FL_OFD = 1, 2, 4
LOCKS = "filelocks.img"
_REMAP_ID, _REMAP_TO, _REMAP_TYPE = 1, 2, 3
_REMAP_LINKED, _REMAP_GHOST = 0, 1
# messages mm_entry and vma_entry; for a file's mapping shmid is the file's id, status says what kind of mapping it is
_MM_VMAS = 14
_VMA_FILE, _VMA_PROT, _VMA_FLAGS, _VMA_STATUS = 4, 5, 6, 7
_VMA_KEYS = tuple(bytes([number << 3]) for number in (_VMA_FILE, _VMA_PROT, _VMA_FLAGS, _VMA_STATUS))
#: The words of a message all fields of which are varints: keys and values in turns.
VARINTS = re.compile(rb"[\x80-\xff]*[\x00-\x7f]")
_VMA_OF_FILE = 1 << 6 | 1 << 7
#: The name that a dump with ``--link-remap`` gives to an open file whose own name was deleted (files-reg.c).
_LINK_NAME = re.compile(r"link_remap\.\d+")

#: include/uapi/linux/limits.h; a path counts with the byte at its end.
_NAME_MAX, _PATH_MAX = 255, 4096

Field = tuple[int, int, int | bytes]
DescriptorIds = dict[int, dict[int | None, int | None]]


@dataclass(frozen=True)
class RegularFile:
    """A regular file or directory that the kernel uses.

    ``size`` in bytes, None where a restore does not compare it: of directories, and of files that are only appended
    to.  ``mode`` as in ``stat(2)``.  ``open``: it has a descriptor; else it is mapped, or is the root or working
    directory.  ``writes``: the kernel may write to it; ``through_mapping``: by a shared mapping; ``code``: it is mapped
    as program code.  ``made``: the dump has given it this name, as its own had been deleted; a restore removes it.
    ``locked``: the kernel has locked it; ``posix_locks``: its POSIX locks, as `sqlite_wal.Lock`.
    """

    path: str
    size: int | None
    mode: int | None
    open: bool
    writes: bool = False
    through_mapping: bool = False
    code: bool = False
    made: bool = False
    locked: bool = False
    posix_locks: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class Port:
    """A TCP or UDP port a restore binds again.  ``type`` is that of ``socket(2)``."""

    family: int
    type: int
    address: str
    number: int


def regular_files(directory: Path) -> list[RegularFile]:
    """Return the files that the kernel of the dump in ``directory`` uses, ordered by path.

    Without those that are in the image or made anew: deleted files, devices, and /proc, of which every capsule has its
    own.  Raises `ImageFormat`.
    """
    opened, deleted, made = _opened(directory), set(), set()
    for remap in _remaps(directory):
        deleted.add(number_of(remap, _REMAP_ID))
        made.add(number_of(remap, _REMAP_TO) if _is_link(remap) else None)
    writes, code = _mapped(directory)
    locked, posix = _locks(directory)
    found = set()
    for fields in _regular(directory):
        id, path, mode = number_of(fields, _REG_ID), _name(fields), number_of(fields, _REG_MODE)
        if id in deleted or below_proc(path) or not (mode is None or stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            continue
        written = (number_of(fields, _REG_FLAGS) or 0) & os.O_ACCMODE != os.O_RDONLY or id in writes
        linked = id in made and is_made_name(path)
        size = number_of(fields, _REG_SIZE)
        uses = {"writes": written, "through_mapping": id in writes, "code": id in code}
        uses |= {"made": linked, "locked": id in locked}
        found.add(RegularFile(path, size, mode, id in opened, **uses, posix_locks=tuple(sorted(posix.get(id, ())))))
    return sorted(found, key=lambda file: (file.path, file.open, file.writes, file.code, file.posix_locks))


def named_pipes(directory: Path) -> list[str]:
    """Return the paths of the named pipes (FIFOs) that the kernel has open.  Raises `ImageFormat`."""
    deleted = {number_of(remap, _REMAP_ID) for remap in _remaps(directory)}
    pipes = (each for each in _regular(directory) if stat.S_ISFIFO(number_of(each, _REG_MODE) or 0))
    return sorted({_name(fields) for fields in pipes if number_of(fields, _REG_ID) not in deleted})


def ghost_names(directory: Path) -> list[str]:
    """Return the names that a restore gives to deleted files for a moment; none if the dump is unreadable.

    CRIU makes the file in the nearest directory above that exists, if its own does not (files-reg.c: create_ghost).
    """
    try:
        return [made for _, made in _ghosts(directory)]
    except ImageFormat:
        return []


def with_too_long_names(directory: Path) -> list[str]:
    """Return the deleted files that no restore could make, as their names of that moment would be too long.

    A directory needs no such name.  Raises `ImageFormat`.
    """
    found = []
    for fields, made in _ghosts(directory):
        path, _, name = os.fsencode(made).rpartition(b"/")
        too_long = len(name) > _NAME_MAX or len(path) + len(name) + 2 > _PATH_MAX
        if too_long and not stat.S_ISDIR(number_of(fields, _REG_MODE) or 0):
            found.append(_name(fields))
    return sorted(set(found))


def _ghosts(directory: Path) -> Iterator[tuple[list[Field], str]]:
    """Yield the deleted files in an image, and the names that a restore gives them.  Raises `ImageFormat`."""
    remaps = [remap for remap in _remaps(directory) if number_of(remap, _REMAP_TYPE) == _REMAP_GHOST]
    ids = {number_of(remap, _REMAP_ID): number_of(remap, _REMAP_TO) for remap in remaps}
    for fields in _regular(directory) if ids else ():
        id, name = ids.get(number_of(fields, _REG_ID)), _name(fields)
        if id is not None and name.startswith("/"):
            yield fields, f"{name}.cr.{id:x}.ghost"


def is_made_name(path: str) -> bool:
    """Return whether ``path`` has the form of a name that a dump makes."""
    return path.startswith("/") and bool(_LINK_NAME.fullmatch(os.path.basename(path)))


def unrestorable(directory: Path) -> list[str]:
    """Return the files below /proc that the kernel uses and CRIU cannot open on restore, ordered by path.

    Measured with CRIU 4.2.1, as root and as an ordinary user: an open file or directory of a process is restored, as
    the process exists when its files are opened.  Those of one of its threads are not: the threads are made last.  Nor
    is a working directory there, whose name CRIU does not even save completely.  Raises `ImageFormat`.
    """
    opened, found = _opened(directory), set()
    for fields in _regular(directory):
        path, mode = _name(fields), number_of(fields, _REG_MODE)
        if not below_proc(path):
            continue
        thread = re.match(r"/proc/(\d+)/task/(\d+)(/|$)", path)
        elsewhere = number_of(fields, _REG_ID) not in opened and mode is not None and stat.S_ISDIR(mode)
        if (thread and thread[1] != thread[2]) or (elsewhere and path.strip("/") != "proc"):
            # For a working directory /proc/PID CRIU also writes the bytes that follow it in memory.
            found.add(path if re.fullmatch(r"[\w./-]+", path, re.ASCII) else "/".join(path.split("/")[:3]))
    return sorted(found)


def below_proc(path: str) -> bool:
    """Return whether ``path`` lies in /proc, of which every capsule mounts its own."""
    return path == "/proc" or path.startswith("/proc/")


def _regular(directory: Path) -> Iterator[list[Field]]:
    yield from files_of_kind(directory, _ENTRY_REG)


def files_of_kind(directory: Path, wanted: int) -> list[list[Field]]:
    """Return the fields of the dump's files of one kind (`_ENTRY_REG`, `ENTRY_INET`, ...).  Raises `ImageFormat`.

    They are not to be changed: who asks next gets the same.
    """
    try:
        facts = (directory / FILES).stat()
    except OSError as error:
        raise _unreadable(FILES, error) from error
    return _files_by_kind(directory / FILES, facts.st_ino, facts.st_size, facts.st_mtime_ns).get(wanted, [])


@functools.lru_cache(maxsize=4)  # a checkpoint asks six times for one dump's
def _files_by_kind(path: Path, *_identity: int) -> dict[int, list[list[Field]]]:
    found: dict[int, list[list[Field]]] = {}
    for record in records(path, FILES_MAGIC):
        for number, _, value in fields_of(record):
            if isinstance(value, bytes):
                found.setdefault(number, []).append(fields_of(value))
    return found


def _unreadable(name: str, error: OSError) -> ImageFormat:
    return ImageFormat(f"CRIU's {name} cannot be read: {error.strerror}.")


def _opened(directory: Path) -> set[int | None]:
    """Return the ids of files that have descriptors."""
    return {number_of(fields, _FDINFO_ID) for fields in _descriptors(directory)}


def highest_descriptor(directory: Path) -> int:
    """Return the highest number of a descriptor in the kernel's processes.  Raises `ImageFormat`."""
    return max((number_of(each, FDINFO_FD) or 0 for each in _descriptors(directory)), default=0)


def _descriptors(directory: Path) -> Iterator[list[Field]]:
    for path in directory.glob("fdinfo-*.img"):
        yield from map(fields_of, records(path, FDINFO_MAGIC))


def descriptors_of(directory: Path, pid: int | str) -> Iterator[list[Field]]:
    """Yield the descriptors of a process: its record names the file that lists them, which processes may share."""
    for record in records(directory / f"ids-{pid}.img", _IDS_MAGIC):
        path = directory / f"fdinfo-{number_of(fields_of(record), _IDS_FILES)}.img"
        yield from map(fields_of, records(path, FDINFO_MAGIC) if path.exists() else ())  # there is none for none


def files_by_descriptor(directory: Path, pid: int | str) -> dict[int | None, int | None]:
    """Return the ids of the files that a process has open, by the numbers of their descriptors."""
    return {number_of(each, FDINFO_FD): number_of(each, _FDINFO_ID) for each in descriptors_of(directory, pid)}


def _locks(directory: Path) -> tuple[set[int | None], dict[int | None, set[tuple[int, int, int]]]]:
    """Return the ids of files with a lock, and POSIX locks (type, start, length) by the ids of their files."""
    path = directory / LOCKS
    locked: set[int | None] = set()
    posix: dict[int | None, set[tuple[int, int, int]]] = {}
    ids: DescriptorIds = {}
    for lock in map(fields_of, records(path, FILE_LOCKS_MAGIC) if path.exists() else ()):
        id = locked_file(directory, lock, ids)
        locked.add(id)
        if number_of(lock, LOCK_FLAGS) == FL_POSIX:
            kind, start, length = (number_of(lock, each) or 0 for each in (LOCK_TYPE, LOCK_START, LOCK_LENGTH))
            posix.setdefault(id, set()).add((kind, start, length))
    return locked, posix


def locked_file(directory: Path, lock: list[Field], known: DescriptorIds) -> int | None:
    """Return the id of the file that a lock is on; None if no descriptor of its process has it.

    ``known``: the ids of files by descriptor, of each process that was read before.
    """
    if (pid := number_of(lock, LOCK_PID) or 0) not in known:
        known[pid] = files_by_descriptor(directory, pid)
    return known[pid].get(number_of(lock, _LOCK_FD))


def name_of_file(directory: Path, id: int | None) -> str:
    """Return the path of the regular file with this id; of another file, "a file"."""
    return next((_name(fields) for fields in _regular(directory) if number_of(fields, _REG_ID) == id), "a file")


def _remaps(directory: Path) -> list[list[Field]]:
    path = directory / "remap-fpath.img"
    return [fields_of(record) for record in records(path, _REMAP_MAGIC)] if path.exists() else []


def _is_link(remap: list[Field]) -> bool:
    return (number_of(remap, _REMAP_TYPE) or 0) == _REMAP_LINKED


def _mapped(directory: Path) -> tuple[set[int | None], set[int | None]]:
    """Return the ids of files that are mapped shared and writable, and of those mapped as program code."""
    areas: set[tuple[bytes, ...]] = set()
    for path in directory.glob("mm-*.img"):
        for record in records(path, MM_MAGIC):
            for number, _, value in fields_of(record):
                if number == _MM_VMAS and isinstance(value, bytes):
                    # Thousands of them, all fields of which are varints: only different ones are decoded.
                    words = VARINTS.findall(value)
                    fields = dict(zip(words[::2], words[1::2], strict=False))
                    areas.add(tuple(fields.get(key, b"\0") for key in _VMA_KEYS))
    writes: set[int | None] = set()
    code: set[int | None] = set()
    for area in areas:
        id, protection, flags, status = (varint(word, 0)[0] for word in area)
        if status & _VMA_OF_FILE:
            if protection & mmap.PROT_EXEC:
                code.add(id)
            if protection & mmap.PROT_WRITE and flags & mmap.MAP_SHARED:
                writes.add(id)
    return writes, code


def ports(directory: Path) -> list[Port]:
    """Return the TCP ports that the kernel in ``directory`` listens on, and its UDP ports.  Raises `ImageFormat`."""
    found = set()
    for fields in files_of_kind(directory, ENTRY_INET):
        kind, number = number_of(fields, INET_TYPE), number_of(fields, INET_PORT)
        listens = number_of(fields, INET_STATE) == _TCP_LISTEN if kind == socket.SOCK_STREAM else bool(number)
        if listens and kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            family = number_of(fields, INET_FAMILY) or 0
            address = socket.inet_ntop(family, address_of(fields))
            found.add(Port(family, kind, address, number or 0))
    return sorted(found, key=lambda port: (port.number, port.type, port.address))


def view(directory: Path, target: Path, changed: Collection[str]) -> Path:
    """Make ``target`` a view of the dump in ``directory`` without the sizes and modes of the ``changed`` paths.

    Returns ``target``, whose links must be removed when the restore is over.  Raises `ImageFormat`, `OSError`.
    """
    target.mkdir(mode=0o700)
    for path in directory.iterdir():
        if path.name != FILES or not changed:
            (target / path.name).symlink_to(path)
    if not changed:
        return target
    rewritten = []
    for record in records(directory / FILES, FILES_MAGIC):
        fields = submessage(record, _ENTRY_REG)
        if fields and _name(fields) in changed:
            kept = b"".join(encode(field) for field in fields if field[0] not in (_REG_SIZE, _REG_MODE))
            record = b"".join(
                encode((number, kind, kept if number == _ENTRY_REG else value))
                for number, kind, value in fields_of(record)
            )
        rewritten.append(record)
    rewrite(target / FILES, FILES_MAGIC, rewritten)
    return target


def clear_device_owners(directory: Path) -> None:
    """Remove the owners of terminal devices from the fresh dump in ``directory``, so that a restore keeps them.

    CRIU gives every terminal the owner that it had.  Pseudo-terminals are made anew and need that; a device such as
    /dev/tty is the host's: an ordinary user may not change its owner, which has no number in a user namespace, and root
    should not.  Both fields are optional.  Raises `ImageFormat`, `OSError`.
    """
    path = directory / _TTY_INFO
    if not path.exists():
        return
    kept = []
    for record in records(path, _TTY_INFO_MAGIC):
        fields = fields_of(record)
        if number_of(fields, _TTY_TYPE) != _PTY:
            fields = [field for field in fields if field[0] not in (_TTY_UID, _TTY_GID)]
        kept.append(b"".join(map(encode, fields)))
    rewrite(path, _TTY_INFO_MAGIC, kept)


def clear_chosen_addresses(directory: Path) -> None:
    """Remove addresses that Linux has chosen for connected UDP sockets of IPv6 from the fresh dump in ``directory``.

    CRIU binds a socket to its address, which makes it V6ONLY (``inet6_bind`` in Linux): one that is not was bound to
    none, or to one of IPv4.  As it is connected to its peer again, it gets that address again.  Raises `ImageFormat`,
    `OSError`.
    """
    if not files_of_kind(directory, ENTRY_INET):
        return
    contents, changed = list(records(directory / FILES, FILES_MAGIC)), False
    for index, record in enumerate(contents):
        fields = submessage(record, ENTRY_INET)
        kind = number_of(fields, INET_FAMILY), number_of(fields, INET_TYPE)
        if kind != (socket.AF_INET6, socket.SOCK_DGRAM) or number_of(fields, _INET_V6ONLY) != 0:
            continue
        if number_of(fields, INET_PEERS_PORT) and not address_of(fields).startswith(_MAPPED):
            changed = True
            kept = b"".join(encode((*field[:2], 0) if field[0] == INET_ADDRESS else field) for field in fields)
            contents[index] = b"".join(
                encode((number, kind, kept if number == ENTRY_INET else value))
                for number, kind, value in fields_of(record)
            )
    if changed:
        rewrite(directory / FILES, FILES_MAGIC, contents)


def address_of(fields: list[Field], which: int = INET_ADDRESS) -> bytes:
    """Return the own address of a socket, or the one in another field: 4 or 16 bytes."""
    words = b"".join(struct.pack("<I", word) for word in _numbers(fields, which))
    length = 4 if number_of(fields, INET_FAMILY) == socket.AF_INET else 16
    return words.ljust(length, b"\0")[:length]


def rewrite(path: Path, magic: int, contents: Iterable[bytes]) -> None:
    """Write an image file of records; nobody but its owner may read it.  Raises `OSError`."""
    lengths_and_records = (struct.pack("<I", len(record)) + record for record in contents)
    write_atomically(path, struct.pack("<II", COMMON_MAGIC, magic) + b"".join(lengths_and_records), durable=False)


def _name(fields: list[Field]) -> str:
    names = (value for number, _, value in fields if number == _REG_NAME and isinstance(value, bytes))
    return os.fsdecode(next(names, b""))


def submessage(record: bytes, wanted: int) -> list[Field]:
    """Return the fields of one kind of file in a record of files.img; none for a file of another kind."""
    for number, _, value in fields_of(record):
        if number == wanted and isinstance(value, bytes):
            return fields_of(value)
    return []


def records(path: Path, magic: int) -> Iterator[bytes]:
    """Yield the records of one image file, whose kind is its second magic number.  Raises `ImageFormat`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path.name, error) from error
    if struct.unpack_from("<II", data.ljust(8, b"\0")) != (COMMON_MAGIC, magic):
        raise ImageFormat(f"CRIU's {path.name} is of a kind this release does not know.")
    at = 8
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        at += 4 + length
        if at > len(data):
            raise ImageFormat(f"CRIU's {path.name} ends in the middle.")
        yield data[at - length : at]


def fields_of(message: bytes) -> list[Field]:
    """Parse a protobuf message into (number, wire type, value), in its order; CRIU uses no groups."""
    found: list[Field] = []
    at = 0
    try:
        while at < len(message):
            key = message[at]
            key, at = (key, at + 1) if key < 0x80 else varint(message, at)
            number, kind = key >> 3, key & 7
            value: int | bytes
            if kind == _VARINT:
                value, at = varint(message, at)
            else:
                if kind == _BYTES:
                    length = message[at]
                    length, at = (length, at + 1) if length < 0x80 else varint(message, at)
                else:
                    length = {_FIXED64: 8, _FIXED32: 4}[kind]
                value, at = message[at : at + length], at + length
                if at > len(message):
                    raise IndexError("a field is longer than its message")
            found.append((number, kind, value))
    except (IndexError, KeyError) as error:
        raise ImageFormat("A record of CRIU's image is damaged.", reason=repr(error)) from error
    return found


def varint(data: bytes, at: int = 0) -> tuple[int, int]:
    """Parse a varint; return its value and the offset behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError("a number of more than 64 bits")


def encode(field: Field) -> bytes:
    """Encode a field as `fields_of` parses it."""
    number, kind, value = field
    key = _encode_varint(number << 3 | kind)
    if isinstance(value, int):
        return key + _encode_varint(value)
    return key + (_encode_varint(len(value)) if kind == _BYTES else b"") + value


def _encode_varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number_of(fields: list[Field], wanted: int) -> int | None:
    """Return the first value of the numeric field ``wanted``; None without one."""
    return next((value for number, _, value in fields if number == wanted and isinstance(value, int)), None)


def _numbers(fields: list[Field], wanted: int) -> list[int]:
    """A repeated field, packed or not."""
    found: list[int] = []
    for value in (value for number, _, value in fields if number == wanted):
        if isinstance(value, int):
            found.append(value)
        else:
            found += [varint(word)[0] for word in VARINTS.findall(value)]
    return found
