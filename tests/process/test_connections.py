"""TCP connections within a tree of processes come back from two dumps and restores, with what was not read yet."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import waiting
from round_trip import Subject, image

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.criu.criu import Criu
from jupyter_gpu_ckpt.errors import CriuError, LoopbackTcp
from jupyter_gpu_ckpt.process import connections

#: The subject's child runs code on request, in a space for each kind.
PRELUDE = """
import contextlib, os, select, socket, struct, threading, time
asks, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
parent_pid = os.getpid()
def work(name, code, spaces={}):
    space = spaces.setdefault(name, {**globals(), "child": lambda code: ask(name, code)})
    space.pop("answer", None)
    exec(code, space)
    return space.get("answer")
def ask(name, code):
    asks.send(repr((name, code)).encode())
    return eval(asks.recv(1 << 16))
if not os.fork():
    while packet := answers.recv(1 << 16):
        try:
            word = work(*eval(packet))
        except BaseException as error:
            word = f"{type(error).__name__}: {error}"
        answers.send(repr(word).encode())
    os._exit(0)
def pair(child, listener=None, address="127.0.0.1", family=2):
    listener = listener or socket.create_server((address, 0), family=family)
    child(f"c = socket.create_connection({listener.getsockname()[:2]}, 20)")
    return listener, listener.accept()[0]
def both(sock, child):
    got = sock.send(b"ping"), child("answer = c.recv(9)"), child("answer = c.send(b'pong')")
    return *got, sock.recv(9)
def names(sock, child):
    # Without the port of the child's end, which other processes of this machine may get meanwhile.
    mine, its = (sock.getsockname(), sock.getpeername()), child("answer = c.getpeername(), c.getsockname()")
    return mine[0], its[0], [a[1] == b[1] and a[0].endswith(b[0]) for a, b in zip(mine, its)]
