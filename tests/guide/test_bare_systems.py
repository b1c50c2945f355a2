"""The wheel of a release in empty systems of Debian, as root and as an ordinary user: `scripts/try-wheel`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("suite", ["bookworm", "trixie"])
def test_the_wheel_installs_runs_its_demo_and_is_uninstalled_in_an_empty_system(suite, release_wheel, tmp_path):
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        pytest.skip("empty systems need root and debootstrap: `apt-get install debootstrap`")
    command = [sys.executable, REPOSITORY / "scripts/try-wheel", "--suite", suite, release_wheel]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [f"{suite} root", f"{suite} ann"]
