"""A kernel that listens gets its port back, whatever becomes of the connections it had: they are its own."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from pathlib import Path

import pytest
from harness import until

from jupyter_gpu_ckpt.node import facts

LISTEN = """
import socket, threading
s = socket.socket({family})
s.bind(({address!r}, 0))
s.listen()
port = s.getsockname()[1]
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("client", ["inside", "outside"])
async def test_a_listener_with_connections_comes_back_at_once(subject, client, address):
    """Without SO_REUSEADDR; the connections are open when the kernel leaves, and close with its process."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    await subject.run(LISTEN.format(family=int(family), address=address))
    port = int(await subject.run("print(port)"))
    ends = []
    for _ in range(3):
        if client == "inside":
            await subject.run(
                f"c = socket.create_connection(({address!r}, port)); ours = s.accept()[0]; ran += [c, ours]"
            )
        else:
            ends.append(socket.create_connection((address, port), timeout=60))
            await subject.run("ran.append(s.accept()[0])")
    for _ in range(2):
        await subject.provisioner.checkpoint()
        await subject.provisioner.restore()
        assert await subject.run("print(s.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR))") == "0"
        for end in ends:  # they were closed, not cut off: what was sent before arrives
            assert end.recv(1) == b""
            end.close()
        ends = [socket.create_connection((address, port), timeout=60)]
        # The client's end first: the other one would linger on the listener's port, and a wake waits for that.
        await subject.run("for one in ran: one.close()")
        await subject.run("ran[:] = [s.accept()[0]]")
    ends[0].close()
    await subject.run("ran[0].close(); ran.clear()")


async def closed_before(subject) -> int:
    """A listener's port on which a connection lingers that the kernel had closed first."""
    await subject.run(LISTEN.format(family=int(socket.AF_INET), address="127.0.0.1"))
    port = int(await subject.run("print(port)"))
    with socket.create_connection(("127.0.0.1", port), timeout=60) as end:
        await subject.run("s.accept()[0].close()")
        assert end.recv(1) == b""
    await until(lambda: "06" in states(port))
    return port


def states(port: int) -> list[str]:
    """Of the TCP connections of a port, as /proc/net/tcp numbers them."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [words[3] for words in rows if words[1].endswith(f":{port:04X}")]


async def test_connections_in_time_wait_are_reported_as_such(subject):
    """A wake that cannot wait: the error names no other process, for there is none."""
    lifecycle = subject.kernel.lifecycle
    port = await closed_before(subject)
    await subject.provisioner.checkpoint()
    assert facts.unbindable("127.0.0.1", port) == facts.LINGERS
    lifecycle.kernel.settings = dataclasses.replace(lifecycle.kernel.settings, lingering=0.3)
    error = await subject.fails(subject.provisioner.restore, "PORT_TAKEN")
    assert "connections that were closed linger" in error.message
    assert "Wait a minute" in error.hint
    await subject.stays_away(error)


async def test_a_wake_waits_for_connections_in_time_wait_and_no_longer(subject, monkeypatch):
    port = await closed_before(subject)
    await subject.provisioner.checkpoint()
    looks, real = [], facts.unbindable

    def gone_after_three(*args) -> str:
        looks.append(real(*args))
        return facts.LINGERS if len(looks) < 3 else ""

    monkeypatch.setattr(facts, "unbindable", gone_after_three)
    subject.send()
    assert (await subject.reply())["status"] == "error"  # CRIU's own word: here it only seemed to be gone
    assert len(looks) == 3
    assert f"wakes as soon as this is free: Port {port} on 127.0.0.1" in await subject.printed("stderr")


async def test_a_shutdown_does_not_wait_for_connections_in_time_wait(subject):
    await closed_before(subject)
    await subject.provisioner.checkpoint()
    subject.send()
    await until(lambda: subject.kernel.state == "restoring")
    await asyncio.wait_for(subject.kernel.manager.shutdown_kernel(now=True), 20)
    assert (await subject.reply())["status"] == "error"


@pytest.mark.torture
async def test_a_wake_comes_through_once_the_minute_is_over(subject):
    port = await closed_before(subject)
    await subject.provisioner.checkpoint()
    await asyncio.wait_for(subject.provisioner.restore(), 100)
    with socket.create_connection(("127.0.0.1", port), timeout=60):
        await subject.run("s.accept()[0].close()")
    assert await subject.run("print(x)") == "41"
