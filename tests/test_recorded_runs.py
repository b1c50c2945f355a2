"""Tables of rates show the newest recorded runs, and no page knows of a newer one than the record."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "recorded-runs.csv"
DATE = r"\d{4}-\d\d-\d\d"


def rows() -> list[dict[str, str]]:
    with RECORD.open(newline="") as lines:
        return list(csv.DictReader(lines))


def table(page: str, name: str) -> list[list[str]]:
    """Return the cells of a table that a script has written."""
    text = (ROOT / page).read_text().partition(f"<!-- from the code: {name} -->")[2].partition("<!-- end -->")[0]
    lines = re.findall(r"^\| (.+) \|$", text, re.MULTILINE)
    return [line.split(" | ") for line in lines if not line.startswith("-")]


@pytest.fixture
def make_docs(monkeypatch):
    """The script that writes the tables."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    loader = SourceFileLoader("make_docs", str(ROOT / "scripts" / "make-docs"))
    module = module_from_spec(spec_from_loader("make_docs", loader))
    loader.exec_module(module)
    return module


@pytest.fixture
def records(make_docs, monkeypatch, tmp_path):
    """The module of records, and a copy of the record that the tables are made from."""
    copy = tmp_path / "runs.csv"
    copy.write_text(RECORD.read_text())
    original = make_docs.records.recorded
    monkeypatch.setattr(make_docs.records, "recorded", lambda file=copy: original(file))
    return make_docs.records, copy


@pytest.mark.parametrize("gib", ["1", "16", "48"])
def test_the_readme_shows_the_newest_run_on_each_machine(gib):
    """Found here without the script's own code."""
    plain = [row for row in rows() if (row["memory"], row["moved by"], row["GiB"]) == ("PyTorch", "library", gib)]
    assert plain
    shown = [cells[1:] for cells in table("README.md", "rates") if cells[0] == f"{gib} GiB of tensors"]
    for machine in {row["machine"] for row in plain}:
        ours = [row for row in plain if row["machine"] == machine]
        last = [row for row in ours if row["date"] == max(row["date"] for row in ours)][-1]
        seconds = [f"{float(last[way]):.2f} s" for way in ("free", "back")]
        assert [f"{machine}, {last['date']}", *seconds] in shown


@pytest.mark.parametrize("machine", ["H100", "H200", "B200"])
def test_a_newer_run_makes_the_readme_stale(make_docs, records, machine):
    readme = (ROOT / "README.md").read_text()
    assert make_docs.renew(readme) == readme
    with records[1].open("a") as lines:
        lines.write(f"2099-12-24,0123456,{machine},610.1,fastpath,PyTorch,library,16,0.11,0.12\n")
    renewed = make_docs.renew(readme)
    assert f"| 16 GiB of tensors | {machine}, 2099-12-24 | 0.11 s | 0.12 s |" in renewed
    assert len(re.findall(rf"16 GiB of tensors \| {machine}", renewed)) == 1 and "610.1" in renewed


@pytest.mark.parametrize("page", ["docs/index.md", "CHANGELOG.md"])
def test_less_than_a_second_is_true_of_the_newest_runs(records, page):
    module, _ = records
    (sentence,) = re.findall(r".*16 GiB (?:of tensors )?are off the GPU.*", (ROOT / page).read_text())
    assert sentence.count("less than a second") == 2
    newest = module.newest(module.recorded(), memory="PyTorch", moved_by="library", gib="16")
    assert len(newest) > 1 and all(max(float(run.free), float(run.back)) < 1 for run in newest)


def test_the_record_is_in_the_order_of_its_dates_and_has_figures():
    found = rows()
    assert [row["date"] for row in found] == sorted(row["date"] for row in found)
    for row in found:
        assert re.fullmatch(DATE, row["date"]) and re.fullmatch(r"[0-9a-f]{7,10}|", row["commit"])
        assert 0 < float(row["back"]) < float(row["free"]) * 2 < 100
        assert (row["GiB"] == "") == (row["memory"] == "") == (row["bench"] == "kernel")


