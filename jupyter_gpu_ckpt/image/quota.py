"""Limits for one user's images, and the reservations of checkpoints and pulls under way.

A server that stops checkpoints all its kernels at once, and a user may have several servers.  So a checkpoint reserves
the bytes it may need, under a lock, before it writes the first: of two that fit only one at a time, one is refused.  A
limit is kept by refusing the next checkpoint, whose kernel runs on, or the next pull; nothing is deleted.

A reservation lies beside its draft, or the directory of an image that is being fetched, and is removed with it, or by
the next count that finds its writer gone.
Limit: users can set other limits for their own servers.  The file system's quota, which a checkpoint meets as
`NoSpace`, is the one that binds them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import QuotaExceeded
from ..files.disk import mapped_errors
from ..units import size
from . import layout
from .image import Image
from .shared_chunks import Together

_LOCK = ".quota.lock"
#: Seconds to wait for other processes that reserve at the moment.
_TIMEOUT = 30.0


@dataclass(frozen=True)
class Quota:
    """Limits for all images of one store together; 0: none.

    ``bytes`` counts every image.  ``kernels`` counts sleeping ones: an image kept of a kernel that was shut down counts
    for its bytes only.
    """

    bytes: int = 0
    kernels: int = 0

    def __bool__(self) -> bool:
        return bool(self.bytes or self.kernels)


@dataclass(frozen=True)
class Used:
    """The bytes in use, and the ids of the sleeping kernels."""

    bytes: int
    kernels: frozenset[str]


def used(images: list[Image], damaged: int = 0) -> Used:
    """Count the images, once what they share, and the bytes of ``damaged`` ones."""
    sleeping = frozenset(image.manifest.kernel_id for image in images if not image.retired)
    return Used(damaged + Together(images).bytes, sleeping)


def refusal(quota: Quota, in_use: Used, kernel_id: str, needed: int) -> QuotaExceeded | None:
    """Return why no image of ``needed`` bytes may be made of a kernel, or None if it may.  Pure."""
    if quota.bytes and in_use.bytes + needed > quota.bytes:
        message = (
            f"The image may need {size(needed, 2)}; "
            f"your images have {size(in_use.bytes, 2)} of {size(quota.bytes, 2)} already."
        )
        return QuotaExceeded(message, limit="bytes", allowed=quota.bytes, used=in_use.bytes, needed=needed)
    sleeping = len(in_use.kernels)
    if quota.kernels and kernel_id not in in_use.kernels and sleeping >= quota.kernels:
        sleep = "sleeps" if sleeping == 1 else "sleep"
        message = f"{sleeping} of your kernels {sleep} already, and no more than {quota.kernels} may."
        return QuotaExceeded(message, limit="kernels", allowed=quota.kernels, used=sleeping, needed=1)
    return None


class QuotaReservation:
    """The reservation of one checkpoint or pull, until `release`; ``count`` returns what is in use.

    ``draft``: the directory that is being written, below ``root``.
    """

    def __init__(self, root: Path, draft: Path, kernel_id: str, quota: Quota, count: Callable[[], Used]) -> None:
        self._root, self._kernel_id, self._quota, self._count = root, kernel_id, quota, count
        self._path = _beside(draft, layout.RESERVATION)
        self._reserved = 0

    def reserve(self, needed: int) -> None:
        """Reserve ``needed`` bytes in all.  Raises `QuotaExceeded`, `StoreUnwritable`; then nothing has changed."""
        if not self._quota or needed <= self._reserved:
            return
        with mapped_errors(self._root), FileLock(self._root / _LOCK, timeout=_TIMEOUT, mode=0o600):
            in_use = with_reservations(self._count(), self._root, without=self._path)
            if (error := refusal(self._quota, in_use, self._kernel_id, needed)) is not None:
                raise error
            self._path.touch(0o600)
            self._path.write_text(json.dumps({"kernel_id": self._kernel_id, "bytes": needed}))
        self._reserved = needed

    def release(self) -> None:
        """End the reservation.  Never raises: it runs while another error may be on its way."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def with_reservations(in_use: Used, root: Path, without: Path | None = None) -> Used:
    """Add the reservations of living drafts to ``in_use``, but the one at ``without``; remove those of dead ones."""
    bytes, kernels = in_use.bytes, set(in_use.kernels)
    for path, draft in reservations(root):
        if path != without and draft.is_dir() and not _abandoned(draft, path):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                reservation = json.loads(path.read_text())
                bytes += int(reservation["bytes"])
                kernels.add(str(reservation["kernel_id"]))
    return Used(bytes, frozenset(kernels))


def reservations(root: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the reservations in a store, and the directory of each, whether it is there or not."""
    if root.is_dir():
        for path in sorted(root.glob(f"{layout.DRAFT}*{layout.RESERVATION}")):
            yield path, path.with_name(path.name.removesuffix(layout.RESERVATION))
        for path in sorted((root / layout.INCOMING).glob(f".*{layout.RESERVATION}")):
            yield path, path.with_name(path.name.removesuffix(layout.RESERVATION)[1:])


def _beside(draft: Path, suffix: str) -> Path:
    """Return the path of a mark beside a draft, whose name is hidden already, or an image that is being fetched."""
    return draft.with_name(f".{draft.name.removeprefix('.')}{suffix}")


def _abandoned(draft: Path, reservation: Path) -> bool:
    """Return whether nobody locks a draft, and remove its reservation then; False where that cannot be tested."""
    lock = FileLock(_beside(draft, layout.LOCK), timeout=0, mode=0o600)
    with contextlib.suppress(Timeout, OSError), lock:
        reservation.unlink(missing_ok=True)
        if not draft.exists():  # its writer was about to remove the lock, or has removed it
            Path(lock.lock_file).unlink(missing_ok=True)
        return True
    return False
