"""`make bench`: what becomes of the whole when one benchmark breaks, misses a limit or cannot be run."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[1] / "scripts" / "bench"


@pytest.fixture
def bench(tmp_path: Path):
    """Run the runner on benchmarks that end with the given statuses, a name each; negative is a signal."""

    def run(*options: str, **statuses: int) -> tuple[int, str]:
        scripts = []
        for name, status in statuses.items():
            end = f"os.kill(os.getpid(), {-status})" if status < 0 else f"sys.exit({status})"
            scripts.append(tmp_path / f"{name}.py")
            scripts[-1].write_text(f"import os, sys; print('figures of {name}'); {end}")
        done = subprocess.run(
            [sys.executable, str(BENCH), *options, *map(str, scripts)], capture_output=True, text=True, timeout=60
        )
        return done.returncode, done.stdout

    return run


def test_one_that_breaks_fails_the_whole_and_the_others_still_run(bench):
    status, said = bench(broken=1, killed=-9, fine=0)
    assert status == 1
    assert "figures of fine" in said
    assert "broken.py BROKE, status 1" in said
    assert "killed.py BROKE, status -9" in said


def test_a_missed_limit_is_printed_and_is_an_error_if_strict(bench):
    status, said = bench(slow=3, fine=0)
    assert (status, "slow.py ran, a limit was MISSED" in said) == (0, True)
    assert bench("--strict", slow=3, fine=0)[0] == 3
    assert bench("--strict", slow=3, broken=1)[0] == 1
    assert bench("--strict", fine=0)[0] == 0


def test_what_this_machine_cannot_run_is_named_with_the_reason(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCH))  # where it finds its neighbour
    spec = importlib.util.spec_from_file_location("bench", BENCH / "__main__.py")
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    monkeypatch.setattr(runner, "why_no_gpu", lambda: "there is no GPU")
    monkeypatch.setattr(sys, "argv", ["bench", "gpu.py"])
    assert runner.main() == 0
    assert "gpu.py       left out: there is no GPU" in capsys.readouterr().out


@pytest.mark.parametrize("script", sorted(path.name for path in BENCH.glob("[!_]*.py")))
def test_each_finds_what_it_imports(script):
    """Under another name than ``__main__`` it runs nothing."""
    code = f"import runpy, sys; sys.path.insert(0, {str(BENCH)!r}); runpy.run_path({str(BENCH / script)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_transfers_to_servers_that_this_machine_lacks_are_left_out(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("bench_remote", BENCH / "remote.py")
    remote = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(remote)

    @contextlib.contextmanager
    def lacking(_):
        pytest.skip("no such server")
        yield {}

    monkeypatch.setattr(remote, "sftp_server", lacking)
    monkeypatch.setattr(remote, "s3_server", lacking)
    monkeypatch.setattr(remote, "ROUNDS", 1)
    monkeypatch.setattr(remote, "LIMIT", 0.0)  # of one mebibyte
    try:
        assert remote.main(1) == 0
    except pytest.skip.Exception:
        pytest.fail("the benchmark ended with what it lacks")
    said = capsys.readouterr().out
    assert said.count("left out: no such server") == 2
    assert "directory  pull" in said


# -- the table of docs/performance.md (device_memory.py), which needs a GPU


@pytest.fixture
def table(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("bench_device_memory", BENCH / "device_memory.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # for its data classes
    spec.loader.exec_module(module)
    return module


def test_the_table_s_groups_are_its_rows_with_what_their_limits_need(table, capsys):
    assert table.main(["--plan"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()] == [*table.ROWS, "together"]
    grouped = [row for rows in table.GROUPS.values() for row in rows]
    assert sorted([*grouped, "bus", "driver"]) == sorted(table.ROWS)
    assert table.plan(["cupy", "large"])[:4] == ["bus", "driver", "torch", "cupy"]
    for group in table.GROUPS:  # ten minutes a command, of which the machine's set-up takes one
        assert sum(table.ROWS[row].seconds for row in table.plan([group])) < 540
    with pytest.raises(SystemExit):
        table.main(["--plan", "cuppy"])
    assert "no such row: cuppy" in capsys.readouterr().err


def _ran(table, tmp_path, monkeypatch, rows, seconds=1000.0):
    """Run rows of figures, or of errors, instead of those on a GPU."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(table, "available_memory", lambda: 64 << 30)
    bench, report = table.Bench(tmp_path, tmp_path, 5), table.Report({"gpu": "none"})

    def running(figures):
        async def run(bench, name):
            bench.steps[name] = {"dump": 0.5}
            if isinstance(figures, Exception):
                raise figures
            return figures

        return run

    known = {name: table.Row(running(figures), 10, **more) for name, (figures, more) in rows.items()}
    monkeypatch.setattr(table, "ROWS", known)
    table.run(list(known), bench, report, seconds=seconds)
    return report, json.loads((tmp_path / "device-memory-bench.json").read_text())


