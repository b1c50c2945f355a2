"""A device of the driver's double whose memory several processes have together: each its own content, one capacity."""

from __future__ import annotations

import struct
from pathlib import Path

#: As in `memory_double.c`: the bytes of the device, and those that each process has.
_STATE = struct.Struct("=17Q")


class SharedDevice:
    """The file that the doubles share.  ``used``: bytes by slot."""

    def __init__(self, path: Path, bytes: int) -> None:
        self._path = path
        path.write_bytes(_STATE.pack(bytes, *[0] * 16))

    def environment(self, slot: int) -> dict[str, str]:
        """The variables of a process that has this slot."""
        return {"DOUBLE_SHARED": str(self._path), "DOUBLE_SLOT": str(slot), "DOUBLE_DIRTY": "1"}

    def used(self, slot: int) -> int:
        """The bytes that the process in this slot has."""
        return _STATE.unpack(self._path.read_bytes())[1 + slot]

    @property
    def free(self) -> int:
        """The bytes that nobody has."""
        bytes, *used = _STATE.unpack(self._path.read_bytes())
        return bytes - sum(used)

    def end(self, slot: int) -> None:
        """Free what a process had that has ended, as the driver does."""
        with open(self._path, "r+b") as file:
            file.seek(8 * (1 + slot))
            file.write(bytes(8))
