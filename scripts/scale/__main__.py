"""``python scripts/scale``: 1,000 users on 64 GPUs, simulated; writes the figures and plots of docs/scale.md anew."""

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
import study  # noqa: E402
from experiment import Result  # noqa: E402
from move_costs import GIB, measured  # noqa: E402
from notebook_activity import people  # noqa: E402
from study import Figures  # noqa: E402

BEGIN, END = "<!-- from the simulation: {} -->\n", "<!-- end -->\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    options = parser.parse_args()
    began = time.monotonic()
    results = study.headline(options.workers)
    figures = {name: study.figures(runs) for name, runs in results.items()}
    sweeps = study.sensitivity(options.workers)
    images = ROOT / "docs" / "images"
    plots.gpu_time(results, images / "scale-gpu-time.svg")
    plots.waits(results, images / "scale-waits.svg")
    plots.storage(results, images / "scale-storage.svg")
    plots.sensitivity(sweeps, images / "scale-sensitivity.svg")
    parts = {
        "versions": versions(time.monotonic() - began),
        "activity": activity(),
        "costs": costs(),
        "summary": summary(figures),
        "results": results_table(figures),
        "moves": moves_table(figures),
        "sensitivity": "\n".join(sweep_table(what, sweeps[what]) for what in sweeps),
        "sizing": sizing(results, figures),
    }
    page = ROOT / "docs" / "scale.md"
    text = page.read_text()
    for name, part in parts.items():
        before, rest = text.split(BEGIN.format(name), 1)
        text = before + BEGIN.format(name) + part + END + rest.split(END, 1)[1]
    page.write_text(text)
    print(parts["results"])
    return 0


def versions(seconds: float) -> str:
    """Date and versions of this run."""
    names = ("jupyter_gpu_ckpt", "simpy", "matplotlib")
    packages = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    today = datetime.date.today().isoformat()
    return (
        f"`make scale`, {today}: {packages}, Python {platform.python_version()}; it took {seconds / 60:.0f} minutes.\n"
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
                f"| {name} | {each.wakes:,.0f} | {each.cells_at_once:.0%} | {each.over_room:.1%} | "
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
        f"| {label} | | turned away | wait p50 / p99 | waits > 10 s for a GPU | cells that start at once | "
        "held idle, GPU-h | images, most | host memory of a node, most | refused for lack of it |"
    )
    rows = [head, "|---|---|---|---|---|---|---|---|---|---|"]
    for name, points in sweep.items():
        for value, each in points:
            rows.append(
                f"| {form.format(value)} | {name} | {each.turned_away:.1%} | "
                f"{seconds(each.wait_p50)} / {seconds(each.wait_p99)} | {each.over_room:.1%} | "
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
