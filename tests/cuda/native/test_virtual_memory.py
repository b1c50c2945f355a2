"""Memory that a program maps itself: swapped like any other, under handles that stay the same to the program."""

from __future__ import annotations

import pytest
from subject import MIB, Ask, Control, asking, same_answers
from waiting import until

PROGRAM = "virtual_memory.py"
GRAIN = 2 * MIB
INVALID = 1
OUT_OF_MEMORY = 2
NOT_READY = 600


@pytest.fixture
def ask(programs, doubles, runtime_base):
    with asking(programs, doubles, PROGRAM, runtime_base / "fast") as ask:
        yield ask


@pytest.fixture
def control(ask, runtime_base):
    assert ask("create('first')") == ask("release('first')") == 0
    until((runtime_base / "fast").exists, "the library listens")
    with Control(runtime_base / "fast") as control:
        yield control


@pytest.fixture
def devices(programs, doubles, runtime_base):
    """The same of a machine with three devices."""
    with asking(programs, doubles, PROGRAM, runtime_base / "fast", DOUBLE_DEVICES="3") as ask:
        assert ask("create('first')") == ask("release('first')") == 0
        until((runtime_base / "fast").exists, "the library listens")
        with Control(runtime_base / "fast") as control:
            yield ask, control


def swapped(control: Control, ask: Ask, moved: int, left: int = 0) -> None:
    """Swap out and in; ``moved`` bytes leave the device and ``left`` stay."""
    control.must("copy_out")
    answer = control.ask("free")
    assert (answer["cuda"], answer["swapped_out"]) == (0, moved)
    assert ask("outstanding()[0]") == left
    control.must("swap_in")
    assert ask("outstanding()[0]") == moved + left


def test_mapped_memory_leaves_the_device_and_comes_back(ask, control):
    assert ask("mapped('a', 'x', 3, 4)") == ask("mapped('b', 'y', 4)") == 0
    assert ask("release('y')") == 0, "its mapping keeps it"
    facts = ask("describe('a', 1), describe('b'), outstanding()")
    status = control.ask("status")
    assert (status["allocations"], status["bytes"]) == (2, 5 * GRAIN)
    for _ in range(3):
        swapped(control, ask, 5 * GRAIN)
        assert ask("holds('a', 0, 4), holds('b')") == (3, 4)
        assert ask("describe('a', 1), describe('b'), outstanding()") == facts
    assert ask("unmap('a', 0, 4), unmap('b'), release('x')") == (0, 0, 0)
    assert ask("free_address('a', 4), free_address('b', 1), outstanding()") == (0, 0, (0, 0, 0, 0))
    assert control.ask("status")["allocations"] == 0


def test_handles_stay_good(ask, control):
    assert ask("mapped('a', 'x', 3, exportable=True)") == 0
    assert ask("release('first')") == INVALID, "of memory that is not there any more"
    swapped(control, ask, GRAIN)
    assert ask("properties('x')") == (0, 1, 0, 1)
    assert ask("retain('again', 'a')") == (0, ["x"])
    assert ask("release('x'), release('again'), release('again'), properties('x')[0]") == (0, 0, INVALID, INVALID)
    assert ask("reserve('b', 1), map('b', 'x')") == (0, INVALID), "the program has no reference"
    swapped(control, ask, GRAIN)
    assert ask("retain('again', 'a')") == (0, ["x"]), "as the driver: one memory, one handle"
    assert ask("map('b', 'again', grains=1), access('b'), holds('b')") == (0, 0, 3)
    assert ask("unmap('a'), release('again')") == (0, 0)
    swapped(control, ask, GRAIN)
    assert ask("holds('b'), unmap('b'), outstanding()[0]") == (3, 0, 0)


def test_memory_that_is_mapped_twice_stays_one(ask, control):
    assert ask("mapped('a', 'x', 3, 2), reserve('b', 4)") == (0, 0)
    assert ask("map('b', 'x', 2), access('b', 2, 2, READ)") == (0, 0)
    assert ask("map('b', 'x', 0, offset=1, grains=1)") == 0, "a part, which nobody may use"
    swapped(control, ask, 2 * GRAIN)
    assert ask("access_of('a'), access_of('b', 2), access_of('b')") == ((0, 3), (0, 1), (0, 0))
    assert ask("fill('a', 1, 7), holds('b', 3), holds('b', 2)") == (None, 7, 3)
    assert ask("access('b'), holds('b')") == (0, 7)


