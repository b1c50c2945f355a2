"""The records by which servers of several users share GPUs: what is read, and what of other users is never trusted."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.sharing import records
from jupyter_gpu_ckpt.sharing.participant import Participant, Residence, Swap, Turn
from jupyter_gpu_ckpt.sharing.records import OwnRecord

A = "GPU-00000000-0000-0000-0000-00000000000a"
GIB = 1 << 30


def _participant(**facts) -> Participant:
    return Participant("", "", (A,), (GIB,), 0.0, **facts)


def _name(number: int) -> str:
    return f"kernel-{number:032x}"


def _put(directory: Path, number: int, content: bytes) -> Path:
    """Write a file in a record's place, with the heartbeat of a server that lives."""
    path = directory / _name(number)
    path.write_bytes(content)
    _beat(path)
    return path


def _beat(path: Path, *, ago: float = 0.0) -> None:
    at = time.monotonic_ns() - int(ago * 1e9)
    os.utime(path, ns=(at, at), follow_symlinks=False)


@pytest.fixture
def shared():
    """A directory as the administrator's /tmp has it."""
    with tempfile.TemporaryDirectory() as around:
        os.chmod(around, 0o1777)
        yield Path(around, "shared")


def test_a_record_says_what_was_written_last(shared):
    record = OwnRecord(shared)
    now = time.monotonic() - 9
    turn, swap = Turn(now, 30.0, True, 2, now), Swap((A,), now, 1.5)
    used = {f"kernel-{1:032x}": 2.5}
    for participant in (
        _participant(waiting_since=now, was_on=(A,), protected=True, swaps=(swap,), used_before=used),
        _participant(residence=Residence.PRESENT, on=(A,), resident=(GIB,), turn=turn, served_at=now, can_pause=False),
    ):
        before = time.monotonic()
        record.write(participant)
        (found,) = records.read(shared)
        assert (found.kernel, found.user) == (record.name, str(os.geteuid()))
        assert before <= found.alive_at <= time.monotonic()
        assert dataclasses.replace(found, kernel="", user="", alive_at=0.0) == participant
    record.remove()
    assert records.read(shared) == []
    assert [*shared.iterdir()] == []


def test_a_server_that_is_silent_has_no_record_until_it_beats_again(shared, monkeypatch):
    record, participant = OwnRecord(shared), _participant()
    record.write(participant)
    _beat(shared / record.name, ago=records.SILENT_S)
    assert records.read(shared) == []
    (silent,) = records.read_all(shared)[1]
    assert (silent.kernel, silent.needs) == (record.name, (GIB,)), "its last one, to be shown"
    record.write(participant)
    assert records.read_all(shared)[1] == []
    assert len(records.read(shared)) == 1
    # A step of the wall clock is nobody's silence.
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert len(records.read(shared)) == 1


def test_a_record_that_a_cleaner_has_removed_comes_back_with_the_next_beat(shared):
    record, participant = OwnRecord(shared), _participant()
    record.write(participant)
    shutil.rmtree(shared)
    record.write(participant)
    assert [found.kernel for found in records.read(shared)] == [record.name]


def test_files_of_servers_that_have_ended_are_deleted_and_those_of_an_earlier_boot(shared, monkeypatch):
    dead, draft, living = _name(1), f".{_name(2)}-00000000", OwnRecord(shared)
    earlier = _name(3)
    living.write(_participant())
    for name in (dead, draft, earlier):
        (shared / name).write_text("{}")
    _beat(shared / dead, ago=records._GARBAGE_S + 1)
    # The third has the wall clock's time, which is later than any time of this boot; so has a draft, at first.
    records.read(shared)
    assert {path.name for path in shared.iterdir()} == {living.name, draft}, "another server writes it just now"
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + records._GARBAGE_S + 1)
    records.read(shared)
    assert [path.name for path in shared.iterdir()] == [living.name]


GOOD = json.loads(json.dumps({"version": 1, **dataclasses.asdict(_participant())}))
NONSENSE = {
    "not JSON": b"\xff\xfe",
    "deep": b"[" * 8000,
    "no object": b"[]",
    "empty": b"",
    **{
        f"{name} is {json.dumps(value)[:30]}": json.dumps({**GOOD, name: value}).encode()
        for name, value in (
            ("version", 2),
            ("needs", [-1]),
            ("needs", [True]),
            ("needs", [1 << 60]),
            ("needs", [1, 1]),
            ("needs", None),
            ("gpus", ["../../etc"]),
            ("gpus", ["A" * 65]),
            ("gpus", [A, A]),
            ("gpus", [7]),
            ("gpus", [f"GPU-{number}" for number in range(65)]),
            ("on", [A]),
            ("resident", [1]),
            ("residence", "everywhere"),
            ("residence", None),
            ("idle_since", "now"),
            ("idle_since", float("inf")),
            ("idle_since", float("nan")),
            ("idle_since", -1),
            ("idle_since", True),
            ("waiting_since", {}),
            ("turn", []),
            ("turn", {"since": 0}),
            ("swaps", [0]),
            ("swaps", {}),
            ("used", -1.0),
            ("used_before", {"../x": 1.0}),
            ("used_before", {f"kernel-{1:032x}": "long"}),
            ("turns", 1.5),
            ("factor", 1 << 40),
            ("can_leave", 1),
            ("protected", None),
        )
    },
    "a number with 5000 digits": json.dumps(GOOD).replace('"idle_since": 0.0', f'"idle_since": {"9" * 5000}').encode(),
}


