"""Verification that an image is as a checkpoint of this user wrote it: a seal of the manifest, a hash of every file.

`verify` runs before CRIU, which trusts its images completely, reads one byte.  The order matters: first the seal over
the exact bytes of the manifest, so nothing of a forged one is interpreted; then names, kinds and sizes, so only plain
files of the stated size are opened; then the content.  BLAKE3 on one core is faster than our disks.

A restore need not wait for all of it: CRIU copies the kernel's memory (`layout.PAGES`, nearly all of an image) without
interpreting it.  So `begin` verifies everything else at once and the memory beside the restore; the restored processes
stay stopped until then.

Files are read block by block, ahead, by several threads: one reader does not fill a disk's queue.  Not by
`blake3.update_mmap`, which is as fast (2 GiB on two cores: 1.6 s instead of 2.1 s from memory, 3.6 s and 4.3 s from the
disk): a mapping of a file that is cut short, or that the disk cannot read, ends the whole process by SIGBUS, and images
are verified because their files may be damaged.  Nor can it be cancelled, or report progress.

Limits are in docs/threat-model.md: a program that runs as this user can do all that this user can.
"""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import functools
import hmac
import json
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from blake3 import blake3

from ..errors import ImageDamaged, ImageForged, ImageFormat
from ..files import direct_io
from ..files.atomic import remove_leftovers, write_atomically
from .background_task import BackgroundTask
from .keys import ALGORITHM, Key, Keyring
from .layout import CRIU, KEPT, MANIFEST, PAGES_FILES, RESERVED, SEAL, is_copy, is_device_file, is_linkable
from .manifest import MOST_BYTES, FileEntry, Manifest

#: Called with the bytes of each block that was hashed, from the caller's thread.
Progress = Callable[[int], object]

#: Bytes of a block that is read, and the blocks read at a time, each by a thread.
BLOCK = 4 << 20
DEPTH = 8
#: Bytes of the smallest hole that is made.
HOLE = 64 << 10
_PUNCH_HOLE, _KEEP_SIZE = 2, 1  # <linux/falloc.h>
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_SYNC_FILE_RANGE_WRITE = 2  # <fcntl.h>


def read_manifest(path: Path) -> bytes:
    """Read the manifest of the image at ``path``.  Raises `OSError`, `ImageFormat`."""
    return _read_plain(path / MANIFEST, MOST_BYTES)


def seal(path: Path, key: Key) -> None:
    """Write the seal of the manifest of the image at ``path``, durably.  Raises `OSError`."""
    text = json.dumps({"algorithm": ALGORITHM, "key": key.id, "mac": key.mac(read_manifest(path))})
    write_atomically(path / SEAL, text, durable=True)


def replace_manifest(path: Path, text: str, keys: Keyring) -> None:
    """Replace the manifest of the image at ``path``, and its seal, durably.  Whenever that breaks off, it is sealed.

    Raises `OSError`, `KeyUnusable`.
    """
    key = keys.current()
    facts = {"algorithm": ALGORITHM, "key": key.id, "mac": key.mac(read_manifest(path)), "next": key.mac(text.encode())}
    write_atomically(path / SEAL, json.dumps(facts), durable=True)
    write_atomically(path / MANIFEST, text, durable=True)
    seal(path, key)


def remove_unlisted(path: Path, keys: Keyring) -> int:
    """Remove what a change of a published image that was cut short has left in it; return the number of files.

    Those are drafts of its manifest, and copies of the user's files that the manifest does not list.  Raises as
    `require_sealed`, `OSError`.
    """
    listed, kept = require_sealed(path, keys).files, path / CRIU / KEPT
    removed = sum(remove_leftovers(path / name) for name in (MANIFEST, SEAL))
    is_own = kept.is_dir() and kept.resolve() == path.resolve() / CRIU / KEPT  # no link led elsewhere
    for copy in kept.iterdir() if is_own else ():
        if str(copy.relative_to(path)) not in listed and not copy.is_dir():
            copy.unlink()
            removed += 1
    with contextlib.suppress(OSError):  # it is not there, or not empty
        kept.rmdir()
        removed += 1
    return removed


