"""The README is short; the doctor prints what a page shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_it_fits_one_screen_and_shows_the_picture():
    assert len(README.splitlines()) <= 120
    assert "](docs/images/flow.webp)" in README.partition("\n## ")[0]


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
