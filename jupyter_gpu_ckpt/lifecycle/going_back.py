"""Going back to a save point: whether it can be done, and the files that differ from what they were.

The present state is saved first, as a save point in which the kernel sleeps until it is back: whatever happens in
between, the next wake brings that state.  Files that are replaced meanwhile are noted beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import BadRequest, FilesDiffer, GpuCkptError, MissingFile, NoSpace
from ..files.atomic import write_atomically
from ..files.disk import mapped_errors
from ..image import kept_files, layout, links, save_point, shared_chunks
from ..image.completion import PATIENCE, await_abandoned
from ..image.encryption import Readable
from ..image.image import Image
from ..image.kept_files import KeptFile
from ..image.lease import MOMENT
from ..image.manifest import Manifest
from ..image.store import Store
from ..node.match import require
from ..node.mismatch import Mismatch
from ..units import size
from . import compatibility
from .context import FilesChoice, KernelState

#: Of files, and of what the present kernel may have itself, or the next steps find out.
_FILES = frozenset({"file_changed", "file_missing", "build"})
_LATER = frozenset({"device_memory", "memory", "port", "socket"})
THEN, NOW = "then", "now"


def require_choice(files: Any) -> FilesChoice:
    """Return a choice of files, by path or for all.  Raises `BadRequest` for anything else."""
    chosen = list(files.values()) if isinstance(files, dict) else [files]
    if files is not None and not all(each in (THEN, NOW) for each in chosen):
        raise BadRequest('files is "then", "now", or an object with one of them for each path.')
    choice: FilesChoice = files
    return choice


def check(kernel: KernelState, point: Image, files: FilesChoice) -> list[str]:
    """Check that a kernel can go back, which is not disturbed; return the files that are to be put back.

    Reads only: without the kernel's lock a dump may be under way, and a branch of the point be restored.  Raises as a
    wake does, `FilesDiffer` for files without a choice.
    """
    engine = kernel.engine
    _require_known(point, files)
    if engine.store.free() < (needed := shared_chunks.divided_bytes(point)):
        message = f"Going back needs {size(needed)} in the image directory for a moment."
        raise NoSpace(message, left="the kernel runs on", needed=needed)

    with point.lease(MOMENT):
        engine.store.begin_check(point).cancel(wait_for_end=True)  # the rest is verified as it is read
        aside = links.set_aside(point.manifest)
        manifest = _with_links_aside(point.manifest, aside)

        def compare(accept: bool) -> list[Mismatch]:
            found = compatibility.mismatches(
                manifest, engine.store, engine.gpus, engine.criu_version, accept_changed_files=accept
            )
            return _by_first_names([each for each in found if each.field not in _LATER], aside)

        found, then = settle(point, files, compare, insist=True, aside=aside)
    require(found, point.id)
    return then


def _with_links_aside(manifest: Manifest, aside: Mapping[str, str]) -> Manifest:
    """Return a manifest whose files are looked for where they are now (`links.set_aside`)."""
    wanted = manifest.fingerprint.get("files", {})
    fingerprint = {**manifest.fingerprint, "files": {aside.get(path, path): wanted[path] for path in wanted}}
    return dataclasses.replace(manifest, fingerprint=fingerprint)


def _by_first_names(found: Iterable[Mismatch], aside: Mapping[str, str]) -> list[Mismatch]:
    """Return mismatches of `_with_links_aside` with the names that the files have for the user."""
    names = {second: path for path, second in aside.items()}
    return [
        dataclasses.replace(each, what=names.get(each.what, each.what), path=names.get(each.path, each.path))
        for each in found
    ]


def unusable_files(store: Store, image: Image) -> list[Mismatch]:
    """Return the mismatches of files that no kernel can do without which starts from an image as from a template.

    Changed data is accepted there, and a file that is missing is put back if the image has a copy of it, or will have.
    """
    aside, kept = links.set_aside(image.manifest), kept_files.of_image(image)
    manifest = _with_links_aside(image.manifest, aside)
    found = compatibility.file_mismatches(manifest, store, accept_changed_files=True)
    hard = [each for each in _by_first_names(found, aside) if each.hard]
    return [each for each in hard if each.field != "file_missing" or not (each.path in kept and kept[each.path].kept)]


def _require_known(point: Image, files: FilesChoice) -> None:
    """Raise `BadRequest` for a choice about what is no file of the save point."""
    known = {*kept_files.of_image(point), *point.manifest.fingerprint.get("files", {})}
    if unknown := sorted({*files} - known) if isinstance(files, Mapping) else []:
        message = f"The choice names a file that the save point does not have: {unknown[0]!r}."
        raise BadRequest(message, hint="Name files by their whole paths, as FILES_DIFFER lists them.", files=unknown)


def settle(
    image: Image,
    files: FilesChoice,
    compare: Callable[[bool], list[Mismatch]],
    *,
    insist: bool,
    aside: Mapping[str, str] | None = None,
) -> tuple[list[Mismatch], list[str]]:
    """Return the mismatches that are left by a choice of files, and the files to put back.

    ``compare``: returns the mismatches, with changed files accepted or not.  ``insist``: raise `FilesDiffer` where the
    choice says nothing about a file.  ``aside``: where files are that have another name now (`links.set_aside`).
    """
    aside = aside or {}
    kept, found = kept_files.of_image(image), compare(False)
    differing = {each.path for each in found if each.field in _FILES and each.hard}
    compared = {path: file for path, file in kept.items() if file.copy or not file.stamped}
    differing |= {path for path, file in compared.items() if kept_files.differs(aside.get(path, path), file)}
    then, now, open_ = [], set(), []
    for path in sorted(differing):
        can = path in kept and kept[path].kept
        wanted = files.get(path) if isinstance(files, Mapping) else files
        if can and (wanted == THEN or kept_files.is_memory(path)):
            then.append(path)
        elif wanted == NOW:
            now.add(path)
        else:
            open_.append(path)
    accepting = compare(True) if now or open_ else []
    if open_ and insist:
        stuck = {each.path for each in accepting if each.field in _FILES and each.hard}
        without_copy = {path for path in open_ if (files.get(path) if isinstance(files, Mapping) else files) == THEN}
        located = [(path, aside.get(path, path)) for path in open_]
        described = [_described(path, at, kept.get(path), may_stay=path not in stuck) for path, at in located]
        raise _differ(described, {path: _why_not_kept(path, image, kept.get(path)) for path in sorted(without_copy)})
    settled = {*then, *now}
    left = [each for each in found if each.field not in _FILES or each.path not in settled]
    return left + [each for each in accepting if each.field in _FILES and each.path in now], then


def _described(path: str, at: str, file: KeptFile | None, *, may_stay: bool) -> dict[str, Any]:
    try:
        facts = os.lstat(at)
        now = {"bytes": facts.st_size, "mtime": facts.st_mtime}
    except OSError:
        now = None
    then = {"bytes": file.bytes, "mtime": file.mtime / 1e9} if file is not None else None
    choices = [THEN] * (file is not None and file.kept) + [NOW] * (may_stay and now is not None)
    return {"path": path, "then": then, "now": now, "choices": choices}


def _why_not_kept(path: str, image: Image, file: KeptFile | None) -> str:
    """Return why a save point has no copy of a file."""
    was = image.manifest.fingerprint.get("files", {}).get(path, {})
    if stat.S_ISDIR(was.get("mode") or 0):
        return "it is a directory"
    if was.get("code"):
        return "program code is copied on Btrfs and XFS only"
    if file is None and not was.get("writes"):
        return "it was only read, and only small files are copied then"
    if file is not None and not file.mode & stat.S_IRUSR:
        return "its owner may not read it"
    return "it was too large (`save_point_file_bytes`), or the disk was full"


def _differ(files: list[dict[str, Any]], without_copy: Mapping[str, str]) -> FilesDiffer:
    """Return the error about files without a choice.  ``without_copy``: why some cannot be as they were, as chosen."""
    if without_copy:
        path, why = next(iter(without_copy.items()))
        more = f" (and {len(without_copy) - 1} more)" if len(without_copy) > 1 else ""
        usable = all(NOW in each["choices"] for each in files if each["path"] in without_copy)
        hint = "Choose `now` for such a file, which leaves it as it is; or put it back as it was, and try again."
        hint = hint if usable else "Put it back as it was, and try again."
        message = f"{path}{more} cannot be put back as it was then: the save point has no copy of it, as {why}."
        return FilesDiffer(message, hint=hint, files=files)
    named = ", ".join(each["path"] for each in files[:3]) + (f" and {len(files) - 3} more" if files[3:] else "")
    return FilesDiffer(f"Files are not as they were at the save point: {named}.", files=files)


def put_files_back(image: Image, paths: Iterable[str], files: Readable, present: Image | None) -> None:
    """Replace files by those that a save point has kept; ``present``: has noted which, for its own wake.

    Raises `MissingFile`, `ImageDamaged`, `StoreUnwritable`.
    """
    kept, paths = kept_files.of_image(image), list(paths)
    if not paths:
        return
    if present is not None:
        with mapped_errors(present.path.parent):
            write_atomically(layout.mark(present.path, layout.REPLACED), json.dumps(paths), durable=True)
    directory = files.criu_directory / layout.KEPT
    for path in paths:
        try:
            kept_files.put_back(path, kept[path], directory)
        except OSError as error:
            folder = Path(path).parent
            hint = f"Allow new files in {folder}, or go back with the file as it is now (`--files now`)."
            if not folder.is_dir():
                hint = f"Make the directory {folder} again, and try again."
            raise MissingFile(f"{path} cannot be put back: {error.strerror}.", hint=hint, culprit=path) from error


def put_missing_files_back(store: Store, image: Image) -> None:
    """Put the kept files of an image back that are not there, as a temporary file that another kernel has removed.

    Raises as `put_files_back` and `Store.readable`.
    """
    missing = [path for path, file in kept_files.of_image(image).items() if file.kept and not os.path.lexists(path)]
    if missing:
        with store.readable(image) as files:
            for path in missing:
                with contextlib.suppress(OSError):
                    Path(path).parent.mkdir(0o700, parents=True, exist_ok=True)
            put_files_back(image, missing, files, None)


def replaced(image: Image) -> dict[str, str]:
    """Return the choice for files that were replaced since the save point ``image``, in which the kernel sleeps."""
    try:
        paths = json.loads(layout.mark(image.path, layout.REPLACED).read_text())
    except (OSError, ValueError):
        return {}
    return {str(path): THEN for path in paths} if isinstance(paths, list) else {}


def automatic_name(why: str, images: Iterable[Image], kernel_id: str) -> str:
    """Return a name that the kernel has not used, with the time (UTC)."""
    name = f"{why} {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())}"[: save_point.LONGEST - 4].strip()
    used, number = save_point.of_kernel(images, kernel_id), 1
    while (unique := name if number == 1 else f"{name} {number}") in used:
        number += 1
    return unique


def thin_out(kernel: KernelState, most: int | None = None) -> None:
    """Delete the kernel's automatic save points that are too many.  One in use is left for the next time.

    ``most``: in place of the setting; with 0 also one that is still being completed, which is waited for.
    """
    store = kernel.engine.store
    if most == 0:
        await_abandoned(store.root, PATIENCE)
    keep = kernel.settings.automatic_save_points if most is None else most
    for image in save_point.surplus(store.images(), kernel.home.kernel_id, keep):
        with contextlib.suppress(GpuCkptError):
            store.remove(image)
