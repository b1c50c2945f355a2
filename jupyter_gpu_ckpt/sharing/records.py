"""Records of the kernels that share this machine's GPUs: files in the directory of the GPU locks, one for each kernel.

A record is written by its kernel's server and read by the servers of all users.  It says no more than: somebody, since
when, how much, on which GPU, computing or idle, waiting since; and the user, who is the file's owner and not a part of
its content.  Its name is random.

Between users nothing is trusted.  A file is opened without following links and without waiting, so a FIFO or a link is
no record; it is read up to a limit; content that is not exactly a record is none.  A user can lie about their own
kernels, and has at most `PER_USER` of them.

A record is void once its server is silent: its heartbeat is the time of the last change of the file, which only its
owner can set, and which the owner sets to the machine's monotonic clock.  So a server that was killed, that is stopped
(a lock of flock(2) would outlive that) or that lies in another boot is silent, and a step of the wall clock makes
nobody silent.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..cuda.gpu_locks import NAME, READ, open_directory

#: Seconds between two heartbeats of a server, and seconds after the last one from which on its records are void.
BEAT_S, SILENT_S = 0.5, 3.0
#: Records that are read of one user, and entries of the directory that are considered at all.
PER_USER, ENTRIES = 64, 8192
#: Bytes of a record at most; seconds after which a user's own void records are deleted.
_LONGEST, _GARBAGE_S = 8192, 60.0
_PREFIX = "kernel-"
_FILE = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}")
#: GPUs and bytes that a record can name.
_GPUS, _BYTES = 64, 1 << 50
_VERSION = 1


@dataclass(frozen=True)
class RecordContent:
    """The content of a record; times in seconds of `time.monotonic`, which is the same for all processes of a machine.

    ``on_gpu``: bytes of device memory that the kernel has now, by GPU UUID.  ``needs``: bytes that it waits for.
    ``computing``: a cell of it uses the GPU; ``since``: since when, or since when it is idle.  ``queued``: since when
    it waits for ``needs``; None if it does not.  ``keeps``: it does not give its memory back, for a reason of its own.
    """

    on_gpu: Mapping[str, int] = field(default_factory=dict)
    needs: Mapping[str, int] = field(default_factory=dict)
    computing: bool = False
    since: float = 0.0
    queued: float | None = None
    keeps: bool = False


@dataclass(frozen=True)
class Record:
    """A record of any user, as it was read.  ``user``: numeric id; ``name``: random, the same as long as the kernel."""

    name: str
    user: int
    content: RecordContent


class OwnRecord:
    """The record of a kernel of this server.  All methods raise `OSError` where the directory cannot be used."""

    def __init__(self, directory: Path) -> None:
        self.name = _PREFIX + secrets.token_hex(16)
        self._directory = directory
        self._last: bytes | None = None

    def write(self, content: RecordContent) -> None:
        """Have other servers read ``content`` from now on, or a heartbeat if it is what they read already."""
        encoded = json.dumps({"version": _VERSION, **asdict(content)}).encode()
        parent = open_directory(self._directory)
        try:
            if encoded == self._last and _beat(self.name, parent):
                return
            draft = f".{self.name}-{secrets.token_hex(4)}"
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=parent)
            try:
                os.fchmod(descriptor, 0o644)
                os.write(descriptor, encoded)
                os.utime(descriptor, ns=(now := time.monotonic_ns(), now))
                os.rename(draft, self.name, src_dir_fd=parent, dst_dir_fd=parent)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(draft, dir_fd=parent)
                raise
            finally:
                os.close(descriptor)
            self._last = encoded
        finally:
            os.close(parent)

    def remove(self) -> None:
        """Delete the record; nothing is done if there is none."""
        self._last = None
        with contextlib.suppress(FileNotFoundError):
            (self._directory / self.name).unlink()


def _beat(name: str, parent: int) -> bool:
    try:
        os.utime(name, ns=(now := time.monotonic_ns(), now), dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:  # a cleaner of temporary files has removed it
        return False
    return True


def read(directory: Path) -> list[Record]:
    """Return the records of all users that are not void, in the order of their names.  Never waits for anybody.

    This user's own files of servers that have ended are deleted.  Raises `OSError` where the directory cannot be used.
    """
    found: list[Record] = []
    counts: Counter[int] = Counter()
    parent = open_directory(directory)
    try:
        with os.scandir(parent) as entries:
            for _, entry in zip(range(ENTRIES), entries, strict=False):
                if not entry.name.lstrip(".").startswith(_PREFIX):
                    continue
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == os.geteuid() and _age(status) > _GARBAGE_S:
                        os.unlink(entry.name, dir_fd=parent)
                    elif _FILE.fullmatch(entry.name) and _is_alive(status):
                        counts[status.st_uid] += 1
                        if counts[status.st_uid] <= PER_USER and (record := _read(entry.name, parent)) is not None:
                            found.append(record)
    finally:
        os.close(parent)
    return sorted(found, key=lambda record: record.name)


def _age(status: os.stat_result) -> float:
    """Return the seconds since the last heartbeat; of one that is no time of this boot, infinity."""
    age = time.monotonic() - status.st_mtime_ns / 1e9
    return age if age >= -1.0 else float("inf")


def _is_alive(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_size <= _LONGEST and _age(status) < SILENT_S


def _read(name: str, parent: int) -> Record | None:
    descriptor = os.open(name, READ, dir_fd=parent)
    try:
        status = os.fstat(descriptor)  # of what was opened: another file may have the name since
        content = _parsed(os.read(descriptor, _LONGEST)) if _is_alive(status) else None
    finally:
        os.close(descriptor)
    return Record(name, status.st_uid, content) if content is not None else None


def _parsed(encoded: bytes) -> RecordContent | None:
    try:
        document = json.loads(encoded)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        return None
    now = time.monotonic()
    on_gpu, needs = _bytes(document.get("on_gpu")), _bytes(document.get("needs"))
    since, queued = _time(document.get("since"), now), document.get("queued")
    waits = None if queued is None else _time(queued, now)
    flags = [document.get(name) for name in ("computing", "keeps")]
    if on_gpu is None or needs is None or since is None or not all(isinstance(flag, bool) for flag in flags):
        return None
    if queued is not None and waits is None:
        return None
    computing, keeps = map(bool, flags)
    return RecordContent(on_gpu, needs, computing, since, waits, keeps)


def _bytes(value: Any) -> dict[str, int] | None:
    if not isinstance(value, dict) or len(value) > _GPUS:
        return None
    for uuid, number in value.items():
        if not NAME.fullmatch(uuid) or isinstance(number, bool) or not isinstance(number, int):
            return None
        if len(uuid) > 64 or not 0 <= number <= _BYTES:
            return None
    return value


def _time(value: Any, now: float) -> float | None:
    """Return a time of this boot; one that is yet to come is now: nobody waits longer by that."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        return None
    return min(float(value), now)