def test_memory_moves_to_another_address_and_back(ask, control):
    assert ask("mapped('a', 'x', 3), reserve('b', 1)") == (0, 0)
    for old, new in (("a", "b"), ("b", "a")):
        swapped(control, ask, GRAIN)
        assert ask(f"unmap({old!r})") == 0
        assert control.ask("status")["bytes"] == 0
        assert ask(f"map({new!r}, 'x'), access({new!r}), holds({new!r})") == (0, 0, 3)
    swapped(control, ask, GRAIN)
    assert ask("holds('a')") == 3


def test_memory_that_is_not_mapped_stays_on_the_device_with_its_contents(ask, control):
    assert ask("mapped('a', 'x', 3), mapped('b', 'y', 4), unmap('a'), create('fresh', 3)") == (0, 0, 0, 0)
    swapped(control, ask, GRAIN, left=4 * GRAIN)
    assert ask("map('a', 'x'), access('a'), holds('a'), holds('b')") == (0, 0, 3, 4)


def test_a_segment_that_grows_and_shrinks(ask, control):
    """PyTorch's expandable segments: one range, much memory, access for the whole, unmapped by parts."""
    assert ask("reserve('a', 8), [create(str(n)) + map('a', str(n), n) for n in range(6)]") == (0, [0] * 6)
    assert ask("access('a', 0, 6), [fill('a', n, n + 1) for n in range(6)][:1]") == (0, [None])
    swapped(control, ask, 6 * GRAIN)
    assert ask("unmap('a', 1, 3), [release(str(n)) for n in (1, 2, 3)]") == (0, [0, 0, 0])
    swapped(control, ask, 3 * GRAIN)
    assert ask("[holds('a', n) for n in (0, 4, 5)]") == [1, 5, 6]
    assert ask("create('new', 2), map('a', 'new', 2), access('a', 2, 2), fill('a', 2, 9, 2)") == (0, 0, 0, None)
    swapped(control, ask, 5 * GRAIN)
    assert ask("[holds('a', n) for n in (0, 2, 3, 4, 5)]") == [1, 9, 9, 5, 6]


GIVEN_AWAY = [
    "export('x')",
    "bind('x')",
    "bind_v2('x')",
    "bind_address('a')",
    "bind_address_v2('a')",
    "map_arrays('x')",
    "address_handle('a')",
    "access('a', 0, 1, WRITE, 0, location=HOST)",
]


@pytest.mark.parametrize("call", GIVEN_AWAY)
def test_memory_that_others_may_have_is_the_drivers(ask, control, call):
    assert ask("mapped('a', 'x', 3, exportable=True), mapped('b', 'y', 4, exportable=True)") == (0, 0)
    assert ask(call) == 0
    assert control.ask("status")["bytes"] == GRAIN
    swapped(control, ask, GRAIN, left=GRAIN)
    assert ask("holds('a'), holds('b'), unmap('a'), release('x')") == (3, 4, 0, 0)


def test_memory_that_another_process_may_have_is_counted(ask, control):
    assert ask("mapped('a', 'x', 3, exportable=True), mapped('b', 'y', 4, exportable=True)") == (0, 0)
    assert control.ask("status")["shared"] == 0
    assert ask("export('x'), export('x')") == (0, 0)
    assert control.ask("status")["shared"] == 1
    assert ask("release('x')") == 0
    assert control.ask("status")["shared"] == 1, "it is mapped"
    assert ask("unmap('a')") == 0
    assert control.ask("status")["shared"] == 0


REFUSED = ["bind('x', multicast=1)", "bind_address('a', multicast=1)", "export('x')"]


@pytest.mark.parametrize("call", REFUSED)
def test_memory_that_was_not_given_away_after_all_is_swapped(ask, control, call):
    assert ask("mapped('a', 'x', 3)") == 0
    assert ask(call) == INVALID
    swapped(control, ask, GRAIN)


