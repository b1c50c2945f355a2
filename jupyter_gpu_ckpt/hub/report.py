"""Who holds what in image directories, and how much GPU time each user's sleeping kernels have given to others.

From the directories alone: no hub, no server and no kernel is asked.  Below a ``root`` that all users share, each has a
directory of the name of the uid (`image.directory`); without one it is the caller's own.  Each is looked at by a child
process that has its owner's rights and no others, and what that says is checked before it is believed.

GPU time is counted for each GPU: from when a kernel's device memory left the GPU until it was back, or until the kernel
was shut down.  It comes from what users can write (manifests, `image.absences`): for reports, not for bills.
"""

from __future__ import annotations

import functools
import math
import os
import pwd
import stat
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import terminal_text
from ..errors import StoreUnwritable
from . import survey
from .confined import Unanswered, ask

#: Seconds that one user's directory may take.
PATIENCE = 30.0
#: The group of a child whose user this host does not know.
NOBODY = 65534
_MOST = 2**63


@dataclass(frozen=True)
class Held:
    """One image.  ``asleep``: a kernel that will be back; else one that was shut down, or is back already."""

    id: str
    kernel_id: str
    kernel_name: str
    hostname: str
    created: float
    ended: float | None
    archived: bool
    bytes: int
    disk: int
    device_bytes: int
    gpus: int
    models: list[str]
    asleep: bool

    def gpu_seconds(self, now: float) -> float:
        """GPU time that this image's kernel gives back, as far as nothing else says so."""
        until = self.ended if self.ended is not None else now
        return self.gpus * max(0.0, until - self.created)


@dataclass(frozen=True)
class User:
    """What one user holds.  Bytes; seconds."""

    uid: int
    name: str
    directory: str
    images: list[Held] = field(default_factory=list)
    #: On disk, of everything in the directory.
    disk: int = 0
    gpu_seconds: float = 0.0
    #: How many times device memory came back.
    returns: int = 0
    #: What was passed over and how often; under "" why nothing could be looked at.
    problems: dict[str, int] = field(default_factory=dict)

    @property
    def asleep(self) -> list[Held]:
        """The images of kernels that sleep, of several of one kernel the newest, oldest first."""
        newest = {held.kernel_id: held for held in sorted(self.images, key=lambda held: held.created) if held.asleep}
        return sorted(newest.values(), key=lambda held: held.created)

    def summary(self, now: float) -> dict[str, Any]:
        """One row of the report, as JSON."""
        asleep = self.asleep
        return {
            "uid": self.uid,
            "user": self.name,
            "directory": self.directory,
            "kernels_asleep": len(asleep),
            "images": len(self.images),
            "disk_bytes": self.disk,
            "device_bytes_freed": sum(held.device_bytes for held in asleep),
            "oldest_s": max(0.0, now - asleep[0].created) if asleep else None,
            "gpu_models": sorted({model for held in asleep for model in held.models}),
            "gpu_hours_given_back": self.gpu_seconds / 3600,
            "returns": self.returns,
            "problems": self.problems,
        }


def collect(root: Path | None, own: Path, now: float | None = None) -> list[User]:
    """The users of ``root``, or only the caller, whose images are in ``own``; the largest on disk first.

    Raises `StoreUnwritable` when the root cannot be looked at.
    """
    now = time.time() if now is None else now
    if root is None:
        users = [_user(os.geteuid(), str(own), functools.partial(survey.own, own), None, now)]
    else:
        try:
            users = list(_users(root, now))
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise StoreUnwritable(f"The directory cannot be looked at: {reason}.", directory=str(root)) from error
    return sorted(users, key=lambda user: (-user.disk, user.uid))


def as_json(users: Iterable[User], now: float) -> dict[str, Any]:
    """The report as one document."""
    listed = list(users)
    rows = [{**user.summary(now), "held": [asdict(held) for held in user.images]} for user in listed]
    return {"at": now, "users": rows, "total": total(rows)}


def total(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Sums over users."""
    listed = list(rows)
    names = ("kernels_asleep", "images", "disk_bytes", "device_bytes_freed", "gpu_hours_given_back", "returns")
    return {"users": len(listed), **{name: sum(row[name] for row in listed) for name in names}}


def printable(text: str, most: int = 40) -> str:
    """A user's text for an administrator's terminal: nothing in it moves the cursor, hides or pretends."""
    return terminal_text.printable(text, most)


def _users(root: Path, now: float) -> Iterable[User]:
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in sorted(os.listdir(at)):  # noqa: PTH208 - of a descriptor, which nobody can exchange
            try:
                facts = os.stat(name, dir_fd=at, follow_symlinks=False)
            except OSError:
                continue  # it has gone meanwhile
            if not name.isdecimal() or not name.isascii() or not stat.S_ISDIR(facts.st_mode):
                continue  # no user's images are there
            uid, place = facts.st_uid, f"{root}/{name}"
            if name != str(uid):
                # Images are believed by the user of that name alone, and these will be refused there.
                yield User(uid, _name(uid), place, problems={"the directory is another user's": 1})
                continue
            identity = (uid, _group(uid)) if os.geteuid() == 0 and uid != 0 else None
            yield _user(uid, place, functools.partial(survey.survey, name, uid, at), identity, now)
    finally:
        os.close(at)


def _user(uid: int, place: str, call: Any, identity: tuple[int, int] | None, now: float) -> User:
    try:
        return _checked(uid, place, ask(call, identity=identity, seconds=PATIENCE), now)
    except Unanswered as error:
        return User(uid, _name(uid), place, problems={str(error): 1})
    except (KeyError, TypeError, ValueError, AttributeError):
        return User(uid, _name(uid), place, problems={"what was found makes no sense": 1})


def _checked(uid: int, place: str, answer: dict[str, Any], now: float) -> User:
    """What the child says, as far as it is what it should be; raises `ValueError` and its kin for anything else."""
    images = []
    for found in answer["images"]:
        ended = None if found["ended"] is None else _number(found["ended"])
        images.append(
            Held(
                id=_text(found["id"]),
                kernel_id=_text(found["kernel_id"]),
                kernel_name=_text(found["kernel_name"]),
                hostname=_text(found["hostname"]),
                bytes=int(_number(found["bytes"])),
                disk=int(_number(found["disk"])),
                device_bytes=int(_number(found["device_bytes"])),
                gpus=int(_number(found["gpus"])),
                created=_number(found["created"]),
                ended=ended,
                archived=found["archived"] is True,
                models=[_text(model) for model in found["models"][:64]],
                asleep=ended is None and found["back"] is not True,
            )
        )
    back = {found["id"] for found in answer["images"] if found["back"] is True}
    sleeping = sum(held.gpu_seconds(now) for held in images if held.id not in back)
    return User(
        uid,
        _name(uid),
        place,
        images,
        disk=int(_number(answer["disk"])),
        gpu_seconds=_number(answer["absences"]["gpu_seconds"]) + sleeping,
        returns=int(_number(answer["absences"]["times"])),
        problems={_text(what): int(_number(count)) for what, count in list(answer["problems"].items())[:32]},
    )


def _number(value: object) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value < _MOST:  # type: ignore[arg-type,operator]
        raise ValueError("not a number that can be")
    return value  # type: ignore[return-value]


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > survey.LONGEST:
        raise ValueError("not a text that can be")
    return value


def _group(uid: int) -> int:
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return NOBODY


def _name(uid: int) -> str:
    """The name of a user, as this host knows it; the number where it knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
