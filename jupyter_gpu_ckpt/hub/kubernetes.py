"""Requirements in Kubernetes' words: node affinity over the labels that are on nodes in practice.

``kubernetes.io/arch`` is the kubelet's; ``nvidia.com/*`` are GPU feature discovery's, which comes with NVIDIA's device
plugin and its GPU operator; ``feature.node.kubernetes.io/*`` are node feature discovery's.  The C library has no label:
it is the container image's, and the image is the same everywhere.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..node.requirements import Requirements

ARCH = "kubernetes.io/arch"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
PRODUCT = "nvidia.com/gpu.product"
GPU_MEMORY = "nvidia.com/gpu.memory"  # MiB
DRIVER = "nvidia.com/cuda.driver-version.full"
MAJOR = "feature.node.kubernetes.io/kernel-version.major"
MINOR = "feature.node.kubernetes.io/kernel-version.minor"
_CPUID = "feature.node.kubernetes.io/cpu-cpuid."

#: What is asked for in a container's resources.
GPU_RESOURCE = "nvidia.com/gpu"

#: Linux' names of CPU features whose labels are spelled otherwise.  The ones that node feature discovery leaves out by
#: default (BMI, SSE, POPCNT and their kin: every node with AVX has them) are not asked for.
_SPELLED = {"aes": "AESNI", "fma": "FMA3", "fma4": "FMA4", "sha_ni": "SHA", "movbe": "MOVBE", "adx": "ADX"}
_AS_THEY_ARE = re.compile(r"avx\w*|amx_\w+|vaes|gfni|vpclmulqdq")

Expression = dict[str, Any]
Labels = Mapping[str, str]


def expressions(requirements: Requirements, known: Iterable[str] | None = None) -> list[list[Expression]]:
    """Match expressions: a node must meet all of one list; several lists are alternatives.

    ``known``: the labels that are on some node; others are not asked for, since no node could have them.  None: nobody
    knows, and all are.
    """
    asked: list[Expression] = []
    if requirements.architecture in _ARCHITECTURES:
        asked.append(_in(ARCH, _ARCHITECTURES[requirements.architecture]))
    for model in sorted({gpu.model for gpu in requirements.gpus}):
        asked.append(_in(PRODUCT, product(model)))
    if requirements.gpus:
        # The label is the smallest GPU's, in whole MiB.
        asked.append(_above(GPU_MEMORY, (min(gpu.total for gpu in requirements.gpus) >> 20) - 1))
    if requirements.driver:
        asked.append(_in(DRIVER, requirements.driver))
    asked += [_in(_CPUID + name, "true") for name in sorted(filter(None, map(_cpuid, requirements.cpu)))]
    labels = None if known is None else set(known)
    common = [one for one in asked if labels is None or one["key"] in labels]
    if not any(requirements.linux) or (labels is not None and not {MAJOR, MINOR} <= labels):
        return [common]
    major, minor = requirements.linux
    return [[*common, _above(MAJOR, major)], [*common, _in(MAJOR, str(major)), _above(MINOR, minor - 1)]]


def product(model: str) -> str:
    """A GPU's model as GPU feature discovery labels it: ``NVIDIA H200`` is ``NVIDIA-H200``."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", model).strip("-_.")


def _cpuid(feature: str) -> str:
    if feature in _SPELLED:
        return _SPELLED[feature]
    return feature.replace("_", "").upper() if _AS_THEY_ARE.fullmatch(feature) else ""


def _in(key: str, value: str) -> Expression:
    return {"key": key, "operator": "In", "values": [value]}


def _above(key: str, number: int) -> Expression:
    return {"key": key, "operator": "Gt", "values": [str(number)]}


def fits(alternatives: Sequence[Sequence[Expression]], labels: Labels) -> bool:
    """Whether a node with these labels meets one of the lists that `expressions` makes."""
    return any(all(_met(one, labels) for one in every) for every in alternatives)


def _met(expression: Expression, labels: Labels) -> bool:
    value = labels.get(expression["key"])
    if value is None:
        return False
    if expression["operator"] == "Gt":
        return value.isdigit() and int(value) > int(expression["values"][0])
    return value in expression["values"]


def required(alternatives: Sequence[Sequence[Expression]], configured: Any) -> list[dict[str, Any]]:
    """``KubeSpawner.node_affinity_required`` with ours in addition to what is configured there.

    Its terms are alternatives of each other, so each of theirs is combined with each of ours.
    """
    theirs = _terms(configured) or [{}]
    combined = []
    for term, ours in itertools.product(theirs, alternatives):
        key = "match_expressions" if "match_expressions" in term else "matchExpressions"
        combined.append({**term, key: [*term.get(key, []), *ours]})
    return [term for term in combined if any(term.values())]


def preferred(alternatives: Sequence[Sequence[Expression]], configured: Any) -> list[dict[str, Any]]:
    """``KubeSpawner.node_affinity_preferred`` with ours, which weigh as much as anything may."""
    ours = [{"weight": 100, "preference": {"matchExpressions": list(one)}} for one in alternatives if one]
    return [*_terms(configured), *ours]


def _terms(configured: Any) -> list[dict[str, Any]]:
    """KubeSpawner takes a list, or a dictionary whose values it sorts by their keys."""
    return [configured[name] for name in sorted(configured)] if isinstance(configured, Mapping) else list(configured)


async def node_labels(api: Any) -> list[Labels]:
    """The labels of every node that takes new pods.  ``api``: KubeSpawner's own client (`CoreV1Api`).

    The hub's service account needs a ClusterRole for it, ``list`` of ``nodes``, which the Helm chart does not make.
    """
    listed = await api.list_node()
    return [
        dict(node.metadata.labels or {})
        for node in listed.items
        if not node.spec.unschedulable
        and any(one.type == "Ready" and one.status == "True" for one in _conditions(node))
    ]


def _conditions(node: Any) -> Sequence[Any]:
    return node.status.conditions or ()
