"""GPU memory by kernel, as sent to front ends; the driver is the contract suite's fake."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace

import jsonschema_rs
import pytest
import yaml
from harness import until as until_async
from tornado.ioloop import IOLoop

from jupyter_gpu_ckpt.errors import GpuCkptError
from jupyter_gpu_ckpt.lifecycle import host_memory
from jupyter_gpu_ckpt.server import gpu_usage
from jupyter_gpu_ckpt.server.events import SCHEMAS
from jupyter_gpu_ckpt.server.gpu_usage import GpuUsage
from jupyter_gpu_ckpt.server.monitor import KernelMonitor
from jupyter_gpu_ckpt.testing.fake_cuda import FakeDriver, FakeGpus

GIB = 2**30
A, B = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"
SCHEMA = jsonschema_rs.validator_for(yaml.safe_load((SCHEMAS / "gpu_usage.yaml").read_text()))


class World:
    """Two GPUs, one kernel, and the events."""

    def __init__(self, directory: Path, monkeypatch) -> None:
        self.driver = FakeDriver({A: 10 * GIB, B: 10 * GIB})
        self.pid = os.getpid()
        self.driver.start({A: 3 * GIB}, pid=self.pid)
        engine = SimpleNamespace(gpus=FakeGpus(self.driver, directory))
        lifecycle = SimpleNamespace(kernel=SimpleNamespace())
        monkeypatch.setattr(host_memory, "device_bytes", lambda kernel: engine.gpus.used_by(self.pid))
        monkeypatch.setattr(host_memory, "copied", lambda kernel: GIB)
        provisioners = {
            "k": SimpleNamespace(lifecycle=lifecycle, sharing=None),
            "plain": SimpleNamespace(lifecycle=None, sharing=None),
        }
        monkeypatch.setattr(gpu_usage, "shared_engine", lambda image_dir: engine)
        self.received: list[dict] = []
        monitor = KernelMonitor(IOLoop.current(), None)
        self.usage = GpuUsage(lambda: provisioners, monitor, directory, self.received.append, interval=0.5)


@pytest.fixture
async def world(tmp_path, monkeypatch):
    made = World(tmp_path, monkeypatch)
    yield made
    await made.usage.stop()


async def test_the_document_has_the_device_memory_of_each_kernel(world):
    document = await world.usage.document()
    a, b = document["gpus"]
    assert (a["uuid"], a["used"], a["kernels"]) == (A, 3 * GIB, {"k": 3 * GIB})
    assert (b["uuid"], b["used"], b["kernels"]) == (B, 0, {})
    assert [used for _, used in a["history"]] == [3 * GIB]


async def test_copies_in_host_memory_are_counted_at_each_measurement(world):
    assert world.usage.copied() == 0
    await world.usage.measure()
    assert world.usage.copied() == GIB


async def test_only_a_change_is_an_event_and_follows_the_schema(world):
    await world.usage.measure()
    await world.usage.measure()
    assert len(world.received) == 1
    world.driver.remove(world.pid)
    await world.usage.measure()
    assert len(world.received) == 2
    assert [gpu["kernels"] for gpu in world.received[-1]["gpus"]] == [{}, {}]
    for document in world.received:
        SCHEMA.validate(document)


async def test_a_level_stretch_of_history_is_its_two_ends(world):
    for _ in range(5):
        await world.usage.measure()
    world.driver.start({A: GIB})
    await world.usage.measure()
    history = (await world.usage.document())["gpus"][0]["history"]
    assert [used for _, used in history] == [3 * GIB, 3 * GIB, 4 * GIB]


async def test_what_is_older_than_an_hour_is_forgotten(world, monkeypatch):
    await world.usage.measure()
    monkeypatch.setattr(gpu_usage, "HISTORY", -1.0)
    await world.usage.measure()
    history = (await world.usage.document())["gpus"][0]["history"]
    assert len(history) == 1


async def test_usage_is_read_from_the_first_kernel_on_and_at_once_when_it_moves(world):
    world.usage.start()
    await asyncio.sleep(0)
    assert world.driver.calls == []
    world.usage.changed(None)
    await until_async(lambda: len(world.received) == 1)
    world.driver.remove(world.pid)
    world.usage.changed(None)
    await until_async(lambda: len(world.received) == 2)


def is_looking() -> bool:
    return "gpu-ckpt-usage" in [task.get_name() for task in asyncio.all_tasks()]


async def test_without_a_gpu_it_stops_looking(world):
    world.driver.remove(world.pid)
    world.driver.gpus.clear()
    world.usage.start()
    assert is_looking()
    world.usage.changed(None)
    await until_async(lambda: not is_looking())
    assert world.received == []
    assert (await world.usage.document())["gpus"] == []


async def test_a_fault_ends_nothing_and_is_logged_once(world, monkeypatch, caplog):
    for error in (GpuCkptError("no driver just now"), RuntimeError("unheard of")):
        caplog.clear()
        monkeypatch.setattr(world.usage, "_provisioners", Failing(error))
        world.usage._failing = False
        world.usage.start()
        for _ in range(3):
            world.usage.changed(None)
            await asyncio.sleep(0.05)
        assert is_looking()
        assert len(caplog.records) == 1
        await world.usage.stop()


async def test_it_continues_after_a_fault_at_first(world, monkeypatch):
    well = world.usage._provisioners
    monkeypatch.setattr(world.usage, "_provisioners", Failing(GpuCkptError("no driver just now")))
    world.usage.start()
    world.usage.changed(None)
    await asyncio.sleep(0.05)
    monkeypatch.setattr(world.usage, "_provisioners", well)
    await until_async(lambda: len(world.received) == 1)


async def test_the_document_is_no_older_than_the_interval(world):
    await world.usage.document()
    world.driver.remove(world.pid)
    assert (await world.usage.document())["gpus"][0]["used"] == 3 * GIB
    world.usage._measured -= 1
    assert (await world.usage.document())["gpus"][0]["used"] == 0


class Failing:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self):
        raise self.error
