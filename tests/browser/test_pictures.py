"""The two pictures of docs/ that show more than one test does, taken anew from real servers whose GPUs are fakes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from desktop import BADGE, NOTEBOOK, end_kernels, lab, write_notebook
from fake_gpus import CONFIG, GIB, GPU
from film import PAUSE, Film, for_docs

from jupyter_gpu_ckpt.testing.fake_host import allocation_cell

pytestmark = for_docs


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory, base, chromium, criu_binary):
    with lab(tmp_path_factory.mktemp("pictures"), base, config=CONFIG) as running:
        yield running


@pytest.fixture(autouse=True)
def no_sessions_left(jupyter) -> Iterator[None]:
    yield
    end_kernels(jupyter)


def test_flow(desktop, jupyter):
    training = "import numpy as np\nmodel = np.random.rand(90_000_000)\nprint('trained')"
    name = write_notebook(jupyter, "train.ipynb", training, "print(model.nbytes >> 20, 'MiB')")
    with desktop.window(jupyter, width=1200, height=480) as window:
        tab = window.tab(name)
        tab.wait_for_phase("running")
        tab.page.keyboard.press("Control+B")  # the side bar takes a third of the window
        tab.page.locator("#jp-left-stack").wait_for(state="hidden")
        tab.run(0)
        tab.wait_for_output(0, "trained")
        jupyter.run(tab.kernel_id(), allocation_cell({GPU: 3 * GIB}))
        tab.page.locator(BADGE, has_text="3.0 GiB").wait_for()
        film = Film(tab)
        film.frame(PAUSE)
        tab.page.locator(f"{NOTEBOOK} .jp-gpuCkpt-button [data-phase]").first.click()
        item = tab.page.locator(".lm-Menu .lm-Menu-itemLabel", has_text="Put kernel to sleep").first
        item.hover()
        film.frame(PAUSE)
        item.click()
        film.until(BADGE, "asleep")
        tab.toast("is asleep")
        film.frame(PAUSE)
        tab.run(1)
        film.until(f"{NOTEBOOK} .jp-OutputArea-output", "686 MiB")
        tab.toast("is awake again")
        film.frame(2 * PAUSE)
        film.save("flow")
        tab.quiet()


def test_dark(desktop, jupyter):
    with desktop.window(jupyter, width=1440, height=772) as window:
        for name, size in (("explore.ipynb", 1.4), ("eval.ipynb", 2.8), ("train.ipynb", 3.2)):
            tab = window.tab(write_notebook(jupyter, name, "model = dict()\nprint('ready')", "print(len(model))"))
            tab.wait_for_phase("running")
            tab.run(0)
            tab.wait_for_output(0, "ready")
            (kernel_id,) = (s["kernel"]["id"] for s in jupyter.get("api/sessions") if s["path"] == name)
            jupyter.run(kernel_id, allocation_cell({GPU: int(size * GIB)}))
            if name != "train.ipynb":
                jupyter.do(kernel_id, "checkpoint" if name == "explore.ipynb" else "suspend")
                tab.page.close()
        tab.page.get_by_role("menuitem", name="Settings").click()
        tab.page.locator(".lm-Menu-itemLabel", has_text="Theme").first.hover()
        tab.page.locator(".lm-Menu-itemLabel", has_text="JupyterLab Dark").first.click()
        tab.page.locator('body[data-jp-theme-name="JupyterLab Dark"]').wait_for(state="attached")
        tab.page.locator('li[data-id="jp-running-sessions"]').first.click()
        tab.page.locator('li[data-id="gpu-ckpt-panel"]').click()
        tab.choose("Suspend kernel")
        tab.wait_for_phase("suspended")
        panel = tab.page.locator("#gpu-ckpt-panel")
        for name in ("train.ipynb", "explore.ipynb", "eval.ipynb"):
            panel.locator("li", has_text=name).get_by_text("Wake").wait_for()
        tab.toast("GPU memory freed")
        tab.picture("dark")
        tab.quiet()
