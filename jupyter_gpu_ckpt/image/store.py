"""A directory of images: drafts are written beside the images and become one by a rename.

Publishing is: every file flushed to disk, the manifest written last and flushed, the directory renamed, the parent
flushed. A crash at any point leaves either a whole image or a draft that the next sweep removes.  Limits: a file
system that lies about fsync can lose a published image; NFS without a lock manager cannot tell two restorers apart.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import GpuCkptError, ImageBusy, ImageFormat, ImageNotFound, NoSpace, StoreUnwritable
from .manifest import Manifest

MANIFEST = "manifest.json"
CRIU_DIRECTORY = "criu"
_DRAFT = ".draft-"


@contextlib.contextmanager
def _mapped(root: Path) -> Iterator[None]:
    """Errors of the file system become ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpace("The disk of the image directory is full.", directory=str(root)) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
            raise StoreUnwritable(
                f"The image directory cannot be written: {os.strerror(error.errno)}.", directory=str(root)
            ) from error
        raise


def _flush(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True)
class Image:
    """A published image."""

    path: Path
    manifest: Manifest

    @property
    def id(self) -> str:
        """The image's name in its store."""
        return self.manifest.id

    @property
    def criu_directory(self) -> Path:
        """CRIU's files."""
        return self.path / CRIU_DIRECTORY

    def retire(self) -> None:
        """Its owner shut the kernel down: no server is to bring it back by itself.  The image stays usable."""
        self._mark.touch(0o600)

    @property
    def retired(self) -> bool:
        """Whether `retire` was called."""
        return self._mark.exists()

    @property
    def _mark(self) -> Path:
        return self.path.with_name(f".{self.path.name}.retired")

    @contextlib.contextmanager
    def lease(self) -> Iterator[None]:
        """Hold the image for one restorer or remover.  Raises `ImageBusy` at once when another holds it."""
        lock = FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=0, mode=0o600)
        try:
            lock.acquire()
        except Timeout as error:
            raise ImageBusy(f"Image {self.id} is in use by another process.", image=self.id) from error
        try:
            yield
        finally:
            lock.release()


class Draft:
    """An image being written; `publish` or `discard` ends it."""

    def __init__(self, store: Store, id: str) -> None:
        self.store = store
        self.id = id
        self.path = store.root / f"{_DRAFT}{id}"
        self._lock = FileLock(store.root / f"{_DRAFT}{id}.lock", timeout=0, mode=0o600)
        with _mapped(store.root):
            self._lock.acquire()
            self.criu_directory.mkdir(parents=True, mode=0o700)
            self.path.chmod(0o700)

    @property
    def criu_directory(self) -> Path:
        """Where CRIU writes."""
        return self.path / CRIU_DIRECTORY

    def publish(self, manifest: Manifest) -> Image:
        """Make it an image.  After failure it is still a draft."""
        with _mapped(self.store.root):
            files = [path for path in sorted(self.path.rglob("*")) if path.is_file() and path.name != MANIFEST]
            for path in files:
                path.chmod(0o600)
            manifest = replace(
                manifest, id=self.id, files={str(path.relative_to(self.path)): path.stat().st_size for path in files}
            )
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(_flush, files))
            fd = os.open(self.path / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(fd, "w") as file:
                file.write(manifest.to_json())
                file.flush()
                os.fsync(file.fileno())
            for directory in (self.criu_directory, self.path):
                _flush(directory)
            target = self.store.root / self.id
            self.path.rename(target)
            _flush(self.store.root)
        self._unlock()
        return Image(target, manifest)

    def discard(self) -> None:
        """Remove what was written.  Idempotent, never raises: it runs while another error is on its way."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        with contextlib.suppress(OSError):
            Path(self._lock.lock_file).unlink()
        self._lock.release()


class Store:
    """The images below one directory, which is made on first use with mode 0700."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Make the directory and prove that it can be written.  Raises `StoreUnwritable`."""
        with _mapped(self.root):
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.root.stat().st_uid == os.geteuid():
                self.root.chmod(0o700)
            probe = self.root / f".probe-{secrets.token_hex(4)}"
            probe.touch(0o600)
            probe.unlink()

    def free(self) -> int:
        """Bytes an unprivileged user may still write."""
        place = next(path for path in (self.root, *self.root.parents) if path.exists())
        facts = os.statvfs(place)
        return facts.f_bavail * facts.f_frsize

    def begin(self, kernel_id: str) -> Draft:
        """Start an image of a kernel.  Raises `StoreUnwritable`, `NoSpace`."""
        self.prepare()
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        return Draft(self, f"{stamp}-{kernel_id[:8]}-{secrets.token_hex(3)}")

    def images(self) -> list[Image]:
        """Every readable image, oldest first; an unreadable one is passed over here and explained by `get`."""
        found = []
        if self.root.is_dir():
            for path in sorted(self.root.iterdir()):
                if path.is_dir() and not path.name.startswith("."):
                    with contextlib.suppress(GpuCkptError):
                        found.append(self.get(path.name))
        return found

    def get(self, id: str) -> Image:
        """The image named ``id``.  Raises `ImageNotFound`, `ImageFormat`."""
        if not id or "/" in id or id.startswith("."):
            raise ImageNotFound(f"There is no image {id!r}.", image=id)
        path = self.root / id
        try:
            if path.stat().st_uid != os.geteuid():
                # CRIU trusts its images completely: what another user wrote is not brought to life as us.
                raise PermissionError
            manifest = Manifest.from_json((path / MANIFEST).read_text(errors="replace"))
        except PermissionError as error:
            raise ImageNotFound(f"Image {id!r} belongs to another user.", image=id) from error
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ImageNotFound(f"There is no image {id!r}.", image=id) from error
        if manifest.id != id:
            raise ImageFormat(f"The manifest in {id!r} is that of {manifest.id!r}.", image=id)
        return Image(path, manifest)

    def check(self, image: Image) -> None:
        """Every file of the manifest is there with its size, and no other.  Raises `ImageFormat`."""
        root = image.path
        found = {
            str(path.relative_to(root)): path.stat().st_size
            for path in root.rglob("*")
            if path.is_file() and path.name != MANIFEST
        }
        if found != image.manifest.files:
            expected = image.manifest.files
            wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
            raise ImageFormat(f"The image is damaged: {', '.join(wrong[:3])}.", image=image.id, files=wrong)

    def remove(self, image: Image) -> int:
        """Delete an image; returns the bytes freed.  Raises `ImageBusy` when a restore is using it, `ImageNotFound`."""
        if not image.path.is_dir():
            raise ImageNotFound(f"There is no image {image.id!r}.", image=image.id)
        with image.lease(), _mapped(self.root):
            # Renamed first: a removal that is interrupted leaves a draft to sweep, not half an image.
            doomed = self.root / f"{_DRAFT}{image.id}"
            image.path.rename(doomed)
            shutil.rmtree(doomed)
        for mark in ("lock", "retired"):
            image.path.with_name(f".{image.path.name}.{mark}").unlink(missing_ok=True)
        return image.manifest.bytes

    def sweep(self) -> int:
        """Remove drafts whose writer is gone; returns how many.  Called when a server starts."""
        swept = 0
        for path in self.root.glob(f"{_DRAFT}*") if self.root.is_dir() else ():
            if not path.is_dir():
                continue
            lock = FileLock(path.with_name(path.name + ".lock"), timeout=0, mode=0o600)
            with contextlib.suppress(Timeout, OSError):
                with lock:
                    shutil.rmtree(path, ignore_errors=True)
                    swept += 1
                Path(lock.lock_file).unlink(missing_ok=True)
        return swept
