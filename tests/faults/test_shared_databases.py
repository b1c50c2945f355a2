"""SQLite databases with a write-ahead log that others use while the kernel sleeps with them open."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import CellFailed

from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.cli import main
from jupyter_gpu_ckpt.errors import GpuCkptError

pytestmark = pytest.mark.sweep(1 / 2, of="file")

OTHER = """
import json, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None, uri=True)
print("[]", flush=True)
for line in sys.stdin:
    try:
        rows = connection.execute(json.loads(line)).fetchall()
    except sqlite3.Error as error:
        rows = [[str(error)]]
    print(json.dumps(rows), flush=True)
connection.close()
"""


class Other:
    """Another program with a connection of its own.  Its locks are those of a process."""

    def __init__(self, path: Path | str) -> None:
        argv = [sys.executable, "-c", OTHER, str(path)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._answer() == []

    def _answer(self) -> list[list[object]]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def run(self, sql: str) -> list[list[object]]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(sql) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def other(path: Path | str, *statements: str, kill: bool = False) -> Iterator[Other]:
    """Another program that runs statements, and then closes the database or is killed."""
    program = Other(path)
    try:
        for sql in statements:
            program.run(sql)
        yield program
    finally:
        program.end(kill)


def elsewhere(path: Path | str, *statements: str, kill: bool = False) -> list[list[object]]:
    """The rows of the last statement that another program runs before it closes the database."""
    with other(path, *statements[:-1], kill=kill) as program:
        return program.run(statements[-1])


KERNEL = """
import sqlite3
def connect():
    return sqlite3.connect("base", timeout=60, isolation_level=None)
def total(which=0):
    return connections[which].execute("select count(*), sum(value) from item").fetchone()
def check():
    found = [connection.execute("pragma integrity_check").fetchone()[0] for connection in connections]
    return total() if set(found) == {"ok"} else found
