"""Databases of SQLite in a fingerprint."""

from __future__ import annotations

import contextlib
import fcntl
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.node import databases, facts

SHARED, DMS = (fcntl.F_RDLCK, 0x40000002, 510), (fcntl.F_RDLCK, 128, 1)
READER, WRITER = (fcntl.F_RDLCK, 124, 1), (fcntl.F_WRLCK, 120, 1)
RESERVED = (fcntl.F_WRLCK, 0x40000001, 1)


@pytest.fixture
def path(tmp_path):
    """A database in WAL mode that somebody has open."""
    path = tmp_path / "base"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma journal_mode = wal")
        connection.execute("create table item (value)")
        yield path


def noted(path: Path, own: list[Any], index: list[Any], **more: Any) -> dict[str, dict[str, Any]]:
    """The entries of a database, its log and its index, with locks on the first and the last."""
    paths = databases.members(str(path))
    uses = {each: {"open": True, "mapped": each != paths[1], "writes": True, **more} for each in paths}
    files = {each: {**(facts.file_facts(each) or {}), **uses[each]} for each in paths}
    databases.note(files, {paths[0]: own, paths[2]: index})
    return files


@pytest.mark.parametrize(
    ("own", "index", "transaction"),
    [([SHARED], [DMS], "none"), ([SHARED], [DMS, READER], "read"), ([SHARED], [DMS, READER, WRITER], "write")],
)
def test_a_database_in_wal_mode_is_noted_with_its_transaction(path, own, index, transaction):
    entry = noted(path, own, index)[str(path)]
    assert entry["transaction"] == transaction
    assert entry["wal"] == 4096
    assert entry["boot"] == procfs.boot_id()
    assert entry["database_born"] > 0


@pytest.mark.parametrize(("own", "transaction"), [([], "none"), ([SHARED], "read"), ([SHARED, RESERVED], "write")])
def test_a_database_in_another_mode_or_with_other_locks(path, own, transaction):
    entry = noted(path, own, [])[str(path)]
    assert (entry["transaction"], entry.get("wal")) == (transaction, None)
    assert databases.is_one(entry)


def test_other_files_are_no_databases(path):
    files = noted(path, [SHARED], [DMS])
    for each in databases.members(str(path))[1:]:
        assert not databases.is_one(files[each])
    assert not databases.is_one(noted(path, [SHARED], [DMS], open=False)[str(path)])
    assert "wal" not in noted(path, [SHARED], [DMS], writes=False)[str(path)], "an index that the kernel only reads"
    assert databases.is_one({"database_born": 7}), "of an older release"


def held(files: dict[str, dict[str, Any]]) -> list[bool]:
    """Return whether each database that is held is to stay as it is."""
    return [not arguments["anew"] for arguments, _ in databases.to_lock(files)]


def test_databases_without_a_transaction_are_held_and_left_as_they_are_if_nobody_used_them(path):
    files = noted(path, [SHARED], [DMS])
    ((arguments, paths),) = databases.to_lock(files)
    assert paths == databases.members(str(path))
    assert arguments["index_bytes"] == 32768
    assert held(files) == [True]
    assert "unchanged" in arguments
    files[str(path)]["boot"] = "another"
    assert held(files) == [False], "what was written last may not have reached the disk"
    files = noted(path, [SHARED], [DMS])
    path.with_name("base-wal").touch()
    assert held(files) == [False]
    path.with_name("base-wal").unlink()
    assert held(files) == [False]


@pytest.mark.parametrize("index", [[DMS, READER], [DMS, READER, WRITER]], ids=["that reads", "that writes"])
def test_a_transaction_continues_with_log_and_index_as_they_are(path, index):
    files = noted(path, [SHARED], index)
    ((arguments, _),) = databases.to_lock(files)
    assert (arguments["anew"], "unchanged" in arguments) == (False, True)
    path.with_name("base-wal").touch()  # with the same content: it was put back
    files[str(path)]["boot"] = "another"
    ((arguments, _),) = databases.to_lock(files)
    assert (arguments["anew"], "unchanged" in arguments) == (False, False)
