"""Every socket option of Linux 6.18 with a value that is not its default, on sockets of every kind that comes back.

A program without imports of this project: a process in a capsule runs it, and `tests/process/test_socket_options.py`
asks it for what the options are before and after.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator

#: Numbers of options by level, from ``include/uapi``: ``asm-generic/socket.h``, ``linux/{in,in6,tcp,udp,netlink}.h``.
_NAMES = {
    socket.SOL_SOCKET: """
        SO_DEBUG 1  SO_REUSEADDR 2  SO_TYPE 3  SO_ERROR 4  SO_DONTROUTE 5  SO_BROADCAST 6  SO_SNDBUF 7  SO_RCVBUF 8
        SO_KEEPALIVE 9  SO_OOBINLINE 10  SO_NO_CHECK 11  SO_PRIORITY 12  SO_LINGER 13  SO_BSDCOMPAT 14
        SO_REUSEPORT 15  SO_PASSCRED 16  SO_PEERCRED 17  SO_RCVLOWAT 18  SO_SNDLOWAT 19  SO_RCVTIMEO_OLD 20
        SO_SNDTIMEO_OLD 21  SO_SECURITY_AUTHENTICATION 22  SO_SECURITY_ENCRYPTION_TRANSPORT 23
        SO_SECURITY_ENCRYPTION_NETWORK 24  SO_BINDTODEVICE 25  SO_ATTACH_FILTER 26  SO_DETACH_FILTER 27
        SO_PEERNAME 28  SO_TIMESTAMP_OLD 29  SO_ACCEPTCONN 30  SO_PEERSEC 31  SO_SNDBUFFORCE 32  SO_RCVBUFFORCE 33
        SO_PASSSEC 34  SO_TIMESTAMPNS_OLD 35  SO_MARK 36  SO_TIMESTAMPING_OLD 37  SO_PROTOCOL 38  SO_DOMAIN 39
        SO_RXQ_OVFL 40  SO_WIFI_STATUS 41  SO_PEEK_OFF 42  SO_NOFCS 43  SO_LOCK_FILTER 44  SO_SELECT_ERR_QUEUE 45
        SO_BUSY_POLL 46  SO_MAX_PACING_RATE 47  SO_BPF_EXTENSIONS 48  SO_INCOMING_CPU 49  SO_ATTACH_BPF 50
        SO_ATTACH_REUSEPORT_CBPF 51  SO_ATTACH_REUSEPORT_EBPF 52  SO_CNX_ADVICE 53  SCM_TIMESTAMPING_OPT_STATS 54
        SO_MEMINFO 55  SO_INCOMING_NAPI_ID 56  SO_COOKIE 57  SCM_TIMESTAMPING_PKTINFO 58  SO_PEERGROUPS 59
        SO_ZEROCOPY 60  SO_TXTIME 61  SO_BINDTOIFINDEX 62  SO_TIMESTAMP_NEW 63  SO_TIMESTAMPNS_NEW 64
        SO_TIMESTAMPING_NEW 65  SO_RCVTIMEO_NEW 66  SO_SNDTIMEO_NEW 67  SO_DETACH_REUSEPORT_BPF 68
        SO_PREFER_BUSY_POLL 69  SO_BUSY_POLL_BUDGET 70  SO_NETNS_COOKIE 71  SO_BUF_LOCK 72  SO_RESERVE_MEM 73
        SO_TXREHASH 74  SO_RCVMARK 75  SO_PASSPIDFD 76  SO_PEERPIDFD 77  SO_DEVMEM_LINEAR 78  SO_DEVMEM_DMABUF 79
        SO_DEVMEM_DONTNEED 80  SCM_TS_OPT_ID 81  SO_RCVPRIORITY 82  SO_PASSRIGHTS 83  SO_INQ 84
    """,
    socket.IPPROTO_IP: """
        IP_TOS 1  IP_TTL 2  IP_HDRINCL 3  IP_OPTIONS 4  IP_ROUTER_ALERT 5  IP_RECVOPTS 6  IP_RETOPTS 7  IP_PKTINFO 8
        IP_PKTOPTIONS 9  IP_MTU_DISCOVER 10  IP_RECVERR 11  IP_RECVTTL 12  IP_RECVTOS 13  IP_MTU 14  IP_FREEBIND 15
        IP_IPSEC_POLICY 16  IP_XFRM_POLICY 17  IP_PASSSEC 18  IP_TRANSPARENT 19  IP_RECVORIGDSTADDR 20  IP_MINTTL 21
        IP_NODEFRAG 22  IP_CHECKSUM 23  IP_BIND_ADDRESS_NO_PORT 24  IP_RECVFRAGSIZE 25  IP_RECVERR_RFC4884 26
        IP_MULTICAST_IF 32  IP_MULTICAST_TTL 33  IP_MULTICAST_LOOP 34  IP_ADD_MEMBERSHIP 35  IP_DROP_MEMBERSHIP 36
        IP_UNBLOCK_SOURCE 37  IP_BLOCK_SOURCE 38  IP_ADD_SOURCE_MEMBERSHIP 39  IP_DROP_SOURCE_MEMBERSHIP 40
        IP_MSFILTER 41  MCAST_JOIN_GROUP 42  MCAST_BLOCK_SOURCE 43  MCAST_UNBLOCK_SOURCE 44  MCAST_LEAVE_GROUP 45
        MCAST_JOIN_SOURCE_GROUP 46  MCAST_LEAVE_SOURCE_GROUP 47  MCAST_MSFILTER 48  IP_MULTICAST_ALL 49
        IP_UNICAST_IF 50  IP_LOCAL_PORT_RANGE 51  IP_PROTOCOL 52  IPT_SO_GET_INFO 64  IPT_SO_GET_ENTRIES 65
        IPT_SO_GET_REVISION_MATCH 66  IPT_SO_GET_REVISION_TARGET 67  SO_ORIGINAL_DST 80
    """,
    socket.IPPROTO_IPV6: """
        IPV6_ADDRFORM 1  IPV6_2292PKTINFO 2  IPV6_2292HOPOPTS 3  IPV6_2292DSTOPTS 4  IPV6_2292RTHDR 5
        IPV6_2292PKTOPTIONS 6  IPV6_CHECKSUM 7  IPV6_2292HOPLIMIT 8  IPV6_NEXTHOP 9  IPV6_AUTHHDR 10
        IPV6_FLOWINFO 11  IPV6_UNICAST_HOPS 16  IPV6_MULTICAST_IF 17  IPV6_MULTICAST_HOPS 18  IPV6_MULTICAST_LOOP 19
        IPV6_ADD_MEMBERSHIP 20  IPV6_DROP_MEMBERSHIP 21  IPV6_ROUTER_ALERT 22  IPV6_MTU_DISCOVER 23  IPV6_MTU 24
        IPV6_RECVERR 25  IPV6_V6ONLY 26  IPV6_JOIN_ANYCAST 27  IPV6_LEAVE_ANYCAST 28  IPV6_MULTICAST_ALL 29
        IPV6_ROUTER_ALERT_ISOLATE 30  IPV6_RECVERR_RFC4884 31  IPV6_FLOWLABEL_MGR 32  IPV6_FLOWINFO_SEND 33
        IPV6_IPSEC_POLICY 34  IPV6_XFRM_POLICY 35  IPV6_HDRINCL 36  MCAST_JOIN_GROUP 42  MCAST_BLOCK_SOURCE 43
        MCAST_UNBLOCK_SOURCE 44  MCAST_LEAVE_GROUP 45  MCAST_JOIN_SOURCE_GROUP 46  MCAST_LEAVE_SOURCE_GROUP 47
        MCAST_MSFILTER 48  IPV6_RECVPKTINFO 49  IPV6_PKTINFO 50  IPV6_RECVHOPLIMIT 51  IPV6_HOPLIMIT 52
        IPV6_RECVHOPOPTS 53  IPV6_HOPOPTS 54  IPV6_RTHDRDSTOPTS 55  IPV6_RECVRTHDR 56  IPV6_RTHDR 57
        IPV6_RECVDSTOPTS 58  IPV6_DSTOPTS 59  IPV6_RECVPATHMTU 60  IPV6_PATHMTU 61  IPV6_DONTFRAG 62
        IPV6_USE_MIN_MTU 63  IP6T_SO_GET_INFO 64  IP6T_SO_GET_ENTRIES 65  IPV6_RECVTCLASS 66  IPV6_TCLASS 67
        IP6T_SO_GET_REVISION_MATCH 68  IP6T_SO_GET_REVISION_TARGET 69  IPV6_AUTOFLOWLABEL 70
        IPV6_ADDR_PREFERENCES 72  IPV6_MINHOPCOUNT 73  IPV6_RECVORIGDSTADDR 74  IPV6_TRANSPARENT 75
        IPV6_UNICAST_IF 76  IPV6_RECVFRAGSIZE 77  IPV6_FREEBIND 78  IP6T_SO_ORIGINAL_DST 80
    """,
    socket.IPPROTO_TCP: """
        TCP_NODELAY 1  TCP_MAXSEG 2  TCP_CORK 3  TCP_KEEPIDLE 4  TCP_KEEPINTVL 5  TCP_KEEPCNT 6  TCP_SYNCNT 7
        TCP_LINGER2 8  TCP_DEFER_ACCEPT 9  TCP_WINDOW_CLAMP 10  TCP_INFO 11  TCP_QUICKACK 12  TCP_CONGESTION 13
        TCP_MD5SIG 14  TCP_THIN_LINEAR_TIMEOUTS 16  TCP_THIN_DUPACK 17  TCP_USER_TIMEOUT 18  TCP_REPAIR 19
        TCP_REPAIR_QUEUE 20  TCP_QUEUE_SEQ 21  TCP_REPAIR_OPTIONS 22  TCP_FASTOPEN 23  TCP_TIMESTAMP 24
        TCP_NOTSENT_LOWAT 25  TCP_CC_INFO 26  TCP_SAVE_SYN 27  TCP_SAVED_SYN 28  TCP_REPAIR_WINDOW 29
        TCP_FASTOPEN_CONNECT 30  TCP_ULP 31  TCP_MD5SIG_EXT 32  TCP_FASTOPEN_KEY 33  TCP_FASTOPEN_NO_COOKIE 34
        TCP_ZEROCOPY_RECEIVE 35  TCP_INQ 36  TCP_TX_DELAY 37  TCP_AO_ADD_KEY 38  TCP_AO_DEL_KEY 39  TCP_AO_INFO 40
        TCP_AO_GET_KEYS 41  TCP_AO_REPAIR 42  TCP_IS_MPTCP 43  TCP_RTO_MAX_MS 44  TCP_RTO_MIN_US 45
        TCP_DELACK_MAX_US 46
    """,
    socket.IPPROTO_UDP: """
        UDP_CORK 1  UDP_ENCAP 100  UDP_NO_CHECK6_TX 101  UDP_NO_CHECK6_RX 102  UDP_SEGMENT 103  UDP_GRO 104
    """,
    socket.IPPROTO_UDPLITE: """
        UDP_CORK 1  UDPLITE_SEND_CSCOV 10  UDPLITE_RECV_CSCOV 11  UDP_ENCAP 100  UDP_NO_CHECK6_TX 101
        UDP_NO_CHECK6_RX 102  UDP_SEGMENT 103  UDP_GRO 104
    """,
    270: """
        NETLINK_ADD_MEMBERSHIP 1  NETLINK_DROP_MEMBERSHIP 2  NETLINK_PKTINFO 3  NETLINK_BROADCAST_ERROR 4
        NETLINK_NO_ENOBUFS 5  NETLINK_RX_RING 6  NETLINK_TX_RING 7  NETLINK_LISTEN_ALL_NSID 8
        NETLINK_LIST_MEMBERSHIPS 9  NETLINK_CAP_ACK 10  NETLINK_EXT_ACK 11  NETLINK_GET_STRICT_CHK 12
    """,
}
#: Options by level and number, as their names.
NAMES = {
    (level, int(number)): name
    for level, text in _NAMES.items()
    for name, number in zip(text.split()[::2], text.split()[1::2], strict=True)
}
_LAST = {socket.SOL_SOCKET: 128, socket.IPPROTO_TCP: 64}
#: Facts about a connection or a socket that are no setting of it; what reading changes, and what makes a descriptor.
_NO_SETTINGS = {
    *("SO_ERROR", "SO_PEERPIDFD", "SO_MEMINFO", "SO_COOKIE", "SO_INCOMING_NAPI_ID", "SO_NETNS_COOKIE", "SO_PEERCRED"),
    *("SO_PEERNAME", "SO_PEERGROUPS", "SO_DEVMEM_DONTNEED", "IP_PKTOPTIONS", "IP_MTU", "IPV6_MTU", "IPV6_PATHMTU"),
    *("IPV6_2292PKTOPTIONS", "TCP_INFO", "TCP_CC_INFO", "TCP_TIMESTAMP", "TCP_QUEUE_SEQ", "TCP_REPAIR_WINDOW"),
    *("TCP_SAVED_SYN", "TCP_ZEROCOPY_RECEIVE", "IP_PROTOCOL"),
}
_SO_ATTACH_FILTER = 26
_SO_PEEK_OFF = 42
_ACCEPT_ALL = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0xFFFF))


def name_of(level: int, number: int) -> str:
    return NAMES.get((level, number), f"option {number} of level {level}")


def numbers(level: int) -> Iterator[int]:
    """Numbers that options of a level may have, those of a Linux to come, too."""
    return (each for each in range(1, _LAST.get(level, 128)) if name_of(level, each) not in _NO_SETTINGS)


def values() -> Iterator[bytes]:
    """Values of all forms that options have, the ones that hurt least first."""
    for number in (1, 0, 2, 3, 5, 7, 64, 600, 5000, 0x18, 1 << 20):
        yield struct.pack("=i", number)
    yield from (bytes([1]), bytes([0]), bytes([5]))
    yield struct.pack("=ii", 1, 5)  # SO_LINGER
    yield struct.pack("=qq", 5, 0)  # times
    yield from (b"reno", b"lo\0", b"tls\0")
    yield socket.inet_aton("127.0.0.1")
    yield struct.pack("!I", 1)  # the number of the loopback device, in the order of the network
    yield b"\1\1\1\0"  # IP_OPTIONS
    yield bytes([0, 0, 1, 4, 0, 0, 0, 0])  # IPV6_HOPOPTS
    yield bytes([0, 2, 2, 1, 0, 0, 0, 0]) + socket.inet_pton(socket.AF_INET6, "::1")  # IPV6_RTHDR
    yield bytes(range(16))  # TCP_FASTOPEN_KEY
    yield struct.pack("=HxxxxxxQ", 1, ctypes.addressof(_ACCEPT_ALL))  # SO_ATTACH_FILTER


def read(sock: socket.socket, level: int, number: int) -> str:
    """An option's value in hex; empty if the socket has no such option."""
    with contextlib.suppress(OSError):
        # A filter's length is in instructions.
        size = 0 if (level, number) == (socket.SOL_SOCKET, _SO_ATTACH_FILTER) else 256
        if size:
            value = sock.getsockopt(level, number, size).hex()
            return value.rstrip("0") if name_of(level, number) == "NETLINK_LIST_MEMBERSHIPS" else value
        length = ctypes.c_uint(0)
        if libc.getsockopt(sock.fileno(), level, number, None, ctypes.byref(length)) == 0:
            return str(length.value)
    return ""


