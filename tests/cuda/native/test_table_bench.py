"""The rows of `scripts/bench/device_memory.py` on real kernels with the library; the driver's double has no frameworks.

What the figures are is for a GPU; here each row must run, and find a difference.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest
from sharing_kernels import CELL, MIB, SharedHost

A = "GPU-00000000-0000-0000-0000-00000000000a"
BENCH = Path(__file__).resolve().parents[3] / "scripts" / "bench"
#: 60 MiB by the double, whose content is known.
CODE = (
    CELL.format(bytes=60 * MIB, value=1)
    + """
begin = fill = drop = lambda *_: None
def check():
    assert intact()
    return [1]
def touch():
    print(driver.cuCtxSynchronize())
def change():
    ctypes.memset(address, 1, 4096)
"""
)


@pytest.fixture
def bench(tmp_path, runtime_base, programs, doubles, criu_binary, monkeypatch):
    """The module, and a run of it whose kernels are on a GPU of the double."""
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("bench_table", BENCH / "device_memory.py")
    table = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, table)
    spec.loader.exec_module(table)
    host = SharedHost(tmp_path, runtime_base, programs, doubles, monkeypatch, {A: 400 * MIB})

    @contextlib.asynccontextmanager
    async def kernel(directory, base, *, image_dir, **traits):
        async with host.notebook(f"{directory.name}-kernel", **{"gpu_sharing": "off", **traits}) as kernel:
            host.start(kernel, {A: 68 * MIB})
            yield kernel

    def on_the_double(**how):
        return table.Program("double", CODE, (), **how)

    monkeypatch.setattr(table, "notebook", kernel)
    monkeypatch.setattr(table, "PROGRAMS", {name: on_the_double() for name in table.PROGRAMS})
    (tmp_path / "bench").mkdir()
    return table, table.Bench(tmp_path / "bench", runtime_base, rounds=2)


async def test_a_framework_s_row(bench, monkeypatch):
    table, run = bench

    async def filled(kernel, mib, *, begin=True):
        return 100.0

    monkeypatch.setattr(table, "by_library", filled)
    run.medians |= {f"{what} {way}": 0.01 for what in ("bus", "driver 0") for way in ("out", "back")}
    figures = {figure.what.partition(": ")[2]: figure for figure in await table.framework(run, "torch")}
    assert list(figures) == ["tensors off", "all off", "back", "of the bytes by the library"]
    assert [len(figure.values) for figure in figures.values()] == [2, 2, 2, 1]
    assert 0 < figures["tensors off"].median < figures["all off"].median
    assert figures["all off"].most == pytest.approx(16 * 0.01 + 0.01 + 0.10)
    others = await table.framework(run, "cupy")
    assert others[0].most == pytest.approx(figures["tensors off"].median + 0.1)
    for steps in (run.steps["cupy"], run.steps["cupy, first"]):
        assert {"out lock", "out swap_out", "out driver", "back driver", "back swap_in"} <= {*steps}


async def test_the_row_of_a_copy_that_stays(bench, monkeypatch):
    """Each round copies all of it anew."""
    table, run = bench
    run.medians |= {f"torch {what}": 1.0 for what in ("tensors off", "all off", "back")}
    monkeypatch.setattr(table, "GIB", 60 * MIB / table.EACH)
    figures = await table.kept(run, "kept")
    assert [figure.most for figure in figures] == [1.1, 1.1, 1.1, None]
    assert figures[3].met


async def test_the_rows_of_jax_and_of_a_small_context(bench):
    table, run = bench
    figures = await table.jax_as_it_comes(run, "jax-peak", peak=True)
    assert [figure.most for figure in figures] == [1.5, None, 1.1, 24.0]
    assert figures[3].median > 0
    run.medians |= {f"driver 64 {way}": 0.01 for way in ("out", "back")}
    figures = await table.context(run, "context")
    assert [figure.most for figure in figures] == [pytest.approx(0.09), pytest.approx(0.09), 1.0, 0.8]
    assert {"preflight", "criu_restore", "dump/criu"} <= {*run.steps["context, to the disk"]}


async def test_the_row_of_loops(bench, monkeypatch):
    table, run = bench
    monkeypatch.setattr(table, "TURNS", 3)
    monkeypatch.setattr(table, "TRAINING_TURNS", 2)
    monkeypatch.setattr(table, "PAIRS", 2)
    loop = "import os; print(3.0 / (len(os.sched_getaffinity(0)) == 1))"
    program = {"training": ("a step", "print(2.0)"), "allocations": ("a loop", loop)}
    figures = await table.price(run, "loops", program, {})
    assert [(figure.values, figure.least, figure.most) for figure in figures] == [
        ([1.0, 1.0], 0.99, 1.01),
        ([1.0] * 6, None, 1.02),
    ]


async def test_a_suspend_that_is_seen_from_outside(bench, monkeypatch):
    table, run = bench
    at_once = "import sys, time\nprint('there', flush=True)\nfor _ in sys.stdin: print(time.time(), flush=True)"
    monkeypatch.setattr(table, "TAKER", at_once)
    run.medians["bus out"] = 0.01
    inside, outside = await table.taken(run, "taken")
    assert inside.most == outside.most == pytest.approx(16 * 0.01 + 0.10)
    assert len(inside.values) == len(outside.values) == 2
    assert min(inside.values) > 0 and min(outside.values) > 0


async def test_the_rows_of_what_is_mirrored(bench):
    table, run = bench
    figures = await table.mirrored(run, "mirrored")
    assert [figure.most for figure in figures] == [0.30, None, None, 0.35, None, None]
    assert {*run.steps} == {f"mirrored{which}{first}" for which in ("", ", changed") for first in ("", ", first")}
    first, other = await table.untouched(run, "untouched")
    assert (len(first.values), len(other.values), first.most, other.most) == (2, 2, 0.10, None)


async def test_a_difference_ends_a_row(bench, monkeypatch):
    table, run = bench
    suspend = table.out

    async def damaged(kernel):
        await kernel.run("check = lambda: [2]")
        return await suspend(kernel)

    monkeypatch.setattr(table, "out", damaged)
    with pytest.raises(AssertionError, match="the memory differs after a suspend"):
        await table.mirrored(run, "mirrored")
