"""Device memory that stays on the GPU while its kernel is saved, as this process has descriptors of it."""

from __future__ import annotations

import os

from ..process import descriptors

#: Descriptors in one message (SCM_MAX_FD, unix(7): 253); the library exports no more, either (`native/held_memory.h`).
MOST = 250
#: The part of this process's free descriptors that one kernel may have.
_PART = 4


class HeldMemory:
    """Allocations of one kernel that the GPU keeps as long as this object has their descriptors.

    `FastPath` puts them in when it swaps out, and takes them when it swaps in.  ``bytes``: of these allocations.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._descriptors: list[int] = []

    @property
    def most(self) -> int:
        """Return how many descriptors this process has for it."""
        return min(MOST, descriptors.free(os.getpid()) // _PART)

    def put(self, descriptors: list[int], bytes: int) -> None:
        """Hold the allocations behind these descriptors, with so many bytes together."""
        self.close()
        self._descriptors, self.bytes = descriptors, bytes

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors, which stay this object's."""
        return self._descriptors

    def close(self) -> None:
        """Hold nothing any more: what nobody has mapped by now is freed."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        self.bytes = 0
