"""The owner of a capsule: the capsule ends with its owner, or keeps running and is found by the next one."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import alive
from sleepers import ENV, sleeper, status_of
from waiting import until

from jupyter_gpu_ckpt.capsule import capsule as under_test
from jupyter_gpu_ckpt.capsule.capsule import Capsule, Ran
from jupyter_gpu_ckpt.capsule.init import Init
from jupyter_gpu_ckpt.capsule.protocol import VERSION
from jupyter_gpu_ckpt.errors import CapsuleGone, LimitReached, ProtocolVersion
from jupyter_gpu_ckpt.kernel import registry

OWNER = """
import sys
from pathlib import Path
sys.path.insert(0, {package!r})
from jupyter_gpu_ckpt.capsule.capsule import Capsule
capsule = Capsule.create(Path({directory!r}))
capsule.spawn(["sleep", "1000"], {{"PATH": "/usr/bin:/bin"}}, None)
if {outlive}:
    capsule.outlive()
print(capsule.host_pid, capsule._outer.pid, flush=True)
sys.stdin.read()
"""


def owner(directory: Path, outlive: bool) -> tuple[subprocess.Popen[str], list[int]]:
    """A process that owns a capsule; it, and the pids of the kernel and of the capsule's outer process."""
    package = str(Path(under_test.__file__).parents[2])
    source = OWNER.format(package=package, directory=str(directory), outlive=outlive)
    process = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [int(word) for word in process.stdout.readline().split()]


def kill(process: subprocess.Popen[str]) -> None:
    """Kill as the out-of-memory killer does; the capsule may hold on to its pipes."""
    process.kill()
    process.wait(60)
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def test_a_capsule_ends_when_its_owner_is_killed(directory):
    process, pids = owner(directory, outlive=False)
    assert alive(pids) == pids
    kill(process)
    until(lambda: alive(pids) == [])


def test_a_capsule_that_may_outlive_its_owner_is_found_again(directory):
    process, pids = owner(directory, outlive=True)
    kill(process)
    with Capsule.attach(directory) as capsule:
        assert capsule.host_pid == pids[0]
        assert capsule.poll() is None
        capsule.detach()
    assert alive(pids) == pids
    with Capsule.attach(directory) as capsule:
        capsule.signal(signal.SIGTERM)
        assert capsule.wait(60) == -signal.SIGTERM
        capsule.outlive(False)
    until(lambda: alive(pids) == [])


