"""State in a dump that cannot exist twice at the same time, and the dump without it, for a branch of its kernel.

*Ports and names of sockets*: in a branch a TCP listener gets another, free port of the loopback address, a UDP socket
another port, and a unix socket another name, so that a client of the program finds the one that has them.  Its
threads continue waiting: a descriptor that was closed under them would be reported as ready for ever.  UDP sockets that
are connected with each other still are: by the other ports.

*Exclusive locks* (flock, open file descriptions, POSIX): the branch does not have them.

*Named pipes and named semaphores*: both kernels have the same.

*Connections to the outside* come back closed from any dump.

The image is never written to: a restore gets a view of it (`images.view`) with other records.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import images
from .images import Field, encode, fields_of, number_of, records, rewrite, submessage

# message file_entry, and of inet_sk_entry and unix_sk_entry what `images` does not read
_ENTRY_UNIX = 16
_INET_PEER = 12
_UNIX_INODE, _UNIX_NAME, _UNIX_DIRECTORY = 2, 11, 14
_CLOSED, _LISTENS = 7, 10
_VARINT, _BYTES = 0, 2
#: Where named semaphores are (sem_overview(7)).
_SEMAPHORES = "/dev/shm/sem."  # noqa: S108 - read, not written
_ONE_PIPE = "one for both kernels: each reads what the other writes, and what was in it is there twice"
_ONE_SEMAPHORE = "one for both kernels: a pool of processes that uses it hangs or breaks in each"
#: The abstract name under which CUDA's driver gives the descriptor of /dev/nvidia-uvm to processes that share memory
#: with this one (580.159.04): the PID namespace's inode and the PID.  A branch's may have any other, of the same form.
_DRIVER_SOCKET = re.compile(rb"\0cuda-uvmfd-\d+-\d+\0?")

#: Chooses a free port for a socket of this family, type and address.
ChoosePort = Callable[[int, int, str], int]


@dataclass(frozen=True)
class Exclusive:
    """State that a branch has otherwise, or not of its own.

    ``kind``: ``port``, ``socket``, ``lock``, ``connection``, ``pipe`` or ``semaphore``.

    ``port``, ``new_port``: of a port, its number and, in a restore, that of the branch.
    """

    kind: str
    what: str
    becomes: str
    port: int = 0
    new_port: int = 0

    def as_dict(self) -> dict[str, str]:
        """Return what a user reads, as JSON-serialisable data."""
        return {"kind": self.kind, "what": self.what, "becomes": self.becomes}


def find(directory: Path, own: Sequence[str], notes: Mapping[str, Any]) -> list[Exclusive]:
    """Return what the dump in ``directory`` has that cannot exist twice.  Raises `ImageFormat`.

    ``own``: beginnings of the paths of the kernel's own sockets, which each capsule has in a directory of its own.
    ``notes``: of the manifest.
    """
    _, found = _separated(directory, own, lambda *_: 0, "")
    return found + _exclusive_locks(directory, notes) + _of_both(directory)


def _of_both(directory: Path) -> list[Exclusive]:
    """Return what has a name and would be one for both kernels."""
    # One that has lost its name, as most of `multiprocessing`'s, is each kernel's own.
    written = {file.path for file in images.regular_files(directory) if file.writes and not file.made}
    semaphores = sorted(path for path in written if path.startswith(_SEMAPHORES))
    found = [Exclusive("pipe", f"named pipe {path}", _ONE_PIPE) for path in images.named_pipes(directory)]
    return found + [Exclusive("semaphore", f"named semaphore {path}", _ONE_SEMAPHORE) for path in semaphores]


def _exclusive_locks(directory: Path, notes: Mapping[str, Any]) -> list[Exclusive]:
    ids: set[int | None] = {id for _, id in _locks(directory) if id is not None}
    for pid, of_process in notes.items():
        if locks := _exclusive_posix(of_process):
            opened = images.files_by_descriptor(directory, pid)
            ids |= {opened.get(lock[0]) for lock in locks}
    names = {images.name_of_file(directory, id) for id in ids}
    return [Exclusive("lock", f"an exclusive lock on {name}", "not locked") for name in sorted(names)]


def separate(
    directory: Path, view: Path, own: Sequence[str], choose_port: ChoosePort, prefix: str, notes: Mapping[str, Any]
) -> list[Exclusive]:
    """Write records without exclusive state to ``view``, a view of the dump in ``directory``; return what they change.

    ``prefix``: of the new paths of unix sockets.  ``notes``: of the manifest.  Raises `ImageFormat`, `OSError`.
    """
    source = view if (view / images.FILES).exists() else directory
    contents, found = _separated(source, own, choose_port, prefix)
    _replace(view / images.FILES, images.FILES_MAGIC, contents)
    if (directory / images.LOCKS).exists():
        kept = [record for record, id in _locks(directory) if id is None]
        _replace(view / images.LOCKS, images.FILE_LOCKS_MAGIC, kept)
    return found + _exclusive_locks(directory, notes) + _of_both(directory)


def without_locks(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notes of processes without exclusive POSIX locks."""
    kept = {}
    for pid, of_process in notes.items():
        exclusive = _exclusive_posix(of_process)
        locks = [lock for lock in of_process.get("locks", ()) if lock not in exclusive]
        kept[pid] = {**of_process, "locks": locks} if exclusive else of_process
    return kept


