"""Obstacles in a kernel's process, found by the agent inside it."""

from __future__ import annotations

import sys
import types

import pytest

from jupyter_gpu_ckpt.agent import probes


@pytest.mark.parametrize(
    ("preallocate", "allocator", "preallocates"),
    [(None, None, True), ("true", "bfc", True), ("false", None, False), ("0", None, False), (None, "platform", False)],
)
def test_whether_jax_takes_the_whole_gpu(monkeypatch, preallocate, allocator, preallocates):
    for name, value in (("PREALLOCATE", preallocate), ("ALLOCATOR", allocator)):
        variable = f"XLA_PYTHON_CLIENT_{name}"
        monkeypatch.delenv(variable, raising=False) if value is None else monkeypatch.setenv(variable, value)
    monkeypatch.delitem(sys.modules, "jaxlib", raising=False)
    assert not probes.jax_preallocates()
    monkeypatch.setitem(sys.modules, "jaxlib", types.ModuleType("jaxlib"))
    assert probes.jax_preallocates() is preallocates


@pytest.mark.parametrize(
    ("initialized", "backend", "found"),
    [(True, "cudaMallocAsync", True), (True, "native", False), (False, "cudaMallocAsync", False)],
)
def test_whether_pytorch_has_memory_of_the_driver_s_pools(monkeypatch, initialized, backend, found):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not probes.torch_pools()
    cuda = types.SimpleNamespace(is_initialized=lambda: initialized, get_allocator_backend=lambda: backend)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    assert probes.torch_pools() is found
