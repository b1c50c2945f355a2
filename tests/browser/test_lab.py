"""A user's work in JupyterLab: real server, real CRIU, real browser."""

from __future__ import annotations

import re
import time

import pytest
from desktop import BADGE, BUTTON, OPEN, SLEEPING_WIDGET, STATUS, TOAST, WAKING, lab, write_notebook
from harness import DAEMON, END_DAEMON
from live import TOKEN, server, until

SLIDER = ".widget-slider .noUi-handle, .jupyter-widgets.widget-hslider .noUi-handle"
CELLS = ("x = 41\nprint('ready')", "print(x + 1)")


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory, base, chromium, criu_binary):
    # Widgets' state is saved in the notebook, too: without a kernel a page could show them from there, as if alive.
    widgets = {"@jupyter-widgets/jupyterlab-manager/plugin": {"saveState": True}}
    with lab(tmp_path_factory.mktemp("lab"), base, **widgets) as running:
        yield running


@pytest.fixture
def cells() -> tuple[str, ...]:
    """The notebook's cells; a test may have its own."""
    return CELLS


@pytest.fixture
def name(request) -> str:
    """The notebook's name, by the test's."""
    return "_".join(request.node.name.split("_")[1:3]) + ".ipynb"


@pytest.fixture
def tab(page, jupyter, name, cells):
    """A fresh notebook, open, its first cell run."""
    with page.notebook(write_notebook(jupyter, name, *cells)) as tab:
        tab.wait_for_phase("running")
        tab.run(0)
        tab.wait_for_output(0, "ready")
        yield tab
        tab.quiet()


def test_a_kernel_is_checkpointed_by_the_button_and_woken_by_a_cell(tab):
    tab.wait_for_tooltip("running")
    tab.choose("Put kernel to sleep")
    tab.wait_for_phase("checkpointed")
    tab.toast("asleep, in .* s")
    tab.wait_for_badge("asleep")
    tab.picture("checkpointed")
    tab.run(1)
    tab.wait_for_output(1, "42")
    said = tab.page.evaluate("window.waking")
    assert said and all(re.fullmatch(r"\[\*\] waking kernel … \d+ %", text) for text in said), said
    tab.wait_for_phase("running")
    assert tab.page.locator(WAKING).count() == 0
    assert tab.badge == ""


def test_what_is_clicked_shows_before_the_server_has_answered(tab):
    """Within 200 ms of the click, by the page's own clock; the request to the server is held back meanwhile."""
    held = []
    tab.page.route(re.compile("/checkpoint"), lambda route: held.append(route))
    tab.page.evaluate(
        """() => {
          window.seen = new Promise(resolve => {
            let clicked = 0;
            document.addEventListener('mouseup', () => (clicked = performance.now()), true);
            new MutationObserver(() => {
              if (clicked && document.querySelector('.jp-gpuCkpt-button [data-phase=checkpointing]')) {
                resolve(performance.now() - clicked);
              }
            }).observe(document.body, { subtree: true, childList: true, attributes: true });
          });
        }"""
    )
    tab.choose("Put kernel to sleep")
    milliseconds = tab.page.evaluate("window.seen")
    until(lambda: held or tab.page.wait_for_timeout(20))
    tab.wait_for_phase("checkpointing")
    print(f"from the click to the change: {milliseconds:.0f} ms")
    held.pop().continue_()
    tab.wait_for_phase("checkpointed")


def test_reloading_the_page_wakes_nothing_and_shows_what_is(tab):
    tab.choose("Put kernel to sleep")
    tab.wait_for_phase("checkpointed")
    kernel_id = tab.kernel_id()
    before = tab.window.server.get(f"gpu-ckpt/kernels/{kernel_id}")
    tab.reload()
    tab.wait_for_phase("checkpointed")
    tab.wait_for_badge("asleep")
    after = tab.window.server.get(f"gpu-ckpt/kernels/{kernel_id}")
    assert (after["state"], after["image"]) == ("checkpointed", before["image"])
    tab.run(1)
    tab.wait_for_output(1, "42")


