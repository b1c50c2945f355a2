"""Estimates of sizes and times."""

from __future__ import annotations

import pytest

from jupyter_gpu_ckpt.lifecycle.rates import Rates
from jupyter_gpu_ckpt.trace import StepEvent

GIB = 1 << 30


def completed(step: str, bytes: int, seconds: float) -> StepEvent:
    return StepEvent("completed", step, "kernel", 0.0, seconds, bytes)


def test_a_kernel_without_device_memory_costs_no_driver():
    found = Rates().estimate(50 << 20, 0)
    assert found.gpu_free == 0.0 and found.image_bytes == 50 << 20
    assert 0.1 < found.saved < 0.2 and 0.1 < found.back < 0.2


def test_first_figures_are_those_that_were_measured():
    """8 GiB of tensors on an H200 (docs/measurements.md): free after 3.3 s, on disk after 9.4 s, back after 5.1 s."""
    found = Rates().estimate(int(1.2 * GIB), 8 * GIB)
    assert found.gpu_free == pytest.approx(3.5, abs=0.5)
    assert found.saved == pytest.approx(10, abs=1.5)
    assert found.back == pytest.approx(7, abs=2.5)


def test_a_host_teaches_its_own_rates_by_large_steps_only():
    rates = Rates()
    before = rates.seconds(["dump"], GIB)
    for event in (completed("dump", 1 << 20, 1.0), completed("dump", GIB, 0.0)):
        rates(event)
    rates(StepEvent("failed", "dump", "kernel", 0.0, 9.0, GIB, "CRIU_FAILED"))
    rates(StepEvent("completed", "drain", "kernel", 0.0, 9.0))
    assert rates.seconds(["dump"], GIB) == before
    rates(completed("dump", GIB, 4.0))
    assert rates.seconds(["dump"], 2 * GIB) == pytest.approx(8.0)
    rates(completed("dump", GIB, 2.0))
    assert rates.seconds(["dump"], 2 * GIB) == pytest.approx(4.0), "the last one counts"
