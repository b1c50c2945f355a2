"""Records of the kernels that share this machine's GPUs: files in the directory of the GPU locks, one for each kernel.

A record is written by its kernel's server and read by the servers of all users.  It has a `Participant` without name,
user and heartbeat: somebody, how much on which GPU, computing or idle, waiting since.  The name is the file's, which is
random; the user is the file's owner; neither is a part of its content.

Between users nothing is trusted.  A file is opened without following links and without waiting, so a FIFO or a link is
no record; it is read up to a limit; content that is not exactly a record is none.  A user can lie about their own
kernels, and has at most `PER_USER` of them.

The heartbeat is the time of the last change of the file, which only its owner can set, and which the owner sets to the
machine's monotonic clock.  A server that was killed, that is stopped (a lock of flock(2) would outlive that) or that
belongs to another boot is silent, and a step of the wall clock makes nobody silent.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import stat
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..cuda.gpu_locks import NAME, READ, open_directory
from .participant import Participant, Residence, Swap, Turn
from .policy import SILENT_S

#: Records that are read of one user, and entries that the directory may have.
PER_USER, ENTRIES = 64, 8192
#: Bytes of a record at most; seconds after which a user's own void records are deleted.
_LONGEST, _GARBAGE_S = 131072, 60.0
_PREFIX = "kernel-"
_FILE = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}")
#: GPUs, bytes, swaps and other kernels that a record can have.
_GPUS, _BYTES, _SWAPS, _OTHERS = 64, 1 << 50, 128, 1024
_VERSION = 1
#: Fields that the file itself has.
_OF_FILE = ("kernel", "user", "alive_at")


class OwnRecord:
    """The record of a kernel of this server.  All methods raise `OSError` where the directory cannot be used."""

    def __init__(self, directory: Path) -> None:
        self.name = _PREFIX + secrets.token_hex(16)
        self._directory = directory
        self._last: bytes | None = None

    def write(self, participant: Participant) -> None:
        """Have other servers read ``participant`` from now on, or a heartbeat if it is what they read already."""
        facts = asdict(participant)
        facts["swaps"] = facts["swaps"][-_SWAPS:]
        encoded = json.dumps({"version": _VERSION, **{k: v for k, v in facts.items() if k not in _OF_FILE}}).encode()
        parent = open_directory(self._directory)
        try:
            if encoded == self._last and _beat(self.name, parent):
                return
            draft = f".{self.name}-{secrets.token_hex(4)}"
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=parent)
            try:
                os.fchmod(descriptor, 0o644)
                if os.write(descriptor, encoded) != len(encoded):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
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


def read(directory: Path) -> list[Participant]:
    """Return the records of all users' servers that are not silent, by their names.  Never waits for anybody.

    This user's own files of servers that have ended are deleted.  Raises `OSError` where the directory cannot be used,
    also for too many entries: of some records alone nobody may decide.
    """
    return read_all(directory)[0]


def read_all(directory: Path) -> tuple[list[Participant], list[Participant]]:
    """Return what `read` does, and the last records of servers that are silent, of whom nobody may know more.

    Those are void; their kernels may still have their memory on the GPU.
    """
    found: list[Participant] = []
    silent: list[Participant] = []
    counts: Counter[tuple[int, bool]] = Counter()
    parent = open_directory(directory)
    try:
        with os.scandir(parent) as entries:
            for number, entry in enumerate(entries):
                if number >= ENTRIES:
                    raise OSError(errno.EMLINK, f"more than {ENTRIES} files in {directory}")
                if not entry.name.lstrip(".").startswith(_PREFIX):
                    continue
                with contextlib.suppress(OSError, ValueError, RecursionError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == os.geteuid() and _is_garbage(entry.name, status):
                        os.unlink(entry.name, dir_fd=parent)
                    elif _FILE.fullmatch(entry.name) and _is_record(status):
                        is_silent = _age(status) >= SILENT_S
                        counts[status.st_uid, is_silent] += 1
                        if counts[status.st_uid, is_silent] <= PER_USER:
                            (silent if is_silent else found).append(_read(entry.name, parent))
    finally:
        os.close(parent)
    found.sort(key=lambda participant: participant.kernel)
    return found, silent


def claimed(directory: Path, uuid: str) -> int:
    """Return the bytes of a GPU that kernels which were admitted to it are about to fill; 0 if nobody can say."""
    with contextlib.suppress(OSError):
        if directory.exists():
            arriving = [each for each in read(directory) if each.residence is Residence.ARRIVING]
            pairs = (pair for each in arriving for pair in zip(each.on, each.resident, strict=True))
            return sum(bytes for on, bytes in pairs if on == uuid)
    return 0


def _age(status: os.stat_result) -> float:
    """Return the seconds since the last heartbeat; of one that is no time of this boot, infinity."""
    age = time.monotonic() - status.st_mtime_ns / 1e9
    return age if age >= -1.0 else math.inf


def _is_garbage(name: str, status: os.stat_result) -> bool:
    """Return whether a file of this user's is of a server that has ended.  A draft has no heartbeat yet."""
    return (time.time() - status.st_ctime if name.startswith(".") else _age(status)) > _GARBAGE_S


