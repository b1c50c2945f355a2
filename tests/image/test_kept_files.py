"""Files of a save point: all content that a kernel that goes back replaces is kept, and comes back as its owner's."""

from __future__ import annotations

import os

import pytest

from jupyter_gpu_ckpt.errors import NoSpace
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
