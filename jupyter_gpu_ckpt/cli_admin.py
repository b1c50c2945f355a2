"""The command for those who run the machines: ``admin report``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hub.report import User
    from .image.store import Store

Command = Callable[[argparse.Namespace], int]
#: Makes a subcommand: name, help, what runs it.
Add = Callable[[str, str, Command], argparse.ArgumentParser]


def register(add: Add, store_of: Callable[[argparse.Namespace], Store]) -> None:
    """Add the commands.  Called from `cli`."""
    admin = add("admin", "For those who run the machines: report.", lambda options: 64)
    verbs = admin.add_subparsers(required=True, metavar="VERB")
    help = "Who holds what in the image directories, and GPU hours given back by each user."
    report = verbs.add_parser("report", help=help, description=help)
    # As for all commands; here as well, so that they may come last.
    report.add_argument(
        "--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document, with every image"
    )
    report.add_argument("--image-dir", type=Path, default=argparse.SUPPRESS, help="directory of your own images")
    report.add_argument("--root", type=Path, help="a directory that users share: ROOT/UID has each one's images")
    report.set_defaults(command=lambda options: _report(options, store_of(options)))


def _report(options: argparse.Namespace, store: Store) -> int:
    from .hub import report

    now = time.time()
    users = report.collect(options.root, store.root, now)
    if options.json:
        print(json.dumps(report.as_json(users, now)))
    else:
        _print(users, now)
    return 0


def _print(users: list[User], now: float) -> None:
    from .cli import duration, size
    from .hub.report import printable, total

    def row(user: str, cells: dict[str, Any], oldest: str, models: str) -> None:
        shown = (
            f"{user:16} {cells['kernels_asleep']:>6} {cells['images']:>6} {size(cells['disk_bytes']):>10} "
            f"{size(cells['device_bytes_freed']):>10} {oldest:>7} {cells['gpu_hours_given_back']:>9.1f}  {models}"
        )
        print(shown.rstrip())

    print(
        f"{'USER':16} {'ASLEEP':>6} {'IMAGES':>6} {'ON DISK':>10} {'OFF GPU':>10} {'OLDEST':>7} {'GPU-HOURS':>9}  GPUS"
    )
    rows = [user.summary(now) for user in users]
    for cells in rows:
        oldest = "-" if cells["oldest_s"] is None else duration(cells["oldest_s"])
        models = printable(", ".join(cells["gpu_models"]), 60)
        row(printable(cells["user"], 16), cells, oldest, models)
    if len(rows) != 1:
        row("all", total(rows), "", "")
    for cells in rows:
        for what, count in sorted(cells["problems"].items()):
            print(f"passed over  {printable(cells['directory'], 80)}: {printable(what, 80)} ({count})")
