"""The run of `scripts/bench/turns.py` on the driver's double, for a moment: there it need not meet its limits."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "scripts" / "bench"


@pytest.fixture
def bench(monkeypatch):
    """The module, with two notebooks."""
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])  # it adds others
    spec = importlib.util.spec_from_file_location("bench_turns", BENCH / "turns.py")
    turns = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(turns)
    monkeypatch.setattr(turns, "NOTEBOOKS", 2)
    monkeypatch.setattr(turns, "DOUBLE", 60 * turns.MIB)
    monkeypatch.setattr(turns, "why_no_gpu", lambda: "the double is wanted")
    return turns


async def test_a_run_has_the_cells_and_the_moves_that_the_simulation_is_fed_with(
    bench, tmp_path, runtime_base, programs, criu_binary
):
    run = await bench.measure(tmp_path, runtime_base, 0.05, 200.0, 1)
    assert run["seconds"] >= max(cell["ended"] for each in run["kernels"] for cell in each["cells"])
    for kernel in run["kernels"]:
        assert kernel["cells"] and kernel["needs"] == [68 * bench.MIB]
        for cell in kernel["cells"]:
            assert 0 <= cell["touched"] < cell["started"] < cell["ended"]
            assert cell["ended"] - cell["started"] >= cell["seconds"]
        assert 0 <= len(kernel["arrive_seconds"]) - len(kernel["leave_seconds"]) <= 1, "each began off the GPU"
        assert kernel["arrive_seconds"]
    file = tmp_path / "run.json"
    file.write_text(json.dumps(run))
    found = bench.replay(file)
    assert found["measured"]["wait, mean"] > 0 and found["simulated"]["wait, mean"] > 0
    assert found["measured"]["swaps, share of the time"] > 0
