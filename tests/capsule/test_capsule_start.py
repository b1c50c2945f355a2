"""The start of a capsule whose owner ends meanwhile: nothing is left of it, and no traceback in its terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from jupyter_gpu_ckpt.capsule import capsule


@pytest.mark.parametrize("exists", [True, False], ids=["a capsule", "a failure"])
def test_an_owner_that_has_gone_is_no_reason_for_a_traceback(tmp_path, exists):
    reads, writes = os.pipe()
    os.close(reads)
    options = {
        "directory": str(tmp_path if exists else tmp_path / "gone"),
        "known_as": "",
        "sockets": "",
        "private": [],
    }
    options |= {"monotonic_ns": 0, "boottime_ns": 0, "report": writes}
    argv = [sys.executable, "-I", "-S", str(capsule._INIT), json.dumps(options)]
    try:
        done = subprocess.run(argv, pass_fds=[writes], capture_output=True, text=True, timeout=60)
    finally:
        os.close(writes)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
