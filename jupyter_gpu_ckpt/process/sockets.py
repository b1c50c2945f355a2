"""Options and queues of a kernel's sockets, and whether they survive a dump and a restore.

CRIU restores some options of a socket (``criu/sockets.c``, ``criu/sk-inet.c`` of release 4.2) and forgets the others
silently.  `options` reads those it forgets that differ from a new socket's; `reapply` sets them again.  A connection to
the outside comes back closed, so only sockets that listen, that are bound or that were never connected are inspected,
and connections within the tree (`connections`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import select
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import syscalls
from jupyter_gpu_ckpt.units import counted

_TCP_INFO = 11
#: States of TCP sockets (include/net/tcp_states.h).  Sent its end: FIN_WAIT1, FIN_WAIT2, LAST_ACK, CLOSING; received
#: the other's: CLOSE_WAIT, LAST_ACK, CLOSING.
TCP_ESTABLISHED, _TCP_CLOSE, _TCP_LISTEN = 1, 7, 10
TCP_SENT_END, TCP_RECEIVED_END = {4, 5, 9, 11}, {8, 9, 11}
#: Options about addresses that are in use already.
REUSE = socket.SO_REUSEADDR, socket.SO_REUSEPORT
_SO_PASSCRED = 16
#: Options by which each datagram that a unix socket receives has a time stamp, of its arrival.
_TIME_STAMPS = 29, 35, 63, 64
_MCAST_JOIN_GROUP, _MCAST_MSFILTER = 42, 48
_EXCLUDE = 0
_LONGEST = 256
#: ``struct group_filter`` without its sources: an interface's index, padding, a socket address, mode, count.
_FILTER = struct.Struct("=I4x128sII")
_ADDRESS_BYTES = 128


def _table(text: str) -> dict[str, int]:
    """Numbers of options by name, from words ``NAME NUMBER ...``."""
    words = text.split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


#: Options that CRIU forgets, by level: the numbers of ``include/uapi/{asm-generic/socket,linux/{in,in6,tcp,udp}}.h``.
#: In the order in which they are set: SO_TIMESTAMPING ends other kinds of time stamps, the last of which counts.
#: SO_RCVLOWAT is among them because CRIU sets the receive buffer first, of which it may then be no more than a half.
_SOCKET = _table("""
    SO_DEBUG 1  SO_NO_CHECK 11  SO_TIMESTAMPING 37  SO_TIMESTAMPING_NEW 65  SO_TIMESTAMP 29  SO_TIMESTAMPNS 35
    SO_TIMESTAMP_NEW 63  SO_TIMESTAMPNS_NEW 64  SO_RXQ_OVFL 40  SO_WIFI_STATUS 41  SO_PEEK_OFF 42  SO_NOFCS 43
    SO_LOCK_FILTER 44  SO_SELECT_ERR_QUEUE 45  SO_BUSY_POLL 46  SO_MAX_PACING_RATE 47  SO_INCOMING_CPU 49
    SO_ZEROCOPY 60  SO_TXTIME 61  SO_PREFER_BUSY_POLL 69  SO_TXREHASH 74  SO_RCVMARK 75  SO_PASSPIDFD 76
    SO_RCVPRIORITY 82  SO_PASSRIGHTS 83  SO_RCVLOWAT 18
""")
#: Options that CRIU restores of sockets of TCP and UDP only.
_NOT_OF_IP = _table("SO_REUSEADDR 2")
_NETLINK = _table("""
    NETLINK_PKTINFO 3  NETLINK_BROADCAST_ERROR 4  NETLINK_NO_ENOBUFS 5  NETLINK_LISTEN_ALL_NSID 8  NETLINK_CAP_ACK 10
    NETLINK_EXT_ACK 11  NETLINK_GET_STRICT_CHK 12
""")
_TCP = _table("""
    TCP_MAXSEG 2  TCP_SYNCNT 7  TCP_LINGER2 8  TCP_DEFER_ACCEPT 9  TCP_WINDOW_CLAMP 10  TCP_CONGESTION 13
    TCP_THIN_LINEAR_TIMEOUTS 16  TCP_USER_TIMEOUT 18  TCP_FASTOPEN 23  TCP_NOTSENT_LOWAT 25  TCP_SAVE_SYN 27
    TCP_FASTOPEN_CONNECT 30  TCP_FASTOPEN_KEY 33  TCP_FASTOPEN_NO_COOKIE 34  TCP_INQ 36  TCP_TX_DELAY 37
    TCP_RTO_MAX_MS 44  TCP_RTO_MIN_US 45  TCP_DELACK_MAX_US 46  TCP_QUICKACK 12
