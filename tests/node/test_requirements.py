"""Requirements from fingerprints for a scheduler: put together, published, and read again carefully."""

from __future__ import annotations

import json

import pytest

from jupyter_gpu_ckpt.errors import ImageFormat
from jupyter_gpu_ckpt.node.match import fingerprint
from jupyter_gpu_ckpt.node.requirements import (
    MOST_BYTES,
    MOST_KERNELS,
    GpuModel,
    Requirements,
    of,
    parse,
    plan,
    to_json,
)

H200 = GpuModel("NVIDIA H200", 143_771 << 20)
A100 = GpuModel("NVIDIA A100-SXM4-80GB", 80 << 30)
GPUS = [
    {"uuid": "GPU-1", "name": H200.model, "total": H200.total, "driver": "580.159.03", "cuda": "13.0", "free": 1},
]


def test_a_kernel_with_cuda_state_needs_its_gpus_and_their_driver():
    taken = of(fingerprint(files=(), ports=(), criu="4.2.1", gpus=GPUS, cuda=True, memory=5 << 30))
    assert (taken.gpus, taken.driver, taken.memory) == ((H200,), "580.159.03", 5 << 30)
    assert taken.linux >= (5, 9)
    assert taken.architecture and taken.cpu


def test_a_kernel_without_needs_neither():
    taken = of(fingerprint(files=(), ports=(), criu="4.2.1", gpus=GPUS, cuda=False))
    assert (taken.gpus, taken.driver) == ((), "")


def test_an_image_without_facts_requires_nothing():
    assert of({}) == Requirements()


def test_the_order_of_the_gpus_is_no_difference():
    both = [{"name": gpu.model, "total": gpu.total} for gpu in (A100, H200)]
    assert of({"cuda": "13.0", "gpus": both}) == of({"cuda": "13.0", "gpus": both[::-1]})


def test_one_node_for_kernels_that_go_together():
    made = plan(
        [
            Requirements(cpu=frozenset({"avx"}), linux=(6, 1), glibc="2.36", memory=3),
            Requirements(cpu=frozenset({"avx2"}), linux=(5, 15), glibc="2.36", memory=7, gpus=(H200,)),
        ]
    )
    together = Requirements(cpu=frozenset({"avx", "avx2"}), linux=(6, 1), glibc="2.36", memory=7, gpus=(H200,))
    assert (made.requirements, made.together, made.others) == (together, 2, ())


@pytest.mark.parametrize(
    "other",
    [
        Requirements(architecture="aarch64"),
        Requirements(glibc="2.31"),
        Requirements(driver="570.1"),
        Requirements(gpus=(A100,)),
        Requirements(gpus=(H200, H200)),
    ],
    ids=["architecture", "glibc", "driver", "model", "number"],
)
def test_where_no_node_suits_all_the_last_kernel_decides(other):
    mine = Requirements(architecture="x86_64", glibc="2.36", driver="580.1", gpus=(H200,))
    assert plan([other, mine]).requirements == mine
    assert plan([mine, other]).requirements == other
    assert plan([other, mine, mine]).others == (other,)


def test_no_sleeping_kernel_requires_nothing():
    assert plan([]) == plan(())
    assert plan([]).together == 0


def test_what_is_published_is_read_again():
    kernels = [
        of(fingerprint(files=(), ports=(), criu="4.2.1", gpus=GPUS, cuda=True, memory=5 << 30)),
        Requirements(),
    ]
    assert parse(to_json(kernels)) == kernels


def test_what_is_published_names_no_kernel_no_file_and_no_user():
    files = [{"path": "/home/ada/secret.csv", "size": 4, "mode": 0o100644, "open": True}]
    taken = of(fingerprint(files=files, ports=(), criu="4.2.1", gpus=GPUS, cuda=True))
    (kernel,) = json.loads(to_json([taken]))["kernels"]
    assert set(kernel) == {"architecture", "cpu", "linux", "glibc", "driver", "gpus", "memory"}
    assert set(kernel["gpus"][0]) == {"model", "total"}, "no UUID: it would say on which node the user was"
    assert "ada" not in to_json([taken])


GOOD = json.loads(to_json([Requirements("x86_64", frozenset({"avx"}), (6, 1), "2.36", "580.1", (H200,), 5)]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("driver", "580.1\n#SBATCH --account=theirs"),
        ("driver", "580.1&other"),
        ("driver", "580.1 --qos=high"),
        ("driver", "{{cmd}}"),
        ("driver", 580),
        ("driver", "5" * 65),
        ("glibc", "2.36|2.17"),
        ("architecture", "x86_64\0"),
        ("architecture", None),
        ("cpu", "avx"),
        ("cpu", ["a,b"]),
        ("cpu", ["a"] * 257),
        ("cpu", [["a"]]),
        ("linux", [6]),
        ("linux", [6, -1]),
        ("linux", [6, 1.0]),
        ("linux", [True, 1]),
        ("linux", "61"),
        ("gpus", [{"model": "H200; rm", "total": 1}]),
        ("gpus", [{"model": "", "total": 1}]),
        ("gpus", [{"model": "H200", "total": 2**63}]),
        ("gpus", [{"model": "H200"}]),
        ("gpus", [{"model": "H200", "total": 1}] * 65),
        ("gpus", {}),
        ("memory", -1),
        ("memory", "1G"),
        ("memory", True),
        ("unknown", 1),
    ],
)
def test_what_could_mean_something_to_a_scheduler_is_refused(name, value):
    assert parse(json.dumps(GOOD))
    with pytest.raises(ImageFormat):
        parse(json.dumps({**GOOD, "kernels": [{**GOOD["kernels"][0], name: value}]}))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{",
        b"\xff",
        json.dumps({"version": 2, "kernels": []}),
        json.dumps({"version": 1}),
        json.dumps({"version": 1, "kernels": 3}),
        json.dumps({"version": 1, "kernels": [3]}),
        json.dumps({"version": 1, "kernels": GOOD["kernels"] * (MOST_KERNELS + 1)}),
        '{"version": 1, "kernels": []}' + " " * MOST_BYTES,
        "[" * 100_000,
    ],
    ids=lambda text: str(text[:24]),
)
def test_what_is_none_of_ours_is_refused(text):
    with pytest.raises(ImageFormat):
        parse(text)