def test_the_table_has_each_limit_and_whether_it_is_met(table, tmp_path, monkeypatch):
    figures = [
        table.Figure("16 GiB: back", [0.5, 0.4, 0.6], most=0.5),
        table.Figure("16 GiB: all off", [0.7, 0.9, 0.8], most=0.75),
        table.Figure("by the library", [94.9], "%", least=95.0),
        table.Figure("training", [1.0], "", 1.01, 0.99),
        table.Figure("the bus", [51.26], "GB/s"),
    ]
    report, written = _ran(table, tmp_path, monkeypatch, {"torch": (figures, {"modules": ()})})
    assert report.table().splitlines()[2:] == [
        "| 16 GiB: back | 0.500 s (0.400 to 0.600) | <= 0.500 s | met |",
        "| 16 GiB: all off | 0.800 s (0.700 to 0.900) | <= 0.750 s | MISSED |",
        "| by the library | 94.9 % | >= 95.0 % | MISSED |",
        "| training | 1.000 | >= 0.990, <= 1.010 | met |",
        "| the bus | 51.3 GB/s |  |  |",
    ]
    assert report.status() == 3
    first = written["rows"]["torch"][0]
    assert (first["values"], first["median"], first["most"], first["met"]) == ([0.5, 0.4, 0.6], 0.5, 0.5, True)
    assert written["rows"]["torch"][4]["met"] is None
    assert written["steps"] == {"torch": {"dump": 0.5}}


def test_rows_that_break_or_cannot_run_are_named_beside_the_others(table, tmp_path, monkeypatch):
    fine = [table.Figure("x", [0.1], most=0.2)]
    rows = {
        "broken": (RuntimeError("no"), {"modules": ()}),
        "needs-it": (fine, {"modules": (), "needs": ("broken",)}),
        "lacking": (fine, {"modules": ("no_such_framework",)}),
        "large": (fine, {"modules": (), "host_gib": 65}),
        "fine": (fine, {"modules": ()}),
    }
    report, written = _ran(table, tmp_path, monkeypatch, rows)
    assert list(report.figures) == ["fine"]
    assert written["others"] == {
        "broken": "broke: RuntimeError: no",
        "needs-it": "left out: there is no figure of broken",
        "lacking": "left out: no_such_framework is not installed",
        "large": "left out: it needs 65 GiB of host memory, and 64 are free",
    }
    assert report.status() == 1
    report, _ = _ran(table, tmp_path, monkeypatch, {"fine": (fine, {"modules": ()})}, seconds=9.0)
    assert report.others == {"fine": "not reached: about 10 s, of which fewer were left"}


def test_the_sums_of_the_table_s_program_count_each_bit_and_its_position(table):
    """PyTorch's, with a device that every machine has."""
    pytest.importorskip("torch")
    program: dict = {}
    exec(table.PROGRAMS["torch"].code.replace("'cuda'", "'cpu'"), program)
    program["begin"]()
    program["fill"](131)
    x, before = program["x"], program["check"]()
    assert [each.numel() for each in x] == [128 << 17, 3 << 17]
    assert before == program["check"]()
    x[1][77] ^= 1
    assert program["check"]()[1] != before[1]
    x[1][77] ^= 1
    x[0][[5, 6]] = x[0][[6, 5]]
    assert program["check"]()[0] != before[0]
    program["change"]()
    program["drop"]()
    assert not x


@pytest.mark.parametrize("part", ["BUS", "SUBJECT", "ALONE", "LARGE_SUBJECT", "TAKER"])
def test_the_table_s_other_programs_are_programs(table, part):
    names = {"gib": 16, "rounds": 5, "mib": 64, "pid": 1, "code": table.PROGRAMS["torch"].code}
    compile(getattr(table, part).format(**names), part, "exec")


def test_the_table_s_frameworks_have_programs(table):
    for name, program in table.PROGRAMS.items():
        defined = {node.name for node in ast.parse(program.code).body if isinstance(node, ast.FunctionDef)}
        assert {"begin", "fill", "check", "touch", "drop"} <= defined, name
        ast.parse(program.loop)