def free_port(family: int, type: int, address: str) -> int:
    """Return a port that is free now at an address of this host.  Raises `OSError`."""
    with socket.socket(family, type) as trial:
        trial.bind((address, 0))
        return int(trial.getsockname()[1])


def _exclusive_posix(of_process: Mapping[str, Any]) -> list[Any]:
    return [lock for lock in of_process.get("locks", ()) if lock[1] != fcntl.F_RDLCK]


def _replace(path: Path, magic: int, contents: Iterable[bytes]) -> None:
    kept = list(contents)
    path.unlink(missing_ok=True)  # a link into the image
    rewrite(path, magic, kept)


def _locks(directory: Path) -> Iterator[tuple[bytes, int | None]]:
    """Yield each lock's record, and the id of its file if the lock is exclusive."""
    path, known = directory / images.LOCKS, images.DescriptorIds()
    for record in records(path, images.FILE_LOCKS_MAGIC) if path.exists() else ():
        fields = fields_of(record)
        exclusive = number_of(fields, images.LOCK_TYPE) == fcntl.F_WRLCK
        kind = (number_of(fields, images.LOCK_FLAGS) or 0) & (images.FL_FLOCK | images.FL_OFD | images.FL_POSIX)
        yield record, images.locked_file(directory, fields, known) if exclusive and kind else None


def _separated(
    directory: Path, own: Sequence[str], choose_port: ChoosePort, prefix: str
) -> tuple[list[bytes], list[Exclusive]]:
    contents = list(records(directory / images.FILES, images.FILES_MAGIC))
    inet = [fields for record in contents if (fields := submessage(record, images.ENTRY_INET))]
    ends, receivers = {_ends(fields) for fields in inet}, _receivers(inet)
    found: list[Exclusive] = []
    ports: dict[tuple[int, int, int], int] = {}
    for index, record in enumerate(contents):
        if fields := submessage(record, images.ENTRY_INET):
            changed = _internet_socket(fields, ends, receivers, choose_port, ports, found)
            number = images.ENTRY_INET
        elif fields := submessage(record, _ENTRY_UNIX):
            changed, number = _unix_socket(fields, own, prefix, found), _ENTRY_UNIX
        else:
            continue
        if changed is not None:
            kept = b"".join(map(encode, changed))
            contents[index] = b"".join(
                encode((each, kind, kept if each == number else value)) for each, kind, value in fields_of(record)
            )
    return contents, list(dict.fromkeys(found))


