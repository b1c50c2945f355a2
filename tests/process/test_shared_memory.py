"""Deleted files that two processes share get names while both are stopped; real processes, no mount of its own."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import subprocess
import sys
import time

import pytest
from waiting import until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import shared_memory, syscalls
from jupyter_gpu_ckpt.process.shared_memory import SharedMemory, UnsavableSharedMemory

#: A parent and its forked child, which adds one to the shared number whenever it is asked to, and answers.
PAIR = """
import ctypes, mmap, multiprocessing, os, sys
place = sys.argv[1]
file = open(place, "a+b" if sys.argv[2] == "appended to" else "w+b", buffering=0)
file.truncate(5000)
if sys.argv[2] == "as torch does": file.write(b"\\0")
memory = mmap.mmap(file.fileno(), 5000)
if sys.argv[2] == "mapped":
    file.close()
    for fd in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{fd}") == place: os.close(int(fd))
os.unlink(place)
context = multiprocessing.get_context("fork")
ask, answer = context.Semaphore(0), context.Semaphore(0)
named = multiprocessing.get_context("spawn").Lock()
child = os.fork()
while child == 0:
    ask.acquire()
    memory[4096] += 1
    answer.release()
print(child, named._semlock.name, flush=True)
for line in sys.stdin:
    ask.release()
    done, before, memory[:4] = answer.acquire(timeout=60), memory[:4], b"seen"
    print(done, memory[4096], before, flush=True)
os.kill(child, 9)
os.wait()
"""


class Pair:
    """Two processes that share memory, stopped and continued by the test."""

    def __init__(self, place: str, how: str) -> None:
        if how == "as torch does":
            place = f"/dev/shm/torch_{os.getpid()}_{time.monotonic_ns()}_0"
        self.place = place
        argv = [sys.executable, "-c", PAIR, place, how]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        child, self.lock = self.process.stdout.readline().split()
        self.pids = [self.process.pid, int(child)]

    def asked(self) -> str:
        self.process.stdin.write("\n")
        return self.process.stdout.readline().strip()

    def signal(self, number: int, state: str) -> None:
        for pid in self.pids:
            os.kill(pid, number)
        until(lambda: all(procfs.stat(pid).state in state for pid in self.pids))

    def positions(self, pid: int) -> list[tuple[int, str]]:
        return [(number, procfs.fdinfo(pid, number)["pos"]) for number, _ in procfs.links(pid)]

    def deleted(self) -> set[str]:
        found = {mapping.name for pid in self.pids for mapping in procfs.maps(pid)}
        found |= {name for pid in self.pids for _, name in procfs.links(pid)}
        return {name for name in found if name.endswith(" (deleted)") and name.startswith((self.place, "/dev/shm/"))}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(syscalls, "mount", lambda *_: None)
    return SharedMemory(str(tmp_path / "named"))


@pytest.fixture
def pair(tmp_path):
    started: list[Pair] = []

    def start(how: str) -> Pair:
        started.append(Pair(str(tmp_path / "file"), how))
        return started[-1]

    yield start
    for each in started:
        each.signal(signal.SIGCONT, "SRDZ")
        each.process.communicate(timeout=60)


@pytest.mark.parametrize("how", ["plain", "mapped", "as torch does"])
def test_processes_share_the_named_files_and_locks_as_they_shared_the_deleted_ones(files, pair, tmp_path, how):
    """The child waits for a semaphore all the time, in the old file at first and in the new one later."""
    both = pair(how)
    assert both.asked() == r"True 1 b'\x00\x00\x00\x00'"
    assert len(both.deleted()) == 4, "a file, two semaphores, and one that is deleted only by its first name"
    both.signal(signal.SIGSTOP, "T")
    positions = [both.positions(pid) for pid in both.pids]
    files.give_names(both.pids)
    assert both.deleted() == set()
    assert [both.positions(pid) for pid in both.pids] == positions
    maps = {mapping.name for mapping in procfs.maps(both.pids[0])}
    assert f"/dev/shm/sem.{both.lock.lstrip('/')}" in maps, "it still has a name"
    assert sorted(os.listdir(files.directory)) == ["0", "1", "2"]
    image = tmp_path / "image"
    image.mkdir()
    files.save(both.pids, str(image))
    both.signal(signal.SIGCONT, "SR")
    assert both.asked() == "True 2 b'seen'"
    again = SharedMemory(str(tmp_path / "again"))
    again.load(str(image))
    contents = {(tmp_path / "again" / name).read_bytes()[:4] for name in ("0", "1", "2")}
    assert b"seen" in contents
    assert (tmp_path / "again").stat().st_mode & 0o777 == 0o700


def test_what_would_not_be_the_same_in_a_new_file_is_refused_and_nothing_changes(files, pair):
    both = pair("appended to")
    both.asked()
    before = both.deleted()
    both.signal(signal.SIGSTOP, "T")
    with pytest.raises(UnsavableSharedMemory, match="in use in more ways than as memory"):
        files.give_names(both.pids)
    assert before - both.deleted() <= {name for name in before if "/sem." in name}
    both.signal(signal.SIGCONT, "SR")
    assert both.asked() == "True 2 b'seen'"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOMEM])
def test_memory_that_is_full_is_named_and_all_continue_sharing(files, pair, monkeypatch, code):
    """Memory that has moved stays in its new file, for all processes, at any write that fails."""
    both, writes = pair("mapped"), []
    write, turns = shared_memory._write, itertools.count(1)
    assert both.asked().startswith("True 1")
    for failing in range(1, 10):
        writes.clear()

        def fill(*args, failing=failing):
            writes.append(args)
            if len(writes) == failing:
                raise OSError(code, os.strerror(code))
            write(*args)

        monkeypatch.setattr(shared_memory, "_write", fill)
        both.signal(signal.SIGSTOP, "T")
        if failing <= (left := len(both.deleted())):
            with pytest.raises(UnsavableSharedMemory, match="too little memory"):
                files.give_names(both.pids)
        else:
            files.give_names(both.pids)
        both.signal(signal.SIGCONT, "SR")
        assert both.asked() == rf"True {next(turns) + 1} b'seen'"
        if not left:
            break
    assert both.deleted() == set()


def test_a_file_that_is_too_large_is_refused(files, pair, monkeypatch):
    both = pair("mapped")
    monkeypatch.setattr(shared_memory, "_LARGE", 4000)
    both.signal(signal.SIGSTOP, "T")
    with pytest.raises(UnsavableSharedMemory, match="too large"):
        files.give_names(both.pids)
    both.signal(signal.SIGCONT, "SR")
    assert both.asked().startswith("True 1")


def test_files_that_nobody_uses_any_more_are_removed(files, pair, tmp_path):
    both = pair("mapped")
    both.signal(signal.SIGSTOP, "T")
    files.give_names(both.pids)
    both.signal(signal.SIGCONT, "SR")
    files.save([], str(tmp_path))
    assert os.listdir(files.directory) == []


def test_processes_without_deleted_files_need_no_directory(files):
    with subprocess.Popen(["sleep", "60"]) as process:  # this one may have what other tests have left in it
        files.give_names([process.pid])
        files.save([process.pid], "/")
        process.kill()
    assert not os.path.exists(files.directory)


def test_memory_that_is_written_in_part_only_is_written_to_its_end_or_refused(tmp_path):
    """Near a limit, or where space runs out, pwrite(2) does a part, and only the next call fails."""
    content = tmp_path / "content"
    content.write_bytes(b"x" * 3000)
    made = os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT, 0o600)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            shared_memory._write(made, 0, iter([content.read_bytes()]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        os.close(made)
