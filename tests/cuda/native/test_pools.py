"""Stream-ordered allocations are swapped; blocks of pools follow the order of streams, as the driver's do."""

from __future__ import annotations

import random

import pytest
from subject import MIB, Ask, Control, asking, same_answers
from waiting import until

PROGRAM = "stream_ordered.py"
GRAIN = 2 * MIB
INVALID, OPERATING_SYSTEM = 1, 304


def begun(ask: Ask, path) -> None:
    """The library listens; two streams, and the default pool, which keeps what is freed."""
    assert ask("[stream(name) for name in 'st'], standard(), alloc('first', 1, 's'), free('first', 's')") == (
        [0, 0],
        0,
        0,
        0,
    )
    assert ask("wait(), trim('standard'), set_attribute('standard', THRESHOLD, 1 << 40)") == (0, 0, 0)
    assert ask("[set_attribute('standard', which, 0) for which in (RESERVED_HIGH, USED_HIGH)], mapped()") == ([0, 0], 0)
    until(path.exists, "the library listens")


@pytest.fixture
def ask(programs, doubles, runtime_base):
    with asking(programs, doubles, PROGRAM, runtime_base / "fast") as ask:
        begun(ask, runtime_base / "fast")
        yield ask


@pytest.fixture
def control(ask, runtime_base):
    with Control(runtime_base / "fast") as control:
        yield control


def swapped(control: Control, ask: Ask, moved: int, left: int = 0) -> None:
    """Swap out and in; ``moved`` bytes leave the device and ``left`` stay."""
    control.must("copy_out")
    answer = control.ask("free")
    assert (answer["cuda"], answer["swapped_out"]) == (0, moved)
    assert ask("outstanding()[0]") == left
    control.must("swap_in")


WAYS = [
    "alloc('a', 2, 's')",
    "alloc('a', 2, 'null')",
    "alloc('a', 2, 'null', per_thread=True)",
    "alloc('a', 2, 's', 'standard')",
    "alloc('a', 2, 's', 'p')",
    "alloc('a', 2, 's', 'p', per_thread=True)",
]


@pytest.mark.parametrize("way", WAYS)
def test_memory_leaves_the_device_and_comes_back(ask, control, way):
    assert ask("pool('p')") == ask(way) == 0
    assert ask("launch('s', 'a', 5), wait()") == (0, 0)
    before = ask("memory['a']")
    for _ in range(2):
        swapped(control, ask, 2 * GRAIN)
        assert ask("holds('a'), memory['a']") == (5, before)
    assert ask("free('a', 's'), wait(), trim('standard'), end_pool('p'), mapped()") == (0, 0, 0, 0, 0)


def test_a_block_is_used_again_on_its_stream_and_elsewhere_when_its_work_is_done(ask):
    """The work before the free takes a while, and would overwrite what another stream has written meanwhile."""
    assert ask("alloc('a', 2, 's'), launch('s', 'a', 1, 300), free('a', 's')") == (0, 0, 0)
    assert ask("alloc('b', 2, 't'), same('a', 'b'), launch('t', 'b', 2)") == (0, False, 0)
    assert ask("alloc('c', 2, 's'), same('a', 'c'), launch('s', 'c', 3)") == (0, True, 0), "behind it on its stream"
    assert ask("wait(), holds('b'), holds('c'), mapped()") == (0, 2, 3, 2)
    assert ask("free('c', 's'), wait(), alloc('d', 2, 't'), same('c', 'd')") == (0, 0, 0, True)


@pytest.mark.parametrize("stream", ["thread", "null"])
def test_a_threads_own_stream_is_another_one_in_each_thread(ask, stream):
    ptsz = "True" if stream == "null" else "False"
    assert ask(f"alloc('a', 2, 's'), launch('thread', 'a', 1, 300), free('a', '{stream}', per_thread={ptsz})") == (
        0,
        0,
        0,
    )
    assert ask(f"alloc('b', 2, '{stream}', per_thread={ptsz}), same('a', 'b'), wait()") == (0, False, 0)