def _internet_socket(
    fields: list[Field],
    ends: set[tuple[Any, ...]],
    receivers: Collection[tuple[int, str, int]],
    choose_port: ChoosePort,
    ports: dict[tuple[int, int, int], int],
    found: list[Exclusive],
) -> list[Field] | None:
    """Return the fields of a socket that gets another port; None for one that needs none."""
    family, type, state, port = (
        number_of(fields, each) or 0
        for each in (images.INET_FAMILY, images.INET_TYPE, images.INET_STATE, images.INET_PORT)
    )
    own, peer = _ends(fields)
    is_tcp = type == socket.SOCK_STREAM
    if is_tcp and state not in (_CLOSED, _LISTENS):
        if (peer, own) not in ends:
            found.append(Exclusive("connection", f"a TCP connection to {_shown(*peer)}", "closed"))
        return None
    if not port or type not in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        return None
    address = own[0]
    if is_tcp:
        address = "::1" if family == socket.AF_INET6 else "127.0.0.1"

    def other(family: int, address: str, port: int) -> int:
        if (key := (family, type, port)) not in ports:  # several descriptors, or several sockets that share it
            ports[key] = choose_port(family, type, address)
        return ports[key]

    new_port = other(family, address, port)
    name = "TCP" if is_tcp else "UDP"
    becomes = f"{name} port {new_port}" if new_port else f"another {name} port"
    what = f"{name} port {_shown(own[0], port)}"
    found.append(Exclusive("port", what, f"{becomes} of {address}", port, new_port))
    packed = socket.inet_pton(family, address)
    words = [int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)]
    replaced = {images.INET_PORT: new_port}
    if not is_tcp and (receiver := _receiver(own[0], peer, receivers)):
        replaced[images.INET_PEERS_PORT] = other(*receiver)
    changed = [field for field in fields if field[0] not in (*replaced, images.INET_ADDRESS)]
    changed += [(number, _VARINT, value) for number, value in replaced.items()]
    return sorted([*changed, *((images.INET_ADDRESS, _VARINT, word) for word in words)], key=lambda field: field[0])


def _receivers(sockets: Iterable[list[Field]]) -> set[tuple[int, str, int]]:
    """Return family, address and port of UDP sockets."""
    udp = [fields for fields in sockets if number_of(fields, images.INET_TYPE) == socket.SOCK_DGRAM]
    found = {(number_of(fields, images.INET_FAMILY) or 0, *_ends(fields)[0]) for fields in udp}
    return {receiver for receiver in found if receiver[2]}


def _receiver(
    own: str, peer: tuple[str, int], receivers: Collection[tuple[int, str, int]]
) -> tuple[int, str, int] | None:
    """Return the one of ``receivers`` that a UDP socket with this address of its own is connected with, if any is."""
    address, port = peer
    is_here = address == own or ipaddress.ip_address(address).is_loopback
    everywhere = ("0.0.0.0", "::") if is_here else ()  # noqa: S104 - compared
    found = [each for each in receivers if each[2] == port and each[1] in (address, *everywhere)]
    return min(found, key=lambda each: (each[1] != address, each), default=None)


def _ends(fields: list[Field]) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return addresses and ports of both ends of a socket."""
    family = number_of(fields, images.INET_FAMILY) or socket.AF_INET
    addresses = (images.address_of(fields, each) for each in (images.INET_ADDRESS, _INET_PEER))
    own, peer = (_plain(socket.inet_ntop(family, address)) for address in addresses)
    return (own, number_of(fields, images.INET_PORT) or 0), (peer, number_of(fields, images.INET_PEERS_PORT) or 0)


def _plain(address: str) -> str:
    """Return an address of IPv4 in its own form, also where it is written as one of IPv6."""
    mapped = ipaddress.ip_address(address)
    inner = mapped.ipv4_mapped if isinstance(mapped, ipaddress.IPv6Address) else None
    return str(inner or address)


def _shown(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _unix_socket(fields: list[Field], own: Sequence[str], prefix: str, found: list[Exclusive]) -> list[Field] | None:
    """Return the fields of a socket that gets another name; None for one without a name, or the kernel's own.

    The driver's own socket gets another name of its kind unnoticed.
    """
    name = next((value for number, _, value in fields if number == _UNIX_NAME and isinstance(value, bytes)), b"")
    shown = os.fsdecode(name.strip(b"\0"))
    if not shown or shown.startswith(tuple(own)):
        return None
    is_driver_s = _DRIVER_SOCKET.fullmatch(name) is not None
    if not is_driver_s:
        found.append(Exclusive("socket", f"unix socket {'@' if name[:1] == bytes(1) else ''}{shown}", "another name"))
    ending = b"\0" if name.endswith(b"\0") else b""
    moved = os.fsencode(f"{prefix}{number_of(fields, _UNIX_INODE)}") + ending
    if is_driver_s:
        moved = b"\0cuda-uvmfd-%d-%d" % (secrets.randbits(31), secrets.randbits(31)) + ending
    kept = [field for field in fields if field[0] not in (_UNIX_NAME, _UNIX_DIRECTORY)]
    return sorted([*kept, (_UNIX_NAME, _BYTES, moved)], key=lambda field: field[0])
