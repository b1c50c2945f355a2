"""Save points in the browser: made from the menu, shown as a graph, gone back to; and a template of one."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from axe import assert_accessible, assert_accessible_in_both_themes, tab_until
from desktop import NOTEBOOK, Tab, lab, write_notebook
from fake_gpus import CONFIG
from live import TOKEN
from waiting import until

PANEL = "#gpu-ckpt-panel"
POINTS = ".jp-gpuCkpt-savePoints"


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory, base, chromium, criu_binary):
    with lab(tmp_path_factory.mktemp("points"), base, config=CONFIG) as running:
        yield running


@pytest.fixture
def tab(page, jupyter):
    """A notebook whose first cell was run."""
    with page.notebook(write_notebook(jupyter, "train.ipynb", "x = 41\nprint('ready')", "print(x + 1)")) as tab:
        tab.wait_for_phase("running")
        tab.run(0)
        tab.wait_for_output(0, "ready")
        yield tab
        tab.quiet()


def save(tab, name: str, code: str = "") -> None:
    """Run a cell, and make a save point of that."""
    server, kernel_id = tab.window.server, tab.kernel_id()
    server.run(kernel_id, code)
    job = server.do(kernel_id, "save", {"name": name})
    assert job["status"] == "done", job


def open_points(tab):
    """The save points in the panel, listed."""
    panel = tab.page.locator(PANEL)
    if not panel.is_visible():
        tab.page.locator('li[data-id="gpu-ckpt-panel"]').click()
    # The kernel of the test before may be listed for a moment, but no more with the notebook's name.
    tab.page.evaluate("window.jupyterapp.serviceManager.sessions.refreshRunning()")
    points = panel.locator("li", has_text="train.ipynb").locator(POINTS)
    if points.get_attribute("open") is None:
        points.get_by_text("Save points", exact=True).click()
    return points


def in_kernel_menu(tab, label: str) -> None:
    """Choose from JupyterLab's menu *Kernel*."""
    tab.page.get_by_role("menuitem", name="Kernel", exact=True).click()
    tab.page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{re.escape(label)}$")).click()


def run_second_cell(tab, output: str) -> None:
    """Run ``print(x + 1)``, whose output has that text then."""
    tab.run(1)
    cell = tab.page.locator(f"{NOTEBOOK} .jp-CodeCell").nth(1)
    cell.locator(".jp-OutputArea-output", has_text=output).first.wait_for()
    # A cell before would refuse to go back: the kernel is busy then.
    tab.page.locator(".jp-StatusBar-Widget", has_text="| Idle").wait_for()


def test_the_menu_makes_a_save_point_and_the_page_is_saved_before(tab):
    page, server = tab.page, tab.window.server
    dialog, file = page.locator(".jp-Dialog"), server.home / "work" / "train.ipynb"
    cell = page.locator(f"{NOTEBOOK} .jp-CodeCell").nth(1)
    cell.locator(".cm-content").first.click()
    page.keyboard.type("# typed")
    in_kernel_menu(tab, "Save point…")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", dialog.locator("input").input_value())
    assert_accessible(page, ".jp-Dialog")
    dialog.locator("input").fill("by menu")
    page.keyboard.press("Enter")
    points = open_points(tab)
    points.get_by_role("listitem", name=re.compile("^by menu after cell 1 · ")).wait_for()
    assert "# typed" in file.read_text()
    kept = server.get(f"gpu-ckpt/kernels/{tab.kernel_id()}/saves/by menu")["notebook"]
    assert "# typed" in kept["cells"][1]["source"]

    # A page that cannot be saved is named, and the kernel is saved all the same.
    failing = re.compile(r"/api/contents/train\.ipynb")
    page.route(failing, lambda route: route.abort() if route.request.method == "PUT" else route.continue_())
    cell.locator(".cm-content").first.click()
    page.keyboard.type("# once more")
    points.get_by_role("button", name="Save now").click()
    dialog.locator("input").fill("without page")
    page.keyboard.press("Enter")
    dialog.get_by_text("File Save Error for train.ipynb").wait_for()  # JupyterLab's own
    dialog.get_by_role("button").last.click()
    tab.toast("train.ipynb was not saved; the save point has it as it is on the disk")
    points.get_by_role("listitem", name=re.compile("^without page ")).wait_for()
    page.unroute(failing)
    tab.complaints.clear()  # the write that was prevented


