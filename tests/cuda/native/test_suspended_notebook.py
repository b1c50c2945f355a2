"""A real notebook kernel whose threads are frozen while it is suspended: what its clients and server do meanwhile.

ipykernel, its server's side, CRIU and the images are real; both drivers are doubles.  A thread of the kernel makes
calls that end a suspended process (`suspending`), and no library keeps them back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json

import pytest
from fast_program import A
from harness import alive, notebook
from suspending import QUERIES, SuspendingDriver, thread_states

from jupyter_gpu_ckpt.errors import CriuError
from jupyter_gpu_ckpt.kernel import engine
from jupyter_gpu_ckpt.lifecycle import dump
from jupyter_gpu_ckpt.testing.fake_cuda import FakeCuda, FakeGpus

MIB = 1 << 20
ID = "0c0ffee0-0000-4000-8000-000000000002"
#: Seconds in which the thread would have made 30 calls.
WHILE = 0.3
SIGNALS = "import signal; signal.signal(signal.SIGINT, lambda *_: heard.append(2))"


class Host:
    """A driver, and the starts of one kernel by one server after the other."""

    def __init__(self, tmp_path, runtime_base, doubles, monkeypatch) -> None:
        self._path, self._base, self._libcuda = tmp_path, runtime_base, doubles / "libcuda.so.1"
        self.driver = SuspendingDriver({A: 200 * MIB})
        images = tmp_path / "images"
        fakes = {"cuda": FakeCuda(self.driver), "gpus": FakeGpus(self.driver, tmp_path / "locks")}
        monkeypatch.setitem(engine._engines, images, dataclasses.replace(engine.shared_engine(images), **fakes))

    @contextlib.asynccontextmanager
    async def server(self):
        """The kernel of `ID`, found or started."""
        async with notebook(self._path, self._base, kernel_id=ID) as kernel:
            kernel.provisioner.sinks.append(lambda event: self._follow(kernel, event))
            yield kernel

    async def begin(self, kernel) -> None:
        """Have the kernel use the GPU."""
        pid = kernel.lifecycle.capsule.host_pid
        self._fake = self.driver.processes[self.driver.start({A: 8 * MIB}, pid=pid)]
        file = self._path / "suspended"
        self.driver.add_double(pid, file)
        await kernel.run(QUERIES)
        await kernel.run(f"query({str(file)!r}, {str(self._libcuda)!r})")
        await self.continues(kernel)

    def _follow(self, kernel, event) -> None:
        if (event.kind, event.step) == ("completed", "end_process"):
            self.driver.processes.clear()
        elif (event.kind, event.step) == ("completed", "criu_restore"):
            self.driver.add(self._fake, kernel.lifecycle.capsule.host_pid)

    async def continues(self, kernel) -> None:
        """A cell runs, and so does the thread."""
        before = int(await kernel.run("print(queries[0])"))
        await kernel.run(f"while queries[0] <= {before}: time.sleep(0.01)")
        assert await kernel.run("print(errors, heard)") == "[] []"
        await kernel.settled("running")
        assert "t" not in set().union(*thread_states(kernel.lifecycle.capsule.host_pid).values())


@pytest.fixture
def host(tmp_path, runtime_base, doubles, criu_binary, monkeypatch):
    return Host(tmp_path, runtime_base, doubles, monkeypatch)


@pytest.fixture
async def kernel(host):
    async with host.server() as kernel:
        await host.begin(kernel)
        yield kernel


async def stays(kernel) -> None:
    """Assert that the kernel is suspended and lives on; of its threads only those of the driver and of libzmq run."""
    assert kernel.state == "suspended"
    pid = kernel.lifecycle.capsule.host_pid
    states = thread_states(pid)
    running = {name for name, letters in states.items() if "t" not in letters}
    assert running <= {"cuda0000000d00e", "cuda-EvtHandlr", "ZMQbg/Reaper", "ZMQbg/IO/0"}
    assert "ZMQbg/IO/0" in running
    await asyncio.sleep(WHILE)
    assert alive([pid]) == [pid]
    assert await kernel.manager.is_alive()


async def test_clients_of_a_suspended_kernel_notice_nothing(kernel, host):
    for _ in range(2):
        await kernel.provisioner.suspend()
        await stays(kernel)
        kernel.client.hb_channel.unpause()
        await asyncio.sleep(1.2)  # a beat a second
        assert kernel.client.hb_channel.is_beating()
        assert (await kernel.client.kernel_info(reply=True, timeout=60))["content"]["status"] == "ok"
        await stays(kernel)
        await host.continues(kernel)


async def test_an_interrupt_of_a_suspended_kernel_is_for_the_cells_that_wait(kernel, host):
    await kernel.run(SIGNALS)
    await kernel.provisioner.suspend()
    await kernel.manager.interrupt_kernel()
    await stays(kernel)
    await host.continues(kernel)


async def test_it_continues_to_the_disk_and_comes_back(kernel, host):
    for _ in range(2):
        await kernel.provisioner.suspend()
        await stays(kernel)
        await kernel.provisioner.checkpoint()
        await host.continues(kernel)


async def test_a_checkpoint_that_fails_leaves_it_suspended_and_a_cell_wakes_it(kernel, host, monkeypatch):
    def fail(*_: object) -> None:
        raise CriuError("Not proven.")

    await kernel.provisioner.suspend()
    with monkeypatch.context() as patch:
        patch.setattr(dump, "_require_proven", fail)
        for _ in range(2):
            with pytest.raises(CriuError) as failure:
                await kernel.provisioner.checkpoint()
            assert "suspended" in failure.value.left
            assert kernel.lifecycle.kernel.disconnected, "nobody has waited for its answer"
            await stays(kernel)
    await host.continues(kernel)
    await kernel.provisioner.suspend()
    await kernel.provisioner.checkpoint()
    await host.continues(kernel)


async def test_the_status_of_a_suspended_kernel_needs_no_answer_of_it(kernel, host):
    """The panel and the idle policy read it, and a magic's request that came just before the suspend."""
    await kernel.provisioner.suspend()
    status = await asyncio.to_thread(kernel.provisioner.agent_requests.status, kernel.lifecycle, {})
    assert status["state"] == "suspended"
    json.dumps(status)
    await stays(kernel)
    await host.continues(kernel)


@pytest.mark.parametrize("how", ["restart", "shut down"])
async def test_a_suspended_kernel_is_ended_at_once(kernel, how):
    await kernel.provisioner.suspend()
    pid = kernel.lifecycle.capsule.host_pid
    kernel.manager.shutdown_wait_time = 600.0  # it would be killed after that if it had to act on the request
    if how == "restart":
        await asyncio.wait_for(kernel.manager.restart_kernel(now=False), 60)
        await kernel.client.wait_for_ready(timeout=60)
        assert await kernel.run("print('queries' in globals())") == "False"
    else:
        await asyncio.wait_for(kernel.manager.shutdown_kernel(now=False), 60)
    assert alive([pid]) == []


async def test_the_next_server_finds_it_suspended_and_wakes_it(host):
    async with host.server() as first:
        await host.begin(first)
        await first.run("x = 41")
        await first.provisioner.suspend()
        await asyncio.to_thread(first.provisioner._host.detach)
        async with host.server() as second:
            await stays(second)
            assert await second.run("x += 1; print(x)") == "42"
            await host.continues(second)
            await second.provisioner.suspend()
            await stays(second)
            await second.provisioner.checkpoint()
            await host.continues(second)
