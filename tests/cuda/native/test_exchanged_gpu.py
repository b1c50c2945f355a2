"""Two notebooks that change places on a GPU which has memory for one: the one comes while the other one leaves.

Their allocations are of one device of the driver's double; the leaver's driver stops in the middle, so that a
kernel that waited for its end would wait for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest
from harness import until
from shared_device import SharedDevice
from sharing_kernels import MIB, SharedHost, sharing

from jupyter_gpu_ckpt.sharing.participant import Residence
from jupyter_gpu_ckpt.testing.fake_cuda import FakeProcess

A = "GPU-00000000-0000-0000-0000-00000000000a"
COUNT, SIZE, CONTEXT = 15, 4 * MIB, 8 * MIB
TOTAL = COUNT * SIZE
#: Bytes of the GPU, contexts included: of kernels of 68 MiB it has one.
GPU = 100 * MIB
#: How many allocations have left when the leaver stops, and bytes of those that come meanwhile.
LEFT = 6
COME = (GPU - 2 * CONTEXT - TOTAL + LEFT * SIZE) // SIZE * SIZE
ONE, TWO = 1, 2

#: Defines ``compute``, which uses the GPU, ``intact``, and ``stop``: the leave that comes stops while there is a file.
CELL = f"""
import ctypes
runtime, driver = ctypes.CDLL("libcudart.so.13"), ctypes.CDLL("libcuda.so.1")
runtime.cudaFree(None)
def content(number):
    return bytes([16 * {{slot}} + number]) * {SIZE}
addresses = [ctypes.c_void_p() for _ in range({COUNT})]
for number, each in enumerate(addresses):
    assert runtime.cudaMalloc(ctypes.byref(each), ctypes.c_size_t({SIZE})) == 0
    ctypes.memmove(each, content(number), {SIZE})
def compute():
    assert driver.cuCtxSynchronize() == 0
def intact():
    copy, good = ctypes.create_string_buffer({SIZE}), []
    for number, each in enumerate(addresses):
        assert runtime.cudaMemcpy(copy, each, ctypes.c_size_t({SIZE}), 4) == 0
        good.append(copy.raw == content(number))
    return all(good)
def stop(file):
    open(file, "w").close()
    driver.double_stop_while(b"cuMemUnmap", ctypes.c_long({LEFT}), file.encode())
"""


class OnSharedDevice(FakeProcess):
    """A process whose memory is what it has of the shared device, and its context."""

    def __init__(self, device: SharedDevice, slot: int) -> None:
        self._device, self._slot = device, slot
        super().__init__()

    @property
    def memory(self):  # type: ignore[override]
        return {A: self._device.used(self._slot) + CONTEXT}

    @memory.setter
    def memory(self, _) -> None:
        pass

    @property
    def there(self):
        return self.memory


class Places:
    """Two notebooks with all their memory: ``one`` off the GPU, ``two`` on it."""

    def __init__(self, device: SharedDevice, one, two, file: str) -> None:
        self.device, self.one, self.two, self._file = device, one, two, file

    async def stop_in_the_middle(self) -> asyncio.Task:
        """Have a cell of ``one`` need the GPU, and ``two`` stop in the middle of its leave; return the cell."""
        await self.two.run(f"stop({self._file!r})")
        cell = asyncio.create_task(self.one.run("compute(); print(intact())"))
        await until(lambda: self.device.used(TWO) == TOTAL - LEFT * SIZE)
        return cell

    def continue_both(self) -> None:
        os.unlink(self._file)


@pytest.fixture
async def places(tmp_path, runtime_base, programs, doubles, criu_binary, monkeypatch):
    device = SharedDevice(tmp_path / "device", GPU - 2 * CONTEXT)
    host = SharedHost(tmp_path, runtime_base, programs, doubles, monkeypatch, {A: GPU})
    async with contextlib.AsyncExitStack() as stack:
        kernels = []
        for slot in (ONE, TWO):
            for name, value in device.environment(slot).items():
                monkeypatch.setenv(name, value)
            kernel = await stack.enter_async_context(host.notebook(f"k{slot}"))
            host.driver.add(OnSharedDevice(device, slot), kernel.lifecycle.capsule.host_pid)
            await kernel.run(CELL.format(slot=slot))
            if slot == ONE:
                await asyncio.to_thread(kernel.lifecycle.yield_gpu)
                assert device.used(ONE) == 0
            kernels.append(kernel)
        await until(lambda: sharing(kernels[1]).participant.on == (A,))
        yield Places(device, *kernels, str(tmp_path / "stopped"))


async def test_one_comes_while_the_other_one_leaves_and_back(places):
    cell = await places.stop_in_the_middle()
    await until(lambda: places.device.used(ONE) == COME)
    assert sharing(places.two).participant.residence is Residence.LEAVING
    assert not cell.done()
    places.continue_both()
    assert await cell == "True"
    await until(lambda: (places.one.state, places.two.state) == ("running", "off_gpu"))
    assert await places.two.run("compute(); print(intact())") == "True"
    await until(lambda: (places.one.state, places.two.state) == ("off_gpu", "running"))
    assert await places.one.run("print(intact())") == "True"


async def test_one_comes_although_the_other_one_is_killed_in_the_middle(places):
    cell = await places.stop_in_the_middle()
    await until(lambda: places.device.used(ONE) == COME)
    os.kill(places.two.lifecycle.capsule.host_pid, signal.SIGKILL)
    await until(lambda: places.two.lifecycle.kernel.capsule is None or places.two.lifecycle.capsule.poll() is not None)
    places.device.end(TWO)
    assert await cell == "True"
    assert places.one.state == "running"


async def test_one_is_kept_by_nobody_that_stops_in_the_middle_and_both_lose_nothing(places):
    cell = await places.stop_in_the_middle()
    await until(lambda: places.device.used(ONE) == COME)
    await until(lambda: places.device.used(ONE) == 0)
    await until(lambda: places.one.state == "off_gpu")
    places.continue_both()
    assert await cell == "True"
    assert await places.two.run("compute(); print(intact())") == "True"
    assert await places.one.run("print(intact())") == "True"
