"""What lies in one user's image directory, looked at by somebody who does not trust that user.

Everything in the directory is the user's to write, so nothing in it is believed, followed, waited for or read without
end: no link is followed, nothing but plain files of the user's own is opened, and there are bounds on sizes, counts and
depths.  It is to run in a process of its own without rights (`confined`); the answer is plain JSON, and whoever gets it
checks it again (`report`).
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import GpuCkptError
from ..image import absences
from ..image.draft import PREFIX
from ..image.integrity import MANIFEST
from ..image.manifest import Manifest

#: What is looked at of one user: images, files below them, directories in directories, bytes of a manifest.
MOST_IMAGES = 5_000
MOST_FILES = 200_000
DEEPEST = 5
MOST_BYTES = 4 << 20
#: Bytes that no kernel has.
BEYOND_REASON = 1 << 50
#: Characters of a name.
LONGEST = 100

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class NotTheirs(Exception):
    """The directory belongs to somebody else than it should."""


def survey(name: str, owner: int, root: int | None = None) -> dict[str, Any]:
    """Look at the directory ``name`` (below the descriptor ``root``), which is to belong to the uid ``owner``.

    Returns ``images`` (a list), ``absences`` (``gpu_seconds`` and ``times``), ``disk`` (bytes on disk, of everything)
    and ``problems`` (a count by what was passed over).  Raises `OSError`, `NotTheirs`.
    """
    at = os.open(name, _DIRECTORY, dir_fd=root)
    try:
        if os.fstat(at).st_uid != owner:
            raise NotTheirs
        return _Survey(at, owner).result()
    finally:
        os.close(at)


class _Survey:
    def __init__(self, at: int, owner: int) -> None:
        self._at = at
        self._owner = owner
        self._problems: Counter[str] = Counter()
        self._files = 0
        self._seen: set[tuple[int, int]] = set()

    def result(self) -> dict[str, Any]:
        images, disk = [], 0
        back: set[str] = set()
        record = absences.read(self._read(self._at, absences.RECORD, absences.MOST_BYTES) or b"")
        back.update(absence.image for absence in record if absence.image)
        for count, name in enumerate(sorted(self._directories())):
            if count >= MOST_IMAGES:
                self._problems["too many images"] += 1
                break
            with self._inside(self._at, name) as at:
                if at is None:
                    continue
                taken = self._disk(at, 1)
                disk += taken
                if not name.startswith(".") and (found := self._image(at, name)) is not None:
                    images.append({**found, "disk": taken, "back": name in back})
                elif name.startswith(PREFIX):
                    self._problems["an image that is being made or was broken off"] += 1
        gpu_seconds, times = sum(one.gpu_seconds for one in record), sum(one.times for one in record)
        return {
            "images": images,
            "disk": disk,
            "absences": {"gpu_seconds": gpu_seconds, "times": times},
            "problems": dict(self._problems),
        }

    def _directories(self) -> list[str]:
        found = []
        with os.scandir(self._at) as entries:
            for count, entry in enumerate(entries):
                if count >= 10 * MOST_IMAGES:  # each image may have some marks beside it
                    self._problems["too many files"] += 1
                    break
                if entry.is_dir(follow_symlinks=False):
                    found.append(entry.name)
                elif not entry.name.startswith("."):
                    self._problems["not an image"] += 1
        return found

    @contextlib.contextmanager
    def _inside(self, at: int, name: str) -> Iterator[int | None]:
        """The descriptor of a directory of the user's; None for what is not one, or cannot be entered."""
        try:
            inside = os.open(name, _DIRECTORY, dir_fd=at)
        except OSError:
            self._problems["cannot be read"] += 1
            yield None
            return
        try:
            if os.fstat(inside).st_uid == self._owner:
                yield inside
            else:
                self._problems["belongs to another"] += 1
                yield None
        finally:
            os.close(inside)

    def _image(self, at: int, name: str) -> dict[str, Any] | None:
        text = self._read(at, MANIFEST, MOST_BYTES)
        if text is None:
            self._problems["no manifest that can be read"] += 1
            return None
        try:
            manifest = Manifest.from_json(text)
        except (GpuCkptError, ValueError, RecursionError, MemoryError):
            self._problems["a damaged manifest"] += 1
            return None
        on_device = sum(manifest.device_bytes.values())
        if manifest.id != name or max(on_device, manifest.bytes) > BEYOND_REASON:
            self._problems["a damaged manifest"] += 1
            return None
        retired = self._mark(name, "retired")
        return {
            "id": name[:LONGEST],
            "kernel_id": manifest.kernel_id[:LONGEST],
            "kernel_name": manifest.kernel_name[:LONGEST],
            "hostname": manifest.hostname[:LONGEST],
            "created": float(manifest.created),
            "ended": retired,
            "archived": self._mark(name, "archived") is not None,
            "bytes": manifest.bytes,
            "device_bytes": on_device,
            "gpus": len(manifest.device_bytes),
            "models": _models(manifest),
        }

    def _mark(self, name: str, mark: str) -> float | None:
        with contextlib.suppress(OSError):
            return max(0.0, os.stat(f".{name}.{mark}", dir_fd=self._at, follow_symlinks=False).st_mtime)
        return None

    def _disk(self, at: int, depth: int) -> int:
        """Bytes on disk of the user's files below ``at``, each once."""
        taken = 0
        with os.scandir(at) as entries:
            for entry in entries:
                self._files += 1
                if self._files > MOST_FILES or depth > DEEPEST:
                    self._problems["too many files"] += 1
                    return taken
                try:
                    facts = entry.stat(follow_symlinks=False)
                except OSError:
                    continue  # it has gone meanwhile
                if stat.S_ISDIR(facts.st_mode):
                    with self._inside(at, entry.name) as below:
                        taken += self._disk(below, depth + 1) if below is not None else 0
                elif stat.S_ISREG(facts.st_mode):
                    key = facts.st_dev, facts.st_ino
                    if facts.st_uid == self._owner and key not in self._seen:
                        taken += facts.st_blocks * 512
                    if facts.st_nlink > 1:
                        self._seen.add(key)
        return taken

    def _read(self, at: int, name: str, most: int) -> bytes | None:
        """A plain file of the user's, of one name and no more than ``most`` bytes; None for anything else."""
        try:
            fd = os.open(name, _FILE, dir_fd=at)
        except OSError:
            return None
        facts = os.fstat(fd)
        plain = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1 and facts.st_uid == self._owner
        if not plain or facts.st_size > most:
            os.close(fd)
            return None
        with open(fd, "rb") as file:
            text = file.read(most + 1)
        return text if len(text) <= most else None


def _models(manifest: Manifest) -> list[str]:
    """The models of the GPUs the kernel had memory on, as far as the fingerprint says so."""
    gpus = manifest.fingerprint.get("gpus")
    found = set()
    for gpu in gpus[:64] if isinstance(gpus, list) else []:
        if isinstance(gpu, dict) and gpu.get("uuid") in manifest.device_bytes and isinstance(gpu.get("name"), str):
            found.add(gpu["name"][:LONGEST])
    return sorted(found)


def own(directory: Path) -> dict[str, Any]:
    """`survey` of the caller's own directory; an empty one if there is none."""
    if not directory.is_dir():
        return {"images": [], "disk": 0, "absences": {"gpu_seconds": 0.0, "times": 0}, "problems": {}}
    return survey(str(directory.resolve()), os.geteuid())
