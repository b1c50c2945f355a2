"""The manifest of an image: what it holds, and what a restore needs to know before it starts.

Written last, so a directory without a manifest is no image.  The JSON form is stable: `VERSION` counts its changes.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from ..errors import ImageFormat

VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """Facts about one image.

    Sizes are bytes, times seconds since the epoch, clocks nanoseconds, durations seconds.
    """

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
    #: Whether the process has CUDA state that the driver must bring back.
    cuda: bool = False
    #: The agent's report of what it found inside the kernel (versions, threads, sockets that will come back closed).
    report: dict[str, Any] = field(default_factory=dict)
    #: Seconds by step, of the checkpoint that made this image.
    steps: dict[str, float] = field(default_factory=dict)
    #: Every file of the image with its size.
    files: dict[str, int] = field(default_factory=dict)
    version: int = VERSION

    @property
    def bytes(self) -> int:
        """Size of the image."""
        return sum(self.files.values())

    def to_json(self) -> str:
        """The manifest as it is written to disk."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read a manifest.  Raises `ImageFormat` with the version when it is newer, or with what is wrong with it."""
        try:
            data = json.loads(text)
            version = data["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise ImageFormat("The image's manifest is damaged.", reason=repr(error)) from error
        if version != VERSION:
            text = f"The image is of format {version}; this release reads format {VERSION}."
            raise ImageFormat(text, version=version)
        known = {f.name for f in dataclasses.fields(cls)}
        try:
            return cls(**{key: value for key, value in data.items() if key in known})
        except TypeError as error:
            raise ImageFormat("The image's manifest lacks a field.", reason=str(error)) from error
