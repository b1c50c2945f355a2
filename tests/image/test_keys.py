"""Keys: made once, private, replaced without losing what the old one sealed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from jupyter_gpu_ckpt.errors import KeyUnusable
from jupyter_gpu_ckpt.image.keys import Keyring


@pytest.fixture
def ring(tmp_path):
    return Keyring(tmp_path / "data" / "keys")


@pytest.mark.parametrize("umask", [0, 0o022, 0o077], ids=oct)
def test_the_first_use_makes_a_key_that_nobody_else_can_read(ring, umask):
    before = os.umask(umask)
    try:
        key = ring.current()
    finally:
        os.umask(before)
    assert ring.directory.stat().st_mode & 0o777 == 0o700
    (file,) = ring.directory.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert ring.current() == key
    assert key.secret.hex() not in repr(key)
    assert len(key.secret) == 32


def test_a_rotated_key_seals_and_the_old_one_still_verifies(ring, monkeypatch):
    old = ring.current()
    new = ring.rotate()
    assert ring.current() == new != old
    assert ring.get(old.id) == old
    monkeypatch.setattr(time, "strftime", lambda *_: "19990101T000000")
    newest = ring.rotate()
    assert ring.ids() == [old.id, new.id, newest.id], "a clock that was set back does not bring an old key back"


def test_one_that_is_not_there(ring):
    assert ring.get("20200101T000000-01234567") is None
    assert ring.get("../../etc/passwd") is None
    assert ring.ids() == []


@pytest.mark.parametrize("damage", ["shared directory", "shared file", "link", "short", "no hex"])
def test_keys_that_cannot_be_trusted(ring, tmp_path, damage):
    file = ring.directory / ring.current().id
    if damage == "shared directory":
        ring.directory.chmod(0o750)
    elif damage == "shared file":
        file.chmod(0o640)
    elif damage == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        file.write_text("00" * 31 if damage == "short" else "no key")
    with pytest.raises(KeyUnusable) as caught:
        ring.current()
    assert caught.value.code == "KEY_UNUSABLE"


@pytest.mark.parametrize("linked", ["file", "directory"])
def test_a_link_is_refused_as_a_link(ring, tmp_path, linked):
    key = ring.current()
    path = ring.directory / key.id if linked == "file" else ring.directory
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KeyUnusable, match=f"is not a plain {linked}") as caught:
        ring.current()
    assert "link" in caught.value.hint
    assert caught.value.details["path"] == str(path)


def test_a_place_where_none_can_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(KeyUnusable):
        Keyring(tmp_path / "file" / "keys").current()


def test_several_processes_may_make_the_first_key(tmp_path):
    program = (
        "import sys; from pathlib import Path; from jupyter_gpu_ckpt.image.keys import Keyring\n"
        "sys.stdin.readline(); print(Keyring(Path(sys.argv[1])).current().id)"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "keys")]
    makers = [subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for maker in makers:
        maker.stdin.write("\n")
        maker.stdin.flush()
    made = {maker.communicate(timeout=60)[0].strip() for maker in makers}
    assert [maker.returncode for maker in makers] == [0] * 4
    ring = Keyring(tmp_path / "keys")
    assert made <= set(ring.ids())
    assert all(ring.get(id) for id in ring.ids())