libc = ctypes.CDLL(None, use_errno=True)

#: Seconds until something arrives that arrives at once or never: TCP_FASTOPEN_CONNECT waits for data.
_TIMEOUT = 0.5
#: Seconds after which a connection has acknowledged what it has received, and its options do not change any more.
_QUIET = 0.3

_DATA = bytes(9)

Set = Callable[[socket.socket], None]


def _bound(family: int, kind: int, protocol: int = 0) -> socket.socket:
    sock = socket.socket(family, kind, protocol)
    sock.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
    return sock


def _listening(family: int) -> socket.socket:
    sock = _bound(family, socket.SOCK_STREAM)
    sock.listen(3)
    return sock


def _accepted(listener: socket.socket) -> socket.socket:
    listener.settimeout(_TIMEOUT)
    return listener.accept()[0]


def _listener(family: int, put: Set) -> list[socket.socket]:
    sock = _listening(family)
    put(sock)
    return [sock]


def _used_listener(family: int, put: Set) -> list[socket.socket]:
    sock = _listening(family)
    near = socket.create_connection(sock.getsockname()[:2])
    with _accepted(sock):
        near.close()  # before the listener's end, which would keep its port for a minute (TIME_WAIT)
    put(sock)
    return [sock]


def _new(family: int, put: Set) -> list[socket.socket]:
    sock = socket.socket(family)
    put(sock)
    return [sock]


