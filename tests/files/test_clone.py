"""Copies of files: the same content, and no more space than the original needs."""

from __future__ import annotations

import os

from jupyter_gpu_ckpt.files import clone

#: Bytes of a hole, and of data.
HOLE, DATA = 8 << 20, 300_000


def test_a_copy_has_the_holes_of_the_original(tmp_path):
    content = os.urandom(DATA)
    with (tmp_path / "original").open("wb") as file:
        file.seek(HOLE)
        file.write(content)
        file.truncate(2 * HOLE + DATA)
    cost = clone.copy(tmp_path / "original", tmp_path / "copy", 2 * HOLE + DATA)
    assert (tmp_path / "copy").read_bytes() == bytes(HOLE) + content + bytes(HOLE)
    assert cost is not None
    assert cost < HOLE
    assert (tmp_path / "copy").stat().st_blocks * 512 < HOLE
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600


def test_a_copy_that_would_cost_too_much_is_not_made(tmp_path, monkeypatch):
    (tmp_path / "original").write_bytes(bytes(DATA))
    monkeypatch.setattr(clone, "_FICLONE", 0)  # as on a file system without reflinks
    assert clone.copy(tmp_path / "original", tmp_path / "copy", DATA - 1) is None
    assert not (tmp_path / "copy").exists()