def test_imported_memory_and_the_hosts_are_the_drivers(ask, control):
    assert ask("mapped('a', 'x', 3, exportable=True), export('x'), import_('y'), reserve('b', 2)") == (0, 0, 0, 0)
    assert ask("map('b', 'y'), access('b'), fill('b', 0, 8), holds('a')") == (0, 0, None, 8)
    assert ask("create('z', location=HOST), map('b', 'z', 1), access('b', 1), properties('z')") == (
        0,
        0,
        0,
        (0, 2, 0, 0),
    )
    assert control.ask("status")["bytes"] == 0
    assert control.ask("copy_out")["cuda"] == control.ask("free")["swapped_out"] == 0
    assert ask("unmap('b', 0, 2), release('y'), release('z')") == (0, 0, 0)


@pytest.mark.parametrize("flags", ["NONE", "READ"])
def test_memory_that_its_own_device_may_not_write_is_the_drivers(ask, control, flags):
    assert ask(f"mapped('a', 'x', 3), access('a', 0, 1, {flags})") == (0, 0)
    assert control.ask("copy_out")["cuda"] == control.ask("free")["swapped_out"] == 0
    assert ask("access('a'), holds('a')") == (0, 3)
    swapped(control, ask, GRAIN)


def test_memory_of_other_devices_and_contexts(devices):
    """Created while another device's context is current, with access for some devices, and outliving a context."""
    ask, control = devices
    assert ask("reserve('a', 1), create('x', device=1), map('a', 'x')") == (0, 0, 0)
    assert ask("access('a', 0, 1, WRITE, 1), access('a', 0, 1, READ, 2), access('a', 0, 1, WRITE, 0)") == (0, 0, 0)
    assert ask("fill('a', 0, 5), access('a', 0, 1, NONE, 0)") == (None, 0)
    assert control.ask("copy_out")["cuda"] == control.ask("free")["swapped_out"] == 0, "no context of its device"
    assert ask("new_context(1), mapped('b', 'y', 6), pop_context()") == (0, 0, 0)
    swapped(control, ask, 2 * GRAIN)
    assert ask("[access_of('a', 0, n) for n in range(3)]") == [(0, 0), (0, 3), (0, 1)]
    assert ask("destroy_context()") == 0
    swapped(control, ask, GRAIN, left=GRAIN)
    assert ask("new_context(1), access('a', 0, 1, WRITE, 0), pop_context()") == (0, 0, 0)
    swapped(control, ask, 2 * GRAIN)
    assert ask("holds('a'), holds('b')") == (5, 6)


def test_served_memory_refuses_what_the_drivers_own_would(ask, control):
    assert ask("alloc('a', 2), unmap('a', 0, 2), access('a', 0, 2), retain('x', 'a')[0]") == (
        0,
        INVALID,
        INVALID,
        INVALID,
    )
    assert ask("address_handle('a')") == 0
    assert control.ask("copy_out")["cuda"] == control.ask("free")["swapped_out"] == 0
    assert ask("free('a')") == 0


@pytest.mark.parametrize("function", ["cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease", "cuMemCreate"])
def test_a_call_that_the_driver_refuses_changes_nothing(ask, control, function):
    assert ask("mapped('a', 'x', 3), reserve('b', 1)") == (0, 0)
    call = {"cuMemMap": "map('b', 'x')", "cuMemSetAccess": "access('a', 0, 1, READ)", "cuMemUnmap": "unmap('a')",
            "cuMemRelease": "release('x')", "cuMemCreate": "create('z')"}[function]  # fmt: skip
    ask(f"fail({function!r}, 1)")
    assert ask(call) == 999
    ask("fail('*', 0)")
    swapped(control, ask, GRAIN)
    assert ask("holds('a'), properties('x'), unmap('a'), release('x')") == (3, (0, 1, 0, 0), 0, 0)
    assert ask("outstanding()[0]") == 0


def test_too_little_memory_at_a_swap_in(ask, control):
    assert ask("mapped('a', 'x', 3, 3), mapped('b', 'y', 4, 2), release('y')") == (0, 0, 0)
    control.must("copy_out", "free")
    for grains in (0, 2, 4):
        ask(f"set_total({grains * GRAIN})")
        answer = control.ask("swap_in")
        assert (answer["cuda"], answer["swapped_out"]) == (OUT_OF_MEMORY, 5 * GRAIN)
        assert ask("outstanding()[0]") == 0
    ask(f"set_total({5 * GRAIN})")
    control.must("swap_in")
    assert ask("holds('a', 0, 3), holds('b', 0, 2), unmap('b', 0, 2), outstanding()[0]") == (3, 4, 0, 3 * GRAIN)


