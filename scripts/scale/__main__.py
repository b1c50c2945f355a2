"""``python scripts/scale``: 1,000 users on 64 GPUs, simulated; writes the figures and plots of docs/scale.md anew.

``--only sharing`` simulates only the notebooks that share GPUs in turns; ``--replay FILE...`` only measured runs of
such notebooks, and prints their waits and swaps beside the simulated ones (`sharing_study.replay` describes the file).
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import plots  # noqa: E402
import sharing_study  # noqa: E402
import study  # noqa: E402
from experiment import Result  # noqa: E402
from move_costs import GIB, measured  # noqa: E402
from notebook_activity import people  # noqa: E402
from sharing_study import ClusterRun, OneGpu, Waits  # noqa: E402
from study import Figures  # noqa: E402

IMAGES = ROOT / "docs" / "images"
BEGIN, END = "<!-- from the simulation: {} -->\n", "<!-- end -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--only", choices=["cluster", "sharing"], help="simulate and write only this part of the page")
    parser.add_argument("--replay", type=Path, nargs="+", metavar="FILE", help="simulate measured runs, and print both")
    options = parser.parse_args()
    if options.replay is not None:
        print(replayed(sharing_study.replay(*options.replay)), end="")
        return 0
    if options.only != "cluster":
        write(sharing(options.workers))
    if options.only != "sharing":
        write(cluster(options.workers))
    return 0


def write(parts: dict[str, str]) -> None:
    """Put the parts in their places on the page."""
    page = ROOT / "docs" / "scale.md"
    text = page.read_text()
    for name, part in parts.items():
        before, rest = text.split(BEGIN.format(name), 1)
        text = before + BEGIN.format(name) + part + END + rest.split(END, 1)[1]
    page.write_text(text)


def cluster(workers: int) -> dict[str, str]:
    """Simulate the cluster, draw its plots, and return the parts of the page about it."""
    began = time.monotonic()
    results = study.headline(workers)
    figures = {name: study.figures(runs) for name, runs in results.items()}
    sweeps = study.sensitivity(workers)
    plots.gpu_time(results, IMAGES / "scale-gpu-time.svg")
    plots.waits(results, IMAGES / "scale-waits.svg")
    plots.storage(results, IMAGES / "scale-storage.svg")
    plots.sensitivity(sweeps, IMAGES / "scale-sensitivity.svg")
    print(results_table(figures))
    return {
        "versions": versions(time.monotonic() - began),
        "activity": activity(),
        "costs": costs(),
        "summary": summary(figures),
        "results": results_table(figures),
        "moves": moves_table(figures),
        "sensitivity": "\n".join(sweep_table(what, sweeps[what]) for what in sweeps),
        "sizing": sizing(results, figures),
    }


def sharing(workers: int) -> dict[str, str]:
    """Simulate notebooks that share GPUs, draw their plot, and return the parts of the page about them."""
    began = time.monotonic()
    single, clusters = sharing_study.study(workers)
    plots.turns(clusters, IMAGES / "scale-turns.svg")
    parts = {
        "sharing versions": versions(time.monotonic() - began, "make scale ONLY=sharing"),
        "sharing one": one_gpu_table(single),
        "sharing cluster": clusters_table(clusters),
    }
    print(parts["sharing one"], parts["sharing cluster"], sep="\n")
    return parts


def one_gpu_table(single: dict[OneGpu, Waits]) -> str:
    """A row for each experiment with one GPU."""
    head = (
        "| notebooks, each with | | computes | swaps | wait for the first turn, p50 / p90 / p99 | short cells done, "
        "p50 / p95 | time / alone | fairness |"
    )
    rows = [head, "|---|---|---|---|---|---|---|---|"]
    for plan, each in single.items():
        users = f" of {plan.users} users" if plan.users else ""
        memory = f"{plan.gib} GiB, one fits" if plan.gib else "drawn sizes, 139 GiB"
        rows.append(
            f"| {plan.notebooks}{users}, {memory} | {plan.discipline} | {each.computing:.0%} | {each.swaps:.1%} | "
            f"{' / '.join(seconds(value) for value in each.first)} | "
            f"{' / '.join(seconds(value) for value in each.short)} | {each.stretch:.1f} | {each.fairness:.3f} |"
        )
    return "\n".join(rows) + "\n"


def clusters_table(clusters: dict[str, ClusterRun]) -> str:
    """A row for each cluster of 1,000 users."""
    head = (
        "| | computing done, GPU-h (of demanded) | held idle, GPU-h | sittings turned away | cells at once | "
        "waits, p50 / p99 | short cells done, p95 | swaps | kernels lost |"
    )
    rows = [head, "|---|---|---|---|---|---|---|---|---|"]
    for name, run in clusters.items():
        each = study.figures([run.result])
        shared = bool(run.short)
        short = seconds(study.percentile(run.short, 0.95)) if shared else ""
        swaps = f"{run.swaps:.2%}" if shared else ""
        at_once = f"{each.cells_at_once:.0%}" if shared else ""
        rows.append(
            f"| {name} | {each.computed:,.0f} ({each.computed / each.demanded:.0%}) | {each.idle:,.0f} | "
            f"{each.turned_away:.1%} | {at_once} | {seconds(each.wait_p50)} / {seconds(each.wait_p99)} "
            f"| {short} | {swaps} | {each.lost:,.0f} |"
        )
    return "\n".join(rows) + "\n"


def replayed(found: dict[str, dict[str, float]]) -> str:
    """A line for each figure: measured, simulated, and how much the simulation is off."""
    lines = [f"{'':26}{'measured':>12}{'simulated':>12}{'difference':>12}"]
    for name, real in found["measured"].items():
        made = found["simulated"][name]
        difference = f"{(made - real) / real:+.0%}" if real else ""
        lines.append(f"{name:26}{real:12.3f}{made:12.3f}{difference:>12}")
    return "\n".join(lines) + "\n"


def versions(seconds: float, command: str = "make scale") -> str:
    """Date and versions of this run."""
    names = ("jupyter_gpu_ckpt", "simpy", "matplotlib")
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    today = datetime.date.today().isoformat()
    return (
        f"`{command}`, {today}: {packages}, Python {platform.python_version()}; it took {seconds / 60:.0f} minutes.\n"
    )


def activity() -> str:
    """The generator's activity, against published figures."""
    made = [person for seed in study.SEEDS for person in people(1000, 2, seed)]
    sessions = [session for person in made for session in person.sessions]
    cells = [cell for session in sessions for cell in session.cells]
    gaps = [cell.gap for session in sessions for cell in session.cells[1:]]
    busy, gap = sum(cell.seconds for cell in cells), sum(gaps)
    short = sum(cell.seconds < 120 for cell in cells) / len(cells)
    rows = [
        "| | published | generated |",
        "|---|---|---|",
        f"| cells of less than 2 minutes | half | {short:.1%} |",
        f"| gap between cells, median | 5 minutes | {statistics.median(gaps) / 60:.2f} minutes |",
        f"| idle from a sitting's first cell to its last | more than 80 % | {gap / (gap + busy):.1%} |",
        f"| cells in a week of 1,000 users | | {len(cells) / 6:,.0f} |",
        f"| GPU-hours of computing in it | | {busy / 3600 / 6:,.0f} |",
    ]
    return "\n".join(rows) + "\n"


