"""Locks, headers and logs of SQLite, as its own library makes and reads them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import sqlite3
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.process import file_locks, sqlite_wal
from jupyter_gpu_ckpt.process.sqlite_wal import DatabaseChanged, DatabaseLocked, lock_database, page_size, transaction

READ, WRITE = fcntl.F_RDLCK, fcntl.F_WRLCK


@pytest.fixture
def path(tmp_path) -> Path:
    """A database in WAL mode with one row, which nobody has open."""
    path = tmp_path / "base"
    with connected(path) as connection:
        connection.execute("pragma journal_mode = wal")
        connection.execute("create table item (value)")
        connection.execute("insert into item values (1)")
    assert files(path) == ["base"]
    return path


def connected(path: Path):
    return contextlib.closing(sqlite3.connect(path, timeout=0, isolation_level=None))


def files(path: Path) -> list[str]:
    return sorted(each.name for each in path.parent.glob("base*"))


class Holder:
    """`lock_database` in a process of its own, as in a capsule's init."""

    def __init__(self, path: Path, **arguments: object) -> None:
        code = (
            "import json, sys; from jupyter_gpu_ckpt.process import sqlite_wal\n"
            "sqlite_wal._PATIENCE = 0.1\n"
            "try: held = sqlite_wal.lock_databases([json.loads(sys.argv[1])]); print('held', flush=True)\n"
            "except OSError as error: print(type(error).__name__, error.strerror, error.filename, flush=True)\n"
            "sys.stdin.read()"
        )
        arguments = {"path": str(path), "index_bytes": 32768, "anew": "unchanged" not in arguments, **arguments}
        argv = [sys.executable, "-c", code, json.dumps(arguments)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.said = self.process.stdout.readline().strip()

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()


def run(path: Path, *statements: str) -> list[tuple[object, ...]]:
    """The rows of the last statement, in another process."""
    code = (
        "import json, sqlite3, sys; c = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)\n"
        "for sql in sys.argv[2:]: rows = c.execute(sql).fetchall()\nc.close(); print(json.dumps(rows))"
    )
    argv = [sys.executable, "-c", code, str(path), *statements]
    return json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


# -- what is said of a file


@pytest.mark.parametrize("size", [512, 4096, 65536])
def test_a_database_in_wal_mode_is_known_by_its_header(tmp_path, size):
    path = tmp_path / "base"
    with connected(path) as connection:
        connection.execute(f"pragma page_size = {size}")
        connection.execute("create table item (value)")
        assert page_size(path.read_bytes()) == 0
        connection.execute("pragma journal_mode = wal")
        assert page_size(path.read_bytes()) == size
        connection.execute("pragma journal_mode = delete")
        assert page_size(path.read_bytes()) == 0


@pytest.mark.parametrize("header", [b"", b"SQLite format 3\0", b"SQLite format 2\0\x10\0\2\2", b"x" * 100])
def test_another_file_is_none(header):
    assert page_size(header) == 0


LOCKS = {
    "nothing": ([], "none"),
    "a deferred transaction without a statement": (["begin"], "none"),
    "a finished query": (["select * from item"], "none"),
    "a transaction that has read": (["begin", "select * from item"], "read"),
    "a transaction that will write": (["begin immediate"], "write"),
    "a transaction that has written": (["begin", "insert into item values (2)"], "write"),
    "a finished transaction": (["begin", "insert into item values (2)", "commit"], "none"),
}


@pytest.mark.parametrize("case", LOCKS)
@pytest.mark.parametrize("empty", [True, False], ids=["an empty log", "a log"])
def test_a_transaction_is_known_by_the_locks_of_its_process(path, case, empty):
    statements, wanted = LOCKS[case]
    with connected(path) as connection:
        if not empty:
            connection.execute("insert into item values (3)")
        connection.execute("select * from item").fetchall()
        for sql in statements:
            connection.execute(sql).fetchall()
        held: dict[str, list[tuple[int, int, int]]] = {}
        for lock in file_locks.held(os.getpid()):
            held.setdefault(os.readlink(f"/proc/self/fd/{lock.descriptor}"), []).append(tuple(lock[1:]))
        assert transaction(held[str(path)], held[f"{path}-shm"]) == wanted


def test_a_reader_whose_lock_linux_has_joined_with_that_of_its_connection():
    shared = [(READ, 0x40000002, 510)]
    assert transaction(shared, [(READ, 128, 1)]) == "none"
    assert transaction(shared, [(READ, 127, 2)]) == "read"
    assert transaction(shared, [(READ, 123, 0)]) == "read"


@pytest.mark.parametrize(
    ("database", "index"),
    [([], []), ([(READ, 0x40000002, 510)], []), ([], [(READ, 128, 1)]), ([(WRITE, 0x40000002, 510)], [(READ, 128, 1)])],
)
def test_locks_of_no_connection_in_wal_mode(database, index):
    """Another way of locking (unix-none, unix-dotfile), or a connection that shares nothing (exclusive mode)."""
    assert transaction(database, index) == ""


# -- a database that is held


def test_a_held_database_keeps_log_and_index_and_can_be_used(path):
    with Holder(path) as holder:
        assert holder.said == "held"
        assert files(path) == ["base", "base-shm", "base-wal"]
        assert run(path, "insert into item values (2)", "select * from item") == [[1], [2]]
        assert files(path) == ["base", "base-shm", "base-wal"]
        with connected(path) as connection, pytest.raises(sqlite3.OperationalError, match="locked"):
            connection.execute("pragma journal_mode = delete")
        assert run(path, "pragma integrity_check") == [["ok"]]
    assert run(path, "select * from item") == [[1], [2]]
    assert files(path) == ["base"]


def index_header(path: Path) -> bytes:
    both = path.with_name("base-shm").read_bytes()[:96]
    assert both[:48] == both[48:]
    return both[:48]


def test_a_new_log_has_an_index_that_none_had_before(path):
    with connected(path) as connection:
        connection.execute("select * from item").fetchall()
        empty = index_header(path)
    with connected(path) as connection:
        connection.execute("select * from item").fetchall()
        assert index_header(path) == empty, "so nothing tells two empty logs apart"
    found = {empty}
    for _ in range(3):
        with Holder(path):
            assert run(path, "select * from item") == [[1]]
            found.add(index_header(path))
    assert len(found) == 4


def test_the_index_of_others_is_changed_only_if_it_is_that_of_an_empty_log(path):
    with connected(path) as connection:
        connection.execute("select * from item").fetchall()
        empty = index_header(path)
        with Holder(path) as holder:
            assert holder.said == "held"
            marked = index_header(path)
            assert marked != empty
            assert run(path, "insert into item values (2)", "select * from item") == [[1], [2]]
            assert connection.execute("select * from item").fetchall() == [(1,), (2,)]
            written = index_header(path)
            assert written != marked
            with Holder(path) as second:
                assert second.said == "held"
                assert index_header(path) == written
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)