def test_calls_wait_while_memory_is_swapped_out(ask, control):
    """Of threads that did not pass the launch gate; nothing that they free is lost."""
    assert ask("mapped('a', 'x', 3), mapped('b', 'y', 4)") == (0, 0)
    control.must("copy_out", "free")
    ask("""later("unmap('a')"), later("access('b', 0, 1, READ)")""")
    assert ask("__import__('time').sleep(0.2), results") == (None, [])
    control.must("swap_in")
    until(lambda: ask("results") == [0, 0], "the calls have ended")
    assert ask("holds('b'), access_of('b'), release('x'), outstanding()[0]") == (4, (0, 1), 0, GRAIN)


@pytest.mark.parametrize(
    ("function", "call", "after"),
    [
        ("cuMemUnmap", "unmap('a')", "map('a', 'x'), access('a'), holds('a')"),
        ("cuMemMap", "map('c', 'x')", "access('c'), fill('a', 0, 3), holds('c')"),
        ("cuMemSetAccess", "access('a', 0, 1, READ)", "access_of('a')[1] - 1, None, holds('a')"),
        ("cuMemRelease", "release('x')", "access('a'), None, holds('a')"),
        ("cuMemGetAllocationPropertiesFromHandle", "properties('x')[0]", "access('a'), None, holds('a')"),
    ],
)
def test_memory_that_a_call_is_using_is_the_drivers(ask, control, function, call, after):
    """The driver's handle, or the mapping, that the call was begun with must be there until its end."""
    assert ask("mapped('a', 'x', 3), mapped('b', 'y', 4), reserve('c', 1)") == (0, 0, 0)
    ask(f"stop({function!r}), later({call!r})")
    until(lambda: ask("waits()"), "the call has begun")
    control.must("copy_out")
    assert control.ask("free")["swapped_out"] == GRAIN
    ask("continue_call()")
    until(lambda: ask("results") == [0], "the call has ended")
    control.must("swap_in")
    assert ask("holds('b')") == 4
    assert ask(after) in ((0, 0, 3), (0, None, 3))
    assert control.ask("status")["bytes"] == 2 * GRAIN
    control.must("copy_out", "free", "swap_in")
    assert ask("holds('a'), holds('b')") == (3, 4)


def test_a_swap_during_a_capture_is_refused_and_does_not_end_it(ask, control):
    assert ask("mapped('a', 'x', 3), begin_capture()") == (0, 0)
    answer = control.ask("copy_out")
    assert (answer["cuda"], answer["swapped_out"]) == (NOT_READY, 0)
    assert ask("end_capture()") == 0
    swapped(control, ask, GRAIN)


#: What programs do right and wrong; with the library and without they get the same.
SAME = [
    "create('x', 2), create('zero', 0), create('bad', device=9), create('odd', location=7)",
    "reserve('a', 4), map('a', 'x', 1), map('a', 'x', 1), map('a', 'x', 4), map('a', 'x', 0, offset=1)",
    "map('a', 'x', 0, offset=1, grains=1), access('a', 0, 3), access('a', 0, 2), access('a', 1, 1), access('a', 3)",
    "access_of('a'), access_of('a', 3), describe('a'), describe('a', 2), describe('a', 3)",
    "fill('a', 1, 7), holds('a'), holds('a', 1, 2), fill('a', 0, 9), holds('a', 2)",
    "retain('y', 'a', 2), retain('z', 'a', 3)[0], properties('y'), properties('x')",
    "release('x'), release('x'), release('x'), map('a', 'x', 3), properties('x')[0], export('x'), bind('x')",
    "retain('y', 'a')[0], release('y'), unmap('a', 1, 1), unmap('a', 0, 4), unmap('a', 0, 3), unmap('a', 0, 3)",
    "create('e', exportable=True), export('e'), import_('i'), map('a', 'i'), unmap('a'), release('i'), release('e')",
    "alloc('s', 2), unmap('s', 0, 2), access('s', 0, 2), retain('r', 's')[0], free('s'), outstanding()[:1]",
    "free_address('a', 4)",
]


def test_results_and_errors_are_the_drivers(programs, doubles, runtime_base):
    same_answers(programs, doubles, PROGRAM, runtime_base / "fast", SAME)
