"""Files of a save point: all content that a kernel that goes back replaces is kept, and comes back as its owner's."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from jupyter_gpu_ckpt.errors import ImageDamaged, NoSpace
from jupyter_gpu_ckpt.files import clone
from jupyter_gpu_ckpt.image import kept_files


@pytest.fixture
def without_reflinks(monkeypatch):
    """A file system without reflinks, whatever that of the tests is."""
    monkeypatch.setattr(clone, "_FICLONE", 0)


def test_a_file_that_is_to_be_replaced_is_kept_whatever_its_size_or_else_nothing_is(tmp_path, without_reflinks):
    written, replaced = tmp_path / "written", tmp_path / "replaced"
    for path in (written, replaced):
        path.write_bytes(b"x" * 1000)
    files = {str(written): {"writes": True}, str(replaced): {"writes": True}}
    found = kept_files.keep(files, [str(replaced)], tmp_path / "kept", most=10, free=1500)
    assert {path: file.kept for path, file in found.items()} == {str(replaced): True, str(written): False}
    with pytest.raises(NoSpace, match="replaced"):
        kept_files.keep(files, [str(replaced)], tmp_path / "again", most=1 << 20, free=999)


@pytest.mark.parametrize("most", [10, 0], ids=["copied", "not copied"])
def test_a_file_whose_times_prove_nothing_is_the_same_only_if_its_copy_is(tmp_path, without_reflinks, most):
    path = tmp_path / "file"
    path.write_bytes(b"then")
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    files = kept_files.keep({str(path): {"unstamped": True}}, [], tmp_path / "kept", most, 10)
    [facts] = kept_files.hashed(files, tmp_path / "kept").values()
    kept = kept_files.KeptFile(**facts)
    assert kept_files.differs(str(path), kept) is (most == 0)
    path.write_bytes(b"now ")
    os.utime(path, ns=times)
    assert kept_files.differs(str(path), kept)


def test_a_file_that_is_put_back_has_the_extended_attributes_that_it_had(tmp_path, monkeypatch):
    """Also one that nobody may write to, when none can be set any more."""

    def as_a_user(file, *arguments) -> None:
        if isinstance(file, int):
            assert os.fstat(file).st_mode & stat.S_IWUSR
        setxattr(file, *arguments)

    setxattr = os.setxattr
    monkeypatch.setattr(os, "setxattr", as_a_user)
    path = tmp_path / "file"
    path.write_text("as then")
    os.setxattr(path, "user.origin", b"measured\0")
    path.chmod(0o400)
    files = kept_files.keep({str(path): {"writes": True}}, [], tmp_path / "kept", 100, 100)
    [facts] = kept_files.hashed(files, tmp_path / "kept").values()
    kept = kept_files.KeptFile(**json.loads(json.dumps(facts)))
    assert not kept_files.differs(str(path), kept)
    path.chmod(0o600)
    os.setxattr(path, "user.origin", b"guessed")
    path.chmod(0o400)
    assert kept_files.differs(str(path), kept)
    path.unlink()
    kept_files.put_back(str(path), kept, tmp_path / "kept")
    assert os.getxattr(path, "user.origin") == b"measured\0"
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert not kept_files.differs(str(path), kept)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root's kernels have files of others")
def test_a_file_that_is_put_back_belongs_to_its_owner(tmp_path):
    path = tmp_path / "file"
    path.write_text("as then")
    os.chown(path, 1234, 4321)
    path.chmod(0o640)
    files = kept_files.keep({str(path): {"writes": True}}, [], tmp_path / "kept", 100, 100)
    path.unlink()
    [facts] = kept_files.hashed(files, tmp_path / "kept").values()
    kept_files.put_back(str(path), kept_files.KeptFile(**facts), tmp_path / "kept")
    status = path.stat()
    assert (path.read_text(), status.st_uid, status.st_gid) == ("as then", 1234, 4321)
    assert status.st_mode & 0o7777 == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: only root's kernels have files of others")
@pytest.mark.parametrize("put", [os.symlink, os.link])
def test_the_owner_of_a_directory_gets_no_other_file_by_a_link_in_the_place_of_one_that_is_put_back(
    tmp_path, monkeypatch, put
):
    home, victim = tmp_path / "home", tmp_path / "victim"
    home.mkdir()
    victim.write_text("root's")
    victim.chmod(0o600)
    path = home / "file"
    path.write_text("as then")
    os.chown(path, 1234, 4321)
    path.chmod(0o644)
    files = kept_files.keep({str(path): {"writes": True}}, [], tmp_path / "kept", 100, 100)
    [facts] = kept_files.hashed(files, tmp_path / "kept").values()
    times = victim.stat().st_mtime_ns
    hashed = kept_files._hash_of

    def meanwhile(file):
        found = hashed(file)
        [draft] = home.glob(".file-*")
        draft.unlink()
        put(victim, draft)
        return found

    monkeypatch.setattr(kept_files, "_hash_of", meanwhile)
    kept_files.put_back(str(path), kept_files.KeptFile(**facts), tmp_path / "kept")
    status = victim.stat()
    assert (status.st_uid, status.st_mode & 0o7777, status.st_mtime_ns) == (0, 0o600, times)


def test_a_copy_that_is_not_what_was_saved_replaces_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_text("as then")
    files = kept_files.keep({str(path): {"writes": True}}, [], tmp_path / "kept", 100, 100)
    [facts] = kept_files.hashed(files, tmp_path / "kept").values()
    path.write_text("as now")
    (tmp_path / "kept" / facts["copy"]).write_text("something longer")
    with pytest.raises(ImageDamaged):
        kept_files.put_back(str(path), kept_files.KeptFile(**facts), tmp_path / "kept")
    assert path.read_text() == "as now"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "kept"]


def test_a_database_that_others_read_is_replaced_and_any_other_is_written_over(tmp_path):
    path = tmp_path / "db"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as own:
        own.execute("CREATE TABLE t(a)")
        files = kept_files.keep({str(path): {"writes": True}}, [], tmp_path / "kept", 1 << 20, 1 << 20)
        [facts] = kept_files.hashed(files, tmp_path / "kept").values()
        kept, inode = kept_files.KeptFile(**facts), path.stat().st_ino
        own.execute("INSERT INTO t VALUES(1)")
        kept_files.put_back(str(path), kept, tmp_path / "kept", database=inode)
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (inode, kept.mtime)
        assert own.execute("SELECT count(*) FROM t").fetchone() == (0,)
        own.execute("INSERT INTO t VALUES(2)")
        command = [sys.executable, "-c", READS, str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout.readline() == "2\n"
            kept_files.put_back(str(path), kept, tmp_path / "kept", database=inode)
            assert path.stat().st_ino != inode
            assert other.communicate("again")[0] == "2\n", "it is in a transaction"


READS = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN")
for _ in range(2):
    print(db.execute("SELECT a FROM t").fetchone()[0], flush=True)
    sys.stdin.read()
"""


