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
