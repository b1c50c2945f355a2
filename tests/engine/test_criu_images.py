"""What CRIU wrote about a kernel's files: read, and rewritten so that a restore asks for no size."""

from __future__ import annotations

import os
import socket
import stat
import struct

import pytest

from jupyter_gpu_ckpt.engine import criu_images
from jupyter_gpu_ckpt.engine.criu_images import Port, RegularFile
from jupyter_gpu_ckpt.errors import ImageFormat

FILES, FDINFO, REMAP = 0x56303138, 0x56213732, 0x59133954


def varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def message(*fields: tuple[int, int | bytes]) -> bytes:
    """Protobuf, as its documentation describes the wire."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def write(path, magic: int, *records: bytes) -> None:
    path.write_bytes(
        struct.pack("<II", 0x54564319, magic) + b"".join(struct.pack("<I", len(one)) + one for one in records)
    )


def regular(id: int, name: str, size: int | None, mode: int = 0o100644) -> bytes:
    fields = [(1, id), (2, os.O_RDWR), (3, 5), (6, name.encode())]
    fields += [(8, size)] if size is not None else []
    return message((1, 1), (2, id), (3, message(*fields, (10, mode))))


def inet(id: int, kind: int, state: int, port: int) -> bytes:
    (address,) = struct.unpack("<I", socket.inet_aton("127.0.0.1"))
    fields = [(1, id), (2, 9), (3, int(socket.AF_INET)), (4, kind), (5, 0), (6, state), (7, port), (11, address)]
    return message((1, 2), (2, id), (4, message(*fields)))


@pytest.fixture
def dump(tmp_path):
    directory = tmp_path / "criu"
    directory.mkdir()
    records = [
        regular(1, "/data/a.csv", 300),
        regular(2, "/lib/libc.so", 1 << 40),
        regular(3, "/data/gone", 7),
        regular(4, "/data", None, stat.S_IFDIR | 0o755),
        regular(5, "/dev/null", None, stat.S_IFCHR | 0o666),
        inet(6, socket.SOCK_STREAM, 10, 8888),
        inet(7, socket.SOCK_STREAM, 1, 40000),
        inet(8, socket.SOCK_DGRAM, 7, 5353),
    ]
    write(directory / "files.img", FILES, *records)
    write(directory / "fdinfo-2.img", FDINFO, message((1, 1), (2, 0)), message((1, 3), (2, 1)))
    write(directory / "remap-fpath.img", REMAP, message((1, 3), (2, 1)))
    (directory / "pages-1.img").write_bytes(b"pages")
    return directory


def test_the_files_a_restore_needs(dump):
    """Not deleted ones, which travel in the image, nor devices."""
    assert criu_images.regular_files(dump) == [
        RegularFile("/data", None, stat.S_IFDIR | 0o755, False, writes=True),
        RegularFile("/data/a.csv", 300, 0o100644, True, writes=True),
        RegularFile("/lib/libc.so", 1 << 40, 0o100644, False, writes=True),
    ]


def test_the_ports_a_restore_binds(dump):
    """Not those of connections, which come back closed."""
    assert criu_images.ports(dump) == [
        Port(socket.AF_INET, socket.SOCK_DGRAM, "127.0.0.1", 5353),
        Port(socket.AF_INET, socket.SOCK_STREAM, "127.0.0.1", 8888),
    ]


def test_a_view_asks_for_no_size_of_a_changed_file_and_leaves_the_image_alone(dump, tmp_path):
    before = {path.name: path.read_bytes() for path in dump.iterdir()}
    view = criu_images.view(dump, tmp_path / "view", {"/data/a.csv"})
    assert criu_images.regular_files(view)[1:] == [
        RegularFile("/data/a.csv", None, None, True, writes=True),
        RegularFile("/lib/libc.so", 1 << 40, 0o100644, False, writes=True),
    ]
    assert criu_images.ports(view) == criu_images.ports(dump)
    assert (view / "pages-1.img").samefile(dump / "pages-1.img")
    assert {path.name: path.read_bytes() for path in dump.iterdir()} == before
    assert (view / "files.img").stat().st_mode & 0o777 == 0o600


def test_a_view_without_changes_is_byte_for_byte_the_same(dump, tmp_path):
    view = criu_images.view(dump, tmp_path / "view", ())
    assert (view / "files.img").read_bytes() == (dump / "files.img").read_bytes()


@pytest.mark.parametrize("damage", [b"", b"CRIU", b"\x00" * 40])
def test_another_kind_of_file_is_refused(dump, damage):
    (dump / "files.img").write_bytes(damage)
    with pytest.raises(ImageFormat):
        criu_images.regular_files(dump)


def test_every_cut_is_refused_or_ends_between_two_records(dump):
    whole = (dump / "files.img").read_bytes()
    ends, at = {8}, 8
    while at < len(whole):
        at += 4 + struct.unpack_from("<I", whole, at)[0]
        ends.add(at)
    for length in range(len(whole)):
        (dump / "files.img").write_bytes(whole[:length])
        if length in ends:
            criu_images.ports(dump)
        else:
            with pytest.raises(ImageFormat):
                criu_images.ports(dump)


TTY_INFO, PTY, CTTY = 0x59453036, 1, 4


def terminal(kind: int, *owner: tuple[int, int]) -> bytes:
    modes = message((1, 0o2400), (8, 3), (8, 28))
    return message((1, 7), (2, kind), (3, 0), (4, 0), (5, 0), (6, 8192), (7, 8192), (8, 34816), (9, modes), *owner)


def test_devices_keep_their_owners_and_pseudo_terminals_get_theirs(tmp_path):
    path = tmp_path / "tty-info.img"
    write(path, TTY_INFO, terminal(PTY, (14, 1000), (15, 5)), terminal(CTTY, (14, 65534), (15, 65534)))
    criu_images.spare_devices(tmp_path)
    expected = tmp_path / "expected"
    write(expected, TTY_INFO, terminal(PTY, (14, 1000), (15, 5)), terminal(CTTY))
    assert path.read_bytes() == expected.read_bytes()


def test_a_dump_without_terminals_has_no_owners_to_forget(tmp_path):
    criu_images.spare_devices(tmp_path)
    assert list(tmp_path.iterdir()) == []
