"""Encryption of images at rest: what CRIU wrote is stored as AES-256-GCM, chunk by chunk, several chunks at a time.

Every file of every image has a key of its own, derived (HKDF-SHA256) from the user's secret, a salt of the image and
the file's name; a chunk's nonce is its number and whether it is the last one.  So no nonce comes twice under one key,
and a chunk that was moved, dropped or cut off does not decrypt.  Hashes and the seal are over what is stored: `verify`
needs no key.

CRIU knows nothing of this.  It writes to, and reads from, a directory in memory (`Plain`), so the plain files touch no
disk; they need as much host memory as the image is large, for as long as a dump or a restore takes.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib.util
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..errors import ImageBusy, ImageDamaged, KeyUnusable, NoMemory
from . import layout
from .manifest import Manifest

ALGORITHM = "aes-256-gcm"
CHUNK = 1 << 20
TAG = 16
_BYTES = 32
_THREADS = 8
#: Seconds a command may take to print the key.
_COMMAND = 30.0
_HINT = "It is 64 hexadecimal digits, as `openssl rand -hex 32` prints them."


@dataclass(frozen=True)
class Secret:
    """The user's key, and what a manifest calls it."""

    id: str
    key: bytes = field(repr=False)


def secret(source: str) -> Secret:
    """The key from ``file:PATH``, ``env:NAME`` or ``command:COMMAND`` (run without a shell).  Raises `KeyUnusable`."""
    kind, _, place = source.partition(":")
    try:
        if kind == "file":
            path = Path(place).expanduser()
            if path.stat().st_mode & 0o077:
                raise KeyUnusable("The file of the encryption key can be read by others.", path=str(path))
            text = path.read_text()
        elif kind == "env":
            text = os.environ[place]
        elif kind == "command":
            argv = shlex.split(place)
            text = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND, check=True
            ).stdout
        else:
            raise KeyUnusable("The encryption key comes from file:PATH, env:NAME or command:COMMAND.")
        key = bytes.fromhex(text.strip())
    except (OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
        raise KeyUnusable(f"The encryption key cannot be had ({type(error).__name__}).", hint=_HINT) from None
    if len(key) != _BYTES:
        raise KeyUnusable(f"The encryption key has {len(key)} bytes instead of {_BYTES}.", hint=_HINT)
    return Secret(hmac.new(key, b"jupyter_gpu_ckpt key id", hashlib.sha256).hexdigest()[:16], key)


class Cipher:
    """Encrypts and decrypts the files of one image."""

    def __init__(self, secret: Secret, salt: bytes) -> None:
        self.secret = secret
        self.salt = salt

    @classmethod
    def fresh(cls, secret: Secret) -> Cipher:
        """For a new image."""
        return cls(secret, os.urandom(_BYTES))

    @classmethod
    def of(cls, secret: Secret | None, told: dict[str, Any]) -> Cipher:
        """For an image whose manifest says ``told``.  Raises `KeyUnusable` when ``secret`` is not its key."""
        if told.get("algorithm") != ALGORITHM or told.get("chunk") != CHUNK:
            raise KeyUnusable("The image is encrypted in a way that this release does not know.")
        if secret is None or secret.id != told.get("key"):
            hint = "Set GpuCkptProvisioner.encryption_key to the key it was made with."
            raise KeyUnusable("The image is encrypted with another key.", hint=hint, key=told.get("key"))
        return cls(secret, bytes.fromhex(told["salt"]))

    def told(self) -> dict[str, Any]:
        """For the manifest."""
        return {"algorithm": ALGORITHM, "chunk": CHUNK, "salt": self.salt.hex(), "key": self.secret.id}

    def encrypt(self, plain: Path, stored: Path, name: str) -> None:
        """Write ``stored``, the encrypted form of ``plain``, which is file ``name`` of the image.  Raises `OSError`."""
        size = plain.stat().st_size
        count = max(1, -(-size // CHUNK))
        aead = self._aead(name)
        with open(plain, "rb", buffering=0) as source, _private(stored) as target:

            def work(number: int) -> None:
                chunk = bytearray(min(CHUNK, size - number * CHUNK))
                sealed = bytearray(len(chunk) + TAG)
                _read(source.fileno(), chunk, number * CHUNK)
                aead.encrypt_into(_nonce(number, count), chunk, None, sealed)
                _write(target, sealed, number * (CHUNK + TAG))

            _parallel(work, count)

    def decrypt(self, stored: Path, plain: Path, name: str) -> None:
        """The reverse.  Raises `ImageDamaged` for anything but what `encrypt` wrote, `OSError`."""
        from cryptography.exceptions import InvalidTag

        size = stored.stat().st_size
        count = max(1, -(-size // (CHUNK + TAG)))
        aead = self._aead(name)
        with open(stored, "rb", buffering=0) as source, _private(plain) as target:

            def work(number: int) -> None:
                sealed = bytearray(max(0, min(CHUNK + TAG, size - number * (CHUNK + TAG))))
                _read(source.fileno(), sealed, number * (CHUNK + TAG))
                if len(sealed) < TAG:
                    raise InvalidTag
                chunk = bytearray(len(sealed) - TAG)
                aead.decrypt_into(_nonce(number, count), sealed, None, chunk)
                _write(target, chunk, number * CHUNK)

            try:
                _parallel(work, count)
            except InvalidTag:
                raise ImageDamaged(f"{name!r} does not decrypt.", files=[name]) from None

    def _aead(self, name: str) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        info = b"jupyter_gpu_ckpt image file\0" + os.fsencode(name)
        return AESGCM(HKDF(SHA256(), _BYTES, salt=self.salt, info=info).derive(self.secret.key))


class Plain:
    """A directory in memory for the plain files of one image, until `close`; gone with its process at the next sweep.

    Parameters
    ----------
    base:
        A directory of a file system in memory, for instance ``/dev/shm``.

    Raises `NoMemory` when it cannot be made there, and leaves nothing then; `ImageBusy` when another process has one of
    the same image.
    """

    def __init__(self, base: Path, id: str) -> None:
        place = _place(base)
        self.path = place / id
        self._lock = FileLock(place / f"{id}{layout.LOCK}", timeout=0, mode=0o600, thread_local=False)
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            if place.lstat().st_uid != os.geteuid() or place.lstat().st_mode & 0o077:
                raise NoMemory("The directory for plain files is not this user's alone.", directory=str(place))
            self._lock.acquire()
        except Timeout as error:
            raise ImageBusy(f"Image {id} is being decrypted by another process.", image=id) from error
        except OSError as error:
            raise _no_room(error) from error
        try:
            # What lies there was left by a process that is gone: its lock is ours.
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(mode=0o700)
            self.path.chmod(0o700)
        except OSError as error:
            self.close()
            raise _no_room(error) from error

    def close(self) -> None:
        """Remove the files.  Idempotent, never raises."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()


def _no_room(error: OSError) -> NoMemory:
    return NoMemory(f"There is no room in memory for plain files: {error.strerror}.")


@dataclass(frozen=True)
class Vault:
    """Where the key comes from (`secret`; none: only to say that there is none), and where plain files may lie."""

    source: str = ""
    base: Path = Path("/dev/shm")  # noqa: S108 - a directory of this user's below it

    def secret(self) -> Secret:
        """The key, asked for each time: it may have been changed.  Raises `KeyUnusable`, also without the library."""
        if importlib.util.find_spec("cryptography") is None:
            hint = "Install the extra: pip install 'jupyter_gpu_ckpt[encryption]'."
            raise KeyUnusable("Images cannot be encrypted without the package cryptography.", hint=hint)
        return secret(self.source)

    def sweep(self) -> int:
        """Remove plain files whose process is gone; returns of how many images."""
        swept = 0
        place = _place(self.base)
        if not place.is_dir() or place.lstat().st_uid != os.geteuid():
            return 0
        for lock_file in place.glob(f"*{layout.LOCK}"):
            lock = FileLock(lock_file, timeout=0, mode=0o600)
            with contextlib.suppress(Timeout, OSError), lock:
                shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
                lock_file.unlink(missing_ok=True)
                swept += 1
        return swept

    def encrypt(self, plain: Plain, image: Path, directory: str) -> dict[str, Any]:
        """Write ``plain``'s files to ``directory`` of ``image``; what the manifest says of it.  Raises `OSError`."""
        cipher = Cipher.fresh(self.secret())
        for path in sorted(plain.path.rglob("*")):
            name = f"{directory}/{path.relative_to(plain.path)}"
            if path.is_dir():
                (image / name).mkdir(mode=0o700)
            else:
                cipher.encrypt(path, image / name, name)
        return cipher.told()

    def decrypt(self, image: Path, manifest: Manifest, directory: str) -> Plain:
        """The files below ``directory`` of ``image`` in memory; the caller closes them.

        Raises `KeyUnusable`, `ImageDamaged`, `NoMemory`, `ImageBusy`.
        """
        cipher = Cipher.of(self.secret() if self.source else None, manifest.encryption or {})
        plain = Plain(self.base, manifest.id)
        try:
            for name in manifest.files:
                if name.startswith(f"{directory}/"):
                    place = plain.path / name.removeprefix(f"{directory}/")
                    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    cipher.decrypt(image / name, place, name)
        except OSError as error:
            plain.close()
            raise NoMemory(f"The image cannot be decrypted: {error.strerror}.", image=manifest.id) from error
        except BaseException:
            plain.close()
            raise
        return plain


def _place(base: Path) -> Path:
    return base / f"gpu-ckpt-plain-{os.geteuid()}"


def _nonce(number: int, count: int) -> bytes:
    return number.to_bytes(11, "big") + bytes([number == count - 1])


def _parallel(work: Any, count: int) -> None:
    with ThreadPoolExecutor(min(_THREADS, count)) as pool:
        list(pool.map(work, range(count)))


@contextlib.contextmanager
def _private(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)  # whatever the umask
        yield fd
    finally:
        os.close(fd)


def _read(fd: int, buffer: bytearray, offset: int) -> None:
    view, done = memoryview(buffer), 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise OSError("the file became shorter")
        done += count


def _write(fd: int, buffer: bytearray, offset: int) -> None:
    view, done = memoryview(buffer), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