def test_a_link_that_has_the_name_of_a_file_by_now_is_not_replaced(tmp_path):
    """The save of the present state could not keep it, as it is no file."""
    path = tmp_path / "file"
    path.write_text("as then")
    files = kept_files.keep({str(path): {"writes": True}}, [], tmp_path / "kept", 100, 100)
    [facts] = kept_files.hashed(files, tmp_path / "kept").values()
    path.unlink()
    path.symlink_to("elsewhere")
    with pytest.raises(FileExistsError, match="a symbolic link has its name"):
        kept_files.put_back(str(path), kept_files.KeptFile(**facts), tmp_path / "kept")
    assert os.readlink(path) == "elsewhere"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "kept"]


def test_what_stands_in_the_way_of_a_file_shows_before(tmp_path, monkeypatch):
    file, path = kept_files.KeptFile(10, 0, 0o600, copy="0"), tmp_path / "a" / "b" / "file"

    def found(uid: int = 1000) -> str:
        with monkeypatch.context() as patched:
            patched.setattr("os.geteuid", lambda: uid)
            return kept_files.obstacle(str(path), file, tmp_path)

    assert found() == ""  # its directories can be made
    path.mkdir(parents=True)
    assert found() == "a directory has its name"
    path.rmdir()
    path.symlink_to("elsewhere")
    assert found() == "a symbolic link has its name"
    path.unlink()
    os.mkfifo(path)
    assert found() == "a special file has its name"
    path.unlink()
    path.touch()
    assert found() == ""
    path.parent.chmod(0o1777)
    own = path.stat().st_uid
    assert found(own) == found(0) == ""
    assert found(own + 1) == f"it is another user's, and in {path.parent} only its owner can replace it"
    with monkeypatch.context() as patched:
        patched.setattr("os.access", lambda directory, mode: False)  # root may write to each
        assert found() == f"no file can be made in {path.parent}"
    path.parent.chmod(0o700)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.disk_usage", lambda directory: SimpleNamespace(free=9))
        assert found() == ""  # its copy is on the same disk
        elsewhere = kept_files.obstacle(str(path), file, Path("/proc"))
        assert elsewhere == f"there is no space for it in {path.parent}"
