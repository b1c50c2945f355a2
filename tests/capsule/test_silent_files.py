"""Files whose server does not respond: a capsule's init inspects the kernel's files without blocking."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from round_trip import Subject
from silent_fuse import SilentFuse

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.process import file_facts, inventory, shared_memory
from jupyter_gpu_ckpt.process.shared_memory import SharedMemory

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


#: Opens the files that it gets as arguments, and waits.
OPENS = "import sys\nfiles = [open(path) for path in sys.argv[1:]]\nprint(flush=True)\nsys.stdin.read()"


def test_a_deleted_name_is_looked_up_for_an_ordinary_user_without_waiting_for_its_server(silent, monkeypatch):
    """A thread inspects: the server's end has its calls fail, should they wait."""
    names = [silent.place / "file", silent.place / "other"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", OPENS, *names], **pipes) as process, ThreadPoolExecutor(1) as executor:
        process.stdout.readline()
        names[0].unlink()
        silent.fall_silent()
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        try:
            found = executor.submit(inventory.inspect, process.pid, stopped=False).result(timeout=30)
        finally:
            silent.end()
            process.kill()
    (what,) = [each["what"] for each in found.refusals if str(silent.place) in each["what"]]
    assert what.startswith(f"a file that cannot be reached ({names[0]} (deleted), descriptor "), what
    assert os.strerror(errno.ETIMEDOUT) in what


#: Maps a file as shared memory; its server need not know how to read it.
MAPS = """
import ctypes, os, sys
map = ctypes.CDLL(None).mmap
map.restype, map.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
file = os.open(sys.argv[1], os.O_RDONLY)
print(map(None, 4096, 1, 1, file, 0), flush=True)
sys.stdin.read()
"""


def test_shared_memory_of_a_silent_server_is_refused_and_stops_nobody_for_long(silent):
    """Before a dump all processes of the kernel are stopped meanwhile."""
    file = silent.place / "file"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", MAPS, file], **pipes) as process, ThreadPoolExecutor(1) as executor:
        assert int(process.stdout.readline()) > 0
        file.unlink()
        silent.fall_silent()
        try:
            with pytest.raises(shared_memory.UnsavableSharedMemory, match="does not answer"):
                executor.submit(SharedMemory("/none").give_names, [process.pid]).result(timeout=30)
        finally:
            silent.end()
            process.kill()


@pytest.mark.parametrize("closed", [True, False])
def test_a_directory_in_which_a_user_may_make_no_name_is_refused(closed, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "access", lambda path, mode: not closed)  # root may do so everywhere
    with open(tmp_path / "file", "w"):
        os.link(tmp_path / "file", tmp_path / "other")
        (tmp_path / "file").unlink()
        found = inventory.inspect(os.getpid(), stopped=False)
    words = [each["what"] for each in found.refusals if str(tmp_path) in each["what"]]
    assert len(words) == closed
    assert all(what.startswith(f"a file that was deleted under the name {tmp_path}/file") for what in words)


def test_an_inspection_that_gets_no_process_says_so(tmp_path, monkeypatch):
    """The file is neither refused nor proven: nothing is known of it."""

    def fork():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with open(tmp_path / "file", "w"):
        os.link(tmp_path / "file", tmp_path / "other")
        (tmp_path / "file").unlink()
        monkeypatch.setattr(os, "fork", fork)
        with pytest.raises(BlockingIOError):
            inventory.inspect(os.getpid(), stopped=False)


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
    assert file_facts.identity(path) == (os.major(status.st_dev), os.minor(status.st_dev), status.st_ino)


def test_a_link_is_there_by_its_own_inode(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    inode = (tmp_path / "file").stat().st_ino
    assert file_facts.is_there(f"{tmp_path}/file", inode)
    assert not file_facts.is_there(f"{tmp_path}/link", inode)
    assert file_facts.is_there(f"{tmp_path}/link", (tmp_path / "link").lstat().st_ino)
    assert not file_facts.is_there(f"{tmp_path}/none", inode)
