"""Images elsewhere: a shared directory, an object store, a server one can log in to; whatever fsspec has a name for.

An image lies there as ``<url>/<id>/``: its files in pieces of `PIECE` bytes (``0007-000012``: file 7 in the order of
the names, piece 12), pieces of zeros left out, then the seal, and the manifest last.  So a transfer that broke off
leaves what no listing shows, and the next one goes on from the pieces that are there.  What arrives is believed only
after the whole proof that a restore asks for (`verify.verify`), the seal first: a foreign manifest is not even read.

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
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from .. import procfs
from ..errors import GpuCkptError, ImageBusy, ImageFormat, ImageNotFound, NoSpace, RemoteFailed, RemoteUnsupported
from ..files.atomic import flush, write_atomically
from ..image import verify
from ..image.image import Image
from ..image.layout import CLAIM, MANIFEST, SEAL
from ..image.manifest import MOST_BYTES, Manifest, safe_name
from ..image.store import Store
from .arrival import Arrival
from .incoming import Files, staged
from .parts import Journal, Piece, pieces, zeros
from .shared_directory import SharedDirectory

__all__ = ["Progress", "Remote"]

#: Told the bytes that are done now, from any thread; those of an earlier try count at once.
Progress = Callable[[int], object]
Item = TypeVar("Item")
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
                    # asyncssh's own first choice, ChaCha20, takes a third more of the one core that it runs on.
                    options.setdefault("encryption_algs", "^aes128-gcm@openssh.com,aes256-gcm@openssh.com")
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

    def has(self, id: str) -> bool:
        """Whether there is an image of that name, and not only pieces of one."""
        try:
            self._small(id, MANIFEST, MOST_BYTES)
        except ImageNotFound:
            return False
        return True

    def claimed(self, id: str) -> str:
        """The host that is pulling the image, or holds a kernel from it; empty when it is free."""
        claim = self._claim_there(id)
        return str(claim.get("hostname", "?")) if claim is not None else ""

    def remove(self, id: str) -> None:
        """Delete an image there, the manifest first: half an image is none."""
        place = self._place(id)
        with _told():
            for name in (MANIFEST, SEAL):
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(f"{place}/{name}")
            if self._fs.exists(place):
                self._fs.rm(place, recursive=True)

    def discard(self, id: str, token: str) -> None:
        """Delete what `send` sent with ``token``; what is somebody else's by now stays.

        Pieces without a claim are of a sender that ended before it could make one.
        """
        claim = self._claim_there(id)
        if claim.get("token") == token if claim is not None else not self.has(id):
            self.remove(id)

    # -- to there

    def push(self, image: Image, *, take_from: Store | None = None, progress: Progress | None = None) -> int:
        """Send an image; the bytes that had to be sent now.

        ``take_from``: its store, from which it is removed when all of it is there; else it is only copied.  Raises
        `ImageBusy` when a restore is using it or its kernel lives.
        """
        with image.lease():
            sent = self.send(image, progress)
            self.complete(image)
            if take_from is not None:
                take_from.remove(image, leased=True, moved=True)
        return sent

    def send(self, image: Image, progress: Progress | None = None, token: str = "") -> int:
        """A copy of an image's content, which no listing shows before `complete`; the bytes that had to be sent now.

        Every piece there was compared by its hash when this returns (`arrival`), also those of an earlier try.
        ``token``: whose pieces they are (`discard`).
        """
        place, shared = self._place(image.id), self._shared(image.id)
        arrival = Arrival(self._fs, place)
        fresh: dict[str, str] = {}
        wrong: list[str] = []
        with _told():
            self._make_private(image.id)
            if token:
                self._put_claim(place, token)
            there = self._sizes(place)
            if there:
                arrival.ask(sum(there.values()))

            def send(piece: Piece) -> int:
                if shared is not None:
                    size = shared.send(piece, image.path, there.get(piece.name))
                    if size is None:
                        wrong.append(piece.name)
                else:
                    size = self._send(piece, image.path, place, there, arrival, fresh)
                if progress is not None:
                    progress(piece.length)
                return size or 0

            sent = sum(self._each(send, pieces(image.manifest)))
            arrival.ask(sent)
            arrived = zip(fresh, self._each(lambda name: arrival.has(name, fresh[name]), fresh), strict=True)
            wrong += [name for name, whole in arrived if not whole]
            for name in wrong:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(f"{place}/{name}")
        if wrong:
            raise RemoteFailed(f"What was sent did not arrive whole: {len(wrong)} pieces.", pieces=wrong[:20])
        return sent

    def _send(
        self,
        piece: Piece,
        root: Path,
        place: str,
        there: Mapping[str, int],
        arrival: Arrival,
        fresh: dict[str, str],
    ) -> int:
        """One piece; those that are put are noted in ``fresh`` with their hash.  The bytes that had to be sent."""
        data = piece.read(root)
        if data == zeros(len(data)):
            if piece.name in there:
                self._fs.rm_file(f"{place}/{piece.name}")  # a pull would take it for the content
            return 0
        digest = arrival.digest(data)
        if there.get(piece.name) == len(data) and arrival.has(piece.name, digest):
            return 0
        self._put(place, piece.name, data)
        fresh[piece.name] = digest
        return len(data)

    def complete(self, image: Image, token: str = "") -> None:
        """What was sent is an image from now on; with the ``token`` of `send` one that nobody else takes (`pull`)."""
        place, shared = self._place(image.id), self._shared(image.id)
        with _told():
            # Read first: of an image that has gone nothing is said there.
            last = {name: (image.path / name).read_bytes() for name in (SEAL, MANIFEST)}
            if shared is not None:
                shared.flush()  # the pieces before what makes them an image
            if token:
                self._put_claim(place, token)
            else:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(f"{place}/{CLAIM}")
            for name, text in last.items():
                self._put(place, name, text)
            if shared is not None:
                flush(shared.path)

    def _put_claim(self, place: str, token: str) -> None:
        self._put(place, CLAIM, json.dumps({**_claimant(), "token": token}).encode())

    def _put(self, place: str, name: str, data: bytes) -> None:
        """Whole or not at all: an object store does so by itself, elsewhere it is sent under another name."""
        path = f"{place}/{name}"
        if self._local:
            SharedDirectory(Path(place)).put(name, data)
        elif self._atomic:
            self._fs.pipe_file(path, data)
        else:
            self._fs.pipe_file(path + ".part", data)
            self._fs.mv(path + ".part", path)

    @property
    def _atomic(self) -> bool:
        return not self._local and not hasattr(self._fs, "client")

    def _make_private(self, id: str) -> None:
        """Where there are directories, others may not enter this one; elsewhere the bucket's rules decide."""
        shared = self._shared(id)
        if shared is not None:
            shared.prepare()
        elif not self._atomic:
            self._fs.makedirs(self._place(id), exist_ok=True, permissions=0o700)

    def _shared(self, id: str) -> SharedDirectory | None:
        return SharedDirectory(Path(self._place(id))) if self._local else None

    # -- from there

    def pull(self, id: str, store: Store, *, keep: bool = False, progress: Progress | None = None) -> Image:
        """Fetch an image into ``store``, where it is visible once it is proved.

        The one there is claimed first and removed afterwards.  ``keep``: it is only copied, and whoever brings the copy
        to life answers for there being no other.  Raises what `Store.check` raises, `ImageBusy` when another host has
        claimed it or another process here is at it, `ImageNotFound`, `NoSpace`.
        """
        store.prepare()
        with self.fetched(id, store, keep=keep, progress=progress) as fetched:
            target = store.root / id
            if target.exists():
                raise ImageBusy(f"There is an image {id} already.", image=id)
            fetched.rename(target)
            flush(store.root)
        if not keep:
            self.remove(id)
        return store.get(id)

    def fetched(
        self, id: str, store: Store, *, keep: bool = True, progress: Progress | None = None
    ) -> AbstractContextManager[Path]:
        """An image's directory, proved and on disk, beside the images of ``store``, for the body to take what it needs.

        Raises as `pull`.
        """
        return staged(store, self._named(id), lambda at, done: self._fetch(id, at, store, keep, done, progress))

    def _fetch(self, id: str, at: Path, store: Store, keep: bool, done: Journal, progress: Progress | None) -> None:
        at.mkdir(mode=0o700, exist_ok=True)
        for name, most in ((MANIFEST, MOST_BYTES), (SEAL, 4096)):
            write_atomically(at / name, self._small(id, name, most), durable=True)
        manifest = verify.require_sealed(at, store.keys)
        store.generations.require_current(manifest)
        if not keep:
            self._claim(id)
        if store.free() < manifest.bytes:
            raise NoSpace(
                "The image does not fit on the disk of the image directory.",
                left=f"the image {id} is whole where it is, and was not fetched",
                needed=manifest.bytes,
            )
        with _told():
            place, shared = self._place(id), self._shared(id)

            def read(piece: Piece, into: memoryview) -> memoryview:
                if shared is not None:
                    return shared.fetch(piece, into)
                data = memoryview(self._fs.cat_file(f"{place}/{piece.name}"))
                if len(data) == piece.length:
                    into[: len(data)] = data
                return data

            files = Files(at, manifest, self._sizes(place), done)
            files.receive(read, self._each, self._workers, progress)
        files.require_whole()

    def _claim(self, id: str) -> None:
        """From now on the image there is ours to take.  Raises `ImageBusy`."""
        mine = _claimant()
        try:
            with _told(), self._fs.open(f"{self._place(id)}/{CLAIM}", "xb") as file:
                file.write(json.dumps(mine).encode())
        except RemoteFailed:
            # Not every server says that it failed because there is one.
            claim = self._claim_there(id)
            if claim == mine:
                return  # an earlier try of this host, which broke off
            if claim is None:
                raise
            host = str(claim.get("hostname", ""))
            raise ImageBusy(
                f"Image {id} was taken by {host or 'another host'}.",
                hint="Use the kernel there. If that host is gone for good, pull a copy with --keep.",
                image=id,
                hostname=host,
            ) from None

    # -- both ways

    def _each(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """``work`` for each, so many side by side, no more begun than will be needed if one fails."""
        with ThreadPoolExecutor(self._workers, thread_name_prefix="image-transfer") as pool:
            waiting: list[Future[Result]] = []
            rest = iter(items)
            try:
                while True:
                    more = itertools.islice(rest, self._workers - len(waiting))
                    waiting += [pool.submit(work, item) for item in more]
                    if not waiting:
                        return
                    yield waiting.pop(0).result()
            finally:
                for future in waiting:
                    future.cancel()

    def _claim_there(self, id: str) -> dict[str, Any] | None:
        """The claim of the image there; None without one, an empty one for what is none of ours."""
        try:
            claim = json.loads(self._small(id, CLAIM, 4096))
        except ImageNotFound:
            return None
        except (ImageFormat, ValueError, RecursionError):
            return {}
        return claim if isinstance(claim, dict) else {}

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


def _claimant() -> dict[str, str]:
    return {"hostname": socket.gethostname(), "boot": procfs.boot_id()}


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """What fsspec and what is below it raises becomes ours; foreign texts may hold URLs, so only kinds are told."""
    try:
        yield
    except GpuCkptError:
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise RemoteFailed(f"The place of the images failed: {reason}.", kind=type(error).__name__) from error
