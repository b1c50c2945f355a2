"""Where things lie: the directory of the images, and the short-pathed directory of a kernel's sockets."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import tempfile
from pathlib import Path

from jupyter_core.paths import jupyter_data_dir

from ..errors import CapsuleError, RuntimeDirectory
from ..image.directory import VARIABLE


def default_image_dir() -> Path:
    """``gpu-ckpt/images`` below Jupyter's data directory, or ``$JUPYTER_GPU_CKPT_IMAGES``."""
    override = os.environ.get(VARIABLE)
    return Path(override) if override else Path(jupyter_data_dir()) / "gpu-ckpt" / "images"


def default_archive_url() -> str:
    """``$JUPYTER_GPU_CKPT_ARCHIVE``; empty, no cold tier, without it."""
    return os.environ.get("JUPYTER_GPU_CKPT_ARCHIVE", "")


def default_runtime_base() -> Path:
    """``$XDG_RUNTIME_DIR/gpu-ckpt`` where the session has one, else a directory per user in the temporary directory.

    Short on purpose: the path of a unix socket may have 107 bytes, and a kernel's sockets keep their paths for life.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "gpu-ckpt"
    return Path(tempfile.gettempdir()) / f"gpu-ckpt-{os.geteuid()}"


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