""")
_UDP = _table("""
    UDP_ENCAP 100  UDP_NO_CHECK6_TX 101  UDP_NO_CHECK6_RX 102  UDP_SEGMENT 103  UDP_GRO 104
""")
_UDP_LITE = _UDP | _table("UDPLITE_SEND_CSCOV 10  UDPLITE_RECV_CSCOV 11")
_IP = _table("""
    IP_OPTIONS 4  IP_RECVOPTS 6  IP_RETOPTS 7  IP_MTU_DISCOVER 10  IP_RECVERR 11  IP_RECVTTL 12  IP_RECVTOS 13
    IP_PASSSEC 18  IP_TRANSPARENT 19  IP_RECVORIGDSTADDR 20  IP_MINTTL 21  IP_CHECKSUM 23  IP_BIND_ADDRESS_NO_PORT 24
    IP_RECVFRAGSIZE 25  IP_RECVERR_RFC4884 26  IP_MULTICAST_IF 32  IP_MULTICAST_TTL 33  IP_MULTICAST_LOOP 34
    IP_MULTICAST_ALL 49  IP_UNICAST_IF 50  IP_LOCAL_PORT_RANGE 51
""")
#: Options of IPv4 that CRIU restores of sockets of IPv4 only.
_IP_OF_IPV6 = _table("IP_TOS 1  IP_TTL 2  IP_PKTINFO 8")
_IPV6 = _table("""
    IPV6_2292PKTINFO 2  IPV6_2292HOPOPTS 3  IPV6_2292DSTOPTS 4  IPV6_2292RTHDR 5  IPV6_2292HOPLIMIT 8
    IPV6_FLOWINFO 11  IPV6_UNICAST_HOPS 16  IPV6_MULTICAST_IF 17  IPV6_MULTICAST_HOPS 18  IPV6_MULTICAST_LOOP 19
    IPV6_MTU_DISCOVER 23  IPV6_RECVERR 25  IPV6_MULTICAST_ALL 29  IPV6_ROUTER_ALERT_ISOLATE 30
    IPV6_RECVERR_RFC4884 31  IPV6_FLOWINFO_SEND 33  IPV6_RECVPKTINFO 49  IPV6_RECVHOPLIMIT 51  IPV6_RECVHOPOPTS 53
    IPV6_HOPOPTS 54  IPV6_RTHDRDSTOPTS 55  IPV6_RECVRTHDR 56  IPV6_RTHDR 57  IPV6_RECVDSTOPTS 58  IPV6_DSTOPTS 59
    IPV6_RECVPATHMTU 60  IPV6_DONTFRAG 62  IPV6_RECVTCLASS 66  IPV6_TCLASS 67  IPV6_AUTOFLOWLABEL 70
    IPV6_ADDR_PREFERENCES 72  IPV6_MINHOPCOUNT 73  IPV6_RECVORIGDSTADDR 74  IPV6_TRANSPARENT 75  IPV6_UNICAST_IF 76
    IPV6_RECVFRAGSIZE 77  IPV6_FREEBIND 78
