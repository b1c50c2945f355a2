"""Encryption of images at rest: AES-256-GCM, chunk by chunk, several chunks at a time.

Every file of every image has a key of its own, derived (HKDF-SHA256) from the user's secret, a salt of the image and
the file's name; a chunk's nonce is its number and whether it is the last one.  So no nonce comes twice under one key,
and a chunk that was moved, dropped or cut off does not decrypt.  Hashes and the seal are over the stored bytes:
`verify` needs no key.

CRIU knows nothing of this.  It writes to and reads from a directory in memory (`PlainDirectory`), so its files touch no
disk; they need as much host memory as they are large, for as long as a dump or a restore takes.  Device memory is
encrypted from host memory into the image and decrypted on the way back (`EncryptedCodec`), without another copy.

Others use two names only: `Form` to write an image, `readable` to read it, encrypted or not.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
_KEY_BYTES = 32
_THREADS = 8
#: Seconds a command may take to print the key.
_COMMAND_TIMEOUT = 30.0
_HINT = "It is 64 hexadecimal digits, as `openssl rand -hex 32` prints them."


@dataclass(frozen=True)
class Secret:
    """The user's key, and what a manifest calls it."""

    id: str
    key: bytes = field(repr=False)


def secret(source: str) -> Secret:
    """Read the key from ``file:PATH``, ``env:NAME`` or ``command:COMMAND`` (without a shell).  Raises `KeyUnusable`."""
    kind, _, value = source.partition(":")
    try:
        if kind == "file":
            path = Path(value).expanduser()
            if path.stat().st_mode & 0o077:
                raise KeyUnusable("The file of the encryption key can be read by others.", path=str(path))
            text = path.read_text()
        elif kind == "env":
            text = os.environ[value]
        elif kind == "command":
            argv = shlex.split(value)
            text = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT, check=True
            ).stdout
        else:
            raise KeyUnusable("The encryption key comes from file:PATH, env:NAME or command:COMMAND.")
        key = bytes.fromhex(text.strip())
    except (OSError, KeyError, ValueError, subprocess.SubprocessError) as error:
        raise KeyUnusable(f"The encryption key cannot be read ({type(error).__name__}).", hint=_HINT) from None
    if len(key) != _KEY_BYTES:
        raise KeyUnusable(f"The encryption key has {len(key)} bytes instead of {_KEY_BYTES}.", hint=_HINT)
    return Secret(hmac.new(key, b"jupyter_gpu_ckpt key id", hashlib.sha256).hexdigest()[:16], key)


