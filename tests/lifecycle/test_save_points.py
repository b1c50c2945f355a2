"""Save points of real kernels, with real CRIU."""

from __future__ import annotations

import _ctypes
import _json
import contextlib
import errno
import filecmp
import functools
import json
import os
import re
import select
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock, Timeout
from harness import CellFailed, notebook

from jupyter_gpu_ckpt.capsule.protocol import SOCKET
from jupyter_gpu_ckpt.errors import (
    BadRequest,
    FilesDiffer,
    GpuCkptError,
    ImageBusy,
    MissingFile,
    NoSpace,
    QuotaExceeded,
    SavePointExists,
    SavePointNotFound,
    StateError,
)
from jupyter_gpu_ckpt.files import clone
from jupyter_gpu_ckpt.image import kept_files, layout, save_point, shared_chunks, verify
from jupyter_gpu_ckpt.image.draft import Draft
from jupyter_gpu_ckpt.image.image import Image
from jupyter_gpu_ckpt.image.quota import Quota
from jupyter_gpu_ckpt.image.save_point import SavePoint
from jupyter_gpu_ckpt.kernel import agent_requests
from jupyter_gpu_ckpt.lifecycle import dump, going_back, host_memory, preflight
from jupyter_gpu_ckpt.lifecycle.capsule_ahead import CapsuleAhead
from jupyter_gpu_ckpt.lifecycle.context import Saved

#: A file that is open under a name that was deleted, while it has another: CRIU makes a link of it.
LINKED = """
import os
x = 1
with open("first", "w") as file: file.write("content")
os.link("first", "second")
linked = open("first"); os.unlink("first")
"""


async def test_a_kernel_comes_back_from_its_save_point_as_often_as_it_is_wanted(kernel, tmp_path):
    await kernel.run(LINKED)
    lifecycle = kernel.lifecycle
    point = lifecycle.checkpoint(SavePoint("one"))
    assert not point.retired, "the kernel sleeps in it"
    assert await kernel.run("print(x); x = 2") == "1"
    await kernel.settled("running")
    assert (point.path.exists(), point.retired) == (True, True)
    for _ in range(2):  # IPython has saved lines of these numbers before
        asleep = lifecycle.checkpoint()
        lifecycle.kernel.image = point
        assert await kernel.run("print(x, linked.read()); x = 3") == "1 content"
        await kernel.settled("running")
        lifecycle.engine.store.check(point)
        lifecycle.engine.store.remove(asleep)
    assert lifecycle.engine.store.images() == [point]
    lifecycle.engine.store.remove(point)
    assert [path.name for path in tmp_path.glob("*link_remap*")] == []


async def test_the_save_point_of_a_kernel_that_is_killed_since_its_dump_is_kept(kernel):
    """Going back to it brings everything, in the kernel that is started then."""
    await kernel.run("x = 1")
    pid = kernel.lifecycle.capsule.host_pid

    def kill(event) -> None:
        if (event.kind, event.step) == ("completed", "dump"):
            os.kill(pid, signal.SIGKILL)

    kernel.provisioner.sinks.append(kill)
    point = await kernel.provisioner.save("one")
    kernel.provisioner.sinks.remove(kill)
    assert (kernel.state, point.retired) == ("dead", True)
    await kernel.manager.restart_kernel(now=True)
    await kernel.client.wait_for_ready(timeout=60)
    await kernel.provisioner.back("one")
    assert await kernel.run("print(x)") == "1"


async def test_a_check_for_going_back_changes_nothing_of_a_dump_under_way_nor_of_a_branch(kernel, tmp_path):
    """A request for it is checked whatever the kernel does: its dump has made a link of the name that is compared."""
    await kernel.run(LINKED)
    point = await kernel.provisioner.save("one")
    links: list[list[str]] = []
    turns: list[bool] = []

    def check(event) -> None:
        if (event.kind, event.step) == ("completed", "dump"):
            links.append(sorted(path.name for path in tmp_path.glob("link_remap.*")))
            going_back.check(kernel.lifecycle.kernel, point, None)
            links.append(sorted(path.name for path in tmp_path.glob("link_remap.*")))
        if (event.kind, event.step) == ("completed", "match"):
            lock = FileLock(layout.mark(kernel.lifecycle.image.path, layout.TURN), timeout=0)
            try:
                lock.acquire()
            except Timeout:
                turns.append(True)
            else:
                lock.release()

    kernel.provisioner.faults.append(check)
    await kernel.provisioner.checkpoint()
    assert links[0] == links[1]
    assert len(links[0]) == 2, "one of the save point, and one of the image"
    assert await kernel.run("print(linked.read())") == "content"
    await kernel.run("linked.seek(0)")
    await kernel.provisioner.back("one")
    assert await kernel.run("print(linked.read())") == "content"
    assert turns == [True, True], "a branch could be restored at the same time, by the same names"


