"""CRIU's images of a kernel's files: read, and rewritten so that a restore asks for no size."""

from __future__ import annotations

import os
import socket
import stat
import struct

import pytest

from jupyter_gpu_ckpt.criu import images
from jupyter_gpu_ckpt.criu.images import Port, RegularFile
from jupyter_gpu_ckpt.errors import ImageFormat

FILES, FDINFO, REMAP, FILE_LOCKS, IDS = 0x56303138, 0x56213732, 0x59133954, 0x54323616, 0x54432030


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
    assert images.regular_files(dump) == [
        RegularFile("/data", None, stat.S_IFDIR | 0o755, False, writes=True),
        RegularFile("/data/a.csv", 300, 0o100644, True, writes=True),
        RegularFile("/lib/libc.so", 1 << 40, 0o100644, False, writes=True),
    ]


def test_a_file_with_a_lock(dump):
    write(dump / "fdinfo-2.img", FDINFO, message((1, 1), (4, 7)), message((1, 3), (4, 8)))
    assert [file.locked for file in images.regular_files(dump)] == [False, False, False]
    for pid, files in ((20, 2), (21, 3)):
        write(dump / f"ids-{pid}.img", IDS, message((1, 0), (2, files)))
    write(dump / "fdinfo-3.img", FDINFO, message((1, 2), (4, 7)))
    lock = message((1, 1), (2, 1), (3, 20), (4, 7), (5, 1 << 30), (6, 3))
    write(dump / "filelocks.img", FILE_LOCKS, lock, message((1, 2), (2, 0), (3, 21), (4, 7), (5, 0), (6, 0)))
    assert {file.path: file.posix_locks for file in images.regular_files(dump) if file.locked} == {
        "/data/a.csv": ((1, 1 << 30, 3),),
        "/lib/libc.so": (),  # flock
    }


def test_the_ports_a_restore_binds(dump):
    """Not those of connections, which come back closed."""
    assert images.ports(dump) == [
        Port(socket.AF_INET, socket.SOCK_DGRAM, "127.0.0.1", 5353),
        Port(socket.AF_INET, socket.SOCK_STREAM, "127.0.0.1", 8888),
    ]


def test_a_view_requires_no_size_of_a_changed_file_and_leaves_the_image_alone(dump, tmp_path):
    before = {path.name: path.read_bytes() for path in dump.iterdir()}
    view = images.view(dump, tmp_path / "view", {"/data/a.csv"})
    assert images.regular_files(view)[1:] == [
        RegularFile("/data/a.csv", None, None, True, writes=True),
        RegularFile("/lib/libc.so", 1 << 40, 0o100644, False, writes=True),
    ]
    assert images.ports(view) == images.ports(dump)
    assert (view / "pages-1.img").samefile(dump / "pages-1.img")
    assert {path.name: path.read_bytes() for path in dump.iterdir()} == before
    assert (view / "files.img").stat().st_mode & 0o777 == 0o600


def test_a_view_without_changes_is_byte_for_byte_the_same(dump, tmp_path):
    view = images.view(dump, tmp_path / "view", ())
    assert (view / "files.img").read_bytes() == (dump / "files.img").read_bytes()


@pytest.mark.parametrize("damage", [b"", b"CRIU", b"\x00" * 40])
def test_another_kind_of_file_is_refused(dump, damage):
    (dump / "files.img").write_bytes(damage)
    with pytest.raises(ImageFormat):
        images.regular_files(dump)


def test_every_cut_is_refused_or_ends_between_two_records(dump):
    whole = (dump / "files.img").read_bytes()
    ends, at = {8}, 8
    while at < len(whole):
        at += 4 + struct.unpack_from("<I", whole, at)[0]
        ends.add(at)
    for length in range(len(whole)):
        (dump / "files.img").write_bytes(whole[:length])
        if length in ends:
            images.ports(dump)
        else:
            with pytest.raises(ImageFormat):
                images.ports(dump)


TTY_INFO, PTY, CTTY = 0x59453036, 1, 4


def terminal(kind: int, *owner: tuple[int, int]) -> bytes:
    modes = message((1, 0o2400), (8, 3), (8, 28))
    return message((1, 7), (2, kind), (3, 0), (4, 0), (5, 0), (6, 8192), (7, 8192), (8, 34816), (9, modes), *owner)