""")
#: Options that Linux itself sets, of a connection: numbers of this connection, which a new one has its own of.
_OF_CONNECTION = frozenset(
    {"SO_INCOMING_CPU", "TCP_MAXSEG", "IP_MULTICAST_TTL", "IPV6_MULTICAST_IF", "IPV6_MULTICAST_HOPS"}
)
_TCP_REPAIR, _TCP_ULP, _UDP_CORK = 19, 31, 1
_SO_RCVBUFFORCE, _SO_BINDTOIFINDEX, _SO_BUF_LOCK, _LOCKS_RECEIVING = 33, 62, 72, 2
#: Options that a connection keeps, but that can be set before it only, or that it begins with: buffers depend on the
#: latter.
_BEFORE_CONNECTING = "TCP_FASTOPEN", "TCP_FASTOPEN_NO_COOKIE", "TCP_CONGESTION"
_TIMESTAMP_BYTES = 12
#: Seconds until a network device has sent a datagram.
_DEPARTURE_TIMEOUT = 0.05
#: The largest TCP_MAXSEG, and the largest window without a scale.
_LARGEST_SEGMENT, _LARGEST_WINDOW = 32767, 65535
AF_UNIX, SOCK_DGRAM = socket.AF_UNIX, socket.SOCK_DGRAM
_INET = (socket.AF_INET, socket.AF_INET6)
#: Kinds of sockets that come back: family, type, protocol.
_UNIX = {(socket.AF_UNIX, kind, 0) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET)}
_IP_TYPES = (socket.SOCK_STREAM, 6), (socket.SOCK_DGRAM, 17), (socket.SOCK_DGRAM, 136)
_IP_KINDS = {(family, kind, protocol) for family in _INET for kind, protocol in _IP_TYPES}
_NETLINK_ROUTE, _NETLINK_UEVENT, _SOL_NETLINK = 0, 15, 270
_NETLINK_KINDS = {
    (socket.AF_NETLINK, kind, protocol)
    for kind in (socket.SOCK_RAW, socket.SOCK_DGRAM)
    for protocol in (_NETLINK_ROUTE, _NETLINK_UEVENT)
}
_FAMILIES = {
    17: "a packet socket",
    38: "a socket of the kernel's cryptography (AF_ALG)",
    40: "a socket to the virtual machine's host (AF_VSOCK)",
    31: "a Bluetooth socket",
    44: "an AF_XDP socket",
    29: "a CAN bus socket",
}
_NETLINK_PROTOCOLS = {
    4: "NETLINK_SOCK_DIAG",
    6: "NETLINK_XFRM",
    9: "NETLINK_AUDIT",
    11: "NETLINK_CONNECTOR",
    12: "NETLINK_NETFILTER",
    16: "NETLINK_GENERIC",
    21: "NETLINK_CRYPTO",
}
_PROTOCOLS = {1: "an ICMP (ping) socket", 58: "an ICMP (ping) socket", 132: "an SCTP socket", 262: "an MPTCP socket"}

#: Sockets, by inode, in which an empty message was found: `_has_empty_message` finds each but once.
_with_empty_message: set[int] = set()

#: Addresses and ports of both ends of a TCP connection, a socket's own first.
Ends = tuple[tuple[str, int], tuple[str, int]]

#: Options of new sockets, by kind.
_defaults: dict[tuple[int, int, int], dict[str, str]] = {}


def _kind_of(sock: socket.socket) -> tuple[int, int, int]:
    return int(sock.family), int(sock.type), int(sock.proto)


def refusal(sock: socket.socket, descriptors: int) -> str:
    """Why a socket with so many ``descriptors`` queued in it cannot come back, as a noun phrase; empty if it can."""
    family, kind, protocol = _kind_of(sock)
    if device := _lost_device(sock):
        return f"a socket that is bound to a network device (number {device}) that is not there any more"
    if family == socket.AF_UNIX:
        return _unix_refusal(sock, descriptors) if (family, kind, protocol) in _UNIX else "a unix socket of a new type"
    if (family, kind, protocol) in _IP_KINDS:
        return _tcp_refusal(sock) if kind == socket.SOCK_STREAM else _udp_refusal(sock)
    if (family, kind, protocol) in _NETLINK_KINDS:
        return "a message of Linux in a netlink socket that is not received yet" if _waiting(sock) else ""
    if family == socket.AF_NETLINK:
        name = _NETLINK_PROTOCOLS.get(protocol, f"protocol {protocol}")
        return f"a netlink socket to Linux itself ({name}; NETLINK_ROUTE and NETLINK_KOBJECT_UEVENT would come back)"
    if family in _INET and kind == socket.SOCK_RAW:
        return "a raw socket (ping)"
    if family in _INET:
        return _PROTOCOLS.get(protocol, f"a socket of protocol {protocol}")
    return _FAMILIES.get(family, f"a socket of family {family}, protocol {protocol}")


def _lost_device(sock: socket.socket) -> int:
    """Return the number of the network device a socket is bound to, if it has gone: CRIU asks for its name."""
    with contextlib.suppress(OSError):  # before Linux 5.0
        if number := sock.getsockopt(socket.SOL_SOCKET, _SO_BINDTOIFINDEX):
            try:
                socket.if_indextoname(number)
            except OSError:
                return number
    return 0


def _tcp_refusal(sock: socket.socket) -> str:
    state, waiting = _tcp(sock)
    if state == _TCP_LISTEN and waiting:
        return f"{counted(waiting, 'connection')} to port {sock.getsockname()[1]}, not accepted yet"
    if state == _TCP_CLOSE and (mode := special_mode(sock)):
        return f"a TCP socket {mode}"
    return ""


def special_mode(sock: socket.socket) -> str:
    """Return the mode of a TCP socket in which it cannot come back, in words; empty if it is in none."""
    if sock.getsockopt(socket.IPPROTO_TCP, _TCP_REPAIR):
        return "under repair (TCP_REPAIR)"
    with contextlib.suppress(OSError):  # before Linux 4.13
        if layer := sock.getsockopt(socket.IPPROTO_TCP, _TCP_ULP, _LONGEST).rstrip(b"\0").decode(errors="replace"):
            return f"with another protocol of Linux above it (TCP_ULP {layer})"
    return ""


def _udp_refusal(sock: socket.socket) -> str:
    if _waiting(sock):
        return "a datagram in a UDP socket that is not received yet"
    if sock.getsockopt(sock.proto, _UDP_CORK):
        return "a UDP socket that collects a datagram (UDP_CORK)"
    # With MSG_MORE nothing but its memory shows such a datagram.  Others leave within that time.
    deadline = time.monotonic() + _DEPARTURE_TIMEOUT
    while syscalls.unsent_bytes(sock.fileno()):
        if time.monotonic() > deadline:
            return "a datagram in a UDP socket that is not sent yet (MSG_MORE)"
        time.sleep(0.002)
    return ""


def connection(sock: socket.socket) -> Ends | None:
    """Return the addresses and ports of an established TCP connection, its own first; None for any other socket."""
    family, kind, _ = _kind_of(sock)
    if family not in _INET or kind != socket.SOCK_STREAM:
        return None
    try:
        ends = sock.getsockname(), sock.getpeername()
    except OSError:  # it is not connected
        return None
    own, peer = ((str(address).removeprefix("::ffff:"), int(port)) for address, port, *_ in ends)
    return own, peer


def _unix_refusal(sock: socket.socket, descriptors: int) -> str:
    if descriptors:
        return f"{counted(descriptors, 'descriptor')} sent through a unix socket (SCM_RIGHTS) and not received yet"
    if _listens(sock):
        return "connections to a unix socket that are not accepted yet" if _waiting(sock) else ""
    if sock.getsockopt(socket.SOL_SOCKET, _SO_PASSCRED) and _waiting(sock) and _has_data(sock):
        return "credentials sent through a unix socket (SCM_CREDENTIALS) and not received yet"
    if sock.type == socket.SOCK_STREAM:
        with contextlib.suppress(OSError):  # of out-of-band data SO_PEEK_OFF is not moved
            if sock.recv(1, socket.MSG_OOB | socket.MSG_PEEK | socket.MSG_DONTWAIT):
                return "out-of-band data in a unix socket"
    elif _has_empty_message(sock):
        return "an empty message in a unix socket that is not received yet"
    elif _waiting(sock) and any(sock.getsockopt(socket.SOL_SOCKET, option) for option in _TIME_STAMPS):
        return "a message with a time stamp (SO_TIMESTAMP) in a unix socket that is not received yet"
    elif sock.type == socket.SOCK_DGRAM and (sender := _named_sender(sock)):
        return f"a message in a unix socket that is not received yet, from a socket with a name ({sender})"
    return ""


def _listens(sock: socket.socket) -> bool:
    return sock.type != socket.SOCK_DGRAM and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _waiting(sock: socket.socket) -> bool:
    """Return whether data or a connection waits to be received or accepted; removes nothing."""
    return bool(_events(sock) & select.POLLIN)


def _has_data(sock: socket.socket) -> bool:
    """Return whether there are bytes to be received; assumed where SO_PEEK_OFF is set: a peek would move its offset."""
    with contextlib.suppress(OSError):
        peeks_move = sock.getsockopt(socket.SOL_SOCKET, _SOCKET["SO_PEEK_OFF"]) >= 0
        return peeks_move or bool(sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return False


def _has_empty_message(sock: socket.socket) -> bool:
    """Return whether an empty message is queued in a unix socket of messages: CRIU takes it for the end of the queue.

    With ``SO_PEEK_OFF`` Linux shows one message after the other, but an empty one to the first peek only
    (``net/core/datagram.c: __skb_try_recv_from_queue``), not to CRIU's: such sockets are remembered until the queue is
    empty.
    """
    inode = os.fstat(sock.fileno()).st_ino
    events = _events(sock)
    # Behind the last message, the end of a connection reads like an empty one.
    ends = sock.type == socket.SOCK_SEQPACKET and bool(events & select.POLLRDHUP)
    if not events & select.POLLIN or (ends and not syscalls.readable_bytes(sock.fileno())):
        _with_empty_message.discard(inode)
        return False
    if inode in _with_empty_message:
        return True
    if events & select.POLLERR:  # receiving anything would take the error away from the program
        return False
    with _peeking(sock):
        found = _peeks_empty(sock, ends=ends)
    if found:
        _with_empty_message.add(inode)
    return found


@contextlib.contextmanager
def _peeking(sock: socket.socket) -> Iterator[None]:
    """Have each peek in the body show the next bytes, from the first that is queued on."""
    before = sock.getsockopt(socket.SOL_SOCKET, _SOCKET["SO_PEEK_OFF"])
    sock.setsockopt(socket.SOL_SOCKET, _SOCKET["SO_PEEK_OFF"], 0)
    try:
        yield
    finally:
        sock.setsockopt(socket.SOL_SOCKET, _SOCKET["SO_PEEK_OFF"], before)


def _named_sender(sock: socket.socket) -> str:
    """Return the name of a sender of a queued datagram, to which its reader may answer; empty if none has one.

    CRIU sends what is queued anew, from a socket without a name.
    """
    events = _events(sock)
    if not events & select.POLLIN or events & select.POLLERR:  # as `_has_empty_message`
        return ""
    with _peeking(sock):
        while True:
            try:
                _, sender = sock.recvfrom(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except OSError:  # there is no more
                return ""
            if isinstance(sender, bytes) and sender:  # of no file
                return sender.replace(b"\0", b"@", 1).decode(errors="replace")
            if sender:
                return str(sender)


def _peeks_empty(sock: socket.socket, *, ends: bool) -> bool:
    """Return whether a peek finds an empty message.  ``ends``: peeks beyond the last message find the end."""
    empty = False
    while True:
        try:
            message = sock.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:  # there is no more
            return False
        if not message and not ends:
            return True
        if empty:
            return bool(message)
        empty = not message


def _events(sock: socket.socket) -> int:
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLRDHUP)
    return next((events for _, events in poll.poll(0)), 0)


def _tcp(sock: socket.socket) -> tuple[int, int]:
    """State, and of a listening socket the connections that wait to be accepted (``tcpi_unacked``)."""
    info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 104)
    return info[0], struct.unpack_from("=I", info, 24)[0]


def _was_connected(sock: socket.socket) -> bool:
    """Return whether a TCP socket ever received anything (``tcpi_segs_in``): Linux has set options of it then."""
    info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 144)
    return len(info) == 144 and struct.unpack_from("=I", info, 140)[0] > 0


def tcp_state(sock: socket.socket) -> int:
    """Return the state of a TCP socket."""
    return _tcp(sock)[0]


def is_over(sock: socket.socket) -> bool:
    """Return whether a TCP connection is closed at both ends, or reset, and has bytes that are not read yet."""
    family, kind, _ = _kind_of(sock)
    if family not in _INET or kind != socket.SOCK_STREAM or tcp_state(sock) != _TCP_CLOSE:
        return False
    return syscalls.readable_bytes(sock.fileno()) > 0


def abort_at_end(sock: socket.socket) -> None:
    """Let the end of the socket's last process reset its connection, of which nothing lingers then (SO_LINGER)."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 0))


