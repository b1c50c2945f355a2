"""Deadlines end a program and everything it started."""

import contextlib
import os
import time

import pytest

from jupyter_gpu_ckpt.subprocesses import run


def test_output_status_and_environment():
    done = run(["sh", "-c", "echo $LC_ALL; echo bad >&2; exit 3"], timeout_s=60)
    assert (done.status, done.out, done.err, done.tail()) == (3, "C\n", "bad\n", "bad")


def test_a_silent_failure_still_has_a_tail():
    assert run(["false"], timeout_s=60).tail() == "exit status 1, no output"


def test_deadline_ends_descendants_that_have_the_pipe_open(tmp_path):
    note = tmp_path / "pid"
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"sh did not end within 0\.5 s"):
        run(["sh", "-c", f"sleep 300 & echo $! > {note}; wait"], timeout_s=0.5)
    assert time.monotonic() - began < 60
    descendant = int(note.read_text())
    deadline = time.monotonic() + 60
    with contextlib.suppress(ProcessLookupError):
        while _alive(descendant):
            assert time.monotonic() < deadline, "the descendant lives on"


def _alive(pid: int) -> bool:
    os.kill(pid, 0)
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_missing_program_is_an_os_error():
    with pytest.raises(FileNotFoundError):
        run(["/nonexistent/program"], timeout_s=60)
