"""The user's files that a save point keeps, so that a kernel can go back to them: as they were when it was saved.

A file that the kernel has open for writing is copied into the image, as a reflink where the file system can.  Of others
that it uses (program code, a table that it has mapped) the save point has a hard link beside the image: whoever
installs another version makes another file.  A link is possible on the same file system only, and to a file that is the
user's own.  What was not kept is in none of both; a kernel can then go back with the file as it is now, if at all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from ..errors import ImageDamaged
from ..files import clone
from . import layout
from .image import Image

#: Shared memory is the kernel's, not a file of the user.
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - where glibc keeps it
_BLOCK = 4 << 20


@dataclass(frozen=True)
class KeptFile:
    """A file as it was: by a ``copy`` or a ``link`` of this name, or neither.  ``mtime`` in ns; hash of a copy."""

    bytes: int
    mtime: int
    mode: int
    copy: str = ""
    link: str = ""
    blake3: str = ""

    @property
    def kept(self) -> bool:
        """Return whether the file can be put back."""
        return bool(self.copy or self.link)


def links_directory(path: Path) -> Path:
    """Return the directory of hard links of the image at ``path``."""
    return path.with_name(f"{layout.LINKED}{path.name}")


def keep(
    files: Mapping[str, Mapping[str, Any]], more: Iterable[str], directory: Path, links: Path, most: int
) -> dict[str, KeptFile]:
    """Keep the files of a fingerprint, and ``more``, in these directories; copies may cost ``most`` bytes together.

    The processes that write to them are stopped.  A file that cannot be kept is listed without a copy and a link.
    """
    found: dict[str, KeptFile] = {}
    wanted = {path: bool(facts.get("writes")) for path, facts in files.items() if not facts.get("made")}
    for path, writes in {**wanted, **dict.fromkeys(more, True)}.items():
        with contextlib.suppress(OSError, ValueError):
            facts = os.lstat(path)
            if not stat.S_ISREG(facts.st_mode):
                continue
            name, copied, linked = str(len(found)), False, False
            with contextlib.suppress(OSError):
                if writes:
                    directory.mkdir(mode=0o700, exist_ok=True)
                    cost = clone.copy(Path(path), directory / name, most)
                    copied, most = cost is not None, most - (cost or 0)
                elif facts.st_uid == os.geteuid():
                    links.mkdir(mode=0o700, exist_ok=True)
                    os.link(path, links / name, follow_symlinks=False)
                    linked = True
            mode, mtime = stat.S_IMODE(facts.st_mode), facts.st_mtime_ns
            copy, link = name if copied else "", name if linked else ""
            if writes or linked:
                found[path] = KeptFile(facts.st_size, mtime, mode, copy, link)
    return found


def hashed(files: Mapping[str, KeptFile], directory: Path) -> dict[str, dict[str, Any]]:
    """Return the files as JSON objects, with hashes of their copies in ``directory``.  Raises `OSError`."""
    return {
        path: {**vars(file), "blake3": _hash(directory / file.copy) if file.copy else ""}
        for path, file in files.items()
    }


def of_image(image: Image) -> dict[str, KeptFile]:
    """Return the kept files of a save point by path; those whose facts have another shape are left out."""
    files = (image.manifest.save_point or {}).get("files")
    found = {}
    for path, facts in files.items() if isinstance(files, dict) else ():
        with contextlib.suppress(TypeError):
            file = KeptFile(**facts)
            names = (file.copy, file.link)
            if all(isinstance(name, str) and (name.isdecimal() or not name) for name in names):
                found[path] = file
    return found


def differs(path: str, file: KeptFile) -> bool:
    """Return whether the file at ``path`` is another one now.  Reads it if its size is the same, and its time not."""
    try:
        now = os.lstat(path)
        if not stat.S_ISREG(now.st_mode) or now.st_size != file.bytes:
            return True
        if now.st_mtime_ns == file.mtime and not path.startswith(SHARED_MEMORY):
            return False
        return bool(file.blake3) and _hash(Path(path)) != file.blake3
    except OSError:
        return True


def put_back(path: str, file: KeptFile, directory: Path, links: Path) -> None:
    """Replace the file at ``path``, atomically, by the kept one.  Raises `OSError`, `ImageDamaged`."""
    target = Path(path)
    draft = target.with_name(f".{target.name[:200]}-{secrets.token_hex(4)}")
    try:
        if file.copy:
            clone.copy(directory / file.copy, draft, file.bytes)
            if _hash(draft) != file.blake3:
                raise ImageDamaged(f"The copy of {path} is not what was saved.", path=path)
            draft.chmod(file.mode)
            os.utime(draft, ns=(file.mtime, file.mtime))
        else:
            os.link(links / file.link, draft)
            facts = draft.lstat()
            if (facts.st_size, facts.st_mtime_ns) != (file.bytes, file.mtime):
                raise ImageDamaged(f"{path} was changed in place since it was saved.", path=path)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)  # of one file a rename does nothing


def _hash(path: Path) -> str:
    hasher = blake3()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
    return hasher.hexdigest()
