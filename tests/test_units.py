"""One way to write bytes, rates and durations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jupyter_gpu_ckpt.agent.tensors import human
from jupyter_gpu_ckpt.units import counted, duration, rate, size

PACKAGE = Path(__file__).resolve().parents[1] / "jupyter_gpu_ckpt"


def test_things_are_counted_as_people_say_it():
    assert [counted(number, "child process") for number in (0, 1, 2)] == [
        "0 child processes",
        "1 child process",
        "2 child processes",
    ]
    assert counted(3, "connection") == "3 connections"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (300 << 20, "300.0 MiB"),
        (3 << 29, "1.5 GiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (5 << 40, "5.0 TiB"),
        (-(2 << 20), "-2.0 MiB"),
    ],
)
def test_sizes_are_the_same_outside_and_inside_the_kernel(count, text):
    assert size(count) == human(count) == text


def test_sizes_that_are_compared_have_two_digits():
    assert (size(12.34 * 2**30, 2), size(12.30 * 2**30, 2), size(7, 2)) == ("12.34 GiB", "12.30 GiB", "7 B")


@pytest.mark.parametrize(
    ("count", "seconds", "text"),
    [(0, 1, "0 MB/s"), (340e6, 1, "340 MB/s"), (19e9, 10, "1.9 GB/s"), (1e6, 0, "1.0 GB/s")],
)
def test_rates(count, seconds, text):
    assert rate(count, seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (0.84, "0.8 s"), (9.96, "10 s"), (59, "59 s"), (420, "7 min"), (3 * 3600, "3 h"), (172800, "2 d")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_nobody_else_writes_units_of_bytes():
    own = {PACKAGE / "units.py", PACKAGE / "agent" / "tensors.py"}
    written = re.compile(r"f\".*\{[^}]*\} ?(KiB|MiB|GiB|TiB|[kMG]B/s)\b|%d [KMGT]i?B\b")
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path not in own
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if written.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(59.4, "59 s"), (59.6, "1 min"), (3599, "1 h"), (84599, "23 h"), (86399, "1 d")]
)
def test_a_duration_that_rounds_to_the_next_unit_is_in_that_unit(seconds, text):
    assert duration(seconds) == text
