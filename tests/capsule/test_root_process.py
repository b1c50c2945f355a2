"""The root of a kernel's tree of processes: what has lost its parent travels with the kernel, which sees none of it."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from round_trip import Subject, image
from sleepers import ENV, sleeper
from waiting import until

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule import root_program
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.criu.criu import Criu
from jupyter_gpu_ckpt.errors import CriuError

#: `daemon` makes an orphan that works on request; `relations` is what Linux shows of a process.
PRELUDE = """
import os, pty, signal, socket, subprocess, time
seen = []
def daemon(then="", session=True):
    ours, its = socket.socketpair()
    if not (middle := os.fork()):
        session and os.setsid()
        if not os.fork():
            exec(then)
            counted = 0
            its.send(str(os.getpid()).encode())
            while word := its.recv(99):
                counted += 1
                its.send(word + str(counted).encode())
        os._exit(0)
    os.waitpid(middle, 0)
    its.close()
    return int(ours.recv(99)), ours
def answers(link):
    link.send(b"word")
    return link.recv(99)
def relations(pid):
    with open(f"/proc/{pid}/stat") as file:
        words = file.read().rpartition(")")[2].split()
    return pid, *words[1:6]
def strangers():
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
"""

#: What makes an orphan, and what must be the same of it after a dump and a restore.
ORPHANS = {
    "a daemon (setsid, two forks)": ("pid, link = daemon()", "relations(pid)", "answers(link)"),
    "a process in the kernel's own session": (
        "pid, link = daemon(session=False)",
        "relations(pid), os.getsid(pid) == os.getpid()",
        "answers(link)",
    ),
    "a leader of its own session": ("pid, link = daemon('os.setsid()')", "relations(pid)", "answers(link)"),
    "a leader of its own group": ("pid, link = daemon('os.setpgid(0, 0)')", "relations(pid)", "answers(link)"),
    "children of its own": (
        'pid, link = daemon(\'own = [subprocess.Popen(["sleep", "999"], start_new_session=n) for n in (0, 1)]\')',
        "sorted(relations(int(p)) for p in open(f'/proc/{pid}/task/{pid}/children').read().split()), relations(pid)",
        "answers(link)",
    ),
    "an orphan of its own": (
        "pid, link = daemon('''if not os.fork():\\n if os.fork(): os._exit(0)\\n time.sleep(1000)\\nos.wait()''')",
        "relations(pid), sorted(relations(int(p)) for p in os.listdir('/proc') if p.isdigit() and int(p) > 1\n"
        "                       and os.getsid(int(p)) == os.getsid(pid))",
        "answers(link)",
    ),
    "a command in the background of a shell that has ended": (
        "pid = int(subprocess.check_output(['sh', '-c', 'nohup sleep 1000 >/dev/null 2>&1 & echo $!']))",
        "relations(pid)",
        "None",
    ),
    "a command in the background of a shell on a terminal": (
        "shell, end = pty.fork()\n"
        "shell or os.execlp('sh', 'sh', '-c', '(sleep 1000 & echo $!); read line; exec sleep 1000')\n"
        "pid = int(os.read(end, 99))\n"
        "os.write(end, b'continue\\n'); time.sleep(0.2); os.read(end, 99)",
        "relations(pid)[:4], relations(shell), os.getsid(pid) == shell",  # CRIU gives a terminal to leaders only
        "None",
    ),
    "several in one session whose leader has ended": (
        "pids = subprocess.check_output(['setsid', '-w', 'sh', '-c',\n"
        "    'for n in 1 2 3; do sleep 1000 >/dev/null & echo $!; done']).split()",
        "[relations(int(pid)) for pid in pids]",
        "None",
    ),
}


class TwoTrips:
    """The state of `ORPHANS` before, and after each of two dumps and restores."""

    def __init__(self, criu: Criu, home: Path) -> None:
        self.seen: list[dict[str, str]] = []
        self.answers: list[dict[str, str]] = []
        self.strangers: list[str] = []
        self.parents: list[str] = []
        capsule = Capsule.create(home)
        try:
            subject = Subject(capsule)
            assert subject.tell(PRELUDE) == "None"
            for number, (make, _, _) in enumerate(ORPHANS.values()):
                assert subject.tell(f"place{number} = dict(globals())\nexec({make!r}, place{number})") == "None"
            self._look(subject)
            for _ in range(2):
                inner, pipes = capsule.inner_pid, capsule.pipes
                assert capsule.inspect()["refusals"] == []
                criu.dump(capsule, image(home), timeout=60)
                found = capsule.inspect()
                assert found["refusals"] == []
                capsule.close()
                capsule = Capsule.create(home)
                options = {"pid": inner, "pipes": pipes, "timeout": 60, "notes": found["notes"]}
                assert criu.restore(capsule, image(home), **options).changed == []
                shutil.rmtree(image(home))
                self._look(subject)
        finally:
            capsule.close()

    def _look(self, subject: Subject) -> None:
        asks = {name: (f"eval({{!r}}, place{n})", kind) for n, (name, kind) in enumerate(ORPHANS.items())}
        self.seen.append({name: subject.tell(f"answer = {do.format(kind[1])}") for name, (do, kind) in asks.items()})
        self.answers.append({name: subject.tell(f"answer = {do.format(kind[2])}") for name, (do, kind) in asks.items()})
        self.strangers.append(subject.tell("answer = strangers()"))
        self.parents.append(subject.tell("answer = os.getppid(), os.getpid(), os.getpgrp(), os.getsid(0)"))


@pytest.fixture(scope="module")
def trips(criu_binary, tmp_path_factory):
    return TwoTrips(Criu(criu_binary.argv), tmp_path_factory.mktemp("trips"))


@pytest.mark.parametrize("name", ORPHANS)
def test_an_orphan_travels_with_its_kernel(trips, name):
    before, *after = [seen[name] for seen in trips.seen]
    assert "Error" not in before
    assert after == [before, before]
    expected = "None" if ORPHANS[name][2] == "None" else "b'word{}'"
    assert [seen[name] for seen in trips.answers] == [expected.format(number) for number in (1, 2, 3)]


def test_the_kernel_waits_for_none_of_them(trips):
    """Its only child is a shell on a terminal."""
    assert trips.strangers == ["(0, 0)"] * 3


def test_the_kernel_hears_nothing_of_an_orphan(criu_binary, directory):
    """Of one in its own session, which CRIU restores by a child of the kernel."""
    with Capsule.create(directory) as capsule:
        subject = Subject(capsule)
        subject.tell(PRELUDE)
        subject.tell("pid, link = daemon(session=False); signal.signal(signal.SIGCHLD, lambda *_: seen.append(1))")
        inner, pipes = capsule.inner_pid, capsule.pipes
        Criu(criu_binary.argv).dump(capsule, image(directory), timeout=60)
        notes = capsule.inspect()["notes"]
    with Capsule.create(directory) as again:
        Criu(criu_binary.argv).restore(again, image(directory), pid=inner, pipes=pipes, timeout=60, notes=notes)
        assert subject.tell("answer = answers(link), strangers(), seen") == "(b'word1', None, [])"


def test_the_kernel_has_the_same_parent_group_and_session(trips):
    before, *after = trips.parents
    assert after == [before, before]


# -- an end


@pytest.fixture
def capsule(directory):
    with Capsule.create(directory) as capsule:
        yield capsule


@pytest.fixture
def subject(capsule):
    subject = Subject(capsule)
    assert subject.tell(PRELUDE) == "None"
    return subject


def host_pid(capsule: Capsule, inner: int) -> int:
    return next(pid for pid in capsule.processes() if procfs.status(pid)["NSpid"].split()[-1] == str(inner))


def test_an_orphan_that_ends_is_reaped(capsule, subject):
    inner = int(subject.tell("pid, link = daemon(); answer = pid"))
    pid = host_pid(capsule, inner)
    assert procfs.stat(pid).parent == capsule.root() != capsule.host_pid
    assert capsule.processes() == [capsule.host_pid, pid]
    assert capsule.other_processes() == [pid]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{pid}"))
    assert subject.tell("answer = strangers()") == "None"


def test_an_orphan_that_ends_while_it_is_saved(criu_binary, capsule, subject, directory):
    """The orphan is a zombie until its root process, which is stopped as all are, runs on."""
    criu = Criu(criu_binary.argv)
    pid = host_pid(capsule, int(subject.tell("pid, link = daemon(); answer = pid")))
    criu.dump(capsule, image(directory), timeout=60)
    os.kill(pid, signal.SIGKILL)
    until(lambda: procfs.stat(pid).has_ended)
    shutil.rmtree(image(directory))
    capsule.resume_processes()
    until(lambda: not os.path.exists(f"/proc/{pid}"))
    inner, pipes = capsule.inner_pid, capsule.pipes
    criu.dump(capsule, image(directory), timeout=60)
    notes = capsule.inspect()["notes"]
    capsule.close()
    with Capsule.create(directory) as again:
        criu.restore(again, image(directory), pid=inner, pipes=pipes, timeout=60, notes=notes)
        assert subject.tell("answer = strangers()") == "None"


@pytest.mark.parametrize("status", [0, 3, -signal.SIGKILL, -signal.SIGSEGV, -signal.SIGTERM])
def test_the_kernels_end_is_seen_as_it_was(capsule, subject, status):
    """Its orphans run on until the capsule is closed."""
    pid = host_pid(capsule, int(subject.tell("pid, link = daemon(); answer = pid")))
    root = capsule.root()
    if status < 0:
        os.kill(capsule.host_pid, -status)
    else:
        subject.order(f"os._exit({status})")
    assert capsule.wait(60) == status
    assert capsule.poll() == status
    until(lambda: not os.path.exists(f"/proc/{root}"))
    assert not procfs.stat(pid).has_ended
    capsule.close()
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("program", [["true"], ["false"], ["sh", "-c", "kill -SEGV $$"]])
def test_a_kernel_that_ends_at_once(directory, program):
    for _ in range(20):
        with Capsule.create(directory) as capsule:
            capsule.spawn(program, ENV, None)
            assert capsule.wait(60) == {"true": 0, "false": 1, "sh": -11}[program[0]]


def test_a_kernel_that_is_killed_while_all_are_stopped(criu_binary, capsule, subject, directory):
    Criu(criu_binary.argv).dump(capsule, image(directory), timeout=60)
    os.kill(capsule.host_pid, signal.SIGKILL)
    assert capsule.wait(60) == -signal.SIGKILL


# -- without it


def test_a_root_process_that_is_killed(criu_binary, capsule, subject, directory):
    """The kernel runs on, and can be saved, but not what has lost its parent."""
    inner = int(subject.tell("pid, link = daemon(); answer = pid"))
    orphan = host_pid(capsule, inner)
    os.kill(capsule.root(), signal.SIGKILL)
    until(lambda: capsule.tree() == capsule.inner_pid)
    until(lambda: capsule.other_processes() == [orphan])
    assert capsule.processes() == [capsule.host_pid]
    assert subject.tell("answer = answers(link)") == "b'word1'"
    with pytest.raises(CriuError):  # its other end is elsewhere
        Criu(criu_binary.argv).dump(capsule, image(directory), timeout=60)
    shutil.rmtree(image(directory))
    os.kill(orphan, signal.SIGKILL)
    until(lambda: capsule.other_processes() == [])
    inner, pipes = capsule.inner_pid, capsule.pipes
    Criu(criu_binary.argv).dump(capsule, image(directory), timeout=60)
    notes = capsule.inspect()["notes"]
    capsule.close()
    with Capsule.create(directory) as again:
        Criu(criu_binary.argv).restore(again, image(directory), pid=inner, pipes=pipes, timeout=60, notes=notes)
        assert subject.tell("answer = os.getppid()") == "1"


def test_a_package_without_the_program(capsule, monkeypatch, tmp_path):
    monkeypatch.setattr(root_program, "_BUILT", tmp_path)
    assert root_program.install() is None
    sleeper(capsule)
    assert capsule.root() == capsule.host_pid


def test_a_program_that_cannot_be_run(capsule, monkeypatch, tmp_path):
    (tmp_path / "_root.so").write_bytes(b"not a program")
    monkeypatch.setattr(root_program, "_BUILT", tmp_path)
    monkeypatch.setattr(root_program, "data_directory", lambda name: tmp_path / name)
    assert root_program.install() is not None
    sleeper(capsule)
    until(lambda: capsule.root() == capsule.host_pid)
    os.kill(capsule.host_pid, signal.SIGTERM)
    assert capsule.wait(60) == -signal.SIGTERM


def test_the_program_travels_in_the_image(criu_binary, directory, monkeypatch, tmp_path):
    """The program is not there on another node, or the package was built anew."""
    monkeypatch.setattr(root_program, "data_directory", lambda name: tmp_path / "far" / name)
    with Capsule.create(directory) as capsule:
        subject = Subject(capsule)
        before = subject.tell("import os; answer = os.getppid()")
        inner, pipes = capsule.inner_pid, capsule.pipes
        Criu(criu_binary.argv).dump(capsule, image(directory), timeout=60)
        notes = capsule.inspect()["notes"]
    (program,) = (tmp_path / "far" / "native").iterdir()
    assert root_program.path_of(image(directory)) == str(program)
    shutil.rmtree(tmp_path / "far")
    with Capsule.create(directory) as again:
        Criu(criu_binary.argv).restore(again, image(directory), pid=inner, pipes=pipes, timeout=60, notes=notes)
        assert subject.tell("answer = os.getppid()") == before
        assert again.root() != again.host_pid
    assert program.exists()


def test_a_restore_by_which_an_orphan_gets_another_parent_fails(criu_binary, directory, monkeypatch):
    """A CRIU that forks the root in another way would cause this."""
    with Capsule.create(directory) as capsule:
        subject = Subject(capsule)
        subject.tell(PRELUDE)
        subject.tell("pid, link = daemon()")
        inner, pipes = capsule.inner_pid, capsule.pipes
        Criu(criu_binary.argv).dump(capsule, image(directory), timeout=60)
        notes = capsule.inspect()["notes"]
    options = {"pid": inner, "pipes": pipes, "timeout": 60, "notes": notes}
    with Capsule.create(directory) as again:
        run = again.run
        monkeypatch.setattr(again, "run", lambda *arguments, root, **more: run(*arguments, root=4, **more))
        with pytest.raises(CriuError, match="could not restore") as caught:
            Criu(criu_binary.argv).restore(again, image(directory), **options)
        assert "another parent" in str(caught.value.details)
    with Capsule.create(directory) as again:
        Criu(criu_binary.argv).restore(again, image(directory), **options)
        assert subject.tell("answer = answers(link)") == "b'word1'"


def is_stopped(pid: int) -> bool:
    return procfs.stat(pid).state == "T"


def test_what_ends_meanwhile_leaves_its_children_to_be_saved(criu_binary, capsule, subject, directory):
    """Processes lose their parents all the time, also while they are stopped one after the other."""
    subject.tell(
        "code = 'import os, time\\nwhile True:\\n if os.fork() == 0:\\n  os.setsid()\\n'\n"
        "code += '  if os.fork(): os._exit(0)\\n  time.sleep(0.05)\\n  os._exit(0)\\n os.wait()\\n time.sleep(0.001)'\n"
        "import sys; worker = subprocess.Popen([sys.executable, '-I', '-S', '-c', code])"
    )
    time.sleep(0.3)
    for _ in range(10):
        Criu(criu_binary.argv).dump(capsule, image(directory), timeout=60)
        found = capsule.inspect()
        assert found["refusals"] == []
        saved = {path.stem.partition("-")[2] for path in image(directory).glob("mm-*.img")}
        assert found["inventory"].keys() == saved
        living = [pid for pid in (capsule.root(), *capsule.processes()) if not procfs.stat(pid).has_ended]
        assert {procfs.status(pid)["NSpid"].split()[-1] for pid in living} == saved
        for pid in living:  # a tracer that releases them lets them go back into the stop
            until(functools.partial(is_stopped, pid))
        shutil.rmtree(image(directory))
        capsule.resume_processes()
