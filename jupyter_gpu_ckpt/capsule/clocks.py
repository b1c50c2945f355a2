"""The clocks that go on in a restored kernel: a time namespace shifts them (time_namespaces(7))."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Clocks:
    """Readings of CLOCK_MONOTONIC and CLOCK_BOOTTIME in nanoseconds."""

    monotonic: int
    boottime: int

    @classmethod
    def now(cls) -> Clocks:
        """The clocks of the caller's own time namespace."""
        return cls(time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME))

    def __sub__(self, other: Clocks) -> Clocks:
        return Clocks(self.monotonic - other.monotonic, self.boottime - other.boottime)


#: As an offset: the clocks of the host.
UNSHIFTED = Clocks(0, 0)
