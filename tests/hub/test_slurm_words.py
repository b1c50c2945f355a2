"""Requirements in Slurm's words, on what `sinfo` says of clusters of several kinds."""

from __future__ import annotations

import re

import pytest

from jupyter_gpu_ckpt.hub import slurm
from jupyter_gpu_ckpt.hub.slurm import NAMES, SbatchOptions, nodes, sbatch_options
from jupyter_gpu_ckpt.node.requirements import GpuModel, Requirements

H200 = GpuModel("NVIDIA H200", 143_771 << 20)
NEW, OLD = "linux-6.18,glibc-2.36,driver-580.1,cpu-avx,cpu-avx2", "linux-5.15,glibc-2.36,driver-580.1,cpu-avx"
CLUSTER = nodes(
    f"n1|idle|{NEW}|gpu:h200:4(S:0-1),shard:8|512000|all*\n"
    f"n2|mixed|{NEW}|gpu:h200:2|256000|all*\n"
    f"n3|allocated|{OLD}|gpu:a100:8|512000|all*\n"
    "n4|idle|(null)|(null)|64000+|all*\n"
)


def test_what_sinfo_says():
    assert [node.name for node in CLUSTER] == ["n1", "n2", "n3", "n4"]
    assert CLUSTER[0].gpus == {"h200": 4}
    assert CLUSTER[3].gpus == {}
    assert CLUSTER[3].features == frozenset()
    assert CLUSTER[3].memory == 64000 << 20
    assert nodes("a|idle|x|gpu|1|p")[0].gpus == {"": 1}


PARTITIONS = "a|idle|x|(null)|1|cpu*\nb|idle|x|gpu:2|1|cpu*\nb|idle|x|gpu:2|1|gpu\nc|idle|x|gpu:2|1|gpu\n"


@pytest.mark.parametrize(
    ("partitions", "names"), [("", "ab"), ("gpu", "bc"), ("cpu", "ab"), ("cpu,gpu", "abc"), ("none", "")]
)
def test_of_the_partition_that_the_job_goes_to(partitions, names):
    assert "".join(node.name for node in nodes(PARTITIONS, partitions)) == names


def test_a_cluster_without_a_default_partition():
    assert "".join(node.name for node in nodes(PARTITIONS.replace("*", ""))) == "abc"


@pytest.mark.parametrize("state", ["idle", "mixed", "allocated", "completing", "planned", "idle~", "allocated+"])
def test_nodes_that_take_jobs_now_or_later(state):
    assert nodes(f"n|{state}|x|(null)|1|p")[0].in_service


@pytest.mark.parametrize(
    "state", ["drained", "draining", "down", "down*", "idle*", "fail", "unknown", "inval", "maint", "future"]
)
def test_nodes_that_take_none(state):
    assert not nodes(f"n|{state}|x|(null)|1|p")[0].in_service


def test_all_named_features_are_requested():
    wanted = Requirements(cpu=frozenset({"avx2"}), linux=(6, 1), glibc="2.36", driver="580.1", gpus=(H200, H200))
    assert sbatch_options(wanted, CLUSTER) == SbatchOptions(
        "glibc-2.36&driver-580.1&cpu-avx2&linux-6.18", "gpu:h200:2", ("n1", "n2")
    )


def test_a_newer_linux_will_do():
    assert sbatch_options(Requirements(linux=(5, 10)), CLUSTER).constraint == "(linux-5.15|linux-6.18)"
    assert sbatch_options(Requirements(linux=(5, 16)), CLUSTER).constraint == "linux-6.18"
    assert sbatch_options(Requirements(linux=(6, 19)), CLUSTER).nodes == ()


def test_more_gpus_than_a_node_has():
    assert sbatch_options(Requirements(gpus=(H200,) * 4), CLUSTER).nodes == ("n1",)
    assert sbatch_options(Requirements(gpus=(H200,) * 5), CLUSTER).nodes == ()


def test_a_model_that_the_cluster_has_not():
    assert sbatch_options(Requirements(gpus=(GpuModel("NVIDIA B200", 1),)), CLUSTER) == SbatchOptions("", "", ())


def test_the_longest_type_that_is_in_the_models_name():
    both = nodes("a|idle|x|gpu:nvidia:1|1|p\nb|idle|x|gpu:nvidia_h200:1|1|p")
    assert sbatch_options(Requirements(gpus=(H200,)), both) == SbatchOptions("", "gpu:nvidia_h200:1", ("b",))


def test_gpus_without_a_type_are_distinguished_by_a_feature():
    untyped = nodes("a|idle|gpu-nvidia_a100|gpu:2|1|p\nb|idle|gpu-nvidia_h200|gpu:2|1|p")
    assert sbatch_options(Requirements(gpus=(H200,)), untyped) == SbatchOptions("gpu-nvidia_h200", "gpu:1", ("b",))


def test_memory():
    assert sbatch_options(Requirements(memory=300_000 << 20), CLUSTER).nodes == ("n1", "n3")


def test_features_that_no_node_declares_are_not_requested():
    plain = nodes("a|idle|intel,bigmem|(null)|1000|p")
    wanted = Requirements("x86_64", frozenset({"avx"}), (6, 1), "2.36", "")
    assert sbatch_options(wanted, plain) == SbatchOptions("", "", ("a",))


def test_the_names_are_the_sites_own():
    site = nodes("a|idle|os_6.18,libc2.36|(null)|1000|p")
    names = {**NAMES, "linux": "os_{}", "glibc": "libc{}", "cpu": ""}
    wanted = Requirements(cpu=frozenset({"avx"}), linux=(6, 1), glibc="2.36")
    assert sbatch_options(wanted, site, names) == SbatchOptions("libc2.36&os_6.18", "", ("a",))


def test_a_nodes_own_features_fit_it():
    wanted = Requirements("x86_64", frozenset({"avx"}), (6, 18), "2.36", "580.1", (H200,), 5)
    own = ",".join(slurm.features(wanted))
    assert sbatch_options(wanted, nodes(f"a|idle|{own}|gpu:h200:1|1000|p")).nodes == ("a",)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "'--constraint=a&b'"),
        ("--exclusive -C x", "--exclusive '--constraint=x&a&b'"),
        ("--constraint=x|y --comment='two words'", "'--comment=two words' '--constraint=(x|y)&a&b'"),
        ("--constraint x", "'--constraint=x&a&b'"),
        ("--exclusive -Cx", "--exclusive '--constraint=x&a&b'"),
        ("-C x -C y", "'--constraint=y&a&b'"),
    ],
)
def test_the_administrators_constraints_stay(before, after):
    assert slurm.with_constraint(before, "a&b") == after


@pytest.mark.parametrize("theirs", ["x", "x|y", "(x|y)|z", "x|(y&z)", "[x|y]"])
def test_no_parentheses_are_within_parentheses(theirs):
    """Slurm refuses the job (22.05: "Invalid feature specification")."""
    joined = slurm.both(theirs, "glibc-2.36&(linux-5.15|linux-6.18)")
    assert joined.endswith("&glibc-2.36&(linux-5.15|linux-6.18)")
    assert not re.search(r"\([^)]*\(", joined)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "gpu:h200:2"),
        ("gpu:1", "gpu:h200:2"),
        ("gpu:a100:1,tmp:10G", "gpu:h200:2,tmp:10G"),
        ("gres:gpu:1,gpu_mem:5", "gpu:h200:2,gpu_mem:5"),
    ],
)
def test_other_resources_stay(before, after):
    assert slurm.with_gpus(before, "gpu:h200:2") == after
