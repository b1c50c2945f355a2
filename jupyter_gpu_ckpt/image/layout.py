"""The names of files and directories in an image and beside it, each once; docs/image-format.md explains them.

Imports nothing of the package, so that every module of it can use the names.
"""

from __future__ import annotations

from pathlib import Path

# -- in an image

MANIFEST = "manifest.json"
#: The seal over the bytes of the manifest.
SEAL = "manifest.mac"
#: The record of the process that the kernel lives as.
CLAIM = "claim.json"
#: The directory of numbered leases.
LEASES = "lease"
#: Names that a manifest does not list: itself, its seal, and what leases write.
RESERVED = frozenset({MANIFEST, SEAL, LEASES, CLAIM})

#: The directory that CRIU writes to.
CRIU = "criu"
#: In the directory above: the pages of the processes, which CRIU copies without a look.
PAGES = "pages-*.img"
#: In the directory above: the directory of device memory (`device`).
DEVICE = "device"
#: Patterns for names as a manifest lists them: pages, and files of device memory.
PAGES_FILES = f"{CRIU}/{PAGES}"
DEVICE_FILES = f"{CRIU}/{DEVICE}/*"

# -- in the image directory, beside the images

#: What the names of drafts begin with, and of no images; of all that a sweep removes once its writer is gone.
DRAFT = ".draft-"
#: What is added to the name of a draft: its lock, and what a quota promised to it.
LOCK = ".lock"
PROMISE = ".room"
#: The directory of what is being fetched from elsewhere.
INCOMING = ".incoming"
#: What the names of an image's marks end with (`mark`).
RETIRED, ACCEPTS, ARCHIVED, SENT = ".retired", ".accepts", ".archived", ".sent"


def mark(path: Path, suffix: str) -> Path:
    """The mark beside the image at ``path``; its lock with the suffix `LOCK`."""
    return path.with_name(f".{path.name}{suffix}")


def device_file(name: str) -> str:
    """The name that a manifest lists a file of device memory by."""
    return f"{CRIU}/{DEVICE}/{name}"