def costs() -> str:
    """The durations of moves."""
    one = measured()
    rows = [
        "| a kernel | takes |",
        "|---|---|",
        f"| off the GPU | {one.suspend_floor:.3f} s, and its device memory at {one.suspend_rate / 1e9:.2f} GB/s |",
        f"| from there to disk | {one.dump_floor:.3f} s, and its image at {one.dump_rate / 1e9:.2f} GB/s |",
        f"| from disk | {one.restore_floor:.3f} s, and its image at {one.restore_rate / 1e9:.2f} GB/s |",
        f"| onto the GPU | {one.resume_floor:.3f} s, and its device memory at {one.resume_rate / 1e9:.2f} GB/s |",
        f"| an image | device memory and {one.besides / GIB:.2f} GiB |",
    ]
    return "\n".join(rows) + "\n"


def summary(figures: dict[str, Figures]) -> str:
    """In words."""
    kept, culled, away = figures[study.KEPT], figures[study.CULLED], figures[study.AWAY]
    hosts_culled, hosts_away = figures[study.HOSTS_CULLED], figures[study.HOSTS_AWAY]
    lines = [
        f"- Without culling, GPUs that are reserved for servers are held idle for {kept.idle:,.0f} of "
        f"{study.WEEK_HOURS:,.0f} GPU-hours a week, and {kept.turned_away:.0%} of the sittings get none.",
        f"- Culled after an hour, {culled.idle:,.0f} are held idle, {culled.turned_away:.0%} get none, and "
        f"{culled.lost:,.0f} kernels a week lose their variables, which {culled.lost_hours:,.0f} GPU-hours had made.",
        f"- Checkpointed and culled after 5 minutes, {away.idle:,.0f} are held idle ({kept.idle - away.idle:,.0f} "
        f"given back against no culling, {culled.idle - away.idle:,.0f} against culling), {away.turned_away:.1%} get "
        f"none, and nothing is lost. Users who need a GPU wait {seconds(away.wait_p50)} in the median, "
        f"{seconds(away.wait_p99)} at the 99th percentile; {away.cells_at_once:.0%} of the cells need not wait at all.",
        f"- On shared hosts with the defaults, {hosts_away.idle:,.0f} are held idle, {hosts_away.turned_away:.1%} get "
        f"none, and a wake takes {seconds(hosts_away.wait_p50)}, {seconds(hosts_away.wait_p99)} at the 99th "
        f"percentile. Culling serves everybody there, too, and loses {hosts_culled.lost:,.0f} kernels a week with "
        f"{hosts_culled.lost_hours:,.0f} GPU-hours in them.",
    ]
    return "\n".join(lines) + "\n"