@pytest.mark.parametrize("width", [1280, 600])
def test_that_a_kernel_sleeps_is_within_sight_and_in_reach_however_narrow_the_window(tab, width):
    tab.choose("Put kernel to sleep")
    tab.wait_for_phase("checkpointed")
    tab.page.locator('li[data-id="gpu-ckpt-panel"]').click()  # 1280 pixels with a panel are too few for the badge
    tab.page.set_viewport_size({"width": width, "height": 800})
    tab.page.locator(BADGE).first.wait_for(state="hidden")
    until(lambda: tab.is_within_sight(STATUS) or tab.page.wait_for_timeout(50))
    status = tab.page.locator(STATUS)
    assert status.inner_text() == "Kernel asleep"
    assert re.match(r"The kernel of \S+\.ipynb is asleep. Wake it now", status.get_attribute("aria-label"))
    tab.picture(f"status-{width}")
    status.press("Enter")
    status.wait_for(state="hidden")
    until(lambda: tab.window.server.get(f"gpu-ckpt/kernels/{tab.kernel_id()}")["state"] == "running")


def test_a_kernel_that_prints_is_awake_whatever_events_were_missed(tab):
    tab.choose("Put kernel to sleep")
    tab.wait_for_phase("checkpointed")
    tab.window.events.cut()
    tab.run(1)
    tab.wait_for_output(1, "42")
    tab.wait_for_phase("running")
    tab.page.locator(BADGE).first.wait_for(state="hidden")


def test_a_protection_that_was_set_elsewhere_shows_in_the_tooltip(tab):
    tab.window.events.say("kernel_protection/v1", tab.kernel_id(), protected_until=time.time() + 7200)
    tab.wait_for_tooltip("protected for 2 h")


def test_a_notification_of_progress_goes_when_the_verb_ends(tab):
    """JupyterLab draws late: what is dismissed right after an update would stay."""
    events, kernel_id = tab.window.events, tab.kernel_id()
    step = {"step": "dump", "status": "running", "bytes": 1, "expected_bytes": 2}
    events.state(kernel_id, "dumping", "running")
    progress = tab.toast("Checkpointing")
    for fraction in (0.2, 0.6, 0.99):
        events.say("kernel_step/v1", kernel_id, verb="checkpoint", fraction=fraction, **step)
    events.state(kernel_id, "checkpointed", "dumping")
    done = tab.toast("is asleep")
    progress.wait_for(state="detached")
    done.hover()  # it would go by itself otherwise
    events.state(kernel_id, "restoring", "checkpointed")
    done.wait_for(state="detached")
    events.state(kernel_id, "running", "restoring")


def test_a_notification_of_progress_that_was_closed_stays_closed(tab):
    events, kernel_id = tab.window.events, tab.kernel_id()
    step = {"verb": "checkpoint", "step": "dump", "status": "running", "bytes": 1, "expected_bytes": 2}
    events.state(kernel_id, "dumping", "running")
    progress = tab.toast("Checkpointing")
    tab.page.wait_for_function("at => Date.now() > at", arg=1000 * time.time() + 1100)  # it counts as drawn
    progress.get_by_title("Hide notification").click()
    progress.wait_for(state="detached")
    events.say("kernel_step/v1", kernel_id, fraction=0.5, **step)
    tab.wait_for_tooltip("50 %")
    tab.page.wait_for_function("at => Date.now() > at", arg=1000 * time.time() + 1100)  # what is drawn is drawn by now
    assert tab.page.locator(TOAST, has_text="Checkpointing").count() == 0
    events.state(kernel_id, "running", "dumping")


def test_a_notification_ends_before_the_next_of_its_kind(tab):
    server = tab.window.server
    server.run(tab.kernel_id(), DAEMON)
    known: set[str] = set()

    def refused() -> bool:
        job = server.get(f"gpu-ckpt/kernels/{tab.kernel_id()}")["job"]
        fresh = job is not None and job["status"] == "failed" and job["id"] not in known
        known.update([job["id"]] if fresh else [])
        return fresh

    for _ in range(3):  # the phase between is shown for some milliseconds, which nobody can wait for
        tab.choose("Put kernel to sleep")
        until(lambda: refused() or tab.page.wait_for_timeout(20))
        toast = tab.toast("was not put to sleep. Nothing was lost.")
    until(lambda: tab.page.locator(TOAST).count() == 1 or tab.page.wait_for_timeout(20))
    assert "End these child processes and try again; or suspend the kernel." in toast.inner_text()
    server.run(tab.kernel_id(), END_DAEMON)
    tab.choose("Put kernel to sleep")
    tab.wait_for_phase("checkpointed")
    toast.wait_for(state="detached")


