"""The readers of ``/proc``, on real processes."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.agent import mappings, probes

PACKAGE = Path(__file__).resolve().parents[1] / "jupyter_gpu_ckpt"
PROGRAM = "import sys, threading; threading.Thread(target=sys.stdin.read).start(); print('up', flush=True)"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, "", "ü b"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as made:
        assert made.stdout is not None and made.stdout.readline() == "up\n"
        yield made
        made.kill()


@pytest.fixture
def zombie() -> Iterator[int]:
    process = subprocess.Popen(["sh", "-c", "exit 3"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


@pytest.fixture
def gone() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_what_a_process_publishes_in_its_memory_is_behind_a_mark(gone):
    mark = os.urandom(16)
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        memory[100:121] = mark + b"facts"
        found = [mapping for mapping in procfs.maps(os.getpid()) if mapping.contains(address)]
        others = [mapping for mapping in procfs.maps(os.getpid()) if mapping.name == "[stack]"]
        assert procfs.published(os.getpid(), [*others, *found], mark, 5) == b"facts"
        assert procfs.address_of(os.getpid(), [*others, *found], mark, 5) == address + 100
        assert procfs.published_at(os.getpid(), address + 100, mark, 5) == b"facts"
        assert procfs.published_at(os.getpid(), address + 99, mark, 5) is None
        assert procfs.published(os.getpid(), others, mark, 5) is None
        assert procfs.published(os.getpid(), found, mark[:8] + mark[:8], 5) is None
        memory[-18:] = mark + b"fa"
        memory[100:101] = b"?" if mark[:1] != b"?" else b"!"
        assert procfs.published(os.getpid(), [found[0]._replace(end=address + mmap.PAGESIZE)], mark, 5) is None
        with pytest.raises(OSError):
            procfs.published(gone, found, mark, 5)


def test_a_process_by_its_stat_and_status(process):
    seen, status = procfs.stat(process.pid), procfs.status(process.pid)
    assert (seen.name, seen.parent) == (status["Name"], os.getpid()) and seen.state in "RS"
    assert not seen.has_ended and not seen.is_ending and seen.exit_code == 0
    assert seen.started >= procfs.stat(os.getpid()).started and seen.cpu_ticks >= 0
    assert int(status["Tgid"]) == process.pid == int(status["Pid"])
    first, second = procfs.threads(process.pid)
    assert first == process.pid and int(procfs.status(process.pid, second)["Pid"]) == second
    assert procfs.stat(process.pid, second).name == seen.name


@pytest.mark.parametrize("words", [(), ("",), ("\x1b", "\n")], ids=["none", "empty", "control characters"])
def test_a_process_without_a_command_line_is_shown_by_its_name_and_that_on_one_line(words):
    assert procfs.shown_command(words, "worker") == "worker"
    assert procfs.shown_command(words, "\x1b]0;mine\x07\nwor\x9bker") == "]0;mine wor ker"
    assert procfs.shown_command(words, "\x1b\n") == ""


@pytest.mark.parametrize("name", ["a) R 1 (b", "a b", "a\x0bb", "\udcff"])
def test_a_name_is_whatever_the_program_says(tmp_path, name):
    (tmp_path / name).symlink_to(shutil.which("sleep") or "")
    with subprocess.Popen([tmp_path / name, "60"]) as process:
        assert procfs.stat(process.pid).name == name
        assert procfs.status(process.pid)["Tgid"] == str(process.pid)
        process.kill()


def test_arguments_may_be_empty_and_foreign(process):
    assert procfs.arguments(process.pid) == (sys.executable, "-c", PROGRAM, "", "ü b")


def test_mappings(process):
    found = procfs.maps(process.pid)
    assert [each.start for each in found] == sorted(each.start for each in found)
    (vdso,) = (each for each in found if each.name == "[vdso]")
    assert vdso.permissions == "r-xp" and vdso.contains(vdso.start) and not vdso.contains(vdso.end)
    assert any(each.name.startswith("/") for each in found) and any(each.name == "" for each in found)


def test_memory_that_processes_share_counts_once(tmp_path):
    code = "import os, mmap; held = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
    code += "for at in range(0, 64 << 20, 4096): held[at] = 1\n"
    code += "child = os.fork()\nif child: os.write(1, b'%d\\n' % child)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        found = [procfs.proportional_bytes(pid) for pid in (parent.pid, child)]
        assert all(32 << 20 <= each < 50 << 20 for each in found), found
        parent.kill()
        os.kill(child, 9)
    assert procfs.proportional_bytes("self") > 1 << 20


def test_descriptors_and_what_they_are_open_on(tmp_path):
    near, far = socket.socketpair()
    with near, far, open(tmp_path / "a b", "w") as file:
        found = dict(procfs.links(os.getpid()))
        assert found[file.fileno()] == str(tmp_path / "a b") and found[near.fileno()].startswith("socket:[")
        assert set(found) <= set(procfs.descriptors(os.getpid())) | {max(found)}
        assert int(procfs.fdinfo("self", file.fileno())["flags"], 8) & os.O_WRONLY


@pytest.mark.parametrize("name", ["one\ntwo", "one\\012two", "one\rtwo\x85\u2028", "ends with a blank "])
def test_the_name_of_a_mapped_file_is_its_own(tmp_path, name):
    (tmp_path / name).write_bytes(bytes(4096))
    with open(tmp_path / name, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert str(tmp_path / name) in {each.name for each in procfs.maps(os.getpid())}
        assert str(tmp_path / name) in {each.path for each in mappings.read()}


@pytest.mark.parametrize("is_there", [True, False])
def test_a_deleted_file_is_no_other_one_of_such_a_name(tmp_path, is_there):
    path, like = tmp_path / "file", tmp_path / "file (deleted)"
    (like if is_there else path).write_bytes(bytes(4096))
    with open(like if is_there else path, "r+b") as file, mmap.mmap(file.fileno(), 4096):
        if not is_there:
            path.unlink()
            like.write_bytes(b"another one")
        (mapping,) = (each for each in procfs.maps(os.getpid()) if each.name == str(like))
        assert procfs.path_of_deleted(mapping.name, mapping.inode) == ("" if is_there else str(path))
        (seen,) = (each for each in mappings.read() if each.file[1] == mapping.inode)
        assert (seen.deleted, seen.path) == (not is_there, str(like if is_there else path))


def test_the_path_of_a_socket_may_have_line_breaks(tmp_path, monkeypatch):
    """Any user's socket may, and all processes of a network namespace are shown it."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
        one.bind("one\ntwo three\n")
        other.bind("\0four\n\nfive")
        (connected, _) = pair = socket.socketpair()
        rows = {row[6]: row[7:] for row in procfs.sockets("unix")}
        inodes = [str(os.fstat(each.fileno()).st_ino) for each in (one, other, connected)]
        assert [rows[inode] for inode in inodes] == [["one\ntwo three\n"], ["@four\n\nfive"], []]
        assert all(each["inode"].isdigit() for each in probes.foreign_sockets((set(), set())))
        for each in pair:
            each.close()