def _connected(family: int, put: Set) -> list[socket.socket]:
    listener = _listening(family)
    ends = [socket.create_connection(listener.getsockname()[:2]), _accepted(listener)]
    put(ends[0])
    return [*ends, listener]


def _to_be_connected(family: int, put: Set) -> list[socket.socket]:
    listener, sock = _listening(family), socket.socket(family)
    put(sock)
    sock.settimeout(_TIMEOUT)
    sock.connect(listener.getsockname()[:2])
    return [sock, _accepted(listener), listener]


def _to_be_accepted(family: int, put: Set) -> list[socket.socket]:
    listener = _listening(family)
    put(listener)
    near = socket.create_connection(listener.getsockname()[:2], _TIMEOUT)
    near.send(_DATA)  # with TCP_DEFER_ACCEPT there is none before
    far = _accepted(listener)
    assert far.recv(len(_DATA)) == _DATA
    return [near, far, listener]


def _mapped(family: int, put: Set) -> list[socket.socket]:
    """An IPv4 connection of a socket of IPv6."""
    listener, sock = _listening(socket.AF_INET), socket.socket(socket.AF_INET6)
    sock.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
    put(sock)
    return [sock, _accepted(listener), listener]


def _datagrams(family: int, put: Set, protocol: int = 0) -> list[socket.socket]:
    sock = _bound(family, socket.SOCK_DGRAM, protocol)
    put(sock)
    return [sock]


