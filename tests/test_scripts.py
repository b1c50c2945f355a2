"""The small programs of scripts/ that make's targets are made of."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
QUIETLY = SCRIPTS / "quietly"


def quietly(program: str) -> subprocess.CompletedProcess[str]:
    command = [str(QUIETLY), "A step ...", "sh", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_step_that_ends_well_is_one_line():
    done = quietly("echo noise; echo more >&2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "A step ...\n", "")


def test_a_step_that_fails_shows_what_it_printed_and_how_it_ended():
    done = quietly("echo noise; echo why >&2; exit 3")
    assert (done.returncode, done.stdout) == (3, "A step ...\nnoise\nwhy\n")
    assert "failed (3): sh -c" in done.stderr


def test_a_bundle_replaces_no_other_directory(tmp_path):
    (tmp_path / "thesis").write_text("x")
    made = subprocess.run(
        [str(SCRIPTS / "gpu-bundle"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.defpath, "PYTHON": "false"},  # nothing is fetched
    )
    assert made.returncode != 0
    assert "is no bundle" in made.stderr
    assert (tmp_path / "thesis").read_text() == "x"
