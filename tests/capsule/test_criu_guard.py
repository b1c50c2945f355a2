"""CRIU is killed in the middle of a dump, and its changes to the kernel are reverted: real CRIU, real threads.

The moments are the ``ptrace`` calls of the dump: between two of them nothing changes that the kernel's death could come
of, but for what its own threads do.  `test_leaving` kills at any moment instead.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule import criu_guard, init
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.capsule.criu_guard import CriuGuard
from jupyter_gpu_ckpt.criu.criu import Criu
from jupyter_gpu_ckpt.errors import CriuKilled, KernelBusy
from jupyter_gpu_ckpt.process import preparation, ptrace, reapply, syscall_restart
from jupyter_gpu_ckpt.process.injection import Injection
from jupyter_gpu_ckpt.process.ptrace import MACHINE, Tracee, release_late

ENV = {"PATH": os.environ["PATH"]}
LAUNCHER = Path(__file__).parents[1] / "support" / "killed_criu.py"
#: More ptrace calls than a dump of `Subject` makes.
MOST = 400
#: The same of it with two children.
MOST_OF_TREE = 700

SUBJECT = """
import hashlib, json, math, os, random, select, signal, socket, sys, threading, time

home = sys.argv[1]
wrong, beats, going = [], {}, []

def thread(function):
    def run():
        while True:
            if not function():
                wrong.append(function.__name__)
            beats[function.__name__] = beats.get(function.__name__, 0) + 1
    going.append(function.__name__)
    threading.Thread(target=run, daemon=True).start()

text = os.urandom(100_000)
digest, total = hashlib.sha256(text).digest(), math.fsum(map(math.sin, range(300)))
near, far = socket.socketpair()
poll, idle = select.poll(), threading.Event()
poll.register(near, select.POLLIN)

@thread
def counts():
    return sum(k * k for k in range(100)) == 328350

@thread
def hashes():
    return hashlib.sha256(text).digest() == digest

@thread
def sines():
    return math.fsum(map(math.sin, range(300))) == total

@thread
def sleeps():
    began = time.monotonic()
    time.sleep(0.01)
    return time.monotonic() - began >= 0.01

@thread
def waits():
    return not idle.wait(0.02)

@thread
def polls():
    quiet = not poll.poll(10)
    far.send(b"word")
    return quiet and bool(poll.poll()) and near.recv(10) == b"word"

def everybody_continues():
    before, deadline = dict(beats), time.monotonic() + 60
    while any(beats.get(name) == before.get(name) for name in going):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True

