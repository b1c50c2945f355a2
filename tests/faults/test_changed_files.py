"""Files that were changed while the kernel was away: named before anything starts, and taken as they are on demand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3

import pytest
from harness import CellFailed

from jupyter_gpu_ckpt.cli import main

OPEN = "log = open('training.log', 'w'); _ = log.write('epoch 1\\n'); log.flush()"


async def changed(subject, text: str):
    """A sleeping kernel whose log is ``text`` by now."""
    await subject.run(OPEN)
    image = await subject.provisioner.checkpoint()
    log = subject.directory / "training.log"
    log.write_text(text)
    return image, log


async def test_every_changed_file_is_named_and_nothing_is_started(subject):
    await subject.run("table = open('table.csv', 'w+'); _ = table.write('a,b\\n'); table.flush()")
    _, log = await changed(subject, "epoch 1\nand more\n")
    table = subject.directory / "table.csv"
    table.write_text("")
    error = await subject.fails(subject.provisioner.restore, "FILE_CHANGED")
    report = "\n".join(error.details["mismatches"])
    assert f"{log}: wanted 8 bytes, found 17 bytes" in report
    assert f"{table}: wanted 4 bytes, found 0 bytes" in report
    assert "criu_restore" not in [event.step for event in subject.kernel.steps.events]
    await subject.stays_away(error)
    with pytest.raises(CellFailed, match="--accept-changed-files"):
        await subject.run("x")


@pytest.mark.parametrize("text", ["epoch 1\nrotated\n", ""], ids=["grew", "shrank"])
async def test_accepted_once_the_kernel_continues_with_the_file_as_it_is(subject, text):
    _, log = await changed(subject, text)
    await subject.provisioner.restore(accept_changed_files=True)
    assert await subject.run("print(x, log.tell(), os.fstat(log.fileno()).st_size)") == f"41 8 {len(text)}"
    await subject.run("_ = log.write('epoch 2\\n'); log.close()")
    # It writes where it was, as any program does whose file was changed under it.
    assert log.read_bytes() == (text.encode().ljust(8, b"\0")[:8] + b"epoch 2\n")[: max(16, len(text))]
    left = [path.name for path in subject.kernel.lifecycle.home.runtime_dir.iterdir() if path.name.startswith("view")]
    assert left == []
    await subject.leaves_and_wakes()


async def test_the_trait_accepts_for_every_wake(subject):
    await changed(subject, "epoch 1\nrotated\n")
    settings = subject.kernel.lifecycle.kernel.settings
    assert settings.accept_changed_files is False
    subject.kernel.lifecycle.kernel.settings = type(settings)(**{**vars(settings), "accept_changed_files": True})
    await subject.wakes()


@pytest.mark.parametrize("answer", ["y", "n"])
async def test_the_user_is_prompted_in_the_notebook(subject, answer):
    _, log = await changed(subject, "epoch 1\nrotated\n")
    client = subject.kernel.client
    cell = client.execute("x += 1", user_expressions={"x": "x"}, allow_stdin=True)
    question = await client.get_stdin_msg(timeout=60)
    assert question["msg_type"] == "input_request"
    assert question["parent_header"]["msg_id"] == cell
    assert str(log) in question["content"]["prompt"]
    assert subject.kernel.lifecycle.capsule is None, "nothing was started before the answer"
    client.input(answer)
    while (reply := await client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != cell:
        pass
    if answer == "y":
        assert reply["content"]["user_expressions"]["x"]["data"]["text/plain"] == "42"
        await subject.kernel.settled("running")
    else:
        assert "FILE_CHANGED" in str(reply["content"])
        await subject.kernel.settled("checkpointed")
        await subject.stays_away()


async def test_a_shutdown_does_not_wait_for_the_answer(subject):
    await changed(subject, "")
    subject.kernel.client.execute("x", allow_stdin=True)
    await subject.kernel.client.get_stdin_msg(timeout=60)
    await asyncio.wait_for(subject.kernel.manager.shutdown_kernel(now=True), 60)
    assert not await subject.kernel.manager.is_alive()


async def test_the_command_line_accepts_for_the_next_wake(subject, capsys):
    image, log = await changed(subject, "epoch 1\nrotated\n")
    where = ["--image-dir", str(subject.images)]
    assert main(["match", image.id, *where]) == 66
    assert f"refused  {log}: wanted 8 bytes, found 16 bytes" in capsys.readouterr().out
    assert main(["match", image.id, "--json", "--accept-changed-files", *where]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"] is True
    assert [(one["field"], one["hard"], one["path"]) for one in report["mismatches"]] == [
        ("file_changed", False, str(log))
    ]
    await subject.wakes()
    assert not list(subject.images.glob(".*accepts")), "the next image is asked about anew"


async def test_a_file_that_is_gone_is_not_accepted(subject):
    _, log = await changed(subject, "epoch 1\n")
    log.unlink()
    error = await subject.fails(lambda: subject.provisioner.restore(accept_changed_files=True), "FILE_MISSING")
    assert error.details["culprit"] == str(log)
    await subject.stays_away(error)
    log.write_text("epoch 1\n")
    await subject.wakes()


async def test_a_mapped_file_that_shrank_is_not_accepted(subject):
    """A touch of what is not there any more would end the kernel."""
    await subject.run(
        "import mmap\nopen('map', 'wb').write(b'm' * 8192)\nf = open('map', 'r+b')\nm = mmap.mmap(f.fileno(), 8192)"
    )
    await subject.provisioner.checkpoint()
    os.truncate(subject.directory / "map", 4096)
    error = await subject.fails(lambda: subject.provisioner.restore(accept_changed_files=True), "FILE_CHANGED")
    await subject.stays_away(error)
    (subject.directory / "map").write_bytes(b"n" * 12288)
    await subject.provisioner.restore(accept_changed_files=True)
    assert await subject.run("print(m[8191:], len(m))") == "b'n' 8192"


async def test_a_log_that_is_appended_to_needs_no_word(subject):
    await subject.run("log = open('a.log', 'a'); _ = log.write('one '); log.flush()")
    await subject.provisioner.checkpoint()
    (subject.directory / "a.log").write_text("one two ")
    await subject.wakes()
    await subject.run("_ = log.write('three'); log.close()")
    assert (subject.directory / "a.log").read_text() == "one two three"


DATABASE = """
import sqlite3
db = sqlite3.connect("study.db", isolation_level=None)
db.execute("create table if not exists trial (value integer)")
db.execute("insert into trial values (1)")
total = lambda: db.execute("select count(*), sum(value) from trial").fetchone()
total()
"""


def write(path, values: int) -> None:
    """Write to a database as another program does."""
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.executemany("insert into trial values (?)", [(1,)] * values)


@pytest.mark.parametrize("values", [1, 9999], ids=["of the same size", "that grew"])
async def test_sqlite_notices_what_others_wrote_into_its_database(subject, values):
    await subject.run(DATABASE)
    image = await subject.provisioner.checkpoint()
    size = (subject.directory / "study.db").stat().st_size
    write(subject.directory / "study.db", values)
    assert ((subject.directory / "study.db").stat().st_size == size) == (values == 1)
    assert main(["match", image.id, "--image-dir", str(subject.images)]) == 0
    await subject.wakes()
    assert await subject.run("print(total())") == str((values + 1, values + 1))
    await subject.run("db.execute('insert into trial values (5)')")
    write(subject.directory / "study.db", 1)
    assert await subject.run("print(total(), db.execute('pragma integrity_check').fetchone())") == (
        f"{(values + 3, values + 7)} ('ok',)"
    )


@pytest.mark.parametrize(
    "transaction",
    [
        "db.execute('begin immediate'); db.execute('insert into trial values (2)')",
        "rows = db.execute(SLOW); next(rows)",
    ],
    ids=["that writes", "that reads"],
)
async def test_a_database_that_was_written_to_in_the_middle_of_a_transaction_is_refused(subject, transaction):
    await subject.run(DATABASE)
    await subject.run(
        "db.execute('begin'); db.executemany('insert into trial values (?)', [(1,)] * 9999); db.execute('commit')\n"
        "SLOW = 'select * from trial'"
    )
    await subject.run(transaction)
    await subject.provisioner.checkpoint()
    write(subject.directory / "study.db", 1)
    await subject.stays_away(await subject.fails(subject.provisioner.restore, "FILE_CHANGED"))


async def test_another_database_in_the_place_of_one_is_refused(subject):
    await subject.run(DATABASE)
    await subject.provisioner.checkpoint()
    shutil.copy(subject.directory / "study.db", subject.directory / "other.db")
    write(subject.directory / "other.db", 9999)
    os.replace(subject.directory / "other.db", subject.directory / "study.db")
    await subject.stays_away(await subject.fails(subject.provisioner.restore, "FILE_CHANGED"))


async def test_a_database_that_was_made_anew_is_refused(subject):
    """By the same steps: it may have the inode, the size and the change counter of the first, and other rows."""
    await subject.run(DATABASE)
    await subject.provisioner.checkpoint()
    (subject.directory / "study.db").unlink()
    with contextlib.closing(sqlite3.connect(subject.directory / "study.db", isolation_level=None)) as other:
        other.execute("create table trial (value integer)")
        other.execute("insert into trial values (7)")
    await subject.stays_away(await subject.fails(subject.provisioner.restore, "FILE_CHANGED"))


async def test_a_forked_child_does_not_bind_the_history_that_all_notebooks_share(subject):
    """The child has the database open by inheritance; this kernel, too, writes to it as soon as it is awake."""
    await subject.run("""
import os, time, multiprocessing
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(999,), daemon=True)
worker.start()
history = get_ipython().history_manager.hist_file
def opened(directory):
    for number in os.listdir(directory):
        try:
            yield os.readlink(directory + number)
        except FileNotFoundError:  # the child has closed it since
            pass
assert str(history) in opened(f"/proc/{worker.pid}/fd/")""")
    history = await subject.run("print(history)")
    await subject.provisioner.checkpoint()
    with contextlib.closing(sqlite3.connect(history)) as other, other:
        other.executemany("insert into sessions (start) values (?)", [("x" * 100,)] * 999)
    await subject.wakes()
    assert await subject.run("print(worker.is_alive())") == "True"
    await subject.leaves_and_wakes()
