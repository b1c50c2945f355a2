"""The plots of docs/scale.md."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from experiment import Result, Use
from move_costs import GIB
from notebook_activity import HOUR, WEEK
from sharing_study import ClusterRun
from study import AWAY, HOSTS_AWAY, Figures, percentile

mpl.use("svg")
mpl.rcParams.update(
    {
        "svg.hashsalt": "scale",
        "svg.fonttype": "path",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)
from matplotlib import pyplot as plt  # noqa: E402 - after the choice of how to draw

COLOURS = {Use.COMPUTING: "#1b7837", Use.MOVING: "#762a83", Use.IDLE: "#d9a441", Use.EMPTY: "#e0e0e0"}
Sweep = dict[str, list[tuple[float, Figures]]]


def gpu_time(results: dict[str, list[Result]], path: Path) -> None:
    """Plot the use of the GPUs, by arrangement."""
    figure, axes = plt.subplots(figsize=(8.5, 3.8), layout="constrained")
    names = list(results)
    left = [0.0] * len(names)
    for use, colour in COLOURS.items():
        hours = [
            sum(result.gpu[use] for result in runs) / HOUR / (sum(result.measured for result in runs) / WEEK)
            for runs in results.values()
        ]
        axes.barh(names, hours, left=left, color=colour, label=use.value)
        left = [before + each for before, each in zip(left, hours, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("GPU-hours in a week (64 GPUs: 10,752)")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    _save(figure, path)


def waits(results: dict[str, list[Result]], path: Path) -> None:
    """Plot the waits of users who need a GPU."""
    figure, axes = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
    for name, runs in results.items():
        seconds = sorted(max(0.05, wake.seconds) for result in runs for wake in result.wakes)
        shares = [number / 400 for number in range(401)]
        axes.plot([percentile(seconds, share) for share in shares], shares, label=name, linewidth=1.4)
    axes.set_xscale("log")
    axes.set_xlim(0.05, 3600)
    axes.set_ylim(0, 1)
    axes.set_xticks([0.1, 1, 10, 60, 300, 1800], ["0.1 s", "1 s", "10 s", "1 min", "5 min", "30 min"])
    axes.set_xlabel("wait for a start or a wake; after 30 minutes people give up")
    axes.set_ylabel("share that waits no longer")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    _save(figure, path)


def turns(clusters: dict[str, ClusterRun], path: Path) -> None:
    """Plot the use of the GPUs and the waits of 1,000 users, with shared GPUs and without."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8.5, 6.2), layout="constrained", height_ratios=(2, 3))
    left = [0.0] * len(clusters)
    for use, colour in COLOURS.items():
        hours = [run.result.gpu[use] / HOUR / (run.result.measured / WEEK) for run in clusters.values()]
        above.barh(list(clusters), hours, left=left, color=colour, label=use.value)
        left = [before + each for before, each in zip(left, hours, strict=True)]
    above.invert_yaxis()
    above.set_xlabel("GPU-hours in a week (64 GPUs: 10,752)")
    above.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=8)
    for name, run in clusters.items():
        # Cells that do not wait are below the axis: the curve begins with their share.
        none = [0.0] * max(0, run.result.cells - len(run.result.wakes))
        seconds = none + sorted(max(0.05, wake.seconds) for wake in run.result.wakes)
        shares = [number / 400 for number in range(401)]
        below.plot([max(0.05, percentile(seconds, share)) for share in shares], shares, label=name, linewidth=1.4)
    below.set_xscale("log")
    below.set_xlim(0.05, 3600)
    below.set_ylim(0, 1)
    below.set_xticks([0.1, 1, 10, 60, 300, 1800], ["0.1 s", "1 s", "10 s", "1 min", "5 min", "30 min"])
    below.set_xlabel("wait of a cell for a GPU; after 30 minutes people give up")
    below.set_ylabel("share of cells that wait no longer")
    below.grid(alpha=0.3)
    below.legend(loc="lower right", frameon=False, fontsize=8)
    _save(figure, path)


def sensitivity(sweeps: dict[str, Sweep], path: Path) -> None:
    """Plot the effects of users, memory, thresholds and host memory."""
    figure, grid = plt.subplots(2, 2, figsize=(8.5, 6.2), layout="constrained")
    labels = {
        "users": "users on 64 GPUs",
        "memory": "median device memory of a notebook, GiB",
        "idle": "idle minutes after which a kernel leaves the GPU",
        "host memory": "host memory for each GPU, GiB",
    }
    colours = {"GPU for each server": "#2166ac", "shared hosts": "#b2182b"}
    for axes, (what, label) in zip(grid.flat, labels.items(), strict=True):
        for name, points in sweeps[what].items():
            values = [value for value, _ in points]
            if what == "host memory":
                axes.plot(values, [each.idle for _, each in points], "o-", color=colours[name], markersize=3)
                axes.set_ylabel("held idle, GPU-hours in a week")
                continue
            away = [100 * each.turned_away for _, each in points]
            axes.plot(values, away, "o-", color=colours[name], label=f"{name}: turned away, %", markersize=3)
            wait = [100 * each.long_waits for _, each in points]
            label_ = f"{name}: waits > 10 s for a GPU, % of starts and wakes"
            axes.plot(values, wait, "o--", color=colours[name], label=label_, markersize=3, alpha=0.6)
        axes.set_xlabel(label)
        axes.set_ylim(bottom=0 if what == "host memory" else -1)
        axes.grid(alpha=0.3)
    handles, names = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    _save(figure, path)


def storage(results: dict[str, list[Result]], path: Path) -> None:
    """Bytes in host memory and in images, over the measured weeks."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8.5, 4.4), layout="constrained", sharex=True)
    for name in (AWAY, HOSTS_AWAY):
        runs = results[name]
        hours: dict[int, tuple[float, int, int]] = {}
        for level in runs[0].levels:  # of each hour the highest
            hour = int(level[0] // HOUR)
            hours[hour] = max(hours.get(hour, level), level, key=lambda each: each[1])
        levels = list(hours.values())
        days = [(at - runs[0].plan.warm_up) / 86400 for at, *_ in levels]
        per_gpu = [level[1] / GIB / runs[0].plan.gpus_per_node for level in levels]
        above.plot(days, per_gpu, linewidth=1.0, label=name)
        below.plot(days, [level[2] / GIB / runs[0].plan.gpus for level in levels], linewidth=1.2)
    above.set_ylabel("host memory, GiB a GPU\n(fullest node)")
    below.set_ylabel("images, GiB a GPU")
    below.set_ylim(bottom=0)
    below.set_xlabel("days after the warm-up week (0: Monday)")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=1, frameon=False, fontsize=8)
    _save(figure, path)


def _save(figure: plt.Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
