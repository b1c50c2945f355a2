"""A request that the kernel has missed is seen when another client connects (ipykernel 7.0 to 7.3): the gate does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gate_world import DEADLINE, Kernel, World, reply

#: ipykernel that handles a request with the word "missed" when the next connection is made, at the earliest.
INATTENTIVE = """
import sys
import zmq
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp

class Inattentive(IPythonKernel):
    async def shell_channel_thread_main(self, message):
        if any(b"missed" in bytes(frame) for frame in message):
            while events.poll(0):
                events.recv_multipart()
            assert events.poll(60_000)
        await super().shell_channel_thread_main(message)

class App(IPKernelApp):
    def init_sockets(self):
        global events
        super().init_sockets()
        events = self.shell_socket.get_monitor_socket(zmq.EVENT_ACCEPTED)

App.launch_instance(sys.argv[1:], kernel_class=Inattentive)
"""


@pytest.fixture(scope="module")
def inattentive_kernel() -> Iterator[Kernel]:
    kernel = Kernel("-c", INATTENTIVE)
    yield kernel
    kernel.remove()


@pytest.fixture
def inattentive(inattentive_kernel: Kernel, tmp_path: Path) -> Iterator[World]:
    world = World(inattentive_kernel, tmp_path)
    world.up()
    yield world
    for client in world.clients:
        client.stop_channels()
    world.gate.stop()


def test_cells_that_the_kernel_has_missed_run_soon(inattentive: World) -> None:
    client = inattentive.client()
    for _ in range(2):
        assert reply(client, client.execute("'missed'"))["content"]["status"] == "ok"
        assert reply(client, client.execute("1"))["content"]["status"] == "ok"


def test_a_request_of_the_gates_own_that_the_kernel_has_missed_is_answered(inattentive: World) -> None:
    content = inattentive.gate.request("comm_info_request", {"target_name": "missed"}, DEADLINE)
    assert content["status"] == "ok"


def test_a_kernel_that_can_accept_no_connection_is_not_nudged(inattentive_kernel: Kernel, tmp_path: Path) -> None:
    """A connection would end it (`process.descriptors`)."""
    answers = [False, False, True]
    world = World(inattentive_kernel, tmp_path)
    world.gate = world.new_gate(may_nudge=lambda: answers.pop(0) if answers else True)
    world.up()
    try:
        client = world.client()
        assert reply(client, client.execute("'missed'"))["content"]["status"] == "ok"
        assert answers == []
        client.stop_channels()
    finally:
        world.gate.stop()
