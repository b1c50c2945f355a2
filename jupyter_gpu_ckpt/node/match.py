"""What a node lacks of the one an image was made on: two fingerprints (`fingerprint`) compared.

One `Mismatch` for each thing that is different.  A hard one means that the restore would fail, or that the kernel would
break later without a word.
"""

from __future__ import annotations

import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ChangedFile, GpuCkptError, MissingFile, NodeUnfit, PortTaken, SocketTaken
from ..terminal_text import printable
from ..units import size
from .facts import LINGERS, Facts
from .fingerprint import fingerprint, look

__all__ = ["Facts", "Mismatch", "accepted_files", "fingerprint", "look", "match", "require"]


@dataclass(frozen=True)
class Mismatch:
    """One difference.  ``field``: a stable word for programs; ``hard``: the image is not restored here because of it.

    ``path`` is the file it is about, if it is about one.
    """

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
    """Every difference that matters, the hard ones first.

    ``accept_changed_files``: a data file that is not what it was is taken as it is now (soft).  ``gpu_map``: on which
    GPU each one of the image goes; by default on itself, or else in the order of both nodes.  A fingerprint that lacks
    a key (of an older image) is not asked about it.
    """
    mismatches: list[Mismatch] = []
    for key, compare in _COMPARE.items():
        if key in wanted:
            mismatches += compare(wanted, found)
    here = bool(wanted.get("machine")) and wanted.get("machine") == found.get("machine")
    mismatches += _files(wanted.get("files", {}), found["files"], accept_changed_files, here)
    if wanted.get("cuda"):
        mismatches += _gpus(wanted, found, gpu_map)
    return sorted(mismatches, key=lambda mismatch: not mismatch.hard)


def accepted_files(mismatches: Iterable[Mismatch]) -> list[str]:
    """The changed files that a restore is to take as they are."""
    return sorted({each.path for each in mismatches if each.field == "file_changed" and not each.hard})


