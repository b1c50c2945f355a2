"""Idle kernels in the browser: the introduction, the countdown, memory, failures, narrow windows, keyboard, languages.

One server whose idle policy counts down after ten seconds and never gets to the end; 16 fake GPUs; all else is real.
"""

from __future__ import annotations

import re

import pytest
from axe import assert_accessible, assert_accessible_in_both_themes, tab_until
from desktop import BUTTON, NOTEBOOK, STATUS, TOAST, WAKING, end_kernels, lab, write_notebook
from fake_gpus import GIB, SUPPORT
from harness import DAEMON, END_DAEMON
from waiting import until

from jupyter_gpu_ckpt.testing.fake_host import allocation_cell

GPUS = [f"GPU-fake-{number:02}" for number in range(16)]
CONFIG = f"""
import sys
from pathlib import Path
sys.path.append({SUPPORT!r})
from jupyter_gpu_ckpt.testing.fake_host import install
install({{uuid: 16 << 30 for uuid in {GPUS!r}}}, Path(c.GpuCkptProvisioner.image_dir))
from jupyter_gpu_ckpt.doctor import checks
as_json = checks.as_json
checks.as_json = lambda found: {{**(document := as_json(found)), "fit": {{**document["fit"], "gpu": True}}}}
c.IdlePolicy.suspend_after, c.IdlePolicy.checkpoint_after, c.IdlePolicy.notice = 300, 1800, 290
c.IdlePolicy.interval = 0.2
c.GpuCkptApp.error_page = "https://docs.example/runbook.html#{{code}}"
"""
CARD = ".jp-gpuCkpt-card"
PANEL = "#gpu-ckpt-panel"
WIDTHS = (400, 600, 800, 1024, 1280, 1600)
LONG = "a_notebook_whose_name_is_much_longer_than_what_any_status_bar_has_space_for_" * 2 + ".ipynb"
#: The id of the kernel of the document in front, once that is the one at ``path``.
KERNEL_IN_FRONT = """
path => {
  const context = window.jupyterapp.shell.currentWidget?.context;
  return context?.path === path && context.sessionContext.session?.kernel?.id;
}
"""
#: Closes the document in front; its copy on the disk stays as it is.
CLOSE_FRONT = """
() => {
  const widget = window.jupyterapp.shell.currentWidget;
  widget.context.model.dirty = false;
  widget.close();
}
"""


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory, base, chromium, criu_binary):
    with lab(tmp_path_factory.mktemp("idle"), base, config=CONFIG) as running:
        yield running


@pytest.fixture
def tab(page, jupyter, request):
    """A notebook whose kernel has memory on several GPUs."""
    name = getattr(request, "param", "train.ipynb")
    with page.notebook(write_notebook(jupyter, name, "x = 41\nprint('ready')", "print(x + 1)")) as tab:
        tab.wait_for_phase("running")
        tab.run(0)
        tab.wait_for_output(0, "ready")
        jupyter.run(tab.kernel_id(), allocation_cell(dict.fromkeys(GPUS[:3], GIB)))
        yield tab
        tab.quiet()


def open_panel(tab):
    panel = tab.page.locator(PANEL)
    if not panel.is_visible():
        tab.page.locator('li[data-id="gpu-ckpt-panel"]').click()
    panel.get_by_text("GPU 15").first.wait_for()
    return panel


def test_the_introduction_is_shown_until_it_is_closed_and_to_no_later_window(desktop, jupyter):
    name = write_notebook(jupyter, "first.ipynb", "1")
    with desktop.window(jupyter) as window:
        tab = window.tab(name)
        tab.wait_for_phase("running")
        page = tab.page
        card = page.locator(CARD)
        card.wait_for()
        text = card.inner_text()
        for part in ("idle for 5 min leaves the GPU", "After 30 min", "with every variable", "--protect 2h"):
            assert part in text
        assert_accessible(page, CARD)
        page.screenshot(path=window.pictures / "introduction.png")
        # The page's beginning, where the keyboard is after a load that gives it to no notebook.
        page.evaluate("document.documentElement.tabIndex = -1; document.documentElement.focus()")
        tab_until(page, f"{CARD} button", 5)
        page.keyboard.press("Enter")
        card.wait_for(state="hidden")
        (settings,) = (jupyter.home / "config").rglob("jupyter-gpu-ckpt/plugin.jupyterlab-settings")
        until(lambda: '"introduction": false' in settings.read_text() or page.wait_for_timeout(50))
    with desktop.window(jupyter) as window:
        tab = window.tab(name)
        tab.wait_for_phase("running")
        page = tab.page
        page.locator('li[data-id="gpu-ckpt-panel"]').click()
        page.locator(PANEL).get_by_text("GPU 15").first.wait_for()
        assert page.locator(CARD).count() == 0
    end_kernels(jupyter)


