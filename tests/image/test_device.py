"""Device memory as files of an image: written from one arena, read into another, and refused where it was changed."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from dataclasses import replace

import pytest
from blake3 import blake3

from jupyter_gpu_ckpt.errors import ImageDamaged
from jupyter_gpu_ckpt.image import device
from jupyter_gpu_ckpt.image.manifest import FileEntry

MIB = 1 << 20
RANDOM = random.Random(1).randbytes(16 * MIB)


class Arenas:
    """Two arenas and the directory of an image between them."""

    def __init__(self, place) -> None:
        self.image, self._places = place / "device", (place / "from", place / "to")
        for path in self._places:
            path.mkdir()

    @contextlib.contextmanager
    def _open(self, which: int):
        fd = os.open(self._places[which], os.O_DIRECTORY)
        try:
            yield fd
        finally:
            os.close(fd)

    def write(self, chunks: list[bytes], take=device.none_there) -> dict[str, FileEntry]:
        for number, chunk in enumerate(chunks):
            (self._places[0] / f"{number:06d}.img").write_bytes(chunk)
        with self._open(0) as arena:
            return device.write(arena, self.image, take, lambda: None)

    def read(self, size: int, entries: dict[str, FileEntry]) -> bytes:
        with self._open(1) as arena:
            assert device.Filling(arena, size, self.image, entries, prove=True).require()
        return b"".join(path.read_bytes() for path in sorted(self._places[1].iterdir()))


@pytest.fixture(params=["in memory", "on the same disk"])
def arenas(tmp_path, monkeypatch, request):
    def refused(*_) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if request.param == "in memory":
        monkeypatch.setattr(os, "link", refused)
    return Arenas(tmp_path)


def test_there_and_back(arenas):
    chunks = [RANDOM, bytes(16 * MIB), RANDOM[: 3 * MIB + 5]]
    entries = arenas.write(chunks)
    assert sorted(entries) == ["000000.img", "000002.img"], "one of nothing but zeros has no file"
    for name, entry in entries.items():
        content = chunks[int(name[:6])]
        assert entry == FileEntry(len(content), blake3(content).hexdigest())
        assert (arenas.image / name).read_bytes() == content
    assert arenas.read(sum(map(len, chunks)), entries) == b"".join(chunks)


def test_what_a_cache_has_is_not_written(arenas):
    asked = []

    def take(name, content, path):
        asked.append((name, content))
        path.write_bytes(RANDOM)
        return True

    entries = arenas.write([RANDOM], take)
    assert asked == list(entries.items())
    assert os.stat(arenas.image / "000000.img").st_nlink == 1


def one_byte_else(data: bytes, entry: FileEntry) -> tuple[bytes, FileEntry]:
    return data[:1000] + bytes([data[1000] ^ 1]) + data[1001:], entry


WRONG = {
    "one byte else": one_byte_else,
    "another hash": lambda data, entry: (data, replace(entry, blake3="0" * 64)),
    "a size that is larger": lambda data, entry: (data, replace(entry, bytes=len(data) + 1)),
    "a size that is smaller": lambda data, entry: (data, replace(entry, bytes=len(data) - 1)),
    "a file that is shorter": lambda data, entry: (data[:-1], entry),
    "an empty file": lambda data, entry: (b"", entry),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_is_not_what_was_written_is_refused(arenas, wrong):
    content = RANDOM[: 4 * MIB]
    (entry,) = arenas.write([content]).values()
    file = arenas.image / "000000.img"
    data, entry = wrong(content, entry)
    file.unlink()
    file.write_bytes(data)
    with pytest.raises(ImageDamaged) as caught:
        arenas.read(4 * MIB, {"000000.img": entry})
    assert caught.value.details["files"] == ["criu/device/000000.img"]
