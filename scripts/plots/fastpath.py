"""The plot of docs/performance.md: ``python scripts/plots/fastpath.py fastpath-bench.json OUT.svg`` (matplotlib)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams.update({"svg.hashsalt": "fastpath", "svg.fonttype": "path", "font.size": 9})
from matplotlib import pyplot as plt  # noqa: E402 - after the choice of how to draw

#: Seconds asked for, by size in GiB.
ASKED = {"free": {16: 0.8, 48: 1.8}, "back": {16: 0.65, 48: 1.3}}
TITLES = {"free": "the GPU is free after", "back": "everything is back after"}


def main(source: Path, target: Path) -> None:
    """One panel for each way; seconds over GiB."""
    sizes = json.loads(source.read_text())["sizes"]
    figure, panels = plt.subplots(1, 2, figsize=(8.5, 3.4), layout="constrained", sharey=True)
    for panel, way in zip(panels, ASKED, strict=True):
        for name, colour in (("library", "#1b7837"), ("warm", "#2166ac"), ("driver", "#762a83")):
            runs = {int(key.split()[0]): facts[way] for key, facts in sizes.items() if key.endswith(name)}
            panel.plot(list(runs), [median(run) for run in runs.values()], "o-", color=colour, ms=4, label=name)
        panel.plot(list(ASKED[way]), list(ASKED[way].values()), "kx", label="asked for")
        panel.set(title=TITLES[way], xlabel="GiB of tensors", xlim=0, ylim=0)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("seconds")
    panels[0].legend(frameon=False)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