def is_found_by_path(sock: socket.socket) -> bool:
    """Return whether others reach the unix socket by its path; an accepted connection has that of its listener."""
    return sock.type == socket.SOCK_DGRAM or _listens(sock)


def bound_path(sock: socket.socket) -> str:
    """The path a unix socket is bound to; empty without one, and for a name that is not in the file system."""
    name = sock.getsockname()
    name = os.fsdecode(name) if isinstance(name, bytes) else name
    return "" if name.startswith("\0") else name


def options(sock: socket.socket, *, connected: bool = False) -> dict[str, str]:
    """Options that CRIU forgets and that are not a new socket's own, by name, as bytes in hex.

    ``connected``: also of a TCP connection, which else comes back closed.
    """
    kind = _kind_of(sock)
    if kind not in _UNIX | _IP_KINDS | _NETLINK_KINDS:
        return {}
    is_tcp = kind[0] in _INET and kind[1] == socket.SOCK_STREAM
    if is_tcp and not connected and _tcp(sock)[0] not in (_TCP_CLOSE, _TCP_LISTEN):
        return {}
    if kind not in _defaults:
        with socket.socket(*kind) as new:
            _defaults[kind] = _read(new)
    own = _OF_CONNECTION if connected or (is_tcp and _was_connected(sock)) else ()
    return {
        name: value for name, value in _read(sock).items() if value != _defaults[kind].get(name) and name not in own
    }