def test_an_idle_kernel_is_counted_down_and_can_be_kept(tab):
    page, kernel_id = tab.page, tab.kernel_id()
    status = page.locator(STATUS)
    status.get_by_text(re.compile(r"^sleeps in 4:\d\d$")).wait_for()  # the policy itself says so
    assert "leaves the GPU soon" in status.get_attribute("aria-label")
    assert_accessible(page, STATUS)
    status.click()
    tab.toast("train.ipynb stays awake, for 5 min if nothing uses it")
    status.wait_for(state="hidden")
    policy = tab.window.server.get(f"gpu-ckpt/kernels/{kernel_id}")["policy"]
    assert policy["idle_s"] < 60 and policy["next"] == "suspend"
    tab.window.events.say("kernel_plan/v1", kernel_id, next="checkpoint", due_in_s=45.0)
    status.get_by_text(re.compile(r"^sleeps in 0:4\d$")).wait_for()
    tab.picture("countdown")
    tab.run(1)
    tab.wait_for_output(1, "42")
    status.wait_for(state="hidden")  # before the policy says so: the kernel was used


@pytest.mark.parametrize("tab", [LONG], indirect=True)
def test_nothing_overflows_in_any_window(tab):
    """In each state of the status bar's item, with 16 GPUs in the panel and a failure in its list."""
    page, events, kernel_id = tab.page, tab.window.events, tab.kernel_id()
    panel = open_panel(tab)
    # The kernelspec's name, as long as some are.
    page.add_style_tag(content=".jp-StatusBar-Left > :not(.jp-gpuCkpt-status) { min-width: 300px }")
    step = {"verb": "checkpoint", "step": "dump", "status": "running", "bytes": 1, "expected_bytes": 2}
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        for state in ("counted down", "moving", "asleep"):
            if state == "counted down":
                events.say("kernel_plan/v1", kernel_id, next="suspend", due_in_s=280.0)
            elif state == "moving":
                events.state(kernel_id, "dumping", "running")
                events.say("kernel_step/v1", kernel_id, fraction=0.99, **step)
            else:
                events.state(kernel_id, "checkpointed", "dumping")
            page.locator(STATUS).wait_for()
            until(lambda: tab.is_within_sight(STATUS) or page.wait_for_timeout(50), f"{state} at {width}")
            over = page.locator(".jp-gpuCkpt-status").evaluate(
                """node => {
                  const bar = document.getElementById('jp-main-statusbar');
                  const { width, height } = node.getBoundingClientRect();
                  const inside = [...node.querySelectorAll('button, span')].map(each => each.offsetWidth);
                  return [width - innerWidth / 2, height - bar.clientHeight, Math.max(...inside) - width];
                }"""
            )
            assert max(over) <= 0, (width, state, over)
        events.state(kernel_id, "running", "checkpointed")
        wide = panel.evaluate("node => node.scrollWidth - node.clientWidth")
        assert wide <= 0, (width, wide)
    page.set_viewport_size({"width": 400, "height": 800})
    events.say("kernel_plan/v1", kernel_id, next="suspend", due_in_s=280.0)
    page.locator(STATUS, has_text="keep it").wait_for()
    tab.picture("narrow")


def test_the_panel_shows_host_memory_and_child_processes(tab):
    server, kernel_id = tab.window.server, tab.kernel_id()
    server.run(kernel_id, "import subprocess\nchildren = [subprocess.Popen(['sleep', '9' * 60]) for _ in range(2)]")
    panel = open_panel(tab)
    row = panel.locator("li", has_text="train.ipynb").first
    row.get_by_text("2 child processes").wait_for()  # within one round of the open panel
    facts = re.compile(r"running · 1.0 GiB on the GPU · [\d.]+ MiB of host memory · idle [\d.]+ s")
    row.get_by_text(facts).wait_for()
    row.get_by_text("2 child processes").click()
    row.get_by_text(f"sleep {'9' * 60}").first.wait_for()
    assert_accessible(tab.page, PANEL)
    tab.picture("children")
    server.run(kernel_id, "for child in children: child.kill(), child.wait()")


