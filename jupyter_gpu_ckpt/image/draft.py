"""An image being written: a directory beside the images, which becomes an image by a rename.

Publishing is: every file hashed and flushed to disk, then the manifest and its seal, the directory renamed, the parent
flushed.  A crash at any point leaves either a whole image or a draft that the next sweep removes.  Limit: a file system
that lies about fsync can lose a published image.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..errors import KeyUnusable, StoreUnwritable
from ..files import clone
from ..files.atomic import flush, write_atomically
from ..files.disk import mapped_errors
from . import device_memory, encryption, layout, lease, links, shared_chunks, verify
from .background_task import following
from .encryption import Vault
from .generations import Generations
from .image import Image
from .keys import Keyring
from .manifest import FileEntry, Manifest
from .quota import QuotaReservation
from .shared_chunks import KnownChunks

#: Seconds to wait for another process that changes a claim.
_TIMEOUT = 10.0


class Draft:
    """An image being written; `publish` or `discard` ends it."""

    def __init__(
        self,
        root: Path,
        id: str,
        keys: Keyring,
        generations: Generations,
        vault: Vault,
        reservation: QuotaReservation,
        needed: int,
        needed_links: Callable[[], set[str]],
        known_chunks: KnownChunks,
        lock: int | None = None,
    ) -> None:
        """Begin a draft that may need so many bytes.

        ``lock``: the locked descriptor of one that another process has begun (`lock_fd`), which is completed here.
        """
        self.id = id
        self.path = root / f"{layout.DRAFT}{id}"
        self._root = root
        self._keys = keys
        self._generations = generations
        self._reservation = reservation
        self._journal = root / f"{layout.DRAFT}{id}{layout.LINKS}"
        self._needed_links = needed_links
        self._known_chunks = known_chunks
        self._known: dict[str, FileEntry] = {}
        self._is_copy = False
        self._is_taken_over = lock is not None
        self._copied_encryption: dict[str, Any] | None = None
        self._lock = root / f"{layout.DRAFT}{id}{layout.LOCK}"
        #: The locked descriptor of the draft's lock; not a `FileLock`, as another process may keep it (`completion`).
        self.lock_fd = -1 if lock is None else lock
        self._form = encryption.Form(vault, id, self.path / layout.CRIU)
        #: The image's directory, once it is one.
        self.target = root / id
        #: The directory that CRIU writes to; for an encrypted image it lies in memory.
        self.criu_directory = self._form.criu_directory
        if self._is_taken_over:
            return
        try:
            with mapped_errors(root):
                self.lock_fd = _locked(self._lock)
                for directory in (self.path, self.path / layout.CRIU):
                    directory.mkdir(mode=0o700)
                    directory.chmod(0o700)  # whatever the umask
            reservation.reserve(needed)
        except BaseException:
            self.discard()
            raise

    @contextlib.contextmanager
    def work_directory(self) -> Iterator[Path]:
        """Make a directory for temporary files of the body, which are not part of the image."""
        path = self.path / "work"
        with mapped_errors(self._root):
            path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def write_device(
        self,
        extents: int,
        claim: device_memory.ClaimChunk | None,
        check_cancelled: Callable[[], object],
        *,
        removes: bool = False,
        continues: int = 0,
        when_full: Callable[[], object] | None = None,
    ) -> None:
        """Write device memory from ``extents`` (`device_memory.write`), but for chunks of save points and of ``claim``.

        ``removes``, ``continues``: see `device_memory.write`; ``when_full``: see `device_memory.Codec`.  Raises what
        the functions raise, `NoSpace`, `StoreUnwritable`.
        """

        def claim_any(name: str, content: FileEntry, path: Path) -> bool:
            return self._known_chunks.link(name, content, path) or (claim is not None and claim(name, content, path))

        with mapped_errors(self._root):
            directory = self.path / layout.CRIU / layout.DEVICE
            codec = self._form.codec(claim_any, when_full)
            written = device_memory.write(
                extents, directory, codec, check_cancelled, removes=removes, continues=continues
            )
            self._known |= {layout.device_file(name): entry for name, entry in written.items()}

    @contextlib.contextmanager
    def hashing_pages(self, check_cancelled: Callable[[], object]) -> Iterator[None]:
        """Hash CRIU's files of pages beside the body, which writes them and whose files nobody changes later.

        CRIU writes each from its start to its end (``write_pages_loc`` in its page-xfer.c: splice(2) without an
        offset).  Those of an encrypted image are hashed later, as they are stored.  Raises what the function raises,
        `NoSpace`, `StoreUnwritable`.
        """
        if self.criu_directory != self.path / layout.CRIU:
            yield
            return

        def finish(check: Callable[[], None]) -> None:
            hashed = pages.finish(check)
            self._known |= {str(path.relative_to(self.path)): entry for path, entry in hashed.items()}

        mapped = mapped_errors(self._root)
        with (
            verify.GrowingFiles(self.criu_directory, layout.PAGES) as pages,
            following("gpu-ckpt-pages", mapped(pages.advance), mapped(finish), check_cancelled),
        ):
            yield

    def copy(self, source: Image, *, whole: bool = False) -> None:
        """Copy all files of an image but its session, or share them: encrypted or not, as they are.

        ``whole``: join files of pages that are in chunks, which a restore then need not do.  Raises `NoSpace`,
        `StoreUnwritable`, `ImageDamaged`.
        """
        self._is_copy = True
        with mapped_errors(self._root):
            of_branch = bool(source.manifest.branched_from)
            joined = shared_chunks.join(source.criu_directory, self.path / layout.CRIU) if whole else set()
            # They are hashed anew, as something else: what was damaged must not become what is right.
            files = source.manifest.files
            verify.require_content(source.path, {name: entry for name, entry in files.items() if name in joined})
            for name, entry in files.items():
                if name == layout.SESSION or name in joined:
                    continue
                (self.path / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                linkable = layout.is_linkable(name, of_branch=of_branch)
                if not (linkable and shared_chunks.link(source.path / name, self.path / name)):
                    clone.copy(source.path / name, self.path / name, most=entry.bytes)
                self._known[name] = entry
        self._copied_encryption = source.manifest.encryption

    def note_before_dump(self, pids: Iterable[int]) -> None:
        """Note where a dump of ``pids`` may make links, for `discard` or a later sweep.  Raises `NoSpace`."""
        with mapped_errors(self._root):
            links.note_before_dump(pids, self._journal)

    def add_hashed(self, entries: Mapping[str, FileEntry]) -> None:
        """Add files that are in the draft and need not be hashed again, by their names in a manifest."""
        self._known |= entries

    def size(self) -> int:
        """Return the bytes written so far.  From any thread."""
        total = 0
        with contextlib.suppress(OSError):  # renamed or removed meanwhile
            for path in {*self.path.rglob("*"), *self.criu_directory.rglob("*")}:
                total += path.stat().st_size
        return total

    def reserve(self, bytes: int) -> None:
        """Reserve so many bytes in all.  Raises `QuotaExceeded`, `StoreUnwritable`."""
        self._reservation.reserve(bytes)

    def publish(
        self, manifest: Manifest, *, claim_pid: int | None = None, keep_fd: lease.KeepFd | None = None
    ) -> Image:
        """Make the draft an image.  Raises `QuotaExceeded` when it outgrew its reservation; then it is still a draft.

        ``claim_pid``: the saved process, which still lives; until `Image.withdraw_claim` nobody restores the image,
        unless the process that ``keep_fd`` passes the claim's lock to has ended.  A save point has none, unless its
        kernel is to sleep in it.  After `NoSpace` it can be tried again.
        """
        sleeps_in_save_point = manifest.save_point is not None and claim_pid is not None
        with mapped_errors(self._root):
            key = self._keys.current()
            if manifest.save_point is not None and not sleeps_in_save_point:  # a wake needs nothing but the image
                self._divide_pages()
            manifest = replace(manifest, encryption=self._copied_encryption or self._form.finish())
            files = [path for path in self.path.rglob("*") if path.is_file() and not path.is_symlink()]
            files = [path for path in files if path.relative_to(self.path).parts[0] not in layout.RESERVED]
            for path in files:
                path.chmod(0o600)
            # Files are hashed while others are flushed, so hashing costs no time.  Zeros become holes, which read the
            # same.  Beside device memory, most that CRIU writes is zeros: the context that the CUDA driver restores in
            # the process (145,143 of 225,845 pages with PyTorch on an H200).  So these files are flushed after hashing.
            with ThreadPoolExecutor(8) as pool:
                last = [path for path in files if self._known and self._is_unhashed_memory(path)]
                flushing = [pool.submit(flush, path) for path in files if path not in last]
                entries = verify.entries(
                    self.path, punch=True, known=self._known, of_branch=bool(manifest.branched_from)
                )
                flushing += [pool.submit(flush, path) for path in last]
                manifest = replace(manifest, id=self.id, files=entries)
                for flushed in flushing:
                    flushed.result()
            self._reservation.reserve(manifest.bytes)
            write_atomically(self.path / layout.MANIFEST, manifest.to_json(), durable=True)
            verify.seal(self.path, key)
            if claim_pid is not None:
                lease.publish_claim(self.path, claim_pid, keep_fd)
            directories = [path for path in self.path.rglob("*") if path.is_dir()]
            for directory in (*directories, self.path):
                flush(directory)
            target = self.target
            if sleeps_in_save_point:
                Image(target, manifest).unretire()  # of a server that ends now, the next one must know
            with self.stays() if self._is_taken_over else contextlib.nullcontext():
                self.path.rename(target)
            try:
                flush(self._root)
            except BaseException:
                # The rename may not last: the caller keeps the kernel, so there must be no image of it.
                draft, self.path = self.path, target  # for `discard`, if the next rename fails too
                target.rename(draft)
                self.path = draft
                raise
        if manifest.save_point is not None and not self._is_taken_over:
            links.keep(manifest)
        self._unlock()
        with contextlib.suppress(KeyUnusable):  # the image is there; an older one put back may go unnoticed
            self._generations.record_published(manifest)
        return Image(target, manifest)

    def _is_unhashed_memory(self, path: Path) -> bool:
        name = str(path.relative_to(self.path))
        return name not in self._known and fnmatch.fnmatchcase(name, layout.PAGES_FILES)

    def _divide_pages(self) -> None:
        """Divide large files of pages into chunks, to share them; not of an encrypted image, nor of a copy."""
        if self.criu_directory == self.path / layout.CRIU and not (self._is_copy or self._is_taken_over):
            self._known |= shared_chunks.split(self.criu_directory, self._known_chunks)

    def discard(self) -> None:
        """Remove the draft.  Idempotent, never raises: it runs while another error is on its way."""
        with contextlib.suppress(OSError):
            if self._journal.exists():
                others = self._root.glob(f"{layout.DRAFT}*{layout.LINKS}")
                links.remove_abandoned(self._journal, {*others} - {self._journal}, self._needed_links())
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            layout.mark(self.target, layout.ASLEEP).unlink(missing_ok=True)
        self._unlock()

    def _unlock(self) -> None:
        self._form.close()
        self._reservation.release()
        with contextlib.suppress(OSError):
            self._journal.unlink(missing_ok=True)
            self._lock.unlink()
        self.unlock()

    def unlock(self) -> None:
        """Close the draft's lock; it ends if no other process has it, too."""
        fd, self.lock_fd = self.lock_fd, -1
        if fd >= 0:
            os.close(fd)

    def stays(self) -> FileLock:
        """Return a lock: while it is held, no other process makes the draft an image, nor changes its claim."""
        return FileLock(layout.mark(self.target, layout.LOCK), timeout=_TIMEOUT, mode=0o600)


def _locked(path: Path) -> int:
    """Make a lock and return its locked descriptor.  Raises `OSError`, `StoreUnwritable`.

    Not a `FileLock`: other processes get the descriptor, and have the lock until the last of them closes it.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                raise StoreUnwritable("Another process has locked the draft of an image.") from error
            raise
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # a sweep came upon it