def _lite(family: int, put: Set) -> list[socket.socket]:
    return _datagrams(family, put, socket.IPPROTO_UDPLITE)


def _connected_datagrams(family: int, put: Set) -> list[socket.socket]:
    peer = _bound(family, socket.SOCK_DGRAM)
    sock = socket.socket(family, socket.SOCK_DGRAM)
    sock.connect(peer.getsockname())
    put(sock)
    return [sock, peer]


def _pair(kind: int, put: Set) -> list[socket.socket]:
    ends = socket.socketpair(socket.AF_UNIX, kind)
    put(ends[0])
    return list(ends)


def _unix_listener(_: int, put: Set) -> list[socket.socket]:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind("")  # Linux chooses a name
    sock.listen(3)
    put(sock)
    return [sock]


def _netlink(protocol: int, put: Set) -> list[socket.socket]:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    sock.bind((0, 0))
    put(sock)
    return [sock]


_4, _6 = socket.AF_INET, socket.AF_INET6
_SOCKET, _IP, _IPV6, _TCP = socket.SOL_SOCKET, socket.IPPROTO_IP, socket.IPPROTO_IPV6, socket.IPPROTO_TCP
_UDP, _UDPLITE, _NETLINK = socket.IPPROTO_UDP, socket.IPPROTO_UDPLITE, 270
_TCP_4, _TCP_6 = (_SOCKET, _IP, _TCP), (_SOCKET, _IP, _IPV6, _TCP)
#: How sockets of each kind are made, and the levels of their options.
KINDS: dict[str, tuple[Callable[[int, Set], list[socket.socket]], int, tuple[int, ...]]] = {
    "a TCP listener": (_listener, _4, _TCP_4),
    "a TCP listener over IPv6": (_listener, _6, _TCP_6),
    "a TCP listener that has accepted": (_used_listener, _4, _TCP_4),
    "a TCP socket without connection": (_new, _4, _TCP_4),
    "a TCP connection": (_connected, _4, _TCP_4),
    "a TCP connection over IPv6": (_connected, _6, _TCP_6),
    "a TCP connection over IPv4 of IPv6": (_mapped, _6, _TCP_6),
    "a TCP socket before its connection": (_to_be_connected, _4, _TCP_4),
    "a TCP socket before its connection over IPv6": (_to_be_connected, _6, _TCP_6),
    "a TCP listener before its connection": (_to_be_accepted, _4, _TCP_4),
    "a TCP listener before its connection over IPv6": (_to_be_accepted, _6, _TCP_6),
    "a UDP socket": (_datagrams, _4, (_SOCKET, _IP, _UDP)),
    "a UDP socket over IPv6": (_datagrams, _6, (_SOCKET, _IP, _IPV6, _UDP)),
    "a connected UDP socket": (_connected_datagrams, _4, (_SOCKET, _IP, _UDP)),
    "a connected UDP socket over IPv6": (_connected_datagrams, _6, (_SOCKET, _IP, _IPV6, _UDP)),
    "a UDP-Lite socket": (_lite, _4, (_SOCKET, _IP, _UDPLITE)),
    "a UDP-Lite socket over IPv6": (_lite, _6, (_SOCKET, _IP, _IPV6, _UDPLITE)),
    "a pair of unix stream sockets": (_pair, socket.SOCK_STREAM, (_SOCKET,)),
    "a pair of unix datagram sockets": (_pair, socket.SOCK_DGRAM, (_SOCKET,)),
    "a pair of unix packet sockets": (_pair, socket.SOCK_SEQPACKET, (_SOCKET,)),
    "a unix listener": (_unix_listener, 0, (_SOCKET,)),
    "a netlink socket": (_netlink, 0, (_SOCKET, _NETLINK)),
    "a netlink socket of devices' events": (_netlink, 15, (_SOCKET, _NETLINK)),
}