def test_a_block_that_was_freed_on_a_stream_that_has_ended(ask):
    assert ask("stream('u'), alloc('a', 2, 'u'), launch('s', 'a', 1, 200), free('a', 'u')") == (0, 0, 0, 0)
    assert ask("end_stream('u'), free('a', 's')") == (0, INVALID)
    assert ask("wait(), alloc('b', 2, 's'), same('a', 'b')") == (0, 0, True)


def test_blocks_are_cut_and_joined(ask, control):
    """Sizes are the program's, and what one memory has held another may, without a call of the driver."""
    assert ask("alloc('a', 16, 's'), free('a', 's'), wait()") == (0, 0, 0)
    assert ask("alloc('b', 3.25, 's'), alloc('c', 8, 's'), alloc('d', 4, 's')") == (0, 0, 0)
    assert ask("[(memory[name] - memory['a']) / GRAIN for name in 'bcd'], mapped()") == ([0, 4, 12], 1)
    assert ask("describe('b')[2] / GRAIN, describe('c', 77)[1:3], amounts('standard')[2]") == (
        3.25,
        [0, 8 * GRAIN],
        15.25,
    )
    assert ask("[launch('s', name, n) for n, name in enumerate('bcd', 1)], wait()") == ([0, 0, 0], 0)
    swapped(control, ask, 16 * GRAIN)
    assert ask("[holds(name) for name in 'bcd']") == [1, 2, 3]
    assert ask("free('c', 's'), alloc('e', 6, 's'), same('c', 'e'), holds('b'), holds('d')") == (0, 0, True, 1, 3)
    assert ask("[free(name, 's') for name in 'deb'], alloc('f', 16, 's'), same('a', 'f'), mapped()") == (
        [0, 0, 0],
        0,
        True,
        1,
    )


def test_a_part_of_a_block_follows_the_order_of_its_stream(ask):
    assert ask("alloc('a', 8, 's'), launch('s', 'a', 1, 300), free('a', 's')") == (0, 0, 0)
    assert ask("alloc('b', 2, 's'), same('a', 'b'), alloc('c', 6, 't'), launch('t', 'c', 2)") == (0, True, 0, 0)
    assert ask("-6 * GRAIN < memory['c'] - memory['a'] < 8 * GRAIN, wait(), holds('c'), mapped()") == (False, 0, 2, 2)
    assert ask("alloc('d', 6, 't'), memory['d'] - memory['a']") == (0, 2 * GRAIN), "its work is done by now"


def test_blocks_that_were_freed_on_several_streams_join_when_their_work_is_done(ask):
    assert ask("alloc('a', 6, 's'), free('a', 's'), wait()") == (0, 0, 0)
    assert ask("[alloc(name, 2, 's') for name in 'bcd'], mapped()") == ([0, 0, 0], 1)
    assert ask("launch('t', 'c', 1, 300), free('b', 's'), free('c', 't'), free('d')") == (0, 0, 0, 0)
    assert ask("alloc('e', 6, 's'), same('a', 'e')") == (0, True), "to free in no order has waited"
    assert ask("free('e', 's'), [alloc(name, 2, 's') for name in 'bcd']") == (0, [0, 0, 0])
    assert ask("launch('t', 'c', 1, 300), free('b', 's'), free('c', 't'), free('d', 's')") == (0, 0, 0, 0)
    assert ask("alloc('e', 6, 's'), same('a', 'e'), wait()") == (0, False, 0)
    assert ask("alloc('f', 6, 's'), same('a', 'f'), mapped()") == (0, True, 2)


