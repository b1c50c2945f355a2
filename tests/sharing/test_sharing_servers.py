"""Servers of several users that share a GPU by their records alone, of which one is killed or stopped at any moment."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sharing_server
from ordinary_user import ordinary_user
from sharing_server import occupied
from waiting import until

from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.sharing import records
from jupyter_gpu_ckpt.sharing.exchange import Exchange, Member
from jupyter_gpu_ckpt.sharing.participant import Residence
from jupyter_gpu_ckpt.sharing.policy import HEARTBEAT_S

pytestmark = pytest.mark.slow

A, B = "GPU-00000000-0000-0000-0000-00000000000a", "GPU-00000000-0000-0000-0000-00000000000b"
MOVING = (Residence.ARRIVING, Residence.LEAVING)
#: Seconds: several times those of `SILENT_S`, and of a server that looks, claims and moves on a busy machine.
LONGEST_VOID = 30.0
#: Seconds of a look at the GPU by a watcher that does not wait for a processor.
SERVED = 0.03
#: What a cell says that waits for memory of a server that was stopped.
WAITS = r"cell {}: waiting for GPU 0: .* [67]0 B of it are of a server that does not answer"
SERVER = Path(__file__).with_name("sharing_server.py")


@pytest.fixture(scope="module")
def users():
    """Two ordinary users where the tests run as root; else both are the present one."""
    with ordinary_user() as one, ordinary_user() as two:
        yield one, two


class World:
    """GPUs, and servers whose kernels need them."""

    def __init__(self, directory: Path, gpus: dict[str, int]) -> None:
        self.locks, self.memory, self.gpus = directory / "locks", directory / "memory", gpus
        self.memory.mkdir(mode=0o777)
        self.memory.chmod(0o1777)
        self.servers: list[Server] = []
        self.most = dict.fromkeys(gpus, 0)
        #: Seconds of the longest time in which a GPU was nobody's although a living server's kernel waited for it, and
        #: without those in which this process, like the servers, had no processor.
        self.longest_void = self.longest_served = 0.0
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()

    def _watch(self) -> None:
        void = served = 0.0
        last = time.monotonic()
        while not self._over.wait(0.01):
            there = occupied(self.memory)
            for gpu, bytes in there.items():
                self.most[gpu] = max(self.most[gpu], bytes)
            is_void = len(there) < len(self.gpus) and self._anybody_waits()
            passed, last = time.monotonic() - last, time.monotonic()
            void, served = (void + passed, served + min(passed, SERVED)) if is_void else (0.0, 0.0)
            self.longest_void, self.longest_served = max(self.longest_void, void), max(self.longest_served, served)

    def _anybody_waits(self) -> bool:
        alive = time.monotonic() - 2 * HEARTBEAT_S
        return any(each.waiting_since is not None and each.alive_at > alive for each in records.read(self.locks))

    def a_move(self, server: Server) -> None:
        """Wait until a kernel of a server leaves the GPU or comes to it."""

        def moves() -> bool:
            there = [each for each in records.read(self.locks) if each.residence in MOVING]
            return any(each.user == str(server.user.uid) for each in there)

        until(moves, "a kernel moves", longest=0.002)

    def serve(self, user, kernels: list[int], **plan) -> Server:
        facts = {"directory": str(self.locks), "memory": str(self.memory), "gpus": self.gpus, "kernels": kernels}
        self.servers.append(Server(user, {"seed": 0, "cells": 3, "seconds": 0.3, **facts, **plan}))
        return self.servers[-1]

    def has_memory(self, server: Server) -> bool:
        """Return whether a kernel of a server is on a GPU."""
        return any(path.name.startswith(f"{server.process.pid}-") for path in self.memory.iterdir())

    def close(self) -> None:
        self._over.set()
        self._watcher.join()
        for server in self.servers:
            server.end()

    def never_over(self) -> None:
        """Assert that no two kernels were ever on a GPU on which they do not fit together."""
        assert all(self.most[gpu] <= total for gpu, total in self.gpus.items()), self.most


class Server:
    """The process of one server, and the cells that have ended in it."""

    def __init__(self, user, plan) -> None:
        self.user = user
        self.wanted = {(kernel, cell) for kernel in range(len(plan["kernels"])) for cell in range(plan["cells"])}
        (user.home / SERVER.name).write_bytes(SERVER.read_bytes())
        os.chmod(user.home / SERVER.name, 0o644)
        site = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{user.home / 'package'}{os.pathsep}{site}"}
        self.log = Path(plan["directory"]).parent / f"log-{plan['seed']}"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*user._prefix, user.python, str(user.home / SERVER.name), json.dumps(plan)],
                env={**environment, "HOME": str(user.home), "PYTHONDONTWRITEBYTECODE": "1"},
                cwd=user.home,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.ended: list[tuple[int, int]] = []
        self.done = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line == "done\n":
                self.done.set()
            else:
                kernel, cell = line.split()
                self.ended.append((int(kernel), int(cell)))

    def finishes(self) -> None:
        """Assert that each cell ends, and once."""
        if not self.done.wait(90):
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1)
            raise AssertionError(self.said())
        assert sorted(self.ended) == sorted(self.wanted)

    def is_answered(self) -> None:
        """Assert that each of its cells ends, or says that a server which does not answer has the GPU."""

        def answered() -> bool:
            text = self.log.read_text()
            waiting = {kernel for kernel, cell in self.wanted - set(self.ended)}
            return all(re.search(WAITS.format(kernel), text) for kernel in waiting)

        until(answered, "each of its cells says what it waits for")

    def said(self) -> str:
        return f"{sorted(self.wanted - set(self.ended))} did not end: {self.log.read_text()[-3000:]}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o1777)
        made = World(Path(directory), {A: 100})
        yield made
        made.close()


def test_kernels_of_two_users_take_turns_on_a_gpu_on_which_one_fits(world, users):
    servers = [world.serve(user, [60, 70], seed=seed) for seed, user in enumerate(users)]
    for server in servers:
        server.finishes()
    world.never_over()
    assert world.most[A] > 0


def test_three_kernels_use_both_gpus_at_the_same_time(world, users):
    world.gpus[B] = 100
    world.most[B] = 0
    servers = [world.serve(user, kernels, seed=7) for user, kernels in zip(users, ([60, 70], [80]), strict=True)]
    for server in servers:
        server.finishes()
    world.never_over()
    assert world.most[B] > 0, "one comes back on another GPU than its own"


@pytest.mark.sweep(0.04)
@pytest.mark.parametrize("case", range(100))
def test_a_server_that_is_killed_or_stopped_in_a_hand_over_holds_nobody_up(world, users, case):
    """A turn of a server that is gone is void: its GPU has another kernel within seconds, and nothing is lost."""
    chance = random.Random(case)
    first, second = (world.serve(user, [60, 70], seed=case + n, cells=5) for n, user in enumerate(users))
    until(lambda: first.ended and second.ended, "they take turns", longest=0.05)
    world.a_move(first)
    time.sleep(chance.uniform(0, 0.15))  # a move takes 10 to 50 ms, and a kernel that comes follows one that left
    how = chance.choice(["killed", "stopped"])
    first.process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    if how == "killed":
        first.process.wait()  # its memory is free only then
        second.finishes()
    else:
        os.waitid(os.P_PID, first.process.pid, os.WSTOPPED | os.WNOWAIT)
        began = time.monotonic()
        if world.has_memory(first):
            # It stays: what another cell waits for is said in it, and the rest continues once the server does.
            second.is_answered()
            how += f" with memory, said after {time.monotonic() - began:.2f} s"
        else:
            second.finishes()  # it has no memory on the GPU, so nobody has to wait for it
        first.process.send_signal(signal.SIGCONT)
        first.finishes()
        second.finishes()
    world.never_over()
    print(f"{how}: nobody's for {world.longest_void:.2f} s at most")
    assert world.longest_served <= LONGEST_VOID


def server_with_a_gpu(directory: Path) -> tuple[sharing_server.FileGpus, Exchange]:
    """GPU A, of 100 bytes, and what a server of these tests' own process does to share it."""
    (directory / "memory").mkdir()
    gpus = sharing_server.FileGpus(directory / "locks", directory / "memory", {A: 100})
    return gpus, Exchange(gpus, sharing_server.RULES)


