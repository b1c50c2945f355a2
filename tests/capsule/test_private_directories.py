"""Directories that a capsule has of its own where others have another one."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from sleepers import ENV
from waiting import until

from jupyter_gpu_ckpt.capsule import private_directories
from jupyter_gpu_ckpt.capsule.capsule import Capsule
from jupyter_gpu_ckpt.errors import CapsuleError


def inside(capsule: Capsule, path: Path) -> list[str]:
    """The content of a directory as processes of the capsule see it."""
    return sorted(os.listdir(f"/proc/{capsule.host_pid}/root{path}"))


@pytest.fixture
def place(tmp_path):
    made = tmp_path / "place"
    made.mkdir(0o700)
    (made / "theirs").touch()
    return made


@pytest.fixture
def capsule(tmp_path, place):
    (tmp_path / "capsule").mkdir(0o700)
    made = Capsule.create(tmp_path / "capsule", private=[str(place), str(tmp_path / "gone")])
    try:
        made.spawn(["sleep", "1000"], ENV, None)
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("times", [1, 3])
def test_it_is_empty_in_the_capsule_and_stays_when_others_remove_and_make_theirs(capsule, place, tmp_path, times):
    assert inside(capsule, place) == inside(capsule, tmp_path / "gone") == []
    Path(f"/proc/{capsule.host_pid}/root{place}/mine").touch()
    assert sorted(os.listdir(place)) == ["theirs"]
    for _ in range(times):
        shutil.rmtree(place)
        until(lambda: place.exists() and inside(capsule, place), "it is mounted again")
        assert inside(capsule, place) == ["mine"]
        assert os.listdir(place) == []
    capsule.close()
    until(lambda: not place.exists() and not (tmp_path / "gone").exists(), "what the capsule has made is removed")


def directory_at(path: Path) -> private_directories.PrivateDirectories:
    return private_directories.PrivateDirectories(str(path.parent), [str(path)])


@pytest.mark.parametrize("theirs", [True, False])
def test_a_directory_that_others_remove_before_it_is_mounted_over_is_made_again(monkeypatch, tmp_path, theirs):
    path, over = tmp_path / "place", []

    def removed_meanwhile(descriptor, point):
        over.append(point)
        if len(over) < 3:
            os.rmdir(point)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), point)

    monkeypatch.setattr(private_directories, "mount_over", removed_meanwhile)
    directories = directory_at(path)
    if theirs:
        path.mkdir()
    directories.mount()
    assert over == [str(path)] * 3 and path.is_dir()
    directories.remove_made()
    assert not path.exists()
    over[:] = [str(tmp_path)] * 3
    path.mkdir()
    directories.mount()
    directories.remove_made()
    assert path.exists()


def test_a_directory_of_others_where_ours_was_stays(monkeypatch, tmp_path):
    path = tmp_path / "place"
    monkeypatch.setattr(private_directories, "mount_over", lambda descriptor, point: None)
    directories = directory_at(path)
    directories.mount()
    path.rename(tmp_path / "elsewhere")  # else the file system may give the next one its number
    path.mkdir()
    directories.mount()
    directories.remove_made()
    assert path.exists()


def test_nothing_is_left_where_it_cannot_be_noted(monkeypatch, tmp_path):
    (tmp_path / "private-0.made").mkdir()
    with pytest.raises(IsADirectoryError):
        directory_at(tmp_path / "place").mount()
    assert not (tmp_path / "place").exists()


def test_a_directory_that_is_removed_again_and_again_is_given_up(monkeypatch, tmp_path):
    def never(descriptor, point):
        os.rmdir(point)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), point)

    monkeypatch.setattr(private_directories, "mount_over", never)
    with pytest.raises(FileNotFoundError):
        directory_at(tmp_path / "place").mount()


def test_a_path_that_others_have_stays(capsule, place):
    capsule.close()
    assert os.listdir(place) == ["theirs"]


def test_a_symbolic_link_is_not_followed(tmp_path, place):
    """A mount there would cover the files that it leads to."""
    (tmp_path / "link").symlink_to(place)
    (tmp_path / "capsule").mkdir(0o700)
    with pytest.raises(CapsuleError, match="link"):
        Capsule.create(tmp_path / "capsule", private=[str(tmp_path / "link")])
