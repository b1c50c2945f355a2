"""What arrives from elsewhere (`remote`): pieces become the files of an image in a directory beside the images.

A transfer that broke off leaves that directory and a journal of the pieces in it, from which the next one goes on.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TypeAlias

from blake3 import blake3
from filelock import FileLock, Timeout

from ..errors import ImageBusy, ImageDamaged, RemoteFailed
from ..files import direct_io
from ..files.atomic import flush
from ..image import layout, verify
from ..image.layout import INCOMING
from ..image.manifest import Manifest
from ..image.store import Store
from . import parts as pieces_of
from .parts import Journal, Piece, pieces, prepare, zeros

#: Reads a piece from where it lies, as far as there is one; the buffer may be used for it.
Read = Callable[[Piece, memoryview], memoryview]
#: A piece, its bytes, and the buffer that is to be given back when they are written.
Arrived: TypeAlias = tuple[Piece, memoryview, memoryview]
#: Calls for each piece, so many side by side, and yields what they return in the pieces' order.
Each = Callable[[Callable[[Piece], Arrived], Iterable[Piece]], Iterator[Arrived]]


@contextlib.contextmanager
def staged(store: Store, id: str, fill: Callable[[Path, Journal], None]) -> Iterator[Path]:
    """The directory of an image that ``fill`` has fetched, for the body to take what it needs.

    Raises `ImageBusy` when another process here is at it.  After failure of ``fill`` the next one goes on with what is
    there, after one of the body it starts afresh.
    """
    # In a directory of the image's name, which the proof asks for.
    place = store.root / INCOMING / id
    place.parent.mkdir(mode=0o700, exist_ok=True)
    lock = FileLock(layout.mark(place, layout.LOCK), timeout=0, mode=0o600)
    try:
        lock.acquire()
    except Timeout as error:
        raise ImageBusy(f"Image {id} is being pulled by another process.", image=id) from error
    try:
        journal = place.with_name(f".{id}.done")
        if not journal.exists():  # the body of an earlier try may have taken files: nothing says what is left
            shutil.rmtree(place, ignore_errors=True)
        done = Journal(journal)
        with contextlib.closing(done):
            fill(place, done)
        # Before the body takes a file: else a next try would believe the journal that it is still there.
        journal.unlink(missing_ok=True)
        flush(journal.parent)
        yield place
        shutil.rmtree(place, ignore_errors=True)
        Path(lock.lock_file).unlink(missing_ok=True)
    finally:
        lock.release()


class Files:
    """The files of one image, at ``place``, as their pieces arrive.

    ``there``: the names of the pieces that are not nothing but zeros; ``done``: those that lie in their place already.
    """

    def __init__(self, place: Path, manifest: Manifest, there: Container[str], done: Journal) -> None:
        self._place, self._manifest, self._there, self._done = place, manifest, there, done
        self._paths = {name: prepare(place, name, entry.bytes) for name, entry in manifest.files.items()}
        self._hashers = {name: blake3(max_threads=blake3.AUTO) for name in manifest.files}

    def receive(self, read: Read, each: Each, side_by_side: int, progress: Callable[[int], object] | None) -> None:
        """Read every piece that is needed, and write it to its place.

        Raises what ``read`` does, and `RemoteFailed` for a piece of another size than it should have.
        """
        # One for each piece under way, for the one that is hashed, and the one that is written.
        free: SimpleQueue[memoryview] = SimpleQueue()
        for _ in range(side_by_side + 2):
            free.put(direct_io.buffer(pieces_of.PIECE))

        def fetch(piece: Piece) -> Arrived:
            into = free.get()
            data = self._get(piece, into, read)
            if len(data) != piece.length:
                raise RemoteFailed("A piece of the image has another size than it should.", piece=piece.name)
            return piece, data, into

        def keep(piece: Piece, into: memoryview) -> None:
            self._keep(piece, into)
            free.put(into)
            if progress is not None:
                progress(piece.length)

        # Hashed on the way, in the order of the files: read again they would come from the disk.  Written by one
        # thread: several that write to one file wait for each other's lock, and burn a CPU each while they do.
        with ThreadPoolExecutor(1, thread_name_prefix="image-writer") as writer:
            written: Future[None] | None = None
            for piece, data, into in each(fetch, pieces(self._manifest)):
                self._hashers[piece.file].update(data)
                if written is not None:
                    written.result()
                written = writer.submit(keep, piece, into)
            if written is not None:
                written.result()

    def _get(self, piece: Piece, into: memoryview, read: Read) -> memoryview:
        if piece.name in self._done:
            return direct_io.read(self._paths[piece.file], into, piece.length, piece.offset)
        if piece.name not in self._there:
            return memoryview(zeros(piece.length))
        return read(piece, into)

    def _keep(self, piece: Piece, data: memoryview) -> None:
        if piece.name in self._there and piece.name not in self._done:
            size = self._manifest.files[piece.file].bytes
            direct_io.write(self._paths[piece.file], data, piece.length, offset=piece.offset, size=size)
            self._done.add(piece.name)

    def require_whole(self) -> None:
        """All that was received is what the manifest says, and on disk when this returns.

        Raises `ImageDamaged`: then nothing of it is used by the next try.
        """
        files = self._manifest.files
        wrong = [name for name, entry in files.items() if self._hashers[name].hexdigest() != entry.blake3]
        if wrong:
            shutil.rmtree(self._place, ignore_errors=True)
            self._done.path.unlink(missing_ok=True)
            message = f"What arrived is damaged: {', '.join(wrong[:3])}."
            raise ImageDamaged(message, image=self._manifest.id, files=wrong[:100])
        verify.require_tree(self._place, self._manifest)
        for path in sorted(self._place.rglob("*"), reverse=True):
            flush(path)
        flush(self._place)