def test_memory_is_given_back_when_all_of_it_is_free(ask):
    assert ask("alloc('a', 8, 's'), free('a', 's'), alloc('b', 2, 't'), alloc('c', 2, 's'), wait()") == (0,) * 5
    assert ask("free('b', 't'), wait(), trim('standard'), mapped(), amounts('standard')[0]") == (0, 0, 0, 1, 8)
    assert ask("free('c', 's'), wait(), trim('standard'), mapped(), amounts('standard')") == (0, 0, 0, 0, [0, 8, 0, 8])


def test_a_small_allocation_keeps_no_large_memory(ask):
    assert ask("alloc('a', 400, 's'), free('a', 's'), alloc('b', 3, 's'), mapped()") == (0, 0, 0, 2)
    assert ask("alloc('c', 100, 's'), same('a', 'c'), mapped()") == (0, True, 2)
    assert ask("free('c', 's'), wait(), trim('standard'), mapped()") == (0, 0, 0, 1)


def test_a_pool_that_keeps_memory_gets_more_than_is_asked_for(ask):
    assert ask("alloc('a', 64, 's'), alloc('b', 2, 's'), mapped(), amounts('standard')[0]") == (0, 0, 2, 96)
    assert ask("[alloc(name, 10, 's') for name in 'cde'], mapped()") == ([0, 0, 0], 2)
    assert ask("alloc('f', 200, 's'), alloc('g', 2, 's'), amounts('standard')[0]") == (0, 0, 96 + 200 + 64)
    assert ask("pool('p'), alloc('h', 64, 's', 'p'), alloc('i', 2, 's', 'p'), amounts('p')[0]") == (0, 0, 0, 66)
    ask(f"set_total({(96 + 200 + 64 + 66 + 63) * GRAIN})")
    assert ask("alloc('j', 63, 's'), mapped(), amounts('standard')[0]") == (0, 7, 96 + 200 + 64 + 63), "as there is"


@pytest.mark.parametrize("seed", range(2))
def test_what_is_allocated_by_chance_is_its_own(ask, control, seed):
    """Two streams; each allocation holds what was written to it, through swaps, and in the end there is none."""
    chance = random.Random(seed)
    living: dict[str, tuple[int, str]] = {}
    control.must("copy_out", "free", "swap_in")
    before = ask("events()")
    for number in range(160):
        if living and chance.random() < 0.45:
            name = chance.choice(sorted(living))
            byte, stream = living.pop(name)
            assert ask(f"synchronize({stream!r}), holds({name!r})") == (0, byte)
            where = chance.choice([f", {stream!r}"] * 4 + [""])
            assert ask(f"free({name!r}{where})") == 0
        else:
            name, byte, stream = f"m{number}", chance.randrange(1, 255), chance.choice("st")
            size = chance.choice([1, 1.5, 2, 3, 5, 8.75, 13])
            assert ask(f"alloc({name!r}, {size}, {stream!r}), launch({stream!r}, {name!r}, {byte})") == (0, 0)
            living[name] = byte, stream
        if number % 40 == 39:
            assert ask("wait(), trim('standard', 20)") == (0, 0)
            control.must("copy_out", "free", "swap_in")
            assert ask(f"[holds(name) for name in {[*living]}]") == [byte for byte, _ in living.values()]
    used = ask("amounts('standard')[2] * GRAIN, sum(sizes[name] for name in " + repr([*living]) + ")")
    assert used[0] == used[1]
    assert ask(f"[free(name, 's') for name in {[*living]}], wait(), trim('standard'), mapped()")[1:] == (0, 0, 0)
    assert ask("amounts('standard')[0], free_bytes() == 1 << 40, events()") == (0, True, before)


