"""The simulated notebooks that share GPUs, by the package's own policy."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import simpy
from experiment import Plan, Use
from move_costs import GIB
from notebook_activity import WEEK, endless
from shared_gpus import ALIVE, SharedGpus
from sharing_cluster import SharingCluster
from sharing_study import TURNS, OneGpu, jain, one_gpu, replay

from jupyter_gpu_ckpt.sharing.participant import Participant, Residence


def test_short_cells_come_through_swaps_are_few_and_users_equal():
    """Four notebooks whose memory does not fit together, for 40 hours in all; the same at each run."""
    turns, alone = (
        one_gpu(OneGpu(4, 16, discipline, hours=20.0, seeds=(1, 2))) for discipline in ("turns", "each cell to its end")
    )
    assert turns.short_cells > 40
    assert turns.short[1] <= 45 < alone.short[1]
    assert turns.swaps <= 0.05
    assert turns.fairness >= 0.95


def test_the_index_of_fairness():
    assert jain([2.0, 2.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25


def test_kernels_that_compute_on_one_gpu_share_its_speed():
    env = simpy.Environment()
    node = SharedGpus(env, {"A": 100, "B": 100})
    ended = []

    def life(name: str, gpus: tuple[str, ...], seconds: float):
        node.join(Participant(name, name, gpus, (10,), ALIVE))
        ended.append((name, (yield from node.cell(name, seconds)).ended))

    for name, gpus, seconds in (("a", ("A",), 10.0), ("b", ("A",), 20.0), ("c", ("B",), 10.0)):
        env.process(life(name, gpus, seconds))
    env.run()
    assert dict(ended) == pytest.approx({"a": 20.0, "b": 30.0, "c": 10.0})
    assert node.totals.uses[Use.COMPUTING] == pytest.approx(40.0)
    assert node.totals.crowded == pytest.approx(20.0)


@pytest.mark.parametrize(("overlap", "started"), [(False, 1.3), (True, 0.7)])
def test_a_kernel_moves_to_a_gpu_while_another_leaves_it_and_arrives_when_that_has_left(overlap, started):
    env = simpy.Environment()
    node = SharedGpus(env, {"A": 20 * GIB}, overlap=overlap)
    for name in ("there", "comes"):
        node.join(Participant(name, "u", ("A",), (12 * GIB,), ALIVE, leave_seconds=0.7, arrive_seconds=0.6))
    ran = []

    def life(name: str, at: float):
        yield env.timeout(at)
        ran.append((yield from node.cell(name, 5.0)))

    env.process(life("there", 0.0))
    env.run(until=env.process(life("comes", 100.0)))
    assert ran[1].started - ran[1].touched == pytest.approx(started)


@pytest.fixture(scope="module")
def host() -> tuple[SharingCluster, Plan]:
    plan = replace(TURNS, users=60, nodes=1, gpus_per_node=2, weeks=1, warm_up=0.0)
    cluster = SharingCluster(plan)
    cluster.run()
    return cluster, plan


def test_every_second_of_the_gpus_is_accounted_for_and_nothing_is_lost(host):
    cluster, plan = host
    result = cluster.result
    assert sum(result.gpu.values()) == pytest.approx(plan.gpus * WEEK, rel=1e-3)
    assert result.lost == 0 and result.cells == len(cluster.ran) > 500
    assert result.gpu[Use.COMPUTING] >= sum(each.seconds for each in cluster.ran) / plan.gpus_per_node / 2
    assert 0 < cluster.swap_share() < 0.05


def test_host_memory_has_what_is_off_the_gpus(host):
    """The memory of kernels that are away after a time on a GPU, and of those that are read or written just now."""
    cluster, plan = host
    whole = plan.memory_per_gpu * plan.gpus_per_node
    used = whole - cluster.memory[0]
    away = [
        record.needs[0]
        for record in cluster.shares[0].records.values()
        if record.residence is not Residence.PRESENT and cluster.by_name[record.kernel].away_since is not None
    ]
    moving = [kernel.person.device for kernel in cluster.kernels if kernel.settled is not None]
    assert sum(away) <= used <= sum(away) + sum(moving)


def test_a_kernel_takes_its_checkpoint_when_it_has_been_idle_and_comes_back(host):
    cluster, _ = host
    assert any(move.read for move in cluster.result.moves) and any(not move.read for move in cluster.result.moves)
    assert cluster.result.stored_most > 0


def test_a_run_of_the_simulation_itself_is_replayed_exactly(tmp_path):
    env, gpus = simpy.Environment(), {"A": 20 * GIB}
    kernels = {}

    def moved(record: Participant) -> None:
        moves = "leave_seconds" if record.residence is Residence.AWAY else "arrive_seconds"
        kernels[record.kernel][moves].append(getattr(record, moves))

    node = SharedGpus(env, gpus, moved=moved)

    def life(name: str):
        facts = {"kernel": name, "user": name, "gpus": ["A"], "needs": [12 * GIB]}
        kernels[name] = {**facts, "leave_seconds": [], "arrive_seconds": [], "cells": []}
        node.join(Participant(name, name, ("A",), (12 * GIB,), ALIVE, leave_seconds=0.7, arrive_seconds=0.6))
        cells = endless(random.Random(name))
        for _ in range(12):
            cell = next(cells)
            yield env.timeout(cell.gap)
            ran = yield from node.cell(name, cell.seconds)
            times = {"touched": ran.touched, "started": ran.started, "ended": ran.ended, "seconds": ran.seconds}
            kernels[name]["cells"].append(times)

    lives = [env.process(life(name)) for name in ("a", "b", "c")]
    env.run(until=env.all_of(lives))
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"gpus": gpus, "seconds": env.now, "kernels": list(kernels.values())}))
    found = replay(path)
    assert found["simulated"] == pytest.approx(found["measured"], rel=0.02, abs=1e-3)
    assert found["measured"]["wait, p95"] > 1.0
    twice = replay(path, path)
    for name in ("measured", "simulated"):
        assert twice[name].pop("seconds") == 2 * found[name].pop("seconds")
        assert twice[name] == pytest.approx(found[name], abs=1e-9), "the cells of both runs count together"