def test_no_page_has_a_newer_run_of_these_benches_than_the_record():
    """A run that somebody writes down by hand would be missing in the README."""
    for page in ("measurements.md", "performance.md"):
        text = (ROOT / "docs" / page).read_text()
        for paragraph in text.split("\n\n"):
            if re.search(r"GPU_CHECK_PARTS=(?:fastpath|device_memory)|bench/(?:fastpath|device_memory)\.py", paragraph):
                newest = max(re.findall(DATE, paragraph), default="")
                assert newest <= max(row["date"] for row in rows() if row["bench"] != "kernel"), paragraph[:100]
            if "`python scripts/bench/kernel.py`" in paragraph:
                newest = max(re.findall(DATE, paragraph), default="")
                assert newest <= max(row["date"] for row in rows() if row["bench"] == "kernel"), paragraph[:100]


def test_runs_of_a_kernel_without_device_memory_are_those_of_the_page():
    page = (ROOT / "docs" / "measurements.md").read_text()
    section = page.partition("## A kernel without device memory\n")[2].partition("\n## ")[0]
    for row in rows():
        if row["bench"] == "kernel":
            assert row["date"] in section
            assert f"| {row['free']} s (" in section and f"| {row['back']} s (" in section


def test_every_recorded_run_with_device_memory_is_on_the_page():
    shown = {
        tuple(re.sub(r" s(?:, \*\*missed\*\*)?$", "", cell) for cell in cells)
        for cells in table("docs/measurements.md", "all runs")
    }
    for row in rows():
        if row["GiB"]:
            dated = ", ".join(filter(None, (row["date"], row["commit"])))
            names = ("machine", "GiB", "memory", "moved by", "free", "back")
            assert any(cells[:7] == (dated, *(row[name] for name in names)) for cells in shown), row


def test_reports_of_benches_are_recorded_once(records, tmp_path):
    module, record = records
    gpu = {"gpu": "NVIDIA H100 80GB HBM3", "driver": "610.1", "time": "2099-12-24T01:02:03Z"}
    sizes = {name: {"free": [0.9, 0.7, 0.8], "back": [0.6, 0.5, 0.7]} for name in ("16 library", "16 mirrored")}
    rows = {
        name: [{"what": f"16 GiB, {title}: {what}", "median": each} for what, each in (("all off", 0.9), ("back", 0.6))]
        for name, title in (("torch", "PyTorch"), ("kept", "PyTorch, a copy stays"))
    }
    reports = {
        "fastpath-bench.json": gpu | {"sizes": sizes},
        "device-memory-bench.json": gpu | {"rows": rows},
        "kernel-bench.json": {"time": gpu["time"], "cores": 4, "checkpoint": [0.2, 0.1, 0.3], "wake": [0.1]},
    }
    for name, report in reports.items():
        (tmp_path / name).write_text(json.dumps(report))
    files = [tmp_path / name for name in reports]
    assert [tuple(run) for run in module.add(files, "0123456", record)] == [
        ("2099-12-24", "0123456", "H100", "610.1", "fastpath", "PyTorch", "library", "16", "0.800", "0.600"),
        ("2099-12-24", "0123456", "H100", "610.1", "device_memory", "PyTorch", "library", "16", "0.900", "0.600"),
        ("2099-12-24", "0123456", "4 cores", "", "kernel", "", "", "", "0.200", "0.100"),
    ]
    assert module.recorded(record)[-1].machine == "4 cores"
    assert module.add(files, "0123456", record) == []
    with pytest.raises(LookupError, match=r"gpu-bench\.json"):
        list(module.runs_of("gpu-bench.json", gpu, "0123456"))


def test_the_record_can_be_added_to_by_its_command():
    command = [sys.executable, str(ROOT / "scripts" / "bench" / "records.py"), "--help"]
    assert "--commit" in subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
