"""The file of the root process's program (`root_process`): installed for new kernels, and carried by their images.

An image names it among the files that are mapped, and its content must be the same at the wake.  So it is a copy that
is named by its content, which another release does not replace; and an image has the file, too, which a wake puts back
where it is missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

from ..files.atomic import write_atomically
from ..paths import data_directory

#: Beside CRIU's own files in an image: a line with the program's path, and the program.
IN_IMAGE = "root-program"

_BUILT = Path(__file__).with_name("native")


def install() -> Path | None:
    """Return the path of the program's copy; None where the package was built without it, or it cannot be written."""
    with contextlib.suppress(OSError):
        if (program := built()) is not None:
            content = program.read_bytes()
            path = data_directory("native") / _name(content)
            _put(path, content)
            return path
    return None


def built() -> Path | None:
    """Return the program as the package was built with it; None where it was built without a C compiler."""
    return min(_BUILT.glob("_root*.so"), default=None)


def save(process: int, directory: Path) -> None:
    """Write the program that ``process`` runs to a dump in ``directory``.  Raises `OSError`."""
    program = f"/proc/{process}/exe"
    path = os.readlink(program).removesuffix(" (deleted)")
    with open(program, "rb") as file:
        write_atomically(directory / IN_IMAGE, os.fsencode(path) + b"\n" + file.read(), durable=False)


def put_back(directory: Path) -> None:
    """Put the program of a dump, if it has one, where it was.  Raises `OSError`."""
    if (found := _read(directory)) is not None:
        _put(*found)


def path_of(directory: Path) -> str:
    """Return the path of the program in a dump; empty where there is none."""
    return str(found[0]) if (found := _read(directory)) is not None else ""


def _read(directory: Path) -> tuple[Path, bytes] | None:
    try:
        name, _, content = (directory / IN_IMAGE).read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    path = Path(os.fsdecode(name))
    return (path, content) if path.name == _name(content) else None  # no other file is ever written


def _name(content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()[:32]}-root"


def _put(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(path, content, durable=False, mode=0o700)