"""
OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.SOL_SOCKET, socket.SO_RCVLOWAT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5000),
    (socket.IPPROTO_IP, 21, 7),  # IP_MINTTL
    (socket.IPPROTO_IP, socket.IP_TOS, 8),
]
#: For the child, an expression: all that its parent sent.
READ_ALL = """f'data = b""\\nwhile len(data) < {sent}: data += c.recv(1 << 20)\\nanswer = hash(data)'"""
#: How each is made; what must be the same after each wake; what it answers at last.
KINDS: dict[str, tuple[str, str, str]] = {
    "IPv4": ("s, a = pair(child)", "answer = names(a, child), both(a, child)", ""),
    "IPv6": ("s, a = pair(child, address='::1', family=10)", "answer = names(a, child), both(a, child)", ""),
    "IPv4 of a listener of both": (
        "s = socket.create_server(('', 0), family=10, dualstack_ipv6=True)\n"
        "child(f'c = socket.create_connection((\"127.0.0.1\", {s.getsockname()[1]}), 20)'); a = s.accept()[0]",
        "answer = names(a, child), both(a, child)",
        "",
    ),
    "ports that Linux gives to nobody": (
        "ports = map(int, open('/proc/sys/net/ipv4/ip_local_port_range').read().split())\n"
        "taken = [f'({next(ports)} - 1 - os.getpid() % 1000)']\n"
        "s = socket.create_server(('127.0.0.1', 0))\n"
        "child(f'c = socket.create_connection({s.getsockname()}, 20, (\"127.0.0.1\", {taken[0]}))'); a = s.accept()[0]",
        "answer = a.getsockname(), a.getpeername(), child('answer = c.getsockname(), c.getpeername()'), both(a, child)",
        "",
    ),
    "another address": ("s, a = pair(child, address='127.0.0.9')", "answer = names(a, child), both(a, child)", ""),
    "within one process": (
        "s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname()); a = s.accept()[0]",
        "answer = c.getsockname() == a.getpeername(), a.getsockname(), a.send(b'ping'), c.recv(9)",
        "",
    ),
    "many of one listener without SO_REUSEADDR": (
        "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); ends = []\n"
        "for n in range(20):\n    child('held = [*globals().get(\"held\", []), c]' if n else '')\n"
        "    ends.append(pair(child, s)[1])",
        "answer = [(end.getsockopt(1, 2), end.getsockopt(1, 15), end.send(b'x')) for end in ends]\n"
        "answer += [s.getsockopt(1, 2), s.getsockopt(1, 15), child('answer = [sock.recv(1) for sock in [*held, c]]')]",
        "",
    ),
    "of a listener that was closed": ("s, a = pair(child); s.close()", "answer = names(a, child), both(a, child)", ""),
    "unread in both directions": (
        "s, a = pair(child); a.send(b'for the child'); child('c.send(b\"for the parent\")')",
        "answer = a.recv(99, socket.MSG_PEEK), child('answer = c.recv(99, socket.MSG_PEEK)')",
        "answer = a.recv(99), child('answer = c.recv(99)'), both(a, child)",
    ),
    "more unread than its reader has space for": (
        "s, a = pair(child); text = os.urandom(100) * 20_000; a.setblocking(False); sent = a.send(text)",
        "answer = sent > 1_000_000, a.getblocking()",
        f"answer = child({READ_ALL}) == hash(text[:sent])",
    ),
    "written to the end": (
        "s, a = pair(child); a.send(b'last words'); a.shutdown(socket.SHUT_WR)",
        "answer = child('c.send(b\"x\"); answer = c.recv(99, socket.MSG_PEEK)'), a.recv(9)",
        "answer = child('answer = c.recv(99), c.recv(99)')",
    ),
    "closed by the other end, with bytes unread": (
        "s, a = pair(child); child('c.send(b\"last words\"); c.close()'); time.sleep(0.1)",
        "answer = a.recv(99, socket.MSG_PEEK), a.getblocking(), a.getsockname()[0], a.getpeername()[0]",
        "answer = a.recv(99), a.recv(99)",
    ),
    "over IPv6, closed by the other end, with bytes unread": (
        "s, a = pair(child, address='::1', family=10)\nchild('c.send(b\"last words\"); c.close()'); time.sleep(0.1)",
        "answer = a.recv(99, socket.MSG_PEEK), a.getsockname()[0], a.getpeername()[0]",
        "answer = a.recv(99), a.recv(99)",
    ),
    "closed by the listener's end, with bytes unread": (
        "s, a = pair(child); a.send(b'last words'); a.close()",
        "answer = child('answer = c.recv(99, socket.MSG_PEEK)')",
        "answer = child('answer = c.recv(99), c.recv(99)')",
    ),
    "closed by the other end, which still sends": (
        "s, a = pair(child)\n"
        "text = child('text = os.urandom(100) * 20_000; c.setblocking(False); sent = c.send(text); c.close()\\n'\n"
        "             'answer = hash(text[:sent]), sent')",
        "answer = text[1] > 1_000_000, a.recv(9, socket.MSG_PEEK) != b''",
        "data = b''\nwhile part := a.recv(1 << 20): data += part\nanswer = hash(data) == text[0]",
    ),
    "reset by the other end, with bytes unread": (
        "s, a = pair(child); a.send(b'not read'); child('time.sleep(0.1); c.send(b\"last words\"); c.close()')",
        "answer = a.recv(99, socket.MSG_PEEK)",
        "answer = [a.recv(99)]\ntry: a.recv(99)\nexcept OSError as error: answer.append(type(error).__name__)",
    ),
    "closed by both ends, with bytes unread": (
        "s, a = pair(child); child('c.send(b\"last words\")'); a.shutdown(1); child('c.recv(9); c.close()')\n"
        "time.sleep(0.1)",
        "answer = a.recv(99, socket.MSG_PEEK)",
        "answer = a.recv(99), a.recv(99)",
    ),
    "read no more": (
        "s, a = pair(child); a.shutdown(socket.SHUT_RD)",
        "answer = a.recv(9), a.send(b'x'), child('answer = c.recv(9)')",
        "",
    ),
    "options": (
        f"s, a = pair(child); options = {OPTIONS!r}\nfor option in options: a.setsockopt(*option)\n"
        "a.settimeout(3); os.set_inheritable(a.fileno(), True); a.setsockopt(1, 42, 2)",
        "answer = [a.getsockopt(level, number) for level, number, _ in options], a.getblocking(), a.getsockopt(1, 42)\n"
        "answer += os.get_blocking(a.fileno()), os.get_inheritable(a.fileno())\n"
        "a.setsockopt(1, 18, 1); answer += both(a, child); a.setsockopt(1, 18, 3); a.setsockopt(1, 42, 2)",
        "",
    ),
    "small segments": (
        "s = socket.create_server(('127.0.0.1', 0)); s.setsockopt(6, socket.TCP_MAXSEG, 700)\n"
        "child(f'c = socket.socket(); c.setsockopt(6, 2, 600); c.connect({s.getsockname()})'); a = s.accept()[0]",
        "answer = [s.getsockopt(6, 2), a.getsockopt(6, 2), child('answer = c.getsockopt(6, 2)'), both(a, child)]",
        "",
    ),
    "small windows, before the connection and after it": (
        "s = socket.create_server(('127.0.0.1', 0)); s.setsockopt(6, socket.TCP_WINDOW_CLAMP, 5000)\n"
        "child(f'c = socket.create_connection({s.getsockname()}); c.setsockopt(6, 10, 9000)'); a = s.accept()[0]",
        "answer = [s.getsockopt(6, 10), a.getsockopt(6, 10), child('answer = c.getsockopt(6, 10)'), both(a, child)]\n"
        "answer += [a.getsockopt(6, 11, 104)[6], child('answer = c.getsockopt(6, 2)')]",
        "",
    ),
    "a small buffer, which limits no segments": (
        "s, a = pair(child); a.setsockopt(1, socket.SO_RCVBUF, 4000)",
        "answer = *map(a.getsockopt, (1, 1), (8, 72)), child('answer = c.getsockopt(6, 2) > 30000'), both(a, child)",
        "",
    ),
    "watched by epoll": (
        "s, a = pair(child); level, edge = select.epoll(), select.epoll(); level.register(a, 1)\n"
        "edge.register(a, 1 | 1 << 31)",
        "child('c.send(b\"x\")'); answer = level.poll(5), edge.poll(5), a.recv(9), level.poll(0)",
        "",
    ),
    "waited for": (
        "s, a = pair(child); got = []\n"
        "child('c.settimeout(None)')\n"
        "child('threading.Thread(target=lambda: [c.send(c.recv(9).upper()) for _ in range(9)], daemon=True).start()')",
        "a.send(b'word'); answer = a.recv(9)",
        "",
    ),
    "shared with the child": (
        "ours, theirs = socket.socketpair(); s, a = pair(child)\nchild('d = c.dup()')",
        "answer = child('answer = d.getsockname() == c.getsockname(), d.send(b\"x\")'), a.recv(1)",
        "",
    ),
}


class TwoTrips:
    """The kinds of connections before, and after each of two dumps and restores."""

    def __init__(self, criu: Criu) -> None:
        self.seen: list[dict[str, str]] = []
        self.last: dict[str, str] = {}
        home = Path(tempfile.mkdtemp(prefix="gc-"))
        capsule = Capsule.create(home)
        try:
            subject = Subject(capsule)
            assert subject.tell(PRELUDE) == "None"
            for name, (make, _, _) in KINDS.items():
                assert self._run(subject, name, make) == "None", name
            self.seen.append({name: self._run(subject, name, state) for name, (_, state, _) in KINDS.items()})
            for _ in range(2):
                inner, pipes = capsule.inner_pid, capsule.pipes
                assert capsule.inspect()["refusals"] == []
                criu.dump(capsule, image(home), timeout=60)
                notes = capsule.inspect()["notes"]
                connections.abort_at_end(capsule.processes())
                capsule.close()
                capsule = Capsule.create(home)
                restored = criu.restore(capsule, image(home), pid=inner, pipes=pipes, timeout=60, notes=notes)
                assert restored.changed == []
                shutil.rmtree(image(home))
                self.seen.append({name: self._run(subject, name, state) for name, (_, state, _) in KINDS.items()})
            self.last = {name: self._run(subject, name, last) for name, (_, _, last) in KINDS.items()}
        finally:
            capsule.close()
            shutil.rmtree(home)

    @staticmethod
    def _run(subject: Subject, name: str, code: str) -> str:
        return subject.tell(f"answer = work({name!r}, {code!r})")


@pytest.fixture(scope="module")
def trips(criu_binary):
    return TwoTrips(Criu(criu_binary.argv))


LAST = {
    "unread in both directions": (b"for the parent", b"for the child", (4, b"ping", 4, b"pong")),
    "more unread than its reader has space for": True,
    "written to the end": (b"last words", b""),
    "closed by the other end, with bytes unread": (b"last words", b""),
    "over IPv6, closed by the other end, with bytes unread": (b"last words", b""),
    "closed by the listener's end, with bytes unread": (b"last words", b""),
    "closed by the other end, which still sends": True,
    "reset by the other end, with bytes unread": [b"last words", "ConnectionResetError"],
    "closed by both ends, with bytes unread": (b"last words", b""),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_connection_comes_back(trips, name):
    before, *after = [seen[name] for seen in trips.seen]
    assert "Error" not in before
    assert after == [before, before]
    assert trips.last[name] == repr(LAST.get(name))


def test_an_option_that_a_connection_cannot_have_again_is_named(home, capsule, criu):
    subject = Subject(capsule)
    subject.tell(PRELUDE)
    make = (
        "c = socket.socket(); c.setsockopt(6, 30, 1); c.connect({s.getsockname()}); c.send(b'word')"  # FASTOPEN_CONNECT
    )
    asked(subject, f"s = socket.create_server(('127.0.0.1', 0)); child(f{make!r}); a = s.accept()[0]")
    inner, pipes = capsule.inner_pid, capsule.pipes
    criu.dump(capsule, image(home), timeout=60)
    connections.abort_at_end(capsule.processes())
    capsule.close()
    with Capsule.create(home) as again:
        (lacking,) = criu.restore(again, image(home), pid=inner, pipes=pipes, timeout=60).changed
        assert re.fullmatch(r"TCP_FASTOPEN_CONNECT of a TCP connection of process \d+ .*\(descriptor \d+\)", lacking)
        assert asked(subject, "answer = a.recv(9)") == repr(b"word")


def asked(subject: Subject, code: str) -> str:
    return subject.tell(f"answer = work('one', {code!r})")


def dump_that_fails(how: str, home: Path, capsule: Capsule, criu: Criu) -> None:
    if how == "fails":
        with pytest.raises(CriuError):
            Criu([shutil.which("false")]).dump(capsule, home / "image", timeout=60)
    else:
        criu.dump(capsule, home / "image", timeout=60)
        capsule.resume_processes()


@pytest.mark.parametrize("reader", ["the client", "a client with a port of its own", "the listener's"])
@pytest.mark.parametrize("how", ["fails", "is taken back"])
def test_what_a_closed_end_still_sends_is_there_after_a_dump_that(how, reader, home, capsule, criu):
    subject = Subject(capsule)
    subject.tell(PRELUDE)
    send = "text = os.urandom(100) * 15_000; c.setblocking(False); sent = c.send(text); c.close(); "
    if reader != "the listener's":
        own = "('127.0.0.1', 0)" if "own" in reader else None
        make = f"s = socket.create_server(('127.0.0.1', 0)); a = socket.create_connection(s.getsockname(), 20, {own})\n"
        make += f"c = s.accept()[0]; {send} digest = hash(text[:sent])"
    else:
        make = f"s, a = pair(child); digest = child({send + 'answer = hash(text[:sent])'!r})"
    asked(subject, make)
    dump_that_fails(how, home, capsule, criu)
    read = "data = b''\nwhile part := a.recv(1 << 20): data += part\nanswer = hash(data) == digest, len(data) > 1 << 20"
    assert asked(subject, read) == repr((True, True))


@pytest.mark.parametrize("how", ["fails", "is taken back"])
def test_what_was_read_out_for_a_dump_is_put_back_when_it(how, home, capsule, criu):
    subject = Subject(capsule)
    subject.tell(PRELUDE)
    asked(subject, "s, a = pair(child); text = os.urandom(100) * 10_000; a.setblocking(False); sent = a.send(text)")
    asked(subject, "child('c.send(b\"back\")')")
    dump_that_fails(how, home, capsule, criu)
    assert asked(subject, "answer = a.getblocking(), a.recv(9)") == repr((False, b"back"))
    assert asked(subject, f"answer = child({READ_ALL}) == hash(text[:sent])") == "True"


def come_back(home: Path, capsule: Capsule, criu: Criu, change: Callable[[Path], object]) -> tuple[str, list[str]]:
    """Dump and restore two ends of a connection; ``change`` the file of connections in between.

    Return what the first end reads, and what was lost.
    """
    subject = Subject(capsule)
    subject.tell(PRELUDE)
    asked(subject, "s, a = pair(child); child('c.send(b\"word\")')")
    inner, pipes = capsule.inner_pid, capsule.pipes
    criu.dump(capsule, image(home), timeout=60)
    connections.abort_at_end(capsule.processes())
    capsule.close()
    change(image(home) / connections.FILE)
    with Capsule.create(home) as again:
        restored = criu.restore(again, image(home), pid=inner, pipes=pipes, timeout=60)
        return asked(subject, "answer = a.recv(9)"), restored.changed


def test_a_connection_comes_back_beside_a_listener_and_a_connection_that_cannot_be_reached(home, capsule, criu):
    def add_unreachable(path: Path) -> None:
        saved = json.loads(path.read_text())
        ((one, other),) = saved["connections"]
        lost = {**one, "descriptor": [one["descriptor"][0], 999]}
        saved["connections"].insert(0, [lost, {**lost, "address": other["address"]}])
        saved["listeners"].insert(0, lost["descriptor"])
        path.write_text(json.dumps(saved))

    answer, (lost,) = come_back(home, capsule, criu, add_unreachable)
    assert re.fullmatch(r"closed: a TCP connection of process \d+ with process \d+ \(.*Bad file descriptor\)", lost)
    assert answer == repr(b"word")


def test_an_image_of_a_release_that_saved_no_closed_ends(home, capsule, criu):
    def make_older(path: Path) -> None:
        saved = json.loads(path.read_text())
        assert saved.pop("closed") == []
        path.write_text(json.dumps(saved))

    assert come_back(home, capsule, criu, make_older) == (repr(b"word"), [])


@pytest.mark.parametrize(
    "content",
    ["", "7", "[]", "{}", '{"listeners": 1, "connections": []}', '{"listeners": [], "connections": [[{}, {}]]}'],
)
def test_a_kernel_whose_connections_cannot_be_read_comes_back_without_them(home, capsule, criu, content):
    answer, (lost,) = come_back(home, capsule, criu, lambda path: path.write_text(content))
    assert lost.startswith(f"closed: all TCP connections among its processes ({connections.FILE} cannot be read: ")
    assert answer == repr(b"")


def test_what_cannot_be_put_back_is_reported(home, capsule, criu):
    """The process that had sent it was killed while all were stopped."""
    subject = Subject(capsule)
    subject.tell(PRELUDE)
    asked(subject, "s, a = pair(child); child('c.setblocking(False); c.send(bytes(1_000_000))')")
    criu.dump(capsule, home / "image", timeout=60)
    (sender,) = capsule.other_processes()
    os.kill(sender, signal.SIGKILL)
    waiting.until(lambda: procfs.stat(sender).has_ended, "it has ended")
    lost = capsule.resume_processes()
    assert re.fullmatch(r"closed: a TCP connection of process \d+.* \(descriptor \d+\) \(.+\)", lost), lost
    assert asked(subject, "answer = 1") == "1"
    assert capsule.resume_processes() == ""


@pytest.mark.parametrize(
    ("make", "why"),
    [
        ("a.send(b'x', socket.MSG_OOB)", "out-of-band data that is not read yet"),
        ("a.setblocking(False); a.send(bytes(3 << 20))", "unread bytes; 2097152 can be saved"),
        ("a.setblocking(False); a.send(bytes(1 << 20)); a.shutdown(1)", "was closed for writing"),
        *([("a.setsockopt(6, 19, 1)", "under repair")] if os.geteuid() == 0 else []),
        (
            "child('c.setblocking(False); c.send(bytes(3 << 20)); c.close()'); b = a; s, a = pair(child, s)",
            r"process \d+ \(python.*\) \(descriptor \d+\) with \d+ unread bytes; 2097152 can be saved",
        ),
    ],
)
def test_a_connection_that_cannot_be_saved_is_refused_and_lives_on(make, why, home, capsule, criu):
    subject = Subject(capsule)
    subject.tell(PRELUDE)
    asked(subject, f"s, a = pair(child); {make}")
    with pytest.raises(LoopbackTcp, match=why):
        criu.dump(capsule, home / "image", timeout=60)
    if "repair" in why:
        asked(subject, "a.setsockopt(6, 19, -1)")
    assert asked(subject, "child('c.send(b\"still here\")'); answer = a.recv(99)") == repr(b"still here")


def listening(port: int) -> socket.socket | None:
    with contextlib.suppress(OSError):
        return socket.create_server(("127.0.0.1", port))
    return None


def test_a_connection_whose_addresses_are_taken_gets_others(home, criu):
    with Capsule.create(home) as capsule:
        subject = Subject(capsule)
        subject.tell(PRELUDE)
        port = int(asked(subject, "s, a = pair(child); s.close(); answer = a.getpeername()[1]"))
        assert asked(subject, "answer = both(a, child)") == repr((4, b"ping", 4, b"pong"))
        inner, pipes = capsule.inner_pid, capsule.pipes
        criu.dump(capsule, home / "image", timeout=60)
        notes = capsule.inspect()["notes"]
        connections.abort_at_end(capsule.processes())
    # Linux ends the killed processes' sockets in its own time, and any process here may be given a port for a moment,
    # whose connection then keeps it for a minute (TIME_WAIT).
    other = waiting.until(lambda: listening(port), f"port {port} is free", 150)
    with other, Capsule.create(home) as capsule:
        criu.restore(capsule, home / "image", pid=inner, pipes=pipes, timeout=60, notes=notes)
        assert asked(subject, f"answer = both(a, child), a.getpeername()[1] == {port}") == repr(
            ((4, b"ping", 4, b"pong"), False)
        )


def test_a_connection_that_cannot_be_made_again_is_closed_and_named(home, criu):
    with Capsule.create(home) as capsule:
        subject = Subject(capsule)
        subject.tell(PRELUDE)
        asked(subject, "s, a = pair(child)")
        inner, pipes = capsule.inner_pid, capsule.pipes
        criu.dump(capsule, home / "image", timeout=60)
        notes = capsule.inspect()["notes"]
    path = home / "image" / connections.FILE
    saved = json.loads(path.read_text())
    saved["connections"][0][0]["descriptor"][1] = 999
    path.write_text(json.dumps(saved))
    with Capsule.create(home) as capsule:
        restored = criu.restore(capsule, home / "image", pid=inner, pipes=pipes, timeout=60, notes=notes)
        assert "a TCP connection of process" in restored.changed[0]
        assert asked(subject, "answer = a.recv(9)") == repr(b"")