def _tables(kind: tuple[int, int, int]) -> Iterator[tuple[int, dict[str, int]]]:
    family, _, protocol = kind
    yield socket.SOL_SOCKET, _SOCKET
    if family not in _INET:
        yield socket.SOL_SOCKET, _NOT_OF_IP
    if family == socket.AF_NETLINK:
        yield _SOL_NETLINK, _NETLINK
    if family in _INET:
        yield socket.IPPROTO_IP, _IP
        if family == socket.AF_INET6:
            yield socket.IPPROTO_IP, _IP_OF_IPV6
            yield socket.IPPROTO_IPV6, _IPV6
        yield protocol, {socket.IPPROTO_TCP: _TCP, socket.IPPROTO_UDPLITE: _UDP_LITE}.get(protocol, _UDP)


def _read(sock: socket.socket) -> dict[str, str]:
    tables = _tables(_kind_of(sock))
    found = {name: _value(sock, level, number) for level, table in tables for name, number in table.items()}
    return {name: value for name, value in found.items() if value is not None}


def _value(sock: socket.socket, level: int, number: int) -> str | None:
    """An option's value in hex; None if this kind of socket, or this Linux, does not have it."""
    with contextlib.suppress(OSError):
        return sock.getsockopt(level, number, _LONGEST).hex()
    return None


