"""Shared memory, semaphores and temporary files of a kernel that will not come back from its image.

A living kernel's resource trackers remove them at its end; those of a sleeping kernel are in the image and end with it.
The agent's report lists what they would have removed (`agent.trackers`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from .manifest import Manifest

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where glibc keeps shared memory and semaphores


def remove(manifest: Manifest) -> None:
    """Remove what the kernel of an image had registered.  The manifest must be one that this user sealed.

    Each is removed only if it is the very file that it was, is this user's, and lies where such files do: in /dev/shm
    or in the directory for temporary files.
    """
    entries = manifest.report.get("tracked")
    for entry in entries if isinstance(entries, list) else ():
        with contextlib.suppress(OSError, KeyError, TypeError):
            path = Path(entry["path"])
            facts = path.lstat()
            same = (facts.st_dev, facts.st_ino, facts.st_uid) == (entry["device"], entry["inode"], os.geteuid())
            if not same or path.parent.resolve() not in (_SHARED_MEMORY, Path(tempfile.gettempdir()).resolve()):
                continue
            if stat.S_ISDIR(facts.st_mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
