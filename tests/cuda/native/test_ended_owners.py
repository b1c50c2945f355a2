"""Servers with real kernels that share a GPU, of which one is killed or stopped at any moment of a hand-over."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
from sharing_program import MIB, occupied
from waiting import until

from jupyter_gpu_ckpt.sharing import records
from jupyter_gpu_ckpt.sharing.participant import Residence

A = "GPU-00000000-0000-0000-0000-00000000000a"
TOTAL = 100 * MIB
MOVING = (Residence.ARRIVING, Residence.LEAVING)
#: Seconds within which a cell must run, or say what it waits for, however busy the machine is; 5 s on an idle one.
ANSWERED_S = 30.0
#: What a cell says that waits for memory which nobody can move.
NO_ANSWER = "are of a server that does not answer"
PROGRAM = Path(__file__).with_name("sharing_program.py")
ROLES = ("leaves", "comes", "bystander")


class Server:
    """The process of a server, and what it has printed."""

    def __init__(self, directory: Path, base: Path, name: str, value: int, programs, doubles) -> None:
        plan = {"directory": str(directory), "base": str(base), "name": name, "value": value, "mib": 60}
        plan |= {"library": str(programs.library), "doubles": str(doubles), "gpus": {A: TOTAL}}
        self.log = directory / f"{name}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), json.dumps(plan)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        self.ready = False
        self.said: dict[str, list[str]] = defaultdict(list)
        #: By cell: its output, and when it ended.
        self.ended: dict[str, tuple[str, float]] = {}
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            what, *words = line.rstrip("\n").split(" ", 2)
            if what == "ready":
                self.ready = True
            elif what == "said":
                self.said[words[0]].append(json.loads(words[1]))
            elif what == "ended":
                assert words[0] not in self.ended, "a cell ended twice"
                self.ended[words[0]] = (words[1], time.monotonic())

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return self.ready

    def cell(self, name: str, seconds: float) -> None:
        self.process.stdin.write(f"{name} {seconds}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def servers(tmp_path, runtime_base, programs, doubles, criu_binary):
    """Three, by name, whose kernels are off the GPU, on which one of them fits."""
    (tmp_path / "memory").mkdir()
    made = {
        name: Server(tmp_path, runtime_base / name, name, value, programs, doubles)
        for value, name in enumerate(ROLES, start=1)
    }
    over, most = threading.Event(), [0]

    def published() -> dict[str, str]:
        return {path.name: path.read_text() for path in (tmp_path / "memory").glob("*.json")}

    def watch() -> None:
        while not over.wait(0.02):
            before, bytes = published(), occupied(tmp_path / "memory").get(A, 0)
            if published() == before:  # else one has left, and another come, between the looks at both
                most.append(bytes)

    watcher = threading.Thread(target=watch)
    try:
        until(lambda: all(each.is_ready() for each in made.values()), "their kernels are there", timeout=120)
        watcher.start()
        yield made
        over.set()
        watcher.join()
    finally:
        over.set()
        for server in made.values():
            server.end()
    assert 0 < max(most) <= TOTAL, "two kernels were on the GPU, on which one fits"


def hand_over(servers: dict[str, Server], directory: Path) -> None:
    """Return when the kernel of "leaves" begins to leave the GPU, or another one to come to it."""
    servers["leaves"].cell("first", 0.1)
    until(lambda: "first" in servers["leaves"].ended, "the first one has the GPU")
    servers["leaves"].cell("long", 1.5)
    time.sleep(0.3)
    for name in ("comes", "bystander"):
        servers[name].cell("long", 0.3)
    until(lambda: any(each.residence in MOVING for each in records.read(directory / "locks")), "a move", longest=0.002)


@pytest.mark.sweep(0.04)
@pytest.mark.parametrize("case", range(100))
def test_nobody_waits_for_a_server_that_is_killed_or_stopped_in_a_hand_over(servers, tmp_path, case):
    chance = random.Random(case)
    victim, how = ROLES[case % 3], ("killed", "stopped")[case // 3 % 2]
    hand_over(servers, tmp_path)
    time.sleep(chance.uniform(0, 0.6))
    gone, others = servers[victim], [each for name, each in servers.items() if name != victim]
    gone.process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    if how == "killed":
        gone.process.wait()
    else:
        os.waitid(os.P_PID, gone.process.pid, os.WSTOPPED | os.WNOWAIT)
    began = time.monotonic()
    waiting = {id(each) for each in others if "long" not in each.ended}

    def is_answered(server: Server) -> bool:
        return "long" in server.ended or any(NO_ANSWER in text for text in server.said["long"])

    def said() -> str:
        return "\n".join(f"{each.said} {each.log.read_text()[-1500:]}" for each in servers.values())

    answered = 0.0
    for server in others:
        end = time.monotonic() + 90
        while not is_answered(server):
            assert time.monotonic() < end, said()
            time.sleep(0.01)
        if id(server) in waiting:
            answered = max(answered, (time.monotonic() - began))
    if how == "stopped":
        gone.process.send_signal(signal.SIGCONT)
        others = [*servers.values()]
    for server in others:
        until(lambda server=server: "long" in server.ended, "each cell ends", timeout=90)
        assert {output for output, _ in server.ended.values()} == {"True"}, "its memory is as it was"
    print(f"FIGURE {case}: {victim} {how}, the last of the others ended or said why not after {answered:.2f} s")
    assert answered <= ANSWERED_S


def test_one_that_was_stopped_before_its_memory_came_waits_again(servers, tmp_path):
    """A server for which nobody waits, and which continues when there is no room: only the GPU knows by then."""
    servers["comes"].cell("stop", 0)
    servers["comes"].cell("long", 0.3)
    stopped = servers["comes"].process.pid
    until(lambda: os.waitid(os.P_PID, stopped, os.WSTOPPED | os.WNOWAIT | os.WNOHANG), "it stops", timeout=60)
    servers["bystander"].cell("long", 2)
    until(lambda: occupied(tmp_path / "memory")[A] > TOTAL / 2, "another one comes", timeout=60)
    os.kill(stopped, signal.SIGCONT)
    for name in ("bystander", "comes"):
        until(lambda name=name: "long" in servers[name].ended, "its cell ends", timeout=90)
        assert servers[name].ended["long"][0] == "True", "its memory is as it was"
