"""The differences between this node and the one an image was made on: two fingerprints (`fingerprint`) compared.

A hard `Mismatch` means that the restore would fail, or that the kernel would break silently later.
"""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import gt, ne
from typing import Any

from ..errors import ChangedFile, GpuCkptError, MissingFile, NodeUnfit, PortTaken, SocketTaken
from ..terminal_text import printable
from ..units import size
from .facts import LINGERS, Facts
from .fingerprint import fingerprint, inspect_node

__all__ = ["Facts", "Mismatch", "accepted_files", "fingerprint", "inspect_node", "match", "require"]


@dataclass(frozen=True)
class Mismatch:
    """A difference.  ``field``: a stable word; ``hard``: the image cannot be restored here; ``path``: of a file."""

    field: str
    what: str
    wanted: str
    found: str
    advice: str
    hard: bool
    path: str = ""

    def __str__(self) -> str:
        return printable(f"{self.what}: wanted {self.wanted}, found {self.found}. {self.advice}")


def match(
    wanted: Facts, found: Facts, *, accept_changed_files: bool = False, gpu_map: Mapping[str, str] | None = None
) -> list[Mismatch]:
    """Return every difference that matters, the hard ones first.

    ``accept_changed_files``: a changed data file is accepted as it is now (soft).  ``gpu_map``: the GPU here for each
    one of the image; by default the same one, or else in the order of both nodes.  Only keys that ``wanted`` has are
    compared.
    """
    mismatches: list[Mismatch] = []
    for key, compare in _COMPARE.items():
        if key in wanted:
            mismatches += compare(wanted, found)
    mismatches += _files(wanted.get("files", {}), found["files"], accept_changed_files, _is_here(wanted, found))
    if wanted.get("cuda"):
        mismatches += _gpus(wanted, found, gpu_map)
    return sorted(mismatches, key=lambda mismatch: not mismatch.hard)


def _is_here(wanted: Facts, found: Facts) -> bool:
    """Return whether this is the machine that the image was made on."""
    return bool(wanted.get("machine")) and wanted.get("machine") == found.get("machine")


def accepted_files(mismatches: Iterable[Mismatch]) -> list[str]:
    """Return the changed files that a restore accepts as they are."""
    return sorted({each.path for each in mismatches if each.field == "file_changed" and not each.hard})


def require(mismatches: Sequence[Mismatch]) -> None:
    """Raise the error of the hard mismatches, if there are any, with all of them in its details."""
    hard = [mismatch for mismatch in mismatches if mismatch.hard]
    if not hard:
        return
    first = hard[0]
    more = f" (and {len(hard) - 1} more: `jupyter gpu-ckpt match` lists them)" if hard[1:] else ""
    raise _ERRORS.get(first.field, NodeUnfit)(
        f"{first.what}: wanted {first.wanted}, found {first.found}{more}.",
        hint=first.advice,
        culprit=first.path or first.what,
        mismatches=[str(mismatch) for mismatch in hard],
    )


_ERRORS: dict[str, type[GpuCkptError]] = {
    "file_changed": ChangedFile,
    "file_missing": MissingFile,
    "port": PortTaken,
    "socket": SocketTaken,
}


# -- one comparison a key

_Comparison = Callable[[Facts, Facts], Iterator[Mismatch]]


