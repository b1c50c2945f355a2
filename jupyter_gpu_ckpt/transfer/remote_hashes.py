"""Hashes of the parts in one remote directory, found out in the cheapest way that the file system offers.

S3 lists the MD5 of an object that came in one request, unless it encrypts with its own keys.  An SSH server runs
``sha256sum``, if it runs commands.  What these leave open is read back.  This finds what was lost on the way; against
an adversary a pull checks the seal.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files import direct_io

#: Seconds that a server has for hashing: the first, and one more for each of the second's bytes.
_TIMEOUT, _SLOWEST = 60.0, 20e6
#: Seconds that a server has for a request, for one with a part, of which eight go side by side over what may be a slow
#: line, and for the removal of an image, which may have thousands of parts.
REQUEST, TRANSFER, REMOVAL = 120.0, 900.0, 3600.0
#: OpenSSL uses the CPU's instructions and takes less than half the time of coreutils.
_COMMAND = 'openssl dgst -sha256 -r "$@" 2>/dev/null || sha256sum "$@"'


class RemoteHashes:
    """The hashes of the files in ``directory`` of the fsspec file system ``fs``; ``local``: it is this host's own."""

    def __init__(self, fs: Any, directory: str, *, local: bool) -> None:
        self._fs, self._directory, self._local = fs, directory, local
        self._listed = "s3" in (fs.protocol if isinstance(fs.protocol, tuple | list) else [fs.protocol])
        self._known: dict[str, str] = {}

    def trusts_writes(self) -> bool:
        """Return whether the directory is on this machine's disk: a flush is then as good as for the image itself."""
        # Every other file system has no device (stat(2): major number 0), and a network or a program in between.
        return self._local and os.major(Path(self._directory).stat().st_dev) != 0

    def digest(self, data: bytes) -> str:
        """Return the hash that is compared, in hex."""
        return hashlib.new("md5" if self._listed else "sha256", data, usedforsecurity=False).hexdigest()

    def query(self, size: int) -> None:
        """Ask the server for the hashes of all parts, ``size`` bytes together.  `matches` reads those it left out."""
        with contextlib.suppress(Exception):  # anything: the server is foreign, and need not answer
            if self._listed:
                entries = list_directory(self._fs, self._directory).items()
                self._known = {name: str(entry["ETag"]).strip('"') for name, entry in entries}
            elif hasattr(self._fs, "execute"):
                self._known = self._run_command(size)

    def matches(self, name: str, digest: str) -> bool:
        """Return whether the part ``name`` is there and has this hash.  Raises what the file system raises."""
        if self._known.get(name) == digest:
            return True
        try:
            return self.digest(self._read_back(name)) == digest
        except FileNotFoundError:
            return False

    def _read_back(self, name: str) -> bytes:
        path = f"{self._directory}/{name}"
        if not self._local:
            return bytes(call(self._fs.cat_file, path, seconds=TRANSFER))
        size = Path(path).stat().st_size  # past the page cache: what a file server has, not what was sent to it
        return bytes(direct_io.read(Path(path), direct_io.buffer(max(size, 1)), size))

    def _run_command(self, size: int) -> dict[str, str]:
        find = "find . -maxdepth 1 -type f -name '????-??????' -print0"
        run = f'xargs -0 -n 4 -P "$(nproc || echo 1)" sh -c {shlex.quote(_COMMAND)} sh'
        # With an empty input: a program that the server runs instead ends then, too.
        answer = self._fs.execute(
            f"cd {shlex.quote(self._directory)} && {find} | {run}", input="", timeout=_TIMEOUT + size / _SLOWEST
        )
        return {name: digest for digest, name in re.findall(r"^([0-9a-f]{64}) [ *]\./(\S+)$", str(answer.stdout), re.M)}


def call(method: Callable[..., Any], *arguments: Any, seconds: float = 0.0, **options: Any) -> Any:
    """Call a method of an fsspec file system, and give it up after ``seconds``, `REQUEST` by default.

    Raises what the file system raises, and fsspec's `FSTimeoutError`.  Limit: a file system without coroutines, such as
    a local one, waits for as long as its own code does.
    """
    if inspect.iscoroutinefunction(inspect.unwrap(method)):  # fsspec's `sync_wrapper` takes the time-out
        options["timeout"] = seconds or REQUEST
    return method(*arguments, **options)


def list_directory(fs: Any, path: str) -> dict[str, dict[str, Any]]:
    """Return what fsspec says of each entry of a directory, by name; nothing of a missing directory."""
    fs.invalidate_cache()
    try:
        return {str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]: entry for entry in call(fs.ls, path, detail=True)}
    except FileNotFoundError:
        return {}
