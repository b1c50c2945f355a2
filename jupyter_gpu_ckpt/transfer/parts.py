"""An image in parts of `PART` bytes, as it lies elsewhere: numbered by file and position, parts of zeros left out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ImageFormat
from ..image.manifest import Manifest

#: Bytes of every part but the last of a file: large enough for the rate of an object store, small enough to resend.
PART = 16 << 20
_ZEROS = bytes(PART)


@dataclass(frozen=True)
class Part:
    """The bytes from ``offset`` to ``end`` of a file of an image, and the ``name`` they have elsewhere."""

    name: str
    file: str
    offset: int
    end: int

    @property
    def length(self) -> int:
        """Bytes of the part."""
        return self.end - self.offset

    def read(self, directory: Path) -> bytes:
        """Return the part of the image in ``directory``.  Raises `ImageFormat` when the file is shorter, `OSError`."""
        fd = os.open(directory / self.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), self.length, self.offset)
        if len(data) != self.length:
            raise ImageFormat("The image is shorter than its manifest says.", file=self.file)
        return data


def parts(manifest: Manifest) -> Iterator[Part]:
    """Yield all parts of an image, in the order of the files' names."""
    for number, (file, entry) in enumerate(sorted(manifest.files.items())):
        for index, offset in enumerate(range(0, entry.bytes, PART)):
            yield Part(f"{number:04d}-{index:06d}", file, offset, min(offset + PART, entry.bytes))


def zeros(length: int) -> bytes:
    """Return ``length`` zeros, at most `PART`."""
    return _ZEROS[:length]
