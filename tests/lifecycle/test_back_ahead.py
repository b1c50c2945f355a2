"""A capsule that is made before a wake needs it, and processes to go back into: real kernels and CRIU."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from waiting import until

from jupyter_gpu_ckpt.capsule.protocol import SOCKET
from jupyter_gpu_ckpt.criu.criu import Criu
from jupyter_gpu_ckpt.errors import CriuError, GpuCkptError, ImageDamaged
from jupyter_gpu_ckpt.image import layout
from jupyter_gpu_ckpt.image.store import Image
from jupyter_gpu_ckpt.lifecycle import host_memory
from jupyter_gpu_ckpt.lifecycle.capsule_ahead import CapsuleAhead


@pytest.fixture
def events(monkeypatch):
    """Record whether processes are restored ahead, and the ends of CRIU's restores, for `follow`."""
    seen, restore, prepare = [], Criu.restore_stopped, CapsuleAhead.__init__

    def record(*arguments, **options):
        done = restore(*arguments, **options)
        seen.append("restored")
        return done

    def prepared(self, *arguments):
        prepare(self, *arguments)
        self._prepared.wait()
        seen.append("ahead" if self.restores else "not ahead")

    monkeypatch.setattr(Criu, "restore_stopped", record)
    monkeypatch.setattr(CapsuleAhead, "__init__", prepared)
    return seen


def follow(kernel, seen: list[str]) -> None:
    """Note the kernel's steps, and have its dump wait for the restore that is under way beside it."""

    def note(event) -> None:
        if (event.kind, event.step) == ("completed", "dump") and "ahead" in seen:
            until(lambda: "restored" in seen, "the processes are restored")
        if event.kind == "completed" and event.step in ("dump", "end_process"):
            seen.append(event.step)

    kernel.provisioner.faults.append(note)


def directories(kernel) -> list[Path]:
    """Return the directories of capsules that were made beside the kernel's own."""
    own = kernel.lifecycle.home.runtime_dir
    return list(own.parent.glob(f"{own.name}.*"))


async def at_a_point(kernel) -> Image:
    await kernel.run("x = 1")
    point = await kernel.provisioner.save("one")
    await kernel.run("x = 2")
    return point


async def test_a_kernel_goes_back_and_forth_sleeps_and_is_found_by_the_next_server(kernel, events):
    await at_a_point(kernel)
    follow(kernel, events)
    pid = kernel.lifecycle.capsule.host_pid
    present = await kernel.provisioner.back("one")
    assert sorted(events) == sorted(["ahead", "restored", "dump", "end_process"])
    [restored] = [event for event in kernel.steps.completed() if event.step == "criu_restore"]
    assert restored.bytes is None, "the rate of a restore would be learned from it"
    assert kernel.lifecycle.capsule.host_pid != pid
    assert not Path(f"/proc/{pid}").exists()
    assert await kernel.run("print(x)") == "1"
    for expected in ("2", "1"):  # each time in another directory
        before = directories(kernel)
        present = await kernel.provisioner.back(present.manifest.save_point["name"])
        assert await kernel.run("print(x)") == expected
        assert len(directories(kernel)) == 1 and directories(kernel) != before
    await kernel.provisioner.checkpoint()
    own = kernel.lifecycle.home.runtime_dir
    assert directories(kernel) == []
    assert [path.name for path in own.iterdir() if path.is_symlink()] == []
    assert await kernel.run("print(x)") == "1"
    assert (events.count("ahead"), events.count("not ahead")) == (3, 1), "a wake has nothing beside it"


def appended(data: Path) -> None:
    with data.open("a") as file:
        file.write("more")


def replaced(data: Path) -> None:
    """Put another file with the same content in its place."""
    data.with_name("copy").write_bytes(data.read_bytes())
    data.with_name("copy").replace(data)


@pytest.mark.parametrize("change", [appended, replaced])
async def test_a_file_that_is_another_one_when_the_kernel_stops_is_what_it_gets(kernel, events, tmp_path, change):
    data = tmp_path / "data"
    data.write_text("content")
    await kernel.run("import os; data = open('data'); data.read(3)")
    await kernel.provisioner.save("one")

    def change_it(event) -> None:
        if (event.kind, event.step) == ("started", "disconnect"):
            until(lambda: "restored" in events, "the processes are restored")
            change(data)

    kernel.provisioner.faults.append(change_it)
    follow(kernel, events)
    await kernel.provisioner.back("one", "now")
    assert sorted(events) == sorted(["ahead", "restored", "dump", "end_process", "restored"])
    same = "os.fstat(data.fileno()).st_ino == os.stat('data').st_ino"
    assert await kernel.run(f"print(data.read(), {same})") == f"{data.read_text()[3:]} True"


NOT_TWICE = {
    "a port": "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()",
    "a name of a socket": "import socket; s = socket.socket(socket.AF_UNIX); s.bind('name'); s.listen()",
    "an abstract name": "import os, socket; s = socket.socket(socket.AF_UNIX); s.bind(f'\\0a-{os.urandom(8).hex()}')",
    "a lock": "import fcntl; f = open('lock', 'w'); fcntl.flock(f, fcntl.LOCK_EX)",
    "a named pipe": "import os; os.mkfifo('pipe'); f = os.open('pipe', os.O_RDWR); _ = os.write(f, b'1')",
    "a deleted file": "f = open('gone', 'w+'); import os; f.write('1'); f.flush(); os.unlink('gone')",
    "shared memory": "from multiprocessing import shared_memory as m; s = m.SharedMemory(create=True, size=9)",
}


