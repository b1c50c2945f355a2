"""Watches of inotify instances of stopped processes: removed for a dump, and added again after it.

Linux shows a watched file by its inode only.  CRIU opens it by its handle, which an ordinary user may not do, forgets
some flags of a watch, and cannot restore a process whose watched file is gone meanwhile.  So the watches are noted with
their paths and removed, CRIU saves an instance without watches, and they are added again under the same numbers.

An instance with unread events is refused: they could not be put back.  Changes during the sleep are not reported; a
file that is gone at the wake is reported as deleted, as if it had been deleted then.

Sources: inotify(7), proc_pid_fdinfo(5); in Linux fs/notify/fdinfo.c and fs/notify/inotify/inotify_user.c.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import select
import signal
import struct
import time
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from jupyter_gpu_ckpt import procfs
from jupyter_gpu_ckpt.process import file_facts, syscalls
from jupyter_gpu_ckpt.process.unsavable import Unsavable

#: Of one process: by descriptor, the number, mask and path of each watch.
Noted = dict[str, list[tuple[int, int, str]]]

#: The text of a refusal.
UNREAD = "an inotify watch with events not read yet"
#: Seconds that a search for watched files may take.
SEARCH_TIMEOUT = 3.0
_LINK = "anon_inode:inotify"
_WATCH = re.compile(
    r"inotify wd:(\w+) ino:(\w+) sdev:(\w+) mask:(\w+)[^\n]*?(?: fhandle-type:(\w+) f_handle:(\w+))?$", re.M
)
#: ioctl(2): the number of the next watch.
_SET_NEXT = 0x40044900
#: All events, and the flags IN_EXCL_UNLINK and IN_ONESHOT; a link itself is watched.
_MASK, _DONT_FOLLOW = 0x84000FFF, 0x02000000
_MINOR_BITS = 20


class UnsavableWatch(Unsavable):
    """An inotify instance cannot be restored; ``strerror`` names it, and the reason."""

    field = "unsupported_file"


class Watch(NamedTuple):
    """A watch: its number and mask; the watched file's inode, file system (as in mountinfo) and handle."""

    number: int
    mask: int
    inode: int
    device: str
    handle: bytes

    @property
    def file(self) -> str:
        """The watched file, as text."""
        return f"{self.device}:{self.inode}"


def watches(text: str) -> list[Watch]:
    """Parse the watches of an inotify instance, from the text of its fdinfo, by their numbers."""
    found = []
    for number, inode, device, mask, kind, handle in _WATCH.findall(text):
        major, minor = int(device, 16) >> _MINOR_BITS, int(device, 16) & (1 << _MINOR_BITS) - 1
        data = bytes.fromhex(handle)
        packed = struct.pack("=Ii", len(data), int(kind, 16)) + data if kind else b""
        found.append(Watch(int(number, 16), int(mask, 16) & _MASK, int(inode, 16), f"{major}:{minor}", packed))
    return sorted(found)


def remove(pids: Iterable[int], files: WatchedFiles) -> dict[int, Noted]:
    """Remove the watches of stopped processes.  Return what `put_back` needs, by process.

    Raises `UnsavableWatch`, `OSError`; *after failure* all is watched as before.
    """
    pids, done = list(pids), dict[int, Noted]()
    found = {key: kept for key in _instances(pids) if (kept := watches(_fdinfo(*key)))}
    for pid, number in found:
        with _borrowed(pid, number) as descriptor:
            if syscalls.readable_bytes(descriptor):
                raise UnsavableWatch(errno.EBUSY, f"{UNREAD} (descriptor {number})")
    paths = files.find(pids, [watch for kept in found.values() for watch in kept])
    try:
        for pid, number in found:
            with _borrowed(pid, number) as descriptor:
                _discard_events(descriptor)  # of the search
                for watch in watches(_fdinfo(pid, number)):  # none in an instance that was shared with a process before
                    if watch.file not in paths:
                        what = f"an inotify watch on a file that was not found (inode {watch.inode}"
                        raise UnsavableWatch(
                            errno.ENOENT, f"{what} of file system {watch.device}, descriptor {number})"
                        )
                    noted = done.setdefault(pid, {}).setdefault(str(number), [])
                    noted.append((watch.number, watch.mask, paths[watch.file]))
                    syscalls.check(syscalls.libc.inotify_rm_watch(descriptor, watch.number), "inotify_rm_watch")
                _discard_events(descriptor)  # of each removal
    except BaseException as error:
        failed = [why for pid, instances in done.items() for why in put_back(pid, instances)]
        if failed and isinstance(error, OSError):
            error.strerror = f"{error.strerror}; inotify watch on {', '.join(failed)}"
        raise
    return done


