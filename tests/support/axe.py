"""Checks that elements of a page can be used without a mouse, and by those who hear the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_AXE = Path(__file__).resolve().parents[2] / "labextension" / "node_modules" / "axe-core" / "axe.min.js"
#: Rules of WCAG and of good practice; not those about the page as a whole, which is JupyterLab's.
_RUN = """
async selectors => {
  const include = selectors.filter(selector => document.querySelector(selector) !== null);
  const found = await axe.run({ include }, { rules: { region: { enabled: false } } });
  return { include, violations: found.violations.map(({ id, help, nodes }) => [id, help, nodes.map(n => n.html)]) };
}
"""


def assert_accessible(page: Any, *selectors: str) -> None:
    """Assert that axe finds nothing wrong with these elements, all of which are there."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(_AXE.read_text())
    found = page.evaluate(_RUN, list(selectors))
    assert found["include"] == list(selectors)
    assert found["violations"] == []


def tab_until(page: Any, selector: str, presses: int = 120) -> None:
    """Press Tab until an element, or one within it, has the keyboard."""
    for _ in range(presses):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement?.closest(selector) !== null", selector):
            return
    raise AssertionError(f"{selector} is not reached by the Tab key")
