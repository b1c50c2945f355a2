"""Images elsewhere, moved by push and pull: in a shared directory, an object store, or wherever fsspec can write.

An image lies there as ``<url>/<id>/``: its files in parts (``0007-000012``: file 7 in the order of the names, part 12),
then the seal, and the manifest last.  So a transfer that broke off leaves nothing that a listing shows, and the next
one continues with the parts that are there.  A pulled image is trusted after the checks that a restore makes
(`verify`), the seal first: a foreign manifest is not even read.  Parts are large enough for the rate of an object store
and small enough to resend; those of zeros are left out.

A kernel must not live twice.  So an image is *moved*: `Remote.push` removes the local image once all of it is there,
and `Remote.pull` claims the remote one, as only one host can, and removes it once all of it is here.  A copy is made
only on request.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3
from filelock import FileLock, Timeout

from .. import procfs
from ..errors import (
    GpuCkptError,
    ImageArchived,
    ImageBusy,
    ImageDamaged,
    ImageFormat,
    ImageNotFound,
    NoSpace,
    QuotaExceeded,
    RemoteFailed,
)
from ..files import disk
from ..files.atomic import flush, write_atomically
from ..image import layout, verify
from ..image.image import Image
from ..image.layout import CLAIM, INCOMING, MANIFEST, SEAL
from ..image.manifest import MOST_BYTES, Manifest
from ..image.store import Store
from .storage import Storage, mapped_errors

#: Bytes of every part but the last of a file.
PART = 16 << 20
_ZEROS = bytes(PART)
#: Called with the bytes that are done now, from any thread; those of an earlier try count at once.
Progress = Callable[[int], object]
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Part:
    """The bytes from ``offset`` to ``end`` of a file of an image, and the ``name`` they have elsewhere."""

    name: str
    file: str
    offset: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.offset

    def read(self, directory: Path) -> bytes:
        """Return the part of the image in ``directory``.  Raises `ImageFormat` when the file is shorter, `OSError`."""
        fd = os.open(directory / self.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), self.length, self.offset)
        if len(data) != self.length:
            raise ImageFormat("The image is shorter than its manifest says.", file=self.file)
        return data


def parts(manifest: Manifest) -> Iterator[Part]:
    """Yield all parts of an image, in the order of the files' names."""
    for number, (file, entry) in enumerate(sorted(manifest.files.items())):
        for index, offset in enumerate(range(0, entry.bytes, PART)):
            yield Part(f"{number:04d}-{index:06d}", file, offset, min(offset + PART, entry.bytes))


