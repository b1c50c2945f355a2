"""The rights of users who share GPUs, from a file that belongs to root: what a user could change would be no right.

An example, with the users' names::

    {"ada": {"weight": 2, "protect_budget": 7200}, "*": {"protect_budget": 600}}

``*``: the users that are not named.  A missing value is `policy.Allotment`'s.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pwd
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..cuda.gpu_locks import READ
from .policy import Allotment

PATH = Path("/etc/jupyter-gpu-ckpt/sharing.json")
_LONGEST = 1 << 20
_OTHERS = "*"
#: Weights beyond these would make turns of others as good as none.
_WEIGHTS = (0.1, 10.0)

_log = logging.getLogger(__name__)


class Allotments:
    """The file, read again when it has changed.  One that cannot be used is logged, once, and nobody has rights."""

    def __init__(self, path: Path = PATH) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._rights: Mapping[str, Allotment] = {}

    def of(self, users: Iterable[str]) -> dict[str, Allotment]:
        """Return the allotments of these users, by their numeric ids."""
        self._update()
        others = self._rights.get(_OTHERS, Allotment())
        return {user: self._rights.get(user, others) for user in users}

    def _update(self) -> None:
        try:
            descriptor = os.open(self._path, READ)
        except OSError:
            self._stamp, self._rights = None, {}
            return
        try:
            status = os.fstat(descriptor)
            if (stamp := (status.st_mtime_ns, status.st_ino)) != self._stamp:
                self._stamp, self._rights = stamp, {}
                self._rights = _allotments(descriptor, status)
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("%s is not used: %s", self._path, error)
        finally:
            os.close(descriptor)


def _allotments(descriptor: int, status: os.stat_result) -> Mapping[str, Allotment]:
    if not stat.S_ISREG(status.st_mode) or status.st_uid != 0 or status.st_mode & 0o022:
        raise ValueError("it must be a file that belongs to root, and that nobody else can write")
    document = json.loads(os.read(descriptor, _LONGEST))
    if not isinstance(document, dict) or not all(isinstance(each, dict) for each in document.values()):
        raise ValueError("it must have an object for each user")
    found: dict[str, Allotment] = {}
    for name, rights in document.items():
        try:
            found[name if name == _OTHERS else str(pwd.getpwnam(name).pw_uid)] = _allotment(rights)
        except KeyError:
            _log.warning("There is no user %r, who is named among those that share GPUs.", name)
    return found


def _allotment(rights: Mapping[str, Any]) -> Allotment:
    if unknown := set(rights) - {"weight", "protect_budget"}:
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}")
    for name, value in rights.items():
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0:
            raise ValueError(f"{name} must be a number that is not negative")
    low, high = _WEIGHTS
    if not low <= rights.get("weight", 1.0) <= high:
        raise ValueError(f"a weight is between {low:g} and {high:g}")
    return Allotment(**{name: float(value) for name, value in rights.items()})
