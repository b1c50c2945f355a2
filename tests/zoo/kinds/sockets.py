"""Sockets: of this machine, of the network, and of kinds that few know."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import os
import socket
import socketserver
import struct
import threading
import urllib.request

from . import IMPOSSIBLE, KEPT, announced, documented, kind, refused
from .asking import error_of, fdinfo, flags, place, readable

LOCAL = "127.0.0.1"
ADVICE = "It comes back closed: connect again."


def options(one: socket.socket, *names: tuple[int, int]) -> list[bytes]:
    return [one.getsockopt(level, name, 64) for level, name in names]


def swapped(one: socket.socket, other: socket.socket) -> str:
    """A word through a connection and back."""
    one.sendall(b"there")
    there = other.recv(5)
    other.sendall(there[::-1])
    return one.recv(5).decode()


@kind("a socket pair with unread bytes")
def pair_with_bytes():
    a, b = socket.socketpair()
    a.sendall(b"under way" * 500)

    def show():
        data = b.recv(10_000)
        a.sendall(data)
        return len(data), data[:9].decode(), flags(a.fileno())

    return show


@kind("a datagram socket pair with unread messages")
def pair_of_messages():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for word in (b"one", b"two", b"three"):
        a.send(word)

    def show():
        words = [b.recv(10) for _ in range(3)]
        for word in words:
            a.send(word)
        return [word.decode() for word in words]

    return show


@kind(
    "a socket pair with an unread empty message",
    refused("SOCKET_UNSUPPORTED", "empty message"),
    alone="is refused",
    advice="Receive it.",
)
def pair_with_empty():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for word in (b"one", b"", b"three"):
        a.send(word)

    def show():
        words = [b.recv(10) for _ in range(3)]
        for word in words:
            a.send(word)
        return [word.decode() for word in words]

    return show, lambda: (a.close(), b.close())


@kind("a SOCK_SEQPACKET socket pair")
def pair_of_packets():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    a.send(b"first")
    a.send(b"second")

    def show():
        words = [b.recv(100) for _ in range(2)]
        for word in words:
            a.send(word)
        return [word.decode() for word in words]

    return show


@kind("a socket pair, one direction shut down")
def pair_half_shut():
    a, b = socket.socketpair()
    a.shutdown(socket.SHUT_WR)
    return lambda: (b.recv(1), error_of(lambda: a.send(b"x")), b.send(b"y"), a.recv(1))


@kind("a socket pair whose other end was closed, with bytes in it")
def pair_closed():
    a, b = socket.socketpair()
    a.sendall(b"last words")
    a.close()
    return lambda: (b.recv(100, socket.MSG_PEEK).decode(), error_of(lambda: b.send(b"x")))


@kind(
    "a queued descriptor (SCM_RIGHTS)",
    refused("SOCKET_UNSUPPORTED", "descriptor"),
    advice="Receive it.",
)
def descriptor_in_flight():
    a, b = socket.socketpair()
    r, w = os.pipe()
    socket.send_fds(a, [b"with a pipe"], [w])

    def show():
        data, (fd,), _, _ = socket.recv_fds(b, 100, 1)
        os.write(fd, b"!")
        seen = os.read(r, 1).decode()
        socket.send_fds(a, [data], [fd])
        os.close(fd)
        return data.decode(), seen

    return show, lambda: (a.close(), b.close())


@kind(
    "a queued descriptor behind plain bytes (SCM_RIGHTS)",
    refused("SOCKET_UNSUPPORTED", "descriptor"),
    advice="Receive it.",
)
def descriptor_behind_bytes():
    a, b = socket.socketpair()
    r, w = os.pipe()

    def send() -> None:
        a.sendall(b"plain")
        socket.send_fds(a, [b"!"], [w])

    send()

    def show():
        plain = b.recv(5).decode()
        _, (fd,), _, _ = socket.recv_fds(b, 1, 1)
        os.write(fd, b"!")
        os.close(fd)
        send()
        return plain, os.read(r, 1).decode()

    return show, lambda: (a.close(), b.close())


@kind("a socket pair with options: buffers, timeouts, credentials")
def pair_options():
    a, b = socket.socketpair()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)
    a.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 3, 500_000))
    b.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    b.settimeout(2.5)
    names = [(socket.SOL_SOCKET, name) for name in (socket.SO_SNDBUF, socket.SO_RCVTIMEO, socket.SO_PASSCRED)]
    return lambda: (options(a, *names), options(b, *names), b.gettimeout(), flags(b.fileno()))


@kind("a unix socket connected to the notebook's own listener")
def unix_own_connection():
    name = f"o{os.getpid()}.sock"
    listener, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(7)
    client.connect(name)
    served, _ = listener.accept()
    return lambda: swapped(client, served)


def names(*ends: socket.socket) -> list[str]:
    return [str(name) for end in ends for name in (end.getsockname(), end.getpeername())]


def unix_connection(name: str):
    listener, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(7)
    client.bind(f"{name}.client")
    client.connect(name)
    served, _ = listener.accept()
    return lambda: (names(client, served), listener.getsockname() == served.getsockname(), swapped(client, served))


@kind("a unix connection, the names of its ends (getsockname, getpeername)", documented("names of a unix connection"))
def unix_named_connection():
    return unix_connection(str(place("unix") / "s"))


@kind("a unix connection by a relative path, the names of its ends", documented("names of a unix connection"))
def unix_relative_connection():
    return unix_connection(f"r{os.getpid()}")


@kind("a unix connection by an abstract name, the names of its ends", documented("names of a unix connection"))
def unix_abstract_connection():
    return unix_connection(f"\0zoo{os.getpid()}")


@kind("a unix connection whose listener and file are gone, its name", documented("names of a unix connection"))
def unix_named_pair():
    path = place("unix") / "s"
    listener, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(7)
    client.connect(str(path))
    served, _ = listener.accept()
    listener.close()
    path.unlink()
    return lambda: (names(client, served), swapped(client, served))


@kind("a UDP socket of IPv6, connected, IPV6_V6ONLY")
def udp6_connected():
    there, here = (socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) for _ in range(2))
    there.bind(("::1", 0))
    here.connect(there.getsockname())

    def show():
        here.send(b"x")
        data, sender = there.recvfrom(9)
        v6only = [one.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) for one in (here, there)]
        return data.decode(), sender == here.getsockname(), here.getsockname(), here.getpeername(), v6only

    return show


@kind(
    "a unix socket bound through /proc/self/fd, its path no longer valid",
    refused("SOCKET_UNSUPPORTED", "socket"),
    advice="Close it.",
)
def unix_through_descriptor():
    fd = os.open(place("unix"), os.O_PATH)
    name = f"/proc/self/fd/{fd}/listener"
    listener, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(7)
    client.connect(name)
    served, _ = listener.accept()
    os.close(fd)
    return lambda: swapped(client, served), lambda: (client.close(), served.close(), listener.close())


@kind("a unix socket that listens and serves its clients")
def unix_listener():
    name = f"l{os.getpid()}.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    os.chmod(name, 0o600)
    listener.listen(3)

    def show():
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(name)
            served, _ = listener.accept()
            with served:
                return swapped(client, served), listener.getsockname(), oct(os.stat(name).st_mode)

    return show


@kind(
    "a unix listener with a connection that is not accepted yet",
    refused("SOCKET_UNSUPPORTED", "not accepted yet"),
    advice="Accept it.",
)
def unix_backlog():
    name = f"b{os.getpid()}.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(5)
    client = socket.socket(socket.AF_UNIX)
    client.connect(name)
    client.sendall(b"hello?")
    served: list[socket.socket] = []

    def show():
        return bool(served or readable(listener.fileno(), within=1)), error_of(lambda: client.send(b""))

    return show, lambda: (client.close(), listener.close())


@kind("a unix socket with an abstract name")
def unix_abstract():
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0zoo-{os.getpid()}-{os.urandom(4).hex()}")
    listener.listen(3)

    def show():
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(listener.getsockname())
            served, _ = listener.accept()
            with served:
                return swapped(client, served), repr(listener.getsockname())

    return show


@kind("a unix socket whose name was deleted", user=refused("SOCKET_UNSUPPORTED", "deleted"), advice="Close it.")
def unix_deleted():
    name = f"d{os.getpid()}.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(3)
    os.unlink(name)
    return lambda: (
        listener.getsockname(),
        os.path.exists(name),
        listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN),
    ), listener.close


@kind(
    "a unix socket that listens, and a connection to it, whose directory was deleted",
    user=refused("SOCKET_UNSUPPORTED", "socket"),
    advice="Close it.",
)
def unix_directory_deleted():
    directory = place("gone")
    name = os.path.join(directory, "listener")
    listener, client = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    listener.bind(name)
    listener.listen(3)
    client.connect(name)
    served, _ = listener.accept()
    os.unlink(name)
    os.rmdir(directory)
    return lambda: swapped(client, served), lambda: (client.close(), served.close(), listener.close())


@kind("a unix datagram socket with unread messages")
def unix_messages():
    name = f"m{os.getpid()}.sock"
    receiver, sender = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
    receiver.bind(name)
    sender.connect(name)
    sender.send(b"waiting")

    def show():
        word = receiver.recv(100)
        sender.send(word)
        return word.decode(), sender.getpeername()

    return show


@kind(
    "a unix connection to a service outside the notebook",
    refused("SOCKET_UNSUPPORTED", "unix"),
    advice="Close it.",
)
def unix_outside():
    # A daemon of this very process would be inside: the one outside is the server of the other network end.
    name = os.environ["ZOO_OUTSIDE"]
    client = socket.socket(socket.AF_UNIX)
    client.connect(name)
    return lambda: client.getpeername() == name, client.close


@kind("a TCP port that listens, with its options")
def tcp_listener():
    listener = socket.create_server((LOCAL, 0), backlog=7)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77)
    names = [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        (socket.SOL_SOCKET, socket.SO_REUSEADDR),
        (socket.IPPROTO_TCP, socket.TCP_NODELAY),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
    ]

    def show():
        with socket.create_connection(listener.getsockname()) as client:
            served, _ = listener.accept()
            with served:
                return swapped(client, served), listener.getsockname(), options(listener, *names)

    return show


@kind("a TCP port that listens with TCP_DEFER_ACCEPT", alone="may be refused")
def tcp_defer_accept():
    listener = socket.create_server((LOCAL, 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 5)
    return lambda: (
        listener.getsockname(),
        options(listener, (socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT)),
    ), listener.close


@kind("a TCP port that listens with TCP_FASTOPEN", alone="may be refused")
def tcp_fastopen():
    listener = socket.create_server((LOCAL, 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_FASTOPEN, 5)
    return lambda: (
        listener.getsockname(),
        options(listener, (socket.IPPROTO_TCP, socket.TCP_FASTOPEN)),
    ), listener.close


@kind(
    "rarely set TCP options: congestion control, user timeout, maximum segment, type of service", alone="may be refused"
)
def tcp_rare_options():
    one = socket.create_server((LOCAL, 0))
    with contextlib.suppress(OSError):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 9000)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1000)
    one.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, 0x10)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, 3)
    names = [
        (socket.IPPROTO_TCP, socket.TCP_CONGESTION),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
        (socket.IPPROTO_TCP, socket.TCP_MAXSEG),
        (socket.IPPROTO_IP, socket.IP_TOS),
        (socket.SOL_SOCKET, socket.SO_PRIORITY),
    ]
    return lambda: options(one, *names), one.close


@kind("two sockets that share a port (SO_REUSEPORT)")
def tcp_shared_port():
    one = socket.create_server((LOCAL, 0), reuse_port=True)
    two = socket.create_server(one.getsockname(), reuse_port=True)
    names = [(socket.SOL_SOCKET, socket.SO_REUSEPORT)]
    return lambda: (one.getsockname() == two.getsockname(), options(one, *names), options(two, *names))


@kind("a TCP port that listens on IPv6 only")
def tcp6_listener():
    if not socket.has_dualstack_ipv6():
        raise PermissionError("this machine has no IPv6")
    listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    return lambda: (listener.getsockname(), options(listener, (socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)))


@kind("a bound TCP socket that does not listen yet")
def tcp_bound():
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind((LOCAL, 0))

    def show():
        return one.getsockname(), one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)

    return show


@kind("an unconnected TCP socket")
def tcp_fresh():
    one = socket.socket()
    one.setblocking(False)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 50_000)
    return lambda: (error_of(one.getpeername), flags(one.fileno()), options(one, (socket.SOL_SOCKET, socket.SO_RCVBUF)))


@kind(
    "a TCP listener that had connections, without SO_REUSEADDR",
    alone="waits for the system",
    advice="Set SO_REUSEADDR.",
)
def tcp_listener_in_use():
    listener = socket.socket()
    listener.bind((LOCAL, 0))
    listener.listen(3)
    with socket.create_connection(listener.getsockname()) as client:
        served, _ = listener.accept()
        served.close()
        client.recv(1)
    return lambda: listener.getsockname(), listener.close


@kind("a TCP connection of the notebook to itself")
def tcp_connection():
    listener = socket.create_server((LOCAL, 0))
    client = socket.create_connection(listener.getsockname())
    served, _ = listener.accept()
    return lambda: (swapped(client, served), served.getsockname(), served.getpeername() == client.getsockname())


@kind("a TCP connection of the notebook to itself over IPv6, with unread bytes in both directions")
def tcp6_unread():
    listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    client = socket.create_connection(listener.getsockname()[:2])
    served, _ = listener.accept()
    client.send(b"first")
    served.send(b"last")

    def show():
        # What is sent is behind what was not read yet, and becomes that for the next time.
        client.send(b"first")
        served.send(b"last")
        return served.recv(5).decode(), client.recv(4).decode()

    return show


@kind("a TCP connection that one end has closed for writing (shutdown), with its last bytes unread")
def tcp_half_closed():
    listener = socket.create_server((LOCAL, 0))
    client = socket.create_connection(listener.getsockname())
    served, _ = listener.accept()
    client.send(b"last")
    client.shutdown(socket.SHUT_WR)

    def show():
        served.send(b"+")
        return served.recv(9, socket.MSG_PEEK).decode(), client.recv(1).decode(), error_of(lambda: client.send(b"x"))

    return show


@kind("a TCP connection to another host", announced("connection"), advice=ADVICE)
def tcp_outside():
    client = socket.create_connection((LOCAL, int(os.environ["ZOO_PORT"])))
    return lambda: error_of(lambda: client.send(b"x"))


@kind(
    "a TCP listener with a connection that is not accepted yet",
    refused("SOCKET_UNSUPPORTED", "not accepted yet"),
    advice="Accept it.",
)
def tcp_backlog():
    listener = socket.create_server((LOCAL, 0))
    client = socket.create_connection(listener.getsockname())

    def show():
        return bool(readable(listener.fileno(), within=0.5)), error_of(lambda: client.send(b""))

    return show, lambda: (client.close(), listener.close())


@kind("a TCP connection in progress (SYN_SENT)", announced("connection"), advice=ADVICE)
def tcp_connecting():
    one = socket.socket()
    one.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        one.connect((LOCAL, int(os.environ["ZOO_FULL"])))
    return lambda: one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0], one.close


@kind("a UDP socket, bound")
def udp_bound():
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.bind((LOCAL, 0))

    def show():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.sendto(b"hello", one.getsockname())
            return one.recv(10).decode(), one.getsockname()

    return show


@kind("a UDP socket with a peer")
def udp_connected():
    one, other = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    other.bind((LOCAL, 0))
    one.connect(other.getsockname())

    def show():
        one.send(b"hello")
        return other.recv(10).decode(), one.getpeername(), one.getsockname()

    return show


@kind(
    "a UDP socket with unread datagrams",
    refused("SOCKET_UNSUPPORTED", "datagram"),
    advice="Read them.",
)
def udp_queue():
    one, other = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    one.bind((LOCAL, 0))
    one.setblocking(False)
    other.sendto(b"unread", one.getsockname())

    def show():
        with contextlib.suppress(BlockingIOError):
            return one.recv(100, socket.MSG_PEEK).decode()
        return "lost"

    return show, one.close


@kind("a UDP socket with options: broadcast, time to live, error queue", alone="may be refused")
def udp_options():
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    one.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 7)
    one.setsockopt(socket.IPPROTO_IP, 11, 1)  # IP_RECVERR
    one.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 9)
    one.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 0)
    names = [(socket.SOL_SOCKET, socket.SO_BROADCAST)]
    names += [
        (socket.IPPROTO_IP, name) for name in (socket.IP_TTL, 11, socket.IP_MULTICAST_TTL, socket.IP_MULTICAST_LOOP)
    ]
    return lambda: options(one, *names), one.close


@kind("membership in a multicast group", alone="may be refused")
def multicast():
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.bind(("", 0))
    member = socket.inet_aton("239.7.7.7") + socket.inet_aton(LOCAL)
    one.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)

    def show():
        with open("/proc/net/igmp") as file:
            listed = "070707EF" in file.read()
        return listed, error_of(lambda: one.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member))

    return show, one.close


@kind(
    "a netlink socket of NETLINK_GENERIC",
    refused("SOCKET_UNSUPPORTED", "a netlink socket to Linux itself (NETLINK_GENERIC"),
    alone="is refused",
    advice="Close it.",
)
def netlink_generic():
    one = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 16)
    return lambda: one.proto, one.close


@kind(
    "a netlink socket with an unread message",
    refused("SOCKET_UNSUPPORTED", "a message of Linux in a netlink socket"),
    alone="is refused",
    advice="Receive it.",
)
def netlink_unread():
    one = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    one.bind((0, 0))
    one.send(struct.pack("=IHHII", 20, 18, 0x301, 1, 0) + bytes(4))  # RTM_GETLINK of all
    return lambda: len(one.recv(1 << 16, socket.MSG_PEEK)) > 0, one.close


@kind("a netlink socket (pyroute2)", alone="may be refused")
def netlink():
    one = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    one.bind((0, 0))

    def show():
        request = struct.pack("=IHHII", 17, 18, 0x301, 1, 0) + b"\0"
        one.send(request)
        found = 0
        while True:
            data = one.recv(65536)
            found += len(data) > 20
            if struct.unpack_from("=H", data, len(data) - 16 if len(data) == 20 else 4)[0] == 3 or len(data) == 20:
                return found > 0

    return show, one.close


@kind("a raw socket (ping)", refused("SOCKET_UNSUPPORTED", "ping"), user=IMPOSSIBLE, advice="Close it.")
def raw():
    one = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    return lambda: flags(one.fileno()), one.close


@kind("a packet socket (tcpdump)", refused("SOCKET_UNSUPPORTED", "packet"), user=IMPOSSIBLE, advice="Close it.")
def packet():
    one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    return lambda: flags(one.fileno()), one.close


@kind("a socket of the kernel's crypto API (AF_ALG)", refused("SOCKET_UNSUPPORTED", "alg"), advice="Close it.")
def ciphers():
    try:
        one = socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise PermissionError("this system has none") from error
    one.bind(("hash", "sha256"))
    return lambda: flags(one.fileno()), one.close


@kind("a socket to a virtual machine's host (vsock)", refused("SOCKET_UNSUPPORTED", "vsock"), advice="Close it.")
def vsock():
    one = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    return lambda: flags(one.fileno()), one.close


@kind("a web server on a thread")
def web_server():
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f"at {self.path}".encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((LOCAL, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://{LOCAL}:{server.server_port}/zoo"

    def show():
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=60) as reply:
            return reply.read().decode(), server.server_port

    return show, lambda: (server.shutdown(), server.server_close())


@kind("a UDP server on a thread")
def udp_server():
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request[1].sendto(self.request[0].upper(), self.client_address)

    server = socketserver.ThreadingUDPServer((LOCAL, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def show():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(60)
            client.sendto(b"upper", server.server_address)
            return client.recv(100).decode()

    return show, lambda: (server.shutdown(), server.server_close())


@kind("a socket that signals its owner (FIOSETOWN, O_ASYNC)", alone="may be refused")
def socket_with_owner():
    a, b = socket.socketpair()
    fcntl.fcntl(a, fcntl.F_SETOWN, os.getpid())
    return lambda: (fcntl.fcntl(a, fcntl.F_GETOWN), flags(b.fileno())), lambda: (a.close(), b.close())


@kind("a socket bound to a network device", alone="may be refused", user=KEPT)
def bound_to_device():
    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
    return lambda: options(one, (socket.SOL_SOCKET, socket.SO_BINDTODEVICE)), one.close


@kind("a socket with a filter (SO_ATTACH_FILTER)", alone="may be refused")
def filtered():
    import ctypes

    one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    one.bind((LOCAL, 0))
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # "return 0": takes no packet
    one.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HxxxxxxP", 1, ctypes.addressof(nothing)))

    def show():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.sendto(b"x", one.getsockname())
        return bool(readable(one.fileno(), within=0.1))

    return show, one.close


@kind("a socket's peeking offset and timestamps (SO_PEEK_OFF, SO_TIMESTAMP)", alone="may be refused")
def peek_offset():
    a, b = socket.socketpair()
    a.sendall(b"abcdef")
    b.setsockopt(socket.SOL_SOCKET, 42, 2)
    b.setsockopt(socket.SOL_SOCKET, 29, 1)
    names = [(socket.SOL_SOCKET, 42), (socket.SOL_SOCKET, 29)]
    return lambda: (options(b, *names), fdinfo(b.fileno())["flags"]), lambda: (a.close(), b.close())
