"""The simulated cluster: nothing is used twice, every GPU second is accounted for, and the real policy decides."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from experiment import Plan, Strategy, Use
from gpu_cluster import INTERVAL, Cluster
from move_costs import GIB, measured
from notebook_activity import DAY, HOUR, WEEK, Cell, Habits, Person, Session, people

from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.server.idle.policy import Policy, Rule

SMALL = Plan(users=60, nodes=2, gpus_per_node=2, weeks=1, warm_up=0.0)
SHARED = replace(SMALL, gpu_memory=139 * GIB)
PLANS = {
    "none": replace(SMALL, strategy=Strategy.NONE),
    "cull": replace(SMALL, strategy=Strategy.CULL),
    "servers": replace(SMALL, rule=Rule(0.0, 600.0), cull_after=600.0, spawn=30.0),
    "one at a time": SMALL,
    "shared": SHARED,
    "shared, any": replace(SHARED, any_gpu=True),
    "shared, little memory": replace(SHARED, memory_per_gpu=24 * GIB),
    "shared, none": replace(SHARED, strategy=Strategy.NONE),
}


@pytest.fixture(params=PLANS, scope="module")
def plan(request) -> Plan:
    return PLANS[request.param]


def require_sound(cluster: Cluster) -> None:
    """Assert the invariants of every moment."""
    plan = cluster.plan
    whole = plan.gpu_memory or 1
    devices = {kernel.person.number: kernel.person.device for kernel in cluster.kernels}
    for gpu in cluster.gpus:
        assert 0 <= gpu.free <= whole
        if not plan.gpu_memory:
            assert len(gpu.uses) == 1 - gpu.free
        elif all(number in devices for number in gpu.uses):  # a fresh kernel is not there yet
            assert sum(devices[number] for number in gpu.uses) + gpu.free == whole
    assert cluster.stored >= 0
    assert all(memory <= plan.memory_per_gpu * plan.gpus_per_node for memory in cluster.memory)
    held = [number for gpu in cluster.gpus for number in gpu.uses]
    assert len(held) == len(set(held)), "one kernel on two GPUs"
    for kernel in cluster.kernels:
        if kernel.state is State.RUNNING:
            assert kernel.gpu is not None and kernel.person.number in kernel.gpu.uses
        elif not kernel.working and kernel.settled is None:
            assert kernel.person.number not in held, "a kernel that is away holds a GPU"


def test_nothing_is_over_committed_at_any_moment(plan):
    cluster = Cluster(replace(plan, users=30))
    step, steps = cluster.env.step, 0

    def checked() -> None:
        nonlocal steps
        step()
        steps += 1
        require_sound(cluster)

    cluster.env.step = checked
    cluster.run()
    assert steps > 1000


def test_every_gpu_second_is_accounted_for(plan):
    for warm_up in (0.0, 2 * DAY):
        result = Cluster(replace(plan, warm_up=warm_up)).run()
        assert sum(result.gpu.values()) == pytest.approx(plan.gpus * WEEK)


def test_all_that_people_wanted_is_computed_or_they_were_turned_away(plan):
    cluster = Cluster(plan)
    result = cluster.run()
    cluster.env.run(until=cluster.end + 2 * WEEK)  # those who sat there at the end, too
    wanted = sum(cell.seconds for person in people(60, 1, 1) for sitting in person.sessions for cell in sitting.cells)
    assert result.demanded == pytest.approx(wanted)
    assert result.computed + result.not_computed == pytest.approx(wanted)
    assert result.sittings == sum(len(person.sessions) for person in people(60, 1, 1))


def test_computing_is_what_the_gpus_computed():
    """One kernel at a time: cells and GPUs have the same seconds."""
    cluster = Cluster(replace(SMALL, any_gpu=True))
    result = cluster.run()
    for gpu in cluster.gpus:
        gpu.since = cluster.env.now
    cluster.env.run(until=cluster.end + 2 * WEEK)
    for gpu in cluster.gpus:
        cluster._account(gpu)
    assert result.gpu[Use.COMPUTING] == pytest.approx(result.computed)


def test_only_plain_culling_loses_anything(plan):
    result = Cluster(plan).run()
    assert (result.lost > 0) == (plan.strategy is Strategy.CULL)
    assert (result.given_back > 0) == (plan.strategy is Strategy.CHECKPOINT)


def test_the_same_seed_gives_the_same_figures():
    def figures(seed: int) -> tuple:
        result = Cluster(replace(SHARED, seed=seed)).run()
        return result.computed, result.gpu, result.wakes, result.moves, result.levels

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)


# -- one person


class Alone(Cluster):
    """One person whose day is known."""

    def __init__(self, plan: Plan, *sessions: Session, device: int = 8 * GIB) -> None:
        super().__init__(replace(plan, users=0, warm_up=0.0, weeks=1))
        self.history: list[tuple[float, str]] = []
        self.env.process(self._life(Person(0, device, sessions)))

    def follow(self) -> list[tuple[float, State]]:
        """Return a list that fills with the kernel's states and their times."""
        step, seen = self.env.step, []

        def noted() -> None:
            step()
            for kernel in self.kernels:
                if not seen or seen[-1][1] is not kernel.state:
                    seen.append((self.env.now, kernel.state))

        self.env.step = noted
        self.run()
        return seen


