"""Zeros in the host memory of a context that the driver has suspended are given back; nobody else's are."""

from __future__ import annotations

import pytest
from subject import MIB, Subject, listening

from jupyter_gpu_ckpt import procfs

#: The least that the driver maps for a context.
SIZE = 96


@pytest.fixture
def suspended(subject):
    """A subject that listens, and whose gate is closed for good."""
    subject.alloc(1, 2 * MIB)
    listening(subject)
    with subject.control() as control:
        control.must("close 0")
    return subject


def resident(subject: Subject) -> int:
    """The MiB of anonymous memory that the program has."""
    return int(procfs.status(subject.pid)["RssAnon"].split()[0]) >> 10


def dropped(subject: Subject, before: int) -> int:
    with subject.control() as control:
        control.must("drop_zeros")
    return before - resident(subject)


def test_zeros_of_the_driver_s_memory_are_given_back_and_all_else_is_unchanged(suspended):
    memory, own = (suspended.ask("map", who, SIZE) for who in ("driver", "program"))
    assert SIZE * 0.9 < dropped(suspended, resident(suspended)) < SIZE * 1.1
    assert suspended.ask("changed", memory, SIZE) == suspended.ask("changed", own, SIZE) == "0"
    assert dropped(suspended, resident(suspended)) < 8, "it is known once"


def test_what_the_driver_mapped_before_the_gate_was_closed_stays(suspended):
    suspended.ask("map", "driver", SIZE)
    with suspended.control() as control:
        control.must("close 0")
    assert dropped(suspended, resident(suspended)) < 8


def test_what_the_program_has_mapped_in_the_place_of_the_driver_s_memory_stays(suspended):
    memory = suspended.ask("map", "driver", SIZE)
    assert suspended.ask("unmap", memory, SIZE) == "0"
    again = suspended.ask("map", "program", SIZE - 32)
    low, high = int(again, 16), int(again, 16) + (SIZE - 32) * MIB
    assert low < int(memory, 16) + SIZE * MIB and int(memory, 16) < high, "it is at another place"
    assert dropped(suspended, resident(suspended)) < 8
    assert suspended.ask("changed", again, SIZE - 32) == "0"


@pytest.mark.parametrize("by", ["nothing", "file"])
def test_other_memory_exactly_in_the_place_of_the_driver_s_is_neither_read_nor_dropped(suspended, by):
    """Reading what cannot be read would kill the program; zeros over a file's content are no zeros of Linux."""
    memory = suspended.ask("map", "driver", SIZE)
    assert suspended.ask("replace", memory, SIZE, by) == memory
    assert dropped(suspended, resident(suspended)) < 8
    if by == "file":
        assert suspended.ask("changed", memory, SIZE) == "0"