@dataclass(frozen=True)
class Cipher:
    """Encrypts and decrypts the files of one image."""

    secret: Secret
    salt: bytes

    @classmethod
    def from_manifest(cls, secret: Secret | None, facts: dict[str, Any]) -> Cipher:
        """Make the cipher of an image by its manifest.  Raises `KeyUnusable` when ``secret`` is not its key."""
        if facts.get("algorithm") != ALGORITHM or facts.get("chunk") != CHUNK:
            raise KeyUnusable("The image is encrypted in a way that this release does not know.")
        if secret is None or secret.id != facts.get("key"):
            hint = "Set GpuCkptProvisioner.encryption_key to the key it was made with."
            raise KeyUnusable("The image is encrypted with another key.", hint=hint, key=facts.get("key"))
        return cls(secret, bytes.fromhex(facts["salt"]))

    def encrypt(self, plain: Path, stored: Path, name: str) -> None:
        """Write ``stored``, the encrypted form of ``plain``, which is file ``name`` of the image.  Raises `OSError`."""
        aead = self._aead(name)
        with open(plain, "rb", buffering=0) as source, _private(stored) as target:

            def work(nonce: bytes, at: slice, sealed_at: slice) -> None:
                _write(target, aead.encrypt(nonce, _read(source.fileno(), at), None), sealed_at.start)

            _parallel(work, plain.stat().st_size)

    def decrypt(self, stored: Path, plain: Path, name: str) -> None:
        """Write ``plain`` from ``stored``.  Raises `ImageDamaged` for anything but what `encrypt` wrote, `OSError`."""
        from cryptography.exceptions import InvalidTag

        stored_size = stored.stat().st_size
        size = stored_size - TAG * max(1, -(-stored_size // (CHUNK + TAG)))
        aead = self._aead(name)
        with open(stored, "rb", buffering=0) as source, _private(plain) as target:

            def work(nonce: bytes, at: slice, sealed_at: slice) -> None:
                _write(target, aead.decrypt(nonce, _read(source.fileno(), sealed_at), None), at.start)

            try:
                if _sealed_size(size) != stored_size:
                    raise InvalidTag
                _parallel(work, size)
            except InvalidTag:
                raise ImageDamaged(f"{name!r} does not decrypt.", files=[name]) from None

    def seal(self, name: str, content: memoryview, into: memoryview) -> int:
        """Write the encrypted form of ``content``, file ``name`` of the image, to ``into``; return its bytes."""
        aead = self._aead(name)
        for nonce, at, sealed_at in _chunks(len(content)):
            aead.encrypt_into(nonce, content[at], None, into[sealed_at])
        return _sealed_size(len(content))

    def open(self, name: str, sealed: memoryview, into: memoryview) -> bool:
        """Write the content of ``sealed`` to ``into``; return False if `seal` did not make it from so many bytes."""
        from cryptography.exceptions import InvalidTag

        if len(sealed) != _sealed_size(len(into)):
            return False
        aead = self._aead(name)
        try:
            for nonce, at, sealed_at in _chunks(len(into)):
                aead.decrypt_into(nonce, sealed[sealed_at], None, into[at])
        except InvalidTag:
            return False
        return True

    def _aead(self, name: str) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        info = b"jupyter_gpu_ckpt image file\0" + os.fsencode(name)
        return AESGCM(HKDF(SHA256(), _KEY_BYTES, salt=self.salt, info=info).derive(self.secret.key))


class PlainDirectory:
    """A directory in memory for the plain files of one image, until `close`; a sweep removes it if its process is gone.

    ``base``: a directory of a file system in memory, for instance ``/dev/shm``.  Raises `NoMemory` when the directory
    cannot be made there, `StoreShared` when others may enter its parent, and leaves nothing then; `ImageBusy` when
    another process has one of the same image.
    """

    def __init__(self, base: Path, id: str) -> None:
        parent = _plain_parent(base)
        self.path = parent / id
        self._lock = FileLock(parent / f"{id}{layout.LOCK}", timeout=0, mode=0o600, thread_local=False)
        try:
            parent.mkdir(mode=0o700, exist_ok=True)
            if parent.lstat().st_uid != os.geteuid() or parent.lstat().st_mode & 0o077:
                message = "The directory for decrypted files is not this user's alone."
                hint = "Remove it, or have them elsewhere (GpuCkptProvisioner.memory_dir)."
                raise StoreShared(message, hint=hint, directory=str(parent))
            self._lock.acquire()
            # A directory that is there was left by a process that has ended: we have its lock.
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(mode=0o700)
            self.path.chmod(0o700)
        except Timeout as error:
            raise ImageBusy(f"Image {id} is being decrypted by another process.", image=id) from error
        except OSError as error:
            if self._lock.is_locked:
                self.close()
            raise NoMemory(f"There is no space in host memory for plain files: {error.strerror}.") from error

    def close(self) -> None:
        """Remove the files.  Idempotent, never raises."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()


@dataclass(frozen=True)
class Vault:
    """The source of the key (`secret`; empty: no encryption), and a file system in memory for plain files."""

    source: str = ""
    base: Path = Path("/dev/shm")  # noqa: S108 - a directory of this user's below it

    @property
    def encrypts(self) -> bool:
        """Return whether new images are encrypted."""
        return bool(self.source)

    def free(self) -> int:
        """Return the bytes that plain files may have."""
        return free(self.base)

    def secret(self) -> Secret | None:
        """Read the key, each time: it may have been changed.  Return None if images are not encrypted.

        Raises `KeyUnusable`, also without the library.
        """
        if not self.encrypts:
            return None
        if importlib.util.find_spec("cryptography") is None:
            hint = "Install the extra: pip install 'jupyter_gpu_ckpt[encryption]'."
            raise KeyUnusable("Images cannot be encrypted without the package cryptography.", hint=hint)
        return secret(self.source)

    def sweep(self) -> int:
        """Remove plain files whose process is gone; return the number of their images."""
        swept = 0
        parent = _plain_parent(self.base)
        if not parent.is_dir() or parent.lstat().st_uid != os.geteuid():
            return 0
        for lock_file in parent.glob(f"*{layout.LOCK}"):
            lock = FileLock(lock_file, timeout=0, mode=0o600)
            with contextlib.suppress(Timeout, OSError), lock:
                shutil.rmtree(lock_file.with_suffix(""), ignore_errors=True)
                lock_file.unlink(missing_ok=True)
                swept += 1
        return swept


class EncryptedCodec(device_memory.Codec):
    """Encrypts the chunks of device memory."""

    def __init__(self, cipher: Cipher) -> None:
        super().__init__()
        self._cipher = cipher
        self._own = threading.local()

    def store(self, source: Path, chunk: memoryview, path: Path) -> FileEntry:
        buffer = self._buffer(len(chunk))
        size = self._cipher.seal(layout.device_file(path.name), chunk, buffer)
        direct_io.write(path, buffer, size, size=size)
        return FileEntry(size, blake3(buffer[:size]).hexdigest())

    def load(self, path: Path, entry: FileEntry, chunk: memoryview, target: Path) -> bool:
        buffer = self._buffer(len(chunk))
        if entry.bytes > len(buffer):
            return False
        sealed = direct_io.read(path, buffer, entry.bytes)  # its hash is checked before anything is decrypted
        if len(sealed) != entry.bytes or blake3(sealed).hexdigest() != entry.blake3:
            return False
        if not self._cipher.open(layout.device_file(path.name), sealed, chunk):
            return False
        direct_io.write(target, chunk, len(chunk), size=len(chunk))
        return True

    def _buffer(self, size: int) -> memoryview:
        """Return the thread's `direct_io.buffer` for the encrypted form of ``size`` bytes."""
        needed = _sealed_size(size)
        if not hasattr(self._own, "buffer") or len(self._own.buffer) < needed:
            self._own.buffer = direct_io.buffer(needed)
        found: memoryview = self._own.buffer
        return found


class Form:
    """The form in which the image ``id`` is written with CRIU's files in ``directory``; encrypted if ``vault`` says so.

    For one draft: every file is written once, for its key and nonces come from its name and its chunks' numbers.
    Raises as `PlainDirectory`, `KeyUnusable`.
    """

    def __init__(self, vault: Vault, id: str, directory: Path) -> None:
        self._directory = directory
        secret = vault.secret()
        self._cipher = Cipher(secret, os.urandom(_KEY_BYTES)) if secret is not None else None
        self._plain = PlainDirectory(vault.base, id) if secret is not None else None
        #: The directory that CRIU writes to.
        self.criu_directory = directory if self._plain is None else self._plain.path

    def codec(
        self, claim: device_memory.ClaimChunk | None, when_full: Callable[[], object] | None = None
    ) -> device_memory.Codec:
        """Return the codec of device memory.  ``claim`` provides plain chunks, of no use to an encrypted image.

        ``when_full``: see `device_memory.Codec`; of a plain image.
        """
        return device_memory.Codec(claim, when_full) if self._cipher is None else EncryptedCodec(self._cipher)

    def finish(self) -> dict[str, Any] | None:
        """Encrypt CRIU's files into the image; return the manifest's facts about it, or None.  Raises `OSError`."""
        if self._cipher is None:
            return None
        for path in sorted(self.criu_directory.rglob("*")):
            name = path.relative_to(self.criu_directory)
            if path.is_dir():
                (self._directory / name).mkdir(mode=0o700)
            else:
                self._cipher.encrypt(path, self._directory / name, f"{layout.CRIU}/{name}")
        salt, key = self._cipher.salt.hex(), self._cipher.secret.id
        return {"algorithm": ALGORITHM, "chunk": CHUNK, "salt": salt, "key": key}

    def close(self) -> None:
        """Remove plain files of an encrypted image.  Idempotent, never raises."""
        if self._plain is not None:
            self._plain.close()


@dataclass(frozen=True)
class Readable:
    """An image for a restore: CRIU's files as CRIU wrote them, and device memory, which ``codec`` reads."""

    criu_directory: Path
    device_directory: Path
    codec: device_memory.Codec
    encrypted: bool


@contextlib.contextmanager
def readable(vault: Vault, path: Path, manifest: Manifest) -> Iterator[Readable]:
    """Make the image at ``path`` readable for the body; encrypted files of CRIU are decrypted into memory.

    Raises `KeyUnusable`, `ImageDamaged`, `NoMemory`, `ImageBusy`.
    """
    stored = path / layout.CRIU
    if manifest.encryption is None:
        yield Readable(stored, stored / layout.DEVICE, device_memory.Codec(), encrypted=False)
        return
    cipher = Cipher.from_manifest(vault.secret(), manifest.encryption)
    with contextlib.closing(PlainDirectory(vault.base, manifest.id)) as plain:
        try:
            for name in manifest.files.keys() - {layout.device_file(each) for each in device_memory.entries(manifest)}:
                if name.startswith(f"{layout.CRIU}/"):
                    target = plain.path / name.removeprefix(f"{layout.CRIU}/")
                    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                    cipher.decrypt(path / name, target, name)
        except OSError as error:
            raise NoMemory(f"The image cannot be decrypted: {error.strerror}.", image=manifest.id) from error
        yield Readable(plain.path, stored / layout.DEVICE, EncryptedCodec(cipher), encrypted=True)


def _plain_parent(base: Path) -> Path:
    return base / f"gpu-ckpt-plain-{os.geteuid()}"


def _sealed_size(size: int) -> int:
    """Return the bytes of a file of ``size`` bytes when it is encrypted: a file without content is one empty chunk."""
    return size + TAG * max(1, -(-size // CHUNK))


def _chunks(size: int) -> Iterator[tuple[bytes, slice, slice]]:
    """Yield the nonce of each chunk of ``size`` bytes, and where it lies: plain, and encrypted."""
    count = max(1, -(-size // CHUNK))
    for number in range(count):
        start, end = number * CHUNK, min((number + 1) * CHUNK, size)
        nonce = number.to_bytes(11, "big") + bytes([number == count - 1])
        yield nonce, slice(start, end), slice(start + number * TAG, end + (number + 1) * TAG)


def _parallel(work: Callable[[bytes, slice, slice], None], size: int) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(lambda chunk: work(*chunk), _chunks(size)))


@contextlib.contextmanager
def _private(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)  # whatever the umask
        yield fd
    finally:
        os.close(fd)


def _read(fd: int, at: slice) -> bytes:
    data = os.pread(fd, at.stop - at.start, at.start)
    if len(data) != at.stop - at.start:
        raise OSError("the file became shorter")
    return data


def _write(fd: int, data: bytes, offset: int) -> None:
    done = 0
    while done < len(data):  # a disk that fills up takes a part first
        done += os.pwrite(fd, data[done:], offset + done)
