"""Device memory as files of an image: written from extents, read into others, and refused where it was changed."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from dataclasses import replace

import pytest
from blake3 import blake3

from jupyter_gpu_ckpt.errors import ImageDamaged
from jupyter_gpu_ckpt.image import device_memory
from jupyter_gpu_ckpt.image.encryption import CHUNK, Cipher, EncryptedCodec, Secret
from jupyter_gpu_ckpt.image.manifest import FileEntry

MIB = 1 << 20
RANDOM = random.Random(1).randbytes(16 * MIB)


class Directories:
    """Two directories and the directory of an image between them."""

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

    def write(self, chunks: list[bytes], codec: device_memory.Codec) -> dict[str, FileEntry]:
        for number, chunk in enumerate(chunks):
            (self._places[0] / f"{number:06d}.img").write_bytes(chunk)
        with self._open(0) as extents:
            return device_memory.write(extents, self.image, codec, lambda: None)

    def read(self, size: int, entries: dict[str, FileEntry], codec: device_memory.Codec) -> bytes:
        with self._open(1) as extents:
            assert device_memory.begin_read(extents, size, self.image, entries, codec).wait()
        return b"".join(path.read_bytes() for path in sorted(self._places[1].iterdir()))


def plain(claim=None) -> device_memory.Codec:
    return device_memory.Codec(claim)


def encrypted(claim=None) -> device_memory.Codec:
    return EncryptedCodec(Cipher(Secret("id", bytes(32)), bytes(32)))


@pytest.fixture(params=[plain, encrypted])
def codec(request):
    return request.param()


@pytest.fixture(params=["in memory", "on the same disk"])
def directories(tmp_path, monkeypatch, request):
    def refused(*_) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    if request.param == "in memory":
        monkeypatch.setattr(os, "link", refused)
    return Directories(tmp_path)


@pytest.mark.parametrize("rest", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * MIB + 5])
def test_there_and_back(directories, codec, rest):
    chunks = [RANDOM, bytes(16 * MIB), RANDOM[:rest]]
    entries = directories.write(chunks, codec)
    assert sorted(entries) == ["000000.img", "000002.img"], "one of nothing but zeros has no file"
    for name, entry in entries.items():
        stored = (directories.image / name).read_bytes()
        assert entry == FileEntry(len(stored), blake3(stored).hexdigest())
        assert (chunks[int(name[:6])] == stored) is not isinstance(codec, EncryptedCodec)
    assert directories.read(sum(map(len, chunks)), entries, codec) == b"".join(chunks)


def test_what_is_encrypted_is_a_file_of_the_image_as_every_other(directories, tmp_path):
    """Its name, number and length are proved; and what a whole file is decrypted by decrypts it."""
    cipher = Cipher(Secret("id", bytes(32)), bytes(32))
    directories.write([RANDOM], EncryptedCodec(cipher))
    cipher.decrypt(directories.image / "000000.img", tmp_path / "plain", "criu/device/000000.img")
    assert (tmp_path / "plain").read_bytes() == RANDOM


def test_a_chunk_under_the_name_of_another_does_not_decrypt(directories):
    codec = encrypted()
    entries = directories.write([RANDOM, RANDOM[::-1]], codec)
    (directories.image / "000001.img").replace(directories.image / "000000.img")
    with pytest.raises(ImageDamaged):
        directories.read(16 * MIB, {"000000.img": entries["000001.img"]}, codec)


def test_what_a_cache_has_is_not_written(directories):
    asked = []

    def claim(name, content, path):
        asked.append((name, content))
        path.write_bytes(RANDOM)
        return True

    entries = directories.write([RANDOM], plain(claim))
    assert asked == list(entries.items())
    assert os.stat(directories.image / "000000.img").st_nlink == 1


def one_byte_else(data: bytes, entry: FileEntry) -> tuple[bytes, FileEntry]:
    return data[:1000] + bytes([data[1000] ^ 1]) + data[1001:], entry


WRONG = {
    "one byte else": one_byte_else,
    # By a user who can seal a manifest: of what is encrypted that does not suffice.
    "one byte else, and its hash": lambda data, entry: (
        (changed := one_byte_else(data, entry)[0]),
        entry if len(data) == 4 * MIB else FileEntry(len(changed), blake3(changed).hexdigest()),
    ),
    "another hash": lambda data, entry: (data, replace(entry, blake3="0" * 64)),
    "a size that is larger": lambda data, entry: (data, replace(entry, bytes=len(data) + 1)),
    "a size that is smaller": lambda data, entry: (data, replace(entry, bytes=len(data) - 1)),
    "a file that is shorter": lambda data, entry: (data[:-1], entry),
    "an empty file": lambda data, entry: (b"", entry),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_is_not_what_was_written_is_refused(directories, codec, wrong):
    (entry,) = directories.write([RANDOM[: 4 * MIB]], codec).values()
    file = directories.image / "000000.img"
    data, entry = wrong(file.read_bytes(), entry)
    file.unlink()
    file.write_bytes(data)
    with pytest.raises(ImageDamaged) as caught:
        directories.read(4 * MIB, {"000000.img": entry}, codec)
    assert caught.value.details["files"] == ["criu/device/000000.img"]
