"""Notebooks that share GPUs in turns: one GPU and its notebooks, a cluster, and the replay of a measured run.

Everything is decided by `jupyter_gpu_ckpt.sharing.policy`, at true speed and with true sizes.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import simpy
from experiment import Result, Use
from gpu_cluster import Process
from move_costs import GIB, measured
from notebook_activity import HOUR, Habits, endless
from shared_gpus import ALIVE, Ran, SharedGpus, Totals
from sharing_cluster import SharingCluster, round_robin, to_completion
from study import ARRANGEMENTS, CULLED, H200, HOSTS, KEPT, MINUTE, percentile, run

from jupyter_gpu_ckpt.server.idle.policy import Rule
from jupyter_gpu_ckpt.sharing.participant import Participant
from jupyter_gpu_ckpt.sharing.policy import NodeSnapshot, Rules

#: A cell is short that takes no longer alone.
SHORT = 30.0
#: Simulated hours of one GPU, and the runs of each experiment with one.
HOURS = 100.0
SEEDS = (1, 2, 3)
DISCIPLINES: dict[str, Callable[[NodeSnapshot], NodeSnapshot]] = {
    "each cell to its end": to_completion,
    "round robin, 60 s": round_robin,
    "turns": lambda snapshot: snapshot,
}


@dataclass(frozen=True)
class OneGpu:
    """An experiment: notebooks of ``gib`` each on a GPU that has memory for one; 0: drawn sizes on a whole H200.

    ``users``: how many, of whom the first has the notebooks that are left over.  ``seeds``: runs of so many hours each,
    whose cells are counted together.
    """

    notebooks: int
    gib: int
    discipline: str = "turns"
    users: int = 0
    hours: float = HOURS
    seeds: tuple[int, ...] = SEEDS


@dataclass(frozen=True)
class Waits:
    """Results: shares of the time, seconds, and Jain's index of what users computed for each second of wanting to."""

    computing: float
    swaps: float
    first: tuple[float, float, float]
    short: tuple[float, float]
    stretch: float
    fairness: float
    short_cells: int


def one_gpu(plan: OneGpu) -> Waits:
    """Run one experiment."""
    ran: list[Ran] = []
    totals = Totals()
    for seed in plan.seeds:
        node = _run(plan, seed, ran)
        totals.uses.update(node.totals.uses)
        totals.swaps.update(node.totals.swaps)
        # The users of each run are others.
        totals.computed.update({f"{seed}/{user}": seconds for user, seconds in node.totals.computed.items()})
        totals.wanted.update({f"{seed}/{user}": seconds for user, seconds in node.totals.wanted.items()})
    return waits(totals, ran, plan.hours * HOUR * len(plan.seeds))


def _run(plan: OneGpu, seed: int, ran: list[Ran]) -> SharedGpus:
    """Return the GPU after one run, whose cells are added to ``ran``."""
    env, costs, habits = simpy.Environment(), measured(), Habits()
    total = plan.gib * GIB if plan.gib else H200
    node = SharedGpus(env, {"GPU-0": total}, seen=DISCIPLINES[plan.discipline])

    def life(number: int) -> Process:
        rng = random.Random(f"{seed}/{number}")
        drawn = rng.lognormvariate(math.log(habits.memory_median), habits.memory_sigma)
        device = plan.gib * GIB or int(min(habits.memory_most, drawn))
        user = str(max(0, number - (plan.notebooks - (plan.users or plan.notebooks))))
        record = Participant(
            kernel=str(number),
            user=user,
            gpus=("GPU-0",),
            needs=(device,),
            alive_at=ALIVE,
            leave_seconds=costs.suspend(device),
            arrive_seconds=costs.resume(device),
        )
        node.join(record)
        for cell in endless(rng, habits):
            yield env.timeout(cell.gap)
            ran.append((yield from node.cell(record.kernel, cell.seconds)))

    for number in range(plan.notebooks):
        env.process(life(number))
    env.run(until=plan.hours * HOUR)
    node.settle()
    return node


def waits(totals: Totals, ran: Sequence[Ran], seconds: float) -> Waits:
    """Return the results of ``seconds`` of one GPU."""
    first = sorted(each.started - each.touched for each in ran if each.started is not None)
    short = sorted(each.ended - each.touched for each in ran if each.seconds <= SHORT)
    shares = [totals.computed[user] / wanted for user, wanted in sorted(totals.wanted.items()) if wanted]
    return Waits(
        computing=totals.uses[Use.COMPUTING] / seconds,
        swaps=sum(totals.swaps.values()) / seconds,
        first=(percentile(first, 0.5), percentile(first, 0.9), percentile(first, 0.99)),
        short=(percentile(short, 0.5), percentile(short, 0.95)),
        stretch=sum(each.ended - each.touched for each in ran) / max(1e-9, sum(each.seconds for each in ran)),
        fairness=jain(shares),
        short_cells=len(short),
    )


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index: 1 if all have the same, 1/n if one has everything."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares)) if any(shares) else 1.0


#: Four and eight notebooks that do not fit together; two users, of whom one has three of them; drawn sizes.
PLANS: tuple[OneGpu, ...] = (
    *(OneGpu(number, 16, name) for number, name in itertools.product((4, 8), DISCIPLINES)),
    *(OneGpu(number, 48) for number in (4, 8)),
    OneGpu(4, 16, users=2),
    *(OneGpu(number, 0) for number in (4, 8)),
)

