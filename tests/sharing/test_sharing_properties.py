"""Properties of the policy of sharing, at every moment of random days of random kernels on random GPUs."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import simpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from notebook_activity import Habits, endless
from shared_gpus import ALIVE, Ran, SharedGpus

from jupyter_gpu_ckpt.sharing.participant import Participant, Residence
from jupyter_gpu_ckpt.sharing.policy import ALONE_S, SILENT_S, Decisions, NodeSnapshot, Rules, decide, silent

pytestmark = pytest.mark.slow

TOTAL = 100
RULES = Rules()
PROPERTY = settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
FACTORS = {1, 2, 4}
#: Seconds of the longest move off a GPU and onto it: one may be under way when a wait begins.
MOVE = 4.5


@dataclass(frozen=True)
class Day:
    """A scenario: records at its begin, the cells of each kernel (gap, seconds), and what happens besides."""

    gpus: int
    records: tuple[Participant, ...]
    cells: tuple[tuple[tuple[float, float], ...], ...]
    faults: tuple[tuple[float, str, int], ...] = ()


@dataclass
class Wait:
    """A time in which kernels of a user waited and none had a turn: the seconds of moves in it, and its longest turn.

    While it lasts, ``moves`` are those before it.
    """

    since: float
    moves: float
    longest: float = 0.0
    until: float = 0.0


@dataclass
class Seen:
    """Observations of a day that has ended."""

    node: SharedGpus
    ran: list[Ran] = field(default_factory=list)
    waits: list[Wait] = field(default_factory=list)


def days(*, several: bool = False, faults: tuple[str, ...] = (), movable: bool = True) -> st.SearchStrategy[Day]:
    """Days; with kernels that need several GPUs, with faults, with kernels that cannot be moved."""

    @st.composite
    def day(draw) -> Day:
        gpus = draw(st.integers(2 if several else 1, 3))
        names = [f"GPU-{number}" for number in range(gpus)]
        count = draw(st.integers(2, 6))
        records, cells = [], []
        for number in range(count):
            allowed = draw(st.permutations(names))[: draw(st.integers(1, gpus))]
            parts = draw(st.integers(1, len(allowed))) if several else 1
            needs = tuple(draw(st.integers(10, TOTAL)) for _ in range(parts))
            record = Participant(
                kernel=f"k{number}",
                user=f"u{draw(st.integers(0, 3))}",
                gpus=tuple(allowed),
                needs=needs,
                alive_at=ALIVE,
                leave_seconds=draw(st.sampled_from([0.0, 0.3, 2.0])),
                arrive_seconds=draw(st.sampled_from([0.0, 0.3, 2.5])),
                can_pause=movable or draw(st.booleans()),
                can_leave=movable or draw(st.booleans()),
            )
            records.append(record)
            seconds = st.sampled_from([0.5, 5.0, 29.0, 70.0, 200.0])
            cells.append(tuple(draw(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 45.0]), seconds), max_size=4))))
        what = st.tuples(st.sampled_from([0.1, 1.0, 7.0, 31.0, 62.0, 150.0]), st.sampled_from(faults or ("",)))
        happens = draw(st.lists(what, max_size=4)) if faults else []
        which = [draw(st.integers(0, count - 1)) for _ in happens]
        return Day(
            gpus, tuple(records), tuple(cells), tuple((*each, k) for each, k in zip(happens, which, strict=True))
        )

    return day()


class Checked(SharedGpus):
    """A node that asserts the invariants of every moment."""

    def __init__(self, env: simpy.Environment, day: Day, seed: int = 0) -> None:
        super().__init__(env, {f"GPU-{number}": TOTAL for number in range(day.gpus)}, watch=self.check)
        self.random = random.Random(seed)
        self.unserved: dict[str, Wait] = {}
        self.moves = 0.0
        self.seen = self.shuffled
        self.observed = Seen(self)

    def shuffled(self, snapshot: NodeSnapshot) -> NodeSnapshot:
        """The same facts in another order, of which the same comes out."""
        records = list(snapshot.participants)
        self.random.shuffle(records)
        other = replace(snapshot, participants=tuple(records), gpus=snapshot.gpus[::-1])
        assert decide(other) == decide(snapshot)
        return other

    def check(self, decisions: Decisions) -> None:
        for gpu, total in self.gpus.items():
            there = [dict(zip(each.on, each.resident, strict=True)).get(gpu, 0) for each in self.records.values()]
            assert sum(there) + self.others[gpu] <= total, "memory was given twice"
        for record in self.records.values():
            assert len(set(record.on)) == len(record.on) and set(record.on) <= set(record.gpus)
            assert (record.residence is Residence.AWAY) == (not record.on)
            assert record.turn is None or record.waiting_since is None
            assert (record.kernel in self.cells) == (record.turn is not None or record.waiting_since is not None)
            assert record.turn is None or record.turn.seconds <= RULES.longest_turn
        assert set(decisions.factors.values()) <= FACTORS
        waiting = {
            each.kernel
            for each in self.records.values()
            if each.waiting_since is not None and not silent(each, self.env.now)
        }
        decided = Counter(each.kernel for each in (*decisions.grants, *decisions.waits, *decisions.refusals))
        assert set(decided.values()) <= {1}
        if not (decisions.grants or decisions.suspends):  # nothing changed since
            assert waiting == set(decided), "a kernel that waits is in no list"
            self.count_waits(decisions)

    def _suspend(self, kernel: str) -> bool:
        record = self.records[kernel]
        turn = record.turn
        assert record.residence is Residence.PRESENT and record.can_leave
        if turn is not None:
            assert record.can_pause
            elapsed = self.env.now - turn.since + 1e-6
            new = [each for each in self.records.values() if each.waiting_since is not None and not each.turns]
            assert elapsed >= turn.seconds or (not turn.first and new and elapsed >= min(RULES.cut, turn.seconds))
        return super()._suspend(kernel)

    def count_waits(self, decisions: Decisions) -> None:
        """Note for how long a user's kernels have all waited, and what came before them in that time."""
        moves = sum(self.totals.swaps.values())
        computing = [each.factor for each in self.records.values() if each.turn is not None]
        longest = RULES.turn * max([*decisions.factors.values(), *computing])
        for user in {each.user for each in self.records.values()}:
            mine = [each for each in self.records.values() if each.user == user]
            waits = any(each.waiting_since is not None for each in mine) and not any(each.turn for each in mine)
            if waits:
                wait = self.unserved.setdefault(user, Wait(self.env.now, self.moves))
                wait.longest = max(longest, wait.longest)
            elif user in self.unserved:
                wait = self.unserved.pop(user)
                wait.moves, wait.until = moves - wait.moves, self.env.now
                self.observed.waits.append(wait)
        self.moves = moves


