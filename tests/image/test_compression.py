"""What pays to be compressed, frames and what only looks like one, and chunks of an image that are such."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import random
import struct
from dataclasses import replace

import pytest
import zstandard
from blake3 import blake3

from jupyter_gpu_ckpt.errors import ImageDamaged
from jupyter_gpu_ckpt.image import compression, device, direct
from jupyter_gpu_ckpt.image.compression import Disk, Sample, pays
from jupyter_gpu_ckpt.image.manifest import FileEntry

MIB = 1 << 20
SIZE = 4 * MIB
_rng = random.Random(1)
RANDOM = _rng.randbytes(SIZE)
CONTENTS = {
    "one value": bytes([3]) * SIZE,
    "integers": b"".join(struct.pack("<q", _rng.randrange(50_000)) for _ in range(SIZE // 8)),
    "padding": b"".join(_rng.randbytes(1000) + bytes(3096) for _ in range(SIZE // 4096)),
    "a mask": bytes(_rng.random() < 0.1 for _ in range(SIZE)),
}


def buffer(content: bytes) -> memoryview:
    chunk = direct.buffer(len(content))[: len(content)]
    chunk[:] = content
    return chunk


@pytest.fixture
def slow_disk(monkeypatch):
    monkeypatch.setattr(Disk, "rate", 1.0)


@pytest.mark.parametrize(
    ("ratio", "rate", "threads", "disk", "expected"),
    [
        (0.25, 0.4e9, 8, 2e9, True),  # 2.4 GB/s of what the disk is spared
        (0.25, 0.4e9, 8, 2.5e9, False),
        (0.25, 0.4e9, 2, 2e9, False),
        (0.25, 0.4e9, 2, 0.5e9, True),
        (0.5, 0.4e9, 8, 2e9, False),
        (0.0, 4e9, 1, 2e9, True),
        (0.75, 1e9, 8, 1.0, True),
        (0.76, 1e9, 8, 1.0, False),  # whatever the disk
        (1.1, 1e9, 8, 1.0, False),
        (0.0, 4e9, 8, math.inf, False),
    ],
)
def test_what_pays(ratio, rate, threads, disk, expected):
    assert pays(Sample(ratio, rate), threads=threads, disk=disk) is expected


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_there_and_back(content, slow_disk):
    chunk, back = buffer(content), direct.buffer(SIZE)
    assert compression.sample(chunk).ratio < 0.5
    data, length = compression.compress(chunk, 8)
    assert abs(length / SIZE - compression.sample(chunk).ratio) < 0.05, "the sample is of its kind"
    assert chunk == content
    assert compression.decompress(data[:length], back)
    assert back == content


def test_what_does_not_pay_is_left(slow_disk):
    floats = buffer(struct.pack(f"<{SIZE // 4}f", *(_rng.gauss(0, 1) for _ in range(SIZE // 4))))
    for chunk in (buffer(RANDOM), floats):
        assert compression.sample(chunk).ratio > compression.MOST
        assert compression.compress(chunk, 8) is None


def test_a_fast_disk_is_spared_nothing(monkeypatch):
    monkeypatch.setattr(Disk, "rate", math.inf)
    assert compression.compress(buffer(CONTENTS["one value"]), 8) is None


def test_a_sample_that_was_of_another_kind(slow_disk):
    """The rest of the chunk is random: what is begun is given up, and the next one is not touched by it."""
    content = bytearray(RANDOM * 4)
    for at in range(0, len(content), len(content) // 4):
        content[at : at + 64 * 1024] = bytes(64 * 1024)
    chunk, back = buffer(bytes(content)), direct.buffer(SIZE)
    assert compression.sample(chunk).ratio < 0.1
    assert compression.compress(chunk, 8) is None
    data, length = compression.compress(buffer(CONTENTS["integers"]), 8)
    assert compression.decompress(data[:length], back)
    assert back == CONTENTS["integers"]


@pytest.mark.parametrize("size", [1, 77, 4096, 64 * 1024 + 1, 5 * 64 * 1024 - 1])
def test_short_ones(size, slow_disk, tmp_path):
    chunk = buffer(bytes([3]) * size)
    compressed = compression.compress(chunk, 8)
    assert (compressed is None) is (size == 1)
    if compressed is not None:
        data, length = compressed
        direct.write(tmp_path / "file", data, length, size=length)
        back = direct.buffer(size)[:size]
        assert compression.decompress(memoryview((tmp_path / "file").read_bytes()), back)
        assert back == chunk


def test_the_rate_of_the_disk():
    disk = Disk()
    assert disk.rate == pytest.approx(Disk.FIRST)
    for _ in range(100):
        disk.wrote(16 * MIB, 16 * MIB / 0.1e9, 8)
    assert disk.rate == pytest.approx(0.8e9, rel=0.02), "eight at a time"
    for _ in range(100_000):
        disk.wrote(1000, 0.01, 1)
    assert disk.rate == pytest.approx(0.8e9, rel=0.02), "how long it takes to answer is no rate"
    for _ in range(200):
        disk.wrote(16 * MIB, 16 * MIB / 3e9, 2)
    assert disk.rate == pytest.approx(6e9, rel=0.02), "it is another one now"


FRAME = zstandard.ZstdCompressor(level=1).compress(CONTENTS["integers"])


def wide() -> bytes:
    """A frame that asks for 128 MiB to look back on, and does not say how long its content is."""
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(CONTENTS["integers"]) + compressor.flush()


NO_FRAMES = {
    "nothing": b"",
    "noise": RANDOM[:1000],
    "half": FRAME[: len(FRAME) // 2],
    "all but the end": FRAME[:-1],
    "less in it": zstandard.compress(CONTENTS["integers"][:-1], 1),
    "more in it": zstandard.compress(CONTENTS["integers"] + b"x", 1),
    "much more in it": zstandard.compress(bytes(64 * SIZE), 1),
    "a wide window": wide(),
}


@pytest.mark.parametrize("frame", NO_FRAMES.values(), ids=NO_FRAMES)
def test_what_is_no_frame_of_it(frame):
    back = direct.buffer(SIZE)
    assert not compression.decompress(memoryview(frame), back)


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

    def write(self, chunks: list[bytes], take=device.none_there, **options) -> dict[str, FileEntry]:
        for number, chunk in enumerate(chunks):
            (self._places[0] / f"{number:06d}.img").write_bytes(chunk)
        with self._open(0) as arena:
            return device.write(arena, self.image, take, lambda: None, **options)

    def read(self, size: int, entries: dict[str, FileEntry]) -> bytes:
        with self._open(1) as arena:
            assert device.Filling(arena, size, self.image, entries, prove=True).require()
        return b"".join(path.read_bytes() for path in sorted(self._places[1].iterdir()))


@pytest.fixture
def arenas(tmp_path, slow_disk, monkeypatch):
    def refused(*_) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)  # an arena in memory
    return Arenas(tmp_path)


def test_chunks_of_both_kinds(arenas):
    chunks = [RANDOM * 4, bytes(16 * MIB), CONTENTS["integers"] * 4, CONTENTS["a mask"][: 3 * MIB + 5]]
    entries = arenas.write(chunks)
    assert {name: entry.raw is not None for name, entry in entries.items()} == {
        "000000.img": False,
        "000002.img": True,
        "000003.img": True,
    }
    for name, entry in entries.items():
        stored, content = (arenas.image / name).read_bytes(), chunks[int(name[:6])]
        assert entry.content == FileEntry(len(content), blake3(content).hexdigest())
        assert (entry.bytes, entry.blake3) == (len(stored), blake3(stored).hexdigest())
        if entry.raw is not None:
            assert zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False) == content
    assert arenas.read(sum(map(len, chunks)), entries) == b"".join(chunks)


def test_no_frames_unless_asked_for(arenas):
    entries = arenas.write([CONTENTS["integers"]], compressed=False)
    assert entries == {"000000.img": FileEntry(SIZE, blake3(CONTENTS["integers"]).hexdigest())}
    assert (arenas.image / "000000.img").read_bytes() == CONTENTS["integers"]


def stored_as(data: bytes, entry: FileEntry) -> FileEntry:
    """A manifest that is true of what is stored."""
    return replace(entry, bytes=len(data), blake3=blake3(data).hexdigest())


def one_byte_else(data: bytes, entry: FileEntry) -> tuple[bytes, FileEntry]:
    data = data[:1000] + bytes([data[1000] ^ 1]) + data[1001:]
    return data, stored_as(data, entry)


WRONG = {
    "one byte else": one_byte_else,
    "another hash of what is stored": lambda data, entry: (data, replace(entry, blake3="0" * 64)),
    "another hash of the content": lambda data, entry: (data, replace(entry, raw=replace(entry.raw, blake3="0" * 64))),
    "a content that is longer": lambda data, entry: (data, replace(entry, raw=replace(entry.raw, bytes=SIZE + 1))),
    "a content that is shorter": lambda data, entry: (data, replace(entry, raw=replace(entry.raw, bytes=SIZE - 1))),
    "no content": lambda data, entry: (data, replace(entry, raw=None)),
    "a frame that is longer than its content": lambda data, entry: (
        (padded := data + bytes(SIZE)),
        stored_as(padded, entry),
    ),
    **{name: lambda _, entry, data=data: (data, stored_as(data, entry)) for name, data in NO_FRAMES.items()},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_what_is_not_what_it_was_made_of(arenas, wrong):
    (entry,) = arenas.write([CONTENTS["integers"]]).values()
    file = arenas.image / "000000.img"
    data, entry = wrong(file.read_bytes(), entry)
    file.write_bytes(data)
    with pytest.raises(ImageDamaged) as caught:
        arenas.read(SIZE, {"000000.img": entry})
    assert caught.value.details["files"] == ["criu/device/000000.img"]
