"""The dashboard for Grafana, and the alerts beside it: each metric, label, state, verb and code in them exists."""

from __future__ import annotations

import inspect
import itertools
import json
import logging
import re
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from jupyter_gpu_ckpt import errors
from jupyter_gpu_ckpt.lifecycle.plans import State
from jupyter_gpu_ckpt.server.metrics import Metrics
from jupyter_gpu_ckpt.server.monitor import VERBS, KernelMonitor

DOCS = Path(__file__).resolve().parents[2] / "docs"
DASHBOARD = json.loads((DOCS / "admin/monitoring/dashboard.json").read_text())
PAGE = (DOCS / "admin/monitoring.md").read_text()
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
ALERTS = [expression for expression in re.findall(r"`([^`\n]+)`", PAGE) if re.search(r"gpu_ckpt_.* > ", expression)]
#: Labels that Prometheus adds.
ADDED = {"job", "instance", "le"}
#: Values that labels may have.
VALUES = {
    "state": {state.value for state in State},
    "verb": set(VERBS.values()),
    "code": {c.code for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.GpuCkptError)},
}
#: Labels of each metric, as the reference has them; another test compares that with the code.
LABELS = {
    name: set(filter(None, labels.split(",")))
    for name, labels in re.findall(r"^\| `(gpu_ckpt_\w+)(?:\{([\w,]+)\})?`", PAGE, re.M)
}


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Names of the series that a server exports."""
    metrics = Metrics(KernelMonitor(None, logging.getLogger()), lambda: 0)
    try:
        families = [family for family in REGISTRY.collect() if family.name.startswith("gpu_ckpt_")]
    finally:
        metrics.close()
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"], "gauge": [""]}
    return {family.name + suffix for family in families for suffix in suffixes[family.type]}


def test_there_are_alerts():
    assert len(ALERTS) == 3


@pytest.mark.parametrize("expression", [*EXPRESSIONS, *ALERTS])
def test_an_expression_names_what_there_is(expression, exported):
    names = set(re.findall(r"gpu_ckpt_\w+", expression))
    assert names and names <= exported
    known = {*ADDED, *itertools.chain(*(LABELS[re.sub(r"_bucket$", "", name)] for name in names))}
    grouped = {label for labels in re.findall(r"by \(([^)]+)\)", expression) for label in labels.split(", ")}
    selected = re.findall(r'(\w+)=~?"([^"]+)"', expression)
    assert grouped | {label for label, _ in selected} <= known
    assert all(value in VALUES[label] for label, value in selected if label in VALUES)
    assert expression.count("(") == expression.count(")")


def test_the_dashboard_shows_every_metric(exported):
    shown = set(re.findall(r"gpu_ckpt_\w+", " ".join(EXPRESSIONS)))
    assert exported - shown <= {"gpu_ckpt_step_seconds_count", "gpu_ckpt_step_seconds_sum"}


def test_panels_have_their_own_numbers_and_places():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len({panel["title"] for panel in panels})
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        for part in (panel, *panel["targets"]):
            assert part["datasource"]["uid"] == "${datasource}", "no data source of another installation"


def test_legends_and_variables_are_defined():
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(DASHBOARD)))
    assert used == defined
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), target