def reapply(sock: socket.socket, wanted: dict[str, str]) -> list[str]:
    """Set the options that differ from ``wanted``.  Return the names of those that cannot be set."""
    failed = []
    for level, table in _tables(_kind_of(sock)):
        for name in (each for each in table if each in wanted):
            # Some options change others: IP_OPTIONS makes segments smaller.
            if _value(sock, level, table[name]) != wanted[name]:
                try:
                    _set(sock, level, name, table[name], wanted[name])
                except OSError:
                    failed.append(name)
    return failed


def _set(sock: socket.socket, level: int, name: str, number: int, value: str) -> None:
    """Set an option to a ``value`` of `_value`.  Raises `OSError`."""
    data = bytes.fromhex(value)
    if name == "SO_RCVLOWAT" and sock.type == socket.SOCK_STREAM and sock.family in _INET:
        with _unlocked_receive_buffer(sock):
            sock.setsockopt(level, number, data)
        return
    priority = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)
    sock.setsockopt(level, number, data.rstrip(b"\0") if name == "TCP_CONGESTION" else data)
    if name == "IP_TOS":  # Linux derives a priority from it, and the program may have set another one since
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)


@contextlib.contextmanager
def _unlocked_receive_buffer(sock: socket.socket) -> Iterator[None]:
    """Let the body have any receive buffer; it is then as before, also whether the program has set it."""
    size = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    lock = sock.getsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK)
    sock.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, lock & ~_LOCKS_RECEIVING)
    try:
        yield
    finally:
        _set_receive_buffer(sock, size)
        sock.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, lock)


