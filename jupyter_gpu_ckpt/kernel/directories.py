"""Default directories: of the images, and of the kernels' sockets, whose paths are short."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import socket
import stat
import string
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from ..errors import CapsuleError, RuntimeDirectory
from ..files.atomic import write_atomically
from ..image.user_directory import VARIABLE
from ..paths import data_directory

_NAME_BYTES = 6
#: Bytes of the path of a unix socket (unix(7)), and of the longest name of a kernel's own: ``moved-`` and an inode.
_MOST_BYTES, _LONGEST_NAME = 107, 18
#: The name of a kernel's directory.
RUNTIME_DIR = re.compile(rf"[0-9a-f]{{{2 * _NAME_BYTES}}}")
#: Seconds to wait for another server that chooses the directory of sockets.
_LOCK_TIMEOUT = 10.0
#: Directories of sockets that are remembered for a host.
_KNOWN = 20
#: Bytes of the path of a socket that every kernel can listen on: xeus reads the address, ``ipc://`` and the path, into
#: 32 bytes.
SHORT = 25
#: Characters of a kernel's own in such a path, and how many at least.
_LETTERS, _FEWEST = string.ascii_lowercase + string.digits, 4


def default_image_dir() -> Path:
    """Return ``$JUPYTER_GPU_CKPT_IMAGES``, or ``gpu-ckpt/images`` below Jupyter's data directory."""
    override = os.environ.get(VARIABLE)
    return Path(override) if override else data_directory("images")


def default_runtime_base() -> Path:
    """Return ``$XDG_RUNTIME_DIR/gpu-ckpt`` where the session has one, else a directory in the temporary one.

    There it has a name that nobody can guess and take first; a file in Jupyter's data directory remembers it for this
    host, so that the next server finds the kernels of this one.  Short on purpose: the path of a unix socket may have
    107 bytes, and a kernel's sockets keep their paths for life.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK) and Path(runtime).stat().st_uid == os.geteuid():
        return Path(runtime) / "gpu-ckpt"
    return _remembered(data_directory("runtime"))


def _remembered(directory: Path) -> Path:
    """Return the directory of sockets that a file in ``directory`` names for this host; made where there is none.

    Where no file can be written it has a fixed name, unless that is taken.
    """
    temporary = _temporary()
    record = directory / hashlib.sha256(f"{socket.gethostname()} {temporary}".encode()).hexdigest()[:16]
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(record.with_suffix(".lock"), timeout=_LOCK_TIMEOUT, mode=0o600):
            # Several: containers may share the home directory and the name of the host, and not the temporary one.
            known = [Path(line) for line in record.read_text().splitlines()] if record.exists() else []
            for base in known:
                if base.parent == temporary and is_private(base):
                    return base
            base = Path(tempfile.mkdtemp(prefix=f"gpu-ckpt-{os.geteuid()}-", dir=temporary))
            lines = "".join(f"{path}\n" for path in [*known[-_KNOWN:], base])
            write_atomically(record, lines, durable=False)
            return base
    except OSError:  # no home directory, or a full one
        base = temporary / f"gpu-ckpt-{os.geteuid()}"
        return base if is_private(base) or not os.path.lexists(base) else _unremembered(temporary)


def _temporary() -> Path:
    """Return the temporary directory, or ``/tmp`` where the paths of sockets below that would be too long (unix(7))."""
    found = Path(tempfile.gettempdir())
    below = f"{found}/gpu-ckpt-{os.geteuid()}-{'x' * 8}/{'x' * 2 * _NAME_BYTES}/{'x' * _LONGEST_NAME}"
    short = Path("/tmp")  # noqa: S108 - a private directory is made there, with a name that nobody can guess
    is_too_long = len(os.fsencode(below)) > _MOST_BYTES
    return short if is_too_long and os.access(short, os.W_OK | os.X_OK) else found


@functools.cache
def _unremembered(temporary: Path) -> Path:
    """Make a directory for this process alone: kernels in it end with their server, unless they sleep."""
    return Path(tempfile.mkdtemp(prefix=f"gpu-ckpt-{os.geteuid()}-", dir=temporary))


def is_private(base: Path) -> bool:
    """Return whether ``base`` is a directory that belongs to this user alone."""
    try:
        require_private(base)
    except (OSError, CapsuleError):
        return False
    return True


def require_private(base: Path) -> None:
    """Raise `CapsuleError` for a base that is not the user's alone: it may lie in a directory that all can write to."""
    facts = base.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        hint = "Remove it, or set another runtime directory (GpuCkptProvisioner.runtime_base)."
        raise CapsuleError(f"{base} is not a directory that belongs to this user alone.", hint=hint)


def make_runtime_dir(base: Path, name: str = "") -> Path:
    """Make and return the 0700 directory of a kernel, with a fresh name if it has none.  Raises `CapsuleError`."""
    directory = base / (name or secrets.token_hex(_NAME_BYTES))
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        require_private(base)
        directory.mkdir(mode=0o700, exist_ok=bool(name))
    except OSError as error:
        raise RuntimeDirectory(f"{directory} cannot be made: {error.strerror}.") from error
    return directory


def short_socket_path() -> Path | None:
    """Return a path of at most `SHORT` bytes for the sockets of a kernel, which add ``-`` and a digit to it.

    Its directory is made here and stays empty: in each capsule the kernel's runtime directory is mounted over it.  The
    name is the kernel's own, for the capsules share the list of unix sockets.  None where no directory is short enough.
    """
    uid = os.geteuid()
    # Of the last two, because nothing is written there: the path of the temporary directory may be long.
    choices = [Path(parent) / f"gc-{uid}" for parent in ("/run", tempfile.gettempdir(), "/tmp")]  # noqa: S108
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        choices.insert(0, Path(runtime) / "gc")
    for directory in choices:
        left = SHORT - len(os.fsencode(f"{directory}/-0"))
        if left < _FEWEST or not directory.is_absolute():
            continue
        with contextlib.suppress(OSError, CapsuleError):
            directory.mkdir(mode=0o700, exist_ok=True)
            require_private(directory)
            return directory / "".join(secrets.choice(_LETTERS) for _ in range(min(left, 8)))
    return None


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Raise `RuntimeDirectory` where the body cannot write to a kernel's directory."""
    try:
        yield
    except OSError as error:
        raise RuntimeDirectory(f"{directory} cannot be written: {error.strerror}.") from error