@contextlib.contextmanager
def _borrowed(pid: int, number: int) -> Iterator[int]:
    with syscalls.pidfd_of(pid) as pidfd, syscalls.borrowed(pidfd, number) as descriptor:
        yield descriptor


def _discard_events(descriptor: int) -> None:
    while syscalls.readable_bytes(descriptor):
        os.read(descriptor, 1 << 16)


def put_back(pid: int, noted: Noted) -> list[str]:
    """Add the watches of a process again, if it is there.  Return the paths that could not be watched, and why."""
    failed = []
    points, answering = {mount.point for mount in procfs.mounts()}, set[str]()
    for number, kept in noted.items():
        # Another process of the tree has its watches still to be put back when this one has ended.
        with contextlib.suppress(*procfs.GONE), _borrowed(pid, int(number)) as descriptor:
            for watch, mask, path in kept:
                try:
                    if (point := _mount_point(path, points)) not in answering:
                        file_facts.within_timeout(path)
                        answering.add(point)
                    _add(descriptor, watch, mask, path)
                except OSError as error:
                    failed.append(f"{path}: {os.strerror(error.errno or 0)}")
                    with contextlib.suppress(OSError):
                        _report_deleted(descriptor, watch, mask)
    return failed


def _add(descriptor: int, number: int, mask: int, path: str) -> None:
    fcntl.ioctl(descriptor, _SET_NEXT, number)
    made = syscalls.libc.inotify_add_watch(descriptor, os.fsencode(path), ctypes.c_uint32(mask | _DONT_FOLLOW))
    if syscalls.check(made, "inotify_add_watch") != number:
        syscalls.libc.inotify_rm_watch(descriptor, made)
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))


def _report_deleted(descriptor: int, number: int, mask: int) -> None:
    """Let the instance report that a watched file was deleted, by a file that has no name."""
    nameless = os.memfd_create("deleted")
    try:
        fcntl.ioctl(descriptor, _SET_NEXT, number)
        path = ctypes.c_char_p(b"/proc/self/fd/%d" % nameless)
        syscalls.check(syscalls.libc.inotify_add_watch(descriptor, path, ctypes.c_uint32(mask)), "inotify_add_watch")
    finally:
        os.close(nameless)


