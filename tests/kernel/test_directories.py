"""Directories of the kernels' sockets: found again by the next server, and nobody else's to take first."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.errors import CapsuleError, RuntimeDirectory
from jupyter_gpu_ckpt.kernel import directories

NOBODY = 65534


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Iterator[Path]:
    """A temporary directory, with a short path, and a home, as an account without a session has them."""
    with tempfile.TemporaryDirectory(prefix="gc-", dir="/tmp") as directory:
        os.chmod(directory, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", directory)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
        yield Path(directory)


def taken(path: Path) -> None:
    """Another user was faster; or, where we cannot be another, everybody may write there."""
    path.mkdir()
    path.chmod(0o777)
    if os.geteuid() == 0:
        os.chown(path, NOBODY, NOBODY)


def test_the_session_has_one(temporary, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert directories.default_runtime_base() == tmp_path / "gpu-ckpt"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_somebody_elses_session_is_not_ours(temporary, tmp_path, monkeypatch):
    """With `sudo -E` root may write there, and its user may move what lies there away."""
    taken(tmp_path / "run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    assert directories.default_runtime_base().parent == temporary


def test_without_a_session_it_has_a_name_that_nobody_can_guess_and_is_found_again(temporary):
    taken(temporary / f"gpu-ckpt-{os.geteuid()}")
    base = directories.default_runtime_base()
    assert base.parent == temporary
    assert base.name != f"gpu-ckpt-{os.geteuid()}"
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    directories.make_runtime_dir(base)
    assert directories.default_runtime_base() == base, "the next server attaches this one's kernels"


def test_paths_of_sockets_below_it_are_short_enough(temporary, monkeypatch):
    """A batch system may give each job a temporary directory of its own, deep below others."""
    deep = temporary / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    base = directories.default_runtime_base()
    try:
        assert base.parent == Path("/tmp") and directories.is_private(base)
        kernel = directories.make_runtime_dir(base)
        with socket.socket(socket.AF_UNIX) as named:
            named.bind(f"{kernel}/moved-123456789012")
        assert directories.default_runtime_base() == base
    finally:
        shutil.rmtree(base)


@pytest.mark.parametrize("becomes", ["gone", "taken"])
def test_a_directory_that_was_swept_is_replaced_by_another(temporary, becomes):
    base = directories.default_runtime_base()
    base.rmdir()
    if becomes == "taken":
        taken(base)
    other = directories.default_runtime_base()
    assert other != base
    assert directories.make_runtime_dir(other).is_dir()
    assert directories.default_runtime_base() == other


@pytest.mark.parametrize("first", ["free", "taken"])
def test_where_nothing_can_be_remembered(temporary, tmp_path, monkeypatch, first):
    """No home directory: the name that can be found without, or one that this process alone knows."""
    (tmp_path / "data").write_text("not a directory")
    guessable = temporary / f"gpu-ckpt-{os.geteuid()}"
    if first == "taken":
        taken(guessable)
    directories._unremembered.cache_clear()
    base = directories.default_runtime_base()
    assert (base == guessable) is (first == "free")
    assert directories.make_runtime_dir(base).is_dir()
    assert directories.default_runtime_base() == base


def test_the_path_for_sockets_is_short_and_each_kernel_has_another(temporary, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # too long
    paths = {directories.short_socket_path() for _ in range(20)}
    assert len(paths) == 20
    for path in paths:
        assert len(f"{path}-5") <= directories.SHORT
        directories.require_private(path.parent)
        assert list(path.parent.iterdir()) == []


def test_a_directory_for_short_paths_that_is_not_the_users_own_is_not_used(temporary, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="g", dir="/tmp") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        assert directories.short_socket_path().parent == Path(short) / "gc"
        (Path(short) / "gc").chmod(0o777)
        assert (directories.short_socket_path() or Path("/")).parent != Path(short) / "gc"


def test_a_directory_of_others_is_refused_and_one_that_cannot_be_created_is_reported(temporary, tmp_path):
    taken(temporary / "theirs")
    with pytest.raises(CapsuleError, match="belongs to this user alone"):
        directories.make_runtime_dir(temporary / "theirs")
    (tmp_path / "file").touch()
    with pytest.raises(RuntimeDirectory, match="cannot be made"):
        directories.make_runtime_dir(tmp_path / "file" / "below")
