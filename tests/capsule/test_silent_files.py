"""Files whose server does not respond: a capsule's init inspects the kernel's files without blocking."""

from __future__ import annotations

import os
import time

import pytest
from round_trip import Subject
from silent_fuse import SilentFuse

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.process import file_facts, inventory

ROOT = os.geteuid() == 0


@pytest.fixture
def silent(tmp_path):
    if not ROOT or not os.path.exists("/dev/fuse"):
        pytest.skip("only root can mount a file system of its own here")
    place = tmp_path / "silent"
    place.mkdir()
    with SilentFuse(place) as fuse:
        yield fuse


def test_an_open_file_whose_server_is_silent_is_inspected_without_it(silent, home):
    with Capsule.create(home) as capsule:
        subject = Subject(capsule)
        assert subject.tell(f"file = open('{silent.place}/file')") == "None"
        silent.fall_silent()
        began = time.monotonic()
        assert capsule.inspect()["refusals"] == []
        assert time.monotonic() - began < file_facts.TIMEOUT + 60
        assert subject.tell("answer = 41 + 1") == "42"
        silent.end()  # the process could not close the file before


def test_a_path_whose_server_is_silent_is_given_up(silent):
    silent.fall_silent()
    with pytest.raises(TimeoutError):
        file_facts.within_timeout(f"{silent.place}/file")


def test_no_descriptor_is_inspected_by_a_call_to_a_file_server(monkeypatch, tmp_path):
    def asked(*arguments, **options):
        raise AssertionError(f"asked a server: {arguments}")

    with open(tmp_path / "open", "w") as file, open("/dev/null") as null:
        assert file.fileno() != null.fileno()
        for name in ("stat", "lstat", "statvfs"):
            monkeypatch.setattr(inventory.os, name, asked)
        found = inventory.inspect(os.getpid(), stopped=False)
        monkeypatch.undo()
    assert [each["what"] for each in found.refusals if "open" in each["what"]] == []


def test_a_file_that_cannot_be_reached_is_refused_by_its_name(monkeypatch, tmp_path):
    def fails(path, *arguments):
        raise OSError(116, os.strerror(116), path)

    with open(tmp_path / "gone", "w"):
        monkeypatch.setattr(file_facts, "of", fails)
        found = inventory.inspect(os.getpid(), stopped=False)
    words = [each["what"] for each in found.refusals]
    assert [what for what in words if f"a file that cannot be reached ({tmp_path}/gone, descriptor " in what], words


@pytest.mark.parametrize("path", ["/etc/passwd", "/dev/null", "/proc/self/status", "/usr"])
def test_the_facts_of_a_file_are_those_of_stat(path):
    status = os.stat(path)
    expected = (status.st_mode, (os.major(status.st_rdev), os.minor(status.st_rdev)))
    for facts in (file_facts.of(path), file_facts.within_timeout(path)):
        assert (facts.mode, facts.device) == expected
        assert path.startswith("/proc") or (facts.inode, facts.mtime_ns) == (status.st_ino, status.st_mtime_ns)