def test_variables_are_saved_and_come_back_in_the_panel(tab):
    page, server, kernel_id = tab.page, tab.window.server, tab.kernel_id()
    row = open_panel(tab).locator("li", has_text="train.ipynb").first
    row.get_by_text("on the GPU").wait_for()
    failing = re.compile(r"/saves(\?|$)"), lambda route: route.fulfill(status=503, json={"message": "Too busy."})
    page.route(*failing)
    row.get_by_text("Save points").click()
    row.get_by_text("The save points could not be loaded: Too busy.").wait_for()
    page.unroute(failing[0])
    row.get_by_role("button", name="Save now").click()
    page.locator(".jp-Dialog input").fill("before")
    page.keyboard.press("Enter")
    back = row.get_by_role("button", name="Go back to before", exact=True)
    back.wait_for()
    assert_accessible(page, PANEL)
    server.run(kernel_id, "x = 7; y = [1]")
    row.get_by_role("button", name="Compare before", exact=True).press("Enter")
    dialog = page.locator(".jp-Dialog")
    dialog.get_by_role("row", name=re.compile("^x changed int")).wait_for()
    dialog.get_by_role("row", name=re.compile("^y added")).wait_for()
    assert dialog.get_by_role("status").inner_text().startswith("1 changed, 1 added, 0 gone, ")
    assert_accessible_in_both_themes(tab, ".jp-Dialog", "comparison")
    dialog.get_by_role("button", name="Close").press("Enter")
    dialog.wait_for(state="detached")
    row.get_by_role("button", name="Branch from before", exact=True).press("Enter")
    dialog.get_by_text("a copy of the notebook").wait_for()
    assert_accessible_in_both_themes(tab, ".jp-Dialog", "branch-plan")
    dialog.get_by_role("button", name="Start").press("Enter")
    dialog.wait_for(state="detached")
    branched = page.wait_for_function(KERNEL_IN_FRONT, arg="train-Copy1.ipynb").json_value()
    assert server.run(branched, "print(x)") == "41"
    tab.picture("branch")
    page.evaluate(CLOSE_FRONT)
    page.get_by_role("tab", name="train-Copy1.ipynb").wait_for(state="detached")
    assert server.ask("DELETE", f"api/kernels/{branched}").ok
    cell, file = page.locator(f"{NOTEBOOK} .jp-CodeCell").nth(1), server.home / "work" / "train.ipynb"
    cell.locator(".cm-content").first.click()
    page.keyboard.type("# not saved")
    back.click()
    dialog.get_by_text("saved before", exact=False).first.wait_for()
    dialog.get_by_label("The notebook goes back, too").check()
    assert_accessible_in_both_themes(tab, ".jp-Dialog", "going-back")
    dialog.locator(".jp-mod-accept").click()
    undo = row.get_by_role("button", name=re.compile("^Go back to before going back"))
    undo.wait_for()  # a cell before would refuse it: the kernel is busy then
    assert server.run(kernel_id, "print(x)") == "41"
    tab.wait_for_phase("running")
    cell.get_by_text("# not saved").wait_for(state="detached")
    until(lambda: "# not saved" not in file.read_text())
    undo.click()
    dialog.get_by_label("The notebook goes back, too").check()
    dialog.locator(".jp-mod-accept").click()
    cell.get_by_text("# not saved").wait_for()
    assert "# not saved" in file.read_text(), "it was saved before it was replaced"
    assert server.run(kernel_id, "print(x)") == "7"
    tab.wait_for_phase("running")
    delete = row.get_by_role("button", name="Delete before", exact=True)
    failing = re.compile(r"/saves/before(\?|$)"), failing[1]
    page.route(*failing)
    delete.click()
    page.locator(".jp-Dialog .jp-mod-accept").click()
    tab.toast("The save point before was not deleted. Too busy.")
    page.unroute(failing[0])
    delete.click()
    page.locator(".jp-Dialog .jp-mod-accept").click()
    back.wait_for(state="detached")
    # JupyterLab requests a subshell of each kernel, and complains where a notebook is closed before the answer.
    tab.complaints[:] = [each for each in tab.complaints if "create_subshell_request" not in each]


def test_a_cell_that_waits_for_its_kernel_says_so_to_everybody(tab):
    page, events, kernel_id = tab.page, tab.window.events, tab.kernel_id()
    with tab.window.server.busy(kernel_id):
        tab.run(1)
        events.state(kernel_id, "restoring", "checkpointed")
        page.locator(WAKING).wait_for()
        assert_accessible(page, WAKING)
    tab.wait_for_output(1, "42")
    page.locator(WAKING).wait_for(state="detached")


