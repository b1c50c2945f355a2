"""The capsule: what a process in it sees, what it has, and that it ends with its owner."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from harness import alive
from sleepers import ENV, sleeper, status_of
from waiting import until

import jupyter_gpu_ckpt
from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.capsule import capsule as under_test
from jupyter_gpu_ckpt.capsule.capsule import Capsule, first_pid
from jupyter_gpu_ckpt.capsule.namespaces import Clocks
from jupyter_gpu_ckpt.capsule.stdio import BACKLOG
from jupyter_gpu_ckpt.errors import CapsuleError, CapsuleGone

SECOND = 1_000_000_000


def tell(capsule: Capsule, code: str) -> dict:
    """Run ``code``, which fills ``found``, as the capsule's kernel; ``found``."""
    return tell_with(capsule, ENV, code)


def tell_with(capsule: Capsule, env: dict[str, str], code: str) -> dict:
    file = capsule.directory / "found.json"
    source = f"import json, os, time\nfound = {{}}\n{code}\njson.dump(found, open({str(file)!r}, 'w'))"
    capsule.spawn([sys.executable, "-I", "-S", "-c", source], env, str(capsule.directory))
    assert capsule.wait(60) == 0
    return json.loads(file.read_text())


# -- what is inside


def test_the_kernel_keeps_its_user_and_its_surroundings(capsule):
    found = tell(
        capsule,
        "found |= dict(ids=[os.getuid(), os.geteuid(), os.getgid(), os.getegid()])\n"
        "found |= dict(pid=os.getpid(), ppid=os.getppid(),\n"
        "  sid=os.getsid(0), cwd=os.getcwd(), fds=sorted(map(int, os.listdir('/proc/self/fd'))),\n"
        "  processes=sorted(int(n) for n in os.listdir('/proc') if n.isdigit()), env=dict(os.environ),\n"
        "  status=open('/proc/self/status').read())",
    )
    assert found["ids"] == [os.getuid(), os.geteuid(), os.getgid(), os.getegid()]
    assert found["pid"] >= 8192
    assert found["ppid"] == found["processes"][1], "its root process"
    assert found["sid"] == found["pid"], "a session leader outside would fail the dump"
    assert found["cwd"] == str(capsule.directory)
    assert found["fds"] == [0, 1, 2, 3], "3 is the listing's own"
    assert found["processes"] == [1, found["ppid"], found["pid"]]
    assert found["env"] == ENV
    assert "CapAmb:\t0000000000000000" in found["status"]
    if os.geteuid() != 0:
        assert "CapEff:\t0000000000000000" in found["status"]
        assert "CapPrm:\t0000000000000000" in found["status"]


def test_a_descriptor_of_the_owner_does_not_get_in(directory):
    with open(directory / "secret", "w") as secret:
        os.set_inheritable(secret.fileno(), True)
        with Capsule.create(directory) as capsule:
            found = tell(
                capsule,
                "found['fds'] = [os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)]\n"
                "found['count'] = len(os.listdir('/proc/self/fd'))",
            )
    assert found["fds"][0] == "/dev/null"
    assert all(target.startswith("pipe:") for target in found["fds"][1:])
    assert found["count"] == 3 + 1, "one is the listing's own"


@pytest.fixture
def ignoring():
    """This process ignores signals, as one does that a script or ``nohup`` started."""
    numbers = (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGRTMIN)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_kernel_takes_the_signals_an_ordinary_process_takes(ignoring, capsule):
    """A signal that its owner, init and Python ignore is not handed on: an ignored signal stays ignored across exec."""
    sleeper(capsule)
    ignored = int(status_of(capsule.host_pid)["SigIgn"], 16)
    assert [number for number in signal.valid_signals() if ignored >> (number - 1) & 1] == []
    capsule.signal(signal.SIGTERM)
    assert capsule.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("seconds", [-12.25, 0.0, 34.5, 1e6])
def test_clocks_are_shifted_by_the_given_offset(directory, seconds):
    """Backwards and forwards; CLOCK_MONOTONIC may not become negative, which no dump asks for."""
    offset = int(seconds * SECOND)
    with Capsule.create(directory, offsets=Clocks(offset, 2 * offset)) as capsule:
        before = Clocks.now()
        inside = capsule.clocks()
        after = Clocks.now()
        found = tell(capsule, "found['now'] = [time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)]")
    assert before.monotonic <= inside.monotonic - offset <= after.monotonic
    assert before.boottime <= inside.boottime - 2 * offset <= after.boottime
    assert found["now"][0] >= inside.monotonic
    assert found["now"][1] >= inside.boottime


