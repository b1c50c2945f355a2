"""TCP connections between the processes of one tree: saved before a dump, and connected again after the restore.

CRIU keeps TCP connections by TCP_REPAIR, a right over the network namespace, which is the host's and not an ordinary
user's.  So both ends come back closed (``--tcp-close``), as connections to the outside do.  Both are the capsule's to
reach, however, and while all processes are stopped nobody sees them closed: the init connects the same two sockets
with each other again, at their old addresses, and writes what was not read yet into them anew.

Neither end listens, so they open the connection together: each sends the other a SYN (RFC 9293, 3.5, "simultaneous
connection synchronization").  The first SYN finds nobody who waits for it, and Linux answers with a reset.  That must
not end the first attempt: until the second end has sent its own, the first drops what comes with an ordinary time to
live (IP_MINTTL, IPV6_MINHOPCOUNT).

A process may have closed its end, or have ended, while the other end has not read everything: an answer of a web server
whose process is gone.  Nobody has that end then, so the init takes its part: it connects a socket of its own with the
restored one, writes what was unread, and closes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import sockets, syscalls
from jupyter_gpu_ckpt.process.unsavable import Unsavable

#: The file of the saved connections in a dump, beside CRIU's own files.
FILE = "connections.json"

#: Seconds until what was sent has arrived: Linux delays an acknowledgement by 0.2 s at most (TCP_DELACK_MAX).
_ARRIVAL_TIMEOUT = 0.5
#: Seconds to connect two ends, which takes no time, and to write what was not read.
_TIMEOUT = 5.0
#: Unread bytes of one direction: a new connection takes some 2.5 MB without a reader, where Linux is set as usual.
_MOST_UNREAD = 2 << 20
_MINIMUM_TTL = {socket.AF_INET: (socket.IPPROTO_IP, 21), socket.AF_INET6: (socket.IPPROTO_IPV6, 73)}
_MAPPED = "::ffff:"
#: The inode of a socket that no process has open, in ``/proc/net/tcp``; and states that have received an end.
_NOBODY, _RECEIVED_END = "0", {f"{state:02X}" for state in sockets.TCP_RECEIVED_END}
_UNSPECIFIED = struct.pack("=H14x", socket.AF_UNSPEC)
_SO_PEEK_OFF = 42
_LISTENS = "0A"
#: States of an end in ``/proc/net/tcp`` that its process has closed: it has sent its end (`sockets.TCP_SENT_END`), or
#: waits for late packets (TIME_WAIT).
_CLOSED = {"04", "05", "06", "09", "0B"}

Address = list[Any]
Change = Callable[[Address], Address]
#: The process that has a socket open, and its descriptor there.
Descriptor = tuple[int, int]
Saved = dict[str, Any]


class UnsavableConnection(Unsavable):
    """A connection of stopped processes cannot be saved; ``strerror`` names it and the reason."""

    field = "unsavable_connection"


def holders(pids: Iterable[int]) -> dict[str, Descriptor]:
    """Return the sockets that processes have open, by inode, without unix sockets; each by one of its descriptors.

    Where there are none, nobody need read ``/proc/net/tcp``, for which Linux goes through its whole table: 4.5 ms
    where it has 262,144 entries (Linux 6.18).  Of a process that has ended or may not be looked into there are none.
    """
    found: dict[str, Descriptor] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            own = {target[8:-1]: number for number, target in procfs.links(pid) if target.startswith("socket:[")}
            unix = {row[6] for row in procfs.sockets("unix", pid)} if own else set()
            found = {inode: (pid, number) for inode, number in own.items() if inode not in unix} | found
    return found


def pairs(descriptors: Iterable[Descriptor]) -> list[tuple[Descriptor, Descriptor]]:
    """Return the connections both of whose ends are among the sockets ``descriptors``."""
    found: dict[sockets.Ends, Descriptor] = {}
    for descriptor in descriptors:
        # Closed meanwhile, or not ours to reach.
        with contextlib.suppress(OSError), _socket(descriptor) as sock:
            if (ends := sockets.connection(sock)) is not None:
                found[ends] = descriptor
    return [(end, found[peer, own]) for (own, peer), end in found.items() if own < peer and (peer, own) in found]


class ClosedPeer(NamedTuple):
    """A socket whose other end nobody has open any more."""

    #: The other end's address as `sockets.Ends` has it; None where Linux does not know it any more.
    peer: tuple[str, int] | None
    #: Bytes that the other end still sends.
    unsent: int


def closed_by_peer(inodes: Container[str], rows: Iterable[Sequence[str]]) -> dict[str, ClosedPeer]:
    """Return those of the sockets ``inodes`` whose other end was closed on this host, by inode.

    ``rows``: of ``/proc/net/tcp`` and ``tcp6``, of the network namespace that the sockets are in.
    """
    ends = {(_end(row[1]), _end(row[2])): row for row in rows if row[3] != _LISTENS}
    found = {}
    for (own, peer), row in ends.items():
        if row[9] not in inodes or row[9] == _NOBODY or not _are_local(own, peer):
            continue
        other = ends.get((peer, own))
        if other is None:  # Linux forgets it after a minute
            if row[3] in _RECEIVED_END:
                found[row[9]] = ClosedPeer(peer, 0)
        elif other[9] == _NOBODY and other[3] in _CLOSED:
            found[row[9]] = ClosedPeer(peer, int(other[4].partition(":")[0], 16))
    return found


def _end(text: str) -> tuple[str, int]:
    """Return an address and its port from the form of ``/proc/net/tcp``: words in the machine's order of bytes."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(host), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words)).removeprefix(_MAPPED), int(port, 16)


