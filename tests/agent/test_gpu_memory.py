"""The CUDA branch against FAKE torch and cupy modules: which calls are made, and above all which are not.

The real libraries on a real GPU are in tests/gpu.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from jupyter_gpu_ckpt.agent import gpu_memory


class FakeTorchCuda:
    """Stands for ``torch.cuda``: two devices, memory on the second only."""

    def __init__(self, initialized: bool) -> None:
        self.initialized, self.calls = initialized, []  # type: ignore[var-annotated]
        self.reserved = {0: 0, 1: 3 << 20}

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        return 2

    def memory_reserved(self, index: int) -> int:
        return self.reserved[index]

    def memory_allocated(self, index: int) -> int:
        return min(self.reserved[index], 1 << 20)

    def synchronize(self, index: int) -> None:
        self.calls.append(("synchronize", index))

    def empty_cache(self) -> None:
        self.calls.append(("empty_cache",))
        self.reserved[1] = 1 << 20


class FakePool:
    """Stands for a CuPy memory pool."""

    def __init__(self) -> None:
        self.total, self.calls = 5 << 20, 0

    def total_bytes(self) -> int:
        return self.total

    def used_bytes(self) -> int:
        return 0

    def free_all_blocks(self) -> None:
        self.total, self.calls = 0, self.calls + 1


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "cupy", "pynvml"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_nothing_loaded_is_nothing_done() -> None:
    before = set(sys.modules)
    assert gpu_memory.trim() == 0
    assert not gpu_memory.nvml_initialized()
    assert set(sys.modules) - before == set()


def test_torch_that_has_not_touched_cuda_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeTorchCuda(initialized=False)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert gpu_memory.trim() == 0 and cuda.calls == []


def test_torch_is_synchronised_only_where_it_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeTorchCuda(initialized=True)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert gpu_memory.trim() == 2 << 20
    assert cuda.calls == [("synchronize", 1), ("empty_cache",)]


def test_cupy_is_trimmed_only_on_devices_with_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)

        def __exit__(self, *_: Any) -> None:
            pass

    pool, pinned = FakePool(), FakePool()
    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(Device=Device),
        get_default_memory_pool=lambda: pool,
        get_default_pinned_memory_pool=lambda: pinned,
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(gpu_memory, "_active_devices", lambda driver: [])
    assert gpu_memory.trim() == 0 and entered == [] and pool.calls == 0
    monkeypatch.setattr(gpu_memory, "_active_devices", lambda driver: [1])
    assert gpu_memory.trim() == 5 << 20 and entered == [1] and pinned.calls == 1


def test_an_initialised_nvml_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(_nvmlLib_refcount=0))
    assert not gpu_memory.nvml_initialized()
    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(_nvmlLib_refcount=2))
    assert gpu_memory.nvml_initialized()