def _is_record(status: os.stat_result) -> bool:
    """Return whether a file can be a record of this boot, be its server silent or not."""
    return stat.S_ISREG(status.st_mode) and status.st_size <= _LONGEST and _age(status) < math.inf


def _read(name: str, parent: int) -> Participant:
    descriptor = os.open(name, READ, dir_fd=parent)
    try:
        status = os.fstat(descriptor)  # of what was opened: another file may have the name since
        if not _is_record(status):
            raise ValueError("no record")
        participant = _decoded(json.loads(os.read(descriptor, _LONGEST)))
    finally:
        os.close(descriptor)
    now = time.monotonic()
    alive_at = min(status.st_mtime_ns / 1e9, now)
    return replace(participant, kernel=name, user=str(status.st_uid), alive_at=alive_at)


# -- content, of which nothing is believed: all functions raise `ValueError`


def _decoded(document: Any) -> Participant:
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        raise ValueError("no record of this version")
    get, now = document.get, time.monotonic()
    participant = Participant(
        kernel="",
        user="",
        alive_at=0.0,
        gpus=_uuids(get("gpus")),
        needs=_sizes(get("needs")),
        residence=Residence(get("residence")),
        on=_uuids(get("on")),
        resident=_sizes(get("resident")),
        was_on=_uuids(get("was_on")),
        moving_since=_time_or_none(get("moving_since"), now),
        waiting_since=_time_or_none(get("waiting_since"), now),
        turn=_turn(get("turn"), now),
        turns=_count(get("turns")),
        served_at=_time_or_none(get("served_at"), now),
        idle_since=_time(get("idle_since"), now),
        mirrored=_flag(get("mirrored")),
        can_leave=_flag(get("can_leave")),
        can_pause=_flag(get("can_pause")),
        frees=_flag(get("frees", False)),
        arrives_early=_flag(get("arrives_early", False)),
        protected=_flag(get("protected")),
        protect_used=_seconds(get("protect_used")),
        leave_seconds=_seconds(get("leave_seconds")),
        arrive_seconds=_seconds(get("arrive_seconds")),
        swaps=tuple(_swap(each, now) for each in _list(get("swaps"), _SWAPS)),
        used=_seconds(get("used")),
        used_before=_used(get("used_before")),
        factor=_count(get("factor")),
        factor_since=_time(get("factor_since"), now),
        granted_at=_time_or_none(get("granted_at"), now),
    )
    away = participant.residence is Residence.AWAY
    if len(participant.on) != len(participant.resident) or len(participant.on) != (
        0 if away else len(participant.needs)
    ):
        raise ValueError("memory without a GPU, or the other way round")
    if len(participant.needs) > len(participant.gpus):
        raise ValueError("more GPUs needed than allowed")
    return participant


def _list(value: Any, longest: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > longest:
        raise ValueError("no list")
    return value


def _uuids(value: Any) -> tuple[str, ...]:
    found = _list(value, _GPUS)
    if not all(isinstance(uuid, str) and len(uuid) <= 64 and NAME.fullmatch(uuid) for uuid in found):
        raise ValueError("no UUIDs")
    if len(set(found)) != len(found):
        raise ValueError("a GPU is named twice")
    return tuple(found)


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(_count(each, _BYTES) for each in _list(value, _GPUS))


def _count(value: Any, most: int = 1 << 20) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError("no number")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("no flag")
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise ValueError("no seconds")
    return float(value)


def _time(value: Any, now: float) -> float:
    """Return a time of this boot; one that is yet to come is now: nobody waits longer by that."""
    return min(_seconds(value), now)


def _time_or_none(value: Any, now: float) -> float | None:
    return None if value is None else _time(value, now)


def _used(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or len(value) > _OTHERS or not all(map(_FILE.fullmatch, value)):
        raise ValueError("no seconds by kernel")
    return {kernel: _seconds(each) for kernel, each in value.items()}


def _turn(value: Any, now: float) -> Turn | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("no turn")
    get = value.get
    factor, since = _count(get("factor")), _time(get("factor_since"), now)
    return Turn(_time(get("since"), now), _seconds(get("seconds")), _flag(get("first")), factor, since)


def _swap(value: Any, now: float) -> Swap:
    if not isinstance(value, dict):
        raise ValueError("no swap")
    return Swap(_uuids(value.get("gpus")), _time(value.get("ended"), now), _seconds(value.get("seconds")))