def _are_local(own: tuple[str, int], peer: tuple[str, int]) -> bool:
    return own[0] == peer[0] or own[0] == "::1" or own[0].startswith("127.")


def _closed_by_peer(by_inode: Mapping[str, Descriptor]) -> dict[Descriptor, ClosedPeer]:
    """Return those of the sockets ``by_inode`` that have something to read, and whose other end nobody has open."""
    if not by_inode:
        return {}
    rows = _table()
    found = {by_inode[inode]: peer for inode, peer in closed_by_peer(by_inode, rows).items()}
    for inode in by_inode.keys() - {row[9] for row in rows}:  # one whose connection is over is in no table
        with contextlib.suppress(OSError), _socket(by_inode[inode]) as sock:
            if sockets.is_over(sock):
                found[by_inode[inode]] = ClosedPeer(None, 0)
    return {descriptor: peer for descriptor, peer in found.items() if peer.unsent or _readable(descriptor)}


def _readable(descriptor: Descriptor) -> int:
    with contextlib.suppress(OSError), _socket(descriptor) as sock:
        return syscalls.readable_bytes(sock.fileno())
    return 0


@contextlib.contextmanager
def _socket(descriptor: Sequence[int]) -> Iterator[socket.socket]:
    """The socket at a `Descriptor`, for as long as the body lasts: of hundreds, not all may be open at once."""
    pid, number = descriptor
    with syscalls.pidfd_of(pid) as pidfd, syscalls.socket_of(pidfd, number) as sock:
        yield sock


def abort_at_end(pids: Iterable[int]) -> None:
    """Let the connections among processes that are about to end leave nothing behind (SO_LINGER).  Never raises.

    Else one end of each lingers for a minute (TIME_WAIT, tcp(7)), and it cannot be made again meanwhile.
    """
    by_inode = holders(pids)
    ends = [descriptor for pair in pairs(by_inode.values()) for descriptor in pair]
    for descriptor in (*ends, *_closed_by_peer(by_inode)):
        with contextlib.suppress(OSError), _socket(descriptor) as sock:
            sockets.abort_at_end(sock)


# -- before a dump


class Drained:
    """Bytes that were read out of a connection, and who had sent them."""

    def __init__(self, sender: Descriptor, data: bytes) -> None:
        self.sender, self.data = sender, data

    def put_back(self) -> None:
        """Send them again.  Raises `OSError`; the connection is closed then."""
        with _socket(self.sender) as sock, _keeping_mode(sock):
            sock.setblocking(False)
            _send_or_close(sock, self.data)