class Remote:
    """The images below one URL.

    Every method raises `RemoteFailed` with what the other side said.  After failure of a transfer the image is where it
    was, and the next try uses what was sent.  Raises `RemoteUnsupported` when the package for the URL is not installed.
    """

    def __init__(self, url: str, *, workers: int = 8, **options: Any) -> None:
        self._workers = workers
        self.storage = Storage(url, **options)

    # -- listing and removal

    def images(self) -> list[Manifest]:
        """Return the manifests of the images there, oldest first.  They are not verified; `pull` does that."""
        with mapped_errors():
            ids = self.storage.ids()
        found = []
        for id in ids:
            with contextlib.suppress(ImageNotFound, ImageFormat):
                found.append(self.manifest(id))
        return found

    def manifest(self, id: str) -> Manifest:
        """Return the manifest of an image there, not verified.  Raises `ImageNotFound`, `ImageFormat`."""
        try:
            manifest = Manifest.from_json(self.storage.read_small(id, MANIFEST, MOST_BYTES), id)
        except RemoteFailed as error:
            if error.details["kind"] != PermissionError.__name__:
                raise
            raise ImageNotFound(f"Image {id!r} there may not be read by you.", image=id) from error
        if manifest.id != id:
            raise ImageFormat(f"The manifest in {id!r} is that of {manifest.id!r}.", image=id)
        return manifest

    def claimed(self, id: str) -> str:
        """Return the host that is pulling the image, or whose kernel it is; empty when it is free."""
        return "" if (claim := self._read_claim(id)) is None else str(claim.get("hostname", "?"))

    def remove(self, id: str) -> None:
        """Delete an image there, the manifest first: half an image is none."""
        with mapped_errors():
            for name in (MANIFEST, SEAL):
                self.storage.delete(id, name)
            self.storage.delete_directory(id)

    def discard(self, id: str, token: str) -> None:
        """Delete what `send` sent with ``token``, unless another owns it by now."""
        claim = self._read_claim(id)
        if claim is None:  # an image that was sent, or what is left of one that is being removed
            with mapped_errors():
                ours = MANIFEST not in self.storage.sizes(id)
        else:
            ours = claim.get("token") == token
        if ours:
            self.remove(id)

    # -- push

    def push(self, image: Image, *, remove_from: Store | None = None, progress: Progress | None = None) -> int:
        """Send an image; return the bytes that had to be sent now.

        ``remove_from``: its store, from which it is removed when all of it is there; else it is copied.  Raises
        `ImageBusy` when a restore uses it or its kernel lives, `ImageArchived`.
        """
        with image.lease():
            if image.archived:
                message = "The image cannot be sent: its content is in the cold tier."
                hint = "Wake its kernel, which fetches the content, and put it to sleep again."
                raise ImageArchived(message, hint=hint, image=image.id)
            token = secrets.token_hex(8)
            sent = self.send(image, progress, token=token)
            self.complete(image, token)
            with mapped_errors():
                self.storage.delete(image.id, CLAIM)
            if remove_from is not None:
                remove_from.remove(image, leased=True, moved=True)
        return sent

    def send(self, image: Image, progress: Progress | None = None, *, token: str) -> int:
        """Send an image's content, which no listing shows before `complete`; return the bytes that had to be sent now.

        Every part there was compared by its hash on return, also those of an earlier try.  ``token``: names the owner
        of the parts (`complete`, `discard`), which is the last that has begun to send.
        """
        hashes = self.storage.hashes(image.id)
        sent: dict[str, str] = {}
        with mapped_errors():
            self.storage.make_directory(image.id)
            claim = json.dumps({**_claimant(), "token": token}).encode()
            self.storage.write(image.id, CLAIM, claim, durable=True)
            present = self.storage.sizes(image.id)
            if present.keys() - {CLAIM}:
                hashes.query(sum(present.values()))

            def send(part: Part) -> int:
                data, count = part.read(image.path), 0
                if data == _ZEROS[: part.length]:
                    if part.name in present:
                        self.storage.delete(image.id, part.name)  # a pull would take it for the content
                else:
                    digest = hashes.digest(data)
                    if present.get(part.name) != len(data) or not hashes.matches(part.name, digest):
                        self.storage.write(image.id, part.name, data)
                        sent[part.name], count = digest, len(data)
                if progress is not None:
                    progress(part.length)
                return count

            total = sum(self._map(send, parts(image.manifest)))
            if hashes.trusts_writes():
                return total
            hashes.query(total)
            arrived = self._map(lambda name: hashes.matches(name, sent[name]), sent)
            wrong = [name for name, same in zip(sent, arrived, strict=True) if not same]
            for name in wrong:
                self.storage.delete(image.id, name)
        if wrong:
            raise RemoteFailed(f"The image did not arrive as it was sent: {len(wrong)} parts differ.", parts=wrong[:20])
        return total

    def complete(self, image: Image, token: str) -> None:
        """Make what `send` sent with ``token`` an image, which no other host can pull as long as its claim is there.

        Raises `RemoteFailed` where another transfer of the image has begun meanwhile, or ended: then the parts are its
        own, and may have gone with an image that was pulled.
        """
        with mapped_errors():
            # Read before anything is written: the image may have gone.
            last = {name: (image.path / name).read_bytes() for name in (SEAL, MANIFEST)}
            self.storage.flush(image.id)  # once for all parts: flushes while others are sent take as long (measured)
            claim = self._read_claim(image.id)
            if claim is None or claim.get("token") != token:
                raise RemoteFailed("Another transfer of the image to there has begun meanwhile.", image=image.id)
            for name, content in last.items():
                self.storage.write(image.id, name, content, durable=True)

    # -- pull

    def pull(self, id: str, store: Store, *, keep: bool = False, progress: Progress | None = None) -> Image:
        """Fetch an image into ``store``, where it appears once it is verified.

        The remote image is claimed first and removed afterwards.  ``keep``: it is only copied, and the caller answers
        for restoring one of the two.  Raises what `Store.check` raises, `ImageBusy` when another host has claimed it or
        another process here pulls it, `ImageNotFound`, `NoSpace`, `QuotaExceeded`; `RemoteFailed` also where the image
        is here and only the remote one could not be removed, which another pull does.
        """
        store.prepare(may_encrypt=False)
        self.storage.path(id)  # raises for an id that is no name
        target = store.root / id
        if not keep and os.path.lexists(target) and self._is_moved(id, store):
            self.remove(id)
            return store.get(id)
        _require_absent(target)  # before it is claimed
        with self.fetched(id, store, keep=keep, reserves=True, progress=progress) as fetched:
            _require_absent(target)
            fetched.rename(target)
            flush(store.root)
        if not keep:
            try:
                self.remove(id)
            except RemoteFailed as error:
                error.left = f"the image {id} is here; what is left of it there can be pulled by no other host"
                error.hint = "Pull it once more: then the rest is removed."
                raise
        return store.get(id)

    def _is_moved(self, id: str, store: Store) -> bool:
        """Return whether an earlier pull of this host has moved the whole image, but for the removal there."""
        if self._read_claim(id) != _claimant():
            return False
        image = store.get(id)
        with contextlib.suppress(ImageNotFound):  # the manifest goes first
            if self.manifest(id) != image.manifest:
                return False
        store.check(image)
        return True

    @contextlib.contextmanager
    def fetched(
        self, id: str, store: Store, *, keep: bool = True, reserves: bool = False, progress: Progress | None = None
    ) -> Iterator[Path]:
        """Fetch an image into a verified directory for the body to move files from; resumes.  Raises as `pull`.

        ``reserves``: its bytes in the quota, which does not count it yet.
        """
        self.storage.path(id)  # raises for an id that is no name
        directory = Path(store.root, INCOMING, id)  # of the image's name, as `verify` requires
        directory.parent.mkdir(mode=0o700, exist_ok=True)
        lock = FileLock(layout.mark(directory, layout.LOCK), timeout=0, mode=0o600)
        try:
            lock.acquire()
        except Timeout as error:
            raise ImageBusy(f"Image {id} is being pulled by another process.", image=id) from error
        try:
            with contextlib.ExitStack() as stack:
                self._fetch(id, directory, store, keep, stack if reserves else None, progress)
                yield directory
            shutil.rmtree(directory, ignore_errors=True)
            Path(lock.lock_file).unlink(missing_ok=True)
        finally:
            lock.release()

    def _fetch(
        self,
        id: str,
        directory: Path,
        store: Store,
        keep: bool,
        reservations: contextlib.ExitStack | None,
        progress: Progress | None,
    ) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        for name, most in ((MANIFEST, MOST_BYTES), (SEAL, 4096)):
            write_atomically(directory / name, self.storage.read_small(id, name, most), durable=True)
        manifest = verify.require_sealed(directory, store.keys)
        store.generations.require_current(manifest)
        left = f"the image {id} is whole where it is, and was not fetched"
        if store.free() < (needed := _missing(directory, manifest)):
            raise NoSpace("The image does not fit on the disk of the image directory.", left=left, needed=needed)
        if reservations is not None:
            reservation = store.reservation(directory, manifest.kernel_id)
            reservations.callback(reservation.release)
            try:
                reservation.reserve(manifest.bytes)
            except QuotaExceeded as error:
                error.left = left
                raise
        if not keep:
            self._claim(id)
        with mapped_errors():
            wrong = self._receive(directory, manifest, progress)
        try:
            if wrong:
                message = f"The image arrived damaged: {', '.join(wrong[:3])}."
                raise ImageDamaged(message, image=id, files=wrong[:100])
            verify.require_tree(directory, manifest)
        except ImageDamaged:
            shutil.rmtree(directory, ignore_errors=True)  # else the next try would continue with it
            raise
        with disk.mapped_errors(directory):
            try:
                for path in (*sorted(directory.rglob("*"), reverse=True), directory):
                    flush(path)
            except OSError:  # nobody knows what is there
                shutil.rmtree(directory, ignore_errors=True)
                raise

    def _receive(self, directory: Path, manifest: Manifest, progress: Progress | None) -> list[str]:
        """Receive every part that is missing; return the files with a wrong hash.

        Files grow in order, so the length of a file says which of its parts are there.  After a crash of the machine it
        may say too much; then the hash is wrong.
        """
        present = self.storage.sizes(manifest.id)
        complete = {file: _complete(directory / file, entry.bytes) for file, entry in manifest.files.items()}
        hashers = {file: blake3(max_threads=blake3.AUTO) for file in manifest.files}

        def read(part: Part) -> bytes:
            if part.end <= complete[part.file]:
                return part.read(directory)
            if part.name not in present:
                return _ZEROS[: part.length]
            size = present[part.name]
            if size == part.length:  # one that is larger may not fit into memory
                size = len(data := self.storage.read(manifest.id, part.name, part.length))
            if size != part.length:
                raise RemoteFailed("A part of the image has another size than it should.", part=part.name)
            return data

        with ThreadPoolExecutor(1, thread_name_prefix="image-transfer") as beside, _Flushing(directory) as flushing:
            for part, data in zip(parts(manifest), self._map(read, parts(manifest)), strict=True):
                hashed = beside.submit(hashers[part.file].update, data)
                if part.end > complete[part.file]:
                    with disk.mapped_errors(directory), open(directory / part.file, "ab", opener=_open_own) as file:
                        if part.name in present:
                            file.write(data)
                        else:
                            file.truncate(part.end)
                    flushing.begin(directory / part.file)
                hashed.result()
                if progress is not None:
                    progress(part.length)
        return [file for file, entry in manifest.files.items() if hashers[file].hexdigest() != entry.blake3]

    def _claim(self, id: str) -> None:
        """Claim the remote image for this host.  Raises `ImageBusy`."""
        mine = _claimant()
        try:
            with mapped_errors():
                self.storage.create(id, CLAIM, json.dumps(mine).encode())
        except RemoteFailed:  # not every server says that it failed because there is a claim
            claim = self._read_claim(id)
            if claim == mine:
                return  # an earlier try of this host, which broke off
            if claim is None:
                raise
            host = str(claim.get("hostname", ""))
            message = f"Image {id} was claimed by {host or 'another host'}."
            hint = "Use the kernel there. If that host is gone for good, pull a copy with --keep."
            raise ImageBusy(message, hint=hint, image=id, hostname=host) from None

    # -- both

    def _map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield the results in order, ``workers`` calls at a time; begin no more than is needed if one fails."""
        with ThreadPoolExecutor(self._workers, thread_name_prefix="image-transfer") as pool:
            rest, pending = iter(items), deque[Future[Result]]()
            try:
                while True:
                    next_items = itertools.islice(rest, self._workers - len(pending))
                    pending += [pool.submit(work, item) for item in next_items]
                    if not pending:
                        return
                    yield pending.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _read_claim(self, id: str) -> dict[str, Any] | None:
        """Return the claim of the image there; None without one, an empty one for a foreign file."""
        try:
            claim = json.loads(self.storage.read_small(id, CLAIM, 4096))
        except ImageNotFound:
            return None
        except (ImageFormat, ValueError, RecursionError):
            return {}
        return claim if isinstance(claim, dict) else {}


class _Flushing:
    """Flushes files while more is received: at the end, which waits for the disk, little is left.

    `begin`, or the end of the body, raises what a flush has raised, as a fault of ``directory``: no other flush may
    hear of it (fsync(2)).  What the file has is not known then, so it is removed, and received again by the next try.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="image-transfer")
        self._last: Future[None] | None = None
        self._path = directory

    def begin(self, path: Path) -> None:
        """Begin to flush a file, unless the flush before is still under way."""
        if self._last is None or self._last.done():
            self._end()
            self._path, self._last = path, self._pool.submit(flush, path)

    def _end(self) -> None:
        if self._last is None:
            return
        with disk.mapped_errors(self._directory):
            try:
                self._last.result()
            except OSError:
                self._path.unlink(missing_ok=True)
                raise

    def __enter__(self) -> _Flushing:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown()
        with contextlib.nullcontext() if kind is None else contextlib.suppress(GpuCkptError):
            self._end()


def _require_absent(path: Path) -> None:
    if os.path.lexists(path):
        hint = "Delete it first if it is to be fetched again (`jupyter gpu-ckpt rm {image}`)."
        raise ImageBusy(f"There is an image {path.name} already.", hint=hint, image=path.name)


def _missing(directory: Path, manifest: Manifest) -> int:
    """Return the bytes of an image that is being fetched into ``directory`` which are not there yet."""
    missing = manifest.bytes
    for name, entry in manifest.files.items():
        with contextlib.suppress(OSError):
            missing -= min((directory / name).lstat().st_size, entry.bytes)
    return missing


def _complete(path: Path, size: int) -> int:
    """Make the file if it is missing, and cut it after its last whole part; return the bytes that are left."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.is_symlink() or not path.is_file():
        path.unlink(missing_ok=True)  # not made by us
    with open(path, "ab", opener=_open_own) as file:
        length = os.fstat(file.fileno()).st_size
        if length != size:
            length = min(length, size) // PART * PART
            file.truncate(length)
    return length


def _open_own(path: str, flags: int) -> int:
    """Open a file of a fetched image; never the target of a link that others have put there, nor a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def _claimant() -> dict[str, str]:
    return {"hostname": socket.gethostname(), "boot": procfs.boot_id()}