#: Kernels leave a GPU only for others; their images are written after half an hour, as by default.
TURNS = replace(HOSTS, rule=Rule(0.0, 30 * MINUTE))
RESERVED, ROBIN, SHARED = "reservation: " + KEPT, "shared hosts: round robin, 60 s", "shared hosts: turns"
CLUSTERS = {
    RESERVED: (ARRANGEMENTS[KEPT], None),
    CULLED: (ARRANGEMENTS[CULLED], None),
    ROBIN: (TURNS, "round robin, 60 s"),
    SHARED: (TURNS, "turns"),
}


@dataclass(frozen=True)
class ClusterRun:
    """One experiment with a cluster; ``short``: seconds until short cells ended, where that is modelled."""

    result: Result
    short: tuple[float, ...]
    swaps: float


def cluster(name: str, seed: int = 1, users: int = 1000) -> ClusterRun:
    """Run the experiment for one week after another that is not counted."""
    plan, discipline = CLUSTERS[name]
    plan = replace(plan, seed=seed, weeks=1, users=users)
    if discipline is None:
        return ClusterRun(run(plan), (), 0.0)
    shared = SharingCluster(plan, DISCIPLINES[discipline])
    result = shared.run()
    short = sorted(each.ended - each.touched for each in shared.ran if each.seconds <= SHORT)
    return ClusterRun(result, tuple(short), shared.swap_share())


def study(workers: int) -> tuple[dict[OneGpu, Waits], dict[str, ClusterRun]]:
    """Run all experiments."""
    with ProcessPoolExecutor(workers) as pool:
        clusters = {name: pool.submit(cluster, name) for name in CLUSTERS}
        single = dict(zip(PLANS, pool.map(one_gpu, PLANS), strict=True))
        return single, {name: future.result() for name, future in clusters.items()}


# -- the replay of a measured run


@dataclass(frozen=True)
class Replayed:
    """Cells' waits for their first turns and seconds until short ones ended, seconds of moves, all seconds of GPUs."""

    first: list[float]
    short: list[float]
    moves: float
    seconds: float

    def summary(self) -> dict[str, float]:
        """Return the figures by their names, as `replay` does."""
        first, short = sorted(self.first), sorted(self.short)
        return {
            "wait, mean": sum(first) / max(1, len(first)),
            "wait, p50": percentile(first, 0.5),
            "wait, p95": percentile(first, 0.95),
            "short cells done, p95": percentile(short, 0.95),
            "swaps, share of the time": self.moves / self.seconds,
            "seconds": self.seconds,
        }


def replay(*paths: Path) -> dict[str, dict[str, float]]:
    """Feed the simulation with moves and cells of measured runs; return measured and simulated waits and swaps of all.

    A file is JSON: ``gpus`` (bytes that sharers have, by UUID), ``seconds`` (length of the run), ``rules`` (fields of
    `Rules`, all by default), ``overlap`` (as `SharedGpus` has it; false by default), ``kernels``: each with ``kernel``,
    ``user``, ``gpus``, ``needs``, ``leave_seconds`` and ``arrive_seconds`` (lists: every move that was measured) and
    ``cells``: ``touched``, ``started``, ``ended`` (seconds from the begin of the run) and ``seconds`` (how long it
    computes alone).  A pause is what lies between the end of a cell and the next one's touch, whatever the waits are.
    Short cells are those that end in a first turn if alone.
    """
    runs = [_replayed(json.loads(path.read_text())) for path in paths]
    return {
        name: Replayed(
            [wait for each in found for wait in each.first],
            [seconds for each in found for seconds in each.short],
            sum(each.moves for each in found),
            sum(each.seconds for each in found),
        ).summary()
        for name, found in zip(("measured", "simulated"), zip(*runs, strict=True), strict=True)
    }


def _replayed(run: dict[str, Any]) -> tuple[Replayed, Replayed]:
    """Return a run as it was measured, and as it is simulated."""
    env = simpy.Environment()
    rules = Rules(**run.get("rules", {}))
    node = SharedGpus(env, run["gpus"], rules=rules, overlap=bool(run.get("overlap")))
    ran: list[Ran] = []
    moves = 0.0

    def life(kernel: dict[str, Any]) -> Process:
        before = 0.0
        for cell in kernel["cells"]:
            yield env.timeout(max(0.0, cell["touched"] - before))
            before = cell["ended"]
            ran.append((yield from node.cell(kernel["kernel"], cell["seconds"])))

    lives = []
    for kernel in run["kernels"]:
        leaving, arriving = kernel["leave_seconds"], kernel["arrive_seconds"]
        moves += (sum(leaving) + sum(arriving)) * len(kernel["needs"])
        node.join(
            Participant(
                kernel=kernel["kernel"],
                user=kernel["user"],
                gpus=tuple(kernel["gpus"]),
                needs=tuple(kernel["needs"]),
                alive_at=ALIVE,
                leave_seconds=sum(leaving) / max(1, len(leaving)),
                arrive_seconds=sum(arriving) / max(1, len(arriving)),
            )
        )
        lives.append(env.process(life(kernel)))
    env.run(until=env.all_of(lives))
    node.settle()
    cells = [cell for kernel in run["kernels"] for cell in kernel["cells"]]
    measured = Replayed(
        [cell["started"] - cell["touched"] for cell in cells],
        [cell["ended"] - cell["touched"] for cell in cells if cell["seconds"] <= rules.first_turn],
        moves,
        run["seconds"] * len(run["gpus"]),
    )
    return measured, Replayed(
        [each.started - each.touched for each in ran if each.started is not None],
        [each.ended - each.touched for each in ran if each.seconds <= rules.first_turn],
        sum(node.totals.swaps.values()),
        env.now * len(run["gpus"]),
    )
