"""Going back to a save point: whether it can be done, and the files that differ from what they were.

The present state is saved first, as a save point in which the kernel sleeps until it is back: whatever happens in
between, the next wake brings that state.  Files that are replaced meanwhile are noted beside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
from ..node import databases
from ..node.facts import same_file
from ..node.match import require
from ..node.mismatch import Mismatch
from ..process import sqlite_wal
from ..units import size
from . import compatibility, failures
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


def check(kernel: KernelState, point: Image, files: FilesChoice, gpu_map: Mapping[str, str] | None = None) -> list[str]:
    """Check that a kernel can go back, which is not disturbed; return the files that are to be put back.

    Reads only: without the kernel's lock a dump may be under way, and a branch of the point be restored.  Raises as a
    wake does, `FilesDiffer` for files without a choice.
    """
    engine = kernel.engine
    _require_known(point, files)
    if engine.store.free() < (needed := shared_chunks.divided_bytes(point)):
        message = f"Going back needs {size(needed)} in the image directory for a moment."
        raise NoSpace(message, left=failures.what_is_left(kernel), needed=needed)

    own = kernel.point_lease  # of a request before, to go back to the same one
    with contextlib.nullcontext() if own is not None and own.path == point.path else point.lease(MOMENT):
        engine.store.begin_check(point).cancel(wait_for_end=True)  # the rest is verified as it is read
        aside = links.set_aside(point.manifest)
        manifest = _with_links_aside(point.manifest, aside)

        def compare(accept: bool) -> list[Mismatch]:
            found = compatibility.mismatches(
                manifest,
                engine.store,
                engine.gpus,
                engine.criu_version,
                accept_changed_files=accept,
                gpu_map=gpu_map,
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
    chosen = {path: files.get(path) if isinstance(files, Mapping) else files for path in differing}
    then = sorted(
        path
        for path in differing
        if path in kept and kept[path].kept and (chosen[path] == THEN or kept_files.is_memory(path))
    )
    now = {path for path in differing if chosen[path] == NOW and path not in then}
    asked = {path for path in differing if insist and not (path in then and kept_files.is_memory(path))}
    not_then = {path: _why_not_then(path, image, kept.get(path)) for path in asked}
    accepting = compare(True) if differing - {*then} or any(not_then.get(path) for path in then) else []
    if insist:
        not_now = {
            each.path: f"wanted {each.wanted}, found {each.found}"
            for each in accepting
            if each.field in _FILES and each.hard
        }
        choices = [
            FileChoices(path, aside.get(path, path), kept.get(path), chosen[path], why, not_now.get(path, ""))
            for path, why in sorted(not_then.items())
        ]
        if open_ := [each for each in choices if not each.is_settled]:
            raise _differ(open_, image)
    settled = {*then, *now}
    left = [each for each in found if each.field not in _FILES or each.path not in settled]
    return left + [each for each in accepting if each.field in _FILES and each.path in now], then


@dataclass(frozen=True)
class FileChoices:
    """The choices for a file that is not as it was: by ``chosen``, or which there are.

    ``at``: where it is now.  ``not_then``, ``not_now``: why it cannot be put back as it was, or be used as it is.
    """

    path: str
    at: str
    kept: KeptFile | None
    chosen: str | None
    not_then: str
    not_now: str

    @property
    def choices(self) -> list[str]:
        """The choices that can be done."""
        return [THEN] * (not self.not_then) + [NOW] * (not self.not_now)

    @property
    def is_settled(self) -> bool:
        """Return whether one that can be done is chosen."""
        return self.chosen in self.choices

    def as_dict(self) -> dict[str, Any]:
        """Return the file as JSON-serialisable data, with its size and time then and now."""
        try:
            facts = os.lstat(self.at)
            now = {"bytes": facts.st_size, "mtime": facts.st_mtime}
        except OSError:
            now = None
        then = {"bytes": self.kept.bytes, "mtime": self.kept.mtime / 1e9} if self.kept is not None else None
        return {"path": self.path, "then": then, "now": now, "choices": self.choices}


def _why_not_then(path: str, image: Image, file: KeptFile | None) -> str:
    """Return why a file cannot be put back as it was at a save point; empty if it can be."""
    if file is not None and file.kept:
        return kept_files.obstacle(path, file, image.path)
    was = image.manifest.fingerprint.get("files", {}).get(path, {})
    if stat.S_ISDIR(was.get("mode") or 0):
        why = "it is a directory"
    elif was.get("code"):
        why = "of program code it keeps the smallest files, up to `save_point_code_bytes` and a quarter of what disk "
        why += "and quota have left, and none if it is encrypted"
    elif file is None and not was.get("writes"):
        why = "it was only read, and only small files are copied then"
    elif file is not None and not file.mode & stat.S_IRUSR:
        why = "its owner may not read it"
    else:
        why = "it was too large (`save_point_file_bytes`), or the disk was full"
    return f"the save point has no copy of it, as {why}"


def _differ(files: list[FileChoices], image: Image) -> FilesDiffer:
    """Return the error about files without a choice that can be done, with those that can."""
    details = [each.as_dict() for each in files]
    not_then = [each for each in files if each.chosen == THEN]
    refused = not_then or [each for each in files if each.chosen == NOW]
    if refused:
        first, more = refused[0], f" (and {len(refused) - 1} more)" if refused[1:] else ""
        message = f"{first.path}{more} cannot be put back as it was then: {first.not_then}."
        if not not_then:
            message = f"{first.path}{more} cannot be used as it is now: {first.not_now}."
    else:
        message = f"Files are not as they were at the save point: {_listed([each.path for each in files], ', ')}."
    return FilesDiffer(message, hint=_hint(files, refused, image), files=details)


def _hint(files: list[FileChoices], refused: list[FileChoices], image: Image) -> str:
    """Return what the user can do about ``files``; ``refused``: those whose choice cannot be done."""
    able, stuck = [each for each in files if each.choices], [each for each in files if not each.choices]
    sentences = []
    if others := [each for each in refused if each.choices]:
        (choice,) = others[0].choices
        does = "leaves it as it is" if choice == NOW else "replaces it"
        option = f"--files {shlex.quote(f'{others[0].path}={choice}')}"
        sentences.append(
            f"Choose `{choice}` for such a file by its path (`{option}`), which {does}; or put it back as it was, "
            "and try again."
        )
    elif able and not refused:
        sentences.append(_hint_of_choices(able))
    if stuck:
        used = image.manifest.fingerprint.get("files", {})
        paths = _listed([each.path for each in stuck], ", ")
        is_code = any(used.get(each.path, {}).get("code") for each in stuck)
        how = " (program code: install that version again)" if is_code else ""
        sentences.append(f"Put {paths} back as it was{how}, and try again: {stuck[0].not_then}.")
    return " ".join(sentences)


def _hint_of_choices(files: list[FileChoices]) -> str:
    """Return how a user chooses for files of which each has a choice, none made."""
    kinds = {tuple(each.choices) for each in files}
    if kinds == {(THEN, NOW)}:
        return FilesDiffer.default_hint
    if kinds == {(THEN,)}:
        return "There is one choice: as it was then, which replaces it (`--files then`)."
    if kinds == {(NOW,)}:
        return "There is one choice: as it is now (`--files now`)."
    each_one = _listed([f"{each.path}: {' or '.join(each.choices)}" for each in files], "; ")
    return f"Choose for each (`--files PATH=then PATH=now`): {each_one}."


def _listed(texts: list[str], separator: str) -> str:
    return separator.join(texts[:3]) + (f" and {len(texts) - 3} more" if texts[3:] else "")


def put_files_back(image: Image, paths: Iterable[str], files: Readable, present: Image | None) -> None:
    """Replace files by those that a save point has kept; ``present``: has noted which, for its own wake.

    A directory that is gone is made again, for the user alone: of directories nothing is kept; one of program code for
    those who may read that.  Raises `MissingFile`, `ImageDamaged`, `StoreUnwritable`.
    """
    kept, paths = kept_files.of_image(image), list(paths)
    if not paths:
        return
    used = image.manifest.fingerprint.get("files", {})
    opened = {path: used[path]["inode"] for path in paths if databases.is_one(used.get(path, {}))}
    if present is not None:
        journals = [each for path in opened for each in _journals(path, kept, present)]
        with mapped_errors(present.path.parent):
            noted = json.dumps(sorted({*replaced(present), *paths, *journals}))  # also of a try before that failed
            write_atomically(layout.mark(present.path, layout.REPLACED), noted, durable=True)
        for journal in journals:
            Path(journal).unlink(missing_ok=True)
    directory = files.criu_directory / layout.KEPT
    for path in paths:
        folder = Path(path).parent
        try:
            if not folder.is_dir():
                folder.mkdir(0o700, parents=True, exist_ok=True)
                folder.chmod(kept_files.mode_of_directory(kept[path]))
            kept_files.put_back(path, kept[path], directory, database=opened.get(path, 0))
        except OSError as error:
            hint = f"Allow new files in {folder}."
            if os.path.lexists(path):
                hint = f"Allow new files in {folder}, or go back with the file as it is now (`--files now`)."
            if not folder.is_dir():
                hint = f"Make the directory {folder} again, and try again."
            raise MissingFile(f"{path} cannot be put back: {error.strerror}.", hint=hint, culprit=path) from error


def _journals(path: str, kept: Mapping[str, KeptFile], present: Image) -> list[str]:
    """Return the journals of a database's present content: SQLite would apply them to the one that is put back.

    They belong to the present state, which brings them back.  Raises `MissingFile` for one that it has no copy of.
    """
    found, now = [], kept_files.of_image(present)
    for journal in (path + suffix for suffix in (sqlite_wal.JOURNAL, sqlite_wal.LOG, sqlite_wal.INDEX)):
        if journal in kept or not os.path.lexists(journal):
            continue
        is_own = journal in now and now[journal].kept and not kept_files.differs(journal, now[journal])
        if is_own:
            found.append(journal)
        elif not journal.endswith(sqlite_wal.INDEX) and Path(journal).stat().st_size:  # else it says nothing
            hint = "Another program may be in a transaction: try again when it has ended."
            message = f"{path} cannot be put back: {journal} belongs to its present content, and is not the kernel's."
            raise MissingFile(message, hint=hint, culprit=journal)
    return found


def put_missing_files_back(store: Store, image: Image) -> None:
    """Put the kept files of an image back that are not there, as a temporary file that another kernel has removed.

    Raises as `put_files_back` and `Store.readable`.
    """
    missing = [path for path, file in kept_files.of_image(image).items() if file.kept and not os.path.lexists(path)]
    if missing:
        with store.readable(image) as files:
            put_files_back(image, missing, files, None)


def replaced(image: Image) -> dict[str, str]:
    """Return the choice for files that were replaced since the save point ``image``, in which the kernel sleeps."""
    try:
        paths = json.loads(layout.mark(image.path, layout.REPLACED).read_text())
    except (OSError, ValueError):
        return {}
    return {str(path): THEN for path in paths} if isinstance(paths, list) else {}


def put_code_back(store: Store, point: Image, asleep: Image, then: Iterable[str]) -> None:
    """Put program code back from a save point that the image ``asleep`` needs, too: else it could not be woken.

    Only where that is all that it needs, and is of ``then``, what is to be put back in any case.  Nothing keeps what is
    replaced: no state of the kernel has used it.  Raises as `put_missing_files_back`.
    """
    found = compatibility.file_mismatches(asleep.manifest, store, accept_changed_files=True)
    needed = {each.path for each in found if each.hard}
    of_point, own = (image.manifest.fingerprint.get("files", {}) for image in (point, asleep))
    same = {path for path in {*then} & own.keys() & of_point.keys() if same_file(own[path], of_point[path])}
    if needed and needed <= same:
        with store.readable(point) as files:
            put_files_back(point, sorted(needed), files, None)


def is_covered(store: Store, present: Image, then: Iterable[str]) -> bool:
    """Return whether the image that a kernel sleeps in has, or can be given, the files ``then`` as they are now.

    They are to be replaced; those that are not there need not be kept.
    """
    there = [path for path in then if os.path.lexists(path)]
    if present.is_save_point:
        kept = kept_files.of_image(present)
        return all(path in kept and kept[path].kept and not kept_files.differs(path, kept[path]) for path in there)
    if not there or present.manifest.encryption is not None:
        return not there
    changed = compatibility.file_mismatches(present.manifest, store, accept_changed_files=False)
    return {each.path for each in changed}.isdisjoint(there)


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