def test_amounts_and_thresholds(ask):
    assert ask("amounts('standard')") == [0, 0, 0, 0]
    assert ask("alloc('a', 3, 's'), alloc('b', 1.5, 's'), amounts('standard')") == (0, 0, [5, 5, 4.5, 4.5])
    assert ask("free('a', 's'), wait(), amounts('standard')") == (0, 0, [5, 5, 1.5, 4.5]), "the threshold is high"
    assert ask("set_attribute('standard', USED_HIGH, 0), amounts('standard')[3]") == (0, 1.5)
    assert ask("trim('standard', 4), mapped(), amounts('standard')[0]") == (0, 1, 2)
    assert ask("free('b'), amounts('standard')") == (0, [2, 5, 0, 1.5]), "it is the pool's again"
    assert ask("set_attribute('standard', THRESHOLD, 0), alloc('a', 3, 's'), free('a', 's'), mapped()") == (0, 0, 0, 1)
    before = ask("outstanding()[0]")
    assert ask("wait(), free_bytes() + outstanding()[0]") == (0, 1 << 40), "what is asked for is given back first"
    assert (before, ask("mapped(), amounts('standard')[0]")) == (3 * GRAIN, (0, 0))


def test_a_loop_allocates_nothing_anew(ask):
    assert ask("set_attribute('standard', THRESHOLD, 0)") == 0, "as it is by default"
    assert ask("[(alloc('a', 8, 's'), launch('s', 'a', n), free('a', 's')) for n in range(50)][-1]") == (0, 0, 0)
    assert ask("mapped(), wait()") == (1, 0)


def test_with_too_little_memory_blocks_are_given_back(ask):
    ask(f"set_total({10 * GRAIN})")
    assert ask("alloc('a', 4, 's'), launch('s', 'a', 1, 100), free('a', 's'), alloc('b', 8, 't')") == (0, 0, 0, 0)
    assert ask("mapped(), free('b', 't'), __import__('virtual_memory').alloc('c', 9), wait()") == (1, 0, 0, 0)


@pytest.mark.parametrize("call", ["alloc('c', 0.25, 't')", "alloc('c', 0.25, 't', 'standard')"])
def test_the_drivers_own_allocations_get_the_memory_of_blocks(ask, call):
    ask(f"set_total({4 * GRAIN})")
    assert ask("alloc('a', 4, 's'), launch('s', 'a', 1, 100), free('a', 's'), mapped()") == (0, 0, 0, 1)
    assert ask(f"{call}, mapped(), wait()") == (0, 0, 0)


def test_what_the_driver_serves(ask, control):
    """Small memory, pools that another process could have, streams of other contexts, and during a capture."""
    assert ask("alloc('small', 0.25, 's'), pool('shared', exportable=True), alloc('a', 2, 's', 'shared')") == (0, 0, 0)
    assert ask("new_context(), alloc('b', 2, 's'), stream('other'), alloc('own', 2, 'other'), mapped()") == (
        0,
        0,
        0,
        0,
        1,
    )
    assert ask("launch('other', 'own', 4), free('own', 'other'), end_context()") == (0, 0, 0)
    assert ask("begin_capture('t'), alloc('c', 2, 's'), end_capture('t'), mapped()") == (0, 0, 0, 1)
    assert ask("free('small', 's'), free('a', 's'), free('b', 's'), free('c', 's')") == (0, 0, 0, 0)
    assert control.ask("status")["bytes"] == 2 * GRAIN
    assert ask("alloc('d', 2, 's'), same('d', 'own')") == (0, True), "its context's work has ended with it"


def test_memory_outlives_its_context(ask, control):
    assert ask("new_context(), stream('u'), alloc('a', 2, 'u'), launch('u', 'a', 7), wait(), end_context()") == (0,) * 6
    assert ask("holds('a'), alloc('b', 2, 's')") == (7, 0)
    swapped(control, ask, 2 * GRAIN, left=2 * GRAIN)
    assert ask("holds('a'), free('a'), trim('standard'), mapped()") == (7, 0, 0, 1)


