"""The differences between this node and the one an image was made on: two fingerprints (`fingerprint`) compared.

A hard `Mismatch` means that the restore would fail, or that the kernel would break silently later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import gt, ne
from typing import Any

from ..errors import ChangedFile, GpuCkptError, MissingFile, NodeUnfit, PortTaken, SocketTaken
from ..units import size
from .changed_files import OR_RESTART, Judge, changed_files
from .facts import LINGERS, Facts
from .fingerprint import fingerprint, inspect_node
from .mismatch import Mismatch

__all__ = ["Facts", "Mismatch", "accepted_files", "fingerprint", "inspect_node", "match", "require"]


def match(
    wanted: Facts,
    found: Facts,
    *,
    image: str,
    accept_changed_files: bool = False,
    gpu_map: Mapping[str, str] | None = None,
) -> list[Mismatch]:
    """Return every difference that matters, the hard ones first.

    ``image``: the id of the image, for commands in advice.  ``accept_changed_files``: a changed data file is accepted
    as it is now (soft).  ``gpu_map``: the GPU here for each one of the image; by default the same one, or else in the
    order of both nodes.  Only keys that ``wanted`` has are compared.
    """
    mismatches: list[Mismatch] = []
    for key, compare in _COMPARE.items():
        if key in wanted:
            mismatches += compare(wanted, found)
    judge = Judge(accept_changed_files, _is_here(wanted, found), image)
    mismatches += changed_files(wanted.get("files", {}), found["files"], judge)
    if wanted.get("cuda"):
        mismatches += _gpus(wanted, found, gpu_map)
    return sorted(mismatches, key=lambda mismatch: not mismatch.hard)


def _is_here(wanted: Facts, found: Facts) -> bool:
    """Return whether this is the machine that the image was made on."""
    return bool(wanted.get("machine")) and wanted.get("machine") == found.get("machine")


def accepted_files(mismatches: Iterable[Mismatch]) -> list[str]:
    """Return the changed files that a restore accepts as they are."""
    return sorted({each.path for each in mismatches if each.field == "file_changed" and not each.hard})


def require(mismatches: Sequence[Mismatch], image: str) -> None:
    """Raise the error of the hard mismatches of ``image``, if there are any, with all of them in its details."""
    hard = [mismatch for mismatch in mismatches if mismatch.hard]
    if not hard:
        return
    first = hard[0]
    more = f" (and {len(hard) - 1} more: `jupyter gpu-ckpt match {image}` lists them)" if hard[1:] else ""
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
        here=f"The kernel has the old one mapped; put that version back. {OR_RESTART}",
        absent="another one",
    ),
    "packages": _packages,
    "mounts": _mounts,
    "ports": _ports,
    "sockets": _sockets,
    "open_files": _compared(
        "open_files",
        "Open files that a process may have (RLIMIT_NOFILE)",
        gt,
        "The kernel has descriptors with such numbers; start the server with that hard limit (`ulimit -Hn`, systemd's "
        "LimitNOFILE), or use another node.",
        wanted_form="{} or more",
    ),
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