async def test_the_capsule_to_go_back_in_is_made_beside_the_kernel_and_never_in_its_place(kernel, runtime_base):
    """A server that finds the directory before the process has ended finds the kernel, which waits in it."""
    await kernel.run("x = 1")
    point = await kernel.provisioner.save("one")
    lifecycle, directory = kernel.lifecycle, kernel.lifecycle.home.runtime_dir
    pid, own = lifecycle.capsule.host_pid, (directory / SOCKET).stat().st_ino

    def beside() -> list[Path]:
        return sorted(runtime_base.glob(f"{directory.name}.*"))

    def inspect(event) -> None:
        if (event.kind, event.step) == ("completed", "publish"):
            assert (directory / SOCKET).stat().st_ino == own
            assert Path(f"/proc/{pid}").exists()
            assert lifecycle.kernel.ahead is not None

    kernel.provisioner.faults.append(inspect)
    await kernel.provisioner.back("one")
    assert await kernel.run("print(x)") == "1"
    kernel.provisioner.faults.remove(inspect)
    assert lifecycle.kernel.ahead is None
    [inside] = beside()
    assert (directory / SOCKET).samefile(inside / SOCKET)

    ahead = CapsuleAhead(point, functools.partial(lifecycle.home.create_capsule, point, beside=True))
    assert ahead.claim(lifecycle.engine.store.images()[-1]) is None, "its clocks are those of another state"
    gone = CapsuleAhead(point, functools.partial(lifecycle.home.create_capsule, point, beside=True))
    gone._task.wait()
    os.kill(gone._capsule._init_pid, signal.SIGKILL)
    select.select([gone._capsule._init_fd], [], [])
    assert gone.claim(point) is None
    assert beside() == [inside]
    assert await kernel.run("print(x)") == "1"
    await kernel.provisioner.checkpoint()
    assert beside() == []
    assert not os.path.lexists(directory / SOCKET)


@pytest.mark.parametrize("restores_ahead", [True, False])
async def test_nobody_deletes_the_save_point_that_a_kernel_goes_back_to(kernel, monkeypatch, restores_ahead):
    await kernel.run("x = 1")
    store = kernel.lifecycle.engine.store
    monkeypatch.setattr(host_memory, "may_restore_ahead", lambda *_: restores_ahead)
    point = await kernel.provisioner.save("one")
    await kernel.run("x = 2")
    refused: list[str] = []

    def delete(event) -> None:
        if event.kind == "started" and event.step in ("drain", "dump", "publish", "match", "criu_restore", "release"):
            with pytest.raises(ImageBusy):
                store.remove(point)
            refused.append(event.step)

    kernel.provisioner.faults.append(delete)
    await kernel.provisioner.back("one")
    kernel.provisioner.faults.remove(delete)
    assert refused == ["drain", "dump", "publish", "match", "criu_restore", "release"]
    assert await kernel.run("print(x)") == "1"
    store.remove(point)
    assert kernel.lifecycle.kernel.point_lease is None


async def test_a_going_back_that_is_refused_leaves_its_save_point_to_others(kernel):
    await kernel.run("x = 1")
    point = await kernel.provisioner.save("one")

    def fails(event) -> None:
        if (event.kind, event.step) == ("started", "dump"):
            raise NoSpace("no")

    kernel.provisioner.faults.append(fails)
    with pytest.raises(NoSpace):
        await kernel.provisioner.back("one")
    kernel.provisioner.faults.remove(fails)
    with point.lease():
        assert await kernel.run("print(x)") == "1"


TICKING = """
import threading, time
ticks = 0
def tick():
    global ticks
    while True:
        ticks += 1
        time.sleep(0.001)
threading.Thread(target=tick, daemon=True).start()
values, text = list(range(1000)), "x" * 5000
"""


async def test_a_save_leaves_the_kernel_running_and_a_save_point_with_a_summary(kernel, tmp_path):
    await kernel.run(LINKED)
    await kernel.run(TICKING)
    lifecycle, store = kernel.lifecycle, kernel.lifecycle.engine.store
    pid = lifecycle.capsule.host_pid
    point = lifecycle.save(SavePoint("one"))
    assert (kernel.state, lifecycle.capsule.host_pid, lifecycle.image) == ("running", pid, None)
    assert [event.step for event in kernel.steps.completed()] == [
        *("preflight", "drain", "quiesce", "cuda_suspend", "disconnect", "dump", "continue"),
        *("reserve", "cuda_resume", "unreserve", "connect", "thaw", "release", "keep"),
    ]
    store.check(point)
    assert (point.retired, (point.path / layout.CLAIM).exists()) == (True, False)
    facts = save_point.of_image(point)
    assert facts is not None
    assert facts.cell == 2
    assert [(each["name"], each["type"]) for each in facts.variables[:2]] == [("values", "list"), ("text", "str")]
    assert {"x", "linked", "ticks"} < {each["name"] for each in facts.variables}
    assert facts.variables[0]["bytes"] > 8000

    assert await kernel.run("was = ticks\nwhile ticks == was: pass\nprint(x, linked.read())") == "1 content"
    with pytest.raises(SavePointExists):
        lifecycle.save(SavePoint("one"))
    again = lifecycle.save(SavePoint("two"))  # its dump makes a link of the same name
    assert [*save_point.of_kernel(store.images(), lifecycle.home.kernel_id).values()] == [point, again]

    lifecycle.checkpoint()
    lifecycle.kernel.image = point
    assert await kernel.run("linked.seek(0); print(x, 'was' in dir(), linked.read())") == "1 False content"


def test_of_a_kernel_without_an_agent_no_variable_is_called_new():
    kernel = SimpleNamespace(saved=Saved(), parent="")
    before = save_point.from_summary(dump._save_point(SimpleNamespace(kernel=kernel, save_point=SavePoint("one"))))
    after = SavePoint("two", variables=[{"name": "x", "type": "int", "bytes": 28}])
    compared = save_point.compare(before, after)
    assert (compared["added"], compared["complete"]) == ([], False)
    assert [each["name"] for each in compared["unknown"]] == ["x"]


