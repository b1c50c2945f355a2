"""How much one user's sleeping kernels may take, and the room that checkpoints under way have been promised.

A server that stops checkpoints all its kernels at once, and a user may have several servers.  So what a checkpoint may
need is promised to it, under a lock, before its first byte is written: of two that would fit only one at a time, one is
refused.  Nothing here deletes anything: a limit holds by refusing the next checkpoint, whose kernel runs on.

A promise lies beside its draft and goes with it, or when somebody counts and finds the draft's writer gone.  Limit: a
user can set another limit for servers of their own; what must hold against the user is the file system's quota, which
the same checkpoint meets as `NoSpace`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import QuotaExceeded, StoreUnwritable
from ..files.disk import mapped_errors
from ..units import size
from . import layout
from .image import Image

_LOCK = ".quota.lock"
#: Seconds to wait for others who are promised room just now, which takes each of them a moment.
_PATIENCE = 30.0


@dataclass(frozen=True)
class Quota:
    """Limits for all images of one store together; 0: none.

    ``bytes`` is of every image there is.  ``kernels`` counts those asleep: an image that was kept of a kernel which was
    shut down counts for its bytes alone.
    """

    bytes: int = 0
    kernels: int = 0

    def __bool__(self) -> bool:
        return bool(self.bytes or self.kernels)


@dataclass(frozen=True)
class Used:
    """What there is: bytes, and the ids of the kernels that sleep."""

    bytes: int
    kernels: frozenset[str]


def used(images: list[Image], damaged: int = 0) -> Used:
    """By images, and by ``damaged`` ones, of which only the bytes are known."""
    asleep = frozenset(image.manifest.kernel_id for image in images if not image.retired)
    return Used(damaged + sum(image.manifest.bytes for image in images), asleep)


def refusal(quota: Quota, taken: Used, kernel_id: str, needed: int) -> QuotaExceeded | None:
    """Why one more image, of ``kernel_id`` and of ``needed`` bytes, is not made; None if it may be.  Pure."""
    if quota.bytes and taken.bytes + needed > quota.bytes:
        return QuotaExceeded(
            f"The image may need {size(needed, 2)}; "
            f"your images have {size(taken.bytes, 2)} of {size(quota.bytes, 2)} already.",
            limit="bytes",
            allowed=quota.bytes,
            used=taken.bytes,
            needed=needed,
        )
    if quota.kernels and kernel_id not in taken.kernels and len(taken.kernels) >= quota.kernels:
        asleep = len(taken.kernels)
        return QuotaExceeded(
            f"{asleep} of your kernels {'sleeps' if asleep == 1 else 'sleep'} already, and no more than "
            f"{quota.kernels} may.",
            limit="kernels",
            allowed=quota.kernels,
            used=asleep,
            needed=1,
        )
    return None


class QuotaReservation:
    """What one checkpoint was promised, until `release`."""

    def __init__(self, root: Path, draft: str, kernel_id: str, quota: Quota, take: Callable[[], Used]) -> None:
        self._root, self._kernel_id, self._quota, self._take = root, kernel_id, quota, take
        self._path = root / f"{draft}{layout.PROMISE}"
        self._promised = 0

    def reserve(self, needed: int) -> None:
        """Be promised ``needed`` bytes in all.  Raises `QuotaExceeded`: then nothing has changed, `StoreUnwritable`."""
        if needed <= self._promised:
            return
        with mapped_errors(self._root), _turn(self._root):
            taken = with_promises(self._take(), self._root, but=self._path)
            if (error := refusal(self._quota, taken, self._kernel_id, needed)) is not None:
                raise error
            self._path.touch(0o600)
            self._path.write_text(json.dumps({"kernel_id": self._kernel_id, "bytes": needed}))
        self._promised = needed

    def release(self) -> None:
        """The image is there, or will not be.  Never raises: it runs while another error may be on its way."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def with_promises(taken: Used, root: Path, but: Path | None = None) -> Used:
    """``taken``, and what was promised to drafts that are being written; not counting the promise at ``but``.

    A promise whose writer is gone is removed; its draft is left to the next sweep.
    """
    bytes, kernels = taken.bytes, set(taken.kernels)
    for path in sorted(root.glob(f"{layout.DRAFT}*{layout.PROMISE}")) if root.is_dir() else ():
        draft = path.with_name(path.name.removesuffix(layout.PROMISE))
        if path != but and draft.is_dir() and not _abandoned(draft, path):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                promise = json.loads(path.read_text())
                bytes += int(promise["bytes"])
                kernels.add(str(promise["kernel_id"]))
    return Used(bytes, frozenset(kernels))


def _abandoned(draft: Path, promise: Path) -> bool:
    """Whether the writer of a draft, who holds its lock for as long as there is one, is gone; then so is the promise.

    Where that cannot be tried, it is there.
    """
    lock = FileLock(draft.with_name(f"{draft.name}{layout.LOCK}"), timeout=0, mode=0o600)
    with contextlib.suppress(Timeout, OSError), lock:
        promise.unlink(missing_ok=True)
        if not draft.exists():  # its writer was just about to remove the lock, or has
            Path(lock.lock_file).unlink(missing_ok=True)
        return True
    return False


@contextlib.contextmanager
def _turn(root: Path) -> Iterator[None]:
    lock = FileLock(root / _LOCK, timeout=_PATIENCE, mode=0o600)
    try:
        lock.acquire()
    except Timeout as error:
        raise StoreUnwritable("Others keep the image directory locked for too long.", directory=str(root)) from error
    try:
        yield
    finally:
        lock.release()
