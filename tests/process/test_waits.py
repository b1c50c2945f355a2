"""Threads that wait in system calls, and a handler of SIGCONT: neither notices that the process was dumped."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from sleepers import ENV
from waiting import until

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.errors import CriuError

#: Each thread makes one system call through the C library; none of them may return before it is request to.
SUBJECT = """
import ctypes, json, os, signal, sys, threading, time

home = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
PR_SET_NAME, POLLIN, EPOLL_CTL_ADD, LONG = 15, 1, 1, 100_000
reading, writing = os.pipe()
returned, continued = {}, []
signal.signal(signal.SIGCONT, lambda *_: continued.append(1))


class Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Poll(ctypes.Structure):
    _fields_ = [("descriptor", ctypes.c_int), ("wanted", ctypes.c_short), ("found", ctypes.c_short)]


semaphore = ctypes.create_string_buffer(32)
libc.sem_init(semaphore, 0, 0)
epoll = libc.epoll_create1(0)
event = (ctypes.c_uint32 * 3)(POLLIN, 0, 0)
assert libc.epoll_ctl(epoll, EPOLL_CTL_ADD, reading, event) == 0
rest, same = Time(), Time(LONG, 0)
later = Time(int(time.time()) + LONG, 0)

WAITS = {
    "poll": lambda: libc.poll(ctypes.byref(Poll(reading, POLLIN, 0)), 1, -1),
    "poll-timeout": lambda: libc.poll(ctypes.byref(Poll(reading, POLLIN, 0)), 1, LONG * 1000),
    "epoll": lambda: libc.epoll_wait(epoll, (ctypes.c_uint32 * 3)(), 1, -1),
    "epoll-timeout": lambda: libc.epoll_wait(epoll, (ctypes.c_uint32 * 3)(), 1, LONG * 1000),
    "semaphore": lambda: libc.sem_wait(semaphore),
    "sem-timeout": lambda: libc.sem_timedwait(semaphore, ctypes.byref(later)),
    "nanosleep": lambda: libc.nanosleep(ctypes.byref(Time(LONG, 0)), ctypes.byref(rest)),
    "sleep": lambda: libc.nanosleep(ctypes.byref(same), ctypes.byref(same)),
}


def run(name):
    libc.prctl(PR_SET_NAME, name.encode()[:15])
    result = WAITS[name]()
    returned[name] = [result, ctypes.get_errno() if result < 0 else 0]


for name in WAITS:
    threading.Thread(target=run, args=(name,), daemon=True).start()


def say(**facts):
    with open(home + "/reply.part", "w") as file:
        json.dump(facts, file)
    os.rename(home + "/reply.part", home + "/reply")


while True:
    time.sleep(0.002)
    if os.path.exists(home + "/request"):
        with open(home + "/request") as file:
            request = file.read()
        os.unlink(home + "/request")
        if request == "go":
            os.write(writing, b"x")
            libc.sem_post(semaphore), libc.sem_post(semaphore)
            while len(returned) < len(WAITS) - 2:  # who sleeps sleeps on
                time.sleep(0.002)
        say(returned=returned, continued=len(continued), slept=LONG - rest.seconds if rest.seconds else 0)
"""


class Waiting:
    """The subject in a capsule."""

    def __init__(self, capsule: Capsule, home: Path) -> None:
        self.capsule, self.home = capsule, home

    def start(self) -> None:
        self.capsule.spawn([sys.executable, "-I", "-S", "-c", SUBJECT, str(self.home)], ENV, "/")
        self.all_wait()

    def all_wait(self) -> None:
        until(lambda: {"nanosleep", "sem-timeout", "sleep", "epoll", "semaphore"} <= self._in_calls(), "all wait")

    def _in_calls(self) -> set[str]:
        found = set()
        for task in Path(f"/proc/{self.capsule.host_pid}/task").iterdir():
            if (task / "syscall").read_text().split()[0] not in ("running", "-1"):
                found.add((task / "comm").read_text().strip())
        return found

    def tell(self, word: str) -> dict:
        reply = self.home / "reply"
        reply.unlink(missing_ok=True)
        (self.home / "request.part").write_text(word)
        (self.home / "request.part").rename(self.home / "request")
        until(reply.exists, "an answer")
        return json.loads(reply.read_text())


WOKEN = {"poll": [1, 0], "poll-timeout": [1, 0], "epoll": [1, 0], "epoll-timeout": [1, 0]} | {
    "semaphore": [0, 0],
    "sem-timeout": [0, 0],
}


def test_threads_that_wait_do_not_notice_a_dump_and_a_restore(home, capsule, criu):
    subject = Waiting(capsule, home)
    subject.start()
    criu.dump(capsule, home / "image", timeout=30)
    capsule.close()
    with Capsule.create(home) as second:
        criu.restore(second, home / "image", pid=capsule.inner_pid, pipes=capsule.pipes, timeout=30)
        subject.capsule = second
        subject.all_wait()
        assert subject.tell("tell") == {"returned": {}, "continued": 0, "slept": pytest.approx(1, abs=600)}
        assert subject.tell("go")["returned"] == WOKEN


@pytest.mark.parametrize("well", [True, False], ids=["taken back", "failed"])
def test_threads_that_wait_do_not_notice_a_failed_dump(home, capsule, criu, well):
    subject = Waiting(capsule, home)
    subject.start()
    if well:
        criu.dump(capsule, home / "image", timeout=30)
        capsule.resume_processes()
    else:
        with pytest.raises(CriuError):
            criu.dump(capsule, home / "no-such-directory", timeout=30)
    assert subject.tell("tell")["returned"] == {}
    assert subject.tell("tell")["continued"] == 0
    assert subject.tell("go")["returned"] == WOKEN


def test_a_signal_of_the_program_s_own_still_interrupts(home, capsule, criu):
    """The handler of SIGCONT is there again, and hears of one that somebody sends."""
    subject = Waiting(capsule, home)
    subject.start()
    criu.dump(capsule, home / "image", timeout=30)
    capsule.resume_processes()
    os.kill(capsule.host_pid, signal.SIGCONT)
    until(lambda: subject.tell("tell")["continued"], "it is called")
    assert subject.tell("tell")["continued"] == 1