def signals(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return bool(int(line.split()[1], 16) >> signal.SIGTRAP - 1 & 1)

ours, same = random.Random(1), random.Random(1)
#MORE
request, reply = home + "/request", home + "/reply"
while True:
    if not os.path.exists(request):
        time.sleep(0.002)
        continue
    os.unlink(request)
    report = {
        "continues": everybody_continues(),
        "wrong": wrong,
        "random": ours.random() == same.random(),
        "parasites": sum("CRIUMFD" in line for line in open("/proc/self/maps")),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "trap ignored": signals("SigIgn"),
        "trap caught": signals("SigCgt"),
    }
    with open(reply + ".part", "w") as file:
        json.dump(report, file)
    os.rename(reply + ".part", reply)
"""


class Subject:
    """A process with threads of all kinds, which reports whether each of them is well."""

    def __init__(self, capsule: Capsule, home: Path, more: str = "") -> None:
        self.capsule = capsule
        self.home = home
        capsule.spawn([sys.executable, "-I", "-S", "-c", SUBJECT.replace("#MORE", more), str(home)], ENV, "/")

    def report(self) -> dict:
        reply = self.home / "reply"
        reply.unlink(missing_ok=True)
        (self.home / "request").touch()
        until(lambda: reply.exists() or self.capsule.poll() is not None, "an answer")
        assert self.capsule.poll() is None, "the process died"
        return json.loads(reply.read_text())


@pytest.fixture
def home():
    path = Path(tempfile.mkdtemp(prefix="gc-"))
    (path / "image").mkdir(0o700)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def capsule(home):
    with Capsule.create(home) as capsule:
        yield capsule


@pytest.fixture
def killed_at(criu_binary) -> Callable[[int], Criu]:
    """A CRIU that is killed as it enters the Nth ptrace call of its dump."""
    return lambda number: Criu([sys.executable, "-I", "-S", str(LAUNCHER), str(number), *criu_binary.argv])


def leave_and_come_back(criu: Criu, capsule: Capsule, home: Path) -> dict:
    """A dump and a restore into a fresh capsule; what the process says afterwards."""
    inner, pipes = capsule.inner_pid, capsule.pipes
    criu.dump(capsule, home / "image", timeout=60)
    capsule.close()
    with Capsule.create(home) as again:
        criu.restore(again, home / "image", pid=inner, pipes=pipes, timeout=60)
        subject = Subject.__new__(Subject)
        subject.capsule, subject.home = again, home
        return subject.report()


#: Children that count and answer in the same manner as the threads do.
WORKERS = """
import multiprocessing
def fours(number):
    return number + 4
pool = multiprocessing.get_context("fork").Pool(2)

@thread
def pools():
    return pool.map_async(fours, range(3)).get(60) == [4, 5, 6]
"""


@pytest.mark.parametrize(("more", "most"), [("", MOST), (WORKERS, MOST_OF_TREE)], ids=["alone", "with children"])
@pytest.mark.parametrize("kills", [15, pytest.param(MOST, marks=pytest.mark.torture)])
def test_killed_at_any_of_its_ptrace_calls(killed_at, criu_binary, capsule, home, kills, more, most):
    subject = Subject(capsule, home, more)
    healthy = subject.report()
    assert (healthy["continues"], healthy["wrong"], healthy["random"]) == (True, [], True)
    killed = []
    for number in random.Random(kills).sample(range(1, most + 1), kills):
        try:
            killed_at(number).dump(capsule, home / "image", timeout=60)
        except CriuKilled as error:
            assert "unrepaired" not in error.details
            killed.append(number)
        else:
            capsule.resume_processes()  # it made fewer calls than that
        assert subject.report() == healthy, f"killed at its ptrace call {number}"
        shutil.rmtree(home / "image")
        (home / "image").mkdir(0o700)
    assert len(killed) > kills / 3, "``most`` is not far above what a dump needs"
    assert leave_and_come_back(Criu(criu_binary.argv), capsule, home) == healthy


@pytest.mark.parametrize(
    ("more", "ignored", "caught"),
    [
        ("", False, False),
        ("signal.signal(signal.SIGTRAP, signal.SIG_IGN)", True, False),
        ("signal.signal(signal.SIGTRAP, lambda *_: wrong.append('trapped'))", False, True),
    ],
    ids=["default", "ignored", "caught"],
)
def test_what_the_program_does_with_sigtrap_stays(killed_at, criu_binary, capsule, home, more, ignored, caught):
    criu = Criu(criu_binary.argv)
    subject = Subject(capsule, home, more)
    before = subject.report()
    assert (before["trap ignored"], before["trap caught"]) == (ignored, caught)
    criu.dump(capsule, home / "image", timeout=60)
    capsule.resume_processes()
    assert subject.report() == before, "after a dump"
    for number in (80, 110):
        with pytest.raises(CriuKilled):
            killed_at(number).dump(capsule, home / "image", timeout=60)
        assert subject.report() == before, "after a CRIU that was killed"
    assert leave_and_come_back(criu, capsule, home) == before, "after a restore"


CHILDREN = """
import subprocess
children = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(2)]
os.kill(children[1].pid, signal.SIGSTOP)
"""


def test_processes_that_ran_before_the_dump_continue_and_no_others(criu_binary, capsule, home):
    """The session does not matter; a process that the user had stopped stays so."""
    subject = Subject(capsule, home, CHILDREN)
    before = subject.report()
    pids = [capsule.host_pid, *sorted(capsule.other_processes())]

    def states() -> str:
        return "".join(criu_guard._state(pid, pid) for pid in pids)

    until(lambda: states()[1:] == "ST")
    Criu(criu_binary.argv).dump(capsule, home / "image", timeout=60)
    assert states() == "TTT"
    capsule.resume_processes()
    until(lambda: states()[1:] == "ST")
    assert subject.report() == before


def test_a_child_that_is_killed_meanwhile_ends_nothing(criu_binary, capsule, home):
    """While the processes are stopped after a dump, and as they are restored; one that was stopped stays so."""
    criu = Criu(criu_binary.argv)
    subject = Subject(capsule, home, CHILDREN.replace("range(2)", "range(3)"))
    healthy = subject.report()
    first, stopped, third = sorted(capsule.other_processes())
    until(lambda: criu_guard._state(stopped, stopped) == "T")
    criu.dump(capsule, home / "image", timeout=60)
    os.kill(first, signal.SIGKILL)
    until(lambda: criu_guard._state(first, first) == "Z")
    capsule.resume_processes()
    assert subject.report() == healthy
    assert criu_guard._state(third, third) == "S"
    shutil.rmtree(home / "image")
    (home / "image").mkdir(0o700)
    inner, root, pipes = capsule.inner_pid, capsule.tree(), capsule.pipes
    criu.dump(capsule, home / "image", timeout=60)
    notes = capsule.inspect()["notes"]
    (inner_stopped,) = [pid for pid in notes if "stopped" in notes[pid]]
    capsule.close()
    with Capsule.create(home) as again:

        def killed() -> None:
            living = [pid for pid in again.other_processes() if criu_guard._lives(pid)]
            inside = {procfs.status(pid)["NSpid"].split()[-1]: pid for pid in living}
            others = inside.keys() - {inner_stopped, str(inner), str(root)}
            (again.killed,) = (inside[number] for number in others)
            again.stopped = inside[inner_stopped]
            os.kill(again.killed, signal.SIGKILL)

        options = {"pid": inner, "pipes": pipes, "timeout": 60, "notes": notes}
        criu.restore(again, home / "image", before_running=killed, **options)
        subject.capsule = again
        assert subject.report() == healthy
        assert criu_guard._state(again.stopped, again.stopped) == "T"
        assert not criu_guard._lives(again.killed)


STUCK = """
import ctypes
os.mkfifo(home + "/fifo")
libc, actions, child = ctypes.CDLL(None), ctypes.create_string_buffer(256), ctypes.c_int()
argv = (ctypes.c_char_p * 2)(b"true", None)
libc.posix_spawn_file_actions_init(actions)
libc.posix_spawn_file_actions_addopen(actions, 0, (home + "/fifo").encode(), os.O_RDONLY, 0)
spawned = (ctypes.byref(child), b"/bin/true", actions, None, argv, argv)
threading.Thread(target=libc.posix_spawn, args=spawned, daemon=True).start()
"""


def test_a_process_that_does_not_stop_is_not_dumped(criu_binary, capsule, home):
    """A thread that waits for its child to become another program (vfork) cannot be stopped; any disk may do that."""
    subject = Subject(capsule, home, STUCK)
    healthy = subject.report()
    until(capsule.other_processes, "the child")
    named = r"process \d+ \(python.*\) waits for its child, process \d+, to start its program \(vfork\)"
    with pytest.raises(KernelBusy, match=named) as caught:
        Criu(criu_binary.argv).dump(capsule, home / "image", timeout=60)
    assert "Try again" in caught.value.hint
    assert subject.report() == healthy
    with open(home / "fifo", "wb"):  # the child continues, and ends
        pass


@pytest.fixture
def process():
    """One with two threads, that ignores SIGTRAP."""
    source = (
        "import signal, threading, time\n"
        "signal.signal(signal.SIGTRAP, signal.SIG_IGN)\n"
        "threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "print(flush=True)\n"
        "time.sleep(1000)"
    )
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", source], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def handled(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("SigIgn", "SigCgt"))]


@pytest.mark.parametrize("undone", [True, False])
def test_a_failed_inspection_leaves_no_guard(process, monkeypatch, undone):
    """Or the error says that it may have."""
    begin, before, allowed = Tracee.__init__, handled(process.pid), iter([True, False, undone])

    def refused(tracee, tid):
        if not next(allowed):
            raise PermissionError("another tracer")
        begin(tracee, tid)

    monkeypatch.setattr(Tracee, "__init__", refused)
    with pytest.raises(OSError, match="^another tracer$" if undone else "another tracer; whether SIGTRAP"):
        criu_guard.CriuGuard(process.pid, time.monotonic() + 5)
    assert (handled(process.pid) == before) is undone
    until(lambda: criu_guard._state(process.pid, process.pid) == "S")


@pytest.mark.parametrize("stopped", [True, False])
def test_a_stop_signal_that_a_killed_criu_leaves_is_dropped(process, monkeypatch, stopped):
    """CRIU sends a stopped process the signal that stopped it once more, before it detaches; one that ran keeps it."""
    pid = process.pid
    if stopped:
        os.kill(pid, signal.SIGSTOP)
        until(lambda: criu_guard._all_stopped(pid), "it is stopped")
    guard = criu_guard.CriuGuard(pid, time.monotonic() + 5)
    os.kill(pid, signal.SIGTSTP)
    monkeypatch.setattr(guard, "resume", lambda: None)
    guard.finish(success=False)
    until(lambda: criu_guard._all_stopped(pid), "it is back in its stop")
    assert bool(criu_guard._signals(pid, pid, "ShdPnd") & 1 << signal.SIGTSTP - 1) is not stopped


def test_a_process_that_cannot_be_repaired_continues_all_the_same(process, monkeypatch):
    """And so do those that come after it: a stop that stays is what nobody could undo any more."""
    stopped = criu_guard.CriuGuard(process.pid, time.monotonic() + 5)

    def refused(pid, leader):
        raise PermissionError("another tracer")

    monkeypatch.setattr(criu_guard, "resume", refused)
    with pytest.raises(OSError, match=f"process {process.pid}: PermissionError: another tracer"):
        stopped.resume()
    until(lambda: criu_guard._state(process.pid, process.pid) == "S", "it continues")


def test_a_thread_that_stops_too_late_is_let_go_then(process, monkeypatch):
    def late(tracee):
        raise TimeoutError

    monkeypatch.setattr(ptrace, "_await_stop", lambda _: None)  # as if the stop ended just after that
    monkeypatch.setattr(Tracee, "_wait", late)
    with pytest.raises(TimeoutError):
        Tracee(process.pid)
    pid, status = os.waitpid(process.pid, 0)
    assert os.WIFSTOPPED(status)
    assert release_late(pid, status)
    until(lambda: "TracerPid:\t0" in Path(f"/proc/{pid}/status").read_text())
    until(lambda: criu_guard._state(pid, pid) == "S")
    assert not release_late(pid, status)


#: Waits for another process to open a pipe, in a state in which it does not stop (vfork).
LATE = f"""
import os, sys, threading, time
home = sys.argv[1]
{STUCK.replace(".start()", ".run()")}
time.sleep(1000)
"""
_PR_GET_PDEATHSIG = 2


def test_a_process_on_its_way_to_its_stop_is_changed_in_that_stop(tmp_path):
    """A tracer that comes before the stop in which CRIU leaves it gets the SIGSTOP, and the process runs on."""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", LATE, str(tmp_path)]) as process:
        pid = process.pid
        try:
            until(lambda: procfs.stat(pid).state == "D", "it waits for its child")
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(0.3, lambda: (tmp_path / "fifo").open("wb").close()).start()
            notes = {"threads": {str(pid): {"death_signal": int(signal.SIGUSR1)}}}
            assert reapply.reapply({str(pid): notes}) == ([], [])
            until(lambda: procfs.stat(pid).state == "T", "it is stopped")
            with Injection.into(pid) as injection, injection.on_stack(bytes(8)) as address:
                assert injection.call("prctl", _PR_GET_PDEATHSIG, address) == 0
                assert injection.memory.read(address, 4) == struct.pack("=i", signal.SIGUSR1)
        finally:
            process.kill()


#: Counts how often it continued, as far as its handler heard of it.
CONTINUED = """
import signal, sys

