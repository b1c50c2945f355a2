"""Every socket option comes back from two dumps and restores, or is named: on each kind of socket that comes back.

The subject tries all numbers that an option may have, with values of all forms (`every_option`): an option that is new
in a later Linux is found, too.
"""

from __future__ import annotations

import ast
import os
import shutil
import socket
import struct
import tempfile
from pathlib import Path

import every_option
import pytest
import sweeps
from round_trip import Subject, image

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.criu.criu import Criu
from jupyter_gpu_ckpt.process import connections, sockets

ROOT = os.geteuid() == 0

#: Numbers of a connection that Linux chooses and a program cannot set.
OF_LINUX = {"SO_INCOMING_CPU", "IP_MULTICAST_TTL", "IPV6_MULTICAST_IF", "IPV6_MULTICAST_HOPS"}
#: A connection's segments that no TCP_MAXSEG limits, over the loopback device.
UNLIMITED_SEGMENT = 30_000
SO_BUF_LOCK = 72


class Trip:
    """All options of some sockets before, and after each of two dumps and restores."""

    def __init__(self, criu: Criu, kind: str, make: str) -> None:
        home = Path(tempfile.mkdtemp(prefix="gc-"))
        capsule = Capsule.create(home)
        try:
            subject = Subject(capsule)
            support = str(Path(every_option.__file__).parent)
            code = f"import sys; sys.dont_write_bytecode = True; sys.path.insert(0, {support!r}); import every_option"
            assert subject.tell(f"{code}\nevery_option.{make}", timeout=120) == "None"
            ask = f"answer = every_option.state({kind!r})"
            self.seen = [ast.literal_eval(subject.tell(ask))]
            self.named: list[str] = []
            for _ in range(2):
                inner, pipes = capsule.inner_pid, capsule.pipes
                assert capsule.inspect()["refusals"] == []
                criu.dump(capsule, image(home), timeout=60)
                state = capsule.inspect()
                assert state["refusals"] == []
                connections.abort_at_end(capsule.processes())
                sockets.let_ports_be_rebound(capsule.processes())
                capsule.close()
                capsule = Capsule.create(home)
                restored = criu.restore(capsule, image(home), pid=inner, pipes=pipes, timeout=60, notes=state["notes"])
                self.named += restored.changed
                shutil.rmtree(image(home))
                self.seen.append(ast.literal_eval(subject.tell(ask)))
        finally:
            capsule.close()
            shutil.rmtree(home)

    def differences(self, kind: str) -> list[str]:
        """Return the options that have changed and were not named."""
        before, *later = self.seen
        return [
            f"{options}: {name} of end {number} was {value}, is {now[options][number][name]}"
            for options, ends in before.items()
            for number, end in enumerate(ends)
            for name, value in end.items()
            for now in later
            if not is_alike(kind, name, value, now[options][number][name])
            and not any(name in named for named in self.named)
        ]


def is_alike(kind: str, name: str, before: str, after: str) -> bool:
    if before == after:
        return True
    if "connect" not in kind:
        return False
    if name == "TCP_MAXSEG":  # two ends that connect at once begin with other windows, on which it depends
        sizes = [int.from_bytes(bytes.fromhex(value), "little") for value in (before, after)]
        return min(sizes) > UNLIMITED_SEGMENT
    # Linux sets the latter where a socket is bound to an address, as it cannot be left to chance here.
    return (name in OF_LINUX and "TCP" in kind) or (
        name == "IPV6_V6ONLY" and (before, after) == ("00000000", "01000000")
    )


CASES = [(kind, level) for kind, (_, _, levels) in every_option.KINDS.items() for level in levels]
LEVELS = {1: "SOL_SOCKET", 0: "IP", 41: "IPv6", 6: "TCP", 17: "UDP", 136: "UDP-Lite", 270: "netlink"}


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize(("kind", "level"), CASES, ids=[f"{kind}: {LEVELS[level]}" for kind, level in CASES])
def test_an_option_comes_back(criu_binary, kind, level):
    trip = Trip(Criu(criu_binary.argv), kind, f"make_each({kind!r}, {level})")
    assert trip.differences(kind) == []
    assert trip.seen[0], "no option can be set"


@pytest.mark.sweep(1 / 6)
@pytest.mark.parametrize("kind", every_option.KINDS)
def test_several_options_of_one_socket_come_back(criu_binary, kind):
    seed = f"{os.environ[sweeps.SEED]} {kind}"
    trip = Trip(Criu(criu_binary.argv), kind, f"make_some({kind!r}, 20, {seed!r})")
    assert trip.differences(kind) == []
    assert len(trip.seen[0]) == 20


@pytest.mark.parametrize("kind", ["a TCP socket before its connection", "a TCP connection"])
def test_a_receive_buffer_that_is_small_and_not_locked_comes_back(criu_binary, kind):
    """Neither its lock nor the scale of the window shows whether it was set before the connection or after it."""
    options = {(socket.SOL_SOCKET, socket.SO_RCVBUF): b"\1\0\0\0", (socket.SOL_SOCKET, SO_BUF_LOCK): b"\1\0\0\0"}
    trip = Trip(Criu(criu_binary.argv), kind, f"make_with({kind!r}, {options!r})")
    assert trip.differences(kind) == []
    (ends,) = trip.seen[0].values()
    segments = int.from_bytes(bytes.fromhex(ends[1]["TCP_MAXSEG"]), "little")
    assert (segments < UNLIMITED_SEGMENT) == ("before" in kind)


@pytest.mark.parametrize("priority", [0, 3])
def test_a_priority_that_was_set_after_the_type_of_service_is_kept(priority):
    """CRIU restores the priority; the type of service of IPv4 that a socket of IPv6 has is put back after it."""
    with socket.socket(socket.AF_INET6) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, priority)
        assert sockets.reapply(sock, {"IP_TOS": struct.pack("=i", 0x10).hex()}) == []
        assert sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 0x10
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == priority


def test_a_low_water_mark_above_the_receive_buffer_is_kept():
    """A program may make the buffer smaller after it; CRIU restores the buffer first."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 3)
        size, lock = (sock.getsockopt(socket.SOL_SOCKET, number) for number in (socket.SO_RCVBUF, 72))
        wanted = struct.pack("=i", 0x736C74)
        assert sockets.reapply(sock, {"SO_RCVLOWAT": wanted.hex()}) == []
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 4) == wanted
        assert [sock.getsockopt(socket.SOL_SOCKET, number) for number in (socket.SO_RCVBUF, 72)] == [size, lock]