def test_the_palette_has_it_and_a_sleeping_kernel_is_not_saved(tab):
    page, command = tab.page, "gpu-ckpt:save"
    is_enabled = "command => window.jupyterapp.commands.isEnabled(command)"
    page.keyboard.press("Control+Shift+C")
    page.locator(".lm-CommandPalette-input").fill("save point")
    page.locator(".lm-CommandPalette-item", has_text="Save point…").click()
    page.locator(".jp-Dialog", has_text="Name of the save point").get_by_role("button", name="Cancel").click()
    assert page.evaluate(is_enabled, command)
    tab.choose("Put kernel to sleep")
    tab.wait_for_phase("checkpointed")
    assert not page.evaluate(is_enabled, command)


def test_two_branches_of_lineage_are_two_lanes_and_are_said_in_words(tab):
    server, kernel_id = tab.window.server, tab.kernel_id()
    save(tab, "loaded", "x = 1")
    save(tab, "trained", "x = 2")
    assert server.do(kernel_id, "back", {"name": "loaded"})["status"] == "done"
    save(tab, "trained otherwise", "x = 3")
    points = open_points(tab)
    items = points.get_by_role("listitem")
    until(lambda: items.count() == 4 or tab.page.wait_for_timeout(50))
    facts = r"after cell \d+ · [\d.]+ [KM]iB(, [\d.]+ [KM]iB alone)? · [\d.]+ s ago"
    expected = (
        f"trained otherwise {facts} · from loaded",
        f"before going back .* automatic · {facts} · from trained",
        f"trained {facts} · from loaded",
        f"loaded {facts}",
    )
    for index, name in enumerate(expected):
        item = points.get_by_role("listitem", name=re.compile(f"^{name}$"))
        assert item.count() == 1, items.all_inner_texts()
        assert item.evaluate("(item, index) => item === item.parentElement.children[index]", index)
    dots = points.locator("circle").evaluate_all("dots => dots.map(dot => dot.getAttribute('cx'))")
    assert dots == [dots[0], dots[1], dots[1], dots[0]]
    assert float(dots[0]) < float(dots[1])
    heights = items.evaluate_all(
        "items => items.map(item => [item, item.querySelector('svg')].map(e => e.clientHeight))"
    )
    assert all(abs(row - graph) <= 1 for row, graph in heights), "the lines of two rows meet"
    assert_accessible_in_both_themes(tab, PANEL, "save-points")


def test_of_two_files_one_is_put_back_and_the_other_left(tab):
    page, server, kernel_id = tab.page, tab.window.server, tab.kernel_id()
    work = server.home / "work"
    opened = "one, two = open('one.log', 'w'), open('two.log', 'w')"
    write = "for file in (one, two): _ = file.write({!r}); file.flush()".format
    save(tab, "begun", f"{opened}\n{write('then ')}")
    server.run(kernel_id, f"x = 7\n{write('now')}")
    points, dialog = open_points(tab), page.locator(".jp-Dialog")

    def ask() -> None:
        points.get_by_role("button", name="Go back to begun", exact=True).click()
        dialog.locator(".jp-mod-accept").click()
        dialog.get_by_text("Some files are not as they were").wait_for()

    ask()
    accept = dialog.locator(".jp-mod-accept")
    first, second = (dialog.get_by_role("group", name=re.compile(rf"{name}\.log$")) for name in ("one", "two"))
    until(lambda: accept.is_disabled() or page.wait_for_timeout(20))
    assert dialog.locator("input:checked").count() == 0
    dialog.get_by_role("button", name="All as now").click()
    assert [each.get_by_label("As it is now").is_checked() for each in (first, second)] == [True, True]
    until(lambda: accept.is_enabled() or page.wait_for_timeout(20))
    dialog.get_by_role("button", name="Cancel").click()
    dialog.wait_for(state="detached")
    assert server.run(kernel_id, "print(x)") == "7"

    ask()
    first.get_by_label("As it was then").check()
    assert accept.is_disabled()
    second.get_by_label("As it is now").check()
    assert_accessible_in_both_themes(tab, ".jp-Dialog", "files")
    accept.click()
    points.get_by_role("button", name=re.compile("^Go back to before going back")).wait_for()
    assert server.run(kernel_id, "print(x)") == "41"
    assert [(work / f"{name}.log").read_text() for name in ("one", "two")] == ["then ", "then now"]
    tab.wait_for_phase("running")


