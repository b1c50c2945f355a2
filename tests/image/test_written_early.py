"""What a dump writes is on its way to the disk while the dump goes on."""

from __future__ import annotations

import os

import pytest
from waiting import until

from jupyter_gpu_ckpt.image import disk

MIB = 1 << 20


@pytest.fixture
def begun(monkeypatch):
    """Ranges of which the system was told to begin writing, by file."""
    found: dict[str, list[tuple[int, int]]] = {}
    begin = disk._start_writing

    def told(path, start, end):
        begin(path, start, end)
        found.setdefault(path.name, []).append((start, end))

    monkeypatch.setattr(disk, "_start_writing", told)
    return found


def test_a_file_that_grows_is_followed(tmp_path, begun):
    with disk.written_early(tmp_path), (tmp_path / "pages-1.img").open("wb") as file:
        for number in range(1, 4):
            file.write(os.urandom(9 * MIB))
            file.flush()
            enough = 9 * MIB * number - disk._WORTH  # it may be looked at in the middle of a write
            until(lambda: begun.get("pages-1.img", [(0, 0)])[-1][1] > enough, "it is noticed")  # noqa: B023
    ranges = begun["pages-1.img"]
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])], "each byte once"


def test_what_is_small_is_left_to_the_flush(tmp_path, begun):
    with disk.written_early(tmp_path):
        (tmp_path / "core-1.img").write_bytes(bytes(4096))
        (tmp_path / "pages-1.img").write_bytes(bytes(9 * MIB))
        until(lambda: "pages-1.img" in begun, "the large one is noticed")
    assert set(begun) == {"pages-1.img"}


def test_the_system_takes_the_request(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(os.urandom(MIB))
    fd = os.open(file, os.O_RDONLY)
    assert disk._libc.sync_file_range(fd, 0, MIB, disk._START_WRITING) == 0
    os.close(fd)


def test_whatever_becomes_of_the_directory_the_body_goes_on(tmp_path, begun):
    place = tmp_path / "criu"
    place.mkdir()
    with disk.written_early(place):
        (place / "pages-1.img").write_bytes(bytes(9 * MIB))
        until(lambda: "pages-1.img" in begun, "it is noticed")
        (place / "pages-1.img").rename(tmp_path / "elsewhere")
        place.rmdir()
