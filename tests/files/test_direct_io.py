"""Files past the page cache: every length and offset, also where the file system or the kernel does less than asked."""

from __future__ import annotations

import errno
import os

import pytest

from jupyter_gpu_ckpt.files import direct_io

LENGTHS = (0, 1, 511, 4095, 4096, 4097, 3 * 4096, (1 << 20) + 5)


@pytest.fixture(params=["direct", "refused", "short"])
def way(request, monkeypatch):
    """Ways of a file system: as it likes it; refusing it; and with fewer bytes at a time than asked for."""
    if request.param == "refused":
        opened = os.open

        def refuse(path, flags, *rest):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return opened(path, flags, *rest)

        monkeypatch.setattr(os, "open", refuse)
    elif request.param == "short":
        read, write = os.preadv, os.pwritev
        monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:8192]], at))
        monkeypatch.setattr(os, "pwritev", lambda fd, views, at: write(fd, [views[0][:8192]], at))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("offset", [0, 8192])
def test_what_is_written_is_read(tmp_path, way, length, offset):
    data, into = direct_io.buffer(2 << 20), direct_io.buffer(2 << 20)
    content = os.urandom(length)
    data[:length] = content
    data[length : length + 8192] = b"x" * 8192  # of the piece before
    direct_io.write(tmp_path / "file", data, length, offset=offset, size=offset + length)
    stored = (tmp_path / "file").read_bytes()
    assert stored[offset:] == content
    assert stored[:offset] in (bytes(offset), b"")
    assert bytes(direct_io.read(tmp_path / "file", into, length, offset)) == content
    assert bytes(direct_io.read(tmp_path / "file", into, length + 4096, offset)) == content, "it ends before"
    assert bytes(direct_io.read(tmp_path / "file", into, length // 2, offset)) == content[: length // 2]


def test_what_comes_after_is_left_alone(tmp_path, way):
    (tmp_path / "file").write_bytes(b"a" * 20000)
    data = direct_io.buffer(8192)
    data[:] = b"b" * 8192
    direct_io.write(tmp_path / "file", data, 5000, offset=4096, size=20000)
    assert (tmp_path / "file").read_bytes() == b"a" * 4096 + b"b" * 5000 + b"a" * (20000 - 9096)


def test_another_error_is_no_reason_to_try_again(tmp_path):
    with pytest.raises(FileNotFoundError):
        direct_io.read(tmp_path / "none", direct_io.buffer(1), 1)
    (tmp_path / "link").symlink_to("/etc/hostname")
    with pytest.raises(OSError, match="symbolic links"):
        direct_io.write(tmp_path / "link", direct_io.buffer(1), 1, size=1)


@pytest.mark.parametrize("length", LENGTHS)
def test_zeros(length):
    data = direct_io.buffer(2 << 20)[:length]
    assert direct_io.is_zero(data)
    for at in {0, length // 2, length - 1} if length else ():
        data[at] = 1
        assert not direct_io.is_zero(data)
        data[at] = 0