def test_frames_of_a_log_stay(path):
    """Those of a program that was killed: nobody has the database open."""
    with connected(path) as connection:
        connection.execute("insert into item values (2)")
        log = path.with_name("base-wal").read_bytes()
        for name in ("base", "base-wal", "base-shm"):
            (path.parent / "killed").mkdir(exist_ok=True)
            shutil.copy(path.with_name(name), path.parent / "killed" / name)
    killed = path.parent / "killed" / "base"
    with Holder(killed) as holder:
        assert holder.said == "held"
        assert killed.with_name("base-wal").read_bytes() == log
        assert set(killed.with_name("base-shm").read_bytes()) == {0}, "SQLite builds it from the log"
        assert run(killed, "select * from item") == [[1], [2]]


@pytest.mark.parametrize("log", [b"", b"x" * 32, bytes(5000), b"\x37\x7f\x06\x82" + b"x" * 5000], ids=len)
def test_a_log_that_sqlite_takes_for_empty_is_made_anew(path, log):
    path.with_name("base-wal").write_bytes(log)
    with Holder(path) as holder:
        assert holder.said == "held"
        made = path.with_name("base-wal").read_bytes()
        assert len(made) == 33
        assert struct.unpack_from(">III", made) == (0x377F0682 | (sys.byteorder == "big"), 3007000, 4096)
        assert run(path, "insert into item values (2)", "select * from item") == [[1], [2]]


