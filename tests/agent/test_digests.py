"""Digests of variables: equal for equal content, others for others, none for what cannot be read without harm."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import types
from collections import OrderedDict, deque

import numpy
import pytest

digests = importlib.import_module("jupyter_gpu_ckpt.agent.digests")


class Plain:
    """A class as a notebook's user writes it; its attributes are read, its methods never called."""

    def __getattribute__(self, name):
        raise AssertionError("code of the user")

    __eq__ = __hash__ = __repr__ = __reduce_ex__ = __len__ = __iter__ = None


class Computed(list):
    def __iter__(self):
        raise AssertionError("code of the user")


def plain(**attributes) -> Plain:
    made = Plain()
    object.__getattribute__(made, "__dict__").update(attributes)
    return made


def digest(value, seconds: float = 60.0):
    return digests.Digests(seconds).of(value)


def circle(number: int) -> list:
    made = [number, {"in": []}]
    made[1]["in"].append(made)
    return made


#: Values of which no two are equal, by functions that make each anew.
MAKERS = [
    *(
        lambda value=value: value
        for value in (None, True, 1, 1.0, 1j, "1", b"1", 10**5000, -1, 255, 256, "ä", "\ud800")
    ),
    lambda: bytearray(b"1"),
    lambda: [1, 2],
    lambda: [2, 1],
    lambda: [[1], 2],
    lambda: [[1, 2]],
    lambda: (1, 2),
    lambda: {1, "two", (3,)},
    lambda: frozenset({1, "two", (3,)}),
    lambda: {"a": 1, "b": [2]},
    lambda: {"a": 1, "b": [3]},
    lambda: {"ab": ""},
    lambda: OrderedDict(a=1),
    lambda: deque([1]),
    lambda: {"a": "b"},
    lambda: circle(1),
    lambda: circle(2),
    lambda: plain(x=1),
    lambda: plain(x=2),
    lambda: plain(x=numpy.arange(4)),
    lambda: numpy.arange(6.0),
    lambda: numpy.arange(6.0).reshape(2, 3),
    lambda: numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    lambda: numpy.arange(6, dtype="f4"),
    lambda: numpy.array("2026-11-26", dtype="M8[D]"),
    lambda: numpy.array("2026-11-26", dtype="M8[D]") + 1,
    lambda: numpy.array([1, "x", None], dtype=object),
    lambda: numpy.array([1, "y", None], dtype=object),
    lambda: numpy.zeros((0, 3)),
    lambda: numpy.float32(1),
    lambda: numpy.float64(1),
    lambda: bytes(10 << 20),
    lambda: bytes((10 << 20) - 1) + b"1",
]


def test_equal_values_have_equal_digests_and_no_two_others_have():
    found = [digest(make()) for make in MAKERS]
    assert all(set(each) == {"digest"} for each in found)
    assert found == [digest(make()) for make in MAKERS]
    assert len({each["digest"] for each in found}) == len(MAKERS)


def test_the_order_of_what_has_none_does_not_count():
    names = [f"name {number}" for number in range(100)]
    assert digest(dict.fromkeys(names, 1)) == digest(dict.fromkeys(reversed(names), 1))
    assert digest(set(names)) == digest({*names[50:], *names[:50]})


def test_what_cannot_be_read_without_harm_has_none(tmp_path):
    mapped = numpy.memmap(tmp_path / "mapped", dtype="u1", mode="w+", shape=10)
    slotted = type("Slotted", (), {"__slots__": ("x",)})()
    deep: list = []
    for _ in range(100):
        deep = [deep]
    unread = [
        *(mapped, numpy.asarray(mapped), numpy.arange(10)[::2], numpy.frombuffer(bytearray(10), "u1")),
        *(Computed([1]), slotted, threading.Lock(), iter([1]), (n for n in [1]), types.SimpleNamespace(x=1)),
        *(deep, [threading.Lock()], list(range(2_000_000)), {"x": object}),
    ]
    assert [digest(each) for each in unread] == [{}] * len(unread)


def test_what_takes_too_long_has_none_and_the_next_one_neither():
    several = digests.Digests(0.0)
    assert several.of(bytes(1 << 20)) == {}
    assert several.of(list(range(1000))) == {}


def test_of_tensors_the_writes_that_pytorch_counts_are_a_change_and_their_lack_proves_nothing():
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    tensor = torch.zeros(3)
    before = digest(tensor), digest(model), digest([tensor])
    assert all(each["weak"] for each in before)
    assert (digest(tensor), digest(model), digest([tensor])) == before
    tensor.add_(1)
    with torch.no_grad():
        model.weight.add_(1)
    now = digest(tensor), digest(model), digest([tensor])
    assert [mine["digest"] != theirs["digest"] for mine, theirs in zip(before, now, strict=True)] == [True] * 3


def test_the_key_is_another_one_in_each_kernel():
    """So the digest of a password in a manifest is of no use."""
    program = "from jupyter_gpu_ckpt.agent.digests import Digests; print(Digests(60).of('secret')['digest'])"
    found = {subprocess.check_output([sys.executable, "-c", program]) for _ in range(2)}
    assert len(found) == 2


@pytest.mark.parametrize("value", [numpy.arange(10), [1, {"a": (2,)}], bytearray(10)])
def test_a_value_is_free_afterwards(value):
    before = sys.getrefcount(value)
    assert digest(value)
    assert sys.getrefcount(value) == before
    if isinstance(value, bytearray):
        value.append(1)
