"""The README is short and its rates are those of the newest record; the doctor prints what a page shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture
def make_docs(monkeypatch):
    """The script that writes the tables."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    loader = SourceFileLoader("make_docs", str(ROOT / "scripts" / "make-docs"))
    module = module_from_spec(spec_from_loader("make_docs", loader))
    loader.exec_module(module)
    return module


def test_it_fits_one_screen_and_shows_the_picture():
    assert len(README.splitlines()) <= 120
    assert "](docs/images/flow.webp)" in README.partition("\n## ")[0]


def test_its_rates_are_those_of_the_newest_record(make_docs, monkeypatch, tmp_path):
    assert make_docs.renew(README) == README
    record = make_docs.move_costs.PAGE.read_text()
    newest = "| 2026-12-24, as it is now | | | | | | | | |\n| 1 | | 0.11 s | | | | 0.12 s | | |\n"
    (tmp_path / "page.md").write_text(re.sub(r"\| [\d-]+, as it is now \|.*\n", newest, record))
    monkeypatch.setattr(make_docs.move_costs, "PAGE", tmp_path / "page.md")
    renewed = make_docs.renew(README)
    assert "| 1 GiB of tensors | 0.11 s | 0.12 s |" in renewed
    assert ", 2026-12-24;" in renewed and ", 2026-12-24;" not in README


def gpu_ckpt(*arguments: str) -> str:
    command = [sys.executable, "-m", "jupyter_gpu_ckpt", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


def test_the_doctor_checks_what_a_page_shows():
    page = (ROOT / "docs" / "install.md").read_text()
    shown = page.partition("$ jupyter gpu-ckpt doctor\n")[2].partition("```")[0].splitlines()
    checks = {line.split()[1] for line in shown if line.startswith(("ok ", "- "))}
    found = json.loads(gpu_ckpt("doctor", "--json"))
    known = {finding["check"] for finding in found["findings"]}
    assert len(checks) > 10
    assert checks - {"nvidia-driver"} <= known, "on a host with a GPU it has more to say about that"
    verdicts = gpu_ckpt("doctor").splitlines()[-2:]
    assert [line.partition(":")[0] for line in verdicts] == [line.partition(":")[0] for line in shown[-2:]]