def runs_a_cell(kernel: sharing_server.Kernel) -> None:
    """Check that a cell ends; then the kernel does not share any more."""
    cell = threading.Thread(target=kernel.run, args=(1, 0.3), daemon=True)
    cell.start()
    cell.join(60)
    kernel.sharing.close()
    assert not cell.is_alive(), "its cell waits for ever"


def test_a_kernel_whose_claim_is_void_when_its_server_continues_waits_anew(tmp_path, monkeypatch):
    """Its server was stopped between the claim and the move, and others may have been granted the memory meanwhile."""
    valid = iter([False])
    monkeypatch.setattr(Member, "claim_is_valid", lambda member: next(valid, True))
    gpus, exchange = server_with_a_gpu(tmp_path)
    kernel = sharing_server.Kernel(0, 60, exchange, gpus, tmp_path / "memory", seed=1)
    runs_a_cell(kernel)
    assert next(valid, "asked") == "asked"


def test_nobody_waits_for_decisions_that_cannot_be_made(tmp_path, monkeypatch):
    """Another user may have filled the directory: the move continues without sharing, or says why it cannot."""
    monkeypatch.setattr("jupyter_gpu_ckpt.sharing.exchange.SILENT_S", 0.3)
    gpus, exchange = server_with_a_gpu(tmp_path)
    kernel = sharing_server.Kernel(0, 60, exchange, gpus, tmp_path / "memory", seed=1)
    kernel.lifecycle.state = State.RESUMING
    read = records.read_all

    def refused(directory):
        raise OSError(errno.EMLINK, "more than 8192 files")

    monkeypatch.setattr(records, "read_all", refused)
    raised: list[BaseException] = []

    def admit() -> None:
        try:
            kernel.sharing.admit({A: 60}, gpus.list(), elsewhere=True)
        except OSError as error:
            raised.append(error)

    waiting = threading.Thread(target=admit, daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive(), "it waits for ever"
    assert [error.strerror for error in raised] == ["more than 8192 files"]
    assert kernel.sharing.participant.waiting_since is None
    monkeypatch.setattr(records, "read_all", read)
    until(lambda: exchange.failure() is None, "it decides again")
    assert kernel.sharing.admit({A: 60}, gpus.list(), elsewhere=True) == {A: A}
    kernel.sharing.close()


def test_a_kernel_comes_back_without_sharing_where_there_is_no_thread_and_the_next_time_shares(tmp_path, monkeypatch):
    gpus, exchange = server_with_a_gpu(tmp_path)

    def exhausted(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", exhausted)
        kernel = sharing_server.Kernel(1, 60, exchange, gpus, tmp_path / "memory", seed=1)
        with pytest.raises(OSError, match="unavailable"):
            kernel.sharing.admit({A: 60}, gpus.list(), elsewhere=True)
    kernel.sharing.join()  # as the gate has it when a cell begins
    runs_a_cell(kernel)