def test_memory_that_was_freed_behind_work_of_a_context_that_ends(ask):
    """Memory of cuMemAlloc, freed on a stream of another context: the event that tells when is gone with that."""
    assert ask("new_context(), stream('u'), cu.cuCtxSetCurrent(context)") == (0, 0, 0)
    assert ask("plain('c', 2), mapped()") == (0, 1)
    assert ask("free('c', 'u'), end_context(), wait()") == (0, 0, 0)
    assert ask("alloc('d', 2, 's'), mapped()") == (0, 1), "it was given back"


def test_a_block_belongs_to_the_context_that_it_is_used_in(ask, control):
    assert ask("new_context(), stream('u'), alloc('a', 2, 'u'), free('a', 'u'), wait(), end_context()") == (0,) * 6
    assert ask("alloc('b', 2, 's'), same('a', 'b'), launch('s', 'b', 3), wait()") == (0, True, 0, 0)
    swapped(control, ask, 2 * GRAIN)
    assert ask("holds('b')") == 3


def test_a_pool_that_is_destroyed_ends_when_its_memory_is_freed(ask):
    assert ask("pool('p'), alloc('a', 2, 's', 'p'), alloc('b', 2, 's', 'p'), free('b', 's'), wait()") == (0,) * 5
    assert ask("end_pool('p'), mapped(), launch('s', 'a', 3), wait(), holds('a')") == (0, 1, 0, 0, 3)
    assert ask("free('a', 's'), wait(), free_bytes() == 1 << 40") == (0, 0, True)


def test_pools_of_two_devices(programs, doubles, runtime_base):
    with asking(programs, doubles, PROGRAM, runtime_base / "fast", DOUBLE_DEVICES="2") as ask:
        begun(ask, runtime_base / "fast")
        assert ask("pool('p', 1), alloc('a', 2, 's', 'p'), mapped()") == (0, 0, 0), (
            "of another device than the stream's"
        )
        assert ask("new_context(1), stream('u'), alloc('b', 2, 'u', 'p'), mapped(), describe('b')[9:11]") == (
            0,
            0,
            0,
            1,
            [0, 1],
        )
        assert ask("alloc('c', 2, 'u'), launch('u', 'b', 3), launch('u', 'c', 4), wait()") == (0, 0, 0, 0)
        with Control(runtime_base / "fast") as control:
            swapped(control, ask, 4 * GRAIN, left=2 * GRAIN)
        assert ask("holds('b'), holds('c')") == (3, 4)


def test_a_capture_refuses_a_swap_and_frees_as_the_driver(ask, control):
    assert ask("alloc('a', 2, 's'), alloc('b', 2, 's'), begin_capture('t')") == (0, 0, 0)
    assert control.ask("copy_out")["cuda"] == 600
    assert ask("free('a', 't'), free('a', 's'), end_capture('t')") == (INVALID, 0, 0)
    swapped(control, ask, 4 * GRAIN)


#: What gives memory back, or first has to.
GATED = {
    "free('a', 's')": 0,
    "free('a')": 0,
    "free('other', 's')": 0,
    "free('other')": 0,
    "attribute('standard', USED)": 2 * GRAIN,
    "trim('standard')": 0,
    "end_pool('p')": 0,
    "end_capture('t')": 0,
    "cu.cuDevicePrimaryCtxRelease_v2(0)": 0,
}


@pytest.mark.parametrize("call", GATED)
def test_a_call_that_frees_waits_at_the_gate_and_no_interrupt_ends_that(ask, control, call):
    """The driver is not asked whether work is done: in a process that it has suspended that is the end."""
    assert ask("alloc('a', 2, 's'), alloc('b', 2, 's'), free('b', 's'), pool('p'), plain('other', 2)") == (0,) * 5
    assert ask("set_attribute('standard', THRESHOLD, 0)") == 0, "there is memory to give back"
    assert ask("cu.cuDevicePrimaryCtxRetain(ctypes.byref(Address()), 0)") == 0, "it stays when it is released"
    assert "capture" not in call or ask("begin_capture('t')") == 0
    control.must("close 0")
    before = ask("waits_for_work()")
    ask(f"begin({call!r})")
    until(lambda: control.ask("status")["touches"] == 1, "it waits at the gate")
    ask("interrupt()")
    until(lambda: control.ask("status")["touches"] == 2, "it waits again")
    assert ask("waits_for_work(), done") == (before, [])
    control.must("open")
    until(lambda: ask("done") == [GATED[call]], "it continues")


