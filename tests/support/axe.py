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


def assert_accessible_in_both_themes(tab: Any, part: str, picture: str) -> None:
    """Assert that, and take a picture of each; the dark one has ``-dark`` in its name."""
    tab.picture(picture)
    assert_accessible(tab.page, part)
    _set_theme(tab.page, "JupyterLab Dark")
    tab.picture(f"{picture}-dark")
    assert_accessible(tab.page, part)
    _set_theme(tab.page, "JupyterLab Light")


def _set_theme(page: Any, theme: str) -> None:
    page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", theme)
    page.locator(f'body[data-jp-theme-name="{theme}"]').wait_for(state="attached")