connections = [connect()]
"""
NEW = 'connections[0].execute("pragma journal_mode = wal"); connections[0].execute("create table item (value integer)")'
INSERT = "insert into item values (1)"
TOTAL = "select count(*), sum(value) from item"


async def wrote(subject) -> Path:
    """A database with one row that the kernel has written."""
    await subject.run(f"{KERNEL}\n{NEW}\nconnections[0].execute('insert into item values (40)')")
    return subject.directory / "base"


async def has_read(subject) -> Path:
    """The same, whose log was empty before the kernel read the row; it has two connections."""
    path = subject.directory / "base"
    elsewhere(path, "pragma journal_mode = wal", "create table item (value integer)", "insert into item values (40)")
    assert not path.with_name("base-wal").exists()
    await subject.run(f"{KERNEL}\nconnections.append(connect())")
    assert await subject.run("print(total(0), total(1))") == "(1, 40) (1, 40)"
    return path


async def continues(subject, path: Path, rows: int) -> None:
    """Kernel and others see the same after each write of either, and the database is intact."""
    wanted = [rows, rows + 39]
    assert await subject.run("print(check(), *[total(each) for each in range(len(connections))])") == " ".join(
        [str(tuple(wanted))] * (1 + int(await subject.run("print(len(connections))")))
    )
    with other(path) as program:
        assert program.run(TOTAL) == [wanted]
        await subject.run(f"_ = connections[-1].execute({INSERT!r})")
        assert program.run(TOTAL) == [[rows + 1, rows + 40]]
        assert program.run(INSERT) == []
        assert await subject.run("print(check())") == str((rows + 2, rows + 41))
        assert program.run("pragma integrity_check") == [["ok"]]
    await subject.leaves_and_wakes()
    assert await subject.run("print(check())") == str((rows + 2, rows + 41))


async def wakes_without_a_question(subject, image) -> None:
    assert main(["match", image.id, "--image-dir", str(subject.images)]) == 0
    await subject.wakes()


#: What others do: statements, how the program ends, and how many rows there are then.
VISITS = {
    "reads": ([TOTAL], {}, 1),
    "writes": ([INSERT, INSERT], {}, 3),
    "writes a lot": (
        [
            "with recursive n(i) as (select 1 union all select i + 1 from n where i < 9999)"
            " insert into item select 1 from n"
        ],
        {},
        10000,
    ),
    "is killed": ([INSERT, INSERT], {"kill": True}, 3),
    "is killed in a transaction": ([INSERT, "begin immediate", INSERT], {"kill": True}, 2),
    "vacuums": (["create table t as select zeroblob(1000000)", "drop table t", "vacuum", INSERT], {}, 2),
    "empties the log and is killed": ([INSERT, "pragma wal_checkpoint(truncate)"], {"kill": True}, 2),
    "starts the log again and is killed": ([INSERT, "pragma wal_checkpoint(restart)", INSERT], {"kill": True}, 3),
}


@pytest.mark.sweep
@pytest.mark.parametrize("visit", VISITS)
@pytest.mark.parametrize("kernel", [wrote, has_read])
async def test_a_kernel_without_a_transaction_wakes_and_sees_what_others_did(subject, kernel, visit):
    path = await kernel(subject)
    image = await subject.provisioner.checkpoint()
    statements, end, rows = VISITS[visit]
    elsewhere(path, *statements, **end)
    await wakes_without_a_question(subject, image)
    await continues(subject, path, rows)


@pytest.mark.parametrize("kernel", [wrote, has_read])
@pytest.mark.parametrize("written", [False, True], ids=["to read it", "to write to it"])
async def test_another_program_has_the_database_open_as_the_kernel_wakes(subject, kernel, written):
    """The log is a new one.  An empty one has the same index as the one that the kernel knew."""
    path = await kernel(subject)
    image = await subject.provisioner.checkpoint()
    elsewhere(path, INSERT)
    with other(path, *[INSERT] * written, TOTAL) as program:
        await wakes_without_a_question(subject, image)
        assert program.run(TOTAL) == [[2 + written, 41 + written]]
        await continues(subject, path, 2 + written)
    await subject.run(f"_ = connections[0].execute({INSERT!r})")
    assert elsewhere(path, TOTAL) == [[5 + written, 44 + written]]


async def test_another_program_writes_as_the_kernel_wakes(subject):
    path = await wrote(subject)
    await subject.provisioner.checkpoint()
    elsewhere(path, INSERT)
    with other(path, INSERT, "begin immediate", INSERT) as program:
        await subject.wakes()
        assert await subject.run("print(total())") == "(3, 42)"
        await subject.run("_ = connections[0].execute('pragma busy_timeout = 10')")
        with pytest.raises(CellFailed, match="database is locked"):
            await subject.run(f"connections[0].execute({INSERT!r})")
        program.run("commit")
        await continues(subject, path, 4)


async def test_a_first_writer_keeps_the_kernel_waiting(subject):
    """The index looks like the old one until it has written, and must not be changed meanwhile."""
    path = await has_read(subject)
    await subject.provisioner.checkpoint()
    elsewhere(path, INSERT)
    with other(path, TOTAL, "begin immediate") as program:
        error = await subject.fails(subject.provisioner.restore, "LOCK_TAKEN")
        assert error.details["culprit"] == f"{path}-shm"
        await subject.stays_away(error)
        program.run("rollback")
        await subject.wakes()
        await continues(subject, path, 2)


FAST = ["synchronous", "wal_autocheckpoint"]
MANY = "for n in range(9000): _ = connections[0].execute('insert into item values (1)')"


async def test_a_large_index_comes_back_at_its_size(subject):
    """The kernel has mapped more of it than a new one has: an access beyond its end would end the kernel."""
    path = await wrote(subject)
    await subject.run(f"for name in {FAST}: _ = connections[0].execute(f'pragma {{name}} = 0')\n{MANY}")
    size = path.with_name("base-shm").stat().st_size
    assert size > 1 << 16
    await subject.provisioner.checkpoint()
    elsewhere(path, INSERT)
    assert not path.with_name("base-shm").exists()
    with other(path, TOTAL):
        assert path.with_name("base-shm").stat().st_size < size
        await subject.wakes()
        assert path.with_name("base-shm").stat().st_size == size
    await subject.run(MANY)
    await continues(subject, path, 18002)


@pytest.mark.parametrize("mode", ["wal", "delete"])
async def test_a_database_that_is_mapped_and_has_shrunk(subject, mode):
    """SQLite maps it anew before it looks at it."""
    path = subject.directory / "base"
    elsewhere(path, f"pragma journal_mode = {mode}", "create table item (value integer)", "create table big (b)")
    elsewhere(path, "insert into item values (40)", "insert into big values (zeroblob(1000000))")
    await subject.run(
        f"{KERNEL}\n_ = connections[0].execute('pragma mmap_size = 100000000')\n"
        "assert connections[0].execute('select length(b) from big').fetchone()[0] == 1000000"
    )
    assert await subject.run("print(sum(line.endswith('/base\\n') for line in open('/proc/self/maps')))") == "1"
    size = path.stat().st_size
    image = await subject.provisioner.checkpoint()
    elsewhere(path, "drop table big", "vacuum")
    assert path.stat().st_size < size
    await wakes_without_a_question(subject, image)
    await continues(subject, path, 1)


CHILD = """
program = '''import sqlite3, sys
connection = sqlite3.connect("base", timeout=60, isolation_level=None)
for line in sys.stdin:
    print(connection.execute(line).fetchall(), flush=True)'''