def test_children_of_all_threads_and_zombies(zombie, process):
    assert {zombie, process.pid} <= set(procfs.children(os.getpid()))
    assert {zombie, process.pid, os.getpid()} <= set(procfs.pids())


def test_a_zombie_says_how_it_ended_and_has_nothing_left(zombie):
    seen = procfs.stat(zombie)
    assert seen.state == "Z" and seen.has_ended and seen.is_ending and os.waitstatus_to_exitcode(seen.exit_code) == 3
    assert procfs.is_ending(zombie)
    assert procfs.arguments(zombie) == () and procfs.maps(zombie) == [] and procfs.children(zombie) == []
    assert procfs.status(zombie)["State"].startswith("Z")


@pytest.mark.parametrize(
    "reader",
    [
        *(procfs.stat, procfs.status, procfs.arguments, procfs.maps, procfs.threads, procfs.descriptors, procfs.mounts),
        *(lambda pid: list(procfs.links(pid)), lambda pid: procfs.fdinfo(pid, 0)),
    ],
)
def test_a_process_that_is_gone_has_one_class_of_error(gone, reader):
    with pytest.raises(procfs.GONE):
        reader(gone)


def test_a_process_that_is_gone_has_neither_children_nor_sockets(gone):
    assert procfs.children(gone) == [] and procfs.sockets("tcp", gone) == [] and procfs.is_ending(gone)


def test_a_process_that_ends_while_it_is_read_is_no_other_error():
    for _ in range(20):
        process = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
        os.killpg(process.pid, signal.SIGKILL)
        for reader in (procfs.stat, procfs.status, procfs.arguments, procfs.maps, procfs.children, procfs.threads):
            with contextlib.suppress(*procfs.GONE):
                reader(process.pid)
        process.wait()