def live(day: Day, node: Checked, number: int) -> simpy.events.ProcessGenerator:
    record = day.records[number]
    for gap, seconds in day.cells[number]:
        yield node.env.timeout(gap)
        if record.kernel not in node.records:
            return
        node.observed.ran.append((yield from node.cell(record.kernel, seconds)))
    if not record.can_leave and record.kernel in node.records:
        node.end(record.kernel)  # nobody else could have its memory


def happen(day: Day, node: Checked) -> simpy.events.ProcessGenerator:
    """The faults, one after the other; at the end all that was stopped runs again."""
    for after, what, number in day.faults:
        yield node.env.timeout(after)
        kernel = f"k{number}"
        if what == "occupy":
            there = sum(
                dict(zip(each.on, each.resident, strict=True)).get("GPU-0", 0) for each in node.records.values()
            )
            node.occupy("GPU-0", TOTAL - there)
        elif kernel in node.records:
            {"stop": node.stop, "continue": node.continue_stopped, "kill": node.end, "interrupt": node.interrupt}[what](
                kernel
            )
    yield node.env.timeout(60.0)
    node.occupy("GPU-0", 0)
    for kernel in list(node.stopped):
        node.continue_stopped(kernel)


def run(day: Day, node_class: type[Checked] = Checked) -> Seen:
    """The day until all cells have ended, which must be."""
    env = simpy.Environment()
    node = node_class(env, day)
    for record in day.records:
        node.join(record)
    lives = [env.process(live(day, node, number)) for number in range(len(day.records))]
    faults = env.process(happen(day, node))
    work = sum(gap + seconds for cells in day.cells for gap, seconds in cells)
    env.run(until=env.all_of([*lives, faults]) | env.timeout(1000 + 20 * work))
    assert all(not each.is_alive for each in lives), "a cell starved, or its turn was lost"
    return node.observed


def no_user_waits_longer_than_a_turn_of_each_other(seen: Seen, users: int) -> None:
    """Assert it; moves are not counted."""
    for wait in seen.waits:
        assert wait.until - wait.since <= (users - 1) * wait.longest + wait.moves + MOVE


@given(days())
@PROPERTY
def test_every_cell_ends_after_it_has_computed_and_no_user_waits_longer_than_a_turn_of_each_other(day):
    seen = run(day)
    assert len(seen.ran) == sum(map(len, day.cells))
    assert sum(seen.node.totals.computed.values()) >= sum(each.seconds for each in seen.ran) - 1e-3
    no_user_waits_longer_than_a_turn_of_each_other(seen, len({each.user for each in day.records}))


@given(days(movable=False))
@PROPERTY
def test_a_gpu_is_not_left_idle_while_a_kernel_waits_that_it_has_the_memory_for(day):
    """Kernels that have a turn or cannot be moved are in its way, or one moves; or it soon has another GPU alone."""

    class Busy(Checked):
        def check(self, decisions: Decisions) -> None:
            super().check(decisions)
            if decisions.grants or decisions.suspends:
                return
            for wait in decisions.waits:
                record = self.records[wait.kernel]
                alone = wait.seconds is not None and wait.seconds <= ALONE_S + record.arrive_seconds
                if record.residence is Residence.AWAY and not alone:
                    for gpu in record.gpus:
                        there = [each for each in self.records.values() if gpu in each.on]
                        moves = any(each.residence is not Residence.PRESENT for each in there)
                        stays = [each for each in there if each.turn or not (each.can_leave and each.can_pause)]
                        assert moves or record.needs[0] + sum(each.resident[0] for each in stays) > TOTAL

    run(day, Busy)