continued = []
signal.signal(signal.SIGCONT, lambda *_: continued.append(1))
print(flush=True)
for _ in sys.stdin:
    print(len(continued), flush=True)
"""


def test_a_process_of_one_thread_does_not_notice_that_it_was_stopped():
    """No other thread drops the signal that ends the stop: it was kept for the tracer, and its handler called after."""
    command = [sys.executable, "-I", "-S", "-c", CONTINUED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()
            for _ in range(20):
                criu_guard.stop(process.pid, time.monotonic() + 10)
                criu_guard.resume(process.pid)
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "0\n"
        finally:
            process.kill()


#: Counts calls of its handler, and of sem_wait(3) that were interrupted by it, which no thread but the first may see.
INTERRUPTED = """
import ctypes, signal, sys, threading

libc, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(32)
libc.sem_init(semaphore, 0, 0)
called, interrupted = [], []
signal.signal(signal.SIGALRM, lambda *_: called.append(1))

def wait():
    while True:
        interrupted.append(libc.sem_wait(semaphore))

for _ in range(8):
    threading.Thread(target=wait, daemon=True).start()
print(flush=True)
for _ in sys.stdin:
    print(len(called), len(interrupted), flush=True)
"""


def test_a_signal_that_comes_during_a_stop_is_the_main_thread_s():
    """Other threads sleep on, as they would have if the process had run."""
    command = [sys.executable, "-I", "-S", "-c", INTERRUPTED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()
            pid = process.pid
            until(lambda: {procfs.stat(pid, tid).state for tid in procfs.threads(pid)} == {"S"}, "all threads wait")
            for number in range(1, 21):
                criu_guard.stop(pid, time.monotonic() + 10)
                os.kill(pid, signal.SIGALRM)
                criu_guard.resume(pid)
                print(file=process.stdin, flush=True)
                assert process.stdout.readline() == f"{number} 0\n"
        finally:
            process.kill()


#: Threads that wait without a timeout in poll(2), which Linux repeats from a note that a dump lacks.
POLLS = """
import ctypes, os, signal, struct, sys, threading