class DrainedClosed:
    """A connection whose other end nobody has open, out of which all bytes were read: ``end`` as it was saved."""

    def __init__(self, end: Saved, listeners: list[Descriptor]) -> None:
        self.end, self.listeners = end, listeners
        self.sender: Descriptor = end["descriptor"]

    def put_back(self) -> None:
        """Connect the socket anew with one that sends the bytes and closes.  Raises `OSError`; it is closed then."""
        with contextlib.ExitStack() as stack:
            _share_ports(self.listeners, stack)
            stack.callback(self._forget_reuse)
            _restore_closed(self.end, _listening())

    def _forget_reuse(self) -> None:
        with contextlib.suppress(OSError), _socket(self.sender) as sock:
            _set_reuse(sock, self.end["reuse"])


def save(pids: Sequence[int], path: str) -> list[Drained | DrainedClosed]:
    """Write the connections among stopped processes to the file ``path``.  Raises `OSError`.

    Return what was read out of them: what has not even reached its reader, whose queue is full, is seen by nobody else.
    `put_back` undoes that.  Raises `UnsavableConnection` for a connection that could not come back as it is.
    """
    by_inode = holders(pids)
    connected, closed = pairs(by_inode.values()), _closed_by_peer(by_inode)
    if not connected and not closed:
        return []
    waiting, deadline = [descriptor for pair in connected for descriptor in pair], time.monotonic() + _ARRIVAL_TIMEOUT
    while (waiting := [descriptor for descriptor in waiting if _unsent(descriptor)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    drained: dict[Descriptor, Drained] = {}
    emptied: list[DrainedClosed] = []
    try:
        for pair in connected:
            for reader, sender in (pair, pair[::-1]):
                if sender in waiting:
                    _drain(reader, sender, drained)
        ends = [[_save_end(descriptor, drained.get(descriptor)) for descriptor in pair] for pair in connected]
        listeners = _listeners(by_inode)
        ended = [_save_closed(descriptor, peer, listeners, emptied) for descriptor, peer in closed.items()]
        with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            json.dump({"listeners": listeners, "connections": ends, "closed": ended}, file)
    except BaseException as error:
        if (lost := put_back([*drained.values(), *emptied])) and isinstance(error, OSError):
            error.strerror = f"{error.strerror}; closed: {lost}"
        raise
    return [*drained.values(), *emptied]


def put_back(drained: Iterable[Drained | DrainedClosed]) -> str:
    """Undo what `save` read.  Return what is lost, in words: rather no connection than one that lacks bytes."""
    lost = []
    for each in drained:
        try:
            each.put_back()
        except OSError as error:
            lost.append(f"{_shown(each.sender)} ({error.strerror})")
    return ", ".join(lost)


def _drain(reader: Descriptor, sender: Descriptor, drained: dict[Descriptor, Drained]) -> None:
    """Read all that is on the way from ``sender`` to ``reader``, and add it to ``drained`` as it comes."""
    with _socket(reader) as sock, _socket(sender) as source, _peeking_from_start(sock):
        if sockets.tcp_state(source) in sockets.TCP_SENT_END:
            why = "that was closed for writing while its reader leaves bytes unread"
            raise UnsavableConnection(errno.EBUSY, f"{_shown(sender)} {why}")
        _require_in_band(sock, reader)
        _require_few(syscalls.readable_bytes(sock.fileno()) + _unsent(sender), reader)
        found = drained[reader] = Drained(sender, b"")
        deadline = time.monotonic() + _TIMEOUT
        while _unsent(sender) or syscalls.readable_bytes(sock.fileno()):
            if time.monotonic() > deadline:
                raise UnsavableConnection(
                    errno.ETIMEDOUT, f"{_shown(sender)} with bytes on their way that do not arrive"
                )
            if _events(sock, select.POLLIN, 0.01):
                found.data += sock.recv(_MOST_UNREAD, socket.MSG_DONTWAIT)


def _unsent(descriptor: Descriptor) -> int:
    """Bytes that the other end has not acknowledged.  An end that was sent counts as a byte."""
    with _socket(descriptor) as sock:
        return syscalls.unsent_bytes(sock.fileno())


def _save_closed(
    descriptor: Descriptor, closed: ClosedPeer, listeners: list[Descriptor], emptied: list[DrainedClosed]
) -> Saved:
    """Return all that a new socket needs to become one whose other end nobody has.  It is added to ``emptied`` if its
    bytes had to be read out: the other end still sent some.
    """
    with _socket(descriptor) as sock:
        state = sockets.tcp_state(sock)  # before its bytes: none come after an end
        end = _save_end(descriptor, None)
        if closed.peer is not None:
            end["peer"] = list(sock.getpeername())
        else:  # any, on this host
            end["peer"] = _local(end["address"])
            end |= {"wrote_end": True, "reset": bool(_events(sock, select.POLLERR))}
        if not closed.unsent or state in sockets.TCP_RECEIVED_END:
            return end
        _require_few(_on_their_way(sock, closed), descriptor)
        end["unread"] = ""
        emptied.append(DrainedClosed(end, listeners))
        deadline = time.monotonic() + _TIMEOUT
        with _peeking_from_start(sock):
            while True:
                if _events(sock, select.POLLIN, 0.01):
                    data = sock.recv(_MOST_UNREAD, socket.MSG_DONTWAIT)
                    end["unread"] += data.decode("latin-1")
                    if not data:
                        return end
                if time.monotonic() > deadline:
                    why = "with bytes on their way that do not arrive"
                    raise UnsavableConnection(errno.ETIMEDOUT, f"{_shown(descriptor)} {why}")


def _on_their_way(sock: socket.socket, closed: ClosedPeer) -> int:
    """Bytes that a socket has not read and those that its closed end still sends.

    What has arrived and is not acknowledged yet counts as both, for a moment.
    """
    inode, deadline = str(os.fstat(sock.fileno()).st_ino), time.monotonic() + _ARRIVAL_TIMEOUT
    while (count := syscalls.readable_bytes(sock.fileno()) + closed.unsent) > _MOST_UNREAD:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
        closed = closed_by_peer({inode}, _table()).get(inode, ClosedPeer(closed.peer, 0))
    return count


def _listeners(by_inode: Mapping[str, Descriptor]) -> list[Descriptor]:
    """The listening TCP sockets among those ``by_inode``."""
    return [by_inode[row[9]] for row in _table() if row[3] == _LISTENS and row[9] in by_inode]


def _table() -> list[list[str]]:
    return [row for kind in ("tcp", "tcp6") for row in procfs.sockets(kind)]


def _save_end(descriptor: Descriptor, drained: Drained | None) -> Saved:
    """Return all that a new socket needs to become this one.  ``unread``: each byte is a character there."""
    with _socket(descriptor) as sock:
        if mode := sockets.special_mode(sock):
            raise UnsavableConnection(errno.ENOTSUP, f"{_shown(descriptor)} {mode}")
        state, no_more = sockets.tcp_state(sock), _events(sock, select.POLLRDHUP)
        unread = _unread(sock, descriptor) if drained is None else drained.data
        return {
            "descriptor": descriptor,
            "address": list(sock.getsockname()),
            "unread": unread.decode("latin-1"),
            "wrote_end": state in sockets.TCP_SENT_END,
            # Where the other end wrote its end, that is known from there.
            "reads_no_more": bool(no_more) and state not in sockets.TCP_RECEIVED_END,
            "reuse": [sock.getsockopt(socket.SOL_SOCKET, option) for option in sockets.REUSE],
            "options": sockets.options(sock, connected=True),
            "announced": sockets.announced(sock),
        }


def _unread(sock: socket.socket, descriptor: Descriptor) -> bytes:
    _require_in_band(sock, descriptor)
    length = syscalls.readable_bytes(sock.fileno())
    _require_few(length, descriptor)
    with _peeking_from_start(sock):
        unread = sock.recv(length, socket.MSG_PEEK | socket.MSG_DONTWAIT) if length else b""
    if len(unread) != length:
        raise UnsavableConnection(errno.EIO, f"{_shown(descriptor)} that shows {len(unread)} of {length} unread bytes")
    return unread


def _require_in_band(sock: socket.socket, descriptor: Descriptor) -> None:
    found = b""
    with contextlib.suppress(OSError):  # there are none
        found = sock.recv(1, socket.MSG_OOB | socket.MSG_PEEK | socket.MSG_DONTWAIT)
    if found:
        raise UnsavableConnection(errno.ENOTSUP, f"{_shown(descriptor)} with out-of-band data that is not read yet")


def _require_few(length: int, descriptor: Descriptor) -> None:
    if length > _MOST_UNREAD:
        why = f"with {length} unread bytes; {_MOST_UNREAD} can be saved"
        raise UnsavableConnection(errno.ENOBUFS, f"{_shown(descriptor)} {why}")


def _shown(descriptor: Descriptor) -> str:
    return f"a TCP connection of {procfs.described(descriptor[0])} (descriptor {descriptor[1]})"


# -- after a restore


def restore(path: str) -> str:
    """Connect the ends of the connections in the file ``path`` again, in restored and stopped processes.

    Return what is lost, in words: a connection that cannot be made again stays closed, and one may lack options.
    """
    try:
        with open(path) as file:
            # An older release saved no connections that one end had closed.
            saved = {"closed": [], **json.load(file)}
        _require_form(saved)
    except FileNotFoundError:
        return ""
    except (OSError, TypeError, ValueError) as error:
        return f"closed: all TCP connections among its processes ({FILE} cannot be read: {error})"
    lost: list[str] = []
    lacking: list[str] = []
    with contextlib.ExitStack() as stack:
        _share_ports(saved["listeners"], stack)
        listening = _listening()
        for pair in saved["connections"]:
            # The first SYN goes to a port on which nobody listens.
            first, second = sorted(pair, key=lambda end: end["address"][1] not in listening)
            try:
                lacking += _restore(first, second)
            except OSError as error:
                whose = f"process {first['descriptor'][0]} with process {second['descriptor'][0]}"
                lost.append(f"a TCP connection of {whose} ({error.strerror})")
                _close(pair)
        for end in saved["closed"]:
            try:
                lacking += _restore_closed(end, listening)
            except OSError as error:
                lost.append(f"{_shown(end['descriptor'])} ({error.strerror})")
                _close([end])
        for end in (end for each in (*saved["connections"], saved["closed"]) for end in each):
            with contextlib.suppress(OSError), _socket(end["descriptor"]) as sock:
                _set_reuse(sock, end["reuse"])
    return "; ".join([*([f"closed: {', '.join(lost)}"] if lost else []), *lacking])


def _require_form(saved: Saved) -> None:
    """Raise `ValueError` unless ``saved`` has what `save` writes: then nothing is done by half."""
    wanted = {"listeners", "connections", "closed"}
    if not saved.keys() >= wanted or not all(isinstance(saved[name], list) for name in wanted):
        raise ValueError("it lacks a list")
    fields = {"descriptor", "address", "unread", "wrote_end", "reads_no_more", "reuse", "options"}
    pairs_and_ends = [*saved["connections"], *([end] for end in saved["closed"])]
    for end in (end for each in pairs_and_ends for end in each):
        if not isinstance(end, dict) or not end.keys() >= fields:
            raise ValueError("an end of a connection lacks a field")
    if not all(len(pair) == 2 for pair in saved["connections"]) or not all("peer" in end for end in saved["closed"]):
        raise ValueError("an end of a connection is missing")


def _listening() -> set[int]:
    """The ports on which anybody listens."""
    return {_end(row[1])[1] for row in _table() if row[3] == _LISTENS}


def _close(pair: Sequence[Saved]) -> None:
    for end in pair:
        with contextlib.suppress(OSError), _socket(end["descriptor"]) as sock:
            sock.shutdown(socket.SHUT_RDWR)


def _share_ports(listeners: Iterable[Descriptor], stack: contextlib.ExitStack) -> None:
    """Let connections be bound to the ports of the listeners that can be reached, until the ``stack`` is closed."""
    for listener in listeners:
        with contextlib.suppress(OSError):  # a connection that needs its port may get another
            stack.enter_context(_sharing_port(listener))


@contextlib.contextmanager
def _sharing_port(listener: Descriptor) -> Iterator[None]:
    """Let connections be bound to the port of a listener, as those are that it accepts, while the body runs."""
    with _socket(listener) as sock:
        before = [sock.getsockopt(socket.SOL_SOCKET, option) for option in sockets.REUSE]
        _set_reuse(sock, [before[0], 1])
    try:
        yield
    finally:
        with contextlib.suppress(OSError), _socket(listener) as sock:  # its process has ended
            _set_reuse(sock, before)


def _set_reuse(sock: socket.socket, values: Sequence[int]) -> None:
    for option, value in zip(sockets.REUSE, values, strict=True):
        sock.setsockopt(socket.SOL_SOCKET, option, value)


def _restore(first: Saved, second: Saved) -> list[str]:
    """Connect two ends, up to `sockets.REUSE`: connections to the same port that are made later need these set.

    Return the options that cannot be set, in words.
    """
    with (
        _socket(first["descriptor"]) as one,
        _socket(second["descriptor"]) as other,
        _keeping_mode(one),
        _keeping_mode(other),
    ):
        for sock in (one, other):  # CRIU has shut it down
            _disconnect(sock)
        _connect((one, first, first["address"]), (other, second, second["address"]))
        for sock, end, peer in ((one, first, other), (other, second, one)):
            _send_or_close(peer, end["unread"].encode("latin-1"))
            if end["reads_no_more"]:
                sock.shutdown(socket.SHUT_RD)
        lacking = [*_set_options(one, first), *_set_options(other, second)]
        for sock, end in ((one, first), (other, second)):
            if end["wrote_end"]:
                sock.shutdown(socket.SHUT_WR)
        return lacking


def _restore_closed(end: Saved, listening: Container[int]) -> list[str]:
    """Connect a socket with one that sends what was unread and closes, up to `sockets.REUSE`.

    Return the options that cannot be set, in words.
    """
    with _socket(end["descriptor"]) as sock, socket.socket(sock.family) as peer, _keeping_mode(sock):
        _disconnect(sock)
        _set_reuse(sock, [1, 1])
        ends = [(sock, end, end["address"]), (peer, None, end["peer"])]
        # The first SYN goes to a port on which nobody listens.
        _connect(*sorted(ends, key=lambda each: each[2][1] not in listening))
        lacking = _set_options(sock, end)
        _send_or_close(peer, end["unread"].encode("latin-1"))
        if end["reads_no_more"]:
            sock.shutdown(socket.SHUT_RD)
        if end.get("reset") and _all_arrived(peer):
            sockets.abort_at_end(peer)
        else:
            peer.shutdown(socket.SHUT_WR)
            if end["wrote_end"]:
                sock.shutdown(socket.SHUT_WR)
        return lacking


def _set_options(sock: socket.socket, end: Saved) -> list[str]:
    return [f"{name} of {_shown(end['descriptor'])}" for name in sockets.reapply(sock, end["options"])]


def _all_arrived(sock: socket.socket) -> bool:
    deadline = time.monotonic() + _ARRIVAL_TIMEOUT
    while syscalls.unsent_bytes(sock.fileno()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _disconnect(sock: socket.socket) -> None:
    syscalls.check(syscalls.libc.connect(sock.fileno(), _UNSPECIFIED, len(_UNSPECIFIED)), "connect")


#: A socket that is to be connected, what it was if it is a restored one, and its address.
Unconnected = tuple[socket.socket, Saved | None, Address]


def _connect(first: Unconnected, second: Unconnected) -> None:
    """Connect two sockets at their addresses, if possible, as what they were."""
    (one, _, address), (other, _, other_address) = first, second
    addresses, usual = _available(one.family, address, other.family, other_address)
    with contextlib.ExitStack() as stack:
        for (sock, end, _), (_, peer, _), announced in zip((first, second), (second, first), usual, strict=True):
            if end is not None and "announced" in end:  # an older release did not save it
                received = peer["announced"]["sent"] if peer is not None else None
                stack.enter_context(sockets.announcing(sock, end["announced"], announced, end["options"], received))
        _join(one, other, addresses)


def _available(
    family: int, first: Address, other_family: int, second: Address
) -> tuple[tuple[Address, Address], list[dict[str, int]]]:
    """Return addresses at which two ends can be connected, and what each of them announces then (`sockets.announced`).

    They are their own, if possible.  Else another process has a port, an end of an earlier connection lingers there, or
    the address was another host's: then the port of the end that nobody listens for is another, or of both, or both
    addresses are.  They are tried with sockets that are thrown away: one that is bound is bound for good.
    """
    changes: list[tuple[Change, Change]] = [
        (_same, _same),
        (_same, _any_port),
        (_any_port, _same),
        (_any_port, _any_port),
        (_local, _local),
    ]
    for change, other_change in changes:
        addresses = change(first), other_change(second)
        with socket.socket(family) as one, socket.socket(other_family) as other:
            try:
                _join(one, other, addresses)
                return addresses, [sockets.announced(sock) for sock in (one, other)]
            except OSError as error:
                reason = error
            finally:
                for sock in (one, other):
                    sockets.abort_at_end(sock)
    raise reason


def _same(address: Address) -> Address:
    return address


def _any_port(address: Address) -> Address:
    return [address[0], 0, *address[2:]]


def _local(address: Address) -> Address:
    if address[0].startswith(_MAPPED):
        return [f"{_MAPPED}127.0.0.1", 0]
    return ["::1" if ":" in address[0] else "127.0.0.1", 0]


def _join(one: socket.socket, other: socket.socket, addresses: tuple[Address, Address]) -> None:
    """Connect two sockets with each other; they have their ``addresses`` then."""
    for sock, address in zip((one, other), addresses, strict=True):
        _set_reuse(sock, [1, 1])
        sock.setblocking(False)
        try:
            sock.bind(tuple(address))
        except OSError as error:
            if error.errno != errno.EINVAL:  # a program's own address stays bound
                raise
    level, option = _MINIMUM_TTL[socket.AF_INET if _is_4(one) else socket.AF_INET6]
    one.setsockopt(level, option, 255)
    _begin(one, other)
    one.setsockopt(level, option, 0)
    _begin(other, one)
    for sock in (one, other):
        if not _events(sock, select.POLLOUT, _TIMEOUT) or sockets.tcp_state(sock) != sockets.TCP_ESTABLISHED:
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or errno.ETIMEDOUT
            raise OSError(code, os.strerror(code))


def _is_4(sock: socket.socket) -> bool:
    return sock.family == socket.AF_INET or sock.getsockname()[0].startswith(_MAPPED)


def _begin(sock: socket.socket, other: socket.socket) -> None:
    """Send a SYN from ``sock`` to ``other``, in the form of address that the former's family has."""
    host, *rest = other.getsockname()
    if sock.family != other.family:
        host, rest = host.removeprefix(_MAPPED) if sock.family == socket.AF_INET else f"{_MAPPED}{host}", rest[:1]
    code = sock.connect_ex((host, *rest))
    if code not in (0, errno.EINPROGRESS):
        raise OSError(code, os.strerror(code))


def _send_or_close(sock: socket.socket, data: bytes) -> None:
    """Send the data through a socket that does not block; close the connection if it does not fit."""
    deadline, length = time.monotonic() + _TIMEOUT, len(data)
    while data:
        if not _events(sock, select.POLLOUT, deadline - time.monotonic()):
            sock.shutdown(socket.SHUT_RDWR)
            raise OSError(errno.ENOBUFS, f"{len(data)} of {length} unread bytes did not fit")
        data = data[sock.send(data) :]


@contextlib.contextmanager
def _keeping_mode(sock: socket.socket) -> Iterator[None]:
    """Restore whether the socket blocks, which is the process's, too, after the body."""
    before = os.get_blocking(sock.fileno())
    try:
        yield
    finally:
        os.set_blocking(sock.fileno(), before)


@contextlib.contextmanager
def _peeking_from_start(sock: socket.socket) -> Iterator[None]:
    """Let a peek see all that is unread, while the body runs, where the program has set SO_PEEK_OFF."""
    before = sock.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF)
    if before >= 0:
        sock.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, -1)
    try:
        yield
    finally:
        if before >= 0:
            sock.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, before)


def _events(sock: socket.socket, wanted: int, seconds: float = 0.0) -> int:
    poll = select.poll()
    poll.register(sock, wanted)
    return next((events & wanted for _, events in poll.poll(max(0.0, seconds) * 1000)), 0)