def test_a_capsule_of_another_version_is_refused_by_name_and_left_as_it_is(directory, monkeypatch):
    directory = directory / "base" / "kernel"
    directory.mkdir(parents=True)
    for place in (directory, directory.parent):
        place.chmod(0o700)
    old = sleeper(Capsule.create(directory))
    old.outlive()
    kernel = old.host_pid
    old.detach()
    (directory / "owner.lock").touch()
    (directory / "kernel.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(under_test, "VERSION", VERSION + 1)
        with pytest.raises(ProtocolVersion, match=f"version {VERSION} of its protocol") as caught:
            Capsule.attach(directory)
        assert (caught.value.code, caught.value.details) == ("PROTOCOL_VERSION", {"version": VERSION})
        assert caught.value.hint and caught.value.left
        assert registry.reap(directory.parent) == []
    assert alive([kernel]) == [kernel]
    with Capsule.attach(directory) as new:
        assert new.host_pid == kernel
        assert new.poll() is None


def test_no_request_of_another_version_is_done(directory, monkeypatch):
    with sleeper(Capsule.create(directory)) as capsule:
        with monkeypatch.context() as patch:
            patch.setattr(under_test, "VERSION", VERSION + 1)
            for verb in ("end", "status", "of a later release"):
                with pytest.raises(ProtocolVersion):
                    capsule._request({"verb": verb})
            capsule.cancel_criu()
        assert capsule.poll() is None


def test_an_inspection_for_which_the_init_gets_no_more_says_that_a_limit_is_reached(directory):
    with sleeper(Capsule.create(directory)) as capsule:
        soft, hard = resource.prlimit(capsule._init_pid, resource.RLIMIT_NOFILE)
        resource.prlimit(capsule._init_pid, resource.RLIMIT_NOFILE, (3, hard))
        with pytest.raises(LimitReached, match="file descriptors"):
            capsule.inspect()
        resource.prlimit(capsule._init_pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert "refusals" in capsule.inspect()


@pytest.mark.parametrize("grace", [0.0, 10.0], ids=["killed", "gives up"])
def test_a_new_owner_comes_when_the_old_ones_program_has_ended(directory, grace):
    """All changes of the old owner to the kernel are reverted by then, and no answer to it reaches the new owner."""
    old = sleeper(Capsule.create(directory))
    old.outlive()

    def forsaken() -> None:
        # One that gives up when it can write no more, as CRIU does.
        script = "set -e; echo $$ > pid; while true; do echo more >> written; done"
        with contextlib.suppress(CapsuleGone):
            old.run(
                ["sh", "-c", script],
                cwd=directory,
                output=directory / "output",
                timeout=60,
                env=ENV,
                grace=grace,
                on_kernel=True,
            )

    thread = threading.Thread(target=forsaken)
    thread.start()
    until((directory / "written").exists)
    program = next(pid for pid in old.other_processes() if "sh" in status_of(pid)["Name"])
    assert status_of(old.host_pid)["State"].startswith("T")
    old._socket.shutdown(socket.SHUT_RDWR)
    thread.join()
    with Capsule.attach(directory) as new:
        assert alive([program]) == []
        until(lambda: status_of(new.host_pid)["State"].startswith("S"))
        assert (
            new.run(["sh", "-c", "exit 7"], cwd=directory, output=directory / "output", timeout=60, env=ENV).status == 7
        )
    old.close()


def test_a_program_is_cancelled_from_another_thread(capsule, directory):
    sleeper(capsule)
    script = "set -e; while true; do echo more >> written; done"
    ran: list[Ran] = []

    def run() -> None:
        ran.append(
            capsule.run(["sh", "-c", script], cwd=directory, output=directory / "output", timeout=60, env=ENV, grace=60)
        )

    thread = threading.Thread(target=run)
    thread.start()
    until((directory / "written").exists)
    capsule.cancel_criu()
    thread.join()
    assert ran[0].timed_out
    assert ran[0].status > 0, "it gave up by itself"
    capsule.cancel_criu()  # nothing runs: nothing happens
    assert capsule.clocks().monotonic


def test_an_owner_that_goes_after_a_dump_leaves_no_process_stopped(directory):
    old = sleeper(Capsule.create(directory))
    old.outlive()
    done = old.run(["true"], cwd=directory, output=directory / "output", timeout=60, env=ENV, on_kernel=True)
    assert done.status == 0
    assert status_of(old.host_pid)["State"].startswith("T")
    old.detach()
    until(lambda: status_of(old.host_pid)["State"].startswith("S"))
    Capsule.attach(directory).close()


class Unrepairable:
    def finish(self, success: bool) -> None:
        raise KeyError("registers")

    def resume(self) -> None:
        raise TimeoutError("a thread does not stop")


def test_what_cannot_be_resumed_without_an_owner_does_not_end_the_init(capsys):
    init = Init.__new__(Init)
    init.owner, init.preparation, init.stopped = None, None, Unrepairable()
    init.resume_without_owner()
    assert "TimeoutError: a thread does not stop" in capsys.readouterr().err
    assert init.stopped is None


def test_what_cannot_be_repaired_is_reported_and_ends_nothing(directory):
    output = directory / "output"
    for code in (0, 1):
        job = SimpleNamespace(guard=Unrepairable(), output=str(output))
        assert Init.finish_guard(job, code) == "KeyError: 'registers'"
    assert output.read_text().count("KeyError: 'registers'") == 2


def test_an_outliving_capsule_ends_once_its_kernel_has(directory):
    process, pids = owner(directory, outlive=True)
    kill(process)
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: alive(pids) == [])
    with pytest.raises(CapsuleGone):
        Capsule.attach(directory)


def test_closing_an_attached_capsule_ends_it(directory, monkeypatch):
    process, pids = owner(directory, outlive=True)
    kill(process)
    capsule = Capsule.attach(directory)
    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(under_test, "ANSWER", 1000)  # an answer that never comes would end this test
    capsule.close()
    assert alive(pids[:1]) == []
    until(lambda: alive(pids) == [])
    assert len(os.listdir("/proc/self/fd")) == descriptors - 3, "the connection and two pidfds"