def test_while_a_cell_runs_it_says_so_and_offers_to_sleep_when_that_has_finished(tab):
    server, kernel_id, status = tab.window.server, tab.kernel_id(), tab.page.locator(STATUS)
    offer = "Sleep when the cell has finished"
    with server.busy(kernel_id):
        tab.choose("Why can't this kernel sleep?")
        dialog = tab.page.locator(".jp-Dialog")
        dialog.get_by_text("A cell is running").wait_for()
        assert "Not now" in dialog.inner_text()
        tab.picture("busy")
        dialog.get_by_role("button", name=offer).click()
        status.get_by_text("Kernel sleeps after this cell").wait_for()
        tab.wait_for_tooltip("sleeps when its cells have finished")
        status.click()
        status.wait_for(state="hidden")
        tab.choose("Put kernel to sleep")
        toast = tab.toast("was not put to sleep. Nothing was lost.")
        tab.picture("busy-refused")
        assert "A cell is running." in toast.inner_text()
        toast.get_by_title(offer).click()
        status.get_by_text("Kernel sleeps after this cell").wait_for()
        tab.wait_for_phase("running")
    tab.wait_for_phase("checkpointed")
    tab.run(1)
    tab.wait_for_output(1, "42")


def test_the_page_polls_nothing_while_events_arrive(tab):
    tab.choose("Put kernel to sleep")
    tab.wait_for_phase("checkpointed")
    tab.run(1)
    tab.wait_for_output(1, "42")
    tab.wait_for_phase("running")
    tab.requests.clear()
    # JupyterLab itself polls its kernels meanwhile: two of its looks are ten seconds and more.
    looks = lambda: [r for r in tab.requests if re.search(r"/api/kernels\?", r)]  # noqa: E731
    until(lambda: len(looks()) >= 2 or tab.page.wait_for_timeout(200), 120)
    ours = [request for request in tab.requests if "/gpu-ckpt/" in request]
    assert len(ours) <= 2, ours  # what the wake before may still have had under way


def test_two_tabs_on_one_kernel_see_the_same(tab, name):
    other = tab.window.tab(name)
    other.wait_for_phase("running")
    tab.choose("Put kernel to sleep")
    other.wait_for_phase("checkpointed")
    tab.wait_for_phase("checkpointed")
    other.run(1)
    other.wait_for_output(1, "42")
    tab.wait_for_phase("running")
    other.quiet()


def test_refused_it_says_why_and_that_nothing_was_lost(tab):
    server = tab.window.server
    server.run(tab.kernel_id(), DAEMON)
    tab.choose("Why can't this kernel sleep?")
    dialog = tab.page.locator(".jp-Dialog .jp-gpuCkpt-explain")
    dialog.wait_for()
    assert "Not now" in dialog.inner_text() and "sleep" in dialog.inner_text()
    tab.picture("explain")
    tab.page.locator(".jp-Dialog .jp-mod-accept").click()
    tab.choose("Put kernel to sleep")
    toast = tab.toast("was not put to sleep. Nothing was lost.")
    tab.picture("failure")
    toast.get_by_text("Details").click()
    details = tab.page.locator(".jp-gpuCkpt-failures li")
    details.wait_for()
    assert "1 child process that prevents it" in details.inner_text()
    assert details.get_by_role("link").count() == 0  # this server names no page about errors
    tab.wait_for_phase("running")


def test_by_keyboard_and_the_command_palette(tab):
    tab.page.locator(BUTTON).first.focus()
    tab.page.keyboard.press("ArrowDown")
    tab.page.locator(".lm-Menu.jp-gpuCkpt-menu").wait_for()
    tab.page.keyboard.press("Enter")  # the first item: suspend
    tab.wait_for_phase("suspended")
    tab.page.keyboard.press("Control+Shift+C")
    tab.page.locator(".lm-CommandPalette-input").fill("wake kernel")
    tab.page.locator(".lm-CommandPalette-item", has_text="Wake kernel").first.wait_for()
    tab.page.keyboard.press("Enter")
    tab.wait_for_phase("running")
    name = tab.page.locator(BUTTON).first.get_attribute("aria-label")
    assert name and "running" in name.lower()


def test_a_protection_is_set_and_ended_from_the_menu(tab):
    def left() -> float:
        policy = tab.window.server.get(f"gpu-ckpt/kernels/{tab.kernel_id()}")["policy"]
        return policy["protected_s"] if policy else 0.0

    def protect(label: str) -> None:
        tab.page.locator(BUTTON).first.click()
        tab.page.locator(".lm-Menu-itemLabel", has_text="Protect kernel for").first.hover()
        tab.page.locator(".lm-Menu-itemLabel", has_text=label).first.click()

    protect("2 h")
    tab.toast("protected from idle policies for 2 h")
    until(lambda: left() > 7000)
    tab.wait_for_tooltip("protected for 2 h")
    protect("End protection")
    until(lambda: left() == 0)


