"""Addresses: which memory one lies in; and those of freed memory, which are kept for the next allocations."""

from __future__ import annotations

import random

import pytest
from subject import KEPT_ADDRESSES, MIB, Control, Subject, asking

RESERVE = "cuMemAddressReserve"


def reserved(subject: Subject, size: int) -> int:
    """Allocate, write and check; return how often addresses were reserved for it."""
    subject.fail()
    subject.alloc(1, size, density="full")
    subject.intact(subject.outstanding()["mappings"])
    return subject.calls().get(RESERVE, 0)


def test_they_are_used_for_memory_that_is_at_most_a_quarter_smaller(subject):
    for number in [subject.alloc(1, size * MIB) for size in (8, 10, 40)]:
        subject.free(number)
    assert subject.outstanding()["used"] == 0
    sizes = {32: 0, 8: 0, 12: 1, 6: 1, 10: 0, 2: 1}
    assert {size: reserved(subject, size * MIB) for size in sizes} == sizes
    assert subject.outstanding()["reservations"] == 6
    with subject.control() as control:
        control.must("move_out", "swap_in")
    subject.intact(6)


def test_no_more_are_kept_than_a_program_frees_at_a_time(subject):
    first = subject.alloc(KEPT_ADDRESSES + 9, 2 * MIB)
    for number in range(first, first + KEPT_ADDRESSES + 9):
        subject.free(number)
    out = subject.outstanding()
    assert (out["used"], out["reservations"]) == (0, KEPT_ADDRESSES)
    for _ in range(3):
        subject.alloc(1, 2 * MIB)
    assert subject.outstanding()["reservations"] == KEPT_ADDRESSES


def test_the_oldest_give_way(subject):
    numbers = [subject.alloc(1, 2 * MIB) for _ in range(KEPT_ADDRESSES)]
    numbers.append(subject.alloc(1, 64 * MIB))
    for number in numbers:
        subject.free(number)
    assert subject.outstanding()["reservations"] == KEPT_ADDRESSES
    assert reserved(subject, 64 * MIB) == 0


@pytest.mark.parametrize("left", [0, 2])
def test_none_are_kept_beyond_a_context(subject, left):
    """A context that still has memory, or none."""
    first = subject.alloc(left + 3, 2 * MIB)
    for number in range(first, first + 3):
        subject.free(number)
    assert subject.outstanding()["reservations"] == left + 3
    assert subject.ask("reset") == "0"
    assert subject.outstanding()["reservations"] == 0


def test_what_an_address_lies_in_is_found_among_many(programs, doubles, runtime_base):
    """More than the library's table has slots for at first, of both kinds, and when half of them are freed again."""
    chance, count = random.Random(7), 2100
    grains = {f"{kind}{number}": 1.25 + number % 3 for number in range(count) for kind in ("plain", "pool")}
    with asking(programs, doubles, "stream_ordered.py", runtime_base / "fast") as ask:
        assert ask("stream('s'), standard()") == (0, 0)
        # The driver would say that it is as long as what is mapped.
        made = f"[plain(f'plain{{n}}', 1.25 + n % 3) or alloc(f'pool{{n}}', 1.25 + n % 3, 's') for n in range({count})]"
        assert set(ask(made)) == {0}
        with Control(runtime_base / "fast") as control:
            assert control.ask("status")["allocations"] > count, "the library serves them"

        def intact(names: list[str]) -> bool:
            asked = {name: chance.randrange(int(2 * MIB * grains[name])) for name in chance.sample(names, 300)}
            found = ask(f"[describe(name, at)[:3] for name, at in {asked}.items()]")
            return found == [[0, 0, 2 * MIB * grains[name]] for name in asked]

        names = [*grains]
        assert intact(names)
        behind = ask(f"[describe(name, sizes[name])[:3] == [0, 0, sizes[name]] for name in {names[:300]}]")
        assert not any(behind), "nothing of it is behind its end"
        chance.shuffle(names)
        freed, rest = names[:count], names[count:]
        assert set(ask(f"[free(name) for name in {freed}]")) == {0}
        assert intact(rest)
        assert not any(ask(f"[describe(name)[:2] == [0, 0] for name in {freed[:300]}]")), "they are no more"
        assert set(ask(f"[free(name) for name in {rest}]")) == {0}
