"""Questions that the kernel never answers keep nobody from sleeping."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gate_world import DEADLINE, Kernel, World, reply, send, settle
from waiting import until

from jupyter_gpu_ckpt.errors import KernelBusy

#: A kernel that reads its control channel and answers nothing there, as IRkernel does.
MUTE = """
import sys
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp

class Mute(IPythonKernel):
    async def process_control(self, *_):
        pass

IPKernelApp.launch_instance(sys.argv[1:], kernel_class=Mute)
"""


@pytest.fixture(scope="module")
def mute_kernel() -> Iterator[Kernel]:
    kernel = Kernel("-c", MUTE)
    yield kernel
    kernel.remove()


@pytest.fixture
def mute(mute_kernel: Kernel, tmp_path: Path) -> Iterator[World]:
    world = World(mute_kernel, tmp_path)
    world.up()
    yield world
    for client in world.clients:
        client.stop_channels()
    world.gate.stop()


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("kernel_info_request", {}),
        ("usage_request", {}),
        ("comm_info_request", {}),
        ("debug_request", {"type": "request", "seq": 1, "command": "debugInfo", "arguments": {}}),
    ],
)
def test_a_question_that_is_never_answered_on_the_control_channel_is_given_a_moment(mute, kind, content) -> None:
    client = mute.client(hb=False)
    send(client, kind, content, "control")
    until(lambda: mute.gate.under_way.others == (kind,), "it is under way")
    begun = time.monotonic()
    mute.gate.drain(DEADLINE)
    assert 0.5 < time.monotonic() - begun < DEADLINE / 2
    assert (mute.gate.state, mute.gate.pending) == ("drained", [])
    mute.gate.release()
    assert reply(client, client.execute("1"))["content"]["status"] == "ok"


def test_a_cell_is_waited_for_whatever_else_is_under_way(mute, tmp_path: Path) -> None:
    client = mute.client(hb=False)
    send(client, "kernel_info_request", {}, "control")
    cell = client.execute(f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)")
    until(lambda: mute.gate.under_way.cells == 1, "the cell is under way")
    with pytest.raises(KernelBusy) as raised:
        mute.gate.drain(2.0)
    assert raised.value.details["pending"] == ["execute_request"]
    mute.gate.release()
    (tmp_path / "go").touch()
    reply(client, cell)


def test_endless_requests_do_not_fill_the_queue(mute) -> None:
    client = mute.client(hb=False)
    for _ in range(300):
        send(client, "usage_request", {}, "control")
    settle(client)
    until(lambda: len(mute.gate.pending) <= 100, "the oldest are forgotten")


def test_an_answer_that_comes_late_is_passed_on(up: World) -> None:
    client = up.client()
    up.kernel.process.send_signal(19)  # SIGSTOP: it answers later
    try:
        asked = send(client, "kernel_info_request", {}, "control")
        until(lambda: up.gate.under_way.others == ("kernel_info_request",), "it is under way")
        up.gate.drain(DEADLINE)
        up.gate.release()
    finally:
        up.kernel.process.send_signal(18)
    assert reply(client, asked, "control")["msg_type"] == "kernel_info_reply"


#: A kernel in which a moment passes between a cell's reply and its idle.
SLOW_TO_END = """
import sys, time
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp

class Slow(IPythonKernel):
    async def execute_request(self, *arguments):
        await super().execute_request(*arguments)
        time.sleep(0.5)

IPKernelApp.launch_instance(sys.argv[1:], kernel_class=Slow)
"""


def test_a_cell_that_has_its_reply_and_may_still_request_a_verb_is_named(tmp_path: Path) -> None:
    kernel = Kernel("-c", SLOW_TO_END)
    try:
        world = World(kernel, tmp_path)
        world.up()
        client = world.client(hb=False)
        reply(client, client.execute("1", silent=True))
        under_way = world.gate.under_way
        assert (under_way.cells, under_way.ending) == (0, True)
        until(lambda: not world.gate.under_way.ending, "its idle has come")
        client.stop_channels()
        world.gate.stop()
    finally:
        kernel.remove()