def require(mismatches: Sequence[Mismatch]) -> None:
    """Raise the error of the hard mismatches, with all of them in its details: nothing was started."""
    hard = [mismatch for mismatch in mismatches if mismatch.hard]
    if not hard:
        return
    first = hard[0]
    more = f" (and {len(hard) - 1} more: `jupyter gpu-ckpt match` lists them)" if hard[1:] else ""
    kind: type[GpuCkptError] = _ERRORS.get(first.field, NodeUnfit)
    raise kind(
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


def _architecture(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    if wanted["architecture"] != found["architecture"]:
        yield Mismatch(
            "architecture",
            "CPU architecture",
            wanted["architecture"],
            found["architecture"],
            "Restore it on a node of that architecture.",
            hard=True,
        )


def _cpu(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    if missing := sorted(set(wanted["cpu"]) - set(found["cpu"])):
        yield Mismatch(
            "cpu",
            "CPU features",
            ", ".join(missing),
            "a CPU without them",
            "The kernel has chosen code that needs them; restore it on a node with the same or a newer CPU.",
            hard=True,
        )


def _kernel(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    if _version(found["kernel"])[:2] < _version(wanted["kernel"])[:2]:
        yield Mismatch(
            "kernel",
            "Linux",
            f"{wanted['kernel']} or newer",
            found["kernel"],
            "What is saved may use what an older Linux does not have; update this node.",
            hard=True,
        )


def _criu(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    if _version(found["criu"]) < _version(wanted["criu"]):
        yield Mismatch(
            "criu",
            "CRIU",
            f"{wanted['criu']} or newer",
            found["criu"],
            "Run `jupyter gpu-ckpt install-criu` on this node.",
            hard=True,
        )


def _glibc(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    if wanted["glibc"] != found["glibc"]:
        yield Mismatch(
            "glibc",
            "C library (glibc)",
            wanted["glibc"] or "another one",
            found["glibc"] or "another one",
            "The kernel has the old one mapped; use the same operating system image on both nodes.",
            hard=True,
        )


def _packages(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    for directory, versions in wanted["packages"].items():
        here = found["packages"].get(directory, {})
        different = [name for name in sorted({*versions, *here}) if versions.get(name) != here.get(name)]
        if not different:
            continue
        shown, rest = different[:5], len(different) - 5
        more = f" and {rest} more" if rest > 0 else ""
        yield Mismatch(
            "packages",
            f"Python packages in {directory}",
            ", ".join(f"{name} {versions.get(name, '(none)')}" for name in shown) + more,
            ", ".join(here.get(name, "none") for name in shown) + more,
            "What is imported after the restore comes from here; use the same environment on both nodes.",
            hard=False,
            path=directory,
        )


def _mounts(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    for point, kind in wanted["mounts"].items():
        here = found["mounts"].get(point, "")
        if here != kind:
            yield Mismatch(
                "mount",
                f"Mount {point}",
                kind,
                here or "nothing mounted there",
                "Files below it are meant to be the same ones; mount it here.",
                hard=False,
                path=point,
            )


def _ports(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    for port in found["ports"]:
        if port["problem"]:
            yield Mismatch(
                "port",
                f"Port {port['number']} on {port['address']}",
                "free: the kernel listens there",
                port["problem"],
                "Wait a minute, then try again."
                if port["problem"] == LINGERS
                else "End the process that uses it, or restore the kernel on another node.",
                hard=True,
            )


def _sockets(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    for socket in found["sockets"]:
        if socket["problem"]:
            yield Mismatch(
                "socket",
                f"Unix socket {socket['path']}",
                "the kernel's own, or nothing",
                socket["problem"],
                "End the process that listens there and remove the file, or restore the kernel on another node.",
                hard=True,
                path=socket["path"],
            )


def _memory(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    if found["memory"] < wanted["memory"]:
        yield Mismatch(
            "memory",
            "Free host memory",
            size(wanted["memory"], 2),
            size(found["memory"], 2),
            "Free some on this node, or checkpoint another kernel.",
            hard=True,
        )


def _disk(wanted: Facts, found: Facts) -> Iterator[Mismatch]:
    if found["disk"] < wanted["disk"]:
        yield Mismatch(
            "disk",
            "Free disk space in the image directory",
            size(wanted["disk"], 2),
            size(found["disk"], 2),
            "The kernel can come back, but its next checkpoint will not fit; free some.",
            hard=False,
        )


_COMPARE: dict[str, Callable[[Facts, Facts], Iterator[Mismatch]]] = {
    "architecture": _architecture,
    "cpu": _cpu,
    "kernel": _kernel,
    "criu": _criu,
    "glibc": _glibc,
    "packages": _packages,
    "mounts": _mounts,
    "ports": _ports,
    "sockets": _sockets,
    "memory": _memory,
    "disk": _disk,
}


#: What ``stat(2)`` calls the kinds of files.
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
            use = "has it open" if was["open"] else "uses it"
            yield Mismatch(
                "file_missing", path, f"{size(was['size'])}, the kernel {use}", "no file", "Put it back.", True, path
            )
        elif _kind(was) and _kind(now) != _kind(was):
            yield Mismatch(
                "file_changed",
                path,
                _KINDS.get(_kind(was), "another kind of file"),
                _KINDS.get(_kind(now), "another kind of file"),
                "Put it back.",
                hard=True,
                path=path,
            )
        elif now.get("same"):
            continue
        elif was["build_id"] and now["build_id"] != was["build_id"]:
            yield Mismatch(
                "build",
                path,
                f"build-id {was['build_id'][:12]}",
                f"build-id {now['build_id'][:12]}" if now["build_id"] else "no build-id",
                "The kernel has this program code mapped; install the same version as on the other node.",
                hard=True,
                path=path,
            )
        else:
            yield from _changed(path, was, now, accept)
            if stat.S_ISDIR(now["mode"]):
                yield from _replaced_directory(path, was, now, accept, here)
            elif now["size"] == was["size"]:
                yield from _other_content(path, was, now, accept, here)


def _kind(file: Facts) -> int:
    return stat.S_IFMT(file["mode"] or 0)


def _replaced_directory(path: str, was: Facts, now: Facts, accept: bool, here: bool) -> Iterator[Mismatch]:
    # Of a device with another number nothing is known: it may be the same one, mounted again.
    if here and "inode" in was and now["device"] == was["device"] and now["inode"] != was["inode"]:
        advice = "It was replaced: put the old one back. " + _ACCEPT
        yield Mismatch(
            "file_changed", path, "the directory there was", "another one", advice, hard=not accept, path=path
        )


_DELETED = "The kernel has it open under a name that was deleted; put it back as it was."
_ACCEPT = "Or have it taken as it is: `jupyter gpu-ckpt match IMAGE --accept-changed-files`."


def _other_content(path: str, was: Facts, now: Facts, accept: bool, here: bool) -> Iterator[Mismatch]:
    """What a file of the same kind, mode and size is told by: its hash, or where there is none, what else is known."""
    if not was["checked"] or "inode" not in was:
        return  # only appended to, or of an image that notes nothing more
    if was.get("blake3") and now.get("blake3"):
        if was["blake3"] == now["blake3"]:
            return
        before, after = f"content {was['blake3'][:12]}", f"content {now['blake3'][:12]}"
    elif _unwritten(was, now) or was["build_id"]:
        return
    elif not here or was["device"] != now["device"]:
        return  # another copy of it, or the same one on a device that was mounted again: its size is all that is known
    elif was["inode"] != now["inode"]:
        before, after = "the file there was", "another one"
    else:
        before, after = "as it was", "written to since"
    if was.get("code"):
        advice, hard = "The kernel has this program code mapped; put it back as it was.", True
    elif was.get("made"):
        advice, hard = _DELETED, True
    elif accept:
        advice, hard = "The kernel goes on with it as it is now.", False
    else:
        advice, hard = "Put it back. " + _ACCEPT, True
    yield Mismatch("file_changed", path, before, after, advice, hard, path)


def _unwritten(was: Facts, now: Facts) -> bool:
    """Whether it is the file that it was, with nothing but its rights, its names or its device's number changed."""
    return bool(was["inode"] == now["inode"] and was["mtime"] == now["mtime"])


def _changed(path: str, was: Facts, now: Facts, accept: bool) -> Iterator[Mismatch]:
    if was["mode"] is not None and now["mode"] != was["mode"]:
        yield Mismatch(
            "file_changed",
            path,
            f"mode {was['mode']:o}",
            f"mode {now['mode']:o}",
            f"chmod {was['mode'] & 0o7777:o} {shlex.quote(path)}",
            hard=not accept or bool((now["mode"] ^ was["mode"]) & ~0o7777),
            path=path,
        )
    if stat.S_ISDIR(now["mode"]) or now["size"] == was["size"] or not (was["checked"] or was["open"]):
        return  # the size of a directory says nothing
    if not was["checked"]:
        advice, hard = "The kernel only appends to it, and goes on at its end.", False
    elif was.get("made"):
        advice, hard = _DELETED, True
    elif was["build_id"] or was.get("code") or (was["mapped"] and now["size"] < was["size"]):
        # Beyond the end of a mapped file there is no memory: a touch of it ends the process (SIGBUS).
        advice, hard = "The kernel has it mapped into its memory; put it back as it was.", True
    elif accept:
        advice, hard = "The kernel goes on with it as it is now.", False
    else:
        advice = "Put it back, or have it taken as it is: `jupyter gpu-ckpt match IMAGE --accept-changed-files`."
        hard = True
    yield Mismatch("file_changed", path, f"{was['size']} bytes", f"{now['size']} bytes", advice, hard, path)


def _gpus(wanted: Facts, found: Facts, gpu_map: Mapping[str, str] | None) -> Iterator[Mismatch]:
    if wanted["driver"] != found["driver"]:
        yield Mismatch(
            "driver",
            "NVIDIA driver",
            wanted["driver"],
            found["driver"] or "none",
            "The kernel has the driver's library mapped; install the same version here.",
            hard=True,
        )
    if wanted["cuda"] != found["cuda"]:
        yield Mismatch(
            "cuda",
            "CUDA version of the driver",
            wanted["cuda"],
            found["cuda"] or "none",
            "It comes with the driver; install the same version here.",
            hard=True,
        )
    if len(wanted["gpus"]) != len(found["gpus"]):
        yield Mismatch(
            "gpu_count",
            "Number of GPUs",
            str(len(wanted["gpus"])),
            str(len(found["gpus"])),
            "The driver maps every GPU of the one node to one of the other; use a node with as many.",
            hard=True,
        )
        return
    here = {gpu["uuid"]: gpu for gpu in found["gpus"]}
    for was, goes_to in zip(wanted["gpus"], _successors(wanted["gpus"], found["gpus"], gpu_map), strict=True):
        yield from _gpu(was, here.get(goes_to), goes_to, wanted["device_bytes"].get(was["uuid"], 0))


def _successors(wanted: Sequence[Facts], found: Sequence[Facts], gpu_map: Mapping[str, str] | None) -> list[str]:
    olds, news = [gpu["uuid"] for gpu in wanted], [gpu["uuid"] for gpu in found]
    mapping = dict(gpu_map or {})
    for uuid in olds:
        if uuid not in mapping and uuid in news and uuid not in mapping.values():
            mapping[uuid] = uuid
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
        yield Mismatch("gpu_memory", what, size(was["total"], 2), size(now["total"], 2), advice, hard=True)
    if now["free"] < needed:
        advice = "Nothing is lost: checkpoint another kernel there, or name another GPU."
        yield Mismatch(
            "device_memory", what, f"{size(needed, 2)} free", f"{size(now['free'], 2)} free", advice, hard=True
        )


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