def test_by_keys_alone_a_kernel_goes_back_and_a_save_point_is_deleted(tab):
    page, server, kernel_id = tab.page, tab.window.server, tab.kernel_id()
    save(tab, "before", "import random; large = random.randbytes(80 << 20)")
    save(tab, "later", "x = 7")
    points, dialog = open_points(tab), page.locator(".jp-Dialog")
    points.get_by_role("button", name="Go back to before", exact=True).wait_for()
    points.locator("summary").focus()
    tab_until(page, '[aria-label="Go back to before"]', 5)
    page.keyboard.press("Enter")
    dialog.get_by_text("Go back to before?").wait_for()
    page.wait_for_function("document.activeElement.closest('.jp-Dialog') !== null")
    page.keyboard.press("Enter")
    points.get_by_role("button", name=re.compile("^Go back to before going back")).wait_for()
    assert server.run(kernel_id, "print(x)") == "41"
    tab.wait_for_phase("running")
    points.locator("summary").focus()
    tab_until(page, '[aria-label="Delete before"]', 20)
    page.keyboard.press("Space")
    (point,) = (each for each in server.get(f"gpu-ckpt/kernels/{kernel_id}/saves") if each["name"] == "before")
    assert point["bytes_alone"] < point["bytes"], "the later one shares memory with it"
    dialog.get_by_text("Delete the save point before?").wait_for()
    alone = re.search(r"This frees (.+) of disk space", dialog.inner_text())[1]
    assert re.search(rf", {re.escape(alone)} alone ·", points.get_by_role("listitem").last.inner_text())
    page.wait_for_function("document.activeElement.closest('.jp-Dialog') !== null")
    page.keyboard.press("Enter")
    points.get_by_role("button", name="Delete before", exact=True).wait_for(state="detached")


def test_a_sleeping_kernel_goes_back_and_loses_a_save_point(tab):
    page, server = tab.page, tab.window.server
    save(tab, "first")
    save(tab, "second", "x = 7")
    tab.choose("Put kernel to sleep")
    tab.wait_for_phase("checkpointed")
    points = open_points(tab)
    points.get_by_role("button", name="Delete second", exact=True).click()
    page.locator(".jp-Dialog .jp-mod-accept").click()
    points.get_by_role("button", name="Delete second", exact=True).wait_for(state="detached")
    tab.wait_for_phase("checkpointed")
    points.get_by_role("button", name="Go back to first", exact=True).click()
    page.locator(".jp-Dialog .jp-mod-accept").click()
    tab.wait_for_phase("running")
    run_second_cell(tab, "42")
    points.get_by_role("listitem", name=re.compile("^before going back .* automatic · ")).wait_for()
    assert len(server.get(f"gpu-ckpt/kernels/{tab.kernel_id()}/saves")) == 2


def test_a_restart_by_mistake_is_undone(tab):
    page = tab.page
    in_kernel_menu(tab, "Restart Kernel…")
    page.locator(".jp-Dialog .jp-mod-accept").click()
    points = open_points(tab)
    undo = points.get_by_role("button", name=re.compile("^Go back to before a restart"))
    undo.wait_for()
    tab.wait_for_phase("running")
    run_second_cell(tab, "NameError")
    undo.click()
    page.locator(".jp-Dialog .jp-mod-accept").click()
    points.get_by_role("button", name=re.compile("^Go back to before going back")).wait_for()
    tab.wait_for_phase("running")
    run_second_cell(tab, "42")


def test_a_template_is_in_the_launcher_and_its_kernel_has_everything_loaded(
    desktop, tmp_path, runtime_base, criu_binary
):
    home = tmp_path / "home"
    environment = {**os.environ, "IPYTHONDIR": str(home / "ipython")}
    environment |= {f"JUPYTER_{name.upper()}_DIR": str(home / name) for name in ("config", "data", "runtime")}
    with lab(home, runtime_base) as running, desktop.window(running) as window:
        kernel_id = running.start_kernel()
        running.run(kernel_id, "x = 41")
        assert running.do(kernel_id, "save", {"name": "prepared"})["status"] == "done"
        command = [sys.executable, "-m", "jupyter_gpu_ckpt", "template", "create", "model-ready", "--from", "prepared"]
        made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert made.returncode == 0, made.stderr
        page = window.context.new_page()
        page.goto(f"{running.url}lab?reset&token={TOKEN}")
        card = page.locator(".jp-LauncherCard", has_text="model-ready (template of Python 3").first
        card.wait_for()
        page.screenshot(path=window.pictures / "template.png")
        card.click()
        tab = Tab(page, window)
        tab.ready()
        tab.wait_for_phase("running")
        page.locator(f"{NOTEBOOK} .cm-content").first.click()
        page.keyboard.type("print(x + 1)")
        page.keyboard.press("Control+Enter")
        tab.wait_for_output(0, "42")
        tab.quiet()