def test_the_real_policy_says_when():
    cluster = Alone(SHARED, Session(0.0, (Cell(0.0, 100.0), Cell(7200.0, 100.0)), False))
    costs = measured()
    states = cluster.follow()
    assert [state for _, state in states] == [
        State.RUNNING,
        State.SUSPENDED,
        State.CHECKPOINTED,
        State.RUNNING,
        State.SUSPENDED,
        State.CHECKPOINTED,
    ]
    rule = Rule()
    at = [when for when, _ in states]
    gone = 100.0 + rule.suspend_after + costs.suspend(8 * GIB)
    assert gone <= at[1] <= gone + 2 * INTERVAL
    asleep = 100.0 + rule.checkpoint_after + costs.dump(8 * GIB + costs.besides)
    assert asleep <= at[2] <= asleep + 2 * INTERVAL
    back = 7300.0 + costs.restore(8 * GIB + costs.besides) + costs.resume(8 * GIB)
    assert at[3] == pytest.approx(back)
    assert at[4] >= at[3] + 100.0 + rule.suspend_after
    (wake,) = [wake for wake in cluster.result.wakes if wake.source == "disk"]
    assert wake.seconds == pytest.approx(back - 7300.0)


def test_the_policy_decides(monkeypatch):
    """A policy that never decides anything leaves every kernel where it is."""
    monkeypatch.setattr(Policy, "decide", lambda *_: [])
    monkeypatch.setattr(Policy, "outlook", lambda *_: None)
    assert [state for _, state in Alone(SHARED, Session(0.0, (Cell(0.0, 1.0),), False)).follow()] == [State.RUNNING]


def test_a_wake_from_host_memory_takes_the_way_over_pcie_alone():
    cluster = Alone(SHARED, Session(0.0, (Cell(0.0, 100.0), Cell(900.0, 100.0)), False))
    cluster.run()
    (wake,) = [wake for wake in cluster.result.wakes if wake.source == "host memory"]
    assert wake.seconds == pytest.approx(measured().resume(8 * GIB))


def test_a_cell_that_comes_in_the_middle_of_a_move_waits_for_it():
    costs = measured()
    middle = costs.suspend(8 * GIB) / 2
    cluster = Alone(SHARED, Session(0.0, (Cell(0.0, 100.0), Cell(SHARED.rule.suspend_after + middle, 100.0)), False))
    cluster.run()
    (wake,) = [wake for wake in cluster.result.wakes if wake.source != "a fresh kernel"]
    assert costs.resume(8 * GIB) < wake.seconds < costs.resume(8 * GIB) + costs.suspend(8 * GIB)


def test_plain_culling_loses_what_was_computed():
    cluster = Alone(replace(SHARED, strategy=Strategy.CULL), Session(0.0, (Cell(0.0, 100.0), Cell(7200.0, 50.0)), True))
    result = cluster.run()
    assert (result.lost, result.lost_seconds, result.computed) == (1, 100.0, 150.0)


def test_without_host_memory_a_kernel_stays_on_the_gpu():
    """Preflight says NO_MEMORY: nothing is dropped, and the suspend is tried again."""
    cluster = Alone(replace(SHARED, memory_per_gpu=GIB), Session(0.0, (Cell(0.0, 100.0),), False))
    assert [state for _, state in cluster.follow()] == [State.RUNNING]
    assert cluster.result.refused["NO_MEMORY"] > 10


def test_who_waits_too_long_goes_away():
    busy = Session(0.0, (Cell(0.0, 2 * HOUR),), False)
    cluster = Alone(replace(SMALL, nodes=1, gpus_per_node=1), busy)
    cluster.env.process(cluster._life(Person(1, GIB, (Session(10.0, (Cell(0.0, 60.0),), False),))))
    result = cluster.run()
    assert (result.turned_away, result.not_computed) == (1, 60.0)
    assert Habits().patience in [wake.seconds for wake in result.wakes if wake.source == "gave up"]


def test_moves_of_one_node_take_turns_at_its_disk():
    cluster = Alone(SHARED, Session(0.0, (Cell(0.0, 100.0),), False))
    for number in range(1, 4):
        cluster.env.process(cluster._life(Person(number, 8 * GIB, (Session(0.0, (Cell(0.0, 100.0),), False),))))
    moves = sorted(cluster.run().moves, key=lambda move: (move.node, move.begin))
    assert len(moves) == 4
    for before, after in itertools.pairwise(moves):
        assert before.node != after.node or before.begin + before.seconds <= after.begin + 1e-6
