"""Notebooks that share a GPU on which one of them fits: real kernels, gates and library, a double of the driver."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest
from harness import until
from sharing_kernels import MIB, SharedHost, sharing

from jupyter_gpu_ckpt.lifecycle.plans import State

A, B = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"


@pytest.fixture
def host(tmp_path, runtime_base, programs, doubles, criu_binary, monkeypatch):
    return SharedHost(tmp_path, runtime_base, programs, doubles, monkeypatch, {A: 100 * MIB})


@contextlib.asynccontextmanager
async def two(host, **traits):
    """Two notebooks of 68 MiB each; the second one has the GPU."""
    async with host.notebook("one", **traits) as one, host.notebook("two", **traits) as two:
        await host.allocate(one, 60, 1, A)
        await asyncio.to_thread(one.lifecycle.yield_gpu)
        await host.allocate(two, 60, 2, A)
        yield one, two


async def test_memory_is_taken_from_the_idle_one_and_a_cell_without_cuda_moves_nothing(host):
    async with two(host) as (one, other):
        began = time.monotonic()
        assert await one.run("print(6 * 7)") == "42"
        assert time.monotonic() - began < 2
        assert (one.state, other.state) == ("off_gpu", "running")
        assert await one.run("n = compute(0.05); print(intact())") == "True"
        assert (one.state, other.state) == ("running", "off_gpu")
        await until(lambda: sharing(one).participant.turn is None)
        # And back, which the other's cell says on its stderr.
        assert await other.run("n = compute(0.05); print(intact())") == "True"
        await until(lambda: one.state == "off_gpu")
        for kernel in (one, other):
            assert await kernel.run("print(intact(), n > 0)") == "True True"


async def test_cells_that_compute_at_the_same_time_take_turns_and_all_end(host):
    async with two(host) as (one, other):
        states = []
        for kernel in (one, other):
            kernel.provisioner.on_state.append(lambda state, kernel=kernel: states.append((kernel, state)))
        cells = [kernel.run("n = compute(2.0); print(intact())") for kernel in (one, other)]
        assert await asyncio.gather(*cells) == ["True", "True"]
        moves = [kernel for kernel, state in states if state is State.OFF_GPU]
        assert moves.count(one) >= 1, "taken away in the middle of its cell"
        assert moves.count(other) >= 1
        on = [sharing(kernel).participant.used for kernel in (one, other)]
        assert min(on) > 1.0


async def test_a_cell_says_what_it_waits_for_and_an_interrupt_gives_the_place_back(host):
    async with two(host) as (one, other):
        other.provisioner.agent_requests.protect(3600)  # the idle one keeps its memory
        said = []
        one.client.iopub_channel  # noqa: B018 - the channel is started
        cell = asyncio.create_task(
            one.client.execute_interactive(
                "compute(0.05)",
                timeout=60,
                allow_stdin=False,
                output_hook=lambda m: said.append(m["content"].get("text", m["content"].get("ename", ""))),
            )
        )
        await until(lambda: any("waiting for GPU 0: next" in text for text in said))
        waiting = sharing(one).waiting()
        assert (waiting["gpu"], waiting["place"]) == (A, 1)
        assert other.state == "running"
        await one.manager.interrupt_kernel()
        reply = await asyncio.wait_for(cell, 30)
        assert reply["content"]["status"] == "error"
        await until(lambda: sharing(one).participant.waiting_since is None)
        assert sharing(one).waiting() is None
        assert one.state == "off_gpu"
        other.provisioner.agent_requests.protect(0)
        assert await one.run("n = compute(0.05); print(intact())") == "True"