@given(days(several=True, movable=False))
@PROPERTY
def test_kernels_with_several_gpus_never_wait_for_each_other_for_ever(day):
    assert len(run(day).ran) == sum(map(len, day.cells))


@given(days(several=True, faults=("stop", "continue", "kill", "interrupt", "occupy")))
@PROPERTY
def test_nothing_is_lost_when_servers_stop_kernels_end_and_programs_take_memory(day):
    seen = run(day)
    killed = {f"k{number}" for _, what, number in day.faults if what == "kill"}
    interrupted = {f"k{number}" for _, what, number in day.faults if what == "interrupt"}
    for number, cells in enumerate(day.cells):
        if f"k{number}" not in killed:
            assert sum(each.kernel == f"k{number}" for each in seen.ran) == len(cells)
    for ran in seen.ran:
        if ran.kernel not in killed | interrupted:
            assert ran.ended - ran.touched >= ran.seconds - 1e-3


@given(days(several=True), st.integers(0, 1000))
@PROPERTY
def test_suspends_decided_on_old_records_are_safe(day, seed):
    """A server knows its own record, and of the others' one from before."""

    class Stale(Checked):
        before: NodeSnapshot | None = None

        def settle(self) -> None:
            old, self.before = self.before, self.snapshot()
            if old is not None and self.random.random() < 0.5:
                unchanged = {each.kernel for each in old.participants if self.records.get(each.kernel) == each}
                for suspend in decide(replace(old, now=self.env.now)).suspends:
                    if suspend.kernel in unchanged:
                        self._suspend(suspend.kernel)
            super().settle()

    run(day, Stale)


@given(days(several=True, faults=("stop",)))
@PROPERTY
def test_a_silent_holder_stands_in_nobodys_way_but_for_its_memory(day):
    """From `SILENT_S` after the stop on, no decision speaks of it."""

    class Silent(Checked):
        def check(self, decisions: Decisions) -> None:
            super().check(decisions)
            for each in (*decisions.grants, *decisions.suspends, *decisions.waits):
                assert self.env.now - self.records[each.kernel].alive_at <= SILENT_S or each.kernel not in self.stopped

    run(day, Silent)


def test_swaps_of_more_than_a_twentieth_double_the_turns_up_to_four_times():
    """Two kernels that always compute, with moves of ten seconds: the guard rises, and swaps fall."""
    env = simpy.Environment()
    factors: list[int] = []

    def watch(decisions: Decisions) -> None:
        factors.append(decisions.factors["GPU-0"])

    node = SharedGpus(env, {"GPU-0": TOTAL}, watch=watch)
    for name in ("a", "b"):
        record = Participant(name, name, ("GPU-0",), (80,), ALIVE, leave_seconds=10.0, arrive_seconds=10.0)
        node.join(record)
        env.process(node.cell(name, 1e6))
    swapped = []
    for hour in range(1, 5):
        env.run(until=hour * 3600)
        swapped.append(node.totals.swaps["GPU-0"])
    changes = [factor for factor, _ in itertools.groupby(factors)]
    assert changes[:3] == [1, 2, 4] and set(changes) == FACTORS
    per_hour = [(later - before) / 3600 for before, later in itertools.pairwise(swapped)]
    assert max(per_hour) < 20 / (240 + 20) + 0.01
    assert all(turn.seconds <= RULES.longest_turn for each in node.records.values() if (turn := each.turn))


@pytest.mark.parametrize("seed", range(3))
def test_turns_that_are_shortened_again_keep_no_new_cell_waiting_and_no_user_for_longer(seed):
    """Eight users of a GPU, on which one of their kernels fits, for a day: the guard rises and falls."""
    env, hours = simpy.Environment(), 24.0
    node = Checked(env, Day(1, (), ()), seed)
    short: list[float] = []
    factors: list[int] = []

    def watch(decisions: Decisions) -> None:
        factors.append(decisions.factors["GPU-0"])
        Checked.check(node, decisions)

    def use(user: str) -> simpy.events.ProcessGenerator:
        node.join(Participant(user, user, ("GPU-0",), (80,), ALIVE, leave_seconds=1.3, arrive_seconds=1.3))
        for cell in endless(random.Random(f"{seed}/{user}"), Habits()):
            yield env.timeout(cell.gap)
            ran = yield from node.cell(user, cell.seconds)
            if ran.seconds <= RULES.first_turn:
                short.append(ran.ended - ran.touched)

    node.watch = watch
    for number in range(8):
        env.process(use(f"u{number}"))
    env.run(until=hours * 3600)
    changes = [factor for factor, _ in itertools.groupby(factors)]
    assert changes.count(2) > 1, "it has risen again after it fell"
    no_user_waits_longer_than_a_turn_of_each_other(node.observed, 8)
    assert len(short) > 20 and sorted(short)[int(0.95 * len(short))] <= 50.0
    assert max(short) <= 4 * RULES.first_turn, "its own turn, and some of other new cells"
