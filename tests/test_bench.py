"""`make bench`: what becomes of the whole when one benchmark breaks, misses a limit or cannot be run."""

from __future__ import annotations

import contextlib
import importlib.util
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
