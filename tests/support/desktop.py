"""A headless Chromium, and a JupyterLab page in it, with the verbs of somebody who sits before it."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import nbformat
from event_bus import EventBus
from jupyter_core.paths import jupyter_path
from live import TOKEN, Server, server
from waiting import until

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
]
#: Milliseconds for whatever the page has to show; two cores may start several servers at once.
PATIENCE = 90_000

NOTEBOOK = ".jp-NotebookPanel:not(.lm-mod-hidden)"
BUTTON = f"{NOTEBOOK} .jp-gpuCkpt-button [data-phase]"
BADGE = f"{NOTEBOOK} .jp-gpuCkpt-badge"
WAKING = ".jp-gpuCkpt-waking"
STATUS = ".jp-gpuCkpt-status button"
SLEEPING_WIDGET = ".jp-gpuCkpt-sleepingWidget"
TOAST = ".Toastify__toast"


#: A wake may be over before a look comes by: the page keeps what its cells said meanwhile.
NOTE_WAKING = f"""
window.waking = [];
new MutationObserver(() => {{
  for (const line of document.querySelectorAll({WAKING!r})) {{
    window.waking.push(line.textContent);
  }}
}}).observe(document, {{ subtree: true, childList: true, characterData: true }});
"""

#: Opens a notebook; a cell that is run before its kernel has answered is run by nobody.
OPEN = """
async path => {
  const { context } = await window.jupyterapp.commands.execute('docmanager:open', { path });
  await context.ready;
  await context.sessionContext.ready;
  await context.sessionContext.session.kernel.info;
}
"""

#: Closes all documents, and shows what a fresh page shows beside them.
PUT_BACK = """
() => {
  const { shell } = window.jupyterapp;
  for (const widget of [...shell.widgets('main')]) {
    if (widget.context !== undefined) {
      widget.context.model.dirty = false;  // or it would ask whether to save
      widget.close();
    }
  }
  shell.activateById('filebrowser');
  shell.collapseRight();
}
"""

#: Whether there is none: each is dismissed again and again, as one that was just updated does not hear of it.
NO_TOASTS = f"""
() => {{
  const toasts = [...document.querySelectorAll({TOAST!r})];
  for (const {{ id }} of toasts) {{
    window.jupyterapp.commands.execute('apputils:dismiss-notification', {{ id }});
  }}
  return toasts.length === 0;
}}
"""


def find_chromium() -> str | None:
    """Debian's Chromium, or whatever goes by its name.

    First the one without windows of its own: the other draws them all the same, for a fifth of what a page costs.
    """
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def built_front_end() -> str | None:
    """Why this environment has no front end to test; None if it has."""
    places = jupyter_path("labextensions", "jupyter-gpu-ckpt", "package.json")
    built = any(Path(place).is_file() for place in places)
    return None if built else "the front end is not built: `make labextension` (needs Node)"


class Desktop:
    """The browser; every window has a fresh profile."""

    def __init__(self, browser: Any, pictures: Path) -> None:
        self.browser = browser
        self.pictures = pictures

    @classmethod
    @contextmanager
    def open(cls, chromium: str, pictures: Path) -> Iterator[Desktop]:
        from playwright.sync_api import sync_playwright

        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, headless=True, args=FLAGS)
            try:
                yield cls(browser, pictures)
            finally:
                browser.close()

    @contextmanager
    def window(self, server: Server, *, width: int = 1280, height: int = 800, **options: Any) -> Iterator[Window]:
        """A window on a server."""
        context = self.browser.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(PATIENCE)
        try:
            yield Window(context, server, self.pictures)
        finally:
            context.close()

    @contextmanager
    def shared_tab(self, server: Server, *, width: int = 1280, height: int = 800) -> Iterator[SharedTab]:
        """One page of JupyterLab for many tests."""
        shared = SharedTab(self, server, {"width": width, "height": height})
        try:
            yield shared
        finally:
            shared.close()


class Window:
    """Tabs that share cookies."""

    def __init__(self, context: Any, server: Server, pictures: Path) -> None:
        self.context = context
        self.server = server
        self.pictures = pictures
        self.events = EventBus(context)

    def tab(self, notebook: str, *, application: str = "lab") -> Tab:
        """Open a notebook, which must have a kernel or get one."""
        page = self.context.new_page()
        tab = Tab(page, self)
        path = quote(notebook)
        # Without `reset` JupyterLab opens what the tab before it had open, too.
        where = f"lab/tree/{path}?reset&" if application == "lab" else f"notebooks/{path}?"
        tab.go(f"{self.server.url}{where}token={TOKEN}")
        return tab


class SharedTab:
    """A page that each test finds as if it had just been loaded, with a notebook of its own.

    To load JupyterLab takes a processor 8 s, to open a notebook in it less than one.  A page that cannot be put back is
    closed, and the next test loads another.
    """

    def __init__(self, desktop: Desktop, server: Server, size: dict[str, int]) -> None:
        self._desktop, self._server, self._size = desktop, server, size
        self._open = ExitStack()
        self._tab: Tab | None = None

    @contextmanager
    def notebook(self, name: str) -> Iterator[Tab]:
        """Open a notebook; in the end no kernel and no image is left on the server."""
        try:
            if self._tab is None:
                self._tab = self._open.enter_context(self._desktop.window(self._server, **self._size)).tab(name)
            else:
                self._tab.open(name)
            yield self._tab
        finally:
            self._put_back()

    def close(self) -> None:
        """Close the page."""
        self._tab = None
        self._open.close()

    def _put_back(self) -> None:
        from playwright.sync_api import Error as NotPutBack

        if self._tab is not None and self._tab.was_reloaded:
            self.close()  # the launcher, for which `put_back` waits, does not come in a page that was reloaded
        try:
            if self._tab is not None:
                self._tab.put_back(self._size)
            end_kernels(self._server)
            if self._tab is not None:
                self._tab.settle()
        except NotPutBack as error:
            print(f"The page is not used again: {error}")
            with suppress(NotPutBack):  # the page may have crashed
                if self._tab is not None:
                    print(f"It shows {self._tab.page.locator('.jp-Dialog').all_inner_texts()}.")
            self.close()
            end_kernels(self._server)


class Tab:
    """One notebook in one tab."""

    def __init__(self, page: Any, window: Window) -> None:
        self.page = page
        self.window = window
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.was_reloaded = False
        page.add_init_script(NOTE_WAKING)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(f"{request.method} {request.url}"))

    def go(self, url: str) -> None:
        self.page.goto(url)
        self.ready()

    def open(self, notebook: str) -> None:
        """Open a notebook in the page that is there, with nothing noted yet."""
        self.page.evaluate("window.waking = []")
        self.complaints.clear()
        self.requests.clear()
        self.page.evaluate(OPEN, notebook)
        self.ready()

    def put_back(self, size: dict[str, int]) -> None:
        """Close everything but the page, which shows in a window of that size what a fresh one shows."""
        for page in self.window.context.pages:
            if page is not self.page:
                page.close()
        self.page.unroute_all()
        self.window.events.reconnect()
        self.page.set_viewport_size(size)
        self.page.mouse.move(0, 0)  # what lies under the mouse stays
        self.page.evaluate(PUT_BACK)
        for left in (".jp-NotebookPanel", ".jp-Dialog", ".lm-Menu"):
            self.page.wait_for_selector(left, state="detached", timeout=5000)
        # It comes when the last document has gone; later, it would cover the next test's.
        self.page.wait_for_selector(".jp-Launcher", timeout=20_000)

    def settle(self) -> None:
        """Wait until nothing is notified any more."""
        self.page.wait_for_function(NO_TOASTS, polling=100, timeout=5000)

    def ready(self) -> None:
        """Wait until the notebook has a kernel that our button knows."""
        self.page.wait_for_selector(f"{NOTEBOOK} .jp-Cell")
        self.page.wait_for_selector(BUTTON)

    def reload(self) -> None:
        self.was_reloaded = True
        self.page.reload()
        self.ready()

    # -- what is seen

    @property
    def phase(self) -> str:
        return self.page.locator(BUTTON).first.get_attribute("data-phase")

    def wait_for_phase(self, *phases: str) -> None:
        """Wait until the button shows one of them; should it not, say what it shows and what the server says."""
        button = BUTTON.removesuffix("[data-phase]")
        try:
            self.page.wait_for_selector(", ".join(f"{button}[data-phase={phase}]" for phase in phases))
        except Exception as error:
            toasts = self.page.locator(TOAST).all_inner_texts()
            kernels = self.window.server.get("gpu-ckpt/kernels")
            raise AssertionError(f"not {phases} but {self.phase!r}; {toasts=}; the server: {kernels}") from error

    @property
    def tooltip(self) -> str:
        return self.page.locator(BUTTON).first.get_attribute("title")

    def wait_for_tooltip(self, text: str) -> None:
        """Wait until the button's tooltip has a text: it may change a moment after the rest of the page."""
        until(lambda: text in self.tooltip or self.page.wait_for_timeout(20), f"{text!r} in the tooltip")

    @property
    def badge(self) -> str:
        """Return the badge's text; empty where it is not shown."""
        found = self.page.locator(BADGE).first
        return found.inner_text() if found.is_visible() else ""

    def wait_for_badge(self, text: str) -> None:
        """The badge and the button are two widgets of the toolbar: after a reload either may be there first."""
        self.page.locator(BADGE, has_text=re.compile(f"^{re.escape(text)}$")).first.wait_for()

    def output(self, index: int) -> str:
        return (
            self.page.locator(f"{NOTEBOOK} .jp-CodeCell")
            .nth(index)
            .locator(".jp-OutputArea")
            .first.inner_text()
            .strip()
        )

    def wait_for_output(self, index: int, text: str) -> None:
        """One output of the cell is that text."""
        cell = self.page.locator(f"{NOTEBOOK} .jp-CodeCell").nth(index)
        cell.locator(".jp-OutputArea-output", has_text=re.compile(rf"^\s*{re.escape(text)}\s*$")).first.wait_for()

    def toast(self, text: str) -> Any:
        """The notification with that text, once it is shown."""
        found = self.page.locator(TOAST, has_text=re.compile(text)).first
        found.hover(trial=True)  # it has slid in
        return found

    def is_within_sight(self, selector: str) -> bool:
        """Return whether the whole element lies in the window, and nothing lies over its middle."""
        return self.page.locator(selector).first.evaluate(
            """element => {
              const { left, right, top, bottom } = element.getBoundingClientRect();
              const within = left >= 0 && top >= 0 && right <= innerWidth && bottom <= innerHeight && right > left;
              return within && element.contains(document.elementFromPoint((left + right) / 2, (top + bottom) / 2));
            }"""
        )

    def picture(self, name: str, **options: Any) -> Path:
        """A screenshot."""
        path = self.window.pictures / f"{name}.png"
        self.page.screenshot(path=path, **options)
        return path

    # -- what is done

    def run(self, index: int) -> None:
        """Click into a cell and press Ctrl-Enter; returns at once."""
        cell = self.page.locator(f"{NOTEBOOK} .jp-CodeCell").nth(index)
        cell.locator(".cm-content").first.click()
        self.page.keyboard.press("Control+Enter")

    def taken(self, index: int) -> bool:
        """Return whether the cell has been sent (or has run): its prompt is not empty any more."""
        cell = self.page.locator(f"{NOTEBOOK} .jp-CodeCell").nth(index)
        return cell.locator(".jp-InputPrompt").first.inner_text().strip() not in ("", "[ ]:")

    def run_in_spite_of_dialogs(self, index: int) -> bool:
        """Run a cell as a user who first has to click dialogs away; return whether the cell was taken."""
        from playwright.sync_api import TimeoutError as PlaywrightTimeout

        try:
            # The last one is what the dialog proposes, or all it has: "Close".
            for dialog in self.page.locator(".jp-Dialog").all():
                dialog.locator(".jp-Dialog-footer button").last.click(timeout=2000)
            self.page.locator(f"{NOTEBOOK} .jp-CodeCell").nth(index).locator(".cm-content").first.click(timeout=2000)
        except PlaywrightTimeout:  # one came, or went, meanwhile
            return False
        self.page.keyboard.press("Control+Enter")
        return self.taken(index)

    def choose(self, label: str) -> float:
        """Open the button's menu and click an item; the time of the click."""
        self.page.locator(BUTTON).first.click()
        item = self.page.locator(".lm-Menu .lm-Menu-itemLabel", has_text=re.compile(f"^{re.escape(label)}$")).first
        item.wait_for()
        at = time.monotonic()
        item.click()
        return at

    def kernel_id(self) -> str:
        """The id of the kernel of the only session; one of a page before may end a moment later."""

        def only() -> list[dict[str, Any]]:
            found = self.window.server.get("api/sessions")
            return found if len(found) == 1 else []

        (session,) = until(only, "a single session")
        return session["kernel"]["id"]

    def quiet(self, besides: str = "\0") -> None:
        """Assert that nothing on the page failed, ``besides`` what the application does wrong without us."""
        ours = [complaint for complaint in self.complaints if besides not in complaint]
        assert ours == [], ours


