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
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from .. import procfs
from ..criu import images
from ..node.facts import identity
from ..process import file_facts
from .manifest import Manifest

_DELETED = " (deleted)"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where glibc keeps shared memory and semaphores


def needed(manifest: Manifest) -> set[str]:
    """Return the names of the links, and second links, that must stay for an image to be restored."""
    names = made(manifest)
    seconds = {secured_name(name, manifest.id) for name in names}
    return seconds if manifest.save_point is not None else {*names, *seconds}


def made(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """Return the links that the dump of an image has made, and what they were.  The manifest may be unverified."""
    files = manifest.fingerprint.get("files")
    return {
        name: was
        for name, was in (files.items() if isinstance(files, dict) else ())
        if isinstance(was, dict) and was.get("made") and images.is_made_name(name)
    }


def may_consume(manifest: Manifest) -> bool:
    """Return whether a restore of an image may remove files that are not the image's."""
    return any(True for _ in _consumed(manifest))


def _is_shared_memory(path: Path) -> bool:
    return path.parent == _SHARED_MEMORY


def secured_name(name: str, id: str) -> str:
    """Return the name of the second link that a file of image ``id`` has while it is restored."""
    return f"{name}.{id}"


def _consumed(manifest: Manifest) -> Iterator[tuple[Path, Path, Any]]:
    """Yield the files that an unfinished restore may remove, their second links, and their inodes.

    CRIU removes the links, and resource trackers the tracked files of a kernel that is killed as soon as it runs: those
    of its child processes, too, of which the kernel's agent does not know, so all that is used in /dev/shm.
    """
    files = manifest.fingerprint.get("files")
    used = files.items() if isinstance(files, dict) else ()
    names = {name: was.get("inode") for name, was in used if isinstance(was, dict) and _is_shared_memory(Path(name))}
    names |= {name: was.get("inode") for name, was in made(manifest).items()}
    names |= {str(path): inode for path, _, inode in _tracked(manifest)}
    for name, inode in names.items():
        yield Path(name), Path(secured_name(name, manifest.id)), inode


def secure(manifest: Manifest) -> None:
    """Make a second link of each file that the restore of an image may remove before the image can go.

    Without it a restore that fails, or is killed, after that could not be tried again.
    """
    for path, second, inode in _consumed(manifest):
        with contextlib.suppress(OSError):
            if _regular(path).st_ino == inode:
                second.hardlink_to(path)


def put_back(manifest: Manifest) -> None:
    """Put files back that an unfinished restore has removed; the second links (`secure`) stay."""
    for path, second, inode in _consumed(manifest):
        with contextlib.suppress(OSError):
            if _regular(second).st_ino == inode:
                path.hardlink_to(second)


def set_aside(manifest: Manifest) -> dict[str, str]:
    """Return, by name, the second links of files that do not have that name now: `put_back` would make it."""
    found = {}
    for path, second, inode in _consumed(manifest):
        with contextlib.suppress(OSError):
            if _regular(second).st_ino == inode and not (path.exists() and path.samefile(second)):
                found[str(path)] = str(second)
    return found


def share(manifest: Manifest, id: str) -> None:
    """Make second links of an image's files for image ``id``, a copy of it: `put_back` of that one finds them."""
    for name in made(manifest):
        with contextlib.suppress(OSError):
            Path(secured_name(name, id)).hardlink_to(secured_name(name, manifest.id))


def keep(manifest: Manifest) -> None:
    """Rename the links of a save point to their second names: the next dump of its kernel makes such links again.

    `put_back` makes them for a restore.  Idempotent, never raises.
    """
    secure(manifest)
    for name in made(manifest):
        path, second = Path(name), Path(secured_name(name, manifest.id))
        with contextlib.suppress(OSError):
            if _regular(second).st_ino == _regular(path).st_ino:
                path.unlink()


@contextlib.contextmanager
def ghosts_removed(directory: Path, mark: Path) -> Iterator[None]:
    """Remove the files that CRIU makes for a moment in a restore of the dump in ``directory``, if the body fails.

    With such a file in its place the next restore would fail.  ``mark`` is there while the body runs: where it is left
    of a process that was killed, the files are removed before the body.
    """
    if not (names := images.ghost_names(directory)):
        yield
        return
    if mark.exists():
        remove_ghosts(names)
    before = set(_ghosts(names))
    with contextlib.suppress(OSError):  # a disk that is full or read-only
        mark.touch(mode=0o600)
    try:
        yield
    except BaseException:
        remove_ghosts(names, before)
        raise
    finally:
        with contextlib.suppress(OSError):
            mark.unlink(missing_ok=True)


def remove_ghosts(names: Iterable[str], kept: Collection[Path] = ()) -> None:
    """Remove the files of `images.ghost_names` that are there, but those in ``kept``."""
    for path in _ghosts(names):
        if path not in kept:
            with contextlib.suppress(OSError):
                path.unlink()


def _ghosts(names: Iterable[str]) -> Iterator[Path]:
    for name in map(Path, names):
        for parent in name.parents:
            with contextlib.suppress(OSError):
                path = parent / name.name
                facts = path.lstat()
                if not stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid():
                    yield path


def remove(manifest: Manifest, *, current: bool, needed: Collection[str] = ()) -> None:
    """Remove the links of an image that has just been deleted, or is outdated.

    ``current``: it was not restored.  Then the links are the image's as long as they are the same file; else the kernel
    may have another image by now, with links of the same names, and only untouched links are removed.  ``needed``:
    links that stay.
    """
    for name, was in made(manifest).items() if manifest.save_point is None else ():
        with contextlib.suppress(OSError):
            path = Path(name)
            device, inode, _, _, ctime = identity(_regular(path))
            same = inode == was.get("inode") and (
                ctime == was.get("ctime") or (current and device == was.get("device"))
            )
            if same and name not in needed:
                path.unlink()
    for _, second, inode in _consumed(manifest):
        with contextlib.suppress(OSError):
            if _regular(second).st_ino == inode:
                second.unlink()


def note_before_dump(pids: Iterable[int], journal: Path) -> None:
    """Note in ``journal`` the deleted files of ``pids``, where a dump may link them, and the links that are there.

    CRIU writes what it has linked at the end of a dump, and a dump may be killed.  Raises `OSError`.
    """
    found: dict[str, dict[str, list[Any]]] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended
            for opened_in, inodes in _deleted_files(pid).items():
                # CRIU takes the nearest directory that exists.
                for directory in (opened_in, *opened_in.parents):
                    with contextlib.suppress(OSError):
                        there = [path.name for path in directory.iterdir() if images.is_made_name(str(path))]
                        noted = found.setdefault(str(directory), {"inodes": [], "there": there})
                        noted["inodes"] += sorted(inodes)
                        break
    if found:
        journal.write_text(json.dumps(found))


def remove_abandoned(journal: Path, others: Iterable[Path], needed: Collection[str]) -> None:
    """Remove the links that a dump has made since `note_before_dump`; it was discarded, or killed.

    ``needed``: links of images.  A file that another dump may have linked meanwhile, by one of the journals ``others``,
    keeps all its links: too many harm nobody.
    """
    elsewhere = {(each, inode) for other in others for each, noted in _read(other) for inode in noted["inodes"]}
    for directory, noted in _read(journal):
        with contextlib.suppress(OSError):
            for path in Path(directory).iterdir():
                if images.is_made_name(str(path)) and path.name not in noted["there"] and str(path) not in needed:
                    inode = _regular(path).st_ino
                    if inode in noted["inodes"] and (directory, inode) not in elsewhere:
                        path.unlink()


def _read(journal: Path) -> list[tuple[str, dict[str, list[Any]]]]:
    """Return the directories in a journal of `note_before_dump`; none if there is none, or it is incomplete."""
    try:
        found = json.loads(journal.read_text()).items()
    except (OSError, ValueError, AttributeError):
        return []
    return [
        (directory, noted)
        for directory, noted in found
        if isinstance(noted, dict) and all(isinstance(noted.get(name), list) for name in ("inodes", "there"))
    ]


def _deleted_files(pid: int) -> dict[Path, set[int]]:
    """Return the inodes of deleted files that a process uses, by the directory that they were opened in."""
    found: dict[Path, set[int]] = {}
    files = [(mapping.name, mapping.inode) for mapping in procfs.maps(pid)]
    for number, target in procfs.links(pid):
        if target.endswith(_DELETED):
            with contextlib.suppress(OSError):
                files.append((target, file_facts.identity(f"/proc/{pid}/fd/{number}")[2]))
    for path, inode in files:
        if was := procfs.path_of_deleted(path, inode):
            found.setdefault(Path(was).parent, set()).add(inode)
    return found


def _regular(path: Path) -> os.stat_result:
    """Return the status of a regular file; symbolic links are not followed.  Raises `OSError`."""
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a regular file", str(path))
    return facts


def remove_tracked(manifest: Manifest) -> None:
    """Remove the tracked files of an image's kernel.  The manifest must be one that this user sealed.

    Each is removed only if it is the very file that it was, and is this user's.
    """
    for path, device, inode in _tracked(manifest):
        with contextlib.suppress(OSError):
            facts = path.lstat()
            if (facts.st_dev, facts.st_ino, facts.st_uid) != (device, inode, os.geteuid()):
                continue
            if stat.S_ISDIR(facts.st_mode):
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _tracked(manifest: Manifest) -> Iterator[tuple[Path, Any, Any]]:
    """Yield path, device and inode of tracked files that lie where such files do: in /dev/shm or among temporary files.

    The kernel has reported them.
    """
    entries = manifest.report.get("tracked")
    for entry in entries if isinstance(entries, list) else ():
        with contextlib.suppress(OSError, KeyError, TypeError):
            path = Path(entry["path"])
            if path.parent.resolve() in (_SHARED_MEMORY, Path(tempfile.gettempdir()).resolve()):
                yield path, entry["device"], entry["inode"]
