"""Requirements as Slurm has them: features for ``--constraint``, and generic resources for ``--gres``.

Slurm knows about a node what slurm.conf contains: nothing about CPU instructions, drivers or C libraries, unless the
administrator names them as features.  `features` makes those names, ``jupyter gpu-ckpt node-features`` prints them for
a node, and `sbatch_options` requires them.  A kind of feature that no node has is not required: the wake itself checks
the node again (`node.match`), and refuses without harm.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..node.requirements import Requirements

#: How the kinds of features are named; ``{}`` is the value.
NAMES = {
    "architecture": "arch-{}",
    "linux": "linux-{}",
    "glibc": "glibc-{}",
    "driver": "driver-{}",
    "cpu": "cpu-{}",
    "gpu": "gpu-{}",
}

#: The command whose output `nodes` parses: name, state, features, generic resources, memory in MiB, partition (the
#: default one with a star).
SINFO = ("sinfo", "--noheader", "--Node", "--format=%N|%T|%f|%G|%m|%P")

#: States of nodes that get no new jobs (sinfo(1), node state codes).
_OUT = re.compile(r"(down|drain|fail|unk|inval|maint|future|power_down|perfctrs|reserved|block)")
_NOT_RESPONDING = "*"


@dataclass(frozen=True)
class Node:
    """A node as `sinfo` reports it.  ``gpus``: their number by type (``""``: untyped); ``memory`` in bytes."""

    name: str
    in_service: bool
    features: frozenset[str]
    gpus: Mapping[str, int]
    memory: int


@dataclass(frozen=True)
class SbatchOptions:
    """Options for sbatch, some of them empty, and the ``nodes`` in service that satisfy all of them."""

    constraint: str
    gres: str
    nodes: tuple[str, ...]


def nodes(text: str, partitions: str = "") -> list[Node]:
    """Parse the output of `SINFO`: the nodes of the ``partitions`` (comma-separated names; empty: the default one).

    Only these count: Slurm refuses a job that requests from one partition what only another one has.
    """
    lines = [line.split("|") for line in filter(None, map(str.strip, text.splitlines()))]
    chosen = set(filter(None, partitions.split(","))) or {line[5] for line in lines if line[5].endswith("*")}
    found: dict[str, Node] = {}
    for name, state, features, gres, memory, partition in lines:
        if chosen and partition not in chosen and partition.rstrip("*") not in chosen:
            continue
        found[name] = Node(
            name=name,
            in_service=not _OUT.match(state) and _NOT_RESPONDING not in state,
            features=frozenset(word for word in features.split(",") if word and word != "(null)"),
            gpus=_gpus(gres),
            memory=int(memory.rstrip("+")) << 20,
        )
    return list(found.values())


def _gpus(gres: str) -> dict[str, int]:
    """Parse ``gpu:h200:4(S:0-1),shard:8`` to ``{"h200": 4}``."""
    found: Counter[str] = Counter()
    for one in re.sub(r"\([^)]*\)", "", gres).split(","):
        if match := re.fullmatch(r"gpu(?::(?P<type>[^:]+?))??(?::(?P<count>\d+))?", one):
            found[match["type"] or ""] += int(match["count"] or 1)
    return found


def features(requirements: Requirements, names: Mapping[str, str] = NAMES) -> list[str]:
    """Return the features of a node that has exactly these properties, for slurm.conf."""
    release = f"{requirements.linux[0]}.{requirements.linux[1]}" if any(requirements.linux) else ""
    return [*_exact(requirements, names), *_named(names, "linux", [release])]


def _exact(requirements: Requirements, names: Mapping[str, str]) -> list[str]:
    """Return all features except that of Linux, for which a newer release is as good."""
    values = {
        "architecture": [requirements.architecture],
        "glibc": [requirements.glibc],
        "driver": [requirements.driver],
        "gpu": sorted({word(gpu.model) for gpu in requirements.gpus}),
        "cpu": sorted(requirements.cpu),
    }
    return [one for kind, found in values.items() for one in _named(names, kind, found)]


def _named(names: Mapping[str, str], kind: str, values: Iterable[str]) -> list[str]:
    template = names.get(kind, NAMES[kind])
    return [template.format(value) for value in values if template and value]


def _kinds(known: Iterable[str], names: Mapping[str, str]) -> set[str]:
    """Return the kinds of features that some node has."""
    prefixes = {kind: names.get(kind, NAMES[kind]).partition("{}")[0] for kind in NAMES}
    return {kind for kind, prefix in prefixes.items() if prefix and any(one.startswith(prefix) for one in known)}


def word(model: str) -> str:
    """Return a GPU's model as Slurm compares it with the types in gres.conf: ``NVIDIA H200`` is ``nvidia_h200``."""
    return re.sub(r"[^a-z0-9.]+", "_", model.lower()).strip("_")