def test_a_question_for_free_memory_waits_at_the_gate_until_it_opens_or_an_interrupt_ends_that(ask, control):
    """A process that the driver has suspended would get an error, without an interrupt."""
    assert ask("alloc('a', 2, 's'), free('a', 's')") == (0, 0)
    question = "cu.cuMemGetInfo_v2(ctypes.byref(Size()), ctypes.byref(Size()))"
    control.must("close 0")
    ask(f"begin({question!r})")
    until(lambda: control.ask("status")["touches"] == 1, "it waits at the gate")
    assert ask("done") == []
    ask("interrupt()")
    until(lambda: ask("done") == [OPERATING_SYSTEM], "it is interrupted")
    ask(f"begin({question!r})")
    until(lambda: control.ask("status")["touches"] == 2, "it waits at the gate")
    control.must("open")
    until(lambda: ask("done") == [OPERATING_SYSTEM, 0], "it continues")


def test_questions_for_an_address_wait_until_its_memory_is_back(ask, control):
    """Of memory that is swapped out the driver would say that there is none; of other addresses it is asked at once."""
    assert ask("alloc('a', 2, 's'), plain('b', 3)") == (0, 0)
    control.must("close 0", "copy_out", "free")
    assert ask("cu.cuPointerGetAttribute(ctypes.byref(Size()), 2, Address(4096))") == INVALID
    one = "cu.cuPointerGetAttribute(ctypes.byref(Size()), 2, Address(memory['a']))"
    several = (
        "(types := (ctypes.c_int * 1)(2), place := (ctypes.c_ubyte * 8)(), places := (ctypes.c_void_p * 1)"
        "(ctypes.addressof(place)), [cu.cuPointerGetAttributes(1, types, places, Address(memory['b'])), place[0]])[-1]"
    )
    for count, question in enumerate((one, several), 1):
        ask(f"begin({question!r})")
        until(lambda count=count: control.ask("status")["touches"] == count, "it waits at the gate")
    assert ask("done") == []
    control.must("swap_in", "open")
    until(lambda: sorted(ask("done"), key=str) == [0, [0, 2]], "they are answered")


#: What programs do right and wrong; with the library and without they get the same.
SAME = [
    "stream('s'), standard(), alloc('a', 4, 's'), alloc('z', 0, 's'), alloc('huge', 1 << 40, 's'), describe('a', 77)",
    "alloc('small', 0.25, 's'), describe('small'), amounts('standard')",
    "launch('s', 'a', 5), wait(), holds('a'), free('a', 's'), wait(), free('a'), free('small', 's'), wait()",
    "amounts('standard'), trim('standard'), amounts('standard'), free_bytes()",
    "[set_attribute('standard', n, v) for n in range(4, 9) for v in (0, 1)], attribute('standard', THRESHOLD)",
    "pool('p'), alloc('b', 2, 's', 'p'), describe('b'), amounts('p')",
    "choose('p'), alloc('c', 3, 'null'), describe('c')",
    "free('c'), free('b'), free('b'), end_pool('p'), end_pool('standard'), alloc('d', 2, 's', 'p')",
    "begin_capture('s'), free('c', 's'), end_capture('s'), set_attribute('standard', THRESHOLD, 0), free_bytes()",
    "alloc('e', 2, 's'), begin_capture('s'), free('e', 's'), end_capture('s'), free('e', 's'), wait(), free_bytes()",
]


def test_results_and_errors_are_the_drivers(programs, doubles, runtime_base):
    same_answers(programs, doubles, PROGRAM, runtime_base / "fast", SAME)
