"""Where things lie: the directory of the images, and the short-pathed directory of a kernel's sockets."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path

from filelock import FileLock

from ..errors import CapsuleError, RuntimeDirectory
from ..image.user_directory import VARIABLE
from ..paths import data_directory

#: Seconds to wait for another server that looks for the directory of sockets.
_PATIENCE = 10.0
#: How many directories of sockets are remembered for a host.
_KNOWN = 20


def default_image_dir() -> Path:
    """``gpu-ckpt/images`` below Jupyter's data directory, or ``$JUPYTER_GPU_CKPT_IMAGES``."""
    override = os.environ.get(VARIABLE)
    return Path(override) if override else data_directory("images")


def default_archive_url() -> str:
    """``$JUPYTER_GPU_CKPT_ARCHIVE``; empty, no cold tier, without it."""
    return os.environ.get("JUPYTER_GPU_CKPT_ARCHIVE", "")


def default_runtime_base() -> Path:
    """``$XDG_RUNTIME_DIR/gpu-ckpt`` where the session has one, else this user's own in the temporary directory.

    There it has a name that nobody can guess and take first; a file in Jupyter's data directory remembers it for this
    host, so that the next server finds the kernels of this one.  Short on purpose: the path of a unix socket may have
    107 bytes, and a kernel's sockets keep their paths for life.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK) and Path(runtime).stat().st_uid == os.geteuid():
        return Path(runtime) / "gpu-ckpt"
    return _remembered(data_directory("runtime"))


def _remembered(directory: Path) -> Path:
    """The directory in the temporary one that a file in ``directory`` names for this host; made where there is none.

    Where nothing can be remembered it has the name that it can be found by without, as long as nobody else has that.
    """
    place = Path(tempfile.gettempdir())
    record = directory / hashlib.sha256(f"{socket.gethostname()} {place}".encode()).hexdigest()[:16]
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with FileLock(record.with_suffix(".lock"), timeout=_PATIENCE, mode=0o600):
            # Several: containers may share the home directory and the name of the host, and not the temporary one.
            known = [Path(line) for line in record.read_text().splitlines()] if record.exists() else []
            for base in known:
                if base.parent == place and _is_private(base):
                    return base
            base = Path(tempfile.mkdtemp(prefix=f"gpu-ckpt-{os.geteuid()}-", dir=place))
            draft = record.with_suffix(".new")
            draft.touch(0o600)
            draft.write_text("".join(f"{path}\n" for path in [*known[-_KNOWN:], base]))
            draft.replace(record)
            return base
    except OSError:  # no home directory, or a full one
        base = place / f"gpu-ckpt-{os.geteuid()}"
        return base if _is_private(base) or not os.path.lexists(base) else _unremembered(place)


@functools.cache
def _unremembered(place: Path) -> Path:
    """This process's own: kernels in it end with their server, unless they sleep."""
    return Path(tempfile.mkdtemp(prefix=f"gpu-ckpt-{os.geteuid()}-", dir=place))


def _is_private(base: Path) -> bool:
    try:
        require_private(base)
    except (OSError, CapsuleError):
        return False
    return True


def require_private(base: Path) -> None:
    """The base may lie in a directory everybody can write to: what is not ours alone is refused with `CapsuleError`."""
    facts = base.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise CapsuleError(
            f"{base} is not a directory that belongs to this user alone.",
            hint="Remove it, or set another runtime directory (GpuCkptProvisioner.runtime_base).",
        )


def free_ports(count: int) -> list[int]:
    """TCP ports of the loopback address that nobody listens on at the moment, each another one."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def make_runtime_dir(base: Path, name: str = "") -> Path:
    """The 0700 directory of one kernel: a fresh one, or that of an adopted kernel.  Raises `CapsuleError`."""
    directory = base / (name or secrets.token_hex(6))
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        require_private(base)
        directory.mkdir(mode=0o700, exist_ok=bool(name))
    except OSError as error:
        raise RuntimeDirectory(f"{directory} cannot be made: {error.strerror}.") from error
    return directory