async def test_the_next_cells_find_a_save_point_that_is_not_published_yet(kernel, monkeypatch):
    """Also a cell that runs before the worker has noted that the gate was released."""
    released, published = threading.Event(), threading.Event()
    release, publish = kernel.lifecycle.kernel.gate.release, Draft.publish
    monkeypatch.setattr(kernel.lifecycle.kernel.gate, "release", lambda: (release(), released.wait(60)))
    monkeypatch.setattr(Draft, "publish", lambda *args, **kwargs: (published.wait(60), publish(*args, **kwargs))[1])
    monkeypatch.setattr(agent_requests, "_PUBLISH_TIMEOUT", 0.1)
    await kernel.run("x = 1")
    await kernel.run("%gpu_checkpoint --save one")
    await kernel.run("x = 2")
    for event in (released, published):
        with pytest.raises(CellFailed, match=r"IMAGE_BUSY.*there is none 'one' yet"):
            await kernel.run("%gpu_checkpoint --compare one")
        assert kernel.lifecycle.engine.store.images() == []
        event.set()
    monkeypatch.setattr(agent_requests, "_PUBLISH_TIMEOUT", 60)
    assert re.search(r"^x +changed", await kernel.run("%gpu_checkpoint --compare one"), re.MULTILINE)


async def said(kernel, *cells: str) -> list[str]:
    """Send the cells at once; of each what it printed, or the code of the error, which stops no cell after it."""
    printed: dict[str, str] = {kernel.client.execute(cell, stop_on_error=False): "" for cell in cells}
    ended: set[str] = set()
    while ended < printed.keys():
        message = await kernel.client.get_iopub_msg(timeout=60)
        id, content = message["parent_header"].get("msg_id"), message["content"]
        if id in printed:
            printed[id] += content.get("text", "") if message["msg_type"] == "stream" else ""
            printed[id] += content["evalue"] if message["msg_type"] == "error" else ""
            ended |= {id} if content.get("execution_state") == "idle" else set()
    return [text.strip() for text in printed.values()]


async def test_no_cell_runs_between_a_save_and_a_going_back_of_one_cell(kernel):
    await kernel.run("x = 'first'; y = []\n%gpu_checkpoint --save a")
    await kernel.run("x = 'second'")
    magics = "%gpu_checkpoint --save c\n%gpu_checkpoint --back a"
    kernel.client.execute(magics)
    while (await kernel.client.get_shell_msg(timeout=60))["content"].get("status") != "ok":
        pass
    assert (await said(kernel, "y.append(x)", "print(x, y)"))[1] == "first ['first']"
    assert await kernel.run("print(x, y)") == "first ['first']"
    await kernel.provisioner.back("c")
    assert await kernel.run("print(x, y)") == "second []"


async def test_a_cell_that_fails_to_save_before_it_goes_back_says_so_in_the_next_one(kernel, monkeypatch):
    await kernel.run("x = 1\n%gpu_checkpoint --save a")
    await kernel.run("x = 2")

    def fail(*_: object, **__: object) -> None:
        raise NoSpace("The disk is full.")

    monkeypatch.setattr(kernel.lifecycle, "save", fail)
    await kernel.run("%gpu_checkpoint --save c\n%gpu_checkpoint --back a")
    assert "NO_SPACE" in await kernel.run("print(x)", stream="stderr")
    assert await kernel.run("print(x)") == "1"


async def test_what_a_cell_requests_after_it_has_requested_to_go_back_is_refused(kernel):
    await kernel.run("import time; x = 1\n%gpu_checkpoint --save a")
    await kernel.run("x = 2\n%gpu_checkpoint --save b")
    await kernel.run("x = 3\n%gpu_checkpoint --saves")
    for later in ("--back b", "--save c", "--branch b"):
        [refused] = await said(kernel, f"%gpu_checkpoint --back a\n%gpu_checkpoint {later}")
        assert "goes back to 'a', which is done before this" in refused
        assert await kernel.run("print(x); x = 3") == "1"
    sent = await said(kernel, "%gpu_checkpoint --back b\ntime.sleep(1)", "%gpu_checkpoint --back a", "x = 4")
    assert "goes back to 'b', which is done before this" in sent[1]
    assert await kernel.run("print(x)") == "2"
    [refused] = await said(kernel, "x = 5\n%gpu_checkpoint --save c\n%gpu_checkpoint --back c")
    assert refused.endswith("The save point 'c' is made when the cells that run or wait have ended.")
    [refused] = await said(kernel, "%gpu_checkpoint --save d\n%gpu_checkpoint --save d")
    assert refused.endswith("A cell has requested a save point 'd' already.")
    [refused] = await said(kernel, "%gpu_checkpoint --branch\n%gpu_checkpoint --back c")
    assert refused.endswith("A branch from this kernel as it is now begins when this cell has ended.")
    await kernel.run("x = 6\n%gpu_checkpoint --back c")
    assert await kernel.run("print(x)") == "5"


async def test_a_suspended_kernel_is_saved_as_it_is(kernel):
    await kernel.run("x = 1")
    await kernel.provisioner.suspend()
    point = kernel.lifecycle.save(SavePoint("one"))
    assert kernel.state == "suspended"
    kernel.lifecycle.engine.store.check(point)
    await kernel.provisioner.checkpoint()
    with pytest.raises(StateError) as caught:
        kernel.lifecycle.save(SavePoint("two"))
    assert "Wake it first" in caught.value.hint
    assert "history" not in caught.value.details
    assert await kernel.run("print(x)") == "1"


