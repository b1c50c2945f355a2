"""Device files that a forked child has inherited are taken from it while it is stopped; a named file stands for one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from waiting import until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.cuda import cuda
from jupyter_gpu_ckpt.cuda.cuda import Cuda
from jupyter_gpu_ckpt.process import device_files

#: A parent that has a file open three times and mapped twice, and its forked child, which answers, and closes all.
PAIR = """
import mmap, os, sys
place = sys.argv[1]
with open(place, "wb") as file: file.truncate(8192)
fds = [os.open(place, os.O_RDWR | flag) for flag in (os.O_CLOEXEC, 0, os.O_CLOEXEC)]
os.set_inheritable(fds[1], True)
maps = [mmap.mmap(fds[0], 8192), mmap.mmap(fds[2], 4096, offset=4096)]
kept = mmap.mmap(-1, 4096)
child = os.fork()
if child == 0:
    own = os.open(place, os.O_RDWR) if "own" in sys.argv else -1
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        kept[0] = kept[0] + 1
        os.write(fds[1], b"lost")
        print(kept[0], [fd for fd in fds if os.fstat(fd)], os.open("/dev/zero", os.O_RDONLY), flush=True)
    for fd in fds: os.close(fd)
    os._exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


class Pair:
    def __init__(self, place: str, *options: str) -> None:
        argv = [sys.executable, "-c", PAIR, place, *options]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.parent, self.child = self.process.pid, int(self.process.stdout.readline())

    def asked(self) -> str:
        self.process.stdin.write("\n")
        return self.process.stdout.readline().strip()

    def signal(self, number: int, state: str) -> None:
        os.kill(self.child, number)
        until(lambda: procfs.stat(self.child).state in state)


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "nvidia0")


@pytest.fixture
def pair(place):
    started = []

    def start(*options: str) -> Pair:
        started.append(Pair(place, *options))
        return started[-1]

    yield start
    for each in started:
        each.process.communicate(timeout=60)
        assert each.process.returncode == 7, "the child has closed all of them at its end"


def test_numbers_and_addresses_stay_taken_and_the_child_continues(pair, place):
    both = pair()
    before = dict(procfs.links(both.child))
    numbers = [number for number, name in before.items() if name == place]
    assert both.asked() == f"1 {numbers[:3]} 8"
    flags = {number: procfs.fdinfo(both.child, number)["flags"] for number in numbers}
    mapped = [(each.start, each.end) for each in procfs.maps(both.child) if each.name == place]
    others = [each for each in procfs.maps(both.child) if each.name and each.name != place]
    assert (len(numbers), len(mapped)) == (5, 2), "three of its own, two of mmap"
    both.signal(signal.SIGSTOP, "T")
    device_files.replace(both.child, {place, "/dev/nvidia7"})
    after = dict(procfs.links(both.child))
    assert after == before | {8: "/dev/zero"} | dict.fromkeys(numbers, "/dev/null")
    for number in numbers:
        close_on_exec = int(procfs.fdinfo(both.child, number)["flags"], 8) & os.O_CLOEXEC
        assert close_on_exec == int(flags[number], 8) & os.O_CLOEXEC
    now = procfs.maps(both.child)
    assert [each for each in now if each.name and each.name != place] == others
    for start, end in mapped:
        (there,) = [each for each in now if each.contains(start)]
        assert (there.contains(end - 1), there.permissions, there.name) == (True, "---p", "")
    both.signal(signal.SIGCONT, "SR")
    assert both.asked() == f"2 {numbers[:3]} 9", "nobody gets their numbers"
    with open(place, "rb") as file:
        assert file.read(4) == b"lost", "of the time before"
    assert dict(procfs.links(both.parent)).items() >= dict.fromkeys(numbers, place).items()


def test_nothing_is_done_where_there_are_none(pair):
    both = pair()
    both.signal(signal.SIGSTOP, "T")
    before = procfs.maps(both.child), dict(procfs.links(both.child))
    device_files.replace(both.child, {"/dev/nvidia0"})
    assert (procfs.maps(both.child), dict(procfs.links(both.child))) == before
    both.signal(signal.SIGCONT, "SR")


@pytest.mark.parametrize("own", [(), ("own",)], ids=["none of its own", "one of its own"])
def test_inherited_is_what_the_parent_has_open_under_the_same_number(pair, place, monkeypatch, own):
    monkeypatch.setattr(cuda, "DEVICE_FILES", place[:-1])
    both, facade = pair(*own), Cuda(None)
    assert facade.device_files(both.child) == [place]
    assert facade.has_inherited_all(both.child, [os.getpid(), both.parent]) is not bool(own)
    assert not facade.has_inherited_all(both.child, [os.getpid()])
    assert not facade.has_inherited_all(both.child, [])
