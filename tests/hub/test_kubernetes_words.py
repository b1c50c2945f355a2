"""Requirements in Kubernetes' terms, matched against labels as they are on nodes."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import pytest

from jupyter_gpu_ckpt.hub import kubernetes
from jupyter_gpu_ckpt.hub.kubernetes import DRIVER, PRODUCT, expressions, fits
from jupyter_gpu_ckpt.node.requirements import GpuModel, Requirements

CPUID = "feature.node.kubernetes.io/cpu-cpuid."
KERNEL = "feature.node.kubernetes.io/kernel-version."
NODE = {
    "kubernetes.io/arch": "amd64",
    "nvidia.com/gpu.product": "NVIDIA-H200",
    "nvidia.com/gpu.memory": "143771",
    "nvidia.com/cuda.driver-version.full": "580.159.03",
    **dict.fromkeys((CPUID + name for name in ("AESNI", "AVX", "AVX2", "AVX512F", "AVX512VNNI", "FMA3")), "true"),
    KERNEL + "major": "6",
    KERNEL + "minor": "8",
}
H200 = GpuModel("NVIDIA H200", 143_771 << 20)
WANTED = Requirements(
    "x86_64", frozenset({"aes", "avx", "avx512_vnni", "bmi2", "fma"}), (6, 1), "2.36", "580.159.03", (H200,), 5 << 30
)


@pytest.mark.parametrize(
    "hostile",
    [
        {"driver": "-580"},
        {"driver": "5" * 64},
        {"gpus": (GpuModel("((", 1 << 30),)},
        {"gpus": (GpuModel("N" * 96, 1 << 30),)},
        {"cpu": frozenset({"avx" + "x" * 60})},
    ],
)
def test_what_is_no_label_is_not_required(hostile):
    """Kubernetes would refuse the pod, and the server could not be started any more."""
    form = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)")
    wanted = dataclasses.replace(WANTED, **hostile)
    for known in (None, {*NODE, CPUID + "AVX" + "X" * 60}):
        for one in (one for alternative in expressions(wanted, known) for one in alternative):
            assert form.fullmatch(one["key"].rpartition("/")[2])
            assert all(form.fullmatch(value) for value in one["values"]), one
    assert fits(expressions(dataclasses.replace(wanted, gpus=())), NODE)


def test_a_node_with_the_same_labels_fits():
    assert fits(expressions(WANTED), NODE)


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("kubernetes.io/arch", "arm64"),
        ("nvidia.com/gpu.product", "NVIDIA-A100-SXM4-80GB"),
        ("nvidia.com/gpu.product", "NVIDIA-H200-SHARED"),
        ("nvidia.com/gpu.memory", "143770"),
        ("nvidia.com/cuda.driver-version.full", "580.95.05"),
        (CPUID + "AVX512VNNI", None),
        (CPUID + "FMA3", None),
        (KERNEL + "major", "5"),
        (KERNEL + "minor", "0"),
        (KERNEL + "minor", None),
    ],
)
def test_a_node_that_lacks_one_thing_does_not(label, value):
    labels = {name: text for name, text in {**NODE, label: value}.items() if text is not None}
    assert not fits(expressions(WANTED), labels)


@pytest.mark.parametrize(("major", "minor"), [("6", "1"), ("6", "12"), ("7", "0")])
def test_a_newer_linux_fits(major, minor):
    assert fits(expressions(WANTED), {**NODE, KERNEL + "major": major, KERNEL + "minor": minor})


def test_more_memory_on_the_gpu_fits():
    assert fits(expressions(WANTED), {**NODE, "nvidia.com/gpu.memory": "200000"})


def test_a_label_that_no_node_has_is_not_required():
    """No node feature discovery, an older one, or one that leaves a feature out."""
    labels = {"kubernetes.io/arch": "amd64", PRODUCT: "NVIDIA-H200"}
    assert fits(expressions(WANTED, labels), labels)
    assert not fits(expressions(WANTED), labels)


def test_a_kernel_without_cuda_requires_no_gpu():
    asked = expressions(Requirements("aarch64", frozenset({"asimd"}), (6, 1)))
    assert not any(one["key"].startswith("nvidia.com/") for every in asked for one in every)
    assert fits(asked, {"kubernetes.io/arch": "arm64", KERNEL + "major": "6", KERNEL + "minor": "1"})


def test_with_what_is_configured_each_alternative_stays_one():
    """The terms of a required affinity are alternatives of each other: added beside ours, theirs would undo ours."""
    theirs = [{"matchExpressions": [{"key": "pool", "operator": "In", "values": ["a"]}]}, {"match_fields": ["x"]}]
    made = kubernetes.required(expressions(WANTED), theirs)
    assert len(made) == 4
    for term in made:
        assert {PRODUCT, DRIVER} <= {one["key"] for one in term["matchExpressions"]}
    assert sum("match_fields" in term for term in made) == 2
    assert kubernetes.required(expressions(WANTED), {"b": theirs[1], "a": theirs[0]}) == made


def test_no_requirement_is_no_term_at_all():
    """An empty node selector term matches no node."""
    assert kubernetes.required(expressions(Requirements()), []) == []
    assert kubernetes.preferred(expressions(Requirements()), []) == []


async def test_nodes_that_take_no_pods_do_not_count():
    def node(name, ready="True", unschedulable=None):
        conditions = [
            SimpleNamespace(type="MemoryPressure", status="False"),
            SimpleNamespace(type="Ready", status=ready),
        ]
        return SimpleNamespace(
            metadata=SimpleNamespace(labels={"name": name}),
            spec=SimpleNamespace(unschedulable=unschedulable),
            status=SimpleNamespace(conditions=conditions),
        )

    class Api:
        async def list_node(self):
            return SimpleNamespace(items=[node("a"), node("b", "Unknown"), node("c", unschedulable=True)])

    assert await kubernetes.node_labels(Api()) == [{"name": "a"}]
