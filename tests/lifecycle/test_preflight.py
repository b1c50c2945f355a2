"""Preflight's answers, in the words of somebody with a notebook."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.errors import (
    ChildProcesses,
    DebuggerAttached,
    DeletedMapping,
    NoMemory,
    NoSpace,
    QuotaExceeded,
    UnsupportedCuda,
)
from jupyter_gpu_ckpt.lifecycle import preflight
from jupyter_gpu_ckpt.lifecycle.preflight import MARGIN, inspect, judge_report, read_process, require

PLENTY = 1 << 50


@pytest.fixture
def process():
    """Starts processes with a command line of the test's choice; they end with the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> int:
        code = "import sys; sys.stdout.write('up'); sys.stdout.flush(); sys.stdin.read()"
        child = subprocess.Popen([sys.executable, "-c", code, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        assert child.stdout.read(2) == b"up"
        started.append(child)
        return child.pid

    yield start
    for child in started:
        child.kill()
        child.communicate(timeout=60)


def codes(**options) -> list[str]:
    facts = {"kernel_pid": os.getpid(), "companions": [], "device_bytes": {}, "disk_free": PLENTY, **options}
    return [finding.code for finding in inspect(**facts)]


def test_nothing_stands_in_the_way_of_a_plain_kernel():
    assert codes() == []


def test_children_that_prevent_it_are_named_with_the_reason_and_the_error_has_their_pids(process):
    pids = [process(f"worker-{n}") for n in range(6)]
    reasons = dict.fromkeys(pids[1:], "it has left")
    (finding,) = inspect(
        kernel_pid=os.getpid(),
        companions=pids,
        device_bytes={},
        disk_free=PLENTY,
        why_not=lambda pid: reasons.get(pid, ""),
    )
    assert finding.blocks
    assert isinstance(finding.error, ChildProcesses)
    assert finding.error.details["pids"] == pids[1:]
    assert "5 child processes that prevent it" in finding.text
    assert f"worker-1 (pid {pids[1]}: it has left)" in finding.text
    assert "and 2 more" in finding.text
    with pytest.raises(ChildProcesses):
        require([finding])
    assert codes(companions=pids) == []


def test_workers_of_a_pool_are_shown_to_where_they_differ(process):
    start = ["-m", "joblib.externals.loky.backend.popen_loky_posix", "--process-name", "LokyProcess"]
    pids = [
        process("/opt/a/long/way/to/the/environment/lib/python3.11/site-packages/x.py", *start, f"--pipe={n}")
        for n in (7, 8)
    ]
    (finding,) = inspect(
        kernel_pid=os.getpid(), companions=pids, device_bytes={}, disk_free=PLENTY, why_not=lambda _: "why"
    )
    for number, pid in zip((7, 8), pids, strict=True):
        assert f"--process-name LokyProcess --pipe={number} (pid {pid}: why)" in finding.text
    assert "/opt/a" not in finding.text
    assert Path(sys.executable).name in finding.text
    assert "\n" not in finding.text


def test_the_debuggers_adapter_is_the_debugger_and_not_a_child_to_be_ended(process):
    found = inspect(
        kernel_pid=os.getpid(),
        companions=[process("/env/lib/debugpy/adapter", "--for-server", "4000")],
        device_bytes={},
        disk_free=PLENTY,
    )
    assert [type(finding.error) for finding in found] == [DebuggerAttached]


def test_a_child_that_is_gone_or_only_not_waited_for_is_no_child():
    zombie = subprocess.Popen(["true"])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert read_process(zombie.pid).state == "Z"
    assert codes(companions=[zombie.pid]) == []
    zombie.wait()
    assert read_process(zombie.pid) is None
    assert codes(companions=[zombie.pid]) == []


def test_host_memory_must_take_what_is_on_the_gpu(monkeypatch):
    monkeypatch.setattr(preflight, "available_memory", lambda: 4 << 30)
    assert codes(device_bytes={"GPU-a": 3 << 30}) == []
    assert codes(device_bytes={"GPU-a": 3 << 30, "GPU-b": 1 << 30}) == ["NO_MEMORY"]
    (finding,) = inspect(kernel_pid=os.getpid(), companions=[], device_bytes={"GPU-a": 5 << 30}, disk_free=None)
    assert isinstance(finding.error, NoMemory)
    assert finding.error.details == {"needed": (5 << 30) + MARGIN, "free": 4 << 30}


def test_the_disk_must_take_the_memory_of_process_and_gpu(monkeypatch):
    monkeypatch.setattr(preflight, "available_memory", lambda: PLENTY)
    mine = read_process(os.getpid()).rss
    assert mine > 1 << 20
    assert codes(disk_free=mine + MARGIN + (100 << 20)) == []
    assert codes(disk_free=MARGIN) == ["NO_SPACE"]
    assert codes(device_bytes={"GPU-a": 8 << 30}, disk_free=8 << 30) == ["NO_SPACE"]
    assert codes(device_bytes={"GPU-a": 8 << 30}, disk_free=None) == [], "a suspend writes no image"
    (finding,) = inspect(kernel_pid=os.getpid(), companions=[], device_bytes={}, disk_free=7)
    assert isinstance(finding.error, NoSpace)
    assert finding.error.details["free"] == 7


def test_space_that_zeros_on_the_device_may_not_need_is_a_warning(monkeypatch):
    monkeypatch.setattr(preflight, "available_memory", lambda: PLENTY)
    device = {"kernel_pid": os.getpid(), "companions": [], "device_bytes": {"GPU-a": 8 << 30}}
    full = QuotaExceeded("It is full.")

    def found(disk_free: int, zeros: int, quota: int = PLENTY) -> list[tuple[str, bool]]:
        over_quota = lambda needed: full if needed > quota else None  # noqa: E731
        options = {"disk_free": disk_free, "zeros": lambda: zeros, "over_quota": over_quota}
        return [(each.code, each.blocks) for each in inspect(**device, **options)]

    assert found(8 << 30, zeros=6 << 30) == [("NO_SPACE", False)]
    assert found(8 << 30, zeros=1 << 20) == [("NO_SPACE", True)]
    assert found(1 << 30, zeros=6 << 30) == [("NO_SPACE", True)]
    assert found(PLENTY, zeros=6 << 30, quota=8 << 30) == [("QUOTA_EXCEEDED", False)]
    assert found(PLENTY, zeros=6 << 30, quota=1 << 30) == [("QUOTA_EXCEEDED", True)]


@pytest.fixture
def forked():
    """The pids of a process with 200 MB and of four that it has forked."""
    code = """
import os
held = os.urandom(200_000_000)
pids = [os.getpid()]
while len(pids) < 5:
    pids.append(os.fork())
    if pids[-1] == 0:
        os.read(0, 1)
        os._exit(0)
print(*pids, flush=True)
os.read(0, 1)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield [int(word) for word in process.stdout.readline().split()]
        process.stdin.close()


def test_pages_that_forked_processes_share_need_space_once(forked):
    kernel, *workers = forked
    tree = {"kernel_pid": kernel, "companions": workers}
    assert codes(**tree, disk_free=700_000_000 + MARGIN) == []
    (finding,) = inspect(**tree, device_bytes={}, disk_free=400_000_000)
    assert isinstance(finding.error, NoSpace)
    assert 600_000_000 < finding.error.details["needed"] < 700_000_000 + MARGIN, "of three, while CRIU writes the next"
    assert codes(kernel_pid=kernel, disk_free=200_000_000) == ["NO_SPACE"]


def test_pages_that_forked_processes_share_count_once_for_a_quota(forked):
    kernel, *workers = forked
    asked = []

    def over_quota(needed):
        asked.append(needed)
        return QuotaExceeded("No.") if needed > 300_000_000 + MARGIN else None

    assert codes(kernel_pid=kernel, companions=workers, over_quota=over_quota) == []
    assert [each > 1_000_000_000 for each in asked] == [True, False]


def test_a_quota_is_checked_for_what_an_image_may_need_and_not_for_a_suspend():
    asked = []

    def over_quota(needed):
        asked.append(needed)
        return QuotaExceeded("No.")

    everything = {"kernel_pid": os.getpid(), "companions": [], "device_bytes": {}, "over_quota": over_quota}
    (finding,) = inspect(**everything, disk_free=PLENTY)
    assert isinstance(finding.error, QuotaExceeded)
    assert asked[0] > read_process(os.getpid()).rss // 2 + MARGIN
    assert inspect(**everything, disk_free=None) == []


def test_memory_that_can_be_had_is_read_from_the_host():
    assert 0 < preflight.available_memory() < PLENTY


def test_the_agents_report():
    assert judge_report({}) == []
    (finding,) = judge_report({"debugger": True})
    assert isinstance(finding.error, DebuggerAttached)
    (finding,) = judge_report({"sockets": [{"kind": "tcp", "local": "a", "remote": "b"}]})
    assert not finding.blocks
    assert finding.code == "CONNECTIONS"
    require([finding])
    connection = {"kind": "tcp", "local": "a", "remote": "b"}
    others = [{"kind": kind, "local": "a", "remote": ""} for kind in ("tcp", "udp", "unix", "netlink", "other")]
    assert judge_report({"sockets": others}) == []
    (finding,) = judge_report({"sockets": [*others, connection]})
    assert finding.text.startswith("1 open connection to the outside")


def test_a_deleted_mapping_forbids_it_to_an_ordinary_user_only(monkeypatch):
    report = {"deleted_mappings": [{"path": "/dev/shm/x", "kind": "private"}]}
    monkeypatch.setattr(preflight.os, "geteuid", lambda: 1000)
    (finding,) = judge_report(report)
    assert isinstance(finding.error, DeletedMapping)
    assert finding.error.details["culprit"] == "/dev/shm/x"
    assert judge_report(report, writes=False) == [], "a suspend leaves the processes as they are"
    monkeypatch.setattr(preflight.os, "geteuid", lambda: 0)
    assert judge_report(report) == []


def test_a_shared_mapping_of_a_deleted_file_forbids_nothing(monkeypatch):
    """Of `multiprocessing.Lock`, which every tqdm bar has: the file gets a name before the dump."""
    monkeypatch.setattr(preflight.os, "geteuid", lambda: 1000)
    assert judge_report({"deleted_mappings": [{"path": "/dev/shm/sem.x", "kind": "shared"}]}) == []


def test_jax_s_preallocated_memory_on_several_gpus_is_refused():
    report = {"jax_preallocates": True}
    assert judge_report(report, gpus=1, by_driver=True) == judge_report({}, gpus=2, by_driver=True) == []
    assert judge_report(report, gpus=2) == [], "the library moves it"
    (finding,) = judge_report(report, gpus=2, by_driver=True)
    assert isinstance(finding.error, UnsupportedCuda)
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" in finding.error.hint


def test_pools_of_several_gpus_are_refused():
    report = {"torch_pools": True}
    assert judge_report(report, gpus=1) == judge_report({}, gpus=2) == []
    (finding,) = judge_report(report, gpus=2)
    assert isinstance(finding.error, UnsupportedCuda)
    assert "PYTORCH_CUDA_ALLOC_CONF" in finding.error.hint


def test_a_process_that_ends_is_not_one_that_hides_itself():
    """A process that ends has no memory left, so an ordinary user may look into it no more."""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert procfs.is_ending(process.pid)
    assert preflight.undumpable(process.pid) is None
    process.wait()
    assert procfs.is_ending(process.pid)
    assert not procfs.is_ending(os.getpid())


def test_the_first_finding_that_blocks_is_the_one_that_is_raised():
    findings = [*judge_report({"sockets": [{"kind": "tcp", "remote": "b"}]}), *judge_report({"debugger": True})]
    with pytest.raises(DebuggerAttached):
        require(findings)


def test_a_container_has_no_more_memory_than_its_cgroup(tmp_path):
    whole = preflight.available_memory(tmp_path)
    assert whole > 0
    (tmp_path / "memory.max").write_text(f"{64 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{48 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {8 << 20}\nactive_file 3\n")
    assert preflight.available_memory(tmp_path) == 24 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert preflight.available_memory(tmp_path) > 24 << 20


def test_a_program_that_sigpipe_would_end_is_named_with_the_connections():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        line = f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo connected; read"
        bash = ["bash", "-c", line]
        careful = ["bash", "-c", f"trap : PIPE; {line}"]
        with contextlib.ExitStack() as stack:
            pids = []
            for argv in (bash, careful):
                child = stack.enter_context(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
                stack.callback(child.kill)
                assert child.stdout.readline() == b"connected\n"
                pids.append(child.pid)
            (finding,) = preflight.judge_connections(pids, pids)
            assert finding.code == "CONNECTIONS"
            assert not finding.blocks
            assert finding.text.startswith("2 open connections to the outside will come back closed. A write to one ")
            assert f"(pid {pids[0]})" in finding.text
            assert f"(pid {pids[1]})" not in finding.text
    assert preflight.judge_connections(pids, pids) == []


def test_a_debuggers_adapter_that_hides_its_descriptors_is_in_use_while_somebody_is_connected(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        command = f"debugpy/adapter --port {listener.getsockname()[1]} --log"
        adapter = preflight.Process(os.getpid(), command, "S", 0)

        def hidden(pid):
            raise PermissionError(errno.EACCES, "hidden")

        monkeypatch.setattr(procfs, "descriptors", hidden)
        assert preflight._is_used(adapter)


@pytest.mark.parametrize("closes", [False, True])
def test_unread_bytes_of_connections_to_the_outside_are_counted(closes):
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:
        line = f"exec 3<>/dev/tcp/127.0.0.1/{listener.getsockname()[1]}; echo connected; read"
        child = stack.enter_context(
            subprocess.Popen(["bash", "-c", line], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        stack.callback(child.kill)
        assert child.stdout.readline() == b"connected\n"
        listener.settimeout(60)
        its_end, _ = listener.accept()
        stack.enter_context(its_end)
        its_end.sendall(bytes(1234))
        if closes:
            its_end.shutdown(socket.SHUT_WR)
        (finding,) = preflight.judge_connections([child.pid], [child.pid])
        expected = "1 open connection to the outside will come back closed, and 1234 bytes in it that nobody has read"
        assert finding.text.startswith(expected), finding.text
        report = {"sockets": [{"kind": "tcp", "local": "a", "remote": "b", "inode": "1"}]}
        (finding,) = judge_report(report, tree=[child.pid])
        assert finding.text.startswith(expected)
        if not closes:
            its_end.shutdown(socket.SHUT_WR)
        its_end.close()  # nobody has it now: the socket comes back with its bytes
        assert preflight.inside_connections([child.pid]) == {os.readlink(f"/proc/{child.pid}/fd/3")[8:-1]}
        assert preflight.judge_connections([child.pid], [child.pid]) == []


@pytest.mark.parametrize("listening", [("127.0.0.1", socket.AF_INET), ("::", socket.AF_INET6)])
def test_connections_within_the_kernel_are_not_announced(listening):
    address, family = listening
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(
            socket.create_server((address, 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
        )
        line = f"exec 3<>/dev/tcp/127.0.0.1/{listener.getsockname()[1]}; echo connected; read"
        child = stack.enter_context(
            subprocess.Popen(["bash", "-c", line], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        stack.callback(child.kill)
        assert child.stdout.readline() == b"connected\n"
        listener.settimeout(60)
        its_end, _ = listener.accept()
        stack.enter_context(its_end)
        tree = [child.pid, os.getpid()]
        ends = {str(os.fstat(its_end.fileno()).st_ino), os.readlink(f"/proc/{child.pid}/fd/3")[8:-1]}
        # What an earlier test has left open in this process is a connection within the tree, too.
        assert preflight.inside_connections(tree) - preflight.inside_connections(tree[1:]) == ends
        assert preflight.inside_connections([child.pid]) == set()
        assert preflight.judge_connections([child.pid], tree) == []
        report = {"sockets": [{"kind": "tcp", "local": "a", "remote": "b", "inode": inode} for inode in ends]}
        assert judge_report(report, tree=tree) == []
        assert [finding.code for finding in judge_report(report)] == ["CONNECTIONS"]