def test_sleepers_among_the_running_sessions_can_be_woken_and_deleted(tab, name):
    server, page, kernel_id = tab.window.server, tab.page, tab.kernel_id()
    images = lambda: {each["id"]: each["kernel_id"] for each in server.get("gpu-ckpt/images")}  # noqa: E731
    assert server.ask("POST", f"gpu-ckpt/kernels/{kernel_id}/save", json={"name": "before", "when": "idle"}).ok
    until(lambda: images() or page.wait_for_timeout(50))
    saved = images()
    page.locator('li[data-id="jp-running-sessions"]').first.click()
    tab.choose("Put kernel to sleep")
    tab.wait_for_phase("checkpointed")
    sleeper = page.locator(".jp-gpuCkpt-sleeper", has_text=name)
    sleeper.first.wait_for()
    assert sleeper.count() == 1  # its save point is none
    assert "MiB" in sleeper.inner_text()
    tab.picture("sleepers")
    sleeper.click(button="right")
    page.locator(".lm-Menu-itemLabel", has_text="Wake kernel").wait_for()
    page.keyboard.press("Escape")

    # A command is for the notebook in front, wherever a context menu was opened before.
    page.evaluate(OPEN, write_notebook(server, "other.ipynb", "1"))
    tab.wait_for_phase("running")
    page.evaluate("window.jupyterapp.commands.execute('gpu-ckpt:checkpoint')")
    tab.wait_for_phase("checkpointed")
    other = page.locator(".jp-gpuCkpt-sleeper", has_text="other.ipynb")
    other.hover()
    other.locator(".jp-RunningSessions-itemShutdown").click()
    page.locator(".jp-Dialog", has_text="lost for good").wait_for()
    page.locator(".jp-Dialog .jp-mod-accept").click()
    other.wait_for(state="detached")
    assert kernel_id in images().values()

    page.evaluate(OPEN, name)
    sleeper.get_by_text("Wake").click()
    tab.wait_for_phase("running")
    sleeper.wait_for(state="detached")
    tab.choose("Put kernel to sleep")
    tab.wait_for_phase("checkpointed")
    sleeper.wait_for()
    title = page.locator(".jp-AccordionPanel-title", has_text="Sleeping kernels")
    title.locator(".jp-RunningSessions-shutdownAll").click()
    page.locator(".jp-Dialog", has_text="Delete the images of all sleeping kernels").wait_for()
    page.locator(".jp-Dialog .jp-mod-accept").click()
    until(lambda: len(images()) < 2 or page.wait_for_timeout(50))
    assert images() == saved  # nor is a save point a kernel that sleeps
    # JupyterLab has something to send to a kernel whose notebook is open when it ends.
    tab.complaints[:] = [each for each in tab.complaints if "Kernel is dead" not in each]


class TestWidgets:
    @pytest.fixture
    def cells(self):
        return (
            "import ipywidgets\nfrom IPython.display import display\nfrom jupyter_gpu_ckpt import CheckpointPanel\n"
            "slider = ipywidgets.IntSlider(value=3)\ndisplay(slider, CheckpointPanel())\nprint('ready')",
            "print(slider.value)",
        )

    def test_a_slider_and_a_panel_survive_and_the_slider_wakes(self, tab):
        thumb = tab.page.locator(SLIDER).first
        thumb.wait_for()
        tab.choose("Put kernel to sleep")
        tab.wait_for_phase("checkpointed")
        tab.picture("widgets")
        thumb.focus()
        tab.page.keyboard.press("ArrowRight")
        tab.wait_for_phase("running")
        tab.run(1)
        tab.wait_for_output(1, "4")

    def test_after_a_reload_they_sleep_visibly_until_somebody_wakes_them(self, tab, name):
        tab.page.locator(SLIDER).first.wait_for()
        tab.page.keyboard.press("Control+s")
        book = tab.window.server.home / "work" / name
        until(lambda: "IntSliderModel" in book.read_text() or tab.page.wait_for_timeout(50))
        tab.choose("Put kernel to sleep")
        tab.wait_for_phase("checkpointed")
        tab.reload()
        sleeping = tab.page.locator(SLEEPING_WIDGET)
        sleeping.nth(1).wait_for()
        assert sleeping.all_inner_texts() == ["This widget sleeps with its kernel.\nWake the kernel"] * 2
        assert tab.page.get_by_text("Loading widget").count() == tab.page.locator(SLIDER).count() == 0
        tab.page.locator(".jp-StatusBar-Widget", has_text="| Idle").wait_for()
        tab.picture("sleeping-widgets")
        server = tab.window.server  # the page of the test before may have left a session
        (kernel_id,) = (each["kernel"]["id"] for each in server.get("api/sessions") if each["path"] == name)
        assert server.get(f"gpu-ckpt/kernels/{kernel_id}")["state"] == "checkpointed"
        sleeping.first.get_by_role("button").click()
        tab.page.locator(SLIDER).first.wait_for()
        sleeping.first.wait_for(state="detached")
        tab.run(1)
        tab.wait_for_output(1, "3")