_LOOPBACK = struct.pack("=i", socket.if_nametoindex("lo"))
#: Options that are refused where they are set.
REFUSED = {"TCP_REPAIR", "TCP_ULP", "UDP_CORK"}
#: Sockets by the options that were set.
made: dict[str, list[socket.socket]] = {}


class _Put:
    """Sets options on a socket, and notes those that change."""

    def __init__(self, wanted: dict[tuple[int, int], bytes]) -> None:
        self.wanted = wanted
        self.changed: dict[tuple[int, int], bytes] = {}

    def __call__(self, sock: socket.socket) -> None:
        for (level, number), value in self.wanted.items():
            if name_of(level, number) == "SO_BINDTOIFINDEX" and value != _LOOPBACK:
                continue  # no such device, which is refused
            before = read(sock, level, number)
            with contextlib.suppress(OSError):
                sock.setsockopt(level, number, value)
                if read(sock, level, number) != before:
                    self.changed[level, number] = value


def _made(kind: str, wanted: dict[tuple[int, int], bytes]) -> tuple[_Put, list[socket.socket]]:
    """Make sockets of a kind with options; none if they cannot be connected with them, or if no option changes."""
    how, argument, _ = KINDS[kind]
    put, socks = _Put(wanted), []
    with contextlib.suppress(OSError):
        socks = how(argument, put)
    if not put.changed:
        for sock in socks:
            with contextlib.suppress(OSError):  # nothing lingers that could have the port of a later one
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("=ii", 1, 0))
            sock.close()
        socks = []
    return put, socks


