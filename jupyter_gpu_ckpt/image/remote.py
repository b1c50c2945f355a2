"""Images elsewhere: a shared directory, an object store, a server one can log in to; whatever fsspec has a name for.

An image lies there as ``<url>/<id>/``: its files in pieces of `PIECE` bytes (``0007-000012``: file 7 in the order of
the names, piece 12), pieces of zeros left out, then the seal, and the manifest last.  So a transfer that broke off
leaves what no listing shows, and the next one goes on from the pieces that are there.  What arrives is believed only
after the whole proof that a restore asks for (`integrity.verify`), the seal first: a foreign manifest is not even read.

A kernel must not live twice.  So an image is *moved*: `push` gives the local one up once all of it is there, and `pull`
takes the one there, first by a claim that only one host can make, and removes it once it has all of it.  Who asks for a
copy gets one that no pull takes without being told to.

Credentials are fsspec's business (its configuration files and environment); a URL with a password in it works and is
never written anywhere.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3
from filelock import FileLock, Timeout

from ..errors import (
    ImageBusy,
    ImageDamaged,
    ImageError,
    ImageFormat,
    ImageNotFound,
    NoSpace,
    RemoteFailed,
    RemoteUnsupported,
)
from . import integrity
from .disk import flush
from .image import Image
from .integrity import MANIFEST, SEAL
from .manifest import MOST_BYTES, Manifest, safe_name
from .store import Store

#: Bytes of one piece: large enough for the rate of an object store, small enough to be sent again.
PIECE = 16 << 20
#: Beside the images of a store: what is being pulled.
INCOMING = ".incoming"
CLAIM = "claim.json"
_STEP = 1 << 20
_ZEROS = bytes(PIECE)

#: Told the bytes that are done now, from any thread; those of an earlier try count at once.
Progress = Callable[[int], object]
Result = TypeVar("Result")


class Remote:
    """The images below one URL.

    Every method raises `RemoteFailed` with what the other side said, and `RemoteUnsupported` when the package for that
    kind of URL is not installed.  After failure of a transfer the image is where it was; what was sent is used by the
    next try.
    """

    def __init__(self, url: str, *, workers: int = 8, **options: Any) -> None:
        self._workers = workers
        try:
            import fsspec
        except ImportError as error:
            raise RemoteUnsupported("The package fsspec is not installed.") from error
        with _told():
            try:
                protocol = fsspec.utils.get_protocol(url)
                if protocol in ("sftp", "ssh"):
                    # sshfs would take any host for the right one.
                    options.setdefault("known_hosts", str(Path.home() / ".ssh" / "known_hosts"))
                self._fs, self._root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
            except (ImportError, ValueError) as error:
                raise RemoteUnsupported(f"What {protocol}: URLs need is not installed.") from error
        self._local = protocol in ("file", "local")

    # -- what is there

    def images(self) -> list[Manifest]:
        """The manifests of the images there, oldest first.  They are not proved; `pull` proves what it takes."""
        with _told():
            self._fs.invalidate_cache()
            if not self._fs.exists(self._root):
                return []
            ids = sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False))
        found = []
        for id in ids:
            with contextlib.suppress(ImageNotFound, ImageFormat):
                found.append(self.manifest(id))
        return found

    def manifest(self, id: str) -> Manifest:
        """What the manifest of an image there says; not proved.  Raises `ImageNotFound`, `ImageFormat`."""
        return Manifest.from_json(self._small(id, MANIFEST, MOST_BYTES))

    def claimed(self, id: str) -> str:
        """The host that is pulling the image, or holds a kernel from it; empty when it is free."""
        with contextlib.suppress(ImageNotFound, ValueError):
            return str(json.loads(self._small(id, CLAIM, 4096)).get("hostname", "?"))
        return ""

    def remove(self, id: str) -> None:
        """Delete an image there, the manifest first: half an image is none."""
        place = self._place(id)
        with _told():
            for name in (MANIFEST, SEAL):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(f"{place}/{name}")
            if self._fs.exists(place):
                self._fs.rm(place, recursive=True)

    # -- to there

    def push(self, image: Image, *, take_from: Store | None = None, progress: Progress | None = None) -> int:
        """Send an image; the bytes that had to be sent now.

        ``take_from``: its store, from which it is removed when all of it is there; else it is only copied.  Raises
        `ImageBusy` when a restore is using it or its kernel lives.
        """
        with image.lease():
            sent = self.send(image, progress, prove=take_from is not None)
            if take_from is not None:
                take_from.remove(image, leased=True, moved=True)
        return sent

    def send(self, image: Image, progress: Progress | None = None, *, prove: bool = False) -> int:
        """A copy of an image whose lease the caller holds; the bytes that had to be sent now.

        ``prove``: the local content is to be deleted, so the pieces of an earlier try are read back and compared; else
        one of the right size is taken for the right one, and a pull that comes upon another notices.
        """
        place = self._place(image.id)
        with _told():
            self._make_private(place)
            there = self._sizes(place)
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{place}/{CLAIM}")

            def send(piece: _Piece) -> int:
                data = piece.read(image.path)
                path = f"{place}/{piece.name}"
                size = 0
                if data != _ZEROS[: len(data)]:
                    usable = there.get(piece.name) == len(data)
                    if not usable or (prove and bytes(self._fs.cat_file(path)) != data):
                        self._put(path, data)
                        size = len(data)
                    arrived.append((piece.name, len(data)))
                elif piece.name in there:
                    self._fs.rm_file(path)  # a pull would take it for the content
                if progress is not None:
                    progress(len(data))
                return size

            arrived: list[tuple[str, int]] = []
            sent = sum(self._each(send, _pieces(image.manifest)))
            now = self._sizes(place)
            lost = [name for name, size in arrived if now.get(name) != size]
            if lost:
                raise RemoteFailed(f"What was sent did not arrive: {len(lost)} pieces.", pieces=lost[:20])
            for name in (SEAL, MANIFEST):
                if self._local:
                    flush(Path(place))  # the names of the pieces before that of what makes them an image
                self._put(f"{place}/{name}", (image.path / name).read_bytes())
            if self._local:
                flush(Path(place))
        return sent

    def _put(self, path: str, data: bytes) -> None:
        """Whole or not at all: an object store does so by itself, elsewhere it is sent under another name."""
        if self._local:
            draft = Path(path + ".part")
            with draft.open("wb", buffering=0) as file:
                _write(file.fileno(), data, 0)
                os.fsync(file.fileno())
            draft.rename(path)
        elif self._atomic:
            self._fs.pipe_file(path, data)
        else:
            self._fs.pipe_file(path + ".part", data)
            self._fs.mv(path + ".part", path)

    @property
    def _atomic(self) -> bool:
        return not self._local and not hasattr(self._fs, "client")

    def _make_private(self, place: str) -> None:
        """Where there are directories, others may not enter this one; elsewhere the bucket's rules decide."""
        if self._local:
            Path(self._root).mkdir(parents=True, exist_ok=True, mode=0o700)
            Path(place).mkdir(exist_ok=True, mode=0o700)
        elif not self._atomic:
            self._fs.makedirs(place, exist_ok=True, permissions=0o700)

    # -- from there

    def pull(self, id: str, store: Store, *, keep: bool = False, progress: Progress | None = None) -> Image:
        """Fetch an image into ``store``, where it is visible once it is proved.

        The one there is claimed first and removed afterwards.  ``keep``: it is only copied, and whoever brings the copy
        to life answers for there being no other.  Raises what `Store.check` raises, `ImageBusy` when another host has
        claimed it or another process here is at it, `ImageNotFound`, `NoSpace`.
        """
        store.prepare()
        with self.fetched(id, store, keep=keep, progress=progress) as staged:
            target = store.root / id
            if target.exists():
                raise ImageBusy(f"There is an image {id} already.", image=id)
            staged.rename(target)
            flush(store.root)
        if not keep:
            self.remove(id)
        return store.get(id)

    @contextlib.contextmanager
    def fetched(self, id: str, store: Store, *, keep: bool = True, progress: Progress | None = None) -> Iterator[Path]:
        """An image's directory, proved and on disk, beside the images of ``store``, for the body to take what it needs.

        Raises as `pull`.
        """
        # In a directory of the image's name, which the proof asks for.
        staged = store.root / INCOMING / self._named(id)
        staged.parent.mkdir(mode=0o700, exist_ok=True)
        lock = FileLock(staged.with_name(f".{id}.lock"), timeout=0, mode=0o600)
        try:
            lock.acquire()
        except Timeout as error:
            raise ImageBusy(f"Image {id} is being pulled by another process.", image=id) from error
        try:
            journal = staged.with_name(f".{id}.done")
            if not journal.exists():  # the body of an earlier try may have taken files: nothing says what is left
                shutil.rmtree(staged, ignore_errors=True)
            done = _Journal(journal)
            with contextlib.closing(done):
                self._fetch(id, staged, store, keep, done, progress)
            # Before the body takes a file: else a next try would believe the journal that it is still there.
            journal.unlink(missing_ok=True)
            flush(journal.parent)
            yield staged
            shutil.rmtree(staged, ignore_errors=True)
            Path(lock.lock_file).unlink(missing_ok=True)
        finally:
            lock.release()

    def _fetch(
        self, id: str, staged: Path, store: Store, keep: bool, done: _Journal, progress: Progress | None
    ) -> None:
        place = self._place(id)
        staged.mkdir(mode=0o700, exist_ok=True)
        for name, most in ((MANIFEST, MOST_BYTES), (SEAL, 4096)):
            integrity.write_private(staged / name, self._small(id, name, most).decode(errors="replace"))
        manifest = integrity.require_sealed(staged, store.keys)
        store.generations.require_current(manifest)
        if not keep:
            self._claim(id)
        if store.free() < manifest.bytes:
            raise NoSpace("The image does not fit on the disk of the image directory.", needed=manifest.bytes)
        with _told():
            sizes = self._sizes(place)
            files = {name: _prepare(staged, name, entry.bytes) for name, entry in manifest.files.items()}

            def fetch(piece: _Piece) -> tuple[_Piece, bytes]:
                if piece.name in done:
                    return piece, piece.read(staged)
                if piece.name not in sizes:
                    return piece, _ZEROS[: piece.length]
                data = bytes(self._fs.cat_file(f"{place}/{piece.name}"))
                if len(data) != piece.length:
                    raise RemoteFailed("A piece of the image has another size than it should.", piece=piece.name)
                return piece, data

            def keep_piece(piece: _Piece, data: bytes) -> None:
                if piece.name in sizes and piece.name not in done:
                    piece.write(files[piece.file], data)
                    done.add(piece.name)
                if progress is not None:
                    progress(piece.length)

            # Proved on the way, in the order of the files: read again they would come from the disk.  Written by one
            # thread: several that write to one file wait for each other's lock, and burn a CPU each while they do.
            hashers = {name: blake3(max_threads=blake3.AUTO) for name in manifest.files}
            with ThreadPoolExecutor(1, thread_name_prefix="image-writer") as writer:
                written: Future[None] | None = None
                for piece, data in self._each(fetch, _pieces(manifest)):
                    hashers[piece.file].update(data)
                    if written is not None:
                        written.result()
                    written = writer.submit(keep_piece, piece, data)
                if written is not None:
                    written.result()
        wrong = [name for name, entry in manifest.files.items() if hashers[name].hexdigest() != entry.blake3]
        if wrong:
            shutil.rmtree(staged, ignore_errors=True)  # nothing of it is used by the next try
            done.path.unlink(missing_ok=True)
            raise ImageDamaged(f"What arrived is damaged: {', '.join(wrong[:3])}.", image=id, files=wrong[:100])
        integrity.require_tree(staged, manifest)
        for path in sorted(staged.rglob("*"), reverse=True):
            flush(path)
        flush(staged)

    def _claim(self, id: str) -> None:
        """From now on the image there is ours to take.  Raises `ImageBusy`."""
        mine = {"hostname": socket.gethostname(), "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip()}
        try:
            with _told(), self._fs.open(f"{self._place(id)}/{CLAIM}", "xb") as file:
                file.write(json.dumps(mine).encode())
        except RemoteFailed:
            # Not every server says that it failed because there is one.
            with contextlib.suppress(ValueError):
                try:
                    claim = json.loads(self._small(id, CLAIM, 4096))
                except ImageNotFound:
                    claim = None
                if claim == mine:
                    return  # an earlier try of this host, which broke off
                if claim is None:
                    raise
            host = self.claimed(id)
            raise ImageBusy(
                f"Image {id} was taken by {host or 'another host'}.",
                hint="Use the kernel there. If that host is gone for good, pull a copy with --keep.",
                image=id,
                hostname=host,
            ) from None

    # -- both ways

    def _each(self, work: Callable[[_Piece], Result], pieces: Iterable[_Piece]) -> Iterator[Result]:
        """``work`` for each piece, so many side by side, no more begun than will be needed if one fails."""
        with ThreadPoolExecutor(self._workers, thread_name_prefix="image-transfer") as pool:
            waiting: list[Future[Result]] = []
            rest = iter(pieces)
            try:
                while True:
                    more = itertools.islice(rest, self._workers - len(waiting))
                    waiting += [pool.submit(work, piece) for piece in more]
                    if not waiting:
                        return
                    yield waiting.pop(0).result()
            finally:
                for future in waiting:
                    future.cancel()

    def _sizes(self, place: str) -> dict[str, int]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(place, detail=True)
        except FileNotFoundError:
            return {}
        return {str(entry["name"]).rsplit("/", 1)[-1]: int(entry["size"] or 0) for entry in found}

    def _small(self, id: str, name: str, most: int) -> bytes:
        path = f"{self._place(id)}/{name}"
        with _told():
            try:
                if int(self._fs.info(path)["size"]) > most:
                    raise ImageFormat(f"The {name} of {id!r} is too large to be one.", image=id)
                return bytes(self._fs.cat_file(path))
            except (FileNotFoundError, NotADirectoryError) as error:
                raise ImageNotFound(f"There is no image {id!r} there.", image=id) from error

    def _place(self, id: str) -> str:
        return f"{self._root}/{self._named(id)}"

    @staticmethod
    def _named(id: str) -> str:
        if not safe_name(id) or "/" in id:
            raise ImageNotFound(f"There is no image {id!r}.", image=id)
        return id


class _Piece:
    """A piece of a file of an image; ``length`` in bytes."""

    def __init__(self, file: str, number: int, count: int, offset: int, length: int) -> None:
        self.file, self.offset, self.length = file, offset, length
        self.name = f"{number:04d}-{count:06d}"

    def read(self, root: Path) -> bytes:
        fd = os.open(root / self.file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), self.length, self.offset)
        if len(data) != self.length:
            raise ImageFormat("The image is shorter than its manifest says.", file=self.file)
        return data

    def write(self, path: Path, data: bytes) -> None:
        with open(path, "r+b", buffering=0) as file:
            _write(file.fileno(), data, self.offset)
            # Linux begins to write it now, not when all of it is flushed at the end.
            os.posix_fadvise(file.fileno(), self.offset, self.length, os.POSIX_FADV_DONTNEED)