def _compared(
    field: str,
    what: str,
    differs: Callable[[Any, Any], bool],
    advice: str,
    *,
    here: str = "",
    shown: Callable[[Any], str] = str,
    wanted_form: str = "{}",
    absent: str = "none",
    hard: bool = True,
) -> _Comparison:
    """Compare one value of two fingerprints: a mismatch if it ``differs``.

    ``here``: the advice on the machine that the image was made on, if that is another one.
    """

    def compare(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
        was, now = wanted[field], found[field]
        if differs(was, now):
            before, after = wanted_form.format(shown(was) or absent), shown(now) or absent
            yield Mismatch(field, what, before, after, here if here and _is_here(wanted, found) else advice, hard)

    return compare


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def _size(count: int) -> str:
    return size(count, 2)


def _cpu(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    if missing := sorted(set(wanted["cpu"]) - set(found["cpu"])):
        advice = "The kernel has chosen code that needs them; restore it on a node with the same or a newer CPU."
        yield Mismatch("cpu", "CPU features", ", ".join(missing), "a CPU without them", advice, hard=True)


def _packages(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    for directory, versions in wanted["packages"].items():
        here = found["packages"].get(directory, {})
        different = [name for name in sorted({*versions, *here}) if versions.get(name) != here.get(name)]
        if not different:
            continue
        shown, rest = different[:5], len(different) - 5
        more = f" and {rest} more" if rest > 0 else ""
        was = ", ".join(f"{name} {versions.get(name, '(none)')}" for name in shown) + more
        now = ", ".join(here.get(name, "none") for name in shown) + more
        where = "put back the versions that it had" if _is_here(wanted, found) else "use the same one on both nodes"
        advice = f"Modules that are imported after the restore come from the environment here; {where}."
        yield Mismatch("packages", f"Python packages in {directory}", was, now, advice, False, directory)


def _mounts(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    advice = "Files below it are meant to be the same ones; mount it here."
    for point, kind in wanted["mounts"].items():
        if (here := found["mounts"].get(point, "")) != kind:
            yield Mismatch("mount", f"Mount {point}", kind, here or "nothing mounted there", advice, False, point)


def _ports(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    for port in found["ports"]:
        if problem := port["problem"]:
            advice = "End the process that uses it, then try again."
            if problem == LINGERS:
                advice = "Wait a minute, then try again."
            what = f"Port {port['number']} on {port['address']}"
            yield Mismatch("port", what, "free: the kernel listens there", problem, advice, hard=True)


def _sockets(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    advice = "End the process that listens there, remove the file, then try again."
    for socket in found["sockets"]:
        if problem := socket["problem"]:
            path = socket["path"]
            yield Mismatch("socket", f"Unix socket {path}", "the kernel's own, or nothing", problem, advice, True, path)


_OR_RESTART = "If that cannot be done, restart the kernel, which loses its variables."
_CODE = f"The kernel runs this program code: put back the version that it was (reinstall it). {_OR_RESTART}"

_COMPARE: dict[str, _Comparison] = {
    "architecture": _compared("architecture", "CPU architecture", ne, "Restore it on a node of that architecture."),
    "cpu": _cpu,
    "kernel": _compared(
        "kernel",
        "Linux",
        lambda was, now: _version(now)[:2] < _version(was)[:2],
        "The saved state may need what an older Linux does not have; update this node.",
        wanted_form="{} or newer",
    ),
    "criu": _compared(
        "criu",
        "CRIU",
        lambda was, now: _version(now) < _version(was),
        "Run `jupyter gpu-ckpt install-criu` on this node.",
        wanted_form="{} or newer",
    ),
    "glibc": _compared(
        "glibc",
        "C library (glibc)",
        ne,
        "The kernel has the old one mapped; use the same operating system image on both nodes.",
        here=f"The kernel has the old one mapped; put that version back. {_OR_RESTART}",
        absent="another one",
    ),
    "packages": _packages,
    "mounts": _mounts,
    "ports": _ports,
    "sockets": _sockets,
    "memory": _compared(
        "memory", "Free host memory", gt, "Free some on this node, or checkpoint another kernel.", shown=_size
    ),
    "disk": _compared(
        "disk",
        "Free disk space in the image directory",
        gt,
        "The kernel can come back, but its next checkpoint will not fit; free some.",
        shown=_size,
        hard=False,
    ),
}

#: The same of an image that needs GPUs.
_COMPARE_CUDA: tuple[_Comparison, ...] = (
    _compared(
        "driver", "NVIDIA driver", ne, "The kernel has the driver's library mapped; install the same version here."
    ),
    _compared("cuda", "CUDA version of the driver", ne, "It comes with the driver; install the same version here."),
)


#: The names of ``stat(2)`` for the kinds of files.
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def _files(
    wanted: Mapping[str, Facts], found: Mapping[str, Facts | None], accept: bool, here: bool
) -> Iterator[Mismatch]:
    """``here``: on the machine that the image was made on."""
    for path, was in wanted.items():
        now = found[path]
        if now is None:
            before = f"{size(was['size'])}, the kernel {'has it open' if was['open'] else 'uses it'}"
            yield Mismatch("file_missing", path, before, "no file", "Put it back.", True, path)
        elif _kind(was) and _kind(now) != _kind(was):
            before, after = (_KINDS.get(_kind(file), "another kind of file") for file in (was, now))
            yield Mismatch("file_changed", path, before, after, "Put it back.", True, path)
        elif now.get("same"):
            continue
        elif was["build_id"] and now["build_id"] != was["build_id"]:
            before, after = f"build-id {was['build_id'][:12]}", f"build-id {now['build_id'][:12]}"
            field, advice = "build", "The kernel runs this program code; install the same version as on the other node."
            if here:  # installed or built anew
                field, advice = "file_changed", _CODE
            yield Mismatch(field, path, before, after if now["build_id"] else "no build-id", advice, True, path)
        else:
            yield from _changed(path, was, now, accept)
            if stat.S_ISDIR(now["mode"]):
                yield from _replaced_directory(path, was, now, accept, here)
            elif now["size"] == was["size"]:
                yield from _other_content(path, was, now, accept, here)


def _kind(file: Facts) -> int:
    return stat.S_IFMT(file["mode"] or 0)


def _replaced_directory(path: str, was: Facts, now: Facts, accept: bool, here: bool) -> Iterator[Mismatch]:
    # A device with another number may be the same one, mounted again.
    if here and "inode" in was and now["device"] == was["device"] and now["inode"] != was["inode"]:
        advice = "It was replaced: put the old one back. " + _ACCEPT
        yield Mismatch("file_changed", path, "the directory there was", "another one", advice, not accept, path)


_DELETED = "The kernel has it open under a name that was deleted; put it back as it was."
_ACCEPT = "Or accept it as it is: `jupyter gpu-ckpt match IMAGE --accept-changed-files`."


def _other_content(path: str, was: Facts, now: Facts, accept: bool, here: bool) -> Iterator[Mismatch]:
    """Compare files of the same kind, mode and size by their hashes, or where there is none, by their identities."""
    if not was["checked"] or "inode" not in was:
        return  # only appended to, or without a noted identity
    if was.get("blake3") and now.get("blake3"):
        if was["blake3"] == now["blake3"]:
            return
        before, after = f"content {was['blake3'][:12]}", f"content {now['blake3'][:12]}"
    elif was["build_id"] or (was["inode"], was["mtime"]) == (now["inode"], now["mtime"]):
        return  # nothing but its rights, names or device number has changed
    elif not here or was["device"] != now["device"]:
        return  # a copy, or the same file on a device that was mounted again: nothing but the size can be compared
    elif was["inode"] != now["inode"]:
        before, after = "the file there was", "another one"
    else:
        before, after = "as it was", "written to since"
    yield Mismatch("file_changed", path, before, after, *_judged(was, now, False, accept), path)


def _judged(was: Facts, now: Facts, mapped: bool, accept: bool) -> tuple[str, bool]:
    """Return the advice about a changed file, and whether it is hard.  ``mapped``: memory depends on its size."""
    if was.get("made"):
        return _DELETED, True
    if was.get("code"):
        return _CODE, True
    if mapped:
        return "The kernel has it mapped into its memory; put it back as it was.", True
    born = was.get("database_born")
    if born and not was["locked"] and (was.get("inode"), born) == (now["inode"], now["database_born"]):
        # Without a lock a connection takes nothing for granted: each transaction begins with the change counter.
        return "SQLite notices what others wrote into its database.", False
    if accept:
        return "The kernel continues with it as it is now.", False
    return "Put it back. " + _ACCEPT, True


def _changed(path: str, was: Facts, now: Facts, accept: bool) -> Iterator[Mismatch]:
    if was["mode"] is not None and now["mode"] != was["mode"]:
        before, after = f"mode {was['mode']:o}", f"mode {now['mode']:o}"
        advice = f"chmod {was['mode'] & 0o7777:o} {shlex.quote(path)}"
        hard = not accept or bool((now["mode"] ^ was["mode"]) & ~0o7777)
        yield Mismatch("file_changed", path, before, after, advice, hard, path)
    if stat.S_ISDIR(now["mode"]) or now["size"] == was["size"] or not (was["checked"] or was["open"]):
        return  # the size of a directory is of no importance
    # Beyond the end of a mapped file there is no memory: an access ends the process (SIGBUS).
    mapped = bool(was["build_id"] or (was["mapped"] and now["size"] < was["size"]))
    advice, hard = _judged(was, now, mapped, accept)
    if not was["checked"]:
        advice, hard = "The kernel only appends to it, and continues at its end.", False
    yield Mismatch("file_changed", path, f"{was['size']} bytes", f"{now['size']} bytes", advice, hard, path)


def _gpus(wanted: Facts, found: Facts, gpu_map: Mapping[str, str] | None) -> Iterator[Mismatch]:
    for compare in _COMPARE_CUDA:
        yield from compare(wanted, found)
    before, after = len(wanted["gpus"]), len(found["gpus"])
    if before != after:
        advice = "The driver maps every GPU of the one node to one of the other; use a node with as many."
        yield Mismatch("gpu_count", "Number of GPUs", str(before), str(after), advice, hard=True)
        return
    here = {gpu["uuid"]: gpu for gpu in found["gpus"]}
    for was, goes_to in zip(wanted["gpus"], _successors(wanted["gpus"], found["gpus"], gpu_map), strict=True):
        yield from _gpu(was, here.get(goes_to), goes_to, wanted["device_bytes"].get(was["uuid"], 0))


def _successors(wanted: Sequence[Facts], found: Sequence[Facts], gpu_map: Mapping[str, str] | None) -> list[str]:
    olds, news = [gpu["uuid"] for gpu in wanted], [gpu["uuid"] for gpu in found]
    mapping = dict(gpu_map or {})
    mapping |= {uuid: uuid for uuid in olds if uuid in news and uuid not in {*mapping, *mapping.values()}}
    unused = iter([uuid for uuid in news if uuid not in mapping.values()])
    return [mapping.get(uuid) or next(unused, "") for uuid in olds]


def _gpu(was: Facts, now: Facts | None, uuid: str, needed: int) -> Iterator[Mismatch]:
    what = f"GPU {was['uuid']}"
    if now is None:
        yield Mismatch("gpu_count", what, f"a successor ({uuid})", "no such GPU", "Name one that is here.", True)
        return
    if now["name"] != was["name"]:
        advice = "The saved state fits this model only; use a node with the same."
        yield Mismatch("gpu_model", what, was["name"], now["name"], advice, hard=True)
    if now["total"] < was["total"]:
        advice = "Use a GPU with as much memory."
        yield Mismatch("gpu_memory", what, _size(was["total"]), _size(now["total"]), advice, hard=True)
    if now["free"] < needed:
        advice = "Nothing is lost: checkpoint another kernel there, or name another GPU."
        yield Mismatch("device_memory", what, f"{_size(needed)} free", f"{_size(now['free'])} free", advice, True)