@pytest.mark.parametrize("what", NOT_TWICE)
async def test_what_cannot_exist_twice_is_restored_when_the_kernel_has_ended(kernel, events, what):
    await kernel.run(NOT_TWICE[what])
    await at_a_point(kernel)
    follow(kernel, events)
    await kernel.provisioner.back("one", "now")
    assert events == ["not ahead", "dump", "end_process", "restored"]
    assert await kernel.run("print(x)") == "1"


async def test_where_memory_is_short_it_is_restored_when_the_kernel_has_ended(kernel, events, monkeypatch):
    await at_a_point(kernel)
    monkeypatch.setattr(host_memory, "all_memory", lambda: 1 << 60)
    follow(kernel, events)
    await kernel.provisioner.back("one")
    assert events == ["not ahead", "dump", "end_process", "restored"]
    assert await kernel.run("print(x)") == "1"


async def test_a_restore_beside_the_kernel_that_fails_is_made_again(kernel, monkeypatch):
    await at_a_point(kernel)
    restore, ended = Criu.restore_stopped, []

    def fails(*arguments, **options):
        ended.append(kernel.lifecycle.capsule is None)
        if len(ended) == 1:
            raise CriuError("It failed.")
        return restore(*arguments, **options)

    monkeypatch.setattr(Criu, "restore_stopped", fails)
    await kernel.provisioner.back("one")
    assert ended == [False, True]
    assert directories(kernel) == []
    assert await kernel.run("print(x)") == "1"


async def test_who_looks_for_the_kernel_s_files_finds_them(kernel, tmp_path):
    """The kernel finds its connection file, its user CRIU's logs, and the server what it has written before."""
    await at_a_point(kernel)
    own = kernel.lifecycle.home.runtime_dir
    await kernel.provisioner.back("one")
    inside = kernel.lifecycle.capsule.directory
    assert inside != own
    assert (inside / "connection.json").samefile(own / "connection.json")
    await kernel.run("import json, ipykernel; json.load(open(ipykernel.connect.get_connection_file()))")
    assert (own / "restore.log").exists()
    (own / "dump.log").unlink()
    await kernel.provisioner.save("two")
    assert (own / "dump.log").exists()
    assert (own / layout.SESSION).exists()


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("which", ["the init", "the kernel"])
async def test_processes_that_were_killed_meanwhile_are_restored_again(kernel, events, which):
    await at_a_point(kernel)
    follow(kernel, events)

    def kill(event) -> None:
        if (event.kind, event.step) == ("completed", "end_process") and events.count("restored") == 1:
            init = kernel.lifecycle.kernel.ahead._capsule._init_pid
            [root] = children(init)
            os.kill(init if which == "the init" else children(root)[0], signal.SIGKILL)

    kernel.provisioner.faults.append(kill)
    await kernel.provisioner.back("one")
    assert events.count("restored") == 2
    assert await kernel.run("print(x)") == "1"


async def test_a_dump_that_fails_leaves_nothing_of_it(kernel, events):
    point = await at_a_point(kernel)
    follow(kernel, events)

    def fail(event) -> None:
        if (event.kind, event.step) == ("completed", "publish"):
            raise RuntimeError("injected")

    kernel.provisioner.faults.append(fail)
    with pytest.raises(GpuCkptError, match="injected"):
        await kernel.provisioner.back("one")
    assert {"ahead", "restored"} <= {*events}
    assert await kernel.run("print(x)") == "2"
    assert directories(kernel) == []
    assert (kernel.lifecycle.home.runtime_dir / SOCKET).is_socket()
    with point.lease():
        kernel.lifecycle.engine.store.check(point)
    assert [each.name for each in threading.enumerate() if each.name.startswith("gpu-ckpt-capsule")] == []


async def test_a_kernel_that_is_ended_meanwhile_ends_what_was_made_for_it(kernel, events):
    await at_a_point(kernel)
    follow(kernel, events)
    inits = []

    def end(event) -> None:
        if (event.kind, event.step) == ("completed", "dump"):
            inits.append(kernel.lifecycle.kernel.ahead._capsule._init_pid)
            threading.Thread(target=kernel.lifecycle.terminate).start()
            until(lambda: kernel.lifecycle.kernel.is_being_ended, "it is being ended")

    kernel.provisioner.faults.append(end)
    with pytest.raises(GpuCkptError):
        await kernel.provisioner.back("one")
    until(lambda: not Path(f"/proc/{inits[0]}").exists(), "its capsule has ended")
    assert directories(kernel) == []


async def test_memory_that_is_damaged_is_not_brought_to_life(kernel, events):
    point = await at_a_point(kernel)
    follow(kernel, events)
    victim = max((point.path / layout.CRIU).glob(layout.PAGES), key=lambda path: path.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with pytest.raises(ImageDamaged) as caught:
        await kernel.provisioner.back("one")
    assert {*events[:3]} == {"ahead", "restored", "dump"}
    assert caught.value.left == "the kernel runs on"
    assert await kernel.run("print(x)") == "2"
    assert directories(kernel) == []


async def test_a_wake_that_fails_ends_the_capsule_that_was_made_for_it(kernel):
    await kernel.run("x = 1")
    await kernel.provisioner.checkpoint()
    inits = []

    def fail(event) -> None:
        if (event.kind, event.step) == ("completed", "match") and not inits:
            ahead = kernel.lifecycle.kernel.ahead
            ahead._task.wait()
            inits.append(ahead._capsule._init_pid)
            raise RuntimeError("injected")

    kernel.provisioner.faults.append(fail)
    with pytest.raises(GpuCkptError, match="injected"):
        await kernel.provisioner.restore()
    until(lambda: not Path(f"/proc/{inits[0]}").exists(), "its capsule has ended")
    assert kernel.lifecycle.kernel.ahead is None
    assert await kernel.run("print(x)") == "1"