def test_devices_keep_their_owners_and_pseudo_terminals_get_theirs(tmp_path):
    path = tmp_path / "tty-info.img"
    write(path, TTY_INFO, terminal(PTY, (14, 1000), (15, 5)), terminal(CTTY, (14, 65534), (15, 65534)))
    images.clear_device_owners(tmp_path)
    expected = tmp_path / "expected"
    write(expected, TTY_INFO, terminal(PTY, (14, 1000), (15, 5)), terminal(CTTY))
    assert path.read_bytes() == expected.read_bytes()


def test_a_dump_without_terminals_has_no_owners_to_forget(tmp_path):
    images.clear_device_owners(tmp_path)
    assert list(tmp_path.iterdir()) == []


def vma(id: int, protection: int, flags: int, status: int) -> bytes:
    return message(
        (1, 1 << 40), (2, 1 << 41), (3, 0), (4, id), (5, protection), (6, flags), (7, status), (8, 1), (10, 0)
    )


def test_how_files_are_used(dump):
    """Mapped as program code, or so that others see what is written; a mapping of memory has a number, too."""
    private, shared, anonymous = 1 << 6, 1 << 7, 1 << 9
    areas = [vma(2, 5, 2, private), vma(1, 3, 1, shared), vma(4, 5, 2, anonymous), vma(2, 1, 2, private)]
    write(dump / "files.img", FILES, *(read_only(id, name) for id, name in ((1, "/a"), (2, "/b"), (4, "/c"))))
    write(dump / "mm-2.img", 0x57492820, message((1, 7), *((14, area) for area in areas)))
    found = {file.path: (file.writes, file.through_mapping, file.code) for file in images.regular_files(dump)}
    assert found == {"/a": (True, True, False), "/b": (False, False, True), "/c": (False, False, False)}


def read_only(id: int, name: str, mode: int | None = 0o100644) -> bytes:
    fields = [(1, id), (2, os.O_RDONLY), (6, name.encode(errors="surrogateescape"))]
    return message((1, 1), (2, id), (3, message(*fields, *([(10, mode)] if mode is not None else []))))


def test_names_that_the_dump_made(dump):
    named = [(3, "/data/gone", 0o100644), (9, "/data/link_remap.9", None), (10, "/data/link_remap.10", 0o100644)]
    write(dump / "files.img", FILES, *(read_only(*one) for one in named))
    write(dump / "remap-fpath.img", REMAP, message((1, 3), (2, 9), (3, 0)))
    assert [(file.path, file.made) for file in images.regular_files(dump)] == [
        ("/data/link_remap.10", False),  # the user's
        ("/data/link_remap.9", True),
    ]
    write(dump / "remap-fpath.img", REMAP, message((1, 3), (2, 9), (3, 1)))
    assert not any(file.made for file in images.regular_files(dump)), "what travels in the image has no name"


@pytest.mark.parametrize("name", ["/data/a.csv", "/data/link_remap.", "/data/link_remap.1x", "link_remap.1", "/x/../y"])
def test_no_other_name_is_taken_for_one_that_a_dump_made(name):
    assert not images.is_made_name(name)


def test_what_lies_in_proc_is_not_looked_for_on_the_host_and_may_not_come_back(dump):
    directory = stat.S_IFDIR | 0o555
    opened = ["/proc/8192/status", "/proc/meminfo", "/proc/8192/task/8192/stat", "/proc/8192/task/8193/stat", "/procs"]
    cwd = [("/proc/8192/\udcf0;\n", directory), ("/proc", directory), ("/proc/8192/task", directory)]
    records = [read_only(id, name) for id, name in enumerate(opened)]
    records += [read_only(id, name, mode) for id, (name, mode) in enumerate(cwd, start=len(opened))]
    write(dump / "files.img", FILES, *records)
    write(dump / "fdinfo-2.img", FDINFO, *(message((1, id), (2, id)) for id in range(len(opened))))
    write(dump / "remap-fpath.img", REMAP)
    assert [file.path for file in images.regular_files(dump)] == ["/procs"]
    assert images.unrestorable(dump) == ["/proc/8192", "/proc/8192/task", "/proc/8192/task/8193/stat"]
