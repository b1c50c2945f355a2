"""A directory of images, which are found by name, verified, sealed and removed; drafts (`draft`) lie beside them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from ..criu import images
from ..errors import (
    GpuCkptError,
    ImageArchived,
    ImageDamaged,
    ImageForged,
    ImageFormat,
    ImageNotFound,
    QuotaExceeded,
    StoreShared,
    StoreUnwritable,
)
from ..files.atomic import remove_leftovers, write_atomically
from ..files.disk import free, mapped_errors
from ..node.hashes import Hashes
from . import encryption, layout, lease, links, spill, user_directory, verify
from .background_task import BackgroundTask
from .draft import Draft
from .encryption import Vault
from .generations import Generations
from .image import Image
from .keys import Keyring
from .layout import MANIFEST, SEAL
from .manifest import Manifest
from .quota import Quota, QuotaReservation, Used, refusal, reservations, used, with_reservations
from .shared_chunks import KnownChunks, bytes_alone
from .verify import Progress

__all__ = ["Image", "Store"]

T = TypeVar("T")

#: Seconds to wait for a sweep that has come upon a lock.
_SWEPT = 10.0
#: Seconds for which an image whose fetch broke off waits for the next try.
_INCOMING_KEPT = 7 * 86400.0


class Store:
    """The images of this user, in ``root``: the configured directory ``named``, or the user's own below it."""

    def __init__(
        self, named: Path, keys: Keyring | None = None, vault: Vault | None = None, quota: Quota | None = None
    ) -> None:
        self.named = named
        self.root = user_directory.of_user(named)
        #: Encrypts the images made from now on, if it has a key.
        self.vault = vault or Vault()
        #: The limits for all images together.
        self.quota = quota or Quota()
        self.keys = keys or Keyring()
        #: The hashes of files that kernels use.
        self.hashes = Hashes(self.root)
        self.generations = Generations(self.keys.directory / "generations")

    def prepare(self, *, may_encrypt: bool = True) -> None:
        """Make the directory and test that it can be written.

        ``may_encrypt``: whether the key for encryption is needed, which moved images do not need.  Raises `KeyUnusable`
        when nothing could be sealed, or encrypted, `StoreUnwritable`, `StoreShared`, `StoreUnsuitable`.
        """
        user_directory.prepare(self.named, self.root)
        self.keys.current()
        if may_encrypt:
            self.vault.secret()

    def obstacle(self) -> StoreShared | None:
        """Return why nothing may be written to the directory, nor restored from it: others can enter or remove it."""
        with mapped_errors(self.root):
            return user_directory.obstacle(self.named, self.root)

    def require_private(self) -> None:
        """Raise `StoreShared` if others could replace an image between its verification and its use."""
        if problem := self.obstacle():
            raise problem

    def free(self) -> int:
        """Return the bytes an unprivileged user may still write, as far as the file system reports its quotas."""
        return free(self.root)

    def may_write_plain(self, manifest: Manifest | None = None) -> bool:
        """Return whether device memory may lie unencrypted on this disk, also that of the image of ``manifest``."""
        return not self.vault.encrypts and (manifest is None or manifest.encryption is None)

    def over_quota(self, kernel_id: str, needed: int) -> QuotaExceeded | None:
        """Return why no image of ``needed`` bytes may be made of a kernel, or None if it may.  Reserves nothing."""
        if not self.quota:
            return None
        return refusal(self.quota, with_reservations(self._used(), self.root), kernel_id, needed)

    def reservation(self, draft: Path, kernel_id: str) -> QuotaReservation:
        """Return a reservation in the quota, of nothing yet, for the directory ``draft`` that becomes an image."""
        return QuotaReservation(self.root, draft, kernel_id, self.quota, self._used)

    def _used(self) -> Used:
        return used(self.images(), sum(_bytes(self.root / id) for id in self.damaged()))

    def begin(self, kernel_id: str, needed: int = 0, *, shares: bool = False, copies: bool = False) -> Draft:
        """Begin an image of ``needed`` bytes at most.  Raises `QuotaExceeded`, `StoreUnwritable`, `NoSpace`.

        ``shares``: chunks that a save point has are not written again (`shared_chunks`).  ``copies``: the content is
        that of another image, encrypted or not as it is there.
        """
        self.prepare(may_encrypt=not copies)
        known = KnownChunks(self.unencrypted_save_points) if shares else KnownChunks()
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        id = f"{stamp}-{kernel_id[:8]}-{secrets.token_hex(3)}"
        reservation = self.reservation(self.root / f"{layout.DRAFT}{id}", kernel_id)
        keys, generations, vault = self.keys, self.generations, Vault() if copies else self.vault
        return Draft(self.root, id, keys, generations, vault, reservation, needed, self._needed_links, known)

    def unencrypted_save_points(self) -> list[Image]:
        """Return the save points whose files can be shared, the newest first."""
        points = [each for each in self.images() if each.is_save_point and not each.archived]
        points = [each for each in points if each.manifest.encryption is None]
        return sorted(points, key=lambda each: each.manifest.created, reverse=True)

    def take_over(self, id: str, kernel_id: str, lock: int) -> Draft:
        """Return the draft ``id`` of another process, which may end at any time; ``lock``: see `Draft`."""
        reservation = self.reservation(self.root / f"{layout.DRAFT}{id}", kernel_id)
        keys, generations, vault, known = (
            self.keys,
            self.generations,
            Vault(),
            KnownChunks(self.unencrypted_save_points),
        )
        return Draft(self.root, id, keys, generations, vault, reservation, 0, self._needed_links, known, lock)

    def _needed_links(self, but: str = "") -> set[str]:
        """Return the links of all images but those of kernel ``but``."""
        manifests = [image.manifest for image in self.images() if image.manifest.kernel_id != but]
        return {name for manifest in manifests for name in links.needed(manifest)}

    def images(self) -> list[Image]:
        """Return every readable image, oldest first; `get` explains an unreadable one."""
        found = []
        for name in self._names():
            if not name.startswith("."):
                with contextlib.suppress(GpuCkptError):
                    found.append(self.get(name))
        return sorted(found, key=lambda image: image.manifest.created)  # names have seconds, and then digits by chance

    def forget(self, kernel_id: str) -> None:
        """Archive the generations of a kernel that has ended for good, if no image of it is left.  Never raises."""
        with contextlib.suppress(GpuCkptError, OSError):
            if not any(image.manifest.kernel_id == kernel_id for image in self.images()):
                self.generations.close(kernel_id)

    def _names(self) -> list[str]:
        """Return the sorted names of directories; without links, which may lead where this user cannot look.

        Raises `StoreShared` for a directory of others that this user cannot enter, `StoreUnwritable`.
        """
        try:
            with os.scandir(self.root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            if isinstance(error, PermissionError):
                self.require_private()
            message = f"The image directory cannot be read: {error.strerror}."
            raise StoreUnwritable(message, directory=str(self.root)) from error

    def damaged(self) -> dict[str, ImageFormat]:
        """Return the directories of this user whose manifest cannot be used, by id, and why."""
        found = {}
        for name in self._names():
            with contextlib.suppress(GpuCkptError):
                try:
                    self.get(name)
                except ImageFormat as error:
                    found[name] = error
        return found

    def get(self, id: str) -> Image:
        """Return the image named ``id``.  Raises `ImageNotFound`, `ImageFormat`."""
        path = self._own(id)
        try:
            manifest = Manifest.from_json(verify.read_manifest(path), id)
        except OSError as error:
            self._own(id)  # another may have removed it since
            raise ImageFormat(f"The image's manifest cannot be read: {error.strerror}.", image=id) from error
        if manifest.id != id:
            raise ImageFormat(f"The manifest in {id!r} is that of {manifest.id!r}.", image=id)
        return Image(path, manifest)

    def _own(self, id: str) -> Path:
        """Return the directory of an image of this user: CRIU would bring to life what another user wrote as us."""
        path = self.root / id
        if not id or "/" in id or id.startswith("."):
            raise ImageNotFound(f"There is no image {id!r}.", image=id)
        try:
            facts = path.lstat()
            if facts.st_uid != os.geteuid():
                raise PermissionError
            if not stat.S_ISDIR(facts.st_mode):
                raise NotADirectoryError
        except PermissionError as error:
            raise ImageNotFound(f"Image {id!r} belongs to another user.", image=id) from error
        except (OSError, ValueError) as error:  # ValueError: no name of a file at all
            raise ImageNotFound(f"There is no image {id!r}.", image=id) from error
        return path

    def check(self, image: Image, progress: Progress | None = None) -> None:
        """Verify that the image is complete, ours and the last of its kernel.

        Raises `ImageArchived`, `ImageForged`, `ImageDamaged`, `ImageStale`, `ImageFormat`, `KeyUnusable`.
        """
        self._require_content(image)
        self._require_current(image, self._retry_after_sweep(lambda: verify.verify(image.path, self.keys, progress)))

    def require_files(self, image: Image) -> Manifest:
        """Do as `check`, but for the content of the image's files; return its manifest."""
        self._require_content(image)

        def check() -> Manifest:
            manifest = verify.require_sealed(image.path, self.keys)
            verify.require_tree(image.path, manifest)
            return manifest

        manifest = self._retry_after_sweep(check)
        self._require_current(image, manifest)
        return manifest

    @contextlib.contextmanager
    def changing(self, image: Image) -> Iterator[None]:
        """Have what the body adds to a leased image removed unless its manifest lists it in the end.

        Of a process that is killed a sweep does that.  Raises `ImageForged`, `OSError`.
        """
        lock = FileLock(self.root / f"{layout.DRAFT}{image.id}{layout.LOCK}", timeout=_SWEPT, mode=0o600)
        with lock:
            try:
                yield
            finally:
                verify.remove_unlisted(image.path, self.keys)
                Path(lock.lock_file).unlink()

    def begin_check(self, image: Image) -> BackgroundTask:
        """Do as `check` for a restore; the memory that CRIU only copies is verified in a background task.

        Raises as `check`, and `StoreShared`.  The caller runs nothing of the image before the task has ended.
        """
        self.require_private()
        self._require_content(image)
        manifest, proof = self._retry_after_sweep(lambda: verify.begin(image.path, self.keys))
        try:
            self._require_current(image, manifest)
        except BaseException:
            proof.cancel(wait_for_end=True)
            raise
        return proof

    def _retry_after_sweep(self, check: Callable[[], T]) -> T:
        """Return the result of ``check``, repeated where a sweep removed something.

        An owner may have ended just after it had published the image, before it removed the kernel's own links to its
        files: a file with two links is refused.
        """
        try:
            return check()
        except ImageDamaged:
            if not self.sweep():
                raise
            return check()

    def _require_content(self, image: Image) -> None:
        if image.archived:
            raise ImageArchived("The content of the image is in the cold tier.", image=image.id)

    def _require_current(self, image: Image, verified: Manifest) -> None:
        if verified != image.manifest:
            raise ImageForged("The image's manifest was changed while it was read.", image=image.id)
        self.generations.require_current(verified)

    def readable(self, image: Image) -> AbstractContextManager[encryption.Readable]:
        """Make ``image`` readable in the body.

        Raises `StoreShared`, `KeyUnusable`, `ImageDamaged`, `NoMemory`, `ImageBusy`.
        """
        self.require_private()
        return encryption.readable(self.vault, image.path, image.manifest)

    def seal(self, image: Image) -> Image:
        """Hash and seal an image as it is now, also one that another user or release made.

        Raises as `remove`, `StoreShared`, and `ImageArchived`: without its content it would be sealed as an image that
        has none.
        """
        self.require_private()
        with lease.acquire(image.path), mapped_errors(self.root):
            self._require_content(image)
            for name in (MANIFEST, SEAL):  # of a seal that broke off
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
        timeout: float = 0.0,
        before_delete: Callable[[Path], object] = lambda _: None,
    ) -> int:
        """Delete an image; return the bytes freed.

        ``leased``: the caller has its lease.  ``moved``: its kernel sleeps on elsewhere.  ``before_delete``: called
        with the directory when it is no image any more, before it is deleted.  Raises `ImageBusy` when a restore uses
        the image for more than ``timeout`` seconds, `ImageNotFound`.
        """
        freed = bytes_alone(image)
        self._delete(image.path, leased, None if moved else image, before_delete, timeout)
        if moved:
            with mapped_errors(self.root):
                image.unmark_sent()  # what lies in the cold tier may be its new owner's
        return freed

    def remove_damaged(self, id: str) -> int:
        """Delete an image whatever its manifest says; return the bytes freed.  Raises as `remove`."""
        path = self._own(id)
        count = _bytes(path)
        self._delete(path, False, None)
        return count

    def _delete(
        self,
        path: Path,
        leased: bool,
        ended: Image | None,
        before_delete: Callable[[Path], object] = lambda _: None,
        timeout: float = 0.0,
    ) -> None:
        right = contextlib.nullcontext() if leased else lease.acquire(path, remove=True, timeout=timeout)
        with right, mapped_errors(self.root):
            abandoned = ended is not None and not leased and self._is_abandoned(ended)
            # Renamed first: a removal that is interrupted leaves a draft to sweep, not half an image.
            deleted = self.root / f"{layout.DRAFT}{path.name}"
            path.rename(deleted)
            if ended is not None:
                of_source = self._needed_links(ended.manifest.kernel_id) if ended.manifest.branched_from else ()
                links.remove(ended.manifest, current=not leased and self._is_current(ended), needed=of_source)
                if abandoned:
                    links.remove_tracked(ended.manifest)
                if layout.mark(path, layout.RESTORING).exists():
                    links.remove_ghosts(images.ghost_names(deleted / layout.CRIU))
            before_delete(deleted)
            shutil.rmtree(deleted, ignore_errors=True)  # a sweep may have come upon it already
            fetched = self.root / layout.INCOMING / path.name  # by a wake that broke off
            if fetched.exists():
                shutil.rmtree(fetched, ignore_errors=True)
                layout.mark(fetched, layout.LOCK).unlink(missing_ok=True)
            # Under the lease: the next process makes a lock file of its own and sees that there is no image.
            for suffix in layout.MARKS:
                layout.mark(path, suffix).unlink(missing_ok=True)

    def _is_abandoned(self, image: Image) -> bool:
        """Return whether the image is sealed by the user, and the last of a kernel that does not live."""
        with contextlib.suppress(GpuCkptError, OSError):
            sealed = verify.require_sealed(image.path, self.keys)
            lease.require_unclaimed(image.path)
            return sealed == image.manifest and self._is_current(image)
        return False

    def _is_current(self, image: Image) -> bool:
        """Return whether the image was not restored and is the last of its kernel; False where that is unknown.

        A save point is while its kernel sleeps in it.
        """
        if image.is_save_point and image.retired:
            return False
        with contextlib.suppress(GpuCkptError):
            self.generations.require_current(image.manifest)
            return True
        return False

    def supersede(self, kernel_id: str) -> None:
        """Record that a kernel runs on, which sleeps in none of its images, and remove their links.  Never raises.

        Save points keep theirs, and the one that it was restored from is free again.
        """
        with contextlib.suppress(OSError, StoreUnwritable, StoreShared):
            needed = self._needed_links(but=kernel_id)
            for image in self.images():
                if image.manifest.kernel_id != kernel_id:
                    continue
                if image.is_save_point:
                    image.retire()
                    image.withdraw_claim()
                elif not self._is_current(image):
                    image.retire()  # else a later server would find the kernel asleep in it when it has ended
                    links.remove(image.manifest, current=True, needed=needed)

    def _keep_links(self, id: str) -> None:
        """Finish what the writer of a save point may not have done."""
        with contextlib.suppress(GpuCkptError):
            if (image := self.get(id)).is_save_point:
                links.keep(image.manifest)

    def sweep(self) -> int:
        """Remove drafts whose writer is gone, and files of images; return their number.  Called when a server starts.

        Several servers may sweep at once.  A directory that others can enter is left alone: its drafts may be theirs.
        """
        swept = self.vault.sweep()
        self.hashes.sweep()
        if not self.root.is_dir() or not user_directory.is_private(self.root):
            return swept
        drafts = {path for path in self.root.glob(f"{layout.DRAFT}*") if path.is_dir()}
        # Locks alone are of writers that ended just after they had published, or could not remove them.
        drafts |= {path.with_suffix("") for path in self.root.glob(f"{layout.DRAFT}*{layout.LOCK}")}
        for path in drafts:
            if spill.is_of_another_host(path):
                continue
            lock = FileLock(path.with_name(path.name + layout.LOCK), timeout=0, mode=0o600)
            with contextlib.suppress(Timeout, OSError), lock:  # a writer has it before it makes its directory
                journal = path.with_name(path.name + layout.LINKS)
                published = self.root / path.name.removeprefix(layout.DRAFT)
                if published.exists():
                    with contextlib.suppress(GpuCkptError):
                        swept += verify.remove_unlisted(published, self.keys)
                if journal.exists() and published.exists():
                    self._keep_links(published.name)
                elif journal.exists():
                    others = {*self.root.glob(f"{layout.DRAFT}*{layout.LINKS}")} - {journal}
                    links.remove_abandoned(journal, others, self._needed_links())
                journal.unlink(missing_ok=True)
                path.with_name(path.name + layout.LATER).unlink(missing_ok=True)
                if not published.exists():
                    layout.mark(published, layout.ASLEEP).unlink(missing_ok=True)
                if path.is_dir():  # another sweep may have held the lock before
                    shutil.rmtree(path, ignore_errors=True)
                    swept += 1
                Path(lock.lock_file).unlink(missing_ok=True)
        swept += self._sweep_incoming()
        for reservation, draft in reservations(self.root):
            if not draft.exists():
                reservation.unlink(missing_ok=True)
        return swept

    def _sweep_incoming(self) -> int:
        """Remove images whose fetch broke off `_INCOMING_KEPT` seconds ago or earlier; return their number."""
        swept = 0
        for path in (self.root / layout.INCOMING).glob("[!.]*"):
            lock = FileLock(layout.mark(path, layout.LOCK), timeout=0, mode=0o600)
            with contextlib.suppress(Timeout, OSError), lock:
                last = max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
                if time.time() - last > _INCOMING_KEPT:
                    shutil.rmtree(path, ignore_errors=True)
                    Path(lock.lock_file).unlink(missing_ok=True)
                    swept += 1
        return swept


def _bytes(path: Path) -> int:
    """Return the bytes of all files below ``path``."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
