"""The last generations of each kernel's images, recorded on this machine: an old image that is put back is refused.

A seal shows that this user made an image, not that it is the last one: a writer of the image directory can put
back an older copy.  So the generation that was published last, and the last one that was restored, are recorded outside
it, beside the keys.  A machine without a record of the kernel accepts any sealed image.

A kernel has a record file of its own until it has ended and has no image.  Then the record becomes a line in one file
for all of them: else an image of the ended kernel could be put back.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..errors import ImageStale, KeyUnusable
from ..files.atomic import flush, write_atomically
from .manifest import Manifest

#: Seconds to wait for another process that writes a record.
_TIMEOUT = 10.0
#: The file with the records of kernels that have ended: a line each, id, `published` and `spent`.
ENDED = "ended"
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_-]{0,127}")


class Generations:
    """The records of all kernels in one directory, which is made on first use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def next_generation(self, kernel_id: str, last: int) -> int:
        """Return the generation of the kernel's next image; ``last``: of the image it was restored from, or 0."""
        return max(last, self._read(kernel_id)["published"]) + 1

    def record_published(self, manifest: Manifest) -> None:
        """Record that an image was published, unless it is a save point.  Raises `KeyUnusable`."""
        if manifest.save_point is None:
            self._raise_to(manifest.kernel_id, published=manifest.generation)

    def record_restored(self, kernel_id: str, generation: int | None = None) -> None:
        """Record that the kernel runs on after this image, or its last: older ones are void.  Raises `KeyUnusable`."""
        if generation is None:
            generation = self._read(kernel_id)["published"]
        if generation:
            self._raise_to(kernel_id, spent=generation)

    def require_current(self, manifest: Manifest) -> None:
        """Raise `ImageStale` for an image that is not the last of its kernel, or that was restored.

        A save point is restored any number of times, and no other image outdates it.
        """
        if manifest.save_point is not None:
            return
        record = self._read(manifest.kernel_id)
        if manifest.generation < record["published"]:
            message = f"The image is number {manifest.generation} of its kernel; the last was {record['published']}."
            raise ImageStale(message, image=manifest.id)
        if manifest.generation and manifest.generation <= record["spent"]:
            raise ImageStale("The kernel came back from this image and has run on since.", image=manifest.id)

    def close(self, kernel_id: str) -> None:
        """Move the record of an ended kernel without an image to the common file.  Raises `KeyUnusable`."""
        path = self._path(kernel_id)
        if not path.exists():
            return
        try:
            with FileLock(self.directory / ".lock", timeout=_TIMEOUT, mode=0o600):
                record = self._read(kernel_id)
                self._append(f"{kernel_id} {record['published']} {record['spent']}")
                path.unlink(missing_ok=True)
        except OSError as error:
            raise self._unusable() from error

    def _append(self, line: str) -> None:
        """Append a line, durably.  After a crash in the middle the record is still in its own file."""
        fd = os.open(self.directory / ENDED, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "a") as file:
            file.write(f"\n{line}\n")  # a line before it that a crash cut off stays apart
            file.flush()
            os.fsync(fd)
        flush(self.directory)

    def _ended(self, kernel_id: str) -> dict[str, int]:
        """Return the record of an ended kernel; lines of other shapes are ignored."""
        published = spent = 0
        with contextlib.suppress(FileNotFoundError), (self.directory / ENDED).open(errors="replace") as lines:
            for line in lines:
                match line.split():
                    case [id, first, second] if id == kernel_id and first.isdecimal() and second.isdecimal():
                        published, spent = max(published, int(first)), max(spent, int(second))
        return {"published": published, "spent": spent}

    def _read(self, kernel_id: str) -> dict[str, int]:
        record: Any = {}
        try:
            with contextlib.suppress(FileNotFoundError):
                # A crash leaves an empty file on some disks: it counts as no record.
                record = json.loads(self._path(kernel_id).read_text() or "{}")
            ended = self._ended(kernel_id)
        except (OSError, ValueError) as error:
            raise self._unusable() from error
        if not isinstance(record, dict) or not all(type(value) is int for value in record.values()):
            raise self._unusable()
        return {name: max(record.get(name, 0), known) for name, known in ended.items()}

    def _raise_to(self, kernel_id: str, **facts: int) -> None:
        path = self._path(kernel_id)
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Locked: of two processes that read the same record, one would undo the other's change.
            with FileLock(self.directory / ".lock", timeout=_TIMEOUT, mode=0o600):
                record = self._read(kernel_id)
                for name, value in facts.items():
                    record[name] = max(record[name], value)
                write_atomically(path, json.dumps(record), durable=True)
        except OSError as error:
            raise self._unusable() from error

    def _path(self, kernel_id: str) -> Path:
        if not _NAME.fullmatch(kernel_id):
            raise ImageStale("The image's kernel has an id that no kernel of this package has.")
        return self.directory / f"{kernel_id}.json"

    def _unusable(self) -> KeyUnusable:
        message = "The record of this kernel's images cannot be read or written."
        return KeyUnusable(message, path=str(self.directory), hint="Delete it: then older images are not noticed.")
