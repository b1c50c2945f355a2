"""Requirements of sleeping kernels on the node they are to wake on, in a form that reveals nothing else about them.

`of` extracts them from a fingerprint (`match`): the part that a scheduler can choose a node by.  Files, packages, ports
and free memory are not in it: `match` compares them on the node itself, before every wake.

A server publishes the JSON form for the hub (`server.placement`, `hub.placement`).  It comes from the user's side, so
it is not trusted: `parse` accepts only names and versions in which no scheduler can see an option, an operator or a new
line.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ImageFormat

#: Names the directory in which a server publishes, and the file in it.
VARIABLE = "JUPYTER_GPU_CKPT_PLACEMENT"
FILE = "placement.json"

#: Of the JSON form.
VERSION = 1
#: Bytes and kernels: a kernel takes about one kilobyte.
MOST_BYTES = 1 << 20
MOST_KERNELS = 1000

_WORD = re.compile(r"[A-Za-z0-9_.+-]{0,64}")
_MODEL = re.compile(r"[A-Za-z0-9_.+()/ -]{1,96}")
_MOST_WORDS = 256
_MOST_GPUS = 64


@dataclass(frozen=True, order=True)
class GpuModel:
    """One GPU: its model as NVML names it, and its memory in bytes."""

    model: str
    total: int


@dataclass(frozen=True)
class Requirements:
    """Properties that a node must have.  An empty value requires nothing.

    ``linux``: the oldest release, major and minor.  ``gpus``: one for each GPU of the kernel's last node, sorted; none
    if the kernel never used CUDA.  ``memory``: bytes of host memory.
    """

    architecture: str = ""
    cpu: frozenset[str] = frozenset()
    linux: tuple[int, int] = (0, 0)
    glibc: str = ""
    driver: str = ""
    gpus: tuple[GpuModel, ...] = ()
    memory: int = 0

    def with_(self, other: Requirements) -> Requirements | None:
        """Combine two requirements; None if no node fulfils both.

        Kernels wake one by one, when they are used: memory is required for the largest, not for all at once.
        """
        equal = {}
        for name in ("architecture", "glibc", "driver", "gpus"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine and theirs and mine != theirs:
                return None
            equal[name] = mine or theirs
        linux, memory = max(self.linux, other.linux), max(self.memory, other.memory)
        return Requirements(cpu=self.cpu | other.cpu, linux=linux, memory=memory, **equal)

    def __str__(self) -> str:
        models = sorted({gpu.model for gpu in self.gpus})
        parts = [f"{len(self.gpus)} x {' and '.join(models)}"] if models else []
        parts += [f"driver {self.driver}"] if self.driver else []
        parts += [f"Linux {self.linux[0]}.{self.linux[1]} or newer"] if any(self.linux) else []
        parts += [f"glibc {self.glibc}"] if self.glibc else []
        parts += [self.architecture] if self.architecture else []
        return ", ".join(parts) or "any node"


@dataclass(frozen=True)
class NodeChoice:
    """The node to request: it suits ``together`` kernels, while ``others`` need another kind of node."""

    requirements: Requirements
    together: int
    others: tuple[Requirements, ...] = ()


def plan(kernels: Sequence[Requirements]) -> NodeChoice:
    """Choose the node to request for kernels in the order in which they went to sleep.

    Where no node suits all of them, the latest kernels have precedence: people come back to their latest work.
    """
    chosen, others = Requirements(), []
    for kernel in reversed(kernels):
        if (both := chosen.with_(kernel)) is None:
            others.append(kernel)
        else:
            chosen = both
    return NodeChoice(chosen, len(kernels) - len(others), tuple(others))


def of(fingerprint: Mapping[str, Any]) -> Requirements:
    """Return the requirements in a fingerprint; missing keys require nothing."""
    cuda = bool(fingerprint.get("cuda"))
    gpus = fingerprint.get("gpus", ()) if cuda else ()
    release = re.match(r"(\d+)\.(\d+)", str(fingerprint.get("kernel", "")))
    return Requirements(
        architecture=str(fingerprint.get("architecture", "")),
        cpu=frozenset(map(str, fingerprint.get("cpu", ()))),
        linux=(int(release[1]), int(release[2])) if release else (0, 0),
        glibc=str(fingerprint.get("glibc", "")),
        driver=str(fingerprint.get("driver", "")) if cuda else "",
        gpus=tuple(sorted(GpuModel(str(gpu["name"]), int(gpu["total"])) for gpu in gpus)),
        memory=int(fingerprint.get("memory", 0)),
    )


def to_json(kernels: Iterable[Requirements]) -> str:
    """Return the published form: the requirements alone, without ids or contents of kernels."""
    found = [{**dataclasses.asdict(one), "cpu": sorted(one.cpu)} for one in kernels]
    return json.dumps({"version": VERSION, "kernels": found}, indent=1, sort_keys=True)


def parse(text: str | bytes) -> list[Requirements]:
    """Read the published form.  Raises `ImageFormat` for anything that `to_json` would not have written."""
    try:
        if len(text) > MOST_BYTES:
            raise ValueError("too long")
        data = json.loads(text)
        if data["version"] != VERSION or len(data["kernels"]) > MOST_KERNELS:
            raise ValueError("of another version, or too many kernels")
        return [_parsed(**one) for one in data["kernels"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = "The published requirements of the sleeping kernels cannot be read."
        raise ImageFormat(message, hint="Another release may have written them: use that one.") from error


def _parsed(architecture: Any, cpu: Any, linux: Any, glibc: Any, driver: Any, gpus: Any, memory: Any) -> Requirements:
    if not isinstance(cpu, list) or len(cpu) > _MOST_WORDS or not isinstance(gpus, list) or len(gpus) > _MOST_GPUS:
        raise ValueError("no lists, or too long")
    major, minor = linux
    return Requirements(
        architecture=_word(architecture),
        cpu=frozenset(_word(feature) for feature in cpu),
        linux=(_count(major), _count(minor)),
        glibc=_word(glibc),
        driver=_word(driver),
        gpus=tuple(sorted(GpuModel(_word(gpu["model"], _MODEL), _count(gpu["total"])) for gpu in gpus)),
        memory=_count(memory),
    )


def _word(value: Any, form: re.Pattern[str] = _WORD) -> str:
    if not isinstance(value, str) or not form.fullmatch(value):
        raise ValueError("not a name or a version")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("not a number")
    return value
