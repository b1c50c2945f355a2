"""A directory of images: each is found by its name, proved, sealed and removed; drafts (`draft`) lie beside them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from ..errors import GpuCkptError, ImageArchived, ImageDamaged, ImageForged, ImageFormat, ImageNotFound, QuotaExceeded
from ..files.atomic import remove_leftovers, write_atomically
from ..files.disk import free, mapped_errors
from ..node.hashes import Hashes
from . import encryption, layout, lease, links, spill, tracked, user_directory, verify
from .background_task import BackgroundTask
from .draft import Draft
from .encryption import Vault
from .generations import Generations
from .image import Image
from .keys import Keyring
from .layout import MANIFEST, SEAL
from .manifest import Manifest
from .quota import Quota, QuotaReservation, Used, refusal, used, with_promises
from .verify import Progress

__all__ = ["Image", "Store"]

T = TypeVar("T")


class Store:
    """The images of this user.

    Parameters
    ----------
    named:
        The image directory as it was set.  ``root`` is where the images are: it, or this user's below it (`directory`).
    """

    def __init__(
        self, named: Path, keys: Keyring | None = None, vault: Vault | None = None, quota: Quota | None = None
    ) -> None:
        self.named = named
        self.root = user_directory.of_user(named)
        #: Encrypts the images made from now on, if it has a key.
        self.vault = vault or Vault()
        #: What all images together may take.
        self.quota = quota or Quota()
        self.keys = keys or Keyring()
        #: Of the files that kernels use.
        self.hashes = Hashes(self.root)
        self.generations = Generations(self.keys.directory / "generations")

    def prepare(self) -> None:
        """Make the directory and prove that it can be written.

        Raises `KeyUnusable` when nothing could be sealed, `StoreUnwritable`, `StoreShared`, `StoreUnsuitable`.
        """
        user_directory.prepare(self.named)
        self.keys.current()
        self.vault.require()

    def free(self) -> int:
        """Bytes an unprivileged user may still write; where the file system has quotas, as far as it says so."""
        return free(self.root)

    def over_quota(self, kernel_id: str, needed: int) -> QuotaExceeded | None:
        """Why an image of ``needed`` bytes may not be made of a kernel; None if it may.  Promises nothing."""
        if not self.quota:
            return None
        return refusal(self.quota, with_promises(self._used(), self.root), kernel_id, needed)

    def _used(self) -> Used:
        return used(self.images(), sum(_bytes(self.root / id) for id in self.damaged()))

    def begin(self, kernel_id: str, needed: int = 0) -> Draft:
        """Start an image of a kernel, which may take ``needed`` bytes.

        Raises `QuotaExceeded`, `StoreUnwritable`, `NoSpace`; then there is nothing of it.
        """
        self.prepare()
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        id = f"{stamp}-{kernel_id[:8]}-{secrets.token_hex(3)}"
        reservation = (
            QuotaReservation(self.root, f"{layout.DRAFT}{id}", kernel_id, self.quota, self._used)
            if self.quota
            else None
        )
        return Draft(
            self.root,
            id,
            keys=self.keys,
            generations=self.generations,
            vault=self.vault,
            reservation=reservation,
            needed=needed,
        )

    def images(self) -> list[Image]:
        """Every readable image, oldest first; an unreadable one is passed over here and explained by `get`."""
        found = []
        for name in self._names():
            if not name.startswith("."):
                with contextlib.suppress(GpuCkptError):
                    found.append(self.get(name))
        return found

    def _names(self) -> list[str]:
        """Of the directories in ours, sorted.  A link is none: it may lead to where this user cannot even look."""
        if not self.root.is_dir():
            return []
        with os.scandir(self.root) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def damaged(self) -> dict[str, ImageFormat]:
        """What `images` passes over, by id: directories of this user whose manifest cannot be used, and why."""
        found = {}
        for name in self._names():
            try:
                self.get(name)
            except ImageFormat as error:
                found[name] = error
            except GpuCkptError:
                continue
        return found

    def get(self, id: str) -> Image:
        """The image named ``id``.  Raises `ImageNotFound`, `ImageFormat`."""
        path = self._own(id)
        try:
            manifest = Manifest.from_json(verify.read_manifest(path))
        except OSError as error:
            self._own(id)  # another may have removed it since
            raise ImageFormat(f"The image's manifest cannot be read: {error.strerror}.", image=id) from error
        if manifest.id != id:
            raise ImageFormat(f"The manifest in {id!r} is that of {manifest.id!r}.", image=id)
        return Image(path, manifest)

    def _own(self, id: str) -> Path:
        """The directory of an image of this user, whatever is in it.

        CRIU trusts its images completely: what another user wrote is not brought to life as us.
        """
        path = self.root / id
        if not id or "/" in id or id.startswith("."):
            raise ImageNotFound(f"There is no image {id!r}.", image=id)
        try:
            facts = path.lstat()
        except PermissionError as error:
            raise ImageNotFound(f"Image {id!r} belongs to another user.", image=id) from error
        except (OSError, ValueError) as error:  # ValueError: no name of a file at all
            raise ImageNotFound(f"There is no image {id!r}.", image=id) from error
        if facts.st_uid != os.geteuid():
            raise ImageNotFound(f"Image {id!r} belongs to another user.", image=id)
        if not stat.S_ISDIR(facts.st_mode):
            raise ImageNotFound(f"There is no image {id!r}.", image=id)
        return path

    def check(self, image: Image, progress: Progress | None = None) -> None:
        """Prove that the image is whole, ours and the last of its kernel.

        Raises `ImageArchived`, `ImageForged`, `ImageDamaged`, `ImageStale`, `ImageFormat`, `KeyUnusable`.
        """
        self._require_content(image)
        self._require_current(image, self._swept(lambda: verify.verify(image.path, self.keys, progress)))

    def begin_check(self, image: Image) -> BackgroundTask:
        """`check` for a restore: all that CRIU looks at is proved when this returns, and what it copies soon after.

        Raises as `check`.  The caller runs nothing of the image before the proof is complete.
        """
        self._require_content(image)
        manifest, proof = self._swept(lambda: verify.begin(image.path, self.keys))
        try:
            self._require_current(image, manifest)
        except BaseException:
            proof.cancel(wait_for_end=True)
            raise
        return proof

    def _swept(self, prove: Callable[[], T]) -> T:
        """What ``prove`` returns, tried again where a sweep removed something.

        An owner may have ended just after it had made the image, and not come to removing the kernel's own names of its
        files: one with two names is no image's.
        """
        try:
            return prove()
        except ImageDamaged:
            if not self.sweep():
                raise
            return prove()

    def _require_content(self, image: Image) -> None:
        if image.archived:
            raise ImageArchived("The content of the image is in the cold tier.", image=image.id)

    def _require_current(self, image: Image, proved: Manifest) -> None:
        if proved != image.manifest:
            raise ImageForged("The image's manifest was changed while it was looked at.", image=image.id)
        self.generations.require_current(proved)

    def readable(self, image: Image) -> AbstractContextManager[encryption.Readable]:
        """The files of ``image`` as a restore reads them, for the body.

        Raises `KeyUnusable`, `ImageDamaged`, `NoMemory`, `ImageBusy`.
        """
        return encryption.readable(self.vault, image.path, image.manifest)

    def seal(self, image: Image) -> Image:
        """Vouch for an image as it is now, whoever made it: hashes and a seal of this user's.  Raises as `remove`."""
        with lease.acquire(image.path), mapped_errors(self.root):
            for name in (MANIFEST, SEAL):  # a seal that was broken off
                remove_leftovers(image.path / name)
            manifest = replace(image.manifest, files=verify.entries(image.path))
            write_atomically(image.path / MANIFEST, manifest.to_json(), durable=True)
            verify.seal(image.path, self.keys.current())
        return Image(image.path, manifest)

    def remove(
        self,
        image: Image,
        *,
        leased: bool = False,
        moved: bool = False,
        before_delete: Callable[[Path], object] = lambda _: None,
    ) -> int:
        """Delete an image; returns the bytes freed.

        ``leased``: the caller has its lease.  ``moved``: its kernel sleeps on elsewhere.  ``before_delete``: called
        with the directory when it is no image any more, before it is deleted.  Raises `ImageBusy` when a restore uses
        the image, `ImageNotFound`.
        """
        self._delete(image.path, leased, gone=None if moved else image, before_delete=before_delete)
        if moved:
            with mapped_errors(self.root):
                image.unmark_sent()  # what lies in the cold tier may be its new owner's
        return image.manifest.bytes

    def remove_damaged(self, id: str) -> int:
        """Delete an image whatever its manifest says; returns the bytes freed.  Raises as `remove`."""
        path = self._own(id)
        count = _bytes(path)
        self._delete(path, leased=False)
        return count

    def _delete(
        self,
        path: Path,
        leased: bool,
        gone: Image | None = None,
        before_delete: Callable[[Path], object] = lambda _: None,
    ) -> None:
        with contextlib.nullcontext() if leased else lease.acquire(path, remove=True), mapped_errors(self.root):
            forsaken = gone is not None and not leased and self._is_forsaken(gone)
            # Renamed first: a removal that is interrupted leaves a draft to sweep, not half an image.
            doomed = self.root / f"{layout.DRAFT}{path.name}"
            path.rename(doomed)
            if gone is not None:
                links.remove(gone.manifest, current=self._is_current(gone))
            if gone is not None and forsaken:
                tracked.remove(gone.manifest)
            before_delete(doomed)
            shutil.rmtree(doomed, ignore_errors=True)  # a sweep may have come upon it already
            # Before the lease ends: whoever takes it next makes a lock file of its own and sees that there is no image.
            for suffix in (layout.LOCK, layout.RETIRED, layout.ACCEPTS, layout.ARCHIVED):
                layout.mark(path, suffix).unlink(missing_ok=True)

    def _is_forsaken(self, image: Image) -> bool:
        """Whether the image, which goes, is proved to be the user's, and the last of a kernel that does not live."""
        try:
            sealed = verify.require_sealed(image.path, self.keys)
            lease.require_unclaimed(image.path)
        except (GpuCkptError, OSError):
            return False
        return sealed == image.manifest and self._is_current(image)

    def _is_current(self, image: Image) -> bool:
        """Whether nobody came back from the image, nor made a newer one of its kernel; False where nobody knows."""
        try:
            self.generations.require_current(image.manifest)
        except GpuCkptError:
            return False
        return True

    def sweep(self) -> int:
        """Remove drafts whose writer is gone; returns how many.  Called when a server starts.

        Several servers may sweep at once.  A directory that others can enter is left alone: its drafts may be theirs.
        """
        swept = self.vault.sweep()
        self.hashes.sweep()
        ours = self.root.is_dir() and user_directory.is_private(self.root)
        for path in self.root.glob(f"{layout.DRAFT}*") if ours else ():
            if not path.is_dir() or spill.is_of_another_host(path):
                continue
            lock = FileLock(path.with_name(path.name + layout.LOCK), timeout=0, mode=0o600)
            with contextlib.suppress(Timeout, OSError), lock:
                if path.is_dir():  # another sweep may have held the lock before
                    shutil.rmtree(path, ignore_errors=True)
                    swept += 1
                Path(lock.lock_file).unlink(missing_ok=True)
        # Of a writer that ended just after it had given its draft its name, or to which the disk refused the removal.
        for path in self.root.glob(f"{layout.DRAFT}*{layout.LOCK}") if ours else ():
            lock = FileLock(path, timeout=0, mode=0o600)
            with contextlib.suppress(Timeout, OSError), lock:  # a writer has it before it makes its directory
                if not path.with_suffix("").is_dir():
                    path.unlink(missing_ok=True)
        for promise in self.root.glob(f"{layout.DRAFT}*{layout.PROMISE}") if ours else ():
            if not promise.with_name(promise.name.removesuffix(layout.PROMISE)).exists():
                promise.unlink(missing_ok=True)
        return swept


def _bytes(path: Path) -> int:
    """Of all files below ``path``."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
