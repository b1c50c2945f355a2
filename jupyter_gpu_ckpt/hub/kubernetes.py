"""Requirements as Kubernetes has them: node affinity over the labels that are common on nodes.

The kubelet sets ``kubernetes.io/arch``; GPU feature discovery (part of NVIDIA's device plugin and GPU operator) sets
``nvidia.com/*``; node feature discovery sets ``feature.node.kubernetes.io/*``.  The C library has no label: it is in
the container image, which is the same on every node.
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

#: The resource to request for a container.
GPU_RESOURCE = "nvidia.com/gpu"

#: Linux' names of CPU features whose labels are spelled differently.  Features that node feature discovery omits by
#: default (BMI, SSE, POPCNT and the like: every node with AVX has them) are not required.
_SPELLED = {"aes": "AESNI", "fma": "FMA3", "fma4": "FMA4", "sha_ni": "SHA", "movbe": "MOVBE", "adx": "ADX"}
_AS_THEY_ARE = re.compile(r"avx\w*|amx_\w+|vaes|gfni|vpclmulqdq")

#: The name of a label, and a value that is not empty ("Labels and Selectors", Syntax and character set).
_LABEL = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")

Expression = dict[str, Any]
Labels = Mapping[str, str]


def expressions(requirements: Requirements, known: Iterable[str] | None = None) -> list[list[Expression]]:
    """Return match expressions: a node must meet all of one list; several lists are alternatives.

    ``known``: labels of the nodes; others are not required, since no node could match.  None: unknown, require all.
    """
    wanted: list[Expression] = []
    if (arch := _ARCHITECTURES.get(requirements.architecture)) is not None:
        wanted.append(_in(ARCH, arch))
    wanted += [_in(PRODUCT, product(model)) for model in sorted({gpu.model for gpu in requirements.gpus})]
    if requirements.gpus:
        # The label is the smallest GPU's, in whole MiB.
        wanted.append(_above(GPU_MEMORY, (min(gpu.total for gpu in requirements.gpus) >> 20) - 1))
    if requirements.driver:
        wanted.append(_in(DRIVER, requirements.driver))
    wanted += [_in(_CPUID + name, "true") for name in sorted(filter(None, map(_cpuid, requirements.cpu)))]
    wanted = [each for each in wanted if _is_valid(each)]
    labels = {MAJOR, MINOR, *(each["key"] for each in wanted)} if known is None else set(known)
    common = [each for each in wanted if each["key"] in labels]
    if not any(requirements.linux) or not labels >= {MAJOR, MINOR}:
        return [common]
    major, minor = requirements.linux
    return [[*common, _above(MAJOR, major)], [*common, _in(MAJOR, str(major)), _above(MINOR, minor - 1)]]


def _is_valid(expression: Expression) -> bool:
    """Return whether Kubernetes accepts the expression: else it would refuse the pod, and the server never start.

    What a user's server publishes may be anything; numbers are valid.
    """
    words = [expression["key"].rpartition("/")[2], *expression["values"] * (expression["operator"] == "In")]
    return all(_LABEL.fullmatch(word) for word in words)


def product(model: str) -> str:
    """Return a GPU's model as GPU feature discovery labels it: ``NVIDIA H200`` is ``NVIDIA-H200``."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", model).strip("-_.")


def _cpuid(feature: str) -> str:
    as_it_is = feature.replace("_", "").upper() if _AS_THEY_ARE.fullmatch(feature) else ""
    return _SPELLED.get(feature, as_it_is)


def _in(key: str, value: str) -> Expression:
    return {"key": key, "operator": "In", "values": [value]}


def _above(key: str, number: int) -> Expression:
    return {"key": key, "operator": "Gt", "values": [str(number)]}


def fits(alternatives: Sequence[Sequence[Expression]], labels: Labels) -> bool:
    """Return whether a node with these labels meets one of the lists from `expressions`."""
    return any(all(_met(one, labels) for one in every) for every in alternatives)


def _met(expression: Expression, labels: Labels) -> bool:
    value = labels.get(expression["key"])
    if value is None:
        return False
    if expression["operator"] == "Gt":
        return value.isdigit() and int(value) > int(expression["values"][0])
    return value in expression["values"]


def required(alternatives: Sequence[Sequence[Expression]], configured: Any) -> list[dict[str, Any]]:
    """Return ``KubeSpawner.node_affinity_required``: each of the configured alternatives combined with each of ours."""
    combined = []
    for term, ours in itertools.product(_terms(configured) or [{}], alternatives):
        key = "match_expressions" if "match_expressions" in term else "matchExpressions"
        combined.append({**term, key: [*term.get(key, []), *ours]})
    return [term for term in combined if any(term.values())]


def preferred(alternatives: Sequence[Sequence[Expression]], configured: Any) -> list[dict[str, Any]]:
    """Return ``KubeSpawner.node_affinity_preferred`` with ours in addition, at the greatest weight."""
    ours = [{"weight": 100, "preference": {"matchExpressions": list(one)}} for one in alternatives if one]
    return [*_terms(configured), *ours]


def _terms(configured: Any) -> list[dict[str, Any]]:
    """Return a list of terms; KubeSpawner also accepts a dictionary, whose values it sorts by their keys."""
    return [configured[name] for name in sorted(configured)] if isinstance(configured, Mapping) else list(configured)


async def node_labels(api: Any) -> list[Labels]:
    """Return the labels of every node that accepts new pods.  ``api``: KubeSpawner's own client (`CoreV1Api`).

    The hub's service account needs a ClusterRole with ``list`` of ``nodes``, which the Helm chart does not create.
    """
    listed = await api.list_node()
    return [
        dict(node.metadata.labels or {})
        for node in listed.items
        if not node.spec.unschedulable
        and any(one.type == "Ready" and one.status == "True" for one in node.status.conditions or ())
    ]