def _options(level: int) -> Iterator[tuple[int, int]]:
    return ((level, number) for number in numbers(level) if name_of(level, number) not in REFUSED)


def make_each(kind: str, level: int) -> None:
    """Make sockets of a kind, each with one option of a level that is not as it is on a new socket."""
    for option in _options(level):
        for value in values():
            _, socks = _made(kind, {option: value})
            if socks:
                made[name_of(*option)] = socks
                break
    time.sleep(_QUIET)


def make_with(kind: str, options: dict[tuple[int, int], bytes]) -> None:
    """Make sockets of a kind with these options, set in this order."""
    put, socks = _made(kind, options)
    made[" ".join(name_of(*option) for option in put.changed)] = socks
    time.sleep(_QUIET)


def make_some(kind: str, count: int, seed: str) -> None:
    """Make sockets of a kind, each with several options at once, drawn by ``seed``."""
    chance, some = random.Random(seed), list(values())
    options = [option for level in KINDS[kind][2] for option in _options(level)]
    for _ in range(1000):
        if len(made) == count:
            break
        put, socks = _made(kind, {option: chance.choice(some) for option in chance.sample(options, 30)})
        if socks:
            made[" ".join(f"{name_of(*option)}={value.hex()}" for option, value in put.changed.items())] = socks
    time.sleep(_QUIET)


def state(kind: str) -> dict[str, list[dict[str, str]]]:
    """All options of all sockets, by the options that were set: ``{options: [{option: value of an end}]}``.

    What was sent to make a connection is sent over it again: an acknowledgment of data rounds the window up to its
    scale, as no handshake does, and Linux sends segments of half the largest window.
    """
    how, _, levels = KINDS[kind]
    if how is _to_be_accepted:
        for near, far, _ in made.values():
            peek = far.getsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF)
            near.send(_DATA)
            assert far.recv(len(_DATA)) == _DATA
            if peek >= 0:  # what is read is subtracted from it
                far.setsockopt(socket.SOL_SOCKET, _SO_PEEK_OFF, peek)
        time.sleep(_QUIET)
    return {
        name: [
            {name_of(level, number): read(sock, level, number) for level in levels for number in numbers(level)}
            for sock in socks
        ]
        for name, socks in made.items()
    }