def test_mounts_with_blanks_in_their_names_and_what_they_came_by():
    text = (
        "20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda rw,errors=remount-ro\n"
        "50 20 0:50 /a\\040b /mnt/x\\040y\\134z rw master:1 propagate_from:2 - devpts devpts rw,gid=5,mode=620\n"
    )
    root, terminals = procfs.parse_mounts(text)
    assert (root.point, root.filesystem, root.arrived) == ("/", "ext4", False)
    assert (terminals.number, terminals.parent, terminals.device) == ("50", "20", "0:50")
    assert (terminals.root, terminals.point) == ("/a b", "/mnt/x y\\z")
    assert terminals.options == ("rw", "gid=5", "mode=620") and terminals.arrived
    assert {"/", "/proc"} <= {mount.point for mount in procfs.mounts()}


def test_a_socket_that_one_reading_of_the_table_passes_over_is_in_the_other(monkeypatch):
    """A closing of others beside it does that to one reading."""
    first, second, readings = socket.socketpair(), socket.socketpair(), []
    inodes = [str(os.fstat(each.fileno()).st_ino) for each in (*first, *second)]
    real = procfs.sockets

    def without_some(table, pid="self"):
        readings.append(inodes[: 2 + len(readings) % 2])
        return [row for row in real(table, pid) if row[6] not in readings[-1]]

    with contextlib.closing(first[0]), contextlib.closing(first[1]), second[0], second[1]:
        monkeypatch.setattr(procfs, "sockets", without_some)
        rows = [row[6] for row in procfs.unix_sockets()]
        assert len(readings) == 2
        assert [inode in rows for inode in inodes] == [False, False, True, True]
        assert len({*rows}) == len(rows)


def test_tables_of_sockets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as unix:
        unix.bind("a b")
        port = f":{server.getsockname()[1]:04X}"
        assert [row[3] for row in procfs.sockets("tcp") if row[1].endswith(port)] == ["0A"]
        assert "a b" in [row[7] for row in procfs.sockets("unix") if len(row) > 7]
    assert procfs.sockets("no_such_family") == []


def test_settings_of_the_machine():
    assert int(procfs.sysctl("kernel.pid_max") or 0) > 0 and procfs.sysctl("kernel.no_such_setting") is None
    assert re.fullmatch(r"[0-9a-f-]{36}", procfs.boot_id())


def test_nobody_else_reads_what_is_read_here():
    own = re.compile(
        r"/proc/[^\"]*/(stat|status|maps|cmdline|children|mountinfo|mounts|comm)\"|sys/kernel/random/boot_id"
    )
    # A mountinfo is opened before the capsule is entered, and read later, or polled; over a status a text is mounted.
    allowed = {"start.py": 1, "private_directories.py": 1, "inherited_filters.py": 3}
    for path in PACKAGE.rglob("*.py"):
        if path.name != "procfs.py" and path.parent.name != "agent":
            found = [line for line in path.read_text().splitlines() if own.search(line) and "#:" not in line]
            assert len(found) <= allowed.get(path.name, 0), (path, found)


def test_limits_are_those_of_getrlimit():
    names = [name for name in dir(resource) if name.startswith("RLIMIT_") and name != "RLIMIT_OFILE"]
    assert procfs.limits(os.getpid()) == {name: resource.getrlimit(getattr(resource, name)) for name in names}


def test_mappings_by_a_part_of_their_names_are_those_of_all_that_have_it():
    everything = procfs.maps(os.getpid())
    wanted = [mapping for mapping in everything if "libc.so" in mapping.name]
    assert wanted and procfs.maps(os.getpid(), named="libc.so") == wanted
    assert procfs.maps(os.getpid(), named="no library has this name") == []


def test_mappings_of_code_are_found_by_their_permissions_alone(tmp_path):
    """Also where the path of another has an x, and where only a part of a file is mapped."""
    other = tmp_path / "an x in its name"
    other.write_bytes(bytes(8192))
    with other.open("rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ, offset=4096):
        everything = procfs.maps(os.getpid())
        assert str(other) in [mapping.name for mapping in everything]
        wanted = [each for each in everything if "x" in each.permissions or each.name.endswith("/libc.so.6")]
        assert 0 < len(wanted) < len(everything)
        assert procfs.maps(os.getpid(), program=True, matching=re.compile(r"/libc\.so\.6$")) == wanted