def test_a_log_of_another_version_is_nobodys_to_change(path):
    header = struct.pack(">IIIIII", 0x377F0682, 3007001, 4096, 0, 1, 2)
    log = header + struct.pack(">II", *sqlite_wal._checksum(header, "little")) + bytes(100)
    path.with_name("base-wal").write_bytes(log)
    with Holder(path) as holder:
        assert holder.said == f"DatabaseChanged of version 3007001 {path}-wal"
    assert path.with_name("base-wal").read_bytes() == log


def test_an_index_gets_the_size_that_is_mapped(path):
    with Holder(path, index_bytes=98304):
        assert path.with_name("base-shm").stat().st_size == 98304
        with Holder(path, index_bytes=131072):
            assert path.with_name("base-shm").stat().st_size == 131072
        with Holder(path, index_bytes=0):
            assert path.with_name("base-shm").stat().st_size == 131072
            assert run(path, "pragma integrity_check") == [["ok"]]


def test_new_files_have_the_rights_of_the_database(path):
    path.chmod(0o664)
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    with Holder(path):
        for name in ("base-wal", "base-shm"):
            facts = path.with_name(name).stat()
            assert (stat.S_IMODE(facts.st_mode), facts.st_uid, facts.st_gid) == (
                0o664,
                path.stat().st_uid,
                path.stat().st_gid,
            )


@pytest.mark.parametrize("name", ["base", "base-wal", "base-shm"])
@pytest.mark.parametrize("put", ["pipe", "link", "directory"])
def test_something_else_in_the_place_of_a_file(path, name, put):
    place = path.with_name(name)
    place.unlink(missing_ok=True)
    if put == "pipe":
        os.mkfifo(place)
    elif put == "link":
        (path.parent / "elsewhere").write_bytes(b"of the user")
        place.symlink_to(path.parent / "elsewhere")
    else:
        place.mkdir()
    with Holder(path) as holder:
        assert holder.said.endswith(str(place))
    assert put != "link" or (path.parent / "elsewhere").read_bytes() == b"of the user"