libc, (reading, _) = ctypes.CDLL(None), os.pipe()
signal.signal(signal.SIGALRM, lambda *_: None)
for _ in range(4):
    wanted = struct.pack("ihh", reading, 1, 0)
    threading.Thread(target=lambda: libc.poll(wanted, 1, -1), daemon=True).start()
print(flush=True)
sys.stdin.read()
"""


def test_the_waits_of_other_threads_begin_again_after_a_dump_that_a_timer_s_signal_met():
    """The main thread gets that signal, and no other may see that it came: ``EINTR``."""
    command = [sys.executable, "-I", "-S", "-c", POLLS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            process.stdout.readline()
            pid = process.pid
            until(lambda: {procfs.stat(pid, tid).state for tid in procfs.threads(pid)} == {"S"}, "all threads wait")
            criu_guard.stop(pid, time.monotonic() + 10)
            os.kill(pid, signal.SIGALRM)
            guard = criu_guard.CriuGuard(pid, time.monotonic() + 10)
            results = []
            for tid in set(procfs.threads(pid)) - {pid}:
                with Injection.into(pid) as injection, injection.thread(tid) as tracee:
                    results.append(tracee.words()[MACHINE.result])
            assert results == [(1 << 64) - syscall_restart.ERESTARTNOINTR] * 4
            guard.finish(success=False)
        finally:
            process.kill()


def test_an_import_that_fails_while_criu_runs_leaves_its_request_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "jupyter_gpu_ckpt.capsule.criu_guard", None)
    monkeypatch.delattr("jupyter_gpu_ckpt.capsule.criu_guard")
    with pytest.raises(ImportError):
        from jupyter_gpu_ckpt.capsule import criu_guard  # noqa: F401
    init._import_rest()


def test_all_are_back_in_their_stop_when_criu_begins(monkeypatch, tmp_path):
    """Changes for a dump are made by a tracer, which lets a process continue to its stop a moment later."""

    class Prepared:
        has_injected = True

        def __init__(self, pids: list[int], *_: object) -> None:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def fork(*_: object, **__: object) -> int:
        seen.append(procfs.stat(process.pid).state)
        return 0

    seen: list[str] = []
    monkeypatch.setattr(preparation, "Preparation", Prepared)
    monkeypatch.setattr(criu_guard, "_RETURN_TIMEOUT", 0.05)
    process = subprocess.Popen(["sleep", "1000"])
    under_test = SimpleNamespace(
        job=None, rootless=False, pipes=[], watched_files=None, inherited_files={}, number=1, fork=fork
    )
    under_test.filters = SimpleNamespace(hide=lambda pids: None, show=lambda: None)
    under_test.guard = lambda: CriuGuard(process.pid, time.monotonic() + 60)
    under_test.prepare = lambda guard, terminals: init.Init.prepare(under_test, guard, terminals)
    under_test.replace_inherited_files = lambda guard: init.Init.replace_inherited_files(under_test, guard)
    output = str(tmp_path / "output")
    try:
        init.Init.run(under_test, ["criu"], {}, "/", 60, output, False, 0, True, str(tmp_path / "terminals"))
        assert seen == ["T"]
        under_test.job.guard.finish(success=False)
        assert procfs.stat(process.pid).state != "T"
    finally:
        process.kill()
        process.wait()
