"""``input()`` after a wake, in kernels whose stdin socket does not let a peer replace another of its name.

Such a kernel (xeus, IRkernel) looks at that socket only in an ``input()``: until then the gate's closed connection is
there still, and a new one of the same name is ignored for good.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gate_world import DEADLINE, Kernel, World, reply
from jupyter_client import BlockingKernelClient
from waiting import until

#: ipykernel with the socket that other kernels have.
STUBBORN = """
import sys
from ipykernel.kernelapp import IPKernelApp

class Stubborn(IPKernelApp):
    def init_sockets(self):
        super().init_sockets()
        self.stdin_socket.router_handover = 0

Stubborn.launch_instance(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def stubborn_kernel() -> Iterator[Kernel]:
    kernel = Kernel("-c", STUBBORN)
    yield kernel
    kernel.remove()


@pytest.fixture
def stubborn(stubborn_kernel: Kernel, tmp_path: Path) -> Iterator[World]:
    world = World(stubborn_kernel, tmp_path, stable_name=False)
    world.up()
    yield world
    for client in world.clients:
        client.stop_channels()
    world.gate.stop()


def ask(client: BlockingKernelClient, name: str) -> str:
    """Run a cell that asks for a name; return what it got."""
    cell = client.execute("said = input('name? ')", user_expressions={"said": "said"}, allow_stdin=True)
    assert client.get_stdin_msg(timeout=DEADLINE)["content"]["prompt"] == "name? "
    client.input(name)
    answer = reply(client, cell)["content"]
    assert answer["status"] == "ok", answer
    return answer["user_expressions"]["said"]["data"]["text/plain"]


def test_input_is_answered_after_each_wake(stubborn: World) -> None:
    client = stubborn.client()
    for name in ("Ada", "Bob", "Cid"):
        assert ask(client, name) == repr(name)
        stubborn.to_sleep()
        stubborn.wake()


def test_input_is_answered_where_a_later_gate_wakes_the_kernel(stubborn: World) -> None:
    client = stubborn.client()
    assert ask(client, "Ada") == "'Ada'"
    stubborn.to_sleep()
    identity = stubborn.gate.identity
    stubborn.gate.stop()
    stubborn.gate = stubborn.new_gate(identity=identity, stable_name=False)
    stubborn.gate.start()
    stubborn.gate.sleep()
    stubborn.wake()
    assert ask(stubborn.client(), "Bob") == "'Bob'"


def test_a_later_gate_has_the_name_that_the_last_one_had(stubborn: World, tmp_path: Path) -> None:
    """A server ended while a cell ran: the cell's answer goes to the name from which the cell came."""
    stubborn.to_sleep()
    stubborn.wake()
    client = stubborn.client()
    cell = client.execute(f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.3)")
    until(lambda: stubborn.gate.working, "the cell is under way")
    identity = stubborn.gate.identity
    stubborn.gate.stop()
    stubborn.gate = stubborn.new_gate(identity=identity, stable_name=False)
    coming = stubborn.in_thread(stubborn.up)
    until(lambda: any(stubborn.gate._router._internal), "its first question waits behind the cell")
    (tmp_path / "go").touch()
    coming.join()
    assert reply(client, cell)["content"]["status"] == "ok"
