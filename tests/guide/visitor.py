"""A user of the hub who has a browser and a password and nothing else."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path
from typing import Any

from desktop import FLAGS, NOTEBOOK, PATIENCE, find_chromium
from fresh_machine import FreshMachine
from waiting import until

HUB = "http://127.0.0.1:8000"
#: What JupyterLab calls a new notebook.
BOOK = "Untitled.ipynb"
_TAKEN = re.compile(r"\[(\*|\d+)\]:")
_DONE = re.compile(r"\[\d+\]:")


class Visitor:
    """Logs in when there is something to do, and works in one notebook."""

    def __init__(self, machine: FreshMachine, place: Path, name: str, password: str) -> None:
        self._machine, self._name, self._password = machine, name, password
        self._chromium = place / "chromium"
        self._playwright: Any = None
        self._page: Any = None
        self._has_book = False
        self._cells = 0

    def run(self, source: str) -> tuple[str, str]:
        """Type a cell at the end of the notebook and run it; its prompt (``[1]:``) and what it gave."""
        if self._page is None:
            self._come()
        cell = self._page.locator(f"{NOTEBOOK} .jp-CodeCell").nth(self._cells)
        cell.locator(".cm-content").first.click()
        self._page.keyboard.type(source)
        until(lambda: self._taken(cell), "the cell is taken", timeout=PATIENCE / 1000)
        self._cells += 1
        prompt = cell.locator(".jp-InputPrompt", has_text=_DONE).first
        prompt.wait_for()
        self._page.keyboard.press("Escape")
        self._page.keyboard.press("b")  # a cell below
        outputs = cell.locator(".jp-OutputArea-output").all_inner_texts()
        self._save()
        return prompt.inner_text().strip(), "\n".join(text.strip() for text in outputs)

    def _taken(self, cell: Any) -> bool:
        """JupyterLab takes no cell before it has its kernel, and does not say so: its user presses again."""
        from playwright.sync_api import TimeoutError as NotYet

        self._page.keyboard.press("Control+Enter")
        with contextlib.suppress(NotYet):
            cell.locator(".jp-InputPrompt", has_text=_TAKEN).first.wait_for(timeout=3000)
            return True
        return False

    def _save(self) -> None:
        self._page.keyboard.press("Control+s")
        if not self._has_book:
            self._page.click(".jp-Dialog .jp-mod-accept")  # of a new notebook JupyterLab asks the name
            self._has_book = True
        until(self._saved, "the notebook is saved", timeout=PATIENCE / 1000)

    def _saved(self) -> bool:
        """Return whether the notebook is saved; if not, save it again: a report of the kernel may come after a save."""
        from playwright.sync_api import TimeoutError as NotYet

        with contextlib.suppress(NotYet):
            self._page.wait_for_selector(".lm-TabBar-tab.jp-mod-current:not(.jp-mod-dirty)", timeout=3000)
            return True
        self._page.keyboard.press("Control+s")
        return False

    def _come(self) -> None:
        context = self._browser().new_context(viewport={"width": 1280, "height": 800})
        context.set_default_timeout(PATIENCE)
        self._page = page = context.new_page()
        until(self._answered, "the hub answers", timeout=PATIENCE / 1000)
        page.fill("input#username_input", self._name)
        page.fill("input#password_input", self._password)
        page.click("input#login_submit")
        page.wait_for_url(f"**/user/{self._name}/lab**", wait_until="commit")
        if self._has_book:
            page.goto(f"{HUB}/user/{self._name}/lab/tree/{BOOK}?reset")
        else:
            page.locator(".jp-LauncherCard[data-category=Notebook]").first.click()
        page.wait_for_selector(f"{NOTEBOOK} .jp-CodeCell .cm-content")
        page.wait_for_selector(f"{NOTEBOOK} .jp-gpuCkpt-button [data-phase]")

    def _answered(self) -> bool:
        """A hub that is being restarted answers with an error, or not at all: its user reloads the page."""
        from playwright.sync_api import Error as NoAnswer

        with contextlib.suppress(NoAnswer):
            return bool(self._page.goto(f"{HUB}/hub/login").ok)
        return False

    def _browser(self) -> Any:
        """A browser that sees the network as the machine does; every visit has a fresh profile."""
        from playwright.sync_api import sync_playwright

        chromium = find_chromium()
        assert chromium is not None
        command = shlex.join([*self._machine.on_its_network(), chromium])
        self._chromium.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        self._chromium.chmod(0o755)
        self._playwright = sync_playwright().start()
        return self._playwright.chromium.launch(executable_path=self._chromium, headless=True, args=FLAGS)

    def close_browser(self) -> None:
        """Close the browser."""
        if self._page is not None:
            self._page.context.browser.close()
            self._playwright.stop()
            self._page = None
