"""The command that removes the package and its files: uninstall."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_config_path, jupyter_path
from traitlets import Bool

from ..errors import StateError, StoreUnwritable
from ..files.atomic import write_atomically
from ..image import layout
from ..image.keys import default_key_dir
from ..image.store import Store
from ..kernel.agent_injection import PROVISIONER
from ..kernel.directories import is_private
from ..kernel.registry import kernels, reap
from ..paths import data_directory
from ..units import size
from .command import ImageCommand, Result

PACKAGE = "jupyter_gpu_ckpt"
#: Words by which a configuration names this package or its classes.
_OURS = re.compile(r"gpu-ckpt-provisioner|jupyter_gpu_ckpt|GpuCkpt")
#: Files of ours beside the images: drafts, marks and locks of images, caches, locks.
_BESIDE_IMAGES = re.compile(
    rf"{re.escape(layout.DRAFT)}.*|\.\d{{8}}T\d{{6}}-.*|{re.escape(layout.INCOMING)}|\.hashes\.json.*|\.(quota|cold)\.lock"
)
#: Names of directories of sockets that `kernel.directories` chooses; one that is configured may have other files.
_BASE = re.compile(rf"gpu-ckpt(-{os.geteuid()}(-.*)?)?")
#: Seconds for pip.
_PIP_SECONDS = 300.0


class UninstallCommand(ImageCommand):
    description = (
        "Remove this package, and everything that it has written for you: CRIU, keys, sessions, sockets, and the "
        "provisioner in your kernelspecs. Images are kept, with the keys that open them, unless --images is given. "
        "Nothing is done while a kernel runs."
    )
    arguments = ()
    examples = """
    jupyter gpu-ckpt uninstall --dry-run
    jupyter gpu-ckpt uninstall
    jupyter gpu-ckpt uninstall --images
    """

    images = Bool(False, help="Delete all images, too, also the only copies of sleeping kernels.").tag(option=True)
    dry_run = Bool(False, help="Only say what would be removed.").tag(option=True)

    def run(self) -> Result:
        bases = {Path(self.configured.runtime_base), *_remembered_bases()}
        _require_no_kernel(bases)
        store = self.store()
        images = [image.path for image in store.images()] + [store.root / id for id in store.damaged()]
        keep = images and not self.images
        kept = [store.root, default_key_dir()] if keep else []
        bytes_kept = sum(file.stat().st_size for path in images for file in path.rglob("*") if file.is_file())
        doomed = [*_written(bases, store.root, kept)]
        specs = [*_kernelspecs()]
        document: dict[str, Any] = {
            "removed": [str(path) for path in doomed],
            "kernelspecs": [str(path) for path in specs],
            "package": "",
            "images": {"directory": str(store.root), "count": len(images), "bytes": bytes_kept, "kept": bool(keep)},
            "archive": str(self.config.get("GpuCkptProvisioner", {}).get("archive_url", "") or ""),
            "configuration": [str(path) for path in _configuration()],
            "dry_run": self.dry_run,
        }
        if not self.dry_run:
            if not keep:
                _remove_images(store)
            for path in doomed:
                if path in bases and not _BASE.fullmatch(path.name):
                    _clear_base(path)
                else:
                    _remove(path)
            for spec in specs:
                _clear_kernelspec(spec)
            document["package"] = uninstall_package()
        return document, 0

    def show(self, document: dict[str, Any]) -> None:
        removed = "Would be removed" if document["dry_run"] else "Removed"
        for path in document["removed"]:
            self.terminal.line(f"{removed}: {path}")
        for path in document["kernelspecs"]:
            self.terminal.line(f"{removed}: the provisioner in {path}")
        self.terminal.line(f"{removed}: the package {PACKAGE}" if not document["package"] else document["package"])
        images = document["images"]
        if images["kept"]:
            self.terminal.line(
                f"Kept: {images['count']} images, {size(images['bytes'])}, in {images['directory']}, and their keys in "
                f"{default_key_dir()}. Only this package can wake them; --images deletes them."
            )
        if document["archive"]:
            self.terminal.line(f"Kept: archived images at {document['archive']}.")
        for path in document["configuration"]:
            self.terminal.line(f"Edit this file, which still names the package: {path}")


def _require_no_kernel(bases: Iterable[Path]) -> None:
    found = [kernel for base in bases for kernel in kernels(base)]
    if found:
        ids = ", ".join(str(kernel.get("kernel_id")) for kernel in found)
        raise StateError(
            f"Kernels are in use: {ids}.",
            hint="Stop the Jupyter servers first; they checkpoint their kernels.",
            left="nothing was removed",
        )


def _remembered_bases() -> Iterator[Path]:
    """Yield the directories of sockets that files of this user name (`kernel.directories`)."""
    for record in data_directory("runtime").glob("*"):
        if record.suffix != layout.LOCK:
            with contextlib.suppress(OSError, UnicodeDecodeError):
                known = [Path(line) for line in record.read_text().splitlines()]
                yield from (path for path in known if _BASE.fullmatch(path.name) and is_private(path))


def _written(bases: Iterable[Path], images: Path, kept: list[Path]) -> Iterator[Path]:
    """Yield the directories and files of this user that are there, but for images and what is ``kept``."""
    data, keys = data_directory(), default_key_dir()
    temporary = tempfile.gettempdir()
    short = [Path(parent) / f"gc-{os.geteuid()}" for parent in ("/run", temporary, "/tmp")]  # noqa: S108
    short += [Path(os.environ["XDG_RUNTIME_DIR"]) / "gc"] if os.environ.get("XDG_RUNTIME_DIR") else []
    candidates = [*sorted(data.glob("*")), *([] if keys.parent == data else [keys]), *bases, *dict.fromkeys(short)]
    for path in candidates:
        if os.path.lexists(path) and path != images and path not in kept:
            yield path
    if data.is_dir() and not kept:
        yield data


def _kernelspecs() -> Iterator[Path]:
    """Yield the kernelspecs that name the provisioner and that this user may change."""
    for directory in jupyter_path("kernels"):
        for path in sorted(Path(directory).glob("*/kernel.json")):
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                found = json.loads(path.read_text())["metadata"]["kernel_provisioner"]["provisioner_name"]
                if found == PROVISIONER and os.access(path.parent, os.W_OK):
                    yield path


def _clear_kernelspec(path: Path) -> None:
    """Remove the provisioner from a kernelspec: one whose provisioner is not installed does not start.

    A template is removed: without its image its kernels would start without what makes it one.
    """
    spec = json.loads(path.read_text())
    if "template" in spec["metadata"]["kernel_provisioner"].get("config", {}):
        shutil.rmtree(path.parent)
        return
    del spec["metadata"]["kernel_provisioner"]
    write_atomically(path, json.dumps(spec, indent=1) + "\n", durable=True, mode=path.stat().st_mode & 0o777)


def _configuration() -> Iterator[Path]:
    """Yield the configuration files that name this package, but for the one that it brings itself."""
    for directory in jupyter_config_path():
        for path in sorted([*Path(directory).glob("*.*"), *Path(directory).glob("*.d/*.json")]):
            if path.suffix in (".py", ".json") and path.name != f"{PACKAGE}.json":
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    if _OURS.search(path.read_text()):
                        yield path


def _remove_images(store: Store) -> None:
    """Delete all images and what is beside them; another file in their directory stays.  Raises as `Store.remove`."""
    for image in store.images():
        store.remove(image)
    for id in store.damaged():
        store.remove_damaged(id)
    if store.root.is_dir():
        store.sweep()
        for path in store.root.iterdir():
            if _BESIDE_IMAGES.fullmatch(path.name):
                _remove(path)
        with contextlib.suppress(OSError):  # not ours alone, or its parent is the administrator's
            store.root.rmdir()


def _clear_base(base: Path) -> None:
    """Remove what is left of kernels from a directory of sockets; the directory only if it is empty then."""
    reap(base)
    with contextlib.suppress(OSError):
        base.rmdir()


def _remove(path: Path) -> None:
    """Remove a file or a directory with all that is in it.  Raises `StoreUnwritable`."""
    try:
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreUnwritable(f"{path} cannot be removed: {error.strerror}.", hint="Remove it by hand.") from error


def uninstall_package() -> str:
    """Uninstall the Python package with pip; return what is left to do, or an empty string."""
    command = [sys.executable, "-m", "pip", "uninstall", "--yes", PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return f"The package is still installed: pip could not be run ({type(error).__name__})."
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        return f"The package is still installed: pip said {lines[-1]}"
    return ""