# -- what the two ends of a TCP connection say of themselves as they connect


def announced(sock: socket.socket) -> dict[str, int]:
    """Return what an end of a TCP connection has announced: its largest segment, and the scale of its window.

    Options that were set before the socket was connected limit them: TCP_MAXSEG and TCP_WINDOW_CLAMP.  The latter
    remains to be read, the former is the size of segments that are sent on a connection: ``sent``.
    """
    info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 104)
    has_timestamps = info[5] & 1  # Linux has subtracted their bytes once both ends know
    segment = struct.unpack_from("=I", info, 84)[0] + (_TIMESTAMP_BYTES if has_timestamps else 0)
    sent = sock.getsockopt(socket.IPPROTO_TCP, _TCP["TCP_MAXSEG"])
    return {"segment": segment, "scale": info[6] >> 4, "sent": sent}


@contextlib.contextmanager
def announcing(
    sock: socket.socket,
    wanted: dict[str, int],
    usual: dict[str, int],
    options: dict[str, str],
    received: int | None,
) -> Iterator[None]:
    """Let a socket announce what `announced` returned, when the body connects it.  Raises `OSError`.

    ``usual``: what a socket without options announces here.  ``options``: those of the connection.  ``received``: bytes
    of the segments that the other end sent, if that is known.
    """
    _announce(sock, wanted, usual, options)
    with socket.socket(sock.family) as new:
        usual_size = new.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    size, lock = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF), _LOCKS_RECEIVING
    with contextlib.suppress(OSError):  # before Linux 5.14 a buffer that was set is locked
        lock = sock.getsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK)
    # Else SO_RCVBUF limits the window for good, although the program has set it later.  Of one that is not locked the
    # scale does not show when it was set, but the segments of the other end do: they are half the largest window.
    is_later = size < usual_size and wanted["scale"] >= usual["scale"]
    if is_later and received is not None and not lock & _LOCKS_RECEIVING:
        is_later = not received <= size // 2 < wanted["segment"] - _TIMESTAMP_BYTES
    with contextlib.suppress(OSError):
        if is_later:
            _set_receive_buffer(sock, usual_size)
            sock.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, lock & ~_LOCKS_RECEIVING)
    try:
        yield
    finally:
        if is_later:
            _set_receive_buffer(sock, size)
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, _SO_BUF_LOCK, lock)