def sbatch_options(
    requirements: Requirements, cluster: Sequence[Node], names: Mapping[str, str] = NAMES
) -> SbatchOptions:
    """Return the options that request a fitting node; with empty ``nodes`` if none in service fits."""
    known = {feature for node in cluster for feature in node.features}
    present = _kinds(known, names)
    chosen = {kind: names.get(kind, NAMES[kind]) if kind in present else "" for kind in NAMES}
    needed = _exact(requirements, chosen)
    releases = _releases(requirements.linux, known, chosen["linux"])
    kinds = sorted({kind for node in cluster for kind in node.gpus})
    gres = _gres(requirements, kinds)
    if gres is None:
        return SbatchOptions("", "", ())
    kind, count = gres
    fitting = [
        node.name
        for node in cluster
        if node.in_service
        and node.features.issuperset(needed)
        and (not releases or node.features & set(releases))
        and (not count or node.gpus.get(kind, 0) >= count)
        and node.memory >= requirements.memory
    ]
    if chosen["linux"] and any(requirements.linux) and not releases:
        fitting = []
    terms = [*needed, *([f"({'|'.join(releases)})"] if len(releases) > 1 else releases)]
    request = ":".join(filter(None, ("gpu", kind, str(count)))) if count else ""
    return SbatchOptions("&".join(terms), request, tuple(fitting))


def _releases(floor: tuple[int, int], known: Iterable[str], template: str) -> list[str]:
    """Return the features of Linux releases from ``floor`` on."""
    before, _, after = template.partition("{}")
    form = re.compile(rf"{re.escape(before)}(\d+)\.(\d+){re.escape(after)}")
    found = [(match, one) for one in known if template and any(floor) and (match := form.fullmatch(one))]
    return sorted(one for match, one in found if (int(match[1]), int(match[2])) >= floor)


def _gres(requirements: Requirements, kinds: Sequence[str]) -> tuple[str, int] | None:
    """Return type and number of the GPUs, or None if the cluster names types and none fits.

    gres.conf has a part of the model's name as the type.
    """
    if not (count := len(requirements.gpus)):
        return "", 0
    models = {word(gpu.model) for gpu in requirements.gpus}
    if fitting := [kind for kind in kinds if kind and all(word(kind) in model for model in models)]:
        return max(fitting, key=len), count
    return ("", count) if "" in kinds else None


def with_constraint(options: str, constraint: str) -> str:
    """Return sbatch's ``options``, which Slurm splits as a shell would, with ``constraint`` in addition to theirs."""
    kept, theirs, words = [], "", iter(shlex.split(options))
    for one in words:
        if one in ("-C", "--constraint"):
            theirs = next(words, "")  # sbatch, too, uses the last
        elif one.startswith("--constraint="):
            theirs = one.partition("=")[2]
        elif one.startswith("-C"):
            theirs = one[2:]
        else:
            kept.append(one)
    return shlex.join([*kept, f"--constraint={both(theirs, constraint)}"])


def both(theirs: str, ours: str) -> str:
    """Join a constraint with one of `sbatch_options`; an "or" stays one term.

    Slurm reads operators from left to right, and refuses parentheses within parentheses: a constraint that has some is
    as good without more around it.
    """
    if theirs and ours and "|" in theirs and "(" not in theirs:
        theirs = f"({theirs})"
    return "&".join(filter(None, (theirs, ours)))


def with_gpus(gres: str, gpus: str) -> str:
    """Return the generic resources ``gres`` with ``gpus`` instead of their GPUs."""
    kept = [one for one in gres.split(",") if one and not re.match(r"(gres[:/])?gpu(:|$)", one)]
    return ",".join([gpus, *kept])
