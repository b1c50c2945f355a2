"""An ordinary user to run programs as: a new one when the tests run as root, else the present user."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jupyter_gpu_ckpt
from jupyter_gpu_ckpt.subprocesses import CLEAN_ENVIRONMENT, Completed, run

_PACKAGE = Path(jupyter_gpu_ckpt.__file__).resolve().parent


@dataclass(frozen=True)
class OrdinaryUser:
    """A user without privileges, with a home of its own and a readable copy of this package."""

    uid: int
    home: Path
    python: str
    _prefix: tuple[str, ...]

    def run(
        self, argv: Sequence[str | os.PathLike[str]], *, timeout_s: float, env: Mapping[str, str] | None = None
    ) -> Completed:
        """Run ``argv`` as this user, in its home, with a clean environment and ``env``."""
        own = {"HOME": str(self.home), "PYTHONPATH": str(self.home / "package"), "PYTHONDONTWRITEBYTECODE": "1"}
        environment = CLEAN_ENVIRONMENT | own | dict(env or {})
        return run([*self._prefix, *argv], timeout_s=timeout_s, env=environment, cwd=self.home)


@contextmanager
def ordinary_user() -> Iterator[OrdinaryUser]:
    """Yield an ordinary user, and remove its home afterwards.

    Raises `LookupError` if there is no Python >= 3.10 that it may execute, `OSError` if no user can be made.
    """
    home = Path(tempfile.mkdtemp(prefix="gpu-ckpt-user-"))
    name = ""
    try:
        shutil.copytree(_PACKAGE, home / "package" / _PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        prefix: tuple[str, ...] = ()
        uid = os.getuid()
        if uid == 0:
            name = f"gpuckpt-{secrets.token_hex(4)}"
            made = run(["useradd", "--no-create-home", "--home-dir", home, name], timeout_s=30)
            if made.status != 0:
                name = ""
                raise OSError(f"useradd: {made.tail()}")
            entry = pwd.getpwnam(name)
            uid = entry.pw_uid
            prefix = ("setpriv", f"--reuid={uid}", f"--regid={entry.pw_gid}", "--clear-groups", "--")
            for path in (home, *home.rglob("*")):
                os.chown(path, uid, entry.pw_gid)
        yield OrdinaryUser(uid, home, _python_for(prefix), prefix)
    finally:
        if name:
            run(["userdel", name], timeout_s=30)
        shutil.rmtree(home, ignore_errors=True)


def _python_for(prefix: Sequence[str]) -> str:
    """Return a Python that the user may execute: ours may lie in root's home."""
    new_enough = "import sys; sys.exit(sys.version_info < (3, 10))"
    # through a shell: setpriv still has root's capabilities when it searches for the program
    trial = [*prefix, "sh", "-c", 'exec "$0" -c "$1"']
    for python in (sys.executable, shutil.which("python3", path=CLEAN_ENVIRONMENT["PATH"])):
        if python and run([*trial, python, new_enough], timeout_s=30).status == 0:
            return python
    raise LookupError("an ordinary user may execute no Python >= 3.10 here")
