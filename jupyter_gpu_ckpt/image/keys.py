"""The keys that seal manifests: one directory a user, one file a key, the newest seals and all of them verify.

They lie outside the image directory, so a writer of images cannot seal them.  A key is 32 random bytes; its name
begins with the moment it was made.  Several processes may make the first key at once: then there are two, which harms
nothing, so no lock is needed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import KeyUnusable
from ..files.atomic import write_atomically
from ..paths import data_directory

ALGORITHM = "hmac-sha256"
BYTES = 32
_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}")


def default_key_dir() -> Path:
    """Return ``gpu-ckpt/keys`` below Jupyter's data directory, or ``$JUPYTER_GPU_CKPT_KEYS``."""
    override = os.environ.get("JUPYTER_GPU_CKPT_KEYS")
    return Path(override) if override else data_directory("keys")


@dataclass(frozen=True)
class Key:
    """A key and the name that seals give it."""

    id: str
    secret: bytes = field(repr=False)

    def mac(self, text: bytes) -> str:
        """Return the HMAC-SHA256 of ``text``, in hex."""
        return hmac.new(self.secret, text, hashlib.sha256).hexdigest()


class Keyring:
    """The keys in one directory.  Every method raises `KeyUnusable` for a directory or file that others can read."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or default_key_dir()

    def ids(self) -> list[str]:
        """Return the names of the keys, oldest first."""
        if not self.directory.is_dir():
            return []
        _require_private(self.directory, stat.S_ISDIR)
        return sorted(path.name for path in self.directory.iterdir() if _NAME.fullmatch(path.name))

    def current(self) -> Key:
        """Return the newest key; make one if there is none."""
        return self.get(max(self.ids(), default="")) or self.rotate()

    def get(self, id: str) -> Key | None:
        """Return the key of that name, or None."""
        path = self.directory / id
        if not _NAME.fullmatch(id) or not path.exists():
            return None
        _require_private(path, stat.S_ISREG)
        try:
            secret = bytes.fromhex(path.read_text().strip())
        except (OSError, ValueError) as error:
            raise KeyUnusable("A key file cannot be read.", path=str(path)) from error
        if len(secret) != BYTES:
            raise KeyUnusable(f"A key file does not contain {BYTES} bytes in hex.", path=str(path))
        return Key(id, secret)

    def rotate(self) -> Key:
        """Make a new key, which seals from now on; the older ones still verify until their files are deleted."""
        newest = max(self.ids(), default="")
        stamp = max(newest[:15], time.strftime("%Y%m%dT%H%M%S", time.gmtime()))
        id = ""
        while id <= newest:  # never before the newest one, even if the clock was set back
            id = f"{stamp}-{secrets.token_hex(4)}"
        key = Key(id, secrets.token_bytes(BYTES))
        try:
            if not self.directory.exists():
                self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                self.directory.chmod(0o700)  # whatever the umask
            _require_private(self.directory, stat.S_ISDIR)
            write_atomically(self.directory / id, key.secret.hex() + "\n", durable=True)
        except OSError as error:
            raise KeyUnusable(f"No key can be made: {error.strerror}.", path=str(self.directory)) from error
        return key


def _require_private(path: Path, is_kind: Callable[[int], bool]) -> None:
    facts = path.lstat()
    if not is_kind(facts.st_mode):
        kind = "directory" if is_kind is stat.S_ISDIR else "file"
        hint = f"A link is refused: put the {kind} itself in its place."
        raise KeyUnusable(f"The {kind} of the keys is not a plain {kind}.", hint=hint, path=str(path))
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise KeyUnusable("The keys can be read or changed by other users.", path=str(path))