def verify(path: Path, keys: Keyring, progress: Progress | None = None) -> Manifest:
    """Verify the image at ``path``; return its manifest, read from the very bytes that were verified.

    Raises `ImageForged` when no key of ``keys`` made its seal, `ImageDamaged` for anything but exactly the files of the
    manifest, `ImageFormat`, `KeyUnusable`.
    """
    manifest = require_sealed(path, keys)
    require_tree(path, manifest)
    require_content(path, manifest.files, progress)
    return manifest


def begin(path: Path, keys: Keyring) -> tuple[Manifest, BackgroundTask]:
    """Do as `verify`, but verify the processes' pages in a background task.

    Device memory is left to its reader, and copies of files, which CRIU does not read, are left to the one that puts
    them back.
    """
    manifest = require_sealed(path, keys)
    require_tree(path, manifest)
    files = manifest.files
    memory = {name: entry for name, entry in files.items() if fnmatch.fnmatch(name, PAGES_FILES)}
    now = {name: one for name, one in files.items() if not (name in memory or is_device_file(name) or is_copy(name))}
    require_content(path, now)
    return manifest, BackgroundTask(
        "gpu-ckpt-proof",
        lambda check_cancelled: require_content(path, memory, lambda _: check_cancelled()),
    )


def require_sealed(path: Path, keys: Keyring) -> Manifest:
    """Do the first part of `verify`: check that this user sealed the manifest, and return it.  Raises as `verify`."""
    id = path.name
    try:
        text = read_manifest(path)
    except OSError as error:
        raise ImageFormat(f"The image's manifest cannot be read: {error.strerror}.", image=id) from error
    _verify_seal(path, text, keys)
    manifest = Manifest.from_json(text, id)
    if manifest.id != id:
        raise ImageForged(f"The manifest in {id!r} is that of {manifest.id!r}.", image=id)
    return manifest


