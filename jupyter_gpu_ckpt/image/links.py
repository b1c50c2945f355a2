"""Files outside an image that are removed with it when it is deleted without a restore.

*Links*: CRIU (``--link-remap``) makes a hard link of an open, deleted file, ``link_remap.NN``, in the directory that
the file was opened in, so that a restore can open it again and remove the link.

*Tracked files*: shared memory, semaphores and temporary files.  A living kernel's resource trackers remove them at its
end; those of a sleeping kernel are in the image and end with it.  The agent's report lists what they would have removed
(`agent.trackers`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from pathlib import Path

from ..criu import images
from ..node.facts import identity
from .manifest import Manifest

#: Nanoseconds that the clock which stamps files may be behind this host's (that of a file server).
_BEHIND = 1_000_000_000
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where glibc keeps shared memory and semaphores


def remove(manifest: Manifest, *, current: bool) -> None:
    """Remove the links of an image that has just been deleted.

    ``current``: it was not restored.  Then the links are the image's as long as they are the same file; else the kernel
    may have another image by now, with links of the same names, and only untouched links are removed.
    """
    files = manifest.fingerprint.get("files")
    for name, was in files.items() if isinstance(files, dict) else ():
        # The manifest may not have been verified.
        if not (isinstance(was, dict) and was.get("made") and images.is_made_name(name)):
            continue
        with contextlib.suppress(OSError):
            path = Path(name)
            device, inode, _, _, ctime = identity(_regular(path))
            if inode == was.get("inode") and (ctime == was.get("ctime") or (current and device == was.get("device"))):
                path.unlink()


def remove_of_dump(directory: Path, since: int) -> None:
    """Remove the links of the discarded dump in ``directory``, begun at ``since`` (ns since the epoch)."""
    for path in map(Path, images.made_names(directory)):
        with contextlib.suppress(OSError):
            if _regular(path).st_ctime_ns > since - _BEHIND:  # else the file is older than the dump
                Path(path).unlink()


def _regular(path: Path) -> os.stat_result:
    """Return the status of a regular file; symbolic links are not followed.  Raises `OSError`."""
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))
    return facts


def remove_tracked(manifest: Manifest) -> None:
    """Remove the tracked files of an image's kernel.  The manifest must be one that this user sealed.

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
