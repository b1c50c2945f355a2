"""Encryption of images at rest: what CRIU wrote is stored as AES-256-GCM, chunk by chunk, several chunks at a time.

Every file of every image has a key of its own, derived (HKDF-SHA256) from the user's secret, a salt of the image and
the file's name; a chunk's nonce is its number and whether it is the last one.  So no nonce comes twice under one key,
and a chunk that was moved, dropped or cut off does not decrypt.  Hashes and the seal are over what is stored: `verify`
needs no key.

CRIU knows nothing of this.  It writes to, and reads from, a directory in memory (`Plain`), so its files touch no disk;
they need as much host memory as they are large, for as long as a dump or a restore takes.  Device memory is encrypted
from the arena into the image and decrypted on the way back, chunk by chunk (`EncryptedCodec`), and lies nowhere else.

Two functions are all that others need: `form` to write an image, `readable` to read it, encrypted or not.
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
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from blake3 import blake3
from filelock import FileLock, Timeout

from ..errors import ImageBusy, ImageDamaged, KeyUnusable, NoMemory, StoreShared
from ..files import direct_io
from ..files.disk import free
from . import device_memory, layout
from .manifest import FileEntry, Manifest

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

    def seal(self, name: str, content: memoryview, into: memoryview) -> int:
        """Write the encrypted form of ``content``, which is file ``name`` of the image, to ``into``; its bytes."""
        count = max(1, -(-len(content) // CHUNK))
        aead = self._aead(name)
        for number in range(count):
            chunk = content[number * CHUNK : (number + 1) * CHUNK]
            at = number * (CHUNK + TAG)
            aead.encrypt_into(_nonce(number, count), chunk, None, into[at : at + len(chunk) + TAG])
        return len(content) + count * TAG

    def open(self, name: str, sealed: memoryview, into: memoryview) -> bool:
        """Write the content of ``sealed`` to ``into``; False if it is not what `seal` made, of so many bytes."""
        from cryptography.exceptions import InvalidTag

        count = max(1, -(-len(into) // CHUNK))
        if len(sealed) != len(into) + count * TAG:
            return False
        aead = self._aead(name)
        try:
            for number in range(count):
                chunk = into[number * CHUNK : (number + 1) * CHUNK]
                at = number * (CHUNK + TAG)
                aead.decrypt_into(_nonce(number, count), sealed[at : at + len(chunk) + TAG], None, chunk)
        except InvalidTag:
            return False
        return True

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

    Raises `NoMemory` when it cannot be made there, `StoreShared` when what is there is not this user's alone, and
    leaves nothing then; `ImageBusy` when another process has one of the same image.
    """

    def __init__(self, base: Path, id: str) -> None:
        place = _place(base)
        self.path = place / id
        self._lock = FileLock(place / f"{id}{layout.LOCK}", timeout=0, mode=0o600, thread_local=False)
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            if place.lstat().st_uid != os.geteuid() or place.lstat().st_mode & 0o077:
                raise StoreShared(
                    "The directory for decrypted files is not this user's alone.",
                    hint="Remove it, or have them elsewhere (GpuCkptProvisioner.memory_dir).",
                    directory=str(place),
                )
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
    """Where the key comes from (`secret`; empty: images are not encrypted), and where plain files may lie."""

    source: str = ""
    base: Path = Path("/dev/shm")  # noqa: S108 - a directory of this user's below it

    @property
    def encrypts(self) -> bool:
        """Whether images that are made from now on are encrypted."""
        return bool(self.source)

    def require(self) -> None:
        """Raise `KeyUnusable` if images are to be encrypted and the key cannot be had."""
        if self.encrypts:
            self.secret()

    def free(self) -> int:
        """Bytes that plain files may have."""
        return free(self.base)

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