def _write(fd: int, data: bytes, offset: int) -> None:
    """In steps: one write of many mebibytes was measured at a tenth of the rate (ext4, Linux 6.18)."""
    view = memoryview(data)
    at = 0
    while at < len(data):
        at += os.pwrite(fd, view[at : at + _STEP], offset + at)  # may be fewer than asked for, on a disk almost full


def _pieces(manifest: Manifest) -> Iterator[_Piece]:
    for number, (name, entry) in enumerate(sorted(manifest.files.items())):
        for count, offset in enumerate(range(0, entry.bytes, PIECE)):
            yield _Piece(name, number, count, offset, min(PIECE, entry.bytes - offset))


class _Journal:
    """The pieces that lie in their place already, for a pull that broke off and is asked for again.

    It may say too much after a crash of the machine; the proof at the end notices.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._done = set(path.read_text().split()) if path.exists() else set()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __contains__(self, name: str) -> bool:
        return name in self._done

    def add(self, name: str) -> None:
        os.write(self._fd, f"{name}\n".encode())  # whole, whichever thread calls

    def close(self) -> None:
        os.close(self._fd)


def _prepare(staged: Path, name: str, size: int) -> Path:
    """The file a pull writes into: its whole length from the start, one big hole at first."""
    path = staged / name
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.ftruncate(fd, size)
    os.close(fd)
    return path


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What fsspec and what is below it raises becomes ours; foreign texts may hold URLs, so only kinds are told."""
    try:
        yield
    except (ImageError, NoSpace):
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise RemoteFailed(f"The place of the images failed: {reason}.", kind=type(error).__name__) from error