child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
def ask(sql):
    print(sql, file=child.stdin, flush=True)
    return child.stdout.readline().strip()
"""


async def test_a_child_with_a_connection_of_its_own(subject):
    path = await has_read(subject)
    await subject.run(f"{CHILD}\nassert ask({TOTAL!r}) == '[(1, 40)]'")
    await subject.provisioner.checkpoint()
    elsewhere(path, INSERT)
    await subject.wakes()
    assert await subject.run(f"print(total(0), total(1), ask({TOTAL!r}))") == "(2, 41) (2, 41) [(2, 41)]"
    await subject.run(f"assert ask({INSERT!r}) == '[]'")
    assert await subject.run("print(check())") == "(3, 42)"
    await subject.run("child.stdin.close(); _ = child.wait()")


async def test_a_program_that_only_looks_leaves_everything_as_it_is(subject):
    path = await wrote(subject)
    image = await subject.provisioner.checkpoint()
    assert elsewhere(f"file:{path}?mode=ro", TOTAL) == [[1, 40]]
    await wakes_without_a_question(subject, image)
    await continues(subject, path, 1)


READS = "rows = connections[0].execute('select * from item'); _ = next(rows)"
WRITES = f"_ = connections[0].execute('begin immediate'), connections[0].execute({INSERT!r})"


@pytest.mark.parametrize("transaction", [READS, WRITES], ids=["reads", "writes"])
@pytest.mark.parametrize("stays", [True, False], ids=["and is killed", "and closes it"])
async def test_a_kernel_in_a_transaction_does_not_wake_when_others_have_written(subject, transaction, stays):
    path = await wrote(subject)
    await subject.run(f"_ = connections[0].execute({INSERT!r})\n{transaction}")
    image = await subject.provisioner.checkpoint()
    kept = {each.name: each.read_bytes() for each in subject.directory.glob("base*")}
    assert len(kept) == 3
    elsewhere(path, INSERT, kill=stays)
    error = await subject.fails(subject.provisioner.restore, "FILE_CHANGED", "FILE_MISSING")
    await subject.stays_away(error)
    if transaction is WRITES:
        assert "would damage what others wrote" in error.hint
        error = await subject.fails(lambda: subject.provisioner.restore(accept_changed_files=True), "FILE_CHANGED")
        await subject.stays_away(error)
    else:
        assert "The kernel is in a transaction that reads it" in error.hint
        assert f"`jupyter gpu-ckpt match {image.id} --accept-changed-files`" in error.hint
    for name, content in kept.items():  # from a backup
        (subject.directory / name).write_bytes(content)
    await subject.wakes()
    await subject.run("del rows" if transaction is READS else "_ = connections[0].execute('commit')")
    await continues(subject, path, 2 + (transaction is WRITES))


@pytest.mark.parametrize("stays", [True, False], ids=["and is killed", "and closes it"])
async def test_a_query_halfway_can_be_given_up_without_harm_to_the_database(subject, stays):
    """Its rows are of no use.  What the connection reads and writes afterwards is right."""
    path = await wrote(subject)
    await subject.run(f"for n in range(2000): _ = connections[0].execute({INSERT!r})\n{READS}")
    await subject.provisioner.checkpoint()
    elsewhere(path, INSERT, "pragma wal_checkpoint(truncate)", "delete from item where rowid > 1000", kill=stays)
    await subject.provisioner.restore(accept_changed_files=True)
    with pytest.raises(CellFailed, match="database is locked"):
        await subject.run(f"connections[0].execute({INSERT!r})")
    await subject.run("try: _ = list(rows)\nexcept sqlite3.DatabaseError as error: print(error)")
    await subject.run("del rows")
    await continues(subject, path, 1000)


async def test_a_kernel_in_a_transaction_wakes_when_nobody_came(subject):
    path = await wrote(subject)
    await subject.run(WRITES)
    await subject.leaves_and_wakes()
    with other(path) as program:
        assert program.run(INSERT) == [["database is locked"]]
    await subject.run("_ = connections[0].execute('commit')")
    await continues(subject, path, 2)


@pytest.mark.parametrize("transaction", [READS, WRITES], ids=["reads", "writes"])
async def test_a_transaction_with_a_rollback_journal_is_not_accepted_either(subject, transaction):
    """One that reads writes old pages over the new ones as soon as it writes, in silence."""
    path = subject.directory / "base"
    elsewhere(path, "create table item (value integer)", *["insert into item values (40)"] * 3)
    await subject.run(f"{KERNEL}\n{transaction}")
    await subject.provisioner.checkpoint()
    elsewhere(path, INSERT)
    if transaction is WRITES:
        path.with_name("base-journal").touch()
    error = await subject.fails(lambda: subject.provisioner.restore(accept_changed_files=True), "FILE_CHANGED")
    assert error.details["culprit"] == str(path)
    assert ("would undo what others wrote" if transaction is READS else "would damage what others wrote") in error.hint
    await subject.stays_away(error)


async def test_a_database_that_others_took_out_of_wal_mode(subject):
    path = await has_read(subject)
    await subject.provisioner.checkpoint()
    assert elsewhere(path, "pragma journal_mode = delete") == [["delete"]]
    error = await subject.fails(lambda: subject.provisioner.restore(accept_changed_files=True), "FILE_CHANGED")
    assert f"`sqlite3 {path} 'PRAGMA journal_mode = WAL'`" in error.hint
    await subject.stays_away(error)
    elsewhere(path, INSERT)
    elsewhere(path, "PRAGMA journal_mode = WAL")
    await subject.wakes()
    await continues(subject, path, 2)


async def test_another_database_in_the_place_of_one_is_accepted_on_demand_only(subject):
    path = await has_read(subject)
    image = await subject.provisioner.checkpoint()
    new = path.with_name("new")
    twice = ["insert into item values (20)"] * 2
    elsewhere(new, "pragma journal_mode = wal", "create table item (value integer)", *twice)
    new.rename(path)
    for name in ("base-wal", "base-shm"):
        path.with_name(name).unlink()
    error = await subject.fails(subject.provisioner.restore, "FILE_CHANGED")
    assert f"`jupyter gpu-ckpt match {image.id} --accept-changed-files`" in error.hint
    await subject.stays_away(error)
    await subject.provisioner.restore(accept_changed_files=True)
    assert await subject.run("print(check(), total(0), total(1))") == "(2, 40) (2, 40) (2, 40)"


def without_log(path: Path) -> None:
    path.with_name("base-wal").unlink()


def without_log_and_written_since(path: Path) -> None:
    """With a log of its own, of which it is closed as it should be."""
    without_log(path)
    elsewhere(path, "create table other (value)", "drop table other")


def with_an_empty_log(path: Path) -> None:
    path.with_name("base-wal").write_bytes(b"")


def copied_without_log(path: Path) -> None:
    content = path.read_bytes()
    for name in ("base", "base-wal", "base-shm"):
        path.with_name(name).unlink()
    path.write_bytes(content)


@pytest.mark.parametrize("removed", [without_log, without_log_and_written_since, with_an_empty_log, copied_without_log])
async def test_a_log_with_rows_that_are_nowhere_else(subject, removed):
    path = await wrote(subject)
    await subject.run("_ = connections[0].execute('pragma wal_checkpoint(passive)')")
    await subject.run(f"for number in range(3): _ = connections[0].execute({INSERT!r})")
    image = await subject.provisioner.checkpoint()
    kept = {each.name: each.read_bytes() for each in subject.directory.glob("base*")}
    removed(path)
    error = await subject.fails(subject.provisioner.restore, "FILE_CHANGED")
    assert f"{path}-wal" in error.hint
    assert "put that file back" in error.hint
    assert f"`jupyter gpu-ckpt match {image.id} --accept-changed-files`" in error.hint
    await subject.stays_away(error)
    for name, content in kept.items():
        (subject.directory / name).write_bytes(content)
    await wakes_without_a_question(subject, image)
    await continues(subject, path, 4)


async def test_rows_that_are_lost_can_be_given_up(subject):
    path = await wrote(subject)
    await subject.run("_ = connections[0].execute('pragma wal_checkpoint(truncate)')")
    await subject.run(f"_ = connections[0].execute({INSERT!r})")
    await subject.provisioner.checkpoint()
    without_log(path)
    await subject.provisioner.restore(accept_changed_files=True)
    await continues(subject, path, 1)


@pytest.mark.parametrize("mode", ["passive", "full", "restart", "truncate"])
async def test_a_log_whose_rows_are_all_in_the_database_may_be_removed(subject, mode):
    path = await wrote(subject)
    await subject.run(f"_ = connections[0].execute('pragma wal_checkpoint({mode})')")
    image = await subject.provisioner.checkpoint()
    without_log(path)
    await wakes_without_a_question(subject, image)
    await continues(subject, path, 1)


async def test_nobody_removes_the_log_while_the_kernel_is_on_its_way(subject, monkeypatch):
    """Between the comparison of the files and the locks of the restored processes."""
    path = await wrote(subject)
    await subject.provisioner.checkpoint()
    restore = subject.kernel.lifecycle.engine.criu.restore

    def visited(*args, **options):
        elsewhere(path, TOTAL)
        assert path.with_name("base-wal").exists()
        return restore(*args, **options)

    monkeypatch.setattr(subject.kernel.lifecycle.engine.criu, "restore", visited)
    await subject.wakes()
    monkeypatch.undo()
    await continues(subject, path, 1)


async def test_what_others_do_just_before_the_locks_is_noticed(subject, monkeypatch):
    path = await wrote(subject)
    await subject.provisioner.checkpoint()
    lock = Capsule.lock_databases

    def visited(self, databases):
        monkeypatch.undo()
        elsewhere(path, INSERT)
        lock(self, databases)

    monkeypatch.setattr(Capsule, "lock_databases", visited)
    await subject.stays_away(await subject.fails(subject.provisioner.restore, "FILE_CHANGED"))
    await subject.wakes()
    await continues(subject, path, 2)


async def test_a_wake_that_fails_leaves_a_database_that_everybody_can_use(subject, monkeypatch):
    path = await has_read(subject)
    await subject.provisioner.checkpoint()
    elsewhere(path, INSERT)

    def fail(*_, **__):
        raise GpuCkptError("broken")

    with monkeypatch.context() as broken:
        broken.setattr(subject.kernel.lifecycle.engine.criu, "restore", fail)
        await subject.stays_away(await subject.fails(subject.provisioner.restore, "INTERNAL"))
    assert path.with_name("base-wal").stat().st_size == 33
    with other(path, "pragma integrity_check") as program:
        assert program.run(INSERT) == []
        assert program.run(TOTAL) == [[3, 42]]
        await subject.wakes()
        assert program.run("pragma integrity_check") == [["ok"]]
    await continues(subject, path, 3)


#: Statements of others, of which each visit has some.
SOME = [
    *[INSERT] * 3,
    TOTAL,
    "pragma wal_checkpoint(passive)",
    "pragma wal_checkpoint(truncate)",
    "pragma wal_checkpoint(restart)",
    "pragma journal_size_limit = 0",
    "vacuum",
    "create table if not exists t as select zeroblob(300000)",
    "drop table if exists t",
    "pragma journal_mode = delete",
    "pragma journal_mode = wal",
]


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.torture) if seed else 0 for seed in range(20)])
async def test_random_visits_between_random_wakes(subject, seed):
    """No row is lost or seen twice, by any connection, whatever others do; each cycle prints what they did."""
    chance, path = random.Random(seed), await has_read(subject)
    rows, stays = 1, None
    await subject.run("_ = connections.append(connect()), connections[2].execute('pragma mmap_size = 10000000')")
    for _ in range(8):
        for which in range(3):
            if chance.random() < 0.4:
                await subject.run(f"_ = connections[{which}].execute({INSERT!r})")
                rows += 1
            elif chance.random() < 0.5:
                assert await subject.run(f"print(total({which}))") == str((rows, rows + 39))
        if stays is not None and chance.random() < 0.5:
            stays.end(kill=chance.random() < 0.5)
            stays = None
        await subject.provisioner.checkpoint()
        for _ in range(chance.randrange(4)):
            with other(path, kill=chance.random() < 0.3) as program:
                for sql in chance.choices(SOME, k=chance.randrange(5)):
                    print(sql, program.run(sql))
                    rows += sql is INSERT
                assert program.run("pragma integrity_check") == [["ok"]]
        assert elsewhere(path, "pragma journal_mode = wal") == [["wal"]]
        if stays is None and chance.random() < 0.5:
            stays = Other(path)
            for sql in chance.choices([TOTAL, INSERT], k=chance.randrange(3)):
                stays.run(sql)
                rows += sql is INSERT
        await subject.wakes()
        totals = await subject.run("print({total(which) for which in range(3)}, check())")
        print("woke", totals)
        assert totals == f"{ {(rows, rows + 39)} } {(rows, rows + 39)}"
    if stays is not None:
        assert stays.run(TOTAL) == [[rows, rows + 39]]
        stays.end()
