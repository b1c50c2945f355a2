"""Inotify watches: added again after a dump and after a restore, and what cannot be is refused or reported."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.errors import NoSpace, UnsupportedFile
from jupyter_gpu_ckpt.image.draft import Draft
from jupyter_gpu_ckpt.process import watched_files
from jupyter_gpu_ckpt.process.watched_files import WatchedFiles, watches

SETUP = """
import ctypes, os, select, struct
libc = ctypes.CDLL(None)
fd = libc.inotify_init1(os.O_NONBLOCK)
def add(path, mask): return libc.inotify_add_watch(fd, os.fsencode(path), ctypes.c_uint32(mask))
def watched(): return sorted(line for line in open(f'/proc/self/fdinfo/{fd}') if 'inotify' in line)
def events():
    if not select.select([fd], [], [], 5)[0]: return 'none'
    data, found = os.read(fd, 4096), []
    while data:
        number, mask, _, length = struct.unpack_from('iIII', data)
        found.append((number, hex(mask), data[16:16 + length].strip(b'\\0').decode())); data = data[16 + length:]
    return found
"""


@pytest.fixture
def instance():
    """An inotify descriptor of this process."""
    fd = ctypes.CDLL(None).inotify_init1(os.O_NONBLOCK)
    yield fd
    os.close(fd)


def add(fd: int, path: Path, mask: int = 0x100) -> int:
    number = ctypes.CDLL(None).inotify_add_watch(fd, os.fsencode(path), mask)
    assert number > 0
    return number


def found(fd: int) -> dict[str, str]:
    kept = watches(Path(f"/proc/self/fdinfo/{fd}").read_text())
    return WatchedFiles().find([os.getpid()], kept)


def without_handles(monkeypatch) -> None:
    """Simulates an ordinary user, who may not open files by their handles."""
    monkeypatch.setattr(watched_files._Search, "opened", lambda *_: "")


def test_watches_are_put_back_although_another_process_of_the_tree_has_ended(tmp_path):
    program = f"{SETUP}\nadd({str(tmp_path)!r}, 0x100)\nprint(fd, flush=True); import time; time.sleep(1000)"
    argv = [sys.executable, "-c", program]  # in the directory itself, where a search without handles begins
    processes = [subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=tmp_path) for _ in range(2)]
    try:
        (first, _), (second, number) = [(process.pid, int(process.stdout.readline())) for process in processes]
        information = Path(f"/proc/{second}/fdinfo/{number}")
        before = watches(information.read_text())
        noted = watched_files.remove([first, second], WatchedFiles())
        assert watches(information.read_text()) == []
        processes[0].kill()
        processes[0].wait()
        assert [why for pid, of_process in noted.items() for why in watched_files.put_back(pid, of_process)] == []
        assert watches(information.read_text()) == before
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("handles", [True, False])
def test_files_are_found_by_their_inodes(instance, tmp_path, monkeypatch, handles):
    monkeypatch.chdir(tmp_path)
    if not handles:
        without_handles(monkeypatch)
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "file\n").touch()
    (tmp_path / "link").symlink_to("a")
    paths = [Path("/etc"), Path("/"), deep, deep / "file\n"]
    for path in paths:
        add(instance, path)
    add(instance, tmp_path / "link", 0x02000100)
    assert sorted(found(instance).values()) == sorted(map(str, [*paths, tmp_path / "link"]))


def test_a_search_ends_in_time(instance, tmp_path, monkeypatch):
    """A file that is not found is left out, and those that were found are kept."""
    monkeypatch.chdir("/")
    without_handles(monkeypatch)
    monkeypatch.setattr(watched_files, "SEARCH_TIMEOUT", 0.5)
    (tmp_path / "gone").mkdir()
    add(instance, Path("/etc"))
    add(instance, tmp_path / "gone", 0x200)
    held = os.open(tmp_path / "gone", os.O_RDONLY)
    (tmp_path / "gone").rmdir()
    assert "/etc" in found(instance).values()
    os.close(held)


def test_a_path_that_another_file_has_taken_is_not_taken_for_it(instance, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    without_handles(monkeypatch)
    files = WatchedFiles()
    (tmp_path / "one").mkdir()
    add(instance, tmp_path / "one", 0x200)
    kept = watches(Path(f"/proc/self/fdinfo/{instance}").read_text())
    assert list(files.find([os.getpid()], kept).values()) == [f"{tmp_path}/one"]
    (tmp_path / "one").rename(tmp_path / "two")
    (tmp_path / "one").mkdir()
    assert list(files.find([os.getpid()], kept).values()) == [f"{tmp_path}/two"]


async def test_watches_stay_when_a_dump_is_undone(kernel, monkeypatch):
    await kernel.run(
        SETUP + "os.makedirs('w/x'); add('w', 0x100), add('w/x', 0x84000100), libc.inotify_rm_watch(fd, 1)"
    )
    await kernel.run("events(), add('w', 0x80000100)")
    before = await kernel.run("print(watched())")

    def full(*_: object, **__: object) -> None:
        raise NoSpace("The disk is full.")

    monkeypatch.setattr(Draft, "publish", full)
    with pytest.raises(NoSpace):
        await kernel.provisioner.checkpoint()
    assert await kernel.run("print(watched())") == before
    assert await kernel.run("open('w/new', 'w').close(); print(events()[0][2])") == "new"


async def test_a_directory_that_is_deleted_while_the_kernel_sleeps_is_reported_as_deleted(kernel, caplog):
    await kernel.run(SETUP + "os.makedirs('w/x'); os.makedirs('v'); print(add('w/x', 0xfff), add('v', 0x100))")
    place = Path(await kernel.run("print(os.getcwd())"))
    await kernel.provisioner.checkpoint()
    (place / "w" / "x").rmdir()
    assert await kernel.run("print(events())") == "[(1, '0x400', ''), (1, '0x8000', '')]"
    assert "w/x: No such file" in caplog.text
    assert await kernel.run("open('v/new', 'w').close(); print(events(), len(watched()))") == "[(2, '0x100', 'new')] 1"


async def test_unread_events_and_deleted_files_are_refused_by_name(kernel):
    await kernel.run(SETUP + "os.makedirs('w'); add('w', 0x100); open('w/new', 'w').close()")
    with pytest.raises(UnsupportedFile, match="inotify watch with events not read yet"):
        await kernel.provisioner.checkpoint()
    await kernel.run("events(); held = open('held', 'w'); os.unlink('held'); add(f'/proc/self/fd/{held.fileno()}', 2)")
    with pytest.raises(UnsupportedFile, match="inotify watch on a file that was not found"):
        await kernel.provisioner.checkpoint()
    await kernel.run("held.close(); events()")
    await kernel.provisioner.checkpoint()
    assert (
        await kernel.run("open('w/new', 'w').close(); os.unlink('w/new'); open('w/new', 'w'); print(events()[0][2])")
        == "new"
    )
