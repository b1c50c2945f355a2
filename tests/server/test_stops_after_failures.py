"""A server in which kernels could not be started stops by SIGTERM all the same, also by two."""

from __future__ import annotations

import asyncio
import signal
import subprocess

import pytest
from live import Server, server, until

from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.server.kernel_manager import CheckpointKernelManager

LISTENER = "import socket; listener = socket.create_server(('127.0.0.1', 0))"


def test_a_server_stops_after_a_refused_branch(tmp_path, runtime_base, criu_binary):
    (tmp_path / "work").mkdir()
    with server(tmp_path, runtime_base) as live:
        source = live.start_kernel()
        live.run(source, LISTENER)
        files = sorted((live.home / "runtime").iterdir())
        assert live.do(source, "branch")["error"]["code"] == "BRANCH_DIFFERS"
        assert sorted((live.home / "runtime").iterdir()) == files
        live.process.send_signal(signal.SIGTERM)
        ends_without_error(live)


def test_a_server_stops_by_two_signals(tmp_path, runtime_base, criu_binary):
    """The second comes while kernels are checkpointed, as from an impatient user."""
    go = tmp_path / "go"
    with server(tmp_path, runtime_base) as live:
        kernel_id = live.start_kernel()
        live.run(kernel_id, "import os, time")
        with live.client(kernel_id) as client:
            client.execute(f"while not os.path.exists({str(go)!r}): time.sleep(0.01)")
            while client.get_iopub_msg(timeout=60)["msg_type"] != "execute_input":
                pass
            for count in (1, 2):
                live.process.send_signal(signal.SIGTERM)
                until(lambda count=count: live.log.count("received signal") == count)
            go.touch()
            ends_without_error(live)


def ends_without_error(live: Server) -> None:
    try:
        live.process.wait(60)
    except subprocess.TimeoutExpired:
        pytest.fail(f"The server runs on: {live.log}")
    assert "Traceback" not in live.log.partition("received signal")[2]


class FailingStart(CheckpointKernelManager):
    """Its kernels fail to start, once they are let; jupyter_server's manager else."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.may_fail = asyncio.Event()

    def pre_start_kernel(self, kernel_name, kwargs):
        manager, name, kernel_id = super().pre_start_kernel(kernel_name, kwargs)

        async def fail(**_):
            await self.may_fail.wait()
            manager.ready.set_exception(GpuCkptError("It cannot be started."))
            raise manager.ready.exception()

        manager.start_kernel = fail
        return manager, name, kernel_id


async def test_nothing_is_left_of_a_kernel_that_could_not_be_started():
    kernels = FailingStart()
    kernels.may_fail.set()
    with pytest.raises(GpuCkptError, match="cannot be started"):
        await kernels.start_kernel()
    assert not kernels._pending_kernels
    await kernels.shutdown_all()


async def test_a_stop_waits_for_a_start_under_way():
    kernels = FailingStart()
    start = asyncio.ensure_future(kernels.start_kernel())
    while not kernels._pending_kernels:
        await asyncio.sleep(0)
    stop = asyncio.ensure_future(kernels.shutdown_all())
    await asyncio.sleep(0)
    assert not stop.done()
    kernels.may_fail.set()
    await stop
    with pytest.raises(GpuCkptError, match="cannot be started"):
        await start