def _set_receive_buffer(sock: socket.socket, size: int) -> None:
    """Set a receive buffer to a size as Linux shows it, which is twice what setsockopt(2) takes."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, size // 2)
    except PermissionError:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size // 2)


def _announce(sock: socket.socket, wanted: dict[str, int], usual: dict[str, int], options: dict[str, str]) -> None:
    if wanted["segment"] < usual["segment"] and wanted["segment"] <= _LARGEST_SEGMENT:
        sock.setsockopt(socket.IPPROTO_TCP, _TCP["TCP_MAXSEG"], wanted["segment"])
    if wanted["scale"] < usual["scale"]:
        clamp = int.from_bytes(bytes.fromhex(options.get("TCP_WINDOW_CLAMP", "")), sys.byteorder)
        # Linux chooses the smallest scale with which the largest window can be announced.
        least, most = 1 << 15 + wanted["scale"] if wanted["scale"] else 0, _LARGEST_WINDOW << wanted["scale"]
        sock.setsockopt(socket.IPPROTO_TCP, _TCP["TCP_WINDOW_CLAMP"], min(max(clamp, least), most))
    for name in (each for each in _BEFORE_CONNECTING if each in options):
        _set(sock, socket.IPPROTO_TCP, name, _TCP[name], options[name])


def let_ports_be_rebound(pids: Iterable[int]) -> None:
    """Set SO_REUSEADDR on all TCP sockets of processes that are about to end: else they keep the ports from a restore.

    A connection of a process that has ended lingers for a minute (TIME_WAIT, FIN_WAIT_2; tcp(7)), and a port is not
    bound again meanwhile unless the listener and all connections there had SO_REUSEADDR (socket(7)), which connections
    inherit from their listener.  It is set on the sockets of the stopped processes once the dump is done: the image is
    unchanged, and what was sent still arrives before the connection closes.  Never raises.
    """
    for pid in pids:
        with contextlib.suppress(OSError), syscalls.pidfd_of(pid) as pidfd:
            for number, target in procfs.links(pid):
                if target.startswith("socket:"):
                    # Closed meanwhile, or not ours to reach.
                    with contextlib.suppress(OSError), syscalls.socket_of(pidfd, number) as sock:
                        if sock.family in _INET and sock.type == socket.SOCK_STREAM:
                            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


# -- multicast


def groups(pid: int) -> list[tuple[str, bytes]]:
    """Groups that some socket in the network namespace of ``pid`` has joined: interface and ``sockaddr_storage``."""
    found: list[tuple[str, bytes]] = []
    device = ""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/net/igmp") as file:
        for line in file:
            if head := re.match(r"\d+\t(\S+)", line):
                device = head[1]
            elif group := re.match(r"\t+([0-9A-F]{8})\s", line):
                address = struct.pack("=I", int(group[1], 16))
                found.append((device, struct.pack("=HH", socket.AF_INET, 0) + address))
    with contextlib.suppress(OSError), open(f"/proc/{pid}/net/igmp6") as file:
        for line in file:
            words = line.split()
            address = struct.pack("=HHI", socket.AF_INET6, 0, 0) + bytes.fromhex(words[2])
            found.append((words[1], address))
    return [(device, address.ljust(_ADDRESS_BYTES, b"\0")) for device, address in found]


def memberships(sock: socket.socket, candidates: list[tuple[str, bytes]]) -> list[dict[str, Any]]:
    """Those of ``candidates`` that the socket is a member of: interface, address, mode and sources."""
    found: list[dict[str, Any]] = []
    if sock.family not in _INET or sock.type != socket.SOCK_DGRAM:
        return found
    for device, address in candidates:
        family = struct.unpack_from("=H", address)[0]
        if family == socket.AF_INET6 and sock.family != socket.AF_INET6:
            continue
        level = socket.IPPROTO_IP if family == socket.AF_INET else socket.IPPROTO_IPV6
        with contextlib.suppress(OSError):  # the interface is gone
            if (filter_ := _source_filter(sock, level, socket.if_nametoindex(device), address)) is not None:
                facts = {"device": device, "level": level, "address": address.hex()}
                found.append({**facts, "mode": filter_[0], "sources": filter_[1]})
    return found


def _source_filter(sock: socket.socket, level: int, index: int, address: bytes) -> tuple[int, list[str]] | None:
    capacity = 64
    while True:
        buffer = ctypes.create_string_buffer(_FILTER.size + capacity * _ADDRESS_BYTES)
        _FILTER.pack_into(buffer, 0, index, address, 0, capacity)
        length = ctypes.c_uint(len(buffer))
        if syscalls.libc.getsockopt(sock.fileno(), level, _MCAST_MSFILTER, buffer, ctypes.byref(length)):
            if ctypes.get_errno() in (errno.EADDRNOTAVAIL, errno.EINVAL, errno.ENODEV, errno.ENOPROTOOPT):
                return None
            raise OSError(ctypes.get_errno(), "MCAST_MSFILTER")
        _, _, mode, count = _FILTER.unpack_from(buffer)
        if count <= capacity:
            starts = range(_FILTER.size, _FILTER.size + count * _ADDRESS_BYTES, _ADDRESS_BYTES)
            return mode, [buffer.raw[at : at + _ADDRESS_BYTES].hex() for at in starts]
        capacity = count


def join(sock: socket.socket, group: dict[str, Any]) -> None:
    """Join a group as `memberships` gave it.  Raises `OSError`."""
    index, address = socket.if_nametoindex(group["device"]), bytes.fromhex(group["address"])
    try:
        sock.setsockopt(group["level"], _MCAST_JOIN_GROUP, struct.pack("=I4x", index) + address)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EEXIST):  # it is a member already
            raise
    if group["mode"] != _EXCLUDE or group["sources"]:
        sources = b"".join(map(bytes.fromhex, group["sources"]))
        head = _FILTER.pack(index, address, group["mode"], len(group["sources"]))
        sock.setsockopt(group["level"], _MCAST_MSFILTER, head + sources)