async def test_a_kernel_goes_back_and_forth_under_its_id_while_its_clients_stay_connected(kernel):
    await kernel.run(LINKED)
    await kernel.provisioner.save("one", b'{"cells": []}')
    await kernel.run("x = 2; y = 5")
    store, kernel_id = kernel.lifecycle.engine.store, kernel.provisioner.kernel_id
    before = await kernel.provisioner.back("one", notebook=b'{"cells": [1]}')
    assert await kernel.run("print(x, 'y' in dir(), linked.read())") == "1 False content"
    facts = save_point.of_image(before)
    assert facts is not None
    assert (facts.automatic, before.retired, kernel.provisioner.kernel_id) == (True, True, kernel_id)
    one = save_point.find(store.images(), kernel_id, "one")
    assert [save_point.notebook(store, each) for each in (one, before)] == [b'{"cells": []}', b'{"cells": [1]}']

    await kernel.provisioner.back(facts.name)
    assert await kernel.run("print(x, y)") == "2 5"
    await kernel.provisioner.checkpoint()
    await kernel.provisioner.back("one")
    assert await kernel.run("print(x)") == "1"
    with pytest.raises(SavePointNotFound, match="'two'"):
        await kernel.provisioner.back("two")
    assert [image.retired for image in store.images()] == [True] * 4
    kernel.lifecycle.kernel.settings = replace(kernel.lifecycle.kernel.settings, automatic_save_points=2)
    going_back.thin_out(kernel.lifecycle.kernel)
    assert len(store.images()) == 3
    point = await kernel.provisioner.branch_image()
    assert len(store.images()) == 3, "those that branches start from are counted, too"
    assert one in store.images()
    assert point in store.images()


async def test_openssl_gives_no_numbers_twice_to_a_kernel_that_goes_back(kernel):
    """Keys are made of them.  Other generators continue as they were, to repeat what was computed."""
    await kernel.run("import random, ssl; random.seed(1); n = ssl.RAND_bytes(8)")
    await kernel.provisioner.save("one")
    found, draw = [], "import json; print(json.dumps([ssl.RAND_bytes(16).hex(), random.random()]))"
    for _ in range(3):
        found.append(json.loads(await kernel.run(draw)))
        await kernel.provisioner.back("one")
    numbers, floats = zip(*found, strict=True)
    assert (len({*numbers}), len({*floats})) == (3, 1)


DATABASE = """
import sqlite3
db = sqlite3.connect("db", isolation_level=None); n = db.execute("PRAGMA cache_size = 5")
n = db.execute("CREATE TABLE t(a, b)")
def add(first): db.executemany("INSERT INTO t VALUES(?, hex(randomblob(300)))", [(first + i,) for i in range(100)])
def state(): return db.execute("SELECT count(*), min(a) FROM t").fetchone(), db.execute("PRAGMA quick_check").fetchone()
add(0)
"""


async def test_a_database_is_as_then_without_the_journal_of_now_and_its_connection_can_write(kernel, tmp_path):
    """SQLite applies a journal that it finds, and its connections write to no other file than they have opened."""
    await kernel.run(DATABASE)
    await kernel.provisioner.save("one")
    await kernel.run("add(100); n = db.execute('DELETE FROM t WHERE a < 50')")
    await kernel.run("n = db.execute('BEGIN IMMEDIATE'); n = db.execute('UPDATE t SET b = hex(randomblob(400))')")
    assert (tmp_path / "db-journal").stat().st_size
    before = await kernel.provisioner.back("one", "then")
    assert not (tmp_path / "db-journal").exists()
    assert await kernel.run("print(*state())") == "(100, 0) ('ok',)"
    await kernel.run("add(100)")
    await kernel.provisioner.back(before.manifest.save_point["name"], "then")
    assert await kernel.run("print(db.in_transaction); db.rollback(); print(*state())") == "True\n(150, 50) ('ok',)"
    await kernel.run("add(200)")


