"""The names of files and directories in an image and beside it, each once; docs/image-format.md explains them.

Imports nothing of the package, so that every module of it can use the names.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path

# -- in an image

MANIFEST = "manifest.json"
#: The seal over the bytes of the manifest.
SEAL = "manifest.mac"
#: The record of the kernel's living process.
CLAIM = "claim.json"
#: The directory of numbered leases.
LEASES = "lease"
#: Names that a manifest does not list: itself, its seal, and what leases write.
RESERVED = frozenset({MANIFEST, SEAL, LEASES, CLAIM})

#: The session of the kernel (`kernel.orphans`).
SESSION = "session.json"
#: The directory that CRIU writes to.
CRIU = "criu"
#: In the directory above: the pages of the processes, which CRIU copies without reading them.
PAGES = "pages-*.img"
#: In the directory above: the directory of device memory (`device_memory`).
DEVICE = "device"
#: In the same: the directory of what a save point has besides: the notebook, and copies of files.
KEPT = "kept"
#: In the directory above: program code, each file by its hash.
LIBRARIES = "libraries"
#: In the directory of what a save point has besides: the notebook's document.
NOTEBOOK = "notebook.ipynb"
#: Patterns for names as a manifest lists them: pages, also in chunks, files of device memory, and program code.
PAGES_FILES = f"{CRIU}/{PAGES}"
DEVICE_FILES = f"{CRIU}/{DEVICE}/*"
_CODE_FILES = f"{CRIU}/{KEPT}/{LIBRARIES}/*"
_PAGES_CHUNKS = f"{CRIU}/pages-*/*"

# -- in the image directory, beside the images

#: The prefix of drafts, and of everything else that a sweep removes when its writer is gone.
DRAFT = ".draft-"
#: The suffixes of a draft's lock, and of its reservation of a quota.
LOCK = ".lock"
RESERVATION = ".reservation"
#: The suffix of a draft's journal (`links.note_before_dump`).
LINKS = ".links"
#: The suffix of the mark of a draft that is completed when its kernel's process has ended (`completion`); its server
#: keeps it locked.
LATER = ".later"
#: The directory of images that are being fetched from elsewhere.
INCOMING = ".incoming"
#: The suffixes of an image's marks (`mark`).
RETIRED, ACCEPTS, ARCHIVED, SENT = ".retired", ".accepts", ".archived", ".sent"
#: The same of a save point: its kernel sleeps in it.
ASLEEP = ".asleep"
#: The same: CRIU restores it (`links.ghosts_removed`).
RESTORING = ".restoring"
#: The same of a save point in which a kernel sleeps: the files that were replaced since.
REPLACED = ".replaced"
#: The suffix of the lock of the image that branches are restored from (`branch.turn_to_restore`).
TURN = ".turn"
#: All that are removed with the image.
MARKS = (LOCK, RETIRED, ACCEPTS, ASLEEP, REPLACED, ARCHIVED, RESTORING, TURN)


def mark(path: Path, suffix: str) -> Path:
    """Return the path of a mark beside the image at ``path``; with the suffix `LOCK`, of its lock."""
    return path.with_name(f".{path.name}{suffix}")


def is_chunk(name: str) -> bool:
    """Return whether a file of this name in a manifest is a chunk, which save points may share (`shared_chunks`)."""
    return is_device_file(name) or is_page_chunk(name)


def is_linkable(name: str, *, of_branch: bool) -> bool:
    """Return whether images may share a file of this name in a manifest, by hard links.

    Those are chunks, program code, and the files of pages of a template and of the images of branches that start from
    it.
    """
    return is_chunk(name) or is_code(name) or (of_branch and fnmatch.fnmatchcase(name, PAGES_FILES))


def is_code(name: str) -> bool:
    """Return whether a file of this name in a manifest is program code that a save point has kept."""
    return fnmatch.fnmatchcase(name, _CODE_FILES)


def is_copy(name: str) -> bool:
    """Return whether a file of this name in a manifest is a copy of a file, which a save point has besides."""
    return name.startswith(f"{CRIU}/{KEPT}/") and not name.endswith(f"/{NOTEBOOK}")


def is_page_chunk(name: str) -> bool:
    """Return whether a file of this name in a manifest is a chunk of pages."""
    return fnmatch.fnmatchcase(name, _PAGES_CHUNKS)


def is_device_file(name: str) -> bool:
    """Return whether a file of this name in a manifest is one of device memory."""
    return fnmatch.fnmatchcase(name, DEVICE_FILES)


def device_file(name: str) -> str:
    """Return the name of a file of device memory in a manifest."""
    return f"{CRIU}/{DEVICE}/{name}"
