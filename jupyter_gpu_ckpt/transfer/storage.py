"""Files below one URL, a directory for each image: on a file server, in an object store, or wherever fsspec writes.

fsspec finds the credentials (its configuration files and environment); a URL with a password in it works and is never
written anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import GpuCkptError, ImageFormat, ImageNotFound, RemoteFailed, RemoteUnsupported
from ..files.atomic import flush, write_atomically
from ..image.manifest import safe_name
from .remote_hashes import REMOVAL, TRANSFER, RemoteHashes, call, list_directory

#: Seconds without a sign of an SSH server after which it is asked for one; after four times as many it is given up.
KEEPALIVE = 30


class Storage:
    """The files below one URL, by the id of their image and their name.

    Raises `RemoteUnsupported` when the package for the URL is not installed, `ImageNotFound` for an id that is no name.
    Methods raise what the file system raises, `FileNotFoundError` among it, unless they say more; see `mapped_errors`.
    """

    def __init__(self, url: str, **options: Any) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise RemoteUnsupported("The package fsspec is not installed.") from error
        with mapped_errors():
            try:
                protocol = fsspec.utils.get_protocol(url)
                if protocol in ("sftp", "ssh"):
                    # sshfs would take any host for the right one.
                    options.setdefault("known_hosts", str(Path.home() / ".ssh" / "known_hosts"))
                    # asyncssh's own first choice, ChaCha20, takes a third more of the one core that it runs on.
                    options.setdefault("encryption_algs", "^aes128-gcm@openssh.com,aes256-gcm@openssh.com")
                    # asyncssh gives a server up that leaves several in succession unanswered: `create` has no deadline.
                    options.setdefault("keepalive_interval", KEEPALIVE)
                self.fs, self.root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
            except (ImportError, ValueError) as error:
                raise RemoteUnsupported(f"The package for {protocol}: URLs is not installed.") from error
        self.local = protocol in ("file", "local")
        self._is_object_store = not self.local and not hasattr(self.fs, "client")

    def ids(self) -> list[str]:
        """Return the names of the directories below the URL, sorted."""
        return sorted(list_directory(self.fs, self.root))

    def sizes(self, id: str) -> dict[str, int]:
        """Return the bytes of each file of an image, by name; nothing where there are none."""
        return {name: int(entry["size"] or 0) for name, entry in list_directory(self.fs, self.path(id)).items()}

    def read_small(self, id: str, name: str, most: int) -> bytes:
        """Return the content of a file of ``most`` bytes at most.

        Raises `ImageNotFound` where there is none, `ImageFormat` for a larger one or another kind of file,
        `RemoteFailed`.
        """
        with mapped_errors():
            try:
                facts = call(self.fs.info, self.path(id, name))
                if facts["type"] != "file" or int(facts["size"]) > most:
                    raise ImageFormat(f"The {name} of {id!r} is not one, or too large.", image=id)
                return self.read(id, name, most)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise ImageNotFound(f"There is no image {id!r} there.", image=id) from error

    def path(self, id: str, name: str = "") -> str:
        """Return the path of an image's directory, or of its file ``name``, as fsspec takes it."""
        if not safe_name(id) or "/" in id:
            raise ImageNotFound(f"There is no image {id!r}.", image=id)
        return f"{self.root}/{id}" + (f"/{name}" if name else "")

    def read(self, id: str, name: str, most: int) -> bytes:
        """Return the content of a file; of a larger one in a local directory, ``most`` bytes and one more.

        Others may write to a directory that is shared.  Raises `ImageFormat` where its file is no plain one: a pipe
        without a writer never answers, and a link can lead to a file without an end.
        """
        path = self.path(id, name)
        return _read_plain(path, most) if self.local else bytes(call(self.fs.cat_file, path, seconds=TRANSFER))

    def write(self, id: str, name: str, data: bytes, *, durable: bool = False) -> None:
        """Write a file there, atomically.  ``durable`` is for a local directory; elsewhere the server decides."""
        path = self.path(id, name)
        if self.local:
            write_atomically(Path(path), data, durable=durable)
        elif self._is_object_store:
            call(self.fs.pipe_file, path, data, seconds=TRANSFER)
        else:
            call(self.fs.pipe_file, path + ".part", data, seconds=TRANSFER)
            call(self.fs.mv, path + ".part", path)

    def make_directory(self, id: str) -> None:
        """Make the directory so that others may not enter it; in an object store the bucket's rules decide.

        Raises `RemoteFailed` for one that another user has made: its owner could take the image away.
        """
        if self.local:
            path = Path(self.path(id))
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            try:
                path.mkdir(mode=0o700)
            except FileExistsError:
                _require_own(path)
        elif not self._is_object_store:
            call(self.fs.makedirs, self.path(id), exist_ok=True, permissions=0o700)

    def create(self, id: str, name: str, data: bytes) -> None:
        """Write a file that must not be there; of several hosts that try, one succeeds.  After failure none is left."""
        file = self.fs.open(self.path(id, name), "xb")  # an object store makes it when it is closed
        try:
            with file:
                file.write(data)
        except Exception:
            if not self._is_object_store:
                self.delete(id, name)
            raise

    def delete(self, id: str, name: str) -> None:
        """Delete a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            call(self.fs.rm_file, self.path(id, name))

    def delete_directory(self, id: str) -> None:
        """Delete all files of an image, if there are any."""
        if call(self.fs.exists, self.path(id)):
            call(self.fs.rm, self.path(id), recursive=True, seconds=REMOVAL)

    def flush(self, id: str) -> None:
        """Flush an image's files, in a local directory; elsewhere the server decides."""
        if self.local:
            directory = Path(self.path(id))
            for path in (*directory.iterdir(), directory):
                flush(path)

    def hashes(self, id: str) -> RemoteHashes:
        """Return the hashes of an image's files."""
        return RemoteHashes(self.fs, self.path(id), local=self.local)


def _require_own(path: Path) -> None:
    facts = path.lstat()
    own = False
    if stat.S_ISDIR(facts.st_mode):
        with tempfile.TemporaryFile(dir=path) as probe:  # a file server may have another owner for what this user makes
            own = os.fstat(probe.fileno()).st_uid == facts.st_uid
    if not own:
        message = f"There is something of another user in the place of image {path.name}."
        raise RemoteFailed(message, hint="Have it removed, or choose another directory. The image is still here.")


def _read_plain(path: str, most: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise
        raise ImageFormat("A file of the image is no plain file.") from error
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ImageFormat("A file of the image is no plain file.")
        return file.read(most + 1)


@contextlib.contextmanager
def mapped_errors() -> Iterator[None]:
    """Map foreign errors to `RemoteFailed`.  Their texts may contain URLs, so only the reason is kept."""
    try:
        yield
    except GpuCkptError:
        raise
    except Exception as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        if isinstance(error, asyncio.TimeoutError) and reason == type(error).__name__:
            reason = "it does not answer"
        raise RemoteFailed(f"The storage of the images failed: {reason}.", kind=type(error).__name__) from error