async def test_a_database_in_a_transaction_of_another_program_is_not_put_back(kernel, tmp_path):
    await kernel.run(DATABASE)
    await kernel.provisioner.save("one")
    await kernel.run("x = 2; add(100)")
    with contextlib.closing(sqlite3.connect(tmp_path / "db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("DELETE FROM t")
        with pytest.raises(MissingFile, match="db-journal belongs to its present content"):
            await kernel.provisioner.back("one", "then")
        other.execute("COMMIT")
    assert await kernel.run("print(x, *state())") == "2 (0, None) ('ok',)"


WRITES = """
log = open("log", "w+"); log.write("begun "); log.flush()
table = open("table", "r+"); size = table.seek(0, 2)
import mmap; code = open("code"); mapped = mmap.mmap(code.fileno(), 0, prot=mmap.PROT_READ); code.close()
"""


@pytest.mark.parametrize("choice", ["then", "now"])
async def test_files_are_as_then_or_as_now_and_never_overwritten_without_a_word(kernel, tmp_path, choice):
    for name in ("table", "code"):
        (tmp_path / name).write_text(f"old {name} " * 1000)
    await kernel.run(WRITES)
    await kernel.provisioner.save("one")
    await kernel.run("n = log.write('continued'); log.flush()")
    (tmp_path / "table").write_text("new table " * 1000)
    (tmp_path / "new").write_text("new code " * 1000)
    (tmp_path / "new").replace(tmp_path / "code")  # as an installer does
    with pytest.raises(FilesDiffer) as caught:
        await kernel.provisioner.back("one")
    differing = {Path(each["path"]).name: each["choices"] for each in caught.value.details["files"]}
    assert differing == {"code": ["then", "now"], "log": ["then", "now"], "table": ["then", "now"]}
    assert (tmp_path / "log").read_text() == "begun continued"
    assert await kernel.run("print(n)") == "9", "it is not disturbed"

    some = {str(tmp_path / name): choice for name in ("code", "log")}
    with pytest.raises(FilesDiffer) as caught:
        await kernel.provisioner.back("one", some)
    assert [Path(each["path"]).name for each in caught.value.details["files"]] == ["table"]
    with pytest.raises(BadRequest, match="not have: 'log'"):
        await kernel.provisioner.back("one", {"log": "then"})
    if choice == "then":  # what is replaced is kept, whatever else is not
        kernel.lifecycle.kernel.settings = replace(kernel.lifecycle.kernel.settings, kept_file_bytes=0)
    before = await kernel.provisioner.back("one", {**some, str(tmp_path / "table"): "then"})
    assert (tmp_path / "table").read_text() == "old table " * 1000
    assert (tmp_path / "log").read_text() == ("begun " if choice == "then" else "begun continued")
    assert (tmp_path / "code").read_text().startswith("old" if choice == "then" else "new")
    assert await kernel.run("print('n' in dir(), mapped[:3])") == f"False {b'old' if choice == 'then' else b'new'}"
    await kernel.run("log.write('anew'); log.close()")
    assert (tmp_path / "log").read_text().startswith("begun anew")

    facts = save_point.of_image(before)
    assert facts is not None
    await kernel.provisioner.back(facts.name, "then")
    assert (tmp_path / "table").read_text() == "new table " * 1000
    assert (tmp_path / "log").read_text() == "begun continued"
    assert await kernel.run("print(n)") == "9"


async def test_a_file_whose_directory_has_gone_comes_back_with_its_attributes_and_its_directory(kernel, tmp_path):
    made = "import os; os.makedirs('a/day'); log = open('a/day/log', 'w'); log.write('then'); log.flush()"
    await kernel.run(f"{made}; os.setxattr('a/day/log', 'user.origin', b'then')")
    await kernel.provisioner.save("one")
    await kernel.run("import shutil; shutil.rmtree('a'); x = 41")
    before = await kernel.provisioner.back("one", "then")
    read = "print(os.getxattr(log.fileno(), 'user.origin'), open('a/day/log').read())"
    assert await kernel.run(read) == "b'then' then"
    assert (tmp_path / "a" / "day").stat().st_mode & 0o7777 == 0o700
    facts = save_point.of_image(before)
    assert facts is not None
    await kernel.provisioner.back(facts.name)
    assert await kernel.run("print(x, log.tell())") == "41 4"


async def test_only_choices_that_can_be_done_are_offered_and_others_are_refused_before(kernel, tmp_path, monkeypatch):
    """A directory that cannot be made again, a file that is gone, one of which there is no copy."""
    monkeypatch.setattr(clone, "_FICLONE", 0)
    kernel.lifecycle.kernel.settings = replace(kernel.lifecycle.kernel.settings, kept_file_bytes=100)
    made = "import os; os.mkdir('day'); log = open('day/log', 'w'); log.write('then'); log.flush()"
    await kernel.run(f"{made}; gone = open('gone', 'w'); large = open('large', 'w'); n = large.write('a' * 200)")
    await kernel.run("both = open('both', 'w'); large.flush(); both.flush()")
    await kernel.provisioner.save("one")
    await kernel.run("n = large.write('b'), both.write('b'); large.flush(); both.flush(); os.unlink('gone')")
    kernel.steps.events.clear()
    with pytest.raises(FilesDiffer) as caught:
        await kernel.provisioner.back("one")
    choices = {Path(each["path"]).name: each["choices"] for each in caught.value.details["files"]}
    assert choices == {"both": ["then", "now"], "gone": ["then"], "large": ["now"]}
    offered = f"{tmp_path}/both: then or now; {tmp_path}/gone: then; {tmp_path}/large: now"
    assert caught.value.hint == f"Choose for each (`--files PATH=then PATH=now`): {offered}."
    with pytest.raises(FilesDiffer, match=r"/gone cannot be used as it is now: .* found no file") as caught:
        await kernel.provisioner.back("one", "now")
    assert f"Choose `then` for such a file by its path (`--files {tmp_path}/gone=then`)" in caught.value.hint
    for directory in ("a file", "a link to nowhere"):
        await kernel.run("import shutil; shutil.rmtree('day', ignore_errors=True)")
        (tmp_path / "day").touch() if directory == "a file" else (tmp_path / "day").symlink_to("nowhere")
        with pytest.raises(FilesDiffer, match=r"/day/log \(and 1 more\) cannot be put back") as caught:
            await kernel.provisioner.back("one", "then")
        choices = {Path(each["path"]).name: each["choices"] for each in caught.value.details["files"]}
        assert choices == {"log": [], "large": ["now"]}
        assert (
            f"Put {tmp_path}/day/log back as it was, and try again: {tmp_path}/day is no directory" in caught.value.hint
        )
        (tmp_path / "day").unlink()
    assert not {event.step for event in kernel.steps.events} & {"drain", "dump", "match"}, "it is not disturbed"
    chosen = {str(tmp_path / "large"): "now", str(tmp_path / "both"): "now"}
    await kernel.provisioner.back("one", {**chosen, **{str(tmp_path / name): "then" for name in ("gone", "day/log")}})
    assert (tmp_path / "day" / "log").read_text() == "then"


LIBRARY = "import ctypes; library = ctypes.CDLL('./_lib.so')"


def replace_library(directory: Path) -> None:
    """Install another version.  The old one has another name: else an ordinary user's kernel could not be saved."""
    (directory / "_lib.so").rename(directory / "kept")
    shutil.copy(_json.__file__, directory / "_lib.so")


def code(image: Image) -> dict[str, os.stat_result]:
    return {each.name: each.stat() for each in (image.criu_directory / layout.KEPT / layout.LIBRARIES).glob("*")}


async def test_a_library_that_was_replaced_is_put_back_from_the_copy_that_save_points_share(
    kernel, tmp_path, monkeypatch
):
    monkeypatch.setattr(clone, "_FICLONE", 0)  # as on a file system without reflinks
    shutil.copy(_ctypes.__file__, tmp_path / "_lib.so")
    await kernel.run(LIBRARY)
    first = await kernel.provisioner.save("one")
    second = await kernel.provisioner.save("two")
    assert len(code(first)) > 10
    assert {name: facts.st_ino for name, facts in code(first).items()} == {
        name: facts.st_ino for name, facts in code(second).items()
    }
    size = sum(facts.st_size for facts in code(first).values())
    assert shared_chunks.bytes_alone(second) <= second.manifest.bytes - size
    replace_library(tmp_path)
    with pytest.raises(FilesDiffer) as caught:
        await kernel.provisioner.back("one")
    assert [each["choices"] for each in caught.value.details["files"]] == [["then"]]
    kernel.lifecycle.engine.store.remove(second)
    before = await kernel.provisioner.back("one", "then")
    assert await kernel.run("print(library._name)") == "./_lib.so"
    assert filecmp.cmp(tmp_path / "_lib.so", _ctypes.__file__, shallow=False)
    verify.verify(first.path, kernel.lifecycle.engine.store.keys)
    await kernel.provisioner.back(before.manifest.save_point["name"], "then")
    assert filecmp.cmp(tmp_path / "_lib.so", _json.__file__, shallow=False)


async def test_a_kernel_that_sleeps_goes_back_to_the_libraries_that_were_replaced_meanwhile(
    kernel, tmp_path, monkeypatch
):
    monkeypatch.setattr(clone, "_FICLONE", 0)  # as on a file system without reflinks
    shutil.copy(_ctypes.__file__, tmp_path / "_lib.so")
    await kernel.run(f"{LIBRARY}; x = 1")
    await kernel.provisioner.save("one")
    await kernel.run("x = 2")
    await kernel.provisioner.checkpoint()
    (tmp_path / "_lib.so").unlink()
    shutil.copy(_json.__file__, tmp_path / "_lib.so")
    with pytest.raises(FilesDiffer):
        await kernel.provisioner.back("one")
    assert filecmp.cmp(tmp_path / "_lib.so", _json.__file__, shallow=False), "nobody has chosen yet"
    before = await kernel.provisioner.back("one", "then")
    assert await kernel.run("print(x, library._name)") == "1 ./_lib.so"
    assert filecmp.cmp(tmp_path / "_lib.so", _ctypes.__file__, shallow=False)
    await kernel.provisioner.back(before.manifest.save_point["name"])
    assert await kernel.run("print(x, library._name)") == "2 ./_lib.so"


@pytest.mark.parametrize("mode", [0o755, 0o640])
async def test_a_package_that_was_removed_is_put_back_for_all_who_could_use_it(kernel, tmp_path, monkeypatch, mode):
    monkeypatch.setattr(clone, "_FICLONE", 0)  # as on a file system without reflinks
    library = tmp_path / "package" / "_lib.so"
    library.parent.mkdir()
    shutil.copy(_ctypes.__file__, library)
    library.chmod(mode)
    await kernel.run("import ctypes; library = ctypes.CDLL('./package/_lib.so')")
    await kernel.provisioner.save("one")
    library.rename(tmp_path / "kept")  # else an ordinary user's kernel could not be saved
    library.parent.rmdir()
    await kernel.provisioner.back("one", "then")
    assert [stat.S_IMODE(each.stat().st_mode) for each in (library, library.parent)] == [mode, 0o750 | mode & 0o5]


async def test_a_library_that_was_replaced_and_not_copied_has_no_choice_and_the_hint_says_so(
    tmp_path, runtime_base, criu_binary, monkeypatch
):
    monkeypatch.setattr(clone, "_FICLONE", 0)  # as on a file system without reflinks
    shutil.copy(_ctypes.__file__, tmp_path / "_lib.so")
    async with notebook(tmp_path, runtime_base, save_point_code_bytes=0) as kernel:
        await kernel.run(LIBRARY)
        await kernel.provisioner.save("one")
        replace_library(tmp_path)
        for files in (None, "now", "then"):
            with pytest.raises(FilesDiffer) as caught:
                await kernel.provisioner.back("one", files)
            assert [each["choices"] for each in caught.value.details["files"]] == [[]]
            how = f"Put {tmp_path}/_lib.so back as it was (program code: install that version again), and try again: "
            assert caught.value.hint.startswith(how)
        (tmp_path / "kept").replace(tmp_path / "_lib.so")
        await kernel.provisioner.back("one")
        assert await kernel.run("print(library._name)") == "./_lib.so"


async def test_the_limit_of_program_code_is_one_of_each_save_point_and_not_of_each_save(
    tmp_path, runtime_base, criu_binary, monkeypatch
):
    monkeypatch.setattr(clone, "_FICLONE", 0)  # as on a file system without reflinks
    limit = 4 << 20
    async with notebook(tmp_path, runtime_base, save_point_code_bytes=limit) as kernel:
        points = [code(await kernel.provisioner.save(name)) for name in ("one", "two")]
    assert limit // 2 < sum(facts.st_size for facts in points[0].values()) <= limit
    assert points[1].keys() == points[0].keys()


@pytest.mark.parametrize("shares", [True, False])
async def test_of_program_code_a_save_point_has_only_a_part_of_what_the_quota_permits(
    kernel, tmp_path, monkeypatch, shares
):
    monkeypatch.setattr(clone, "_FICLONE", 0)  # as on a file system without reflinks
    store, large, used = kernel.lifecycle.engine.store, 256 << 20, 0
    shutil.copy(_ctypes.__file__, tmp_path / "_lib.so")
    os.truncate(tmp_path / "_lib.so", large)  # the loader ignores what is behind its sections
    await kernel.run(LIBRARY)
    if shares:
        first = await kernel.provisioner.save("one")
        used = first.manifest.bytes
        assert large in {facts.st_size for facts in code(first).values()}
    needed = host_memory.resident(kernel.lifecycle.kernel) + preflight.MARGIN
    monkeypatch.setattr(store, "quota", Quota(bytes=used + needed + 2 * large))
    second = await kernel.provisioner.save("two")
    assert 0 < sum(facts.st_size for facts in code(second).values()) < large
    store.check(second)
    await kernel.provisioner.save("three")


async def test_a_quota_that_copies_of_program_code_would_exceed_prevents_no_save(kernel, monkeypatch):
    monkeypatch.setattr(clone, "_FICLONE", 0)  # as on a file system without reflinks

    def exceeded(draft: Draft, bytes: int) -> None:
        raise QuotaExceeded("It would.")

    monkeypatch.setattr(Draft, "reserve", exceeded)
    await kernel.run("x = 1")
    point = await kernel.provisioner.save("one")
    assert not code(point)
    await kernel.run("x = 2")
    await kernel.provisioner.back("one")
    assert await kernel.run("print(x)") == "1"


async def test_a_file_that_cannot_be_put_back_leaves_the_present_state_and_says_what_to_do(
    kernel, tmp_path, monkeypatch
):
    await kernel.run("log = open('log', 'w'); log.write('then'); log.flush(); x = 40")
    await kernel.provisioner.save("one")
    await kernel.run("log.write(' and now'); log.flush(); x = 41")

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(kept_files, "put_back", read_only)
    with pytest.raises(MissingFile, match="Read-only file system") as caught:
        await kernel.provisioner.back("one", "then")
    assert caught.value.hint == f"Allow new files in {tmp_path}, or go back with the file as it is now (`--files now`)."
    assert await kernel.run("print(x, log.tell())") == "41 12"


MAPPED = """
import mmap
with open("mapped", "w+b") as file: file.write(b"." * 8192); file.flush(); mapped = mmap.mmap(file.fileno(), 0)
mapped[:5] = b"first"
"""


async def test_a_store_to_a_mapped_page_that_was_dirty_at_a_save_is_a_change_of_its_file(kernel, tmp_path):
    await kernel.run(MAPPED)
    await kernel.provisioner.save("one")
    await kernel.run("mapped[:5] = b'other'")
    with pytest.raises(FilesDiffer) as caught:
        await kernel.provisioner.back("one")
    assert [Path(each["path"]).name for each in caught.value.details["files"]] == ["mapped"]
    before = await kernel.provisioner.back("one", "then")
    assert await kernel.run("print(mapped[:5])") == "b'first'"
    await kernel.run("mapped[:5] = b'again'")
    facts = save_point.of_image(before)
    assert facts is not None
    await kernel.provisioner.back(facts.name, "then")
    assert await kernel.run("print(mapped[:5])") == "b'other'"


#: A database whose data and lock file are mapped and written to, and a file that is written past the page cache.
async def test_nobody_is_asked_about_the_counters_of_a_java_virtual_machine(kernel):
    with tempfile.TemporaryDirectory(prefix="hsperfdata_", dir="/tmp") as place:
        await kernel.run(MAPPED.replace('"mapped"', f'"{place}/123"'))
        await kernel.provisioner.save("one")
        await kernel.run("mapped[:5] = b'other'")
        await kernel.provisioner.back("one")
        assert await kernel.run("print(mapped[:5])") == "b'first'"


async def test_the_history_of_ipython_stays_as_it_is_also_of_a_kernel_without_an_agent(kernel, tmp_path):
    """xeus-python has it open all the time, as this kernel has another profile's."""
    (tmp_path / "profile_default").mkdir()
    code = "import sqlite3; history = sqlite3.connect('profile_default/history.sqlite', isolation_level=None)\n"
    await kernel.run(code + "_ = history.execute('create table lines (line)'); x = 1")
    await kernel.provisioner.save("one")
    await kernel.run("_ = history.execute('insert into lines values (1)'); x = 2")
    await kernel.provisioner.back("one")
    assert await kernel.run("print(x, history.execute('select * from lines').fetchall())") == "1 [(1,)]"


STORES = """
import fcntl, lmdb, mmap, os
store = lmdb.open("store", map_size=1 << 22)
def put(value):
    with store.begin(write=True) as transaction: transaction.put(b"key", value)
def get():
    with store.begin() as transaction: return transaction.get(b"key")
direct = os.open("direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
page = mmap.mmap(-1, 4096)
def write(number):
    page[:] = b"%d" % number * 4096
    assert os.pwritev(direct, [page], 4096 * number) == 4096
def state():
    flags = fcntl.fcntl(direct, fcntl.F_GETFL)
    return get(), os.fstat(direct).st_size // 4096, bool(flags & os.O_DIRECT)
put(b"one"); write(0)
"""
#: Another program that opens the database.
READS = "import lmdb; e = lmdb.open('store'); t = e.begin(); print(t.get(b'key'), e.stat()['entries'])"


async def test_a_database_of_lmdb_and_a_file_past_the_page_cache_are_as_then_and_can_be_changed(kernel, tmp_path):
    def read() -> str:
        done = subprocess.run([sys.executable, "-c", READS], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    await kernel.run(STORES)
    await kernel.provisioner.save("one")
    await kernel.run("put(b'two'); write(1)")
    assert read() == "b'two' 1"
    with pytest.raises(FilesDiffer) as caught:
        await kernel.provisioner.back("one")
    assert {"data.mdb", "direct"} <= {Path(each["path"]).name for each in caught.value.details["files"]}
    assert await kernel.run("print(state())") == "(b'two', 2, True)", "it is not disturbed"

    before = await kernel.provisioner.back("one", "then")
    assert await kernel.run("print(state())") == "(b'one', 1, True)"
    assert read() == "b'one' 1"
    await kernel.run("put(b'three'); write(1); write(2)")
    assert await kernel.run("print(state())") == "(b'three', 3, True)"
    assert read() == "b'three' 1"
    assert (tmp_path / "direct").read_bytes() == b"0" * 4096 + b"1" * 4096 + b"2" * 4096
    facts = save_point.of_image(before)
    assert facts is not None
    await kernel.provisioner.back(facts.name, "then")
    assert await kernel.run("print(state())") == "(b'two', 2, True)"
    await kernel.provisioner.checkpoint()
    assert await kernel.run("put(b'four'); print(state())") == "(b'four', 2, True)"
    assert read() == "b'four' 1"


LISTENS = """
import os, socket
os.makedirs('{directory}/a/b', 0o750); path = '{directory}/a/b/socket'
listener = socket.socket(socket.AF_UNIX); listener.bind(path); listener.listen()
"""


async def test_a_unix_socket_comes_back_in_a_directory_that_was_removed(kernel, directory):
    await kernel.run(LISTENS.format(directory=directory))
    await kernel.provisioner.save("one")
    await kernel.run("import shutil; listener.close(); shutil.rmtree(os.path.dirname(path))")
    before = await kernel.provisioner.back("one")
    assert await kernel.run("socket.socket(socket.AF_UNIX).connect(path); print(listener.accept()[1] == '')") == "True"
    assert (directory / "a" / "b").stat().st_mode & 0o7777 == 0o750
    kernel.lifecycle.engine.store.remove(before)

    await kernel.provisioner.checkpoint()
    shutil.rmtree(directory / "a")
    (directory / "a").touch()
    with pytest.raises(MissingFile, match=f"{directory}/a/b") as caught:
        await kernel.provisioner.restore()
    assert caught.value.hint == f"Make it: `mkdir -p {directory}/a/b`."
    (directory / "a").unlink()
    assert await kernel.run("socket.socket(socket.AF_UNIX).connect(path); print('connected')") == "connected"


async def test_a_file_that_cannot_be_as_it_was_is_refused_with_the_reason(kernel, tmp_path):
    kernel.lifecycle.kernel.settings = replace(kernel.lifecycle.kernel.settings, kept_file_bytes=10)
    await kernel.run("import os; os.mkdir('work'); os.chdir('work')")
    await kernel.run("file = open('../large', 'w'); n = file.write('a' * 20); file.flush()")
    await kernel.provisioner.save("one")
    await kernel.run("n = file.write('b'); file.flush(); os.chdir('..'); os.rmdir('work')")
    with pytest.raises(FilesDiffer, match=r"/large .*no copy of it, as it was too large") as caught:
        await kernel.provisioner.back("one", {str(tmp_path / "large"): "then"})
    assert "Choose `now`" in caught.value.hint
    with pytest.raises(FilesDiffer, match=r"/work cannot .*it is a directory") as caught:
        await kernel.provisioner.back("one", {str(tmp_path / "large"): "now", str(tmp_path / "work"): "then"})
    why = "the save point has no copy of it, as it is a directory"
    assert caught.value.hint == f"Put {tmp_path}/work back as it was, and try again: {why}."
    (tmp_path / "work").mkdir()
    await kernel.provisioner.back("one", "now")
    assert await kernel.run("print(os.path.basename(os.getcwd()))") == "work"


@pytest.mark.parametrize("step", ["match", "criu_restore", "thaw"])
async def test_a_kernel_that_cannot_go_back_is_in_its_present_state_with_its_files(kernel, tmp_path, step):
    await kernel.run("log = open('log', 'w'); log.write('begun '); log.flush(); x = 1")
    await kernel.provisioner.save("one")
    await kernel.run("x = 2; log.write('continued'); log.flush()")
    tries = iter([1])

    def fail(event) -> None:
        if (event.kind, event.step) == ("completed", step) and next(tries, None) is not None:
            raise RuntimeError("injected")

    kernel.provisioner.faults.append(fail)
    with pytest.raises(GpuCkptError, match="injected") as caught:
        await kernel.provisioner.back("one", "then")
    assert (kernel.state, caught.value.left) == ("running", "the kernel runs on")
    assert kernel.lifecycle.kernel.ahead is None
    directory = kernel.lifecycle.home.runtime_dir
    assert (directory / SOCKET).is_socket()
    assert list(directory.parent.glob(f"{directory.name}.*")) == []
    assert await kernel.run("print(x)") == "2"
    assert (tmp_path / "log").read_text() == "begun continued"
    assert [image.retired for image in kernel.lifecycle.engine.store.images()] == [True, True]


async def test_save_points_share_memory_that_has_not_changed_and_each_is_whole(kernel, monkeypatch):
    monkeypatch.setattr(shared_chunks, "SMALLEST", 16 << 20)
    await kernel.run("import random\nlarge = random.Random(1).randbytes(64 << 20); number = 1")
    store = kernel.lifecycle.engine.store
    one = await kernel.provisioner.save("one")
    await kernel.run("number = 2; other = bytes(1_000_000)")
    two = await kernel.provisioner.save("two")
    assert two.manifest.bytes > 64 << 20
    assert shared_chunks.bytes_alone(two) < two.manifest.bytes - (40 << 20)
    store.remove(one)
    before = await kernel.provisioner.back("two")
    assert await kernel.run("print(number, large == random.Random(1).randbytes(64 << 20))") == "2 True"
    await kernel.provisioner.back(save_point.of_image(before).name)
    assert await kernel.run("print(number, len(other))") == "2 1000000"
    assert not list(store.root.glob(".draft*"))