def unchanged(path: Path) -> dict[str, list[int]]:
    found = {}
    for name in ("base", "base-wal", "base-shm"):
        facts = path.with_name(name).stat()
        found[str(path.with_name(name))] = [facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
    return found


def test_files_that_are_as_they_were_stay_so(path):
    with Holder(path):
        run(path, "insert into item values (2)")
    before = {name: path.with_name(name).read_bytes() for name in files(path)}
    with Holder(path, unchanged=unchanged(path)) as holder:
        assert holder.said == "held"
        assert {name: path.with_name(name).read_bytes() for name in files(path)} == before
        run(path, "select * from item")
        assert files(path) == ["base", "base-shm", "base-wal"]
    noted = unchanged(path)
    with open(path.with_name("base-wal"), "ab") as log:
        log.write(b"x")
    with Holder(path, unchanged=noted) as holder:
        assert holder.said == f"DatabaseChanged changed {path}-wal"
    path.with_name("base-shm").unlink()
    with Holder(path, unchanged=noted) as holder:
        assert holder.said == f"FileNotFoundError No such file or directory {path}-shm"


def test_locks_alone_leave_what_others_have_made_but_for_the_size_of_the_index(path):
    with connected(path) as connection:
        connection.execute("insert into item values (2)")
        before = {name: path.with_name(name).read_bytes() for name in files(path)}
        with Holder(path, anew=False, index_bytes=65536) as holder:
            assert holder.said == "held"
            after = {name: path.with_name(name).read_bytes() for name in files(path)}
            assert after == {**before, "base-shm": before["base-shm"].ljust(65536, b"\0")}
            assert run(path, "select * from item") == [[1], [2]]


def test_a_file_system_without_such_locks_keeps_no_unchanged_database_from_waking(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with connected(path) as connection:
        connection.execute("select * from item").fetchall()
        noted = unchanged(path)
        monkeypatch.setattr(fcntl, "fcntl", refuse)
        assert lock_database(str(path), 32768, anew=False, unchanged=noted) == []
        with pytest.raises(OSError, match=os.strerror(errno.ENOLCK)):
            lock_database(str(path), 32768, anew=True)


def test_a_database_that_is_in_no_wal_mode_any_more(path):
    run(path, "pragma journal_mode = delete")
    with Holder(path) as holder:
        assert holder.said == f"DatabaseChanged not in WAL mode {path}"
    assert files(path) == ["base"]


def test_locks_of_others_are_waited_for(path, monkeypatch):
    """The last to close a database locks it until the log is gone."""
    monkeypatch.setattr(sqlite_wal, "_PATIENCE", 0.1)
    with open(path, "r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 510, 0x40000002)
        with Holder(path) as holder:
            assert holder.said == f"DatabaseLocked another process has it locked {path}"
        assert files(path) == ["base"]
        fcntl.lockf(file, fcntl.LOCK_UN, 510, 0x40000002)
    with connected(path) as connection:
        connection.execute("begin immediate")
        with Holder(path) as holder:
            assert holder.said == f"DatabaseLocked another process has it locked {path}-shm"


def test_a_log_that_was_removed_under_another_program(path):
    """Its last transactions are in a file without a name."""
    with connected(path) as connection:
        connection.execute("insert into item values (2)")
        path.with_name("base-wal").unlink()
        with Holder(path) as holder:
            assert holder.said == f"DatabaseChanged removed {path}-wal"


def test_an_index_that_others_have_not_built_yet(path):
    """Or one that was damaged: SQLite builds it from the log, which must tell it from every other."""
    with connected(path) as connection:
        connection.execute("select * from item").fetchall()
        with open(path.with_name("base-shm"), "r+b") as index:
            index.write(bytes(96))
        with Holder(path) as holder:
            assert holder.said == "held"
            assert path.with_name("base-wal").stat().st_size == 33
            assert connection.execute("select * from item").fetchall() == [(1,)]
            assert any(index_header(path)[32:40])


def test_nothing_is_held_after_a_failure(path):
    descriptors = os.listdir("/proc/self/fd")
    for each in ("nothing", "base"):
        first = {"path": str(path), "index_bytes": 0, "anew": True}
        second = {"path": str(path.with_name(each)), "index_bytes": 0, "anew": False, "unchanged": {str(path): [0] * 4}}
        with pytest.raises(OSError, match=r"No such file|changed"):
            sqlite_wal.lock_databases([first, second])
    assert os.listdir("/proc/self/fd") == descriptors
    assert run(path, "select * from item") == [[1]]
    assert files(path) == ["base"]
    assert issubclass(DatabaseChanged, OSError)
    assert issubclass(DatabaseLocked, OSError)
    assert lock_database(str(path), 0, anew=True)


# -- pages that are in the log alone


def test_pages_that_are_in_the_log_alone_are_lost_with_it(path):
    with connected(path) as connection:
        connection.execute("insert into item values (2)")
        noted = sqlite_wal.uncopied(str(path), 4096)
        assert list(noted["pages"]) == ["2"]
        assert not sqlite_wal.is_lost(str(path), 4096, noted)
        log = path.with_name("base-wal")
        content = log.read_bytes()
        log.unlink()
        assert sqlite_wal.is_lost(str(path), 4096, noted)
        log.write_bytes(b"\0" * 32)
        assert sqlite_wal.is_lost(str(path), 4096, noted)
        log.write_bytes(content)
        assert not sqlite_wal.is_lost(str(path), 4096, noted)


@pytest.mark.parametrize(
    "then", [[], ["insert into item values (3)"], ["delete from item"], ["delete from item", "vacuum"]]
)
def test_who_closes_the_database_has_copied_them(path, tmp_path, then):
    """Others do; the kernel's own connection would."""
    with connected(path) as connection:
        connection.execute("insert into item values (2)")
        noted = sqlite_wal.uncopied(str(path), 4096)
        copy = tmp_path / "copy"
        for suffix in ("", "-wal"):
            shutil.copy(f"{path}{suffix}", f"{copy}{suffix}")
    run(copy, "select * from item", *then)
    assert not copy.with_name("copy-wal").exists()
    assert not sqlite_wal.is_lost(str(copy), 4096, noted)


def test_a_log_that_was_copied_has_none(path):
    with connected(path) as connection:
        connection.execute("insert into item values (2)")
        connection.execute("pragma wal_checkpoint(passive)")
        assert sqlite_wal.uncopied(str(path), 4096) == {}
        connection.execute("insert into item values (3)")
        assert list(sqlite_wal.uncopied(str(path), 4096)["pages"]) == ["2"]
