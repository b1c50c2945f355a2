"""Hashes that are remembered: right whatever happens to the files, to the record of them, and to those that wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from blake3 import blake3

from jupyter_gpu_ckpt.node import hashes as module
from jupyter_gpu_ckpt.node.facts import file_facts
from jupyter_gpu_ckpt.node.hashes import FILE, Hashes

LONG_AGO = -10_000_000_000


@pytest.fixture
def settled(monkeypatch):
    """Files that were written just now are as good as old ones."""
    monkeypatch.setattr(module, "_SETTLED", LONG_AGO)


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """The paths that were read."""
    found: list[str] = []
    opens = module.open_regular

    def opened(path: str):
        if FILE not in path:
            found.append(Path(path).name)
        return opens(path)

    monkeypatch.setattr(module, "open_regular", opened)
    return found


def made(directory: Path, name: str = "file", content: bytes = b"content") -> Path:
    path = directory / name
    path.write_bytes(content)
    return path


def hash_of(hashes: Hashes, path: Path) -> str:
    facts = file_facts(str(path))
    assert facts is not None
    return hashes.of(str(path), facts)


def test_a_file_is_read_once_and_known_to_the_next_process(tmp_path, settled, reads):
    path = made(tmp_path, content=b"x" * 3_000_000)
    hashes = Hashes(tmp_path)
    for _ in range(2):
        assert hash_of(hashes, path) == blake3(path.read_bytes()).hexdigest()
    hashes.begin()
    hashes.settle()
    assert hash_of(Hashes(tmp_path), path) == blake3(path.read_bytes()).hexdigest()
    assert reads == ["file"]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert sorted(tmp_path.iterdir()) == [tmp_path / FILE, path]


def test_every_change_is_read_again(tmp_path, settled, reads):
    hashes = Hashes(tmp_path)
    path = made(tmp_path)
    facts = path.stat()
    hash_of(hashes, path)
    path.write_bytes(b"another")
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert hash_of(hashes, path) == blake3(b"another").hexdigest()
    made(tmp_path, "new", b"a third").rename(path)
    assert hash_of(hashes, path) == blake3(b"a third").hexdigest()
    assert len(reads) == 3


def test_what_may_change_within_the_same_tick_is_not_remembered(tmp_path, reads):
    hashes, path = Hashes(tmp_path), made(tmp_path)
    assert hash_of(hashes, path) == hash_of(hashes, path) != ""
    assert len(reads) == 2


def test_a_stamp_of_whole_seconds_is_trusted_by_this_process_alone(tmp_path, settled, monkeypatch):
    """The file may be in an image of a file system, whose maker chose its times."""
    identity = module.identity

    def coarse(status):
        *others, ctime = identity(status)
        return *others, ctime // 1_000_000_000 * 1_000_000_000

    monkeypatch.setattr(module, "identity", coarse)
    hashes, path = Hashes(tmp_path), made(tmp_path)
    facts = file_facts(str(path))
    facts["ctime"] = facts["ctime"] // 1_000_000_000 * 1_000_000_000
    assert hashes.of(str(path), facts) == hashes.known(facts) != ""
    hashes.begin()
    hashes.settle()
    assert Hashes(tmp_path).known(facts) == ""


def test_a_file_that_changes_while_it_is_read_has_no_hash(tmp_path, settled):
    hashes, path = Hashes(tmp_path), made(tmp_path, content=b"x" * 3_000_000)
    facts = file_facts(str(path))

    def change() -> bool:
        with path.open("r+b") as file:
            file.write(b"y")
        return True

    assert hashes.of(str(path), facts, change) == ""
    assert hashes.of(str(path), facts) == "", "it is not the file any more that was asked about"
    assert hash_of(hashes, path) != ""


@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir, lambda path: None], ids=["named pipe", "directory", "nothing"])
def test_nothing_hangs_on_what_is_no_file_any_more(tmp_path, put):
    hashes, path = Hashes(tmp_path), made(tmp_path)
    facts = file_facts(str(path))
    path.unlink()
    put(path)
    assert hashes.of(str(path), facts) == ""
    assert hashes.of_kernel([(str(path), facts, False)]) == {}


def test_one_that_is_waited_for_reads_little_and_the_rest_is_found_out_later(tmp_path, settled, reads, monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE", 100)
    monkeypatch.setattr(module, "LARGEST", 1000)
    sizes = {"small": 10, "medium": 80, "library": 900, "database": 800, "huge": 1001}
    paths = {name: made(tmp_path, name, name.encode()[:1] * size) for name, size in sizes.items()}
    files = [(str(path), file_facts(str(path)), name == "database") for name, path in paths.items()]
    hashes = Hashes(tmp_path)
    assert {Path(path).name for path in hashes.of_kernel(files)} == {"small", "medium"}
    assert sorted(reads) == ["medium", "small"]
    hashes.begin()
    hashes.settle()
    assert reads == ["small", "medium", "library", "database"], "not what is too large; last what the kernel changes"
    for one in (hashes, Hashes(tmp_path)):
        assert {Path(path).name for path in one.of_kernel(files)} == {"small", "medium", "library", "database"}


def test_of_one_kernel_only_so_much_is_read_later(tmp_path, settled, reads, monkeypatch):
    monkeypatch.setattr(module, "LATER", 100)
    hashes = Hashes(tmp_path)
    sizes = {"database": 10, "large": 90, "medium": 60, "small": 30}
    hashes.queue(
        (str(path), file_facts(str(path)), name == "database")
        for name, size in sizes.items()
        if (path := made(tmp_path, name, b"x" * size))
    )
    hashes.begin()
    hashes.settle()
    assert reads == ["small", "medium", "database"]


def test_a_file_that_was_just_written_is_read_when_another_change_would_be_seen(tmp_path, monkeypatch, reads):
    monkeypatch.setattr(module, "_SETTLED", 300_000_000)
    old, new, future = (made(tmp_path, name, name.encode()) for name in ("old", "new", "future"))
    os.utime(future, ns=(0, time.time_ns() + 10**12))
    time.sleep(0.35)
    new.write_bytes(b"newer")
    written = time.monotonic()
    hashes = Hashes(tmp_path)
    hashes.queue((str(path), file_facts(str(path)), False) for path in (new, old, future))
    hashes.begin()
    hashes.settle()
    assert time.monotonic() - written >= 0.3
    assert reads == ["old", "new"]
    assert Hashes(tmp_path).known(file_facts(str(new))) == blake3(b"newer").hexdigest()


def test_the_hash_of_a_file_as_it_was_is_known(tmp_path, settled):
    path, hashes = made(tmp_path), Hashes(tmp_path)
    was = file_facts(str(path))
    hash = hash_of(hashes, path)
    path.write_bytes(b"another")
    hash_of(hashes, path)
    assert hashes.known(was) == hash


def test_the_least_used_are_forgotten(tmp_path, settled, monkeypatch):
    monkeypatch.setattr(module, "MOST_KEPT", 3)
    hashes = Hashes(tmp_path)
    facts = {}
    for number in range(5):
        path = made(tmp_path, f"{number}", b"%d" % number)
        facts[number] = file_facts(str(path))
        hashes.of(str(path), facts[number])
        assert hashes.known(facts[0])
    hashes.begin()
    hashes.settle()
    kept = Hashes(tmp_path)
    assert [number for number in facts if kept.known(facts[number])] == [0, 3, 4]


def test_two_servers_keep_what_either_found_out(tmp_path, settled):
    one, other = Hashes(tmp_path), Hashes(tmp_path)
    paths = [made(tmp_path, name, name.encode()) for name in ("a", "b")]
    for hashes, path in zip((one, other), paths, strict=True):
        hash_of(hashes, path)
        hashes.begin()
        hashes.settle()
    third = Hashes(tmp_path)
    assert all(third.known(file_facts(str(path))) for path in paths)
    assert one.known(file_facts(str(paths[1])))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 2, "files": {}}', '{"version": 1}', '{"version": 1, "files": 3}', "\0" * 100]
    + ['{"version": 1, "files": {"1:2:3:4:5": 7}}', '{"version": 1, "files": {"1:2:3:4:5": "no hash"}}'],
)
def test_a_damaged_record_costs_nothing_but_time(tmp_path, settled, text):
    (tmp_path / FILE).write_text(text)
    hashes, path = Hashes(tmp_path), made(tmp_path)
    assert hash_of(hashes, path) == blake3(b"content").hexdigest()
    hashes.begin()
    hashes.settle()
    assert json.loads((tmp_path / FILE).read_text())["version"] == 1
    assert Hashes(tmp_path).known(file_facts(str(path)))


@pytest.mark.parametrize("put", [os.mkfifo, Path.mkdir], ids=["named pipe", "directory"])
def test_something_else_in_the_place_of_the_record(tmp_path, settled, put):
    put(tmp_path / FILE)
    hashes, path = Hashes(tmp_path), made(tmp_path)
    assert hash_of(hashes, path) != ""
    hashes.begin()
    hashes.settle()


def test_what_a_killed_process_left_is_swept(tmp_path):
    (tmp_path / f"{FILE}-0123abcd").touch()
    (tmp_path / FILE).touch()
    Hashes(tmp_path).sweep()
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


ENDS = """
import sys, threading, time
from pathlib import Path
from jupyter_gpu_ckpt.node import facts as node, hashes
hashes.AT_ONCE = 0
one, path = hashes.Hashes(Path(sys.argv[1])), sys.argv[1] + "/large"
one.of_kernel([(path, node.file_facts(path), False)])
begun = threading.Event()
def waited(path, facts, cancelled):
    begun.set()
    while not cancelled():
        time.sleep(0.001)
    return ""
one.of = waited
one.begin()
assert begun.wait(60)
print("begun", flush=True)
"""


def test_a_process_that_ends_waits_for_no_file(tmp_path):
    made(tmp_path, "large", b"x" * 1000)
    process = subprocess.Popen([sys.executable, "-c", ENDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "begun\n"
        assert process.wait(60) == 0
    finally:
        process.stdout.close()
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
