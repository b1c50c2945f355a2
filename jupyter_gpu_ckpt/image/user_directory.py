"""The directory of a user's images: 0700, the user's own, made on first use.

Where an administrator names one directory for all users, each has a directory of the name of the user's uid below it.
Such a directory belongs to root and is sticky (1777, as ``/tmp``), so that nobody can take another's away; or root has
made the users' own ones below it.
"""

from __future__ import annotations

import errno
import os
import secrets
import shlex
import stat
from pathlib import Path

from ..errors import StoreShared, StoreUnsuitable
from ..files.disk import mapped_errors

#: The environment variable that names the image directory.
VARIABLE = "JUPYTER_GPU_CKPT_IMAGES"

#: Errors of link(2) on a file system that has no hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def of_user(named: Path) -> Path:
    """Return the directory of this user's images for the configured directory ``named``; nothing is made."""
    try:
        facts = named.stat()
    except OSError:
        return named
    shared = facts.st_uid != os.geteuid() or facts.st_mode & stat.S_ISVTX
    return named / str(os.geteuid()) if shared and stat.S_ISDIR(facts.st_mode) else named


def prepare(named: Path, own: Path | None = None) -> None:
    """Make this user's directory, and test that images can be written and claimed there.

    ``own``: see `obstacle`.  Raises `StoreShared` for a directory that others can enter or remove, whose mode is not
    ours to change; `StoreUnsuitable` for a file system without hard links; `StoreUnwritable`, `NoSpace`.
    """
    own = own or of_user(named)
    with mapped_errors(own):
        if named.exists() and not named.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "it is a file")
        if problem := obstacle(named, own):
            raise problem
        if not own.exists():
            own.mkdir(parents=True, exist_ok=True, mode=0o700)
            own.chmod(0o700)  # whatever the umask
            if problem := obstacle(named, own):  # another process was faster
                raise problem
        _require_links(own)


def obstacle(named: Path, own: Path | None = None) -> StoreShared | None:
    """Return what `prepare` would raise because others can enter or remove the directory; make nothing.

    ``own``: this user's directory, if it is known; the mode of ``named`` may have changed since.
    """
    own = own or of_user(named)
    if own != named:
        facts = named.stat()
        if facts.st_uid not in (0, os.geteuid()):
            hint = f"An administrator makes it root's: `chown root {_quoted(named)}; chmod 1777 {_quoted(named)}`."
            message = "The image directory belongs to another user, who could take your images away."
            return StoreShared(message, hint=hint, directory=str(named))
        if facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
            hint = f"An administrator makes it sticky: `chmod +t {_quoted(named)}`."
            message = "The image directory is one in which other users could take your images away."
            return StoreShared(message, hint=hint, directory=str(named))
        if not os.access(named, os.X_OK):
            hint = f"Set another. An administrator may let everybody have one below it: `chmod 1777 {_quoted(named)}`."
            message = "The image directory belongs to another user, and you may not enter it."
            return StoreShared(message, hint=hint, directory=str(named))
        if not os.path.lexists(own) and not os.access(named, os.W_OK | os.X_OK):
            made = f"install -d -m 700 -o {os.geteuid()} -g {os.getegid()} {_quoted(own)}"
            hint = f"An administrator makes yours, `{made}`, or lets everybody make one: `chmod 1777 {_quoted(named)}`."
            message = "The image directory is shared, and you may not create a directory in it."
            return StoreShared(message, hint=hint, directory=str(named))
    if not os.path.lexists(own) or is_private(own):
        return None
    if own == named:
        return StoreShared("The image directory can be entered by other users.", directory=str(own))
    hint = f"It is to be a directory of yours, 0700. If it is another's, an administrator removes {_quoted(own)}."
    return StoreShared("Your directory in the shared one is not yours alone.", hint=hint, directory=str(own))


def is_private(own: Path) -> bool:
    """Return whether only this user can enter the directory.  Raises `OSError`."""
    # In a directory that others can write to, a link may be an attack; elsewhere the user made it.
    facts = own.lstat() if own.parent.stat().st_mode & 0o022 else own.stat()
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077


def _require_links(own: Path) -> None:
    """Require hard links, by which hosts that share a directory make claims (`lease`)."""
    probe = own / f".probe-{secrets.token_hex(4)}"
    probe.touch(0o600)
    linked = probe.with_name(f"{probe.name}-linked")
    try:
        os.link(probe, linked)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        message = "The file system of the image directory has no hard links."
        raise StoreUnsuitable(message, directory=str(own)) from error
    finally:
        linked.unlink(missing_ok=True)
        probe.unlink(missing_ok=True)


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