def test_a_process_that_cannot_be_started_is_reported_with_the_reason(capsule):
    with pytest.raises(CapsuleError, match="No such file") as caught:
        capsule.spawn(["/does/not/exist"], ENV, None)
    assert caught.value.code == "CAPSULE_FAILED"
    with pytest.raises(CapsuleError, match="No such file"):
        capsule.spawn(["true"], ENV, "/does/not/exist")
    capsule.clocks()


def test_an_environment_larger_than_a_packet(capsule):
    """Clusters export whole shell functions: what a process can be started with, a kernel can."""
    large = {f"FUNCTION_{number}": "y" * 100_000 for number in range(3)}
    found = tell_with(capsule, {**ENV, **large}, "found['env'] = dict(os.environ)")
    assert found["env"] == {**ENV, **large}
    capsule.clocks()


def test_an_environment_larger_than_a_process_may_have(capsule):
    with pytest.raises(CapsuleError, match="Argument list too long"):
        capsule.spawn([sys.executable], {**ENV, "LARGE": "y" * 300_000}, None)
    assert tell(capsule, "found['pid'] = os.getpid()")["pid"] >= 8192


def test_kernels_of_one_host_have_pids_of_their_own():
    """Programs name files in /tmp after their pid, and another user's cannot be written."""
    pid_max = int(Path("/proc/sys/kernel/pid_max").read_text())
    pids = {first_pid() for _ in range(100)}
    assert len(pids) > 50
    assert all(min(pid_max // 4, 100_000) <= pid < pid_max // 2 for pid in pids)


def test_a_second_kernel_is_refused(capsule):
    sleeper(capsule)
    with pytest.raises(CapsuleError, match="a kernel already"):
        capsule.spawn(["sleep", "1"], ENV, None)
    assert capsule.poll() is None


def test_a_directory_with_a_long_path(directory):
    """Beyond the 107 bytes that the path of a unix socket may have."""
    long = directory / ("x" * 100) / ("y" * 100)
    long.mkdir(parents=True)
    with Capsule.create(long) as capsule:
        sleeper(capsule).outlive()
        pid = capsule.host_pid
        capsule.detach()
        with Capsule.attach(long) as again:
            assert again.host_pid == pid
            assert alive([pid]) == [pid]
    assert alive([pid]) == []


# -- requests


def test_the_directory_has_a_second_path_for_sockets(directory):
    short = directory / "short"
    (directory / "kernel").mkdir(mode=0o700)
    short.mkdir()
    with Capsule.create(directory / "kernel", sockets=short / "name") as capsule:
        found = tell(
            capsule,
            "import socket\nlistener = socket.socket(socket.AF_UNIX)\n"
            f"listener.bind({str(short / 'name-1')!r})\nfound['names'] = os.listdir({str(short)!r})",
        )
        assert "name-1" in found["names"]
        assert (directory / "kernel" / "name-1").is_socket()
    assert list(short.iterdir()) == [], "only the capsule sees it there"


def test_programs_run_inside_to_their_end_or_to_their_deadline(capsule):
    def run(argv: list[str], timeout: float = 60):
        return capsule.run(argv, cwd=capsule.directory, output=capsule.directory / "out", timeout=timeout, env=ENV)

    assert run(["sh", "-c", "echo one; exit 3"]).status == 3
    assert run(["sh", "-c", "kill -9 $$"]).status == -9
    assert (capsule.directory / "out").read_text() == "one\n"
    assert (capsule.directory / "out").stat().st_mode & 0o777 == 0o600
    ran = run(["sleep", "1000"], timeout=0.2)
    assert (ran.status, ran.timed_out) == (-9, True)
    assert ran.seconds >= 0.2
    with pytest.raises(CapsuleError, match="No such file"):
        run(["/does/not/exist"])
    assert run(["true"]).status == 0


@pytest.mark.parametrize("stopped", [True, False])
def test_a_program_that_is_killed_takes_its_children_along(capsule, stopped):
    """CRIU tries ptrace on a child, which stops itself for that, and stays stopped if CRIU is killed meanwhile."""
    child = "os.kill(os.getpid(), signal.SIGSTOP)" if stopped else "time.sleep(99)"
    parent = "os.waitpid(pid, os.WUNTRACED)" if stopped else "time.sleep(0.2)"
    code = f"""
import os, signal, time
pid = os.fork()
if pid == 0:
    {child}
    os._exit(1)
{parent}
os.kill(os.getpid(), signal.SIGKILL)
"""
    sleeper(capsule)
    output = capsule.directory / "out"
    ran = capsule.run([sys.executable, "-c", code], cwd=capsule.directory, output=output, timeout=60, env=ENV)
    assert ran.status == -signal.SIGKILL
    until(lambda: capsule.other_processes() == [], "its child has ended, too")


@pytest.mark.parametrize("reaped", [False, True])
def test_a_restore_whose_kernel_was_killed_ends_soon(capsule, reaped):
    """CRIU would wait for it: one that continues without its kernel is killed, one that has noticed it is not."""
    code = f"""
import os, time
open("/proc/sys/kernel/ns_last_pid", "w").write("8999")
pid = os.fork()
if pid == 0:
    os._exit(1)
assert pid == 9000
if {reaped}:
    os.waitpid(pid, 0)
time.sleep(4 if {reaped} else 99)
"""
    output = capsule.directory / "out"
    argv = [sys.executable, "-c", code]
    ran = capsule.run(argv, cwd=capsule.directory, output=output, timeout=90, env=ENV, restores=9000)
    assert ran.status == (0 if reaped else -signal.SIGKILL)
    assert not ran.timed_out
    assert ("process 9000 was killed while it was restored" in output.read_text()) is not reaped


@pytest.mark.parametrize("ends", ["os._exit(1)", "os.kill(os.getpid(), 9)", "time.sleep(99)"])
def test_nothing_of_a_failed_restore_runs(capsule, ends):
    """Processes that have left CRIU's group, as restored ones do, are killed, too."""
    code = f"""
import os, time
open("/proc/sys/kernel/ns_last_pid", "w").write("8999")
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(99)
    os._exit(0)
os.wait()
{ends}
"""
    output = capsule.directory / "out"
    argv = [sys.executable, "-c", code]
    ran = capsule.run(argv, cwd=capsule.directory, output=output, timeout=2, env=ENV, restores=9000)
    assert ran.status != 0
    until(lambda: alive(capsule.other_processes()) == [], "nothing is left")


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's CRIU mounts nothing")
def test_what_a_killed_criu_has_mounted_to_try_linux_is_not_taken_for_the_kernels_own(capsule):
    sleeper(capsule)
    code = "d=$(mktemp -d /tmp/.criu.move_mount_set_group.XXXXXX) && mount -t tmpfs none $d && echo $d && kill -9 $$"
    output = capsule.directory / "out"
    ran = capsule.run(["sh", "-c", code], cwd=capsule.directory, output=output, timeout=60, env=ENV)
    assert ran.status == -signal.SIGKILL
    assert capsule.inspect()["refusals"] == []
    assert not Path(output.read_text().strip()).exists()


def test_init_survives_requests_that_make_no_sense(capsule):
    sleeper(capsule)
    for request in (
        {"verb": "nonsense"},
        {"verb": "run"},
        {"verb": "spawn", "argv": 7},
        {"verb": "attach_kernel", "pid": 999},
    ):
        with pytest.raises(CapsuleError):
            capsule._request(request)
    assert capsule.poll() is None
    capsule.clocks()


def test_only_one_owner_at_a_time(capsule):
    sleeper(capsule)
    with pytest.raises(CapsuleGone):
        Capsule.attach(capsule.directory)
    capsule.clocks()


def test_raw_output_goes_where_the_owner_said(directory):
    raw = open(directory / "raw", "wb")  # noqa: SIM115
    with raw, Capsule.create(directory, stdout=raw, stderr=subprocess.STDOUT) as capsule:
        capsule.spawn(["sh", "-c", "echo out; echo err >&2"], ENV, None)
        assert capsule.wait(60) == 0
        until(lambda: (directory / "raw").stat().st_size >= 8)
    assert sorted((directory / "raw").read_text().split()) == ["err", "out"]


def test_output_nobody_reads_does_not_stop_the_kernel(directory):
    """The owner's pipe is closed (a server that lost its terminal): what the kernel prints raw is dropped."""
    reader, writer = os.pipe()
    with Capsule.create(directory, stdout=writer) as capsule:
        os.close(writer)
        os.close(reader)
        line = "x" * 100  # together more than a pipe holds
        capsule.spawn(["sh", "-c", f"i=0; while [ $i -lt 3000 ]; do echo {line}; i=$((i+1)); done"], ENV, None)
        assert capsule.wait(60) == 0


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_output_into_a_full_pipe_neither_stops_the_kernel_nor_its_owner(directory, kind):
    """Somebody holds the other end and does not read: the first of it is kept for them, the rest is dropped."""
    if kind == "pipe":
        reader, writer = os.pipe()
    else:
        reader, writer = (end.detach() for end in socket.socketpair())
    line = "x" * 99
    lines = 4 * BACKLOG // 100  # far more than the pipe and what is kept beside it
    source = f"import os\nfor i in range({lines // 1000}): os.write(1, b'{line}\\n' * 1000)"
    try:
        with Capsule.create(directory, stdout=writer) as capsule:
            capsule.spawn([sys.executable, "-I", "-S", "-c", source], ENV, None)
            assert capsule.wait(60) == 0
            capsule.clocks()  # its init answers
            assert os.get_blocking(writer), "the owner's own descriptor is as it was"
            os.set_blocking(reader, False)
            read = bytearray()

            def enough() -> bool:
                with contextlib.suppress(BlockingIOError):
                    read.extend(os.read(reader, 1 << 20))
                return len(read) >= BACKLOG

            until(enough)
            capsule.clocks()
    finally:
        os.close(reader)
        os.close(writer)
    assert set(bytes(read[:BACKLOG]).split(b"\n")[:-1]) == {line.encode()}, "whole lines, from the first on"


def test_a_file_that_both_write_to_keeps_what_each_wrote(directory):
    """The position is shared with the owner: `jupyter server > log` is not written over."""
    with open(directory / "raw", "wb") as raw, Capsule.create(directory, stdout=raw) as capsule:
        raw.write(b"owner 1\n")
        raw.flush()
        capsule.spawn(["sh", "-c", "echo kernel"], ENV, None)
        assert capsule.wait(60) == 0
        until(lambda: b"kernel" in (directory / "raw").read_bytes())
        raw.write(b"owner 2\n")
    assert (directory / "raw").read_bytes() == b"owner 1\nkernel\nowner 2\n"


FORKS = """
import os, subprocess, time
orphan = subprocess.Popen(["sleep", "1000"])
own = os.fork()
if own: print(orphan.pid, flush=True)
time.sleep(1000)
"""


def test_what_the_init_forks_for_itself_is_no_process_of_the_capsule(capsule, monkeypatch):
    """A checkpoint at such a moment was refused: the parent of that process had ended, it seemed."""
    sleeper(capsule)
    with subprocess.Popen([sys.executable, "-c", FORKS], stdout=subprocess.PIPE) as init:
        orphan = int(init.stdout.readline())
        monkeypatch.setattr(capsule, "_init_pid", init.pid)
        try:
            assert len(procfs.children(init.pid)) == 2
            assert capsule.other_processes() == [orphan]
        finally:
            for pid in [*procfs.children(init.pid), init.pid]:
                os.kill(pid, signal.SIGKILL)


# -- the end


def test_close_leaves_nothing_behind(directory):
    capsule = Capsule.create(directory)
    capsule.spawn(["sh", "-c", "trap '' TERM INT HUP; (setsid sleep 1000 &) ; sleep 1000"], ENV, None)
    until(lambda: len(capsule.other_processes()) >= 2)
    pids = [capsule.host_pid, *capsule.other_processes()]
    descriptors = len(os.listdir("/proc/self/fd"))
    capsule.close()
    capsule.close()
    assert alive(pids) == []
    assert list(directory.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors - 3, "the connection and two pidfds"
    with pytest.raises(CapsuleGone):
        capsule.clocks()
    assert capsule.poll() == -signal.SIGKILL


def test_close_ends_a_capsule_whose_outer_process_was_killed(capsule):
    """Its PID 1 is nobody's child then, and continues: it would be a second copy of a kernel that has an image."""
    sleeper(capsule)
    kernel, outer = capsule.host_pid, capsule._outer.pid
    os.kill(outer, signal.SIGKILL)
    until(lambda: not procfs.children(outer), "PID 1 has left it")
    assert capsule.poll() is None
    assert capsule.other_processes() == []
    capsule.close()
    assert not alive([kernel])


def test_closing_while_another_thread_waits_for_an_answer(directory):
    capsule = sleeper(Capsule.create(directory))
    errors: list[Exception] = []

    def run() -> None:
        try:
            capsule.run(["sleep", "1000"], cwd=directory, output=directory / "out", timeout=900, env=ENV)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: len(capsule.other_processes()) == 1)
    capsule.close()
    thread.join(60)
    assert not thread.is_alive()
    assert [error.code for error in errors] == ["CAPSULE_GONE"]


def test_a_watcher_is_notified_of_the_kernels_end_and_of_nothing_else(capsule):
    sleeper(capsule)
    notified = threading.Event()
    with capsule.watch_exit(notified.set):
        pass
    assert not notified.is_set()
    with capsule.watch_exit(notified.set):
        os.kill(capsule.host_pid, signal.SIGKILL)
        assert notified.wait(60)
    notified.clear()
    with capsule.watch_exit(notified.set):
        assert notified.wait(60), "also of an end that came before"


def test_a_watcher_without_a_thread_leaves_no_descriptor(capsule, monkeypatch):
    sleeper(capsule)
    before = os.listdir("/proc/self/fd")

    def exhausted(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", exhausted)
    with pytest.raises(RuntimeError, match="start new thread"), capsule.watch_exit(list):
        pass
    assert os.listdir("/proc/self/fd") == before


def test_no_descriptor_of_a_capsule_is_inherited(capsule):
    """A program of the server's would have a handle of the kernel for as long as it runs."""
    sleeper(capsule)
    own = {each for each in map(int, os.listdir("/proc/self/fd")) if "pidfd" in _target(each)}
    assert own
    assert not [each for each in own if os.get_inheritable(each)]


def _target(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{descriptor}")
    return ""


# -- what cannot be made

NO_NAMESPACES = """
import os, sys
sys.path.insert(0, {package!r})
from pathlib import Path
from jupyter_gpu_ckpt.process import syscalls
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.errors import CapsuleError
uid, gid = os.getuid(), os.getgid()
syscalls.unshare(syscalls.CLONE_NEWUSER)
for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {{uid}} 1"), ("gid_map", f"1000 {{gid}} 1")):
    Path(f"/proc/self/{{name}}").write_text(text)
# The limits of a user namespace are its own; none of the machine's is touched.
Path("/proc/sys/user/max_user_namespaces").write_text("0")
try:
    Capsule.create(Path({directory!r}))
except CapsuleError as error:
    print(error.code, error.details["at"], error.details["errno"], error)
"""


def test_a_host_that_allows_no_namespaces_is_reported_by_name(directory):
    source = NO_NAMESPACES.format(package=str(Path(under_test.__file__).parents[2]), directory=str(directory))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("CAPSULE_FAILED namespaces 28 "), done
    assert "doctor" in done.stdout
    assert list(directory.iterdir()) == []


def test_no_init_no_capsule(directory, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    with pytest.raises(CapsuleError, match="could not be started"):
        Capsule.create(directory)
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(CapsuleError, match="ended before it reported"):
        Capsule.create(directory)


def test_a_directory_where_nobody_listens(directory):
    with pytest.raises(CapsuleGone):
        Capsule.attach(directory)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(directory / "capsule.sock"))
    with pytest.raises(CapsuleGone):
        Capsule.attach(directory)
    with Capsule.create(directory) as capsule:
        capsule.clocks()


def test_a_lock_it_holds_ends_with_it_and_with_nothing_else(capsule, tmp_path):
    def held(path: Path) -> bool:
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def hold(path: Path) -> None:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            capsule.keep_fd(file.fileno())

    for name in ("one", "two"):
        hold(tmp_path / name)
    sleeper(capsule)
    os.kill(capsule.host_pid, signal.SIGKILL)
    assert capsule.wait(60) == -signal.SIGKILL
    assert held(tmp_path / "one"), "the capsule lives, whatever becomes of its kernel"
    assert held(tmp_path / "two")
    (tmp_path / "one").unlink()
    hold(tmp_path / "three")
    init = procfs.children(capsule._outer.pid)[0]
    files = [os.readlink(path) for path in Path(f"/proc/{init}/fd").iterdir()]
    assert sorted(file for file in files if str(tmp_path) in file) == [f"{tmp_path}/three", f"{tmp_path}/two"]
    capsule.close()
    assert not held(tmp_path / "two")
    assert not held(tmp_path / "three")


@pytest.mark.parametrize(
    ("module", "not_yet"),
    [
        ("start", ("capsule.init",)),
        ("init", ("capsule.criu_guard", "errors", "process.inventory", "process.preparation", "process.reapply")),
    ],
)
def test_a_wake_waits_for_no_module_that_it_needs_later(module, not_yet):
    """A capsule reports before its init is imported, and starts CRIU before what only other requests need."""
    code = f"import jupyter_gpu_ckpt.capsule.{module}, sys; print(*sys.modules)"
    path = Path(jupyter_gpu_ckpt.__file__).parent.parent
    program = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(path)!r}); {code}"]
    imported = subprocess.run(program, capture_output=True, text=True, check=True).stdout.split()
    assert f"jupyter_gpu_ckpt.capsule.{module}" in imported
    ours = {f"jupyter_gpu_ckpt.{name}" for name in not_yet}
    assert not {*ours, "dataclasses", "inspect", "hashlib", "pathlib"}.intersection(imported)
