"""A user's record of kernels that were off the GPU and are back: how much GPU time they gave to others.

Of a kernel that sleeps its image says so itself; of one that is back nothing is left in the store.  So a line is
appended to a file beside the images when device memory returns to a GPU, when it goes on from host memory into an
image, or when an image is deleted that its kernel never came back from.  Old lines are summed up by month, so that the
file stays small.  Writing it is never worth a failure of what it is about.

The file is the user's own, who can write anything there: it is for reports, not for bills.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .image import Image

#: The file, beside the images.
RECORD = ".absences.jsonl"
#: Bytes from which old lines are summed up, and how many of the last ones are kept as they are.
SUM_UP = 256 << 10
KEPT = 500
#: What a reader takes: more was not written here.
MOST_BYTES = 2 << 20
#: Seconds to wait for another process that writes.
_PATIENCE = 1.0
_MOST = 2**63


@dataclass(frozen=True)
class Absence:
    """Device memory was off the GPUs.

    ``since`` and ``until`` are seconds since the epoch; ``gpu_seconds`` counts the time for each GPU it had been on;
    ``device_bytes`` is the sum over them.  ``image``: the image the kernel came back from, if it was on disk.  One that
    stands for several, of a month, has ``times``, their number, and no kernel.
    """

    kernel_id: str
    image: str
    since: float
    until: float
    gpu_seconds: float
    device_bytes: int
    times: int = 1


def of(kernel_id: str, image: str, since: float, until: float, device_bytes: Mapping[str, int]) -> Absence:
    """The absence of what was on the GPUs of ``device_bytes`` (bytes by UUID)."""
    until = max(since, until)
    return Absence(kernel_id, image, since, until, len(device_bytes) * (until - since), sum(device_bytes.values()))


def came_back(root: Path, image: Image, now: float) -> None:
    """The kernel of ``image`` is on the GPU again.  Never raises."""
    manifest = image.manifest
    if manifest.device_bytes:
        write(root, of(manifest.kernel_id, image.id, manifest.created, now, manifest.device_bytes))


def removed(root: Path, image: Image, now: float) -> None:
    """``image`` is about to be deleted: if its kernel never came back, its absence ends here.  Never raises."""
    with contextlib.suppress(OSError):
        if not any(absence.image == image.id for absence in read(_bytes(root / RECORD))):
            came_back(root, image, image.retired_at or now)


def write(root: Path, absence: Absence) -> None:
    """Append it.  Never raises."""
    with contextlib.suppress(OSError), _appending(root / RECORD) as file:
        if file.seek(0, os.SEEK_END) > SUM_UP:
            _sum_up(root, absence)
        else:
            file.write(_line(absence))


@contextlib.contextmanager
def _appending(path: Path) -> Iterator[BinaryIO]:
    """The record, for one process at a time."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "a+b") as file:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.005)
                continue
            if os.fstat(fd).st_ino == path.stat().st_ino:  # else it was summed up while we waited
                yield file
                return


def read(text: bytes) -> list[Absence]:
    """What the record says, oldest first; lines that are none of ours are passed over.

    Nothing in it is believed but that times and numbers are what they are said to be.
    """
    found = []
    for line in text[:MOST_BYTES].splitlines():
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            absence = Absence(**json.loads(line))
            if _sound(absence):
                found.append(absence)
    return found


def _sound(absence: Absence) -> bool:
    texts = (absence.kernel_id, absence.image)
    numbers = (absence.since, absence.until, absence.gpu_seconds, absence.device_bytes, absence.times)
    return (
        all(isinstance(text, str) and len(text) <= 200 for text in texts)
        and all(type(number) in (int, float) and math.isfinite(number) and 0 <= number < _MOST for number in numbers)
        and absence.since <= absence.until
    )


def _sum_up(root: Path, last: Absence) -> None:
    """All lines but the last become one for each month; those of images that are still there stay."""
    absences = [*read(_bytes(root / RECORD)), last]
    recent = len(absences) - KEPT
    kept, months = [], defaultdict(list)
    for number, absence in enumerate(absences):
        if number >= recent or (absence.image and (root / absence.image).exists()):
            kept.append(absence)
        else:
            months[time.strftime("%Y-%m", time.gmtime(absence.until))].append(absence)
    draft = root / f"{RECORD}.new"
    draft.touch(0o600)
    draft.write_bytes(b"".join(map(_line, [*(_sum(months[month]) for month in sorted(months)), *kept])))
    draft.replace(root / RECORD)


def _sum(absences: Iterable[Absence]) -> Absence:
    several = list(absences)
    return Absence(
        kernel_id="",
        image="",
        since=min(one.since for one in several),
        until=max(one.until for one in several),
        gpu_seconds=sum(one.gpu_seconds for one in several),
        device_bytes=max(one.device_bytes for one in several),
        times=sum(one.times for one in several),
    )


def _line(absence: Absence) -> bytes:
    facts: dict[str, Any] = asdict(absence)
    return json.dumps(facts).encode() + b"\n"


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES)
    except FileNotFoundError:
        return b""
