"""Notebooks with the library whose memory is of the driver's double, and that share its GPUs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

from harness import Notebook, notebook
from library_accounting import Accounting

from jupyter_gpu_ckpt.cuda import fastpath
from jupyter_gpu_ckpt.kernel import engine
from jupyter_gpu_ckpt.kernel.gpu_sharing import GpuSharing
from jupyter_gpu_ckpt.lifecycle import context
from jupyter_gpu_ckpt.sharing.policy import Rules
from jupyter_gpu_ckpt.testing.fake_cuda import FakeCuda, FakeDriver, FakeGpus
from jupyter_gpu_ckpt.trace import StepEvent

MIB = 1 << 20
#: Turns scaled down, as the moves of the double's memory are.
RULES = Rules(first_turn=0.6, turn=1.2, cut=0.3)

#: Defines ``compute(seconds)``, which uses the GPU all the time, and fills an allocation by which it is recognized.
CELL = """
import ctypes, time
runtime, driver = ctypes.CDLL("libcudart.so.13"), ctypes.CDLL("libcuda.so.1")
runtime.cudaFree(None)
address = ctypes.c_void_p()
assert runtime.cudaMalloc(ctypes.byref(address), ctypes.c_size_t({bytes})) == 0
ctypes.memset(address, {value}, {bytes})
def compute(seconds):
    "Use the GPU for so long, without the time in which it was waited for."
    used = calls = 0
    while used < seconds:
        began = time.monotonic()
        assert driver.cuCtxSynchronize() == 0
        took = time.monotonic() - began
        time.sleep(0.005)
        used += 0.005 + (took if took < 0.05 else 0)
        calls += 1
    return calls
def intact():
    "Copy the allocation from the GPU, wherever it was before."
    copy = ctypes.create_string_buffer({bytes})
    assert runtime.cudaMemcpy(copy, address, ctypes.c_size_t({bytes}), 4) == 0
    return copy.raw == bytes([{value}]) * {bytes}
"""


class SharedHost:
    """One server, its notebooks, and GPUs of so many bytes each."""

    def __init__(self, directory: Path, base: Path, programs, doubles, monkeypatch, gpus: dict[str, int]) -> None:
        self.directory, self._base = directory, base
        self.driver = FakeDriver(gpus)
        images = directory / "images"
        cards = FakeGpus(self.driver, directory / "locks")
        fakes = {"cuda": FakeCuda(self.driver), "gpus": cards}
        monkeypatch.setitem(engine._engines, images, dataclasses.replace(engine.shared_engine(images), **fakes))
        monkeypatch.setattr(context, "FastPath", Accounting)
        monkeypatch.setattr(fastpath, "has_driver", lambda: True)
        monkeypatch.setattr(fastpath, "preload", lambda: fastpath.Preload(programs.library))
        monkeypatch.setenv("LD_LIBRARY_PATH", str(doubles))
        self.exchange = engine.shared_exchange(cards)
        self.exchange.rules = RULES

    @contextlib.asynccontextmanager
    async def notebook(self, name: str, **traits) -> AsyncIterator[Notebook]:
        """A notebook without memory of the GPU."""
        directory = self.directory / name
        directory.mkdir()
        traits = {"gpu_sharing": "turns", "image_dir": str(self.directory / "images"), **traits}
        async with notebook(directory, self._base / name, **traits) as kernel:
            assert (kernel.provisioner._host.sharing is not None) is (traits["gpu_sharing"] != "off")
            yield kernel

    async def allocate(self, kernel: Notebook, mib: int, value: int, gpu: str) -> None:
        """Give the kernel so much memory, on this GPU."""
        await kernel.run(CELL.format(bytes=mib * MIB, value=value))
        self.start(kernel, {gpu: (mib + 8) * MIB})

    def start(self, kernel: Notebook, memory: dict[str, int]) -> None:
        """Have the fake driver know the kernel's process, also after a checkpoint."""
        fake = self.driver.processes[self.driver.start(memory, pid=kernel.lifecycle.capsule.host_pid)]
        away: list[int] = []

        def follow(event: StepEvent) -> None:
            if (event.kind, event.step) == ("completed", "quiesce"):
                away[:] = [kernel.lifecycle.capsule.host_pid]
            elif (event.kind, event.step) == ("completed", "end_process"):
                self.driver.processes.pop(away[0], None)
            elif (event.kind, event.step) == ("completed", "criu_restore"):
                self.driver.add(fake, kernel.lifecycle.capsule.host_pid)

        kernel.provisioner.sinks.append(follow)


def sharing(kernel: Notebook) -> GpuSharing:
    """The notebook's part in sharing."""
    found = kernel.provisioner._host.sharing
    assert found is not None
    return found
