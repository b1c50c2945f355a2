"""Quantities as text, each written in one way: bytes, transfer rates and durations.

Sizes are binary units, as GPU memory and ``df -h`` have them; rates are decimal units, as disks and links have them.
The agent (`inside`) runs in kernels whose environment may lack this package and writes sizes by its own
`agent.tensors.human`, in the same form.
"""

from __future__ import annotations


def size(count: float, digits: int = 1) -> str:
    """Bytes: ``512 B``, ``1.5 GiB``.  ``digits``: after the point; two where a text compares two sizes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.{digits}f} TiB"


def rate(count: float, seconds: float) -> str:
    """Bytes a second: ``340 MB/s``, ``1.9 GB/s``.  No time at all counts as a millisecond."""
    megabytes = count / max(seconds, 1e-3) / 1e6
    return f"{megabytes:.0f} MB/s" if megabytes < 999.5 else f"{megabytes / 1e3:.1f} GB/s"


def duration(seconds: float) -> str:
    """Seconds in the largest unit that fits: ``0.8 s``, ``42 s``, ``7 min``, ``3 h``, ``2 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
