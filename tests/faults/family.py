"""A kernel's cell that makes children of all kinds, and knows whether each of them is still well."""

from __future__ import annotations

import pytest

#: ``family`` prints as 41, the ``x`` of a `faulty.Subject`, while all children do what they did; else what is wrong.
#: `Family.victim` starts one more child, which tests kill.
FAMILY = r"""
import multiprocessing, os, signal, subprocess, sys
from multiprocessing import shared_memory

def count(ask, answer, value):
    while ask.acquire():
        value.value += 1
        answer.release()

class Family:
    def __init__(self):
        context = multiprocessing.get_context("fork")
        self.ask, self.answer, self.value = context.Semaphore(0), context.Semaphore(0), context.Value("i", 0)
        self.counter = context.Process(target=count, args=(self.ask, self.answer, self.value), daemon=True)
        self.counter.start()
        self.pool, self.asked = context.Pool(2), 0
        self.cat = self.filter()
        self.ended, self.stopped = subprocess.Popen(["false"]), subprocess.Popen(["sleep", "1234"])
        os.waitid(os.P_PID, self.ended.pid, os.WEXITED | os.WNOWAIT)
        os.kill(self.stopped.pid, signal.SIGSTOP)
        self.lost = self.filter()
        self.memory = shared_memory.SharedMemory(create=True, size=100)
        self.memory.buf[:4] = b"kept"

    def filter(self):
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def victim(self):
        if self.lost.poll() is not None:
            self.lost.stdin.close(), self.lost.stdout.close()
            self.lost = self.filter()
        return self.lost.pid

    def state(self, pid):
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]

    def answers(self, cat):
        cat.stdin.write(b"word\n")
        return cat.stdout.readline() == b"word\n"

    def wrong(self):
        self.ask.release()
        self.asked += 1
        if not self.answer.acquire(timeout=60) or self.value.value != self.asked:
            yield f"a process that counts: {self.value.value} of {self.asked}"
        if self.pool.map_async(abs, [-1, -2]).get(60) != [1, 2]:
            yield "a pool"
        if not self.answers(self.cat):
            yield "a program over pipes"
        seen = os.waitid(os.P_PID, self.ended.pid, os.WEXITED | os.WNOWAIT)
        if (seen.si_pid, seen.si_status) != (self.ended.pid, 1):
            yield f"a child that has ended: {seen}"
        if self.state(self.stopped.pid) != "T":
            yield f"a stopped child: {self.state(self.stopped.pid)}"
        other = shared_memory.SharedMemory(self.memory.name)
        if other.buf[:4] != b"kept":
            yield "named shared memory"
        other.close()
        if self.lost.poll() is None and not self.answers(self.lost):
            yield "the victim lives and does not answer"

    def __str__(self):
        return ", ".join(self.wrong()) or "41"

family = Family()
"""
#: Children of a `Family` that are stopped all the time.
STOPPED = 1


def alone_and_with_family(fixture: str) -> pytest.MarkDecorator:
    """Run a test twice: over a ``fixture`` that is a kernel alone, and over one with children."""
    return pytest.mark.parametrize(fixture, [False, True], ids=["alone", "family"], indirect=True)


def with_family(fixture: str) -> pytest.MarkDecorator:
    """Run a test over a ``fixture`` that is a kernel with children."""
    return pytest.mark.parametrize(fixture, [True], ids=["family"], indirect=True)