def end_kernels(server: Server) -> None:
    """Shut down all kernels of a server, and delete their images."""
    for session in server.get("api/sessions"):
        server.ask("DELETE", f"api/sessions/{session['id']}")
    # The image of a kernel that was shut down asleep is kept, and would be another test's sleeper.
    for image in server.get("gpu-ckpt/images"):
        server.ask("DELETE", f"gpu-ckpt/images/{image['id']}?force=true")


def write_notebook(server: Server, name: str, *cells: str) -> str:
    """A notebook in the server's directory."""
    spec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in cells], metadata={"kernelspec": spec}
    )
    nbformat.write(book, server.home / "work" / name)
    return name


@contextmanager
def lab(
    home: Path,
    base: Path,
    *,
    config: str = "",
    module: str = "jupyterlab",
    python: str | Path = sys.executable,
    **settings: Any,
) -> Iterator[Server]:
    """A server with a front end, of the environment of ``python``; ``settings`` are this extension's."""
    wishes = {
        "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        "jupyter-gpu-ckpt/plugin": settings.pop("ours", {}),
        **settings,
    }
    for name, values in wishes.items():
        file = home / "config" / "lab" / "user-settings" / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    ours = """
import jupyterlab.commands
jupyterlab.commands._yarn_config = lambda logger: {"yarn config": {}, "npm config": {}}  # or Node is run to read it
c.IdlePolicy.suspend_after = c.IdlePolicy.checkpoint_after = 0
c.LabApp.expose_app_in_browser = True
"""
    with server(home, base, config=ours + config, module=module, python=python) as running:
        yield running
