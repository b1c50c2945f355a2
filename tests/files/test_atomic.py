"""One way to write a file whole or not at all: what is durable is flushed in the right order, and a failure changes
nothing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.files import atomic
from jupyter_gpu_ckpt.files.atomic import remove_leftovers, write_atomically


@pytest.fixture
def calls(monkeypatch):
    """The flushes and renames, in their order: names of files, "." for the directory."""
    made: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def flushed(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        made.append("flush directory" if path.is_dir() else "flush file")
        fsync(fd)

    def replaced(path: Path, target: Path) -> Path:
        made.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", replaced)
    return made


@pytest.mark.parametrize("content", ["text with ä", b"bytes\0", "", b""])
@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_made_and_replaced(tmp_path, content, durable):
    path = tmp_path / "file"
    for _ in range(2):
        write_atomically(path, content, durable=durable)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
        assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_what_is_durable_is_flushed_before_and_after_the_rename(tmp_path, calls):
    write_atomically(tmp_path / "file", "x", durable=True)
    assert calls == ["flush file", "rename", "flush directory"]


def test_what_is_not_durable_waits_for_no_disk(tmp_path, calls):
    write_atomically(tmp_path / "file", "x", durable=False)
    assert calls == ["rename"]


@pytest.mark.parametrize("umask", [0, 0o077, 0o777])
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_the_mode_is_the_given_one_whatever_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "file", "x", durable=False, mode=mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


@pytest.mark.parametrize("fails", ["write", "flush", "rename"])
def test_after_a_failure_the_old_content_is_there_and_nothing_else(tmp_path, monkeypatch, fails):
    path = tmp_path / "file"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    match fails:
        case "write":
            monkeypatch.setattr(os, "fchmod", full)
        case "flush":
            monkeypatch.setattr(os, "fsync", full)
        case "rename":
            monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new", durable=True)
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_link_in_the_files_place_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "outside").write_text("old")
    (tmp_path / "file").symlink_to(tmp_path / "outside")
    write_atomically(tmp_path / "file", "new", durable=False)
    assert (tmp_path / "outside").read_text() == "old" and not (tmp_path / "file").is_symlink()


@pytest.mark.parametrize("name", ["file", ".hidden"])
def test_what_a_killed_writer_left_is_found_and_removed(tmp_path, monkeypatch, name):
    path, other = tmp_path / name, tmp_path / "file-0123abcd"
    other.touch()
    monkeypatch.setattr(Path, "replace", lambda *_: None)  # ended just before the rename
    write_atomically(path, "x", durable=False)
    (left,) = {each.name for each in tmp_path.iterdir()} - {other.name}
    assert left.startswith(".") and left != name
    remove_leftovers(path)
    assert [each.name for each in tmp_path.iterdir()] == [other.name]


def test_the_flush_opens_nothing_that_stays_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    atomic.flush(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
