"""A server in which kernels could not be started stops by SIGTERM all the same, also by two."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import threading

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
        assert live.log.count("BRANCH_DIFFERS") == 1
        assert "[W " in next(line for line in live.log.splitlines() if "BRANCH_DIFFERS" in line)
        assert "Traceback" not in live.log
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


@pytest.mark.parametrize("verb", ["restart", "delete"])
def test_a_server_stops_while_a_kernel_is_restarted_or_shut_down(tmp_path, runtime_base, criu_binary, verb):
    """jupyter_client cannot shut down a kernel that it is restarting.  The fresh one is kept as others are."""
    (tmp_path / "work").mkdir()
    with server(tmp_path, runtime_base) as live:
        kernel_id = live.start_kernel()
        live.run(kernel_id, "x = 41")
        path = f"api/kernels/{kernel_id}" + ("/restart" if verb == "restart" else "")

        def ask() -> None:
            with contextlib.suppress(OSError):  # the server may end before it answers
                live.ask("POST" if verb == "restart" else "DELETE", path)

        request = threading.Thread(target=ask)
        request.start()
        until(lambda: ("to=saving" if verb == "restart" else "Kernel shutdown: ") in live.log)
        live.process.send_signal(signal.SIGTERM)
        ends_without_error(live)
        request.join()
    with server(tmp_path, runtime_base) as live:
        assert [each["id"] for each in live.get("api/kernels")] == [kernel_id] * (verb == "restart")
        if verb == "restart":
            assert live.run(kernel_id, "print('x' in dir())") == "False"
            assert len(live.get(f"gpu-ckpt/kernels/{kernel_id}/saves")) == 1


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


class FailingShutdown(CheckpointKernelManager):
    """jupyter_client's shutdown of all kernels fails, as for one that ends meanwhile."""

    async def _async_shutdown_kernel(self, kernel_id, now=False, restart=False):
        raise asyncio.InvalidStateError


async def test_a_stop_ends_kernels_that_cannot_be_shut_down():
    ended = []

    class Kernel:
        async def shutdown_kernel(self, now):
            ended.append(now)

    kernels = FailingShutdown()
    kernels._kernels["k"] = Kernel()
    await kernels.shutdown_all()
    assert ended == [True]


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