def test_a_server_that_is_restarted_under_an_open_tab(desktop, tmp_path, runtime_base, criu_binary):
    home = tmp_path / "home"
    with lab(home, runtime_base) as first:
        name = write_notebook(first, "restarted.ipynb", *CELLS)
        port = first.port
        window = desktop.window(first)
        view = window.__enter__()
        tab = view.tab(name)
        tab.wait_for_phase("running")
        tab.run(0)
        tab.wait_for_output(0, "ready")
    try:
        with lab(home, runtime_base, config=f"c.ServerApp.port = {port}\nc.ServerApp.port_retries = 0\n"):
            tab.wait_for_phase("checkpointed")
            # JupyterLab says in a dialog that the server was away; it may come while one presses the keys.
            until(lambda: tab.run_in_spite_of_dialogs(1), 90)
            tab.wait_for_output(1, "42")
            tab.wait_for_phase("running")
            tab.picture("restarted")
    finally:
        window.__exit__(None, None, None)


def test_a_kernel_without_a_server_is_opened_from_the_running_sessions(desktop, tmp_path, runtime_base, criu_binary):
    home = tmp_path / "home"
    with server(home, runtime_base) as first:
        name = write_notebook(first, "left.ipynb", *CELLS)
        write_notebook(first, "other.ipynb", "1")
        session = {"path": name, "name": name, "type": "notebook", "kernel": {"name": "python3"}}
        first.run(first.ask("POST", "api/sessions", json=session).json()["kernel"]["id"], CELLS[0])
    with (
        lab(home, runtime_base, config="c.KernelPersistence.attach_on_start = False\n") as second,
        desktop.window(second) as window,
    ):
        tab = window.tab("other.ipynb")
        tab.page.locator('li[data-id="jp-running-sessions"]').first.click()
        tab.page.locator(".jp-gpuCkpt-sleeper-name", has_text="left.ipynb").click()
        tab.wait_for_phase("checkpointed")
        tab.run(1)
        tab.wait_for_output(1, "42")


def test_where_the_host_cannot_the_button_says_why(desktop, tmp_path, runtime_base, chromium):
    config = "import os\nos.environ['JUPYTER_GPU_CKPT_CRIU'] = '/nowhere'\n"
    with lab(tmp_path / "home", runtime_base, config=config) as running, desktop.window(running) as window:
        tab = window.tab(write_notebook(running, "plain.ipynb", *CELLS))
        tab.wait_for_phase("plain")
        tab.wait_for_tooltip("CRIU")
        assert tab.page.locator(BUTTON).first.get_attribute("aria-disabled") == "true"
        tab.run(0)
        tab.wait_for_output(0, "ready")
        tab.picture("plain")
        tab.quiet()


def test_in_notebook_7(desktop, tmp_path, runtime_base, criu_binary):
    pytest.importorskip("notebook", reason="notebook 7 is not installed (the extra `test` has it)")
    with lab(tmp_path / "home", runtime_base, module="notebook") as running, desktop.window(running) as window:
        tab = window.tab(write_notebook(running, "classic.ipynb", *CELLS), application="notebook")
        tab.wait_for_phase("running")
        tab.run(0)
        tab.wait_for_output(0, "ready")
        tab.choose("Put kernel to sleep")
        tab.wait_for_phase("checkpointed")
        tab.wait_for_badge("asleep")
        tab.picture("notebook7")
        tab.page.set_viewport_size({"width": 600, "height": 800})
        tab.page.locator(BADGE).first.wait_for(state="hidden")
        until(lambda: tab.is_within_sight(STATUS) or tab.page.wait_for_timeout(50))
        tab.picture("notebook7-narrow")
        tree = window.context.new_page()
        tree.goto(f"{running.url}tree?token={TOKEN}")
        tree.get_by_role("tab", name="Running").click()
        tree.locator(".jp-gpuCkpt-sleeper", has_text="classic.ipynb").get_by_text("Wake").wait_for()
        tree.close()
        tab.run(1)
        tab.wait_for_output(1, "42")
        tab.wait_for_phase("running")
        # Notebook 7.6 itself, also with this extension disabled: it lists settings before they are loaded.
        tab.quiet(besides="reading 'schema'")