def _verify_seal(path: Path, text: bytes, keys: Keyring) -> None:
    try:
        seal = json.loads(_read_plain(path / SEAL, 4096))
        algorithm, id, mac = (seal[name] for name in ("algorithm", "key", "mac"))
        macs = [mac, seal.get("next", mac)]
    except FileNotFoundError as error:
        raise ImageForged("The image is not sealed.", image=path.name) from error
    except (OSError, ImageFormat, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ImageForged("The image's seal cannot be read.", image=path.name) from error
    if algorithm != ALGORITHM or not isinstance(id, str) or not all(isinstance(mac, str) for mac in macs):
        raise ImageForged("The image's seal is of an unknown kind.", image=path.name)
    key = keys.get(id)
    if key is None:
        raise ImageForged("The image was sealed with a key that is not one of yours.", image=path.name)
    if not any(hmac.compare_digest(key.mac(text).encode(), mac.encode(errors="replace")) for mac in macs):
        raise ImageForged("The image's manifest is not the one that was sealed.", image=path.name)


def require_tree(path: Path, manifest: Manifest) -> None:
    """Do the second part of `verify`: check for exactly the manifest's files, plain and of their sizes."""
    try:
        found = {
            name: 0 if name.endswith("/") else facts.st_size
            for name, facts in tree(path, of_branch=bool(manifest.branched_from))
        }
    except OSError as error:
        raise ImageDamaged(f"The image cannot be read: {error.strerror}.", image=path.name) from error
    listed = {name: entry.bytes for name, entry in manifest.files.items()}
    folders = {name.rpartition("/")[0] for name in listed} - {""}
    listed |= {f"{each}/": 0 for folder in folders for each in (folder, *list(PurePosixPath(folder).parents)[:-1])}
    _refuse_damaged(path, sorted(name for name in {*found, *listed} if found.get(name) != listed.get(name)))


def _refuse_damaged(path: Path, wrong: list[str]) -> None:
    if wrong:
        raise ImageDamaged(f"The image is damaged: {', '.join(wrong[:3])}.", image=path.name, files=wrong[:100])


def tree(path: Path, *, of_branch: bool) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every file of an image but the `RESERVED` ones, by its name in a manifest; directories with a final "/".

    Raises `OSError`, and `ImageDamaged` for anything but directories and plain files of this user, with one link unless
    several images may have them (`layout.is_linkable`, with ``of_branch``); the kernel may have links to chunks for a
    moment, too.
    """
    own, folders = os.geteuid(), [""]
    while folders:
        folder = folders.pop()
        with os.scandir(f"{path}/{folder}") as found:
            for each in found:
                name, facts = folder + each.name, each.stat(follow_symlinks=False)
                if name in RESERVED:
                    continue
                plain = stat.S_ISREG(facts.st_mode) and (facts.st_nlink == 1 or is_linkable(name, of_branch=of_branch))
                if not (plain or stat.S_ISDIR(facts.st_mode)) or facts.st_uid != own:
                    message = f"The image is damaged: {name!r} is not a plain file of yours."
                    raise ImageDamaged(message, image=path.name, files=[name])
                if not plain:
                    name += "/"
                    folders.append(name)
                yield name, facts


def require_content(path: Path, files: Mapping[str, FileEntry], progress: Progress | None = None) -> None:
    """Do the last part of `verify`: check that these files of the manifest have the content that they had."""
    try:
        with _Readers() as readers:
            wrong = [
                name
                for name, entry in sorted(files.items())
                if _digest(path / name, entry.bytes, readers, progress=progress) != entry.blake3
            ]
    except OSError as error:
        raise ImageDamaged(f"The image cannot be read: {error.strerror}.", image=path.name) from error
    _refuse_damaged(path, wrong)


def entries(
    path: Path, *, punch: bool = False, known: Mapping[str, FileEntry] | None = None, of_branch: bool = False
) -> dict[str, FileEntry]:
    """Hash the files below ``path`` for the manifest; with ``punch`` zeros become holes on the way.

    ``known``: entries of files that were hashed as they were written; ``of_branch``: see `tree`.  Raises as `tree`.
    """
    found = dict(known or {})
    with _Readers() as readers:
        for name, facts in sorted(tree(path, of_branch=of_branch)):
            if not name.endswith("/") and name not in found:
                found[name] = FileEntry(facts.st_size, _digest(path / name, facts.st_size, readers, punch=punch))
    return found


class _Readers:
    """Threads that read the blocks of one file after the other ahead, and the buffers that they read into."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(DEPTH, thread_name_prefix="image-read")
        #: Mapped: memory of an allocator would stay with each thread that has ever sealed an image.
        self._buffers: list[memoryview] = []

    def __enter__(self) -> _Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def blocks(self, fd: int, start: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes of ``fd`` between two offsets, or fewer if it ends before; a block is valid until the next.

        ``start`` is at a block's beginning.
        """
        count = min(DEPTH, -(-(end - start) // BLOCK))
        while len(self._buffers) < count:
            self._buffers.append(direct_io.buffer(BLOCK))
        if count == 1:  # most files of an image are that small
            yield _read_block(fd, self._buffers[0][: end - start], start)
            return
        pending: deque[Future[memoryview]] = deque()
        try:
            for number, offset in enumerate(range(start, end, BLOCK)):
                buffer = self._buffers[number % count][: min(BLOCK, end - offset)]
                pending.append(self._pool.submit(_read_block, fd, buffer, offset))
                if len(pending) == count:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:  # no thread may use a buffer or descriptor that is reused
                future.cancel() or future.exception()


@functools.cache
def _hashing_threads() -> int:
    """Return how many threads hash a file: all processors', or one.

    The threads are started once in a process.  Where they cannot be, the hash function panics then and each time after.
    """
    try:
        blake3(bytes(1 << 20), max_threads=blake3.AUTO)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return 1
    return int(blake3.AUTO)


def _digest(path: Path, size: int, readers: _Readers, *, punch: bool = False, progress: Progress | None = None) -> str:
    """Return the BLAKE3 of the first ``size`` bytes of a file, in hex.  Raises `OSError`."""
    with _Hashing(path, readers, punch=punch, threads=_hashing_threads()) as hashing:
        hashing.advance(size, progress)
        return hashing.digest()


class _Hashing:
    """The hashing of one file from its start, by ``threads``; with ``punch`` zeros become holes on the way."""

    def __init__(self, path: Path, readers: _Readers, *, punch: bool, threads: int) -> None:
        self._readers, self._punch = readers, punch
        self._hasher = blake3(max_threads=threads)
        self._fd = os.open(path, (os.O_RDWR if punch else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        #: Bytes hashed so far.
        self.bytes = 0

    def __enter__(self) -> _Hashing:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def size(self) -> int:
        """Return the file's size now, in bytes."""
        return os.fstat(self._fd).st_size

    def is_all_of(self, path: Path) -> bool:
        """Return whether what was hashed is the file that is at ``path`` now, as far as its size shows."""
        try:
            facts = path.lstat()
        except FileNotFoundError:
            return False
        return os.path.samestat(facts, os.fstat(self._fd)) and facts.st_size == self.bytes

    def advance(self, end: int, progress: Progress | None = None) -> None:
        """Hash what follows, up to ``end`` or the end of the file.  Raises `OSError`, and what ``progress`` raises."""
        for block in self._readers.blocks(self._fd, self.bytes, end):
            self._hasher.update(block)
            if self._punch:
                punch_zeros(self._fd, block, self.bytes)
            self.bytes += len(block)
            if progress is not None:
                progress(len(block))

    def begin_to_write(self, start: int, end: int) -> None:
        """Have Linux begin to write a range of the file to the disk; a flush will have less to do."""
        _libc.sync_file_range(self._fd, start, end - start, _SYNC_FILE_RANGE_WRITE)  # nothing depends on its success

    def digest(self) -> str:
        """Return the hash of what was hashed, in hex."""
        return self._hasher.hexdigest()


class GrowingFiles:
    """Hashes the files of a directory that match a pattern while another process writes each from its start to its end.

    Zeros become holes on the way, and the rest begins to be written to the disk: a checkpoint with 0.3 GB of pages on
    ext4 published in 0.04 s instead of 0.2 s.  For one thread: `advance` from time to time, `finish` when the other
    process has ended well.  Both call ``check`` after each block, and raise what it raises, and `OSError`.
    """

    def __init__(self, directory: Path, pattern: str) -> None:
        self._directory, self._pattern = directory, pattern
        self._open = contextlib.ExitStack()
        self._readers = self._open.enter_context(_Readers())
        self._files: dict[Path, _Hashing] = {}
        #: Begins to write, which waits for the disk where many writes are on their way to it.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="image-write")

    def __enter__(self) -> GrowingFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.shutdown(cancel_futures=True)
        self._open.close()

    def advance(self, check: Callable[[], object]) -> None:
        """Hash all whole blocks that are there."""
        for file in self._found().values():
            self._hash(file, file.size() // BLOCK * BLOCK, check)

    def finish(self, check: Callable[[], object]) -> dict[Path, FileEntry]:
        """Hash what is left, and return the files' entries; none of a file that is not the one that was hashed."""
        files = self._found()
        for file in files.values():
            self._hash(file, file.size(), check)
        return {path: FileEntry(file.bytes, file.digest()) for path, file in files.items() if file.is_all_of(path)}

    def _hash(self, file: _Hashing, end: int, check: Callable[[], object]) -> None:
        start = file.bytes
        file.advance(end, lambda _: check())
        if start < file.bytes:
            self._writer.submit(file.begin_to_write, start, file.bytes)

    def _found(self) -> dict[Path, _Hashing]:
        for path in self._directory.glob(self._pattern):
            if path not in self._files:
                # One thread is faster than the writer, which needs a processor, too.
                file = _Hashing(path, self._readers, punch=True, threads=1)
                self._files[path] = self._open.enter_context(file)
        return self._files


def _read_block(fd: int, buffer: memoryview, offset: int) -> memoryview:
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return buffer[:done]


def punch_zeros(fd: int, block: memoryview, offset: int) -> int:
    """Make holes of the zeros in ``block``, which was read at ``offset``; return the bytes freed.

    A hole reads as zeros.  A file system without holes keeps the zeros: 0.
    """
    freed, start = 0, -1
    for at in range(0, len(block) + 1, HOLE):
        length = min(HOLE, len(block) - at)
        if length == HOLE and direct_io.is_zero(block[at : at + HOLE]):
            start = at if start < 0 else start
        elif start >= 0:
            if _libc.fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset + start, at - start) != 0:
                return freed
            freed, start = freed + at - start, -1
    return freed


def _read_plain(path: Path, most: int) -> bytes:
    """Read a plain file of at most ``most`` bytes.  Raises `OSError`, `ImageFormat`."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink != 1 or facts.st_size > most:
            raise ImageFormat(f"The image's {path.name} is not one.", image=path.parent.name)
        return file.read(most + 1)