class EncryptedCodec:
    """Store chunks of device memory encrypted; a `device.Codec`."""

    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher
        self._own = threading.local()

    def store(self, source: Path, chunk: memoryview, path: Path) -> FileEntry:
        """As `device.Codec.store`."""
        buffer = self._buffer(len(chunk))
        size = self._cipher.seal(layout.device_file(path.name), chunk, buffer)
        direct_io.write(path, buffer, size, size=size)
        return FileEntry(size, blake3(buffer[:size]).hexdigest())

    def load(self, path: Path, entry: FileEntry, chunk: memoryview) -> bool:
        """As `device.Codec.load`; nothing is decrypted that is not proved."""
        buffer = self._buffer(len(chunk))
        if entry.bytes > len(buffer):
            return False
        sealed = direct_io.read(path, buffer, entry.bytes)
        if len(sealed) != entry.bytes or blake3(sealed).hexdigest() != entry.blake3:
            return False
        return self._cipher.open(layout.device_file(path.name), sealed, chunk)

    def _buffer(self, size: int) -> memoryview:
        """A `direct.buffer` for the encrypted form of ``size`` bytes, used again by the thread."""
        needed = size + TAG * max(1, -(-size // CHUNK))
        if not hasattr(self._own, "buffer") or len(self._own.buffer) < needed:
            self._own.buffer = direct_io.buffer(needed)
        found: memoryview = self._own.buffer
        return found


class Form(Protocol):
    """In which form an image is written, encrypted or not."""

    #: Where CRIU writes.
    criu_directory: Path

    def codec(self, claim: device_memory.ClaimChunk | None) -> device_memory.Codec:
        """How device memory is written.  ``claim``: a cache of chunks, as they are."""

    def finish(self) -> dict[str, Any] | None:
        """Write what is still to be written; what the manifest says of the form.  Raises `OSError`."""

    def close(self) -> None:
        """Remove what is not of the image.  Idempotent, never raises."""


class Clear:
    """The `Form` of an image that is not encrypted: CRIU writes to its ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.criu_directory = directory

    def codec(self, claim: device_memory.ClaimChunk | None) -> device_memory.Codec:
        """As `Form.codec`."""
        return device_memory.PlainCodec(claim)

    def finish(self) -> None:
        """As `Form.finish`."""

    def close(self) -> None:
        """As `Form.close`."""


class Encrypted:
    """The `Form` of an encrypted image ``id`` with CRIU's files in ``directory``.  Raises as `Plain`, `KeyUnusable`.

    For one draft: every file is written once, for its key and its nonces are those of its name and its chunks' numbers.
    """

    def __init__(self, vault: Vault, id: str, directory: Path) -> None:
        self._directory = directory
        self._cipher = Cipher.fresh(vault.secret())
        self._plain = Plain(vault.base, id)
        self.criu_directory = self._plain.path

    def codec(self, claim: device_memory.ClaimChunk | None) -> device_memory.Codec:
        """As `Form.codec`; what a cache has in the clear is of no use."""
        return EncryptedCodec(self._cipher)

    def finish(self) -> dict[str, Any]:
        """As `Form.finish`."""
        for path in sorted(self._plain.path.rglob("*")):
            name = path.relative_to(self._plain.path)
            if path.is_dir():
                (self._directory / name).mkdir(mode=0o700)
            else:
                self._cipher.encrypt(path, self._directory / name, f"{layout.CRIU}/{name}")
        return self._cipher.told()

    def close(self) -> None:
        """As `Form.close`."""
        self._plain.close()


def form(vault: Vault, id: str, directory: Path) -> Form:
    """How the image ``id`` is written, with CRIU's files in ``directory``; its caller closes it.  Raises as `Plain`."""
    return Encrypted(vault, id, directory) if vault.encrypts else Clear(directory)


@dataclass(frozen=True)
class Readable:
    """The files of an image as a restore reads them.

    ``criu_directory`` has CRIU's files as CRIU wrote them; ``codec`` reads the files of ``device_directory``.
    ``encrypted``: whether the image is.
    """

    criu_directory: Path
    device_directory: Path
    codec: device_memory.Codec
    encrypted: bool


@contextlib.contextmanager
def readable(vault: Vault, path: Path, manifest: Manifest) -> Iterator[Readable]:
    """The image at ``path`` for the body; CRIU's files are decrypted into memory, if they are encrypted.

    Raises `KeyUnusable`, `ImageDamaged`, `NoMemory`, `ImageBusy`.
    """
    stored = path / layout.CRIU
    if manifest.encryption is None:
        yield Readable(stored, stored / layout.DEVICE, device_memory.PlainCodec(), encrypted=False)
        return
    cipher = Cipher.of(vault.secret() if vault.encrypts else None, manifest.encryption)
    with contextlib.closing(Plain(vault.base, manifest.id)) as plain:
        try:
            for name in manifest.files.keys() - {layout.device_file(each) for each in device_memory.entries(manifest)}:
                if name.startswith(f"{layout.CRIU}/"):
                    place = plain.path / name.removeprefix(f"{layout.CRIU}/")
                    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    cipher.decrypt(path / name, place, name)
        except OSError as error:
            raise NoMemory(f"The image cannot be decrypted: {error.strerror}.", image=manifest.id) from error
        yield Readable(plain.path, stored / layout.DEVICE, EncryptedCodec(cipher), encrypted=True)


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
