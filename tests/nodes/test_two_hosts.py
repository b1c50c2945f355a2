"""A kernel moves between hosts that share a directory, and is never on both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client import connected
from host import Host, two_hosts
from waiting import until

from jupyter_gpu_ckpt.image import lease as leases

KERNEL_ID = "0c0ffee0-0000-4000-8000-00000000000a"


@pytest.fixture
def hosts(tmp_path, criu_binary) -> Iterator[tuple[Host, Host, Path]]:
    with two_hosts(tmp_path) as made:
        yield made


def began(host: Host, transport: str = "ipc") -> dict[str, Any]:
    facts = host.ask("start", KERNEL_ID, transport)
    assert "error" not in facts, f"{facts} {host.log.read_text()}"
    return facts


SETUP = """
import socket, threading, time, os, asyncio
n, ticks, log = 0, [], open("log.txt", "a")
async def tick():
    while True:
        await asyncio.sleep(0.01); ticks.append(time.monotonic())
task = asyncio.ensure_future(tick())
pid, began = os.getpid(), time.monotonic()
"""


def there_and_back(hosts: tuple[Host, Host, Path], times: int) -> None:
    near, far, shared = hosts
    facts = began(near)
    assert facts["hostname"] == "near"
    with connected(facts["info"]) as client:
        client.evaluate("n", SETUP)
        here, there = near, far
        for number in range(1, 2 * times + 1):
            left = here.ask("detach")
            assert "error" not in left, (left, here.log.read_text())
            here, there = there, here
            attached = began(here)
            assert attached["state"] == "checkpointed", f"attaching wakes nothing: {there.log.read_text()}"
            assert attached["info"] == facts["info"], "the same sockets and the same key"
            # The client wakes it by what any notebook sends; nothing is lost, nothing comes twice.
            assert client.evaluate("n, os.getpid() == pid", "n += 1; _ = log.write('x'); log.flush()") == (
                f"({number}, True)"
            )
            assert client.evaluate("socket.gethostname()") == f"'{here.name}'"
            # Its clocks continue where they were, whatever the uptime of the host: timers tick, and none is overdue.
            assert float(client.evaluate("time.monotonic() - began")) < 600
            assert client.evaluate("len(ticks) > seen", "seen = len(ticks); await asyncio.sleep(0.1)") == "True"
            until(lambda here=here: here.ask("state")["state"] == "running", "the wake has tidied up")
            assert there.ask("state").get("state") is None
        assert (shared / "log.txt").read_text() == "x" * 2 * times


def test_a_kernel_moves_there_and_back_while_its_client_stays(hosts):
    near, far, _ = hosts
    clocks = [host.ask("state") for host in (near, far)]
    assert clocks[0]["monotonic"] - clocks[1]["monotonic"] > 400_000, "hosts that were booted at different times"
    assert clocks[0]["server"] == clocks[1]["server"], "and give the same ids to their processes"
    there_and_back(hosts, 3)


@pytest.mark.torture
@pytest.mark.timeout(1200)
def test_a_kernel_moves_there_and_back_twenty_times(hosts):
    there_and_back(hosts, 20)


def test_ports_that_another_process_of_the_new_host_has(hosts):
    """The kernel's own connection is not by ports; the ports of the gate are chosen anew."""
    near, far, _ = hosts
    facts = began(near, "tcp")
    ports = [value for name, value in facts["info"].items() if name.endswith("_port")]
    near.ask("detach")
    far.ask("occupy", *ports)
    attached = began(far, "tcp")
    assert attached["state"] == "checkpointed"
    assert not {value for name, value in attached["info"].items() if name.endswith("_port")} & set(ports)
    restored = far.ask("restore")
    assert restored["state"] == "running", restored


def test_a_host_that_was_cut_off_while_its_kernel_slept_does_not_bring_it_back(hosts):
    """The other host has restored the kernel by then; reconnected, the first one is refused, and one kernel runs."""
    near, far, _ = hosts
    began(near, "tcp")
    near.ask("evaluate", "n", SETUP)
    near.ask("checkpoint")
    near.cut_off()
    began(far, "tcp")
    assert far.ask("restore")["state"] == "running"
    assert near.ask("restore")["error"] in ("IMAGE_NOT_FOUND", "STORE_UNWRITABLE", "IMAGE_FORMAT")
    near.heal()
    assert near.ask("restore")["error"] in ("IMAGE_NOT_FOUND", "IMAGE_BUSY")
    assert near.ask("state")["state"] == "checkpointed"
    assert far.ask("state")["state"] == "running"
    assert far.ask("evaluate", "n, socket.gethostname()")["value"] == "(0, 'far')"


def test_a_host_that_was_cut_off_in_the_middle_of_a_restore_gives_its_copy_up(hosts):
    """The host stalls just before the kernel would get messages, its locks are forgotten; the other one restores."""
    near, far, shared = hosts
    began(near, "tcp")
    image = near.ask("checkpoint")["image"]
    near.ask("stall", "release")
    near.cut_off()
    # What a file server does with the locks and leases of a host that it does not hear any more.
    (shared / "images" / f".{image}.lock").unlink()
    for lease in (shared / "images" / image / "lease").iterdir():
        lease.unlink()
    began(far, "tcp")
    assert far.ask("restore")["state"] == "running"
    near.heal()
    assert near.ask("proceed")["outcome"][0] in ("IMAGE_BUSY", "IMAGE_NOT_FOUND")
    assert near.ask("state")["pid"] is None, "what it had restored has ended"
    assert far.ask("state")["state"] == "running"


@pytest.mark.parametrize("one_machine", [True, False], ids=["one machine", "two machines"])
def test_a_host_that_was_killed_in_the_middle_of_a_restore(tmp_path, criu_binary, one_machine):
    """Its kernel lived already, and is gone: on the same machine that is known, of another it has to be said."""
    with two_hosts(tmp_path, one_machine=one_machine) as (near, far, shared):
        began(near, "tcp")
        near.ask("evaluate", "n", SETUP)
        image = near.ask("checkpoint")["image"]
        near.ask("stall", "discard_image")
        assert (shared / "images" / image / "claim.json").exists()
        began(far, "tcp")
        for lease in (shared / "images" / image / "lease").iterdir():
            lease.unlink()  # as if it had not been touched for long
        assert far.ask("restore")["error"] == "IMAGE_BUSY", "it lives"
        near.kill()
        restored = far.ask("restore")
        if not one_machine:
            assert restored["error"] == "IMAGE_BUSY"
            assert "break-claim" in restored["hint"]
            assert leases.break_claim(shared / "images" / image)
            restored = far.ask("restore")
        assert restored["state"] == "running", restored
        assert far.ask("evaluate", "n, socket.gethostname()")["value"] == "(0, 'far')"
