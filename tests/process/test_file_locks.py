"""POSIX locks come back also on files that CRIU, or this package, closes in the name of a process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys

import pytest
from round_trip import Subject, image

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.criu import tasks
from jupyter_gpu_ckpt.errors import CriuError, LockTaken
from jupyter_gpu_ckpt.process import file_locks
from jupyter_gpu_ckpt.process.file_locks import Lock

SHOW = """
def show():
    found = []
    for number in sorted(os.listdir('/proc/self/fd'), key=int):
        try:
            lines = open(f'/proc/self/fdinfo/{number}').read().splitlines()
        except FileNotFoundError:
            continue
        found += [[int(number), *line.split()[2:5], *line.split()[7:]] for line in lines if 'POSIX' in line]
    return sorted(found)
"""
MAKE = {
    "mapped": "fd = os.open('data', os.O_RDWR); m = mmap.mmap(fd, 100); fcntl.lockf(fd, fcntl.LOCK_EX, 10, 20)",
    "mapped, and the descriptor of the map is another": (
        "with open('data') as file: m = mmap.mmap(file.fileno(), 100, prot=mmap.PROT_READ)\n"
        "fd = os.open('data', os.O_RDWR); fcntl.lockf(fd, fcntl.LOCK_EX, 10, 20); fcntl.lockf(fd, fcntl.LOCK_SH, 5, 60)"
    ),
    "to its end, for reading only, and by a second number": (
        "fd = os.open('data', os.O_RDONLY); m = mmap.mmap(fd, 100, prot=mmap.PROT_READ); other = os.dup(fd)\n"
        "fcntl.lockf(other, fcntl.LOCK_SH, 0, 7)"
    ),
    "of a deleted file": (
        "fd = os.open('gone', os.O_RDWR | os.O_CREAT); os.ftruncate(fd, 100); m = mmap.mmap(fd, 100)\n"
        "fcntl.lockf(fd, fcntl.LOCK_EX, 10, 20); os.unlink('gone')"
    ),
    "of the program's working directory": (
        "os.mkdir('work'); os.chdir('work'); fd = os.open('.', os.O_RDONLY); fcntl.lockf(fd, fcntl.LOCK_SH, 1, 0)"
    ),
    "of many": (
        "fds = [os.open(f'many{n}', os.O_RDWR | os.O_CREAT) for n in range(20)]\n"
        "for fd in fds: os.ftruncate(fd, 99); m = mmap.mmap(fd, 99); maps.append(m); fcntl.lockf(fd, 2, 3, fd)"
    ),
}
#: An ordinary user's CRIU opens no mapping of a deleted file: the agent and `shared_memory` take care of these.
if os.geteuid() != 0:
    del MAKE["of a deleted file"]


def subject_of(capsule: Capsule) -> Subject:
    subject = Subject(capsule)
    (capsule.directory / "data").write_bytes(b"x" * 100)
    assert subject.tell(f"import fcntl, mmap, os; maps = []{SHOW}") == "None"
    return subject


def saved(capsule: Capsule, place) -> dict:
    """The notes of a kernel that was dumped, and that CRIU is not to lock files for."""
    notes = capsule.inspect()["notes"]
    tasks.remove_posix_locks(place, notes)
    return notes


@contextlib.contextmanager
def locked_elsewhere(path, start: int, length: int):
    """A part of a file is locked by another process."""
    code = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, 2, *map(int, sys.argv[2:]))\n"
        "print(1, flush=True); time.sleep(1000)"
    )
    argv = [sys.executable, "-c", code, str(path), str(length), str(start)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"1\n"
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("how", MAKE)
@pytest.mark.parametrize("removed", [True, False], ids=["", "also set by CRIU"])
def test_a_lock_comes_back(criu, capsule, home, how, removed):
    subject = subject_of(capsule)
    assert subject.tell(MAKE[how]) == "None"
    before = subject.tell("answer = show()")
    assert before != "[]"
    inner, pipes = capsule.inner_pid, capsule.pipes
    criu.dump(capsule, image(home), timeout=60)
    notes = saved(capsule, image(home)) if removed else capsule.inspect()["notes"]
    capsule.close()
    with Capsule.create(home) as second:
        criu.restore(second, image(home), pid=inner, pipes=pipes, timeout=60, notes=notes)
        assert subject.tell("answer = show()") == before


def test_a_lock_of_a_child_comes_back_and_none_that_it_did_not_have(criu, capsule, home):
    subject = subject_of(capsule)
    subject.tell(
        "import signal\nfd = os.open('data', os.O_RDWR); m = mmap.mmap(fd, 100); fcntl.lockf(fd, 2, 1, 0)\n"
        "ready, report = os.pipe()\nif not (child := os.fork()):\n"
        "    fcntl.lockf(fd, 2, 1, 50); os.write(report, b'1'); signal.pause()\nos.read(ready, 1)"
    )
    locks = "[line.split()[5:] for line in open(f'/proc/{pid}/fdinfo/{fd}') if 'POSIX' in line]"
    ask = f"answer = [{locks} for pid in (os.getpid(), child)]"
    before = subject.tell(ask)
    assert before.count("'0', '0'") == before.count("'50', '50'") == 1
    inner, pipes = capsule.inner_pid, capsule.pipes
    criu.dump(capsule, image(home), timeout=60)
    notes = saved(capsule, image(home))
    assert sorted(of_process["locks"][0][2] for of_process in notes.values()) == [0, 50]
    capsule.close()
    with Capsule.create(home) as second:
        criu.restore(second, image(home), pid=inner, pipes=pipes, timeout=60, notes=notes)
        assert subject.tell(ask) == before


def test_a_lock_that_another_process_has_keeps_the_kernel_from_running(criu, capsule, home):
    subject = subject_of(capsule)
    subject.tell(MAKE["mapped"])
    before = subject.tell("answer = show()")
    inner, pipes = capsule.inner_pid, capsule.pipes
    criu.dump(capsule, image(home), timeout=60)
    notes = saved(capsule, image(home))
    capsule.close()
    with locked_elsewhere(home / "data", 25, 1), Capsule.create(home) as second, pytest.raises(LockTaken) as caught:
        criu.restore(second, image(home), pid=inner, pipes=pipes, timeout=60, notes=notes)
    assert f"{home}/data" in caught.value.message
    assert "another process has locked it" in caught.value.message
    with Capsule.create(home) as third:
        criu.restore(third, image(home), pid=inner, pipes=pipes, timeout=60, notes=notes)
        assert subject.tell("answer = show()") == before


def test_a_lock_that_only_criu_has_is_left_to_it(criu, capsule, home):
    subject = subject_of(capsule)
    subject.tell("fd = os.open('data', os.O_RDWR); fcntl.lockf(fd, fcntl.LOCK_EX, 10, 20); fcntl.flock(fd, 2)")
    before = subject.tell("answer = show()")
    inner, pipes = capsule.inner_pid, capsule.pipes
    criu.dump(capsule, image(home), timeout=60)
    notes = capsule.inspect()["notes"]
    tasks.remove_posix_locks(image(home), {str(inner): {}})
    del notes[str(inner)]["locks"]
    capsule.close()
    with Capsule.create(home) as second:
        criu.restore(second, image(home), pid=inner, pipes=pipes, timeout=60, notes=notes)
        assert subject.tell("answer = show()") == before
        with open(home / "data") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


#: A descriptor of the file is closed in the name of the process: what prepares a dump opens /dev/tty by another name.
TERMINAL = (
    "import pty, termios\nif not os.fork():\n    os.setsid(); master, slave = pty.openpty()\n"
    "    fcntl.ioctl(slave, termios.TIOCSCTTY, 0); tty = os.open('/dev/tty', os.O_RDWR)\n"
    "    for fd in slave, tty: fcntl.lockf(fd, 2, 1, 3)\n    while True:\n"
    "        open('locks', 'w').write(str(show())); os.rename('locks', 'shown'); time.sleep(0.05)"
)


@pytest.mark.parametrize("well", [True, False], ids=["taken back", "failed"])
def test_a_dump_that_is_undone_leaves_locks_on_files_that_it_closes(criu, capsule, home, well):
    subject = subject_of(capsule)
    subject.tell(f"import time\n{TERMINAL}")
    shown = "answer = (os.path.exists('shown') and os.unlink('shown'), [time.sleep(0.05) for n in range(40)"
    shown += " if not os.path.exists('shown')], open('shown').read())[2]"
    before = subject.tell(shown)
    assert before.count("WRITE") == 2
    if well:
        criu.dump(capsule, image(home), timeout=60)
        capsule.resume_processes()
    else:
        with pytest.raises(CriuError):
            criu.dump(capsule, home / "no-such-directory", timeout=60)
    assert subject.tell(shown) == before


def test_locks_of_this_process_are_found_by_their_descriptors(tmp_path):
    with open(tmp_path / "file", "w+") as file, open(tmp_path / "other", "w+") as other:
        fcntl.lockf(file, fcntl.LOCK_EX, 10, 20)
        fcntl.lockf(file, fcntl.LOCK_SH, 0, 1 << 40)
        fcntl.flock(other, fcntl.LOCK_EX)
        number = file.fileno()
        assert file_locks.held(os.getpid()) == [
            Lock(number, fcntl.F_WRLCK, 20, 10),
            Lock(number, fcntl.F_RDLCK, 1 << 40, 0),
        ]
    assert file_locks.held(os.getpid()) == []
