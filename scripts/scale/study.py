"""The experiments, and the figures that are taken from each."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from experiment import Plan, Result, Strategy, Use
from gpu_cluster import Cluster
from move_costs import GIB
from notebook_activity import DAY, HOUR, WEEK, Habits

from jupyter_gpu_ckpt.server.idle.policy import Rule

SEEDS = (1, 2, 3)
MINUTE = 60.0
#: Seconds a wake waits before its cell fails with GPU_FULL (`LifecycleSettings.reservation`).
RESERVATION = 10.0
#: Bytes of an NVIDIA H200, as NVML tells.
H200 = 139 * GIB
#: GPU-hours of the cluster in a week.
WEEK_HOURS = Plan().gpus * WEEK / HOUR

#: A server has a GPU of its own (Kubernetes, Slurm): it is given back when the hub stops the server.
SERVERS = Plan(rule=Rule(0.0, 5 * MINUTE), cull_after=5 * MINUTE, spawn=30.0)
#: Servers share a host and its GPUs, as far as memory fits: a suspend gives memory back.
HOSTS = Plan(gpu_memory=H200)

#: The names of the arrangements that the text speaks of.
KEPT, CULLED = "GPU for each server: no culling", "GPU for each server: culled after 1 h"
AWAY = "GPU for each server: checkpointed and culled after 5 min"
HOSTS_CULLED = "shared hosts: culled after 1 h"
HOSTS_AWAY = "shared hosts: suspended after 5 min, checkpointed after 30 min"
ARRANGEMENTS: dict[str, Plan] = {
    KEPT: Plan(strategy=Strategy.NONE),
    CULLED: Plan(strategy=Strategy.CULL),
    "GPU for each server: culled after 5 min": Plan(strategy=Strategy.CULL, cull_after=5 * MINUTE),
    "GPU for each server: checkpointed and culled after 1 h": replace(SERVERS, rule=Rule(0.0, HOUR), cull_after=HOUR),
    AWAY: SERVERS,
    "shared hosts: no culling": Plan(strategy=Strategy.NONE, gpu_memory=H200),
    HOSTS_CULLED: Plan(strategy=Strategy.CULL, gpu_memory=H200),
    HOSTS_AWAY: HOSTS,
    "the same, back to any GPU of the host": replace(HOSTS, any_gpu=True),
}


@dataclass(frozen=True)
class Figures:
    """Means over the seeds; percentiles over all of them together.  GPU-hours are for a week."""

    computed: float
    demanded: float
    idle: float
    moving: float
    given_back: float
    crowded: float
    turned_away: float
    lost: float
    lost_hours: float
    wakes: float
    wait_p50: float
    wait_p99: float
    long_waits: float
    cells_at_once: float
    written_a_day: float
    read_a_day: float
    peak_node_rate: float
    peak_cluster_rate: float
    memory_peak: float
    stored_peak: float
    refused: float


def run(plan: Plan) -> Result:
    """One experiment."""
    return Cluster(plan).run()


def figures(results: Sequence[Result]) -> Figures:
    """Of the runs of one plan with several seeds."""
    weeks = results[0].measured / WEEK
    waits = sorted(wake.seconds for result in results for wake in result.wakes)

    def mean(of: Callable[[Result], float]) -> float:
        return statistics.fmean(of(result) for result in results)

    return Figures(
        computed=mean(lambda result: result.computed / HOUR / weeks),
        demanded=mean(lambda result: result.demanded / HOUR / weeks),
        idle=mean(lambda result: result.gpu[Use.IDLE] / HOUR / weeks),
        moving=mean(lambda result: result.gpu[Use.MOVING] / HOUR / weeks),
        given_back=mean(lambda result: result.given_back / HOUR / weeks),
        crowded=mean(lambda result: result.crowded / max(1.0, result.gpu[Use.COMPUTING])),
        turned_away=mean(lambda result: result.turned_away / result.sittings),
        lost=mean(lambda result: result.lost / weeks),
        lost_hours=mean(lambda result: result.lost_seconds / HOUR / weeks),
        wakes=mean(lambda result: len(result.wakes) / weeks),
        wait_p50=percentile(waits, 0.5),
        wait_p99=percentile(waits, 0.99),
        long_waits=mean(
            lambda result: sum(wake.queued > RESERVATION for wake in result.wakes) / max(1, len(result.wakes))
        ),
        cells_at_once=mean(lambda result: 1 - sum(wake.seconds > 1.0 for wake in result.wakes) / max(1, result.cells)),
        written_a_day=mean(lambda result: _bytes(result, read=False) / result.measured * DAY),
        read_a_day=mean(lambda result: _bytes(result, read=True) / result.measured * DAY),
        peak_node_rate=max(peak_rate(result, by_node=True) for result in results),
        peak_cluster_rate=max(peak_rate(result, by_node=False) for result in results),
        memory_peak=max(result.memory_most for result in results),
        stored_peak=max(result.stored_most for result in results),
        refused=mean(lambda result: sum(result.refused.values()) / weeks),
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the ordered values lie; 0 of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def peak_rate(result: Result, *, by_node: bool) -> float:
    """Bytes per second of images, written and read, in the busiest minute of one node or of all together."""
    minutes: Counter[tuple[int, int]] = Counter()
    for move in result.moves:
        begin, end = move.begin, move.begin + move.seconds
        minute = int(begin // MINUTE)
        while minute * MINUTE < end:
            part = min(end, (minute + 1) * MINUTE) - max(begin, minute * MINUTE)
            minutes[move.node if by_node else 0, minute] += round(move.bytes * part / move.seconds)
            minute += 1
    return max(minutes.values(), default=0) / MINUTE


def _bytes(result: Result, *, read: bool) -> int:
    return sum(move.bytes for move in result.moves if move.read is read)


def headline(workers: int, seeds: Sequence[int] = SEEDS) -> dict[str, list[Result]]:
    """Every arrangement with every seed."""
    plans = {(name, seed): replace(plan, seed=seed) for name, plan in ARRANGEMENTS.items() for seed in seeds}
    found = dict(zip(plans, _all(list(plans.values()), workers), strict=True))
    return {name: [found[name, seed] for seed in seeds] for name in ARRANGEMENTS}


def sensitivity(workers: int) -> dict[str, dict[str, list[tuple[float, Figures]]]]:
    """By what is varied, by arrangement: values and figures.  One week, one seed."""
    plans: dict[tuple[str, str, float], Plan] = {}
    for name, plan in {"GPU for each server": SERVERS, "shared hosts": HOSTS}.items():
        for users in (250, 500, 1000, 1500, 2000, 3000):
            plans["users", name, users] = replace(plan, users=users)
        for gib in (4, 8, 16, 32, 64):
            plans["memory", name, gib] = replace(plan, habits=replace(Habits(), memory_median=gib * GIB))
    for minutes in (1, 2, 5, 10, 20, 30):
        rule = Rule(minutes * MINUTE, max(30, 2 * minutes) * MINUTE)
        plans["idle", "shared hosts", minutes] = replace(HOSTS, rule=rule)
    for minutes in (2, 5, 10, 20, 30, 60):
        changed = replace(SERVERS, rule=Rule(0.0, minutes * MINUTE), cull_after=minutes * MINUTE)
        plans["idle", "GPU for each server", minutes] = changed
    for gib in (8, 16, 32, 48, 64, 96, 128):
        plans["host memory", "shared hosts", gib] = replace(HOSTS, memory_per_gpu=gib * GIB)
    results = _all([replace(plan, weeks=1) for plan in plans.values()], workers)
    found: dict[str, dict[str, list[tuple[float, Figures]]]] = {}
    for (what, name, value), result in zip(plans, results, strict=True):
        found.setdefault(what, {}).setdefault(name, []).append((value, figures([result])))
    return found


def _all(plans: Sequence[Plan], workers: int) -> list[Result]:
    if workers == 1:
        return [run(plan) for plan in plans]
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(run, plans))