@pytest.mark.parametrize("content", NONSENSE.values(), ids=NONSENSE)
def test_content_that_is_no_record_is_passed_over(shared, content):
    shared.mkdir()
    _put(shared, 1, content)
    _put(shared, 2, json.dumps(GOOD).encode())
    assert [found.kernel for found in records.read(shared)] == [_name(2)]


def test_a_time_that_is_to_come_is_now(shared):
    shared.mkdir()
    _put(shared, 1, json.dumps({**GOOD, "idle_since": 1e11, "waiting_since": 1e11}).encode())
    (found,) = records.read(shared)
    assert found.idle_since <= time.monotonic()
    assert found.waiting_since is not None
    assert found.waiting_since <= time.monotonic()


def test_nothing_but_a_small_file_is_read(shared, tmp_path):
    """A FIFO would be waited for, a link followed, a huge file be read into memory."""
    shared.mkdir()
    (tmp_path / "victim").write_text(json.dumps(GOOD))
    _beat(tmp_path / "victim")
    os.mkfifo(shared / _name(1))
    (shared / _name(2)).symlink_to(tmp_path / "victim")
    (shared / _name(3)).mkdir()
    huge = _put(shared, 4, json.dumps(GOOD).encode())
    os.truncate(huge, 1 << 40)
    for number in (1, 2, 3, 4):
        _beat(shared / _name(number))
    _put(shared, 5, json.dumps({**GOOD, "idle_since": 1.0}).encode())
    assert [found.kernel for found in records.read(shared)] == [_name(5)]


def test_records_of_servers_that_have_ended_keep_no_other_one_from_being_read(shared, monkeypatch):
    monkeypatch.setattr(records, "PER_USER", 3)
    monkeypatch.setattr(records, "_GARBAGE_S", 1e9)
    record = OwnRecord(shared)
    record.write(_participant())
    for number in range(9):
        _beat(_put(shared, number, (shared / record.name).read_bytes()), ago=30)
    living, silent = records.read_all(shared)
    assert [each.kernel for each in living] == [record.name]
    assert len(silent) == 3


def test_a_user_has_a_bounded_number_of_records(shared):
    shared.mkdir()
    for number in range(records.PER_USER + 20):
        _put(shared, number, json.dumps(GOOD).encode())
    assert len(records.read(shared)) == records.PER_USER


def test_a_directory_full_of_files_hides_no_record(shared, monkeypatch):
    """Any user can fill it; by some of the records alone, memory would be granted that a kernel is about to fill."""
    monkeypatch.setattr(records, "ENTRIES", 20)
    OwnRecord(shared).write(_participant())
    for number in range(30):
        (shared / f"junk-{number}").touch()
    with pytest.raises(OSError, match="more than 20 files"):
        records.read(shared)


def test_a_record_that_cannot_be_written_whole_is_not_shown(shared):
    """A disk that is full takes a part of it; the heartbeats of that part would show a kernel that nobody can read."""
    record, before = OwnRecord(shared), _participant()
    record.write(before)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            record.write(_participant(protected=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [found.protected for found in records.read(shared)] == [False]
    record.write(_participant(protected=True))
    assert [found.protected for found in records.read(shared)] == [True]
    assert [path.name for path in shared.iterdir()] == [record.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: run the tests as root too")
def test_users_read_each_others_records_and_cannot_change_them(shared):
    mine = OwnRecord(shared)
    mine.write(_participant())

    def as_nobody() -> int:
        # A fork and no exec: the interpreter may lie where only root can read it.
        child = os.fork()
        if child:
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        status = 1
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            OwnRecord(shared).write(dataclasses.replace(_participant(), needs=(2 * GIB,)))
            seen = [(found.user, found.needs) for found in records.read(shared)]
            refused = 0
            for change in (os.unlink, os.utime, lambda path: os.open(path, os.O_WRONLY)):
                try:
                    change(shared / mine.name)
                except PermissionError:
                    refused += 1
            status = 0 if (sorted(seen), refused) == ([("0", (GIB,)), ("65534", (2 * GIB,))], 3) else 2
        finally:
            os._exit(status)

    assert as_nobody() == 0
    assert sorted(found.user for found in records.read(shared)) == ["0", "65534"]
