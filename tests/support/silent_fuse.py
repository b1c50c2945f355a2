"""A file system whose server stops answering, as a network file system's does when its host is gone.

The protocol is that of ``include/uapi/linux/fuse.h``, version 7.31: as much of it as opens one file and deletes names.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import stat
import struct
import threading
from pathlib import Path
from types import TracebackType

_INIT, _LOOKUP, _GETATTR, _UNLINK, _OPEN, _FORGET, _BATCH_FORGET = 26, 1, 3, 10, 14, 2, 42
#: Names of the one file.
_NAMES = (b"file", b"other")
_MNT_FORCE, _MNT_DETACH = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


class SilentFuse:
    """A mount with the file ``file`` in it, also known as ``other``; nothing is answered after `fall_silent`.

    For root only.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other"
        if _libc.mount(b"silent", os.fsencode(place), b"fuse", 0, options.encode()):
            raise OSError(ctypes.get_errno(), "mount")
        self._stop, self._tell = os.pipe()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def __enter__(self) -> SilentFuse:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()
        _libc.umount2(os.fsencode(self.place), _MNT_DETACH)
        os.close(self._stop)

    def end(self) -> None:
        """End the server: what waits for an answer is given an error, also where a process has inherited the device."""
        self.fall_silent()
        _libc.umount2(os.fsencode(self.place), _MNT_FORCE)
        if self._device >= 0:
            os.close(self._device)
            self._device = -1

    def fall_silent(self) -> None:
        """Answer nothing from here on."""
        if self._tell >= 0:
            os.close(self._tell)
            self._tell = -1
            self._thread.join()

    def _serve(self) -> None:
        while True:
            ready, _, _ = select.select([self._device, self._stop], [], [])
            if self._stop in ready:
                return
            request = os.read(self._device, 1 << 18)
            _, opcode, unique, node = struct.unpack_from("=IIQQ", request)
            if opcode in (_FORGET, _BATCH_FORGET):
                continue
            error, body = self._answer(opcode, node, request[40:])
            with contextlib.suppress(FileNotFoundError):  # who asked was interrupted
                os.write(self._device, struct.pack("=IiQ", 16 + len(body), -error, unique) + body)

    def _answer(self, opcode: int, node: int, body: bytes) -> tuple[int, bytes]:
        if opcode == _INIT:
            return 0, struct.pack("=IIIIHHIIHHI28x", 7, 31, 0, 0, 12, 10, 1 << 12, 1, 0, 0, 0)
        if opcode == _LOOKUP:
            if body.rstrip(b"\0") not in _NAMES:
                return errno.ENOENT, b""
            return 0, struct.pack("=QQQQII", 2, 0, 0, 0, 0, 0) + self._attributes(2)
        if opcode == _GETATTR:
            return 0, struct.pack("=QII", 0, 0, 0) + self._attributes(node)
        if opcode == _UNLINK:
            return 0, b""
        if opcode == _OPEN:
            return 0, struct.pack("=QII", 1, 0, 0)
        return errno.ENOSYS, b""

    @staticmethod
    def _attributes(node: int) -> bytes:
        mode = stat.S_IFDIR | 0o755 if node == 1 else stat.S_IFREG | 0o644
        return struct.pack("=6Q10I", node, 0, 0, 0, 0, 0, 0, 0, 0, mode, len(_NAMES), 0, 0, 0, 4096, 0)
