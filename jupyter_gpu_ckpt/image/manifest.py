"""The manifest of an image: its files, and the facts that a restore needs before it starts.

Written after everything it lists, so a directory without a manifest is no image.  The JSON form is written down in
``manifest.schema.json``; `VERSION` counts its changes, and a reader refuses every version but its own.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..errors import ImageFormat
from .layout import RESERVED

VERSION = 1
#: Limits far beyond an image's thirty files and a manifest's ten kilobytes: anything larger was not made by us.
MOST_FILES = 100_000
MOST_BYTES = 64 << 20
_MOST = 2**63
#: Manifests that are not parsed again, and the bytes of the largest: going back to a save point reads one eight times.
_CACHED, _CACHED_BYTES = 16, 1 << 20
#: A part of a file's name, and the name: one to four parts.
_PART = r"(?![.])[^/\\\x00-\x1f\x7f]+"
_NAME = re.compile(rf"{_PART}(?:/{_PART}){{0,3}}")
_BLAKE3 = re.compile(r"[0-9a-f]{64}")

_Text = str | bytes


@dataclass(frozen=True)
class FileEntry:
    """The size of one stored file of an image, and its BLAKE3 in hex."""

    bytes: int
    blake3: str


@dataclass(frozen=True)
class Manifest:
    """Facts about an image.  Sizes are bytes, times seconds since the epoch, clocks nanoseconds, durations seconds."""

    id: str
    kernel_id: str
    created: float
    kernel_name: str
    uid: int
    hostname: str
    #: The kernel's pid inside its capsule, and the inodes of its stdout and stderr pipes.
    pid: int
    pipes: list[int]
    #: CLOCK_MONOTONIC and CLOCK_BOOTTIME as the kernel read them when it was frozen.
    monotonic: int
    boottime: int
    #: The directory of the kernel's ipc endpoints: it must exist under the same path on restore.
    runtime_dir: str
    criu_version: str
    #: Device memory by GPU UUID, and the UUIDs of every GPU of the node in the driver's order.
    device_bytes: dict[str, int] = field(default_factory=dict)
    node_gpus: list[str] = field(default_factory=list)
    #: Whether the process has CUDA state that the driver must restore.
    cuda: bool = False
    #: The agent's report on the kernel (versions, threads, sockets that will be closed after a restore).
    report: dict[str, Any] = field(default_factory=dict)
    #: Seconds by step, of the checkpoint that made this image.
    steps: dict[str, float] = field(default_factory=dict)
    #: Every file of the image but the manifest, its seal, and what leases write.
    files: dict[str, FileEntry] = field(default_factory=dict)
    #: One up with every checkpoint of this kernel.
    generation: int = 0
    #: The facts of this node that a restoring node must match (`node.fingerprint`).
    fingerprint: dict[str, Any] = field(default_factory=dict)
    #: The settings of each process, by pid, that CRIU omits and a restore applies again (`process.inventory`).
    notes: dict[str, Any] = field(default_factory=dict)
    #: Bytes of device memory beside CRIU's files (`device_memory`); 0 where CRIU's files have all of it.
    swapped_bytes: int = 0
    #: Whether the processes have a digest of all that memory, so that it can be proved on the GPU (`FastPath`).
    has_digests: bool = False
    #: How CRIU's files are encrypted (`encryption`); None when they are not.
    encryption: dict[str, Any] | None = None
    #: What makes the image a save point (`save_point.SavePoint`); None for the image of a sleeping kernel.
    save_point: dict[str, Any] | None = None
    #: Of an image that was made of another kernel's, for a branch (`branch`): ``image`` and ``kernel_id`` of that one,
    #: and how the new kernel differs from it; empty for all others.
    branched_from: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    @property
    def bytes(self) -> int:
        """Bytes of all files of the image."""
        return sum(entry.bytes for entry in self.files.values())

    def to_json(self) -> str:
        """Return the manifest as it is written to disk."""
        return json.dumps(self.to_dict(), sort_keys=True)

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest as JSON objects, which are not to be changed."""
        return {**vars(self), "files": {name: vars(entry) for name, entry in self.files.items()}}

    @classmethod
    def from_json(cls, text: _Text, id: str) -> Manifest:
        """Parse the manifest of image ``id``.  Raises `ImageFormat` with the version if it is another, or the defect.

        A sealed text is checked as any other: names cannot lead out of the image's directory, and every field has its
        type.  The same text gives the same object, which is not to be changed.
        """
        try:
            return _parsed_once(text) if len(text) <= _CACHED_BYTES else cls._parsed(text)
        except ImageFormat as error:
            error.details["image"] = id
            raise

    @classmethod
    def _parsed(cls, text: _Text) -> Manifest:
        if len(text) > MOST_BYTES:
            raise ImageFormat("The image's manifest is too large to be one.", bytes=len(text))
        try:
            data = json.loads(text, object_pairs_hook=_once)
            version = data["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ImageFormat("The image's manifest is damaged.", reason=type(error).__name__) from error
        if type(version) is not int or version != VERSION:
            message = f"The image is of format {str(version)[:40]}; this release reads format {VERSION}."
            hint = "Wake it with the release that made it, or delete it: `jupyter gpu-ckpt rm --force {image}`."
            raise ImageFormat(message, hint=hint, version=version)
        return cls(**_facts(data))


@functools.lru_cache(_CACHED)
def _parsed_once(text: _Text) -> Manifest:
    return Manifest._parsed(text)


def safe_name(name: str) -> bool:
    """Return whether ``name`` is valid for a file in an image: relative, downwards, one spelling, nothing hidden."""
    parts = name.split("/")
    return (
        _NAME.fullmatch(name) is not None
        and all(len(part.encode(errors="replace")) <= 255 for part in parts)
        and parts[0] not in RESERVED
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a JSON object with a repeated name, which two readers could understand differently."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _facts(data: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a `Manifest`, each of its type.  Raises `ImageFormat`."""
    facts = {}
    for each in dataclasses.fields(Manifest):
        if each.name not in data:
            if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
                raise ImageFormat("The image's manifest lacks a field.", field=each.name)
            continue
        value = data[each.name]
        if not _RULES[str(each.type)](value):
            raise ImageFormat(f"The image's manifest is damaged: {each.name} is not of its type.", field=each.name)
        facts[each.name] = value
    files = facts.get("files", {})
    if len(files) > MOST_FILES:
        raise ImageFormat("The image's manifest lists too many files.", files=len(files))
    for name, entry in files.items():
        if not safe_name(name) or not _is_entry(entry):
            raise ImageFormat("The image's manifest lists a file that cannot be one of an image.", name=name[:300])
    facts["files"] = {name: FileEntry(**entry) for name, entry in files.items()}
    return facts


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < _MOST  # type: ignore[operator]


def _is_entry(value: object) -> bool:
    match value:
        case {"bytes": size, "blake3": str(digest), **rest} if not rest:
            return _is_size(size) and _BLAKE3.fullmatch(digest) is not None
    return False


def _each(kind: type, rule: Callable[[object], bool]) -> Callable[[Any], bool]:
    values: Any = dict.values if kind is dict else iter
    return lambda value: isinstance(value, kind) and all(map(rule, values(value)))


#: The check of a value, by the annotation of its field.
_RULES: dict[str, Callable[[Any], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": _is_size,
    "float": _is_number,
    "list[int]": _each(list, _is_size),
    "list[str]": _each(list, lambda value: isinstance(value, str)),
    "dict[str, int]": _each(dict, _is_size),
    "dict[str, float]": _each(dict, _is_number),
    "dict[str, Any]": lambda value: isinstance(value, dict),
    "dict[str, Any] | None": lambda value: value is None or isinstance(value, dict),
    "dict[str, FileEntry]": lambda value: isinstance(value, dict),
}
