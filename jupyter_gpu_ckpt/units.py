"""Format bytes, transfer rates and durations.

Sizes are in binary units, as for GPU memory and ``df -h``; rates are in decimal units, as for disks and links.  The
agent runs in kernels whose environment may lack this package and formats sizes by `agent.tensors.human`.
"""

from __future__ import annotations


def size(count: float, digits: int = 1) -> str:
    """Format bytes: ``512 B``, ``1.5 GiB``, with ``digits`` after the point; two where a text compares sizes."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 - 10**-digits / 2:  # 1023.99 KiB is a MiB, not 1024.0 KiB
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:.{digits}f} TiB"


def counted(count: int, noun: str) -> str:
    """Format a number of things by the ``noun`` for one of them: ``1 process``, ``2 processes``, ``3 descriptors``."""
    plural = f"{noun}{'es' if noun.endswith('s') else 's'}"
    return f"{count} {noun if count == 1 else plural}"


def rate(count: float, seconds: float) -> str:
    """Format bytes per second: ``340 MB/s``, ``1.9 GB/s``.  Times below a millisecond count as one."""
    megabytes = count / max(seconds, 1e-3) / 1e6
    return f"{megabytes:.0f} MB/s" if megabytes < 999.5 else f"{megabytes / 1e3:.1f} GB/s"


def duration(seconds: float) -> str:
    """Format seconds in the largest unit that fits: ``0.8 s``, ``42 s``, ``7 min``, ``3 h``, ``2 d``."""
    for unit, length, finer in (("d", 86400, 3600), ("h", 3600, 60), ("min", 60, 1)):
        if seconds >= length - finer / 2:  # 59.6 s is a minute, not 60 s
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
