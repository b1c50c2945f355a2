"""Device memory in the browser, on a server whose GPUs are fakes (`fake_host`); all else is real."""

from __future__ import annotations

import re

import pytest
from desktop import BADGE, lab, write_notebook
from fake_gpus import CONFIG, GIB, GPU

from jupyter_gpu_ckpt.testing.fake_host import allocation_cell


@pytest.fixture(scope="module")
def jupyter(tmp_path_factory, base, chromium, criu_binary):
    with lab(tmp_path_factory.mktemp("gpus"), base, config=CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def page(desktop, jupyter):
    """JupyterLab, loaded once."""
    with desktop.shared_tab(jupyter, width=1440) as page:
        yield page


@pytest.fixture
def tab(page, jupyter):
    name = write_notebook(jupyter, "train.ipynb", "x = 41\nprint('ready')", "print(x + 1)")
    with page.notebook(name) as tab:
        tab.wait_for_phase("running")
        tab.run(0)
        tab.wait_for_output(0, "ready")
        jupyter.run(tab.kernel_id(), allocation_cell({GPU: 2 * GIB}))
        tab.page.locator(BADGE, has_text="2.0 GiB").wait_for()
        yield tab
        tab.quiet()


def test_the_badge_says_what_is_held_and_what_was_freed(tab):
    tab.choose("Suspend kernel")
    tab.wait_for_phase("suspended")
    tab.toast("suspended: 2.0 GiB of GPU memory freed")
    assert tab.badge == "asleep, 2.0 GiB freed"
    live = lambda: tab.page.locator(BADGE).first.get_attribute("aria-live")  # noqa: E731
    assert live() == "polite"
    tab.run(1)
    tab.wait_for_output(1, "42")
    tab.page.locator(BADGE, has_text="2.0 GiB").wait_for()
    assert tab.badge == "2.0 GiB"
    assert live() == "off"  # a screen reader would read each change aloud


def test_the_panel_shows_the_device_memory_of_each_kernel_and_frees_it(tab):
    tab.page.locator('li[data-id="gpu-ckpt-panel"]').click()
    panel = tab.page.locator("#gpu-ckpt-panel")
    panel.get_by_text("2.0 GiB of 16.0 GiB in use").wait_for()
    assert panel.locator("rect.jp-mod-share0").count() == 1
    assert panel.locator(".jp-gpuCkpt-sparkline polyline").get_attribute("points")
    tab.picture("gpu-panel")
    listing = re.compile(r"/gpu-ckpt/kernels(\?|$)")
    tab.page.route(listing, lambda route: route.fulfill(status=503, json={"message": "Too busy."}))
    panel.get_by_text("Free memory").click()
    tab.toast("No memory was freed on .* Too busy.")
    tab.page.unroute(listing)
    panel.get_by_text("Free memory").click()
    tab.page.locator(".jp-Dialog", has_text="frees 2.0 GiB").wait_for()
    tab.page.locator(".jp-Dialog .jp-mod-accept").click()
    tab.wait_for_phase("suspended")
    panel.get_by_text("0 B of 16.0 GiB in use").wait_for()
    panel.locator("li", has_text="train.ipynb").get_by_text("Wake").click()
    tab.wait_for_phase("running")
    panel.get_by_text("2.0 GiB of 16.0 GiB in use").wait_for()
    panel.get_by_text("GPU-hours").wait_for()
