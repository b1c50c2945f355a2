"""IPython's history across a checkpoint: nothing lost, nothing renamed, other kernels undisturbed."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SESSION = "print(get_ipython().history_manager.session_number)"


@pytest.fixture
def database(ipython_dir: Path) -> Path:
    return ipython_dir / "profile_default" / "history.sqlite"


def lines(database: Path, session: str) -> list[tuple[int, str]]:
    connection = sqlite3.connect(database)
    try:
        return connection.execute(
            "SELECT line, source_raw FROM history WHERE session = ? ORDER BY line", (session,)
        ).fetchall()
    finally:
        connection.close()


@contextmanager
def locked(database: Path) -> Iterator[None]:
    connection = sqlite3.connect(database, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    try:
        yield
    finally:
        connection.close()


def write_out(kernel: Any) -> None:
    kernel.run("get_ipython().history_manager.writeout_cache()")


def test_the_session_continues_and_other_kernels_write_meanwhile(start: Callable[..., Any], database: Path) -> None:
    kernel = start()
    session = kernel.run(SESSION)
    kernel.run("x = 'before'")
    kernel.report("quiesce")
    assert (2, "x = 'before'") in lines(database, session)  # already on disk while the kernel is away
    other = start()
    other.run("y = 'elsewhere'")
    write_out(other)
    size = database.stat().st_size
    kernel.report("thaw")
    assert kernel.run("x = 'after'; print(In[2], len(In), x)") == "x = 'before' 4 after"
    assert kernel.run(SESSION) == session
    write_out(kernel)
    assert [line for line, _ in lines(database, session)] == [1, 2, 3, 4, 5]
    assert "elsewhere" in str(lines(database, other.run(SESSION)))
    assert database.stat().st_size >= size
    assert "before" in kernel.run("%history -n") and "after" in kernel.run("%history -n")
    assert "elsewhere" in kernel.run("%history -g elsewhere")


def test_the_saving_thread_writes_again(start: Callable[..., Any], database: Path) -> None:
    """db_cache_size 0 has it write after every cell; it does so some time later."""
    kernel = start()
    session = kernel.run(SESSION)
    for _ in range(3):
        kernel.report("quiesce")
        kernel.report("thaw")
    kernel.run("x = 'saved by the thread'")
    code = """if True:
        import time
        deadline = time.monotonic() + 60
        while get_ipython().history_manager.db_input_cache and time.monotonic() < deadline: time.sleep(0.01)"""
    kernel.run(code)
    assert "saved by the thread" in str(lines(database, session))
    assert kernel.report("report")["threads"].count("IPythonHistorySavingThread") == 1


@pytest.mark.parametrize("option", ["--HistoryManager.enabled=False", "--HistoryManager.hist_file=:memory:"])
def test_a_kernel_without_a_file_needs_nothing(start: Callable[..., Any], option: str) -> None:
    kernel = start(arguments=[option])
    assert kernel.report("quiesce")["probe_errors"] == []
    assert kernel.report("thaw")["probe_errors"] == []
    assert kernel.run("%history -n").endswith("%history -n")


def test_a_history_request_to_a_stopped_kernel_renames_nothing(start: Callable[..., Any], database: Path) -> None:
    """IPython takes any error of sqlite for a corrupt file and moves it away."""
    kernel = start()
    kernel.run("x = 1")
    kernel.report("quiesce")
    reply = kernel.ask("history_request", {"output": False, "raw": True, "hist_access_type": "tail", "n": 5})
    assert reply["status"] == "ok"
    assert [entry for entry in os.listdir(database.parent) if "corrupt" in entry] == []
    kernel.report("thaw")
    assert "x = 1" in kernel.run("%history -n")


def test_a_locked_database_loses_no_line(start: Callable[..., Any], database: Path) -> None:
    kernel = start(arguments=["--HistoryManager.db_cache_size=100"])
    session = kernel.run(SESSION)
    kernel.run("x = 'kept'")
    with locked(database):
        assert kernel.report("quiesce")["open_files"] == []
    kernel.report("thaw")
    write_out(kernel)
    assert "kept" in str(lines(database, session))


def test_a_database_that_cannot_be_read_is_left_alone(start: Callable[..., Any], database: Path) -> None:
    kernel = start()
    kernel.report("quiesce")
    database.write_bytes(b"no database at all" * 100)
    (problem,) = kernel.report("thaw")["probe_errors"]
    assert problem.startswith("history stays in memory: DatabaseError")
    assert kernel.run("%history -n 1") and database.read_bytes().startswith(b"no database")
    assert [entry for entry in os.listdir(database.parent) if "corrupt" in entry] == []
    assert kernel.report("quiesce")["probe_errors"] == []  # nothing to stop now
    assert kernel.report("thaw")["probe_errors"] == []


def test_a_new_home_without_a_history_gets_one(start: Callable[..., Any], database: Path) -> None:
    kernel = start()
    session = kernel.run(SESSION)
    kernel.report("quiesce")
    for entry in database.parent.glob("history.sqlite*"):
        entry.unlink()
    kernel.report("thaw")
    kernel.run("x = 'on another node'")
    write_out(kernel)
    assert "on another node" in str(lines(database, session))