def _instances(pids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the inotify descriptors of the processes."""
    for pid in pids:
        with contextlib.suppress(*procfs.GONE):
            yield from ((pid, number) for number, target in procfs.links(pid) if target == _LINK)


def _fdinfo(pid: int, number: int) -> str:
    with contextlib.suppress(*procfs.GONE):
        return procfs.read(f"/proc/{pid}/fdinfo/{number}")
    return ""


def _mount_point(path: str, points: Container[str]) -> str:
    """Return which of the mount points ``path`` lies below."""
    while path not in points and path != "/":
        path = os.path.dirname(path)
    return path


class WatchedFiles:
    """The paths of watched files, remembered for the next dump."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    def find(self, pids: Iterable[int], wanted: Iterable[Watch]) -> dict[str, str]:
        """Return the paths of the watched files that are found, by `Watch.file`.

        A child process searches: file systems may not answer.  Root opens the files by their handles.  Others are found
        among the open files and directories of the processes ``pids``, and else by a search of at most
        `SEARCH_TIMEOUT`, from the processes' directories on, the upper directories first.
        """
        files = {watch.file: watch for watch in wanted}
        if not files:
            return {}
        reading, writing = os.pipe2(os.O_CLOEXEC)
        with open(reading, "rb", buffering=0) as answer:
            try:
                pid = os.fork()
                if pid == 0:
                    _answer(files, list(pids), [self._paths[file] for file in files if file in self._paths], writing)
            finally:
                os.close(writing)
            text, deadline = b"", time.monotonic() + SEARCH_TIMEOUT
            while select.select([answer], [], [], max(0.0, deadline - time.monotonic()))[0]:
                if not (data := answer.read(1 << 16)):
                    break
                text += data
        os.kill(pid, signal.SIGKILL)  # one that waits for a file system is reaped with the caller's other children
        found = dict(json.loads(line) for line in text.splitlines(keepends=True) if line.endswith(b"\n"))
        self._paths |= found
        return {file: path for file, path in found.items() if file in files}


def _answer(files: dict[str, Watch], pids: list[int], known: list[str], writing: int) -> None:
    """Write file and path of each that is found, and end the process."""
    try:
        search = _Search(files)
        for file, path in search.run(pids, known):
            os.write(writing, json.dumps([file, path]).encode() + b"\n")
    finally:
        os._exit(0)


class _Search:
    """A search for files by their inodes."""

    def __init__(self, files: dict[str, Watch]) -> None:
        self.left = files
        self.inodes = {watch.inode for watch in files.values()}
        #: By the mount point; of several, the last one is on top.
        self.mounts = {mount.point: mount.device for mount in procfs.mounts()}
        devices = {watch.device for watch in files.values()}
        self.points = [point for point, device in self.mounts.items() if device in devices]
        self.roots: dict[str, int] = {}
        for point in self.points:
            with contextlib.suppress(OSError):
                self.roots[point] = os.lstat(point).st_dev

    def run(self, pids: list[int], known: list[str]) -> Iterator[tuple[str, str]]:
        """Yield each file that is found, and its path."""
        for file, watch in list(self.left.items()):
            if path := self.opened(watch):
                del self.left[file]
                yield file, path
        directories: list[str] = []
        for pid in pids:
            with contextlib.suppress(OSError):
                directories.append(os.readlink(f"/proc/{pid}/cwd"))
                known += [target for _, target in procfs.links(pid) if target.startswith("/")]
        for path in [*known, *directories]:
            yield from self.tried(path)
            while self.left and path != "/":
                path = os.path.dirname(path)
                yield from self.tried(path)
        seen: set[str] = set()
        for level in ([path for path in directories if _mount_point(path, self.mounts) in self.roots], self.points):
            while level and self.left:
                below: list[str] = []
                for path in level:
                    if path not in seen:
                        seen.add(path)
                        yield from self.listed(path, below)
                level = below

    def opened(self, watch: Watch) -> str:
        """Return the path of a file that may be opened by its handle; empty if it may not."""
        handle = ctypes.create_string_buffer(watch.handle)
        for point in self.points if watch.handle else ():
            if self.mounts[point] == watch.device:
                with contextlib.suppress(OSError):
                    mount = os.open(point, os.O_RDONLY | os.O_CLOEXEC)
                    try:
                        found = syscalls.call("open_by_handle_at", mount, ctypes.addressof(handle), os.O_PATH)
                    finally:
                        os.close(mount)
                    path = os.readlink(f"/proc/self/fd/{found}")  # the process ends soon, and closes it
                    if os.path.samestat(os.lstat(path), os.fstat(found)):
                        return path
        return ""

    def tried(self, path: str) -> Iterator[tuple[str, str]]:
        """Yield ``path`` if it is one of the files."""
        point = _mount_point(path, self.mounts)
        if point in self.roots:
            with contextlib.suppress(OSError):
                facts = os.lstat(path)
                file = f"{self.mounts[point]}:{facts.st_ino}"
                if file in self.left and facts.st_dev == self.roots[point]:
                    del self.left[file]
                    yield file, path

    def listed(self, path: str, below: list[str]) -> Iterator[tuple[str, str]]:
        """Yield the files that are in the directory ``path``, and note the directories in it."""
        yield from self.tried(path)
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                if entry.inode() in self.inodes:
                    yield from self.tried(entry.path)
                if entry.is_dir(follow_symlinks=False) and entry.path not in self.mounts:
                    below.append(entry.path)
