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
import re
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from .. import procfs
from ..criu import images
from ..node.facts import identity
from .manifest import Manifest

#: Nanoseconds that the clock which stamps files may be behind this host's (that of a file server).
_BEHIND = 1_000_000_000
_DELETED = " (deleted)"
#: The end of a `secured_name`: the name of an image.
_SECURED = re.compile(r"\.\d{8}T\d{6}-[^./]+$")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where glibc keeps shared memory and semaphores


def made(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return the links that the dump of an image has made, and what they were.  The manifest may be unverified."""
    files = manifest.fingerprint.get("files")
    return {
        name: was
        for name, was in (files.items() if isinstance(files, dict) else ())
        if isinstance(was, dict) and was.get("made") and images.is_made_name(name)
    }


def secured_name(name: str, id: str) -> str:
    """Return the name of the second link that a link of image ``id`` has while it is restored."""
    return f"{name}.{id}"


def secure(manifest: Manifest) -> None:
    """Make a second link of each link of an image that is about to be restored: CRIU removes the first.

    Without it a restore that fails, or is killed, after that could not be tried again.
    """
    for name, was in made(manifest).items():
        with contextlib.suppress(OSError):
            if _regular(Path(name)).st_ino == was.get("inode"):
                Path(secured_name(name, manifest.id)).hardlink_to(name)


def put_back(manifest: Manifest) -> None:
    """Put links back that a restore has removed which was not completed (`secure`), and remove the second ones."""
    for name, was in made(manifest).items():
        with contextlib.suppress(OSError):
            second = Path(secured_name(name, manifest.id))
            if _regular(second).st_ino == was.get("inode"):
                with contextlib.suppress(FileExistsError):
                    Path(name).hardlink_to(second)
                second.unlink()


def remove_ghosts(directory: Path) -> None:
    """Remove what a killed restore of the dump in ``directory`` has left: until then the next one would fail."""
    for name in map(Path, images.ghost_names(directory)):
        for parent in name.parents:
            with contextlib.suppress(OSError):
                facts = (parent / name.name).lstat()
                if not stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid():
                    (parent / name.name).unlink()


def remove(manifest: Manifest, *, current: bool) -> None:
    """Remove the links of an image that has just been deleted.

    ``current``: it was not restored.  Then the links are the image's as long as they are the same file; else the kernel
    may have another image by now, with links of the same names, and only untouched links are removed.
    """
    for name, was in made(manifest).items():
        with contextlib.suppress(OSError):
            path = Path(name)
            device, inode, _, _, ctime = identity(_regular(path))
            if inode == was.get("inode") and (ctime == was.get("ctime") or (current and device == was.get("device"))):
                path.unlink()
        with contextlib.suppress(OSError):
            second = Path(secured_name(name, manifest.id))
            if _regular(second).st_ino == was.get("inode"):
                second.unlink()


def remove_of_dump(directory: Path, since: int) -> None:
    """Remove the links of the discarded dump in ``directory``, begun at ``since`` (ns since the epoch)."""
    for path in map(Path, images.made_names(directory)):
        with contextlib.suppress(OSError):
            if _regular(path).st_ctime_ns > since - _BEHIND:  # else the file is older than the dump
                Path(path).unlink()


def remove_of_processes(pids: Iterable[int], needed: Collection[str]) -> None:
    """Remove the links to deleted files that ``pids`` have open or mapped, but those of the paths in ``needed``.

    For a dump that was broken off: CRIU notes its links in the image only at the end.
    """
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended
            for opened_in, inodes in _deleted_files(pid).items():
                with contextlib.suppress(OSError):
                    root = Path(f"/proc/{pid}/root")
                    # CRIU takes the nearest that exists.
                    directory = next(each for each in [opened_in, *opened_in.parents] if Path(f"{root}{each}").is_dir())
                    for path in Path(f"{root}{directory}").iterdir():
                        name = str(directory / path.name)
                        first = name.rpartition(".")[0] if _SECURED.search(name) else name
                        if images.is_made_name(first) and name not in needed and _regular(path).st_ino in inodes:
                            path.unlink()


def _deleted_files(pid: int) -> dict[Path, set[int]]:
    """Return the inodes of deleted files that a process uses, by the directory that they were opened in."""
    found: dict[Path, set[int]] = {}
    files = [(mapping.name, mapping.inode) for mapping in procfs.maps(pid)]
    for number, target in procfs.links(pid):
        if target.endswith(_DELETED):
            with contextlib.suppress(OSError):
                files.append((target, os.stat(f"/proc/{pid}/fd/{number}").st_ino))
    for path, inode in files:
        if path.startswith("/") and path.endswith(_DELETED):
            found.setdefault(Path(path).parent, set()).add(inode)
    return found


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
