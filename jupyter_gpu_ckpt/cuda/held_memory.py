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
    ``descriptors``: this object's own, in the order of the library's export.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.descriptors: list[int] = []

    @property
    def most(self) -> int:
        """Return how many descriptors this process has for it."""
        return min(MOST, descriptors.free(os.getpid()) // _PART)

    def put(self, descriptors: list[int], bytes: int) -> None:
        """Hold the allocations behind these descriptors, with so many bytes together."""
        self.close()
        self.descriptors, self.bytes = descriptors, bytes

    def close(self) -> None:
        """Hold nothing any more: what nobody has mapped by now is freed."""
        while self.descriptors:
            os.close(self.descriptors.pop())
        self.bytes = 0
