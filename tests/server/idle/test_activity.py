"""Work of a kernel's processes: CPU time and accepted connections, of real processes."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.server.idle.activity import WINDOW, Activity, SocketTables

#: Does on each line of its input what that says.
PROGRAM = """
import socket, sys, time, subprocess
kept = []
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Subject:
    """A process that runs commands of the test, and its measured activity."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.activity, self.now = process, Activity(), 0.0

    def do(self, line: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"

    def worked(self, after: float = 1.0, *pids: int, queries: int = 0, own: tuple[Path, ...] = ()) -> bool:
        self.now += after
        every = [self.process.pid, *pids]
        return self.activity.worked("k", every, now=self.now, queries=queries, own=own)


@pytest.fixture
def subject() -> Iterator[Subject]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        made = Subject(process)
        made.do("pass")
        yield made
        process.kill()


def burn(seconds: float) -> str:
    return f"until = time.process_time() + {seconds}; exec('while time.process_time() < until: pass')"


def test_the_first_sample_is_unknown_and_idling_is_no_work(subject):
    subject.do(burn(0.2))
    assert not subject.worked()
    assert [subject.worked() for _ in range(20)] == [False] * 20


def test_computing_is_work_until_it_ends(subject):
    subject.worked()
    subject.do(burn(0.1))
    assert subject.worked()
    assert not subject.worked()


def test_a_little_work_is_none_however_often_it_is_sampled(subject):
    subject.worked()
    for _ in range(10):
        subject.do(burn(0.005))
        assert not subject.worked(WINDOW)
    subject.do(burn(0.2))
    looks = [subject.worked(0.01) for _ in range(2)]
    assert looks == [True, False]


def test_a_slow_worker_is_seen_over_several_samples(subject):
    subject.worked()
    seen = []
    for _ in range(8):
        subject.do(burn(0.02))
        seen.append(subject.worked(0.1))  # a fifth of a processor
    assert any(seen)


def test_what_questions_cost_is_no_work(subject):
    subject.worked()
    subject.do(burn(0.1))
    assert not subject.worked(1.0, queries=40)
    subject.do(burn(0.3))
    assert subject.worked(1.0, queries=50)


def test_children_count_and_so_does_the_end_of_one(subject):
    subject.do("kept.append(subprocess.Popen(['sleep', '600']))")
    child = int(next(iter(Path(f"/proc/{subject.process.pid}/task").glob("*/children"))).read_text().split()[0])
    subject.worked(1.0, child)
    assert not subject.worked(1.0, child)
    subject.do("kept[0].kill(); kept[0].wait()")
    assert subject.worked()
    assert not subject.worked()


class TestConnections:
    def port(self, subject: Subject) -> int:
        subject.do("kept.append(socket.create_server(('127.0.0.1', 0)))")
        assert subject.process.stdin is not None and subject.process.stdout is not None
        print("print(kept[0].getsockname()[1], flush=True)", file=subject.process.stdin, flush=True)
        port = int(subject.process.stdout.readline())
        assert subject.process.stdout.readline() == "done\n"
        return port

    def test_one_that_stays_counts_once(self, subject):
        port = self.port(subject)
        subject.worked()
        assert not subject.worked()
        with socket.create_connection(("127.0.0.1", port)):
            subject.do("kept.append(kept[0].accept())")
            assert subject.worked()
            assert not subject.worked()

    @pytest.mark.parametrize("first", ["client", "server"])
    def test_a_connection_that_began_and_ended_between_two_samples(self, subject, first):
        port = self.port(subject)
        subject.worked()
        with socket.create_connection(("127.0.0.1", port)) as client:
            subject.do("c = kept[0].accept()[0]")
            if first == "server":
                subject.do("c.close()")
            assert client.send(b"") == 0
        subject.do("c.close()")
        assert subject.worked()

    def test_somebody_elses_port_is_nothing_to_it(self, subject):
        self.port(subject)
        subject.worked()
        with socket.create_server(("127.0.0.1", 0)) as other, socket.create_connection(other.getsockname()):
            assert not subject.worked()

    def test_its_own_connections_to_others_are_no_work(self, subject):
        with socket.create_server(("127.0.0.1", 0)) as other:
            self.port(subject)
            subject.worked()
            subject.do(f"kept.append(socket.create_connection(('127.0.0.1', {other.getsockname()[1]})))")
            assert not subject.worked()

    def test_unix_sockets_but_those_of_its_clients(self, subject):
        with tempfile.TemporaryDirectory(prefix="gc-") as directory:
            path = f"{directory}/s"
            subject.do(f"kept.append(socket.socket(socket.AF_UNIX)); kept[0].bind({path!r}); kept[0].listen()")
            own = (Path(directory),)
            for excluded, expected in ((own, False), ((), True)):
                subject.activity.forget("k")
                subject.worked(own=excluded)
                with socket.socket(socket.AF_UNIX) as client:
                    client.connect(path)
                    subject.do("kept.append(kept[0].accept())")
                    assert subject.worked(own=excluded) is expected


@pytest.fixture
def read(monkeypatch) -> list[str]:
    """The tables of sockets that were read."""
    found: list[str] = []

    def sockets(table, pid="self", original=procfs.sockets):
        found.append(table)
        return original(table, pid)

    monkeypatch.setattr(procfs, "sockets", sockets)
    return found


def test_a_round_over_many_kernels_reads_each_table_once(subject, read):
    """With 200 kernels it would take seconds otherwise."""
    port = TestConnections().port(subject)
    for expected in (False, True):
        tables = SocketTables()
        found = [
            subject.activity.worked(str(kernel), [subject.process.pid], now=subject.now, queries=0, tables=tables)
            for kernel in range(50)
        ]
        assert found == [expected] * 50
        assert sorted(read) == ["tcp", "tcp6", "unix"]
        read.clear()
        subject.now += 0.1
        client = socket.create_connection(("127.0.0.1", port))
    client.close()


def test_tcp_is_not_read_for_processes_that_have_no_socket_but_unix_ones(subject, read):
    subject.worked()
    assert read == []
    subject.do("kept += socket.socketpair()")
    subject.worked()
    assert read == ["unix"]


def test_a_process_that_is_gone_or_foreign_is_sampled_without_harm():
    gone = subprocess.Popen(["true"])
    gone.wait()
    activity = Activity()
    assert not activity.worked("k", [gone.pid], now=0.0, queries=0)
    assert not activity.worked("k", [gone.pid], now=1.0, queries=0)
    activity.keep([])
    assert activity._known == {}


def test_a_sample_is_cheap():
    activity, begun = Activity(), time.process_time()
    for n in range(20):
        activity.worked("k", [1, 2, 3], now=float(n), queries=0)
    assert time.process_time() - begun < 1.0
