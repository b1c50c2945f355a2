"""CRIU's two verbs on small real processes, and the reading of its log: real lines, each with its cause."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from harness import alive
from waiting import until

from jupyter_gpu_ckpt.capsule.capsule import Capsule, Ran
from jupyter_gpu_ckpt.criu.criu import OPTIONS, explain
from jupyter_gpu_ckpt.errors import CriuError, CriuKilled, CriuTimeout
from jupyter_gpu_ckpt.lifecycle.preflight import read_process

ENV = {"PATH": os.environ["PATH"]}
FAILED = Ran(1, False, 0.1)


# -- the verbs


def count_up(capsule: Capsule, more: str = "") -> Path:
    """Start a process that appends lines of a file to a list and writes the list; return that file."""
    request, reply = capsule.directory / "request", capsule.directory / "reply"
    code = f"""
import os, time
{more}
memory = []
while True:
    try:
        word = open({str(request)!r}).read()
    except FileNotFoundError:
        time.sleep(0.002); continue
    memory.append(word)
    os.unlink({str(request)!r})
    open({str(reply)!r} + '.part', 'w').write(' '.join(memory))
    os.rename({str(reply)!r} + '.part', {str(reply)!r})
"""
    capsule.spawn([sys.executable, "-I", "-S", "-c", code], ENV, "/")
    return request


def hear(request: Path, word: str) -> str:
    """Tell the process a word; what it has heard so far."""
    reply = request.with_name("reply")
    reply.unlink(missing_ok=True)
    request.with_name("part").write_text(word)
    request.with_name("part").rename(request)
    until(reply.exists, "an answer")
    return reply.read_text()


def test_a_process_is_dumped_and_restored_with_its_pid_and_memory(criu, capsule, home):
    request = count_up(capsule)
    assert hear(request, "one") == "one"
    inner, pipes = capsule.inner_pid, capsule.pipes
    assert criu.dump(capsule, home / "image", timeout=60) > 0
    capsule.close()
    before = sorted(path.name for path in (home / "image").iterdir())
    with Capsule.create(home) as again:
        assert criu.restore(again, home / "image", pid=inner, pipes=pipes, timeout=60).seconds > 0
        assert again.inner_pid == inner
        assert hear(request, "two") == "one two"
    assert sorted(path.name for path in (home / "image").iterdir()) == before, "a restore writes nothing into the image"


def test_a_dump_leaves_the_processes_stopped_and_they_can_continue(criu, capsule, home):
    request = count_up(capsule)
    assert hear(request, "one") == "one"
    criu.dump(capsule, home / "image", timeout=60)
    process = read_process(capsule.host_pid)
    assert process is not None
    assert process.state == "T"
    capsule.resume_processes()
    assert hear(request, "two") == "one two"


def test_a_failed_dump_leaves_the_process_running(criu, capsule, home):
    request = count_up(capsule)
    shutil.rmtree(home / "image")
    with pytest.raises(CriuError) as caught:
        criu.dump(capsule, home / "image", timeout=60)
    assert caught.value.hint
    assert hear(request, "one") == "one"


@pytest.mark.parametrize("seconds", [0.02, 0.1, 0.3])
def test_a_deadline_that_cannot_be_met(criu, capsule, home, seconds):
    """A gigabyte within a short time limit: CRIU gives up and undoes its changes to the process."""
    request = count_up(capsule, "ballast = bytearray(b'x') * 1_000_000_000")
    assert hear(request, "one") == "one"
    with pytest.raises(CriuTimeout) as caught:
        criu.dump(capsule, home / "image", timeout=seconds)
    assert caught.value.details["seconds"] < 60
    assert caught.value.details["status"] > 0, "it ended by itself"
    assert read_process(capsule.host_pid).state != "T"
    assert hear(request, "two") == "one two"
    assert [pid for pid in capsule.other_processes() if alive([pid])] == []


def test_a_restore_of_nothing_is_an_error_of_ours(criu, capsule, home):
    with pytest.raises(CriuError) as caught:
        criu.restore(capsule, home / "image", pid=4000, pipes=[], timeout=60)
    assert caught.value.details["verb"] == "restore"
    assert caught.value.details["log"]


def test_the_option_table_is_what_was_measured_to_work():
    """A change here changes what an image means: measure it, then change both."""
    assert [" ".join(option) for option in OPTIONS] == [
        "--no-default-config",
        "--shell-job",
        "--file-locks",
        "--link-remap",
        "--ghost-limit 1G",
        "--tcp-close",
        "--network-lock skip",
        "-v2",
    ]


# -- the log

LINES = [
    ("Error (compel/src/lib/infect.c:608): Unexpected 8877 task interruption, aborting", "DUMP_INTERRUPTED", "8877"),
    ("(00.1) Error (criu/page-xfer.c:263): page-xfer: Unable to spice data: No space left on device", "NO_SPACE", ""),
    ("Error (criu/page-xfer.c:1): Unable to spill: Disk quota exceeded", "NO_SPACE", "quota"),
    (
        "(00.024115)   8192: Error (criu/files-reg.c:2175): File home/user/a b/log.txt has bad size 16 (expect 8)",
        "FILE_CHANGED",
        "/home/user/a b/log.txt",
    ),
    (
        "(00.1)  8192: Error (criu/files-reg.c:2353): Can't open file tmp/a.bin on restore: No such file or directory",
        "FILE_MISSING",
        "/tmp/a.bin",
    ),
    (
        "(00.007) Error (criu/files-reg.c:1): Can't open mapped [/dev/shm/sem.mp-x (deleted)]: Permission denied",
        "DELETED_MAPPING",
        "/dev/shm/sem.mp-x",
    ),
    (
        "(00.009)   8192: Error (criu/sk-inet.c:1059): inet: Can't bind inet socket (id 117): Address already in use",
        "PORT_TAKEN",
        "port",
    ),
    ("(00.004) Error (criu/cr-restore.c:1489): Can't fork for 472: File exists", "PID_TAKEN", "472"),
    (
        "(00.004) Error (criu/cr-restore.c:1489): Can't fork for 472: Resource temporarily unavailable",
        "LIMIT_REACHED",
        "more threads and processes than",
    ),
    (
        "(00.004) Error (criu/namespaces.c:1100): fork() failed: Resource temporarily unavailable",
        "LIMIT_REACHED",
        "more threads and processes than",
    ),
    (
        "(00.004) Error (criu/namespaces.c:1100): Can't fork ns dumper: Resource temporarily unavailable",
        "LIMIT_REACHED",
        "more threads and processes than",
    ),
    (
        "pie: 14847: Error (criu/pie/restorer.c:2185): Unable to create a thread: -11",
        "LIMIT_REACHED",
        "more threads and processes than",
    ),
    (
        "(00.004) Error (compel/arch/x86/src/lib/infect.c:541): remote mmap() failed: Cannot allocate memory",
        "LIMIT_REACHED",
        "RLIMIT_AS",
    ),
    (
        "(00.008) Error (criu/sk-unix.c:874): unix: External socket is used. Consider using --ext-unix-sk option.",
        "SOCKET_UNSUPPORTED",
        "unix socket",
    ),
    (
        "(00.05) Error (criu/files-ext.c:98): Can't dump file 5 of that type [20666] (chr 195:255 nvidiactl)",
        "FILE_UNSUPPORTED",
        "nvidiactl",
    ),
    (
        "(00.031) Error (criu/files-reg.c:1): Can't lookup mount=53 for fd=10 path=/var/log/x",
        "FILE_UNSUPPORTED",
        "/var/log/x",
    ),
    (
        "(00.2) Error (criu/files-reg.c:926): Can't dump ghost file /tmp/big of 2000000000 size",
        "FILE_UNSUPPORTED",
        "/tmp/big",
    ),
    (
        "(00.1) Error (criu/sk-inet.c:185): inet: In-flight connection (l) for 36e77",
        "SOCKET_UNSUPPORTED",
        "not accepted",
    ),
    (
        "(00.1) Error (criu/sk-queue.c:144): skqueue: Control messages in queue, not supported",
        "SOCKET_UNSUPPORTED",
        "Credentials",
    ),
    (
        "(00.1) Error (criu/sk-unix.c:698): unix: Unable too cut a b from /tmp/new name",
        "SOCKET_UNSUPPORTED",
        "it is /tmp/new name now",
    ),
    ("(00.1) Error (criu/something.c:1): never seen before", "CRIU_FAILED", "dump the kernel: never seen before."),
]


@pytest.mark.parametrize(("line", "code", "word"), LINES, ids=[f"{code}-{word}" for _, code, word in LINES])
def test_each_cause_has_its_class_and_names_its_culprit(tmp_path, line, code, word):
    noise = "(00.000) Warn  (criu/kerndat.c:1): noise"
    (tmp_path / "log").write_text(f"{noise}\n{line}\n(00.3) Error (criu/cr-dump.c:1): Dumping FAILED.\n")
    error = explain("dump", FAILED, tmp_path / "log", tmp_path / "missing")
    assert error.code == code
    assert word in error.message
    assert error.hint
    assert line in error.details["log"]


@pytest.mark.parametrize(
    ("line", "passes"),
    [
        ("unix: Unix socket 70287806 not found", True),
        ("unix: Unix socket 7028 without peer 7029", True),
        ("inet: Socket state 1 obtained but expected 7", True),
        ("unix: Unix socket 7028 with unreachable peer 7029 (0)", False),
    ],
)
def test_a_socket_that_was_missing_in_the_list_may_be_in_the_next_one(tmp_path, line, passes):
    (tmp_path / "log").write_text(f"(00.1) Error (criu/sk-x.c:351): {line}\n")
    error = explain("dump", FAILED, tmp_path / "log", tmp_path / "none")
    assert (error.code, error.details.get("passes", False)) == ("CRIU_FAILED", passes)


def test_an_error_of_an_unknown_cause_quotes_criu(tmp_path):
    """Its reader has the message alone; the first error is the cause of those that follow."""
    log = tmp_path / "log"
    log.write_text(
        "(00.1) Dumping\n(00.2) Error (criu/sk-x.c:12): sk-x: Odd thing 7\n"
        "(00.3) Error (criu/cr-dump.c:1): Dumping FAILED.\n"
    )
    assert explain("dump", FAILED, log, tmp_path / "none").message == (
        "CRIU could not dump the kernel: sk-x: Odd thing 7."
    )
    assert explain("dump", FAILED, tmp_path / "none", tmp_path / "none").message == "CRIU could not dump the kernel."


def test_criu_s_first_words_that_matter_are_in_the_message(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "(00.01) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n"
        "(00.02)  9402: Error (criu/sk-unix.c:322): unix: Can't resolve name for socket 0x68\n"
        "(00.03) Error (criu/cr-dump.c:1975): Dumping FAILED.\n"
    )
    error = explain("dump", FAILED, log, tmp_path / "none")
    assert error.message == "CRIU could not dump the kernel: unix: Can't resolve name for socket 0x68."
    assert "details" not in error.hint


def test_a_wake_with_too_few_tasks_says_what_can_be_ended(tmp_path):
    log = tmp_path / "log"
    log.write_text("Error (criu/cr-restore.c:1489): Can't fork for 472: Resource temporarily unavailable\n")
    hint = explain("restore", FAILED, log, tmp_path / "none").hint
    assert hint.startswith("End other programs or kernels of this user or container")


def test_without_a_cause_the_end_of_the_process_is_the_cause(tmp_path):
    log = tmp_path / "log"
    log.write_text("")
    assert type(explain("dump", Ran(-9, False, 1.0), log, log)) is CriuKilled
    assert type(explain("dump", Ran(-9, True, 1.0), log, log)) is CriuTimeout
    assert type(explain("restore", Ran(1, False, 1.0), tmp_path / "none", tmp_path / "none")) is CriuError


def test_what_criu_says_before_it_has_a_log_is_read_too(tmp_path):
    (tmp_path / "out").write_text("Error (criu/util.c:1): execvp failed: Exec format error\n")
    error = explain("dump", FAILED, tmp_path / "none", tmp_path / "out")
    assert "Exec format error" in error.details["log"][0]


def test_an_old_log_is_not_taken_for_this_runs(criu, capsule, home):
    """A failure of long ago lies in the work directory; today's says something else."""
    count_up(capsule)
    (home / "dump.log").write_text("Error (criu/image.c:1): No space left on device\n")
    (home / "dump.out").write_text("Error (criu/image.c:1): No space left on device\n")
    shutil.rmtree(home / "image")
    with pytest.raises(CriuError) as caught:
        criu.dump(capsule, home / "image", timeout=60)
    assert caught.value.code == "CRIU_FAILED"