def results_table(figures: dict[str, Figures]) -> str:
    """A row for each arrangement."""
    head = (
        "| | computing done, GPU-h (of demanded) | held idle, GPU-h | off the GPU, GPU-h | sittings turned away | "
        "wait for a start or wake, p50 / p99 | kernels lost, GPU-h in them |"
    )
    rows = [head, "|---|---|---|---|---|---|---|"]
    for name, each in figures.items():
        rows.append(
            f"| {name} | {each.computed:,.0f} ({each.computed / each.demanded:.0%}) | {each.idle:,.0f} | "
            f"{each.given_back:,.0f} | {each.turned_away:.1%} | {seconds(each.wait_p50)} / {seconds(each.wait_p99)} | "
            f"{each.lost:,.0f}, {each.lost_hours:,.0f} |"
        )
    return "\n".join(rows) + "\n"


def moves_table(figures: dict[str, Figures]) -> str:
    """Disk and network, of the arrangements that need them."""
    head = (
        "| | starts and wakes a week | cells that start at once | waits > 10 s for a GPU | written / read a day | "
        "busiest minute: a node, all | images, most | host memory of a node, most | two or more compute on one GPU, of "
        "computing GPU time |"
    )
    rows = [head, "|---|---|---|---|---|---|---|---|---|"]
    for name, each in figures.items():
        if each.written_a_day:
            rows.append(
                f"| {name} | {each.wakes:,.0f} | {each.cells_at_once:.0%} | {each.long_waits:.1%} | "
                f"{each.written_a_day / 1e12:.1f} / {each.read_a_day / 1e12:.1f} TB | "
                f"{each.peak_node_rate / 1e9:.1f}, {each.peak_cluster_rate / 1e9:.1f} GB/s | "
                f"{each.stored_peak / 1e12:.1f} TB | {each.memory_peak / GIB:,.0f} GiB | {each.crowded:.0%} |"
            )
    return "\n".join(rows) + "\n"


LABELS = {
    "users": ("users", "{:,.0f}"),
    "memory": ("median device memory", "{:.0f} GiB"),
    "idle": ("leaves the GPU after", "{:.0f} min"),
    "host memory": ("host memory for each GPU", "{:.0f} GiB"),
}


def sweep_table(what: str, sweep: plots.Sweep) -> str:
    """A row for each value."""
    label, form = LABELS[what]
    head = (
        f"| {label} | | turned away | wait p50 / p99 | waits > 10 s for a GPU | cells at once | "
        "held idle, GPU-h | images, most | host memory of a node, most | refused for lack of it |"
    )
    rows = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    for name, points in sweep.items():
        for value, each in points:
            rows.append(
                f"| {form.format(value)} | {name} | {each.turned_away:.1%} | "
                f"{seconds(each.wait_p50)} / {seconds(each.wait_p99)} | {each.long_waits:.1%} | "
                f"{each.cells_at_once:.0%} | {each.idle:,.0f} | {each.stored_peak / 1e12:.1f} TB | "
                f"{each.memory_peak / GIB:,.0f} GiB | {each.refused:,.0f} |"
            )
    return "\n".join(rows) + "\n"


def sizing(results: dict[str, list[Result]], figures: dict[str, Figures]) -> str:
    """The needs of the two arrangements for each GPU."""
    rows = ["| for each GPU | a GPU for each server | shared hosts |", "|---|---|---|"]
    names = (study.AWAY, study.HOSTS_AWAY)
    runs = [results[name] for name in names]
    memory = [sorted(level[1] / run[0].plan.gpus_per_node / GIB for one in run for level in one.levels) for run in runs]
    most = [figures[name].memory_peak / run[0].plan.gpus_per_node / GIB for name, run in zip(names, runs, strict=True)]
    cells = [f"{study.percentile(each, 0.99):.0f} GiB; {peak:.0f} GiB" for each, peak in zip(memory, most, strict=True)]
    rows.append(f"| host memory for what has left the GPUs, fullest node: p99; most | {' | '.join(cells)} |")
    stored = [figures[name].stored_peak / run[0].plan.gpus / GIB for name, run in zip(names, runs, strict=True)]
    rows.append(f"| images, most | {' | '.join(f'{each:.0f} GiB' for each in stored)} |")
    users = [figures[name].stored_peak / run[0].plan.users / GIB for name, run in zip(names, runs, strict=True)]
    rows.append(f"| images for each user, most | {' | '.join(f'{each:.1f} GiB' for each in users)} |")
    rates = [figures[name].peak_cluster_rate / run[0].plan.gpus / 1e6 for name, run in zip(names, runs, strict=True)]
    rows.append(f"| shared storage, busiest minute | {' | '.join(f'{each:.0f} MB/s' for each in rates)} |")
    written = [figures[name].written_a_day / run[0].plan.gpus / 1e9 for name, run in zip(names, runs, strict=True)]
    rows.append(f"| written in a day | {' | '.join(f'{each:.0f} GB' for each in written)} |")
    return "\n".join(rows) + "\n"


def seconds(count: float) -> str:
    """``2.7 s``, ``5.4 min``."""
    return f"{count:.1f} s" if count < 60 else f"{count / 60:.1f} min"


if __name__ == "__main__":
    sys.exit(main())