def test_failures_are_listed_with_what_helps_and_stay_when_it_has_helped(tab):
    server, page = tab.window.server, tab.page
    server.run(tab.kernel_id(), DAEMON)
    tab.choose("Put kernel to sleep")
    toast = tab.toast("was not put to sleep. Nothing was lost.")
    toast.get_by_text("Details").click()
    failure = page.locator(".jp-gpuCkpt-failures li")
    until(lambda: page.evaluate("document.activeElement.dataset.failure") or page.wait_for_timeout(50))
    text = failure.inner_text()
    for part in ("train.ipynb was not put to sleep.", "1 child process that prevents it", "End these child processes"):
        assert part in text
    link = failure.get_by_role("link", name="CHILD_PROCESSES")
    assert link.get_attribute("href") == "https://docs.example/runbook.html#child_processes"
    assert_accessible(page, PANEL)
    tab.picture("failures")
    with server.busy(tab.kernel_id()):  # refused at once: the server remembers nothing of it
        tab.choose("Put kernel to sleep")
        failure.nth(1).wait_for()
        assert "KERNEL_BUSY" in failure.first.inner_text()
    server.run(tab.kernel_id(), END_DAEMON)
    tab.choose("Put kernel to sleep")
    tab.wait_for_phase("checkpointed")
    assert failure.count() == 2
    page.locator(TOAST).first.wait_for(state="detached")


def test_by_keys_alone_a_kernel_sleeps_and_wakes(tab):
    page = tab.page
    page.locator(f"{NOTEBOOK} .jp-Cell").first.click()
    page.keyboard.press("Escape")  # from here on the mouse is away
    page.keyboard.press("Control+Shift+C")
    page.keyboard.type("put kernel to sleep")
    page.locator(".lm-CommandPalette-item.lm-mod-active", has_text="Put kernel to sleep").wait_for()
    page.keyboard.press("Enter")
    tab.wait_for_phase("checkpointed")
    tab_until(page, STATUS)
    page.keyboard.press("Enter")
    tab.wait_for_phase("running")
    tab_until(page, f"{NOTEBOOK} .jp-Toolbar")
    for _ in range(20):  # the toolbar is one stop; the arrow keys move in it
        if page.evaluate("selector => document.activeElement.matches(selector)", BUTTON):
            break
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    menu = page.locator(".lm-Menu.jp-gpuCkpt-menu")
    menu.wait_for()
    assert_accessible(page, ".jp-gpuCkpt-button")  # the menu's elements are Lumino's
    page.keyboard.press("Enter")  # its first item
    tab.wait_for_phase("suspended")
    page.keyboard.press("Control+Shift+C")
    page.keyboard.type("can't this kernel sleep")
    page.locator(".lm-CommandPalette-item.lm-mod-active", has_text="Why can't this kernel sleep?").wait_for()
    page.keyboard.press("Enter")
    page.locator(".jp-Dialog .jp-gpuCkpt-explain").wait_for()
    assert_accessible(page, ".jp-Dialog .jp-gpuCkpt-explain")
    page.wait_for_function("document.activeElement.closest('.jp-Dialog') !== null")
    page.keyboard.press("Escape")
    page.locator(".jp-Dialog").wait_for(state="detached")
    tab_until(page, STATUS)
    page.keyboard.press("Enter")
    tab.wait_for_phase("running")


def test_in_german(desktop, tmp_path, runtime_base, criu_binary):
    language = {"@jupyterlab/translation-extension/plugin": {"locale": "de_DE"}}
    with (
        lab(tmp_path / "home", runtime_base, config=CONFIG, **language) as running,
        desktop.window(running) as window,
    ):
        tab = window.tab(write_notebook(running, "train.ipynb", "print('ready')"))
        tab.page.locator(CARD).get_by_text("Verstanden").click()
        tab.wait_for_phase("running")
        tab.run(0)
        tab.wait_for_output(0, "ready")
        tab.choose("Kernel schlafen legen")
        tab.wait_for_phase("checkpointed")
        tab.toast("train.ipynb ist im Schlaf, nach .* s")
        tab.wait_for_badge("im Schlaf")
        tab.page.locator('li[data-id="gpu-ckpt-panel"]').click()
        tab.page.locator(PANEL).get_by_text("Wecken").wait_for()
        tab.picture("german")
        tab.quiet()
