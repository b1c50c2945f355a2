"""docs/compatibility.md says what its records say, and a part of its rows is tried again in each run."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader

import pytest
from compatibility import page, records
from compatibility.row import Row
from compatibility.rows import rows
from everybody import REPOSITORY
from keeping import EVERYBODY

ROWS = rows()
CASES = [(who, key) for key, row in ROWS.items() if not row.gpu for who in EVERYBODY]


@pytest.fixture(scope="session")
def script():
    """`scripts/compatibility` as a module."""
    loader = SourceFileLoader("compatibility_script", str(REPOSITORY / "scripts" / "compatibility"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    loader.exec_module(module)
    return module


@pytest.mark.sweep(1 / 36)
@pytest.mark.parametrize(("who", "key"), CASES)
def test_a_row_is_as_the_page_says_or_better(zoo, script, who, key):
    """The page's claims hold: nothing is lost or changed; a row that the page says is kept is not refused."""
    if missing := ROWS[key].lacking():
        pytest.skip(f"not installed: {', '.join(missing)}")
    found = script.tried(zoo[who], key)
    assert not found.get("lost"), found["lost"]
    assert not found.get("unmade"), found["unmade"]
    recorded = records.read()[f"cpu-{who}"].get(key)
    if recorded is not None:
        for step in page.STEPS:
            assert found[step] in ("yes", recorded[step]) or not recorded[step], found


def test_the_page_is_what_the_records_say():
    """`make compatibility` writes both."""
    assert page.DOCUMENT.read_text() == page.page(ROWS, records.read())


def test_every_record_is_of_a_row_and_nothing_was_lost():
    for name, found in records.read().items():
        for key, record in found.items():
            assert key in ROWS, f"{name}: {key}"
            assert "lost" not in record
            assert "unmade" not in record


def test_the_page_refuses_a_loss_and_a_refusal_without_advice(tmp_path):
    record = {"suspend": "yes", "checkpoint": "CHILD_PROCESSES", "wake": "", "moved": "", "text": "no"}
    record |= {"versions": {}, "python": "3", "host": "here", "date": "2026-01-01", "commit": "abc"}
    records.add("cpu-root", "one", record, tmp_path)
    found = records.read(tmp_path)
    with pytest.raises(page.NotForThePage, match="what to do instead"):
        page.page({"one": Row("one", "One", "", "")}, found)
    written = page.page({"one": Row("one", "One", "", "", instead="End it.")}, found)
    assert "| One | `CHILD_PROCESSES` | not run | Python 3 | 2026-01-01, abc |" in written
    assert "| One | `CHILD_PROCESSES` | End it. |" in written
    records.add("cpu-root", "one", {**record, "lost": "after the wake: was 1, is 2"}, tmp_path)
    with pytest.raises(page.NotForThePage, match="was 1, is 2"):
        page.page({"one": Row("one", "One", "", "", instead="End it.")}, records.read(tmp_path))
